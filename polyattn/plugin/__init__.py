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
        requires=("acme",), install="pip install polyattn-acme", contract_version=5,
        devices=("cpu", "npu"),
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

from polyattn._base.arrays import Array, sum_to, with_rank
from polyattn._base.forks import CUT_BY_FORK
from polyattn._base.host import native
from polyattn._base.progress import progress
from polyattn._base.quantized import Quantized
from polyattn._base.span import Span
from polyattn._base.threads import thread_count
from polyattn._core.call.features import FEATURES
from polyattn._core.call.gradients import Gradients
from polyattn._core.call.operands import Cotangents, Operands, Residuals, Tangents
from polyattn._core.call.pages import in_one_piece
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.expression import Expression, joined, split
from polyattn._core.expressions.indices import PointIndices, saturating_sum
from polyattn._core.expressions.masks import Mask
from polyattn._core.expressions.patterns import CachePadding
from polyattn._core.expressions.scores import Score
from polyattn._core.expressions.selections import selection_of
from polyattn._core.tiles.axes import one_batch_axis
from polyattn._core.tiles.band import band, column_span
from polyattn._core.tiles.coverage import TileGrid, TileQuery, combined_mask
from polyattn._core.tiles.indices import Indices
from polyattn._core.tiles.visibility import cleared, empty_rows, may_have_empty_rows, visible_keys
from polyattn.plugin.backend import PROMISES, Backend, Kernel, undeclared
from polyattn.plugin.primitives import BackendPrimitives
from polyattn.plugin.spec import CONTRACT_VERSION, BackendSpec, KernelSpec

__all__ = [  # noqa: RUF022 -- in the groups of the reference, in the order of need
    # The spec and the backend.
    "CONTRACT_VERSION", "BackendSpec", "KernelSpec", "Backend", "BackendPrimitives",
    "native", "progress", "thread_count", "CUT_BY_FORK",
    # The kernel, and the records that it receives and returns.
    "Kernel", "FEATURES", "PROMISES", "Problem", "Operands", "Quantized", "Residuals", "Cotangents",
    "Tangents", "Gradients", "Array", "undeclared", "in_one_piece", "one_batch_axis", "with_rank",
    "sum_to",
    # Masks and score rules.
    "Mask", "Score", "Expression", "split", "joined", "CachePadding", "Indices", "PointIndices",
    "band", "visible_keys", "may_have_empty_rows", "empty_rows", "cleared", "saturating_sum",
    "selection_of",
    # Tiles.
    "Span", "column_span", "combined_mask", "TileGrid", "TileQuery",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
