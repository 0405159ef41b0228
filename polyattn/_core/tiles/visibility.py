"""Keys that are hidden from a fused engine: by its own options, and the rest by one array.

A kernel reads causal and window as options of the engine (`band_from`), makes an array of the rest
(`visible_keys`, `finite_bias`, `score_axes`) unless it is too large (`made_shape`), calls the
engine, and clears the rows without keys (`empty_rows`, `cleared`) if there may be any
(`may_have_empty_rows`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

from polyattn._base.arguments import Shape
from polyattn._base.arrays import Array, broadcast_shapes, with_rank
from polyattn._base.span import Span
from polyattn._base.tracing import is_compiling
from polyattn._core.call.operands import Operands
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.patterns import Padding
from polyattn._core.tiles.axes import one_batch_axis
from polyattn._core.tiles.band import band
from polyattn._core.tiles.indices import Indices

# ---- from static facts ----


def band_from(problem: Problem, first: int) -> tuple[int | None, int | None] | None:
    """Return causal and window as an engine counts them that puts row 0 at the position `first`.

    That is 0 if the engine counts from the first key, S − L if from the last. The result says how
    many keys a row sees before and after its position, which may be less than 0: None where an end
    hides no key, None for both if the query offset is an array.
    """
    low, high = band(problem)
    if low is None and high is None:
        return None, None
    if problem.query_offset is None:
        return None
    return None if low is None else first - low, None if high is None else high - first


def may_have_empty_rows(problem: Problem) -> bool:
    """Return whether a row may see no key, also where only the numbers of the call say it."""
    low, high = band(problem)
    if not problem.masks_by_position_only:
        return True
    if low is None and high is None:
        return False
    if problem.query_offset is None or (high is not None and high < 0):
        return True
    if low is None:
        return False
    return problem.is_symbolic or low > problem.key_length - problem.query_length


def visible_scores(problem: Problem) -> int:
    """Return how many scores of a head causal and window leave; all if the offset is an array."""
    rows, keys = problem.query_length, problem.key_length
    if problem.query_offset is None:
        return rows * keys
    low, high = band(problem)
    before = 0 if low is None else _triangle(rows - 1 + low, rows, keys)
    after = 0 if high is None else _triangle(keys - 1 - high, rows, keys)
    return rows * keys - before - after


def _triangle(longest: int, rows: int, keys: int) -> int:
    """Return the sum of `longest`, `longest` - 1, … over the rows, each from 0 to `keys`."""
    whole = min(max(0, longest - keys), rows)
    longest = max(0, longest - whole)
    count = min(longest, rows - whole)
    return whole * keys + count * (2 * longest - count + 1) // 2


#: A mask of more elements than this, 64 MiB of bools, costs more to make than an engine saves.
LARGEST_MADE = 2**26


def why_too_large(elements: int) -> str | None:
    """Return why no mask of so many elements is made, or None if one can be."""
    if elements <= LARGEST_MADE:
        return None
    made = "" if is_compiling() else f" of {elements:,} elements"  # a symbol, where the batch is
    return f"it would need a mask{made}, above {LARGEST_MADE:,}"


def made_shape(problem: Problem, *, banded: bool, mask: Shape | None = None) -> Shape | None:
    """Return the shape of the mask that must be made for a call; arrays that exist do not count.

    A mask expression or function gives the shape `mask`, by default that of all scores; causal and
    window count where they are `banded`. None if no mask is made, or lengths are unknown.
    """
    if problem.is_symbolic:
        return None
    parts: list[Shape] = []
    if not problem.features.isdisjoint(("mask_mod", "mask_expression")):
        parts.append(problem.scores if mask is None else mask)
    if banded:
        lengths = problem.scores[-2:]
        parts.append((*problem.batch, 1, *lengths) if problem.query_offset is None else lengths)
    return broadcast_shapes(*parts) if parts else None


# ---- the array ----


def visible_keys(
    problem: Problem, x: Operands, xp: Any, keys: Span | None = None, *, banded: bool = True
) -> Array | None:
    """Return which of `keys` each row sees by ``mask=`` and, if `banded`, causal and window.

    It broadcasts to (..., H, L, S). None if no key is hidden.
    """
    rows, columns = Span(0, problem.query_length), keys or Span(0, problem.key_length)
    parts = Indices(problem, xp, x, rows, columns).visible(banded=banded)
    first = next(parts, None)
    return None if first is None else functools.reduce(operator.and_, parts, first)


def finite_bias(
    visible: Array | None, bias: Array | None, hidden: float, dtype: Any, xp: Any
) -> tuple[Array, Array]:
    """Return mask and bias as one bias, for an engine to which −∞ may not be given.

    A hidden key has the bias `hidden`, which is also the least of the others. The second result is
    which keys each row sees, also by the bias: without visible keys, the engine gives a row the
    mean of the values, which the kernel has to clear.
    """
    if bias is None:
        return xp.where(visible, xp.zeros((), dtype=dtype), hidden), visible
    seen = bias != -math.inf
    seen = seen if visible is None else visible & seen
    return xp.where(seen & ~(bias < hidden), bias, hidden), seen


def score_axes(problem: Problem, array: Array, xp: Any) -> Array:
    """Return a mask or bias with the axes (batch item, H, L, S), each whole or of length 1."""
    array = with_rank(array, max(4, len(problem.batch) + 3))
    lead = tuple(array.shape[:-3])
    if len(lead) == 1:
        return array
    if all(isinstance(length, int) and length == 1 for length in lead):
        return array[(*(0,) * (len(lead) - 1), ...)]
    return one_batch_axis(problem, array, xp)


def without_padding(
    problem: Problem, x: Operands, xp: Any, zeroed: Callable[[Array, Array], Array]
) -> Operands:
    """Return operands with 0 in keys and values beyond the lengths of the mask, where NaN may be.

    For an engine that multiplies the weight 0 of a hidden key by its value. `zeroed` is that of the
    backend.
    """
    conditions = getattr(x.mask, "conditions", ()) if x.block_table is None else ()
    lengths = [one.key_lengths for one in conditions if isinstance(one, Padding)]
    for length in lengths:
        if length is not None:
            at = Indices(problem, xp, x, Span(0, problem.query_length), Span(0, problem.key_length))
            used = xp.matrix_transpose(at.column < at.per_item(length))
            x = x._replace(key=zeroed(x.key, used), value=zeroed(x.value, used))
    return x


# ---- rows without keys ----


def empty_rows(mask: Array, xp: Any) -> Array:
    """Return which rows of a mask, or of a bias with −∞, have no visible key: (..., L, 1)."""
    return ~xp.any(mask if mask.dtype == xp.bool else mask != -math.inf, axis=-1, keepdims=True)


def cleared(
    output: Array, logsumexp: Array | None, empty: Array, xp: Any
) -> tuple[Array, Array | None]:
    """Return an engine's results with 0 and −∞ in the rows that `empty_rows` gives."""
    if logsumexp is not None:
        logsumexp = xp.where(empty[..., 0], -math.inf, logsumexp)
    return xp.where(empty, 0, output), logsumexp
