"""What the plugins of polyattn's own wheel use beside the contract; it changes at any time."""

from __future__ import annotations

from polyattn._base.arrays import facts_of, length_of, library_of
from polyattn._base.forks import forkable_lock
from polyattn._base.slices import Slice
from polyattn._base.tracing import constant_when_traced
from polyattn._core.call.checks import examine
from polyattn._core.call.facts import Call
from polyattn._core.call.options import GRADIENT_ARRAYS, GRADIENT_EXPRESSIONS, OPTIONS
from polyattn._core.call.parts import map_arrays, options_of, options_of_part
from polyattn._core.expressions.parts import Part, axes_of_last
from polyattn._core.tiles.axes import fold_heads, reason_against_batch, unfold_heads
from polyattn._core.tiles.band import full_span, is_full
from polyattn._core.tiles.online_softmax import SoftmaxState, initial_state, normalize, or_zero
from polyattn._core.tiles.visibility import (
    band_from,
    finite_bias,
    made_shape,
    score_axes,
    visible_scores,
    why_too_large,
)
from polyattn.plugin.backend import unrounded

__all__ = [
    "GRADIENT_ARRAYS", "GRADIENT_EXPRESSIONS", "OPTIONS", "Call", "Part", "Slice", "SoftmaxState",
    "axes_of_last", "band_from", "constant_when_traced", "examine", "facts_of", "finite_bias",
    "fold_heads", "forkable_lock", "full_span", "initial_state", "is_full", "length_of",
    "library_of", "made_shape", "map_arrays", "normalize", "options_of", "options_of_part",
    "or_zero", "reason_against_batch", "score_axes", "unfold_heads", "unrounded", "visible_scores",
    "why_too_large",
]  # fmt: skip
__dir__ = __all__.copy
