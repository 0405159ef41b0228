"""The contract of a plugin, and everything that a plugin imports from polyattn.

A plugin registers one light `BackendSpec` as an entry point in the group ``polyattn.backends``,
under the name of the spec. Its `implementation` is a `Backend`, loaded when first needed, which may
have `Kernel` objects, better primitives for the array-API kernels, and device placement::

    # pyproject.toml
    [project.entry-points."polyattn.backends"]
    acme = "polyattn_acme:SPEC"

    # polyattn_acme/__init__.py, which must not import acme
    from polyattn.plugin import BackendSpec

    SPEC = BackendSpec(
        name="acme", namespaces=("acme",), implementation="polyattn_acme.backend:AcmeBackend",
        requires=("acme",), install="pip install polyattn-acme", devices=("cpu", "npu"),
    )

    # polyattn_acme/backend.py
    import acme
    from polyattn.plugin import Backend, Kernel

    class Fused(Kernel):
        name = "fused"
        features = frozenset({"causal", "scale"})  # of FEATURES: it gets no others

        def __call__(self, problem, operands, backend):
            query, key, value = operands[:3]  # (..., H, L, D), (..., G, S, D), (..., G, S, E)
            causal = problem.is_causal
            return acme.attention(query, key, value, causal=causal, scale=problem.scale), None

    class AcmeBackend(Backend):
        kernels = (Fused(),)

        def __init__(self):
            super().__init__(acme)

A `KernelSpec` in the group ``polyattn.kernels`` adds kernels to backends that exist already.
"""

from __future__ import annotations

from polyattn._base.arrays import Array, length_of, namespace_of, sum_to, with_rank
from polyattn._base.forks import CUT_BY_FORK, forkable_lock
from polyattn._base.host import native
from polyattn._base.progress import progress
from polyattn._base.quantized import Quantized
from polyattn._base.slices import Slice
from polyattn._base.span import Span
from polyattn._base.threads import thread_count
from polyattn._core.call.features import FEATURES
from polyattn._core.call.gradients import Gradients
from polyattn._core.call.operands import Cotangents, Operands, Residuals, Tangents
from polyattn._core.call.options import GRADIENT_ARRAYS, GRADIENT_EXPRESSIONS, OPTIONS
from polyattn._core.call.pages import in_one_piece
from polyattn._core.call.parts import map_arrays, options_of, options_of_part
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.expression import Expression
from polyattn._core.expressions.indices import PointIndices, saturating_sum
from polyattn._core.expressions.masks import Mask
from polyattn._core.expressions.parts import Part, axes_of_last
from polyattn._core.expressions.patterns import CachePadding
from polyattn._core.expressions.scores import Score
from polyattn._core.tiles.axes import fold_heads, one_batch_axis, reason_against_batch, unfold_heads
from polyattn._core.tiles.band import band, column_span, full_span, is_full
from polyattn._core.tiles.coverage import TileGrid, TileQuery, combined_mask
from polyattn._core.tiles.indices import Indices
from polyattn._core.tiles.online_softmax import (
    SoftmaxState,
    combine,
    initial_state,
    normalize,
    or_zero,
)
from polyattn._core.tiles.visibility import (
    band_from,
    cleared,
    empty_rows,
    finite_bias,
    made_shape,
    may_have_empty_rows,
    score_axes,
    visible_keys,
    visible_scores,
)
from polyattn.plugin.backend import Backend, Kernel, undeclared, unrounded
from polyattn.plugin.primitives import BackendPrimitives
from polyattn.plugin.spec import BackendSpec, KernelSpec
from polyattn.plugin.tools import BackendTools

__all__ = [
    "CUT_BY_FORK",
    "FEATURES",
    "GRADIENT_ARRAYS",
    "GRADIENT_EXPRESSIONS",
    "OPTIONS",
    "Array",
    "Backend",
    "BackendPrimitives",
    "BackendSpec",
    "BackendTools",
    "CachePadding",
    "Cotangents",
    "Expression",
    "Gradients",
    "Indices",
    "Kernel",
    "KernelSpec",
    "Mask",
    "Operands",
    "Part",
    "PointIndices",
    "Problem",
    "Quantized",
    "Residuals",
    "Score",
    "Slice",
    "SoftmaxState",
    "Span",
    "Tangents",
    "TileGrid",
    "TileQuery",
    "axes_of_last",
    "band",
    "band_from",
    "cleared",
    "column_span",
    "combine",
    "combined_mask",
    "empty_rows",
    "finite_bias",
    "fold_heads",
    "forkable_lock",
    "full_span",
    "in_one_piece",
    "initial_state",
    "is_full",
    "length_of",
    "made_shape",
    "map_arrays",
    "may_have_empty_rows",
    "namespace_of",
    "native",
    "normalize",
    "one_batch_axis",
    "options_of",
    "options_of_part",
    "or_zero",
    "progress",
    "reason_against_batch",
    "saturating_sum",
    "score_axes",
    "sum_to",
    "thread_count",
    "undeclared",
    "unfold_heads",
    "unrounded",
    "visible_keys",
    "visible_scores",
    "with_rank",
]
__dir__ = __all__.copy
