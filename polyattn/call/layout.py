"""The layout of axes: every conversion between the caller's axes and the kernels'."""

from __future__ import annotations

from typing import Any

from polyattn.arrays import Array, ArrayFacts, Chunks, index_range, length_of, library_of
from polyattn.call.axes import axes_of
from polyattn.call.describe import Call, Operands
from polyattn.call.gradients import Gradients
from polyattn.expressions.masks import Mask
from polyattn.expressions.scores import Score

__all__ = [
    "as_called",
    "chunks_heads_first",
    "gradients_as_called",
    "heads_first",
    "is_flat",
    "keeps_axes",
    "positions_matter",
]


#: The operands with the axes of a result, and the axis of rows or heads.
_OF_RESULTS = {
    "known_logsumexp": -1,
    "output": -2,
    "output_gradient": -2,
    "logsumexp_gradient": -1,
}


def chunks_heads_first(call: Call) -> tuple[tuple[str, Chunks], ...]:
    """Return the chunks of each array that is cut, on the axes that a kernel knows."""
    operands = {name for name, _ in call.operands()}
    found: list[tuple[str, Chunks]] = []
    for name, facts in call.arrays():
        chunks = facts.chunks
        if chunks is None:
            continue
        if name in operands and len(chunks) == 2:
            chunks = ((1,), *chunks)
        elif name in operands and call.layout == "...LHD":
            *batch, length, heads, size = chunks
            chunks = (*batch, heads, length, size)
        found.append((name, chunks))
    return tuple(found)


def heads_first(call: Call, operands: Operands) -> Operands:
    """Return the operands of a call with the axes that a kernel knows."""
    flat = is_flat(call)
    swapped = call.layout == "...LHD" and not flat
    changed: dict[str, Array] = {}
    for name, facts in call.operands() if swapped or _has_rank_2(call) else ():
        array = getattr(operands, name)
        changed[name] = array[None, ...] if len(facts.shape) == 2 else array
        if swapped and len(facts.shape) != 2:
            changed[name] = _swap(array, -2, -3)
    if isinstance(call.query_offset, ArrayFacts):
        offset: Any = operands.query_offset
        changed["query_offset"] = offset[..., None, None, None]
    elif call.query_offset is None and positions_matter(call):
        lengths = [axes_of(facts.shape, call.layout)[2] for facts in (call.query, call.key)]
        if None in lengths:
            query, key = (changed.get(name, getattr(operands, name)) for name in ("query", "key"))
            offset = length_of(key, -2) - length_of(query, -2)
            # Added to an array: torch would take the number of its example for a bare symbol.
            zero = index_range(library_of(query).xp, 0, 1, query)
            changed["query_offset"] = (zero + offset)[:, None, None]
    for name, facts in call.tangents if swapped or _has_rank_2(call) else ():
        if name.removesuffix("_tangent") in ("query", "key", "value"):
            array, is_flat_one = getattr(operands, name), len(facts.shape) == 2
            if is_flat_one or swapped:
                changed[name] = array[None, ...] if is_flat_one else _swap(array, -2, -3)
    for name, axis in _OF_RESULTS.items() if swapped or flat else ():
        array = getattr(operands, name)
        if array is not None:
            changed[name] = _swap(array, axis, axis - 1) if swapped else array[None, ...]
    return operands._replace(**changed) if changed else operands


def as_called(call: Call, output: Array, logsumexp: Array | None) -> tuple[Array, Array | None]:
    """Return a kernel's results with the axes of the caller."""
    if is_flat(call):
        return output[0, ...], None if logsumexp is None else logsumexp[0, ...]
    if call.layout == "...LHD":
        output = _swap(output, -2, -3)
        logsumexp = None if logsumexp is None else _swap(logsumexp, -1, -2)
    return output, logsumexp


def gradients_as_called(call: Call, gradients: Gradients) -> Gradients:
    """Return a kernel's gradients with the axes of the caller."""
    changed: dict[str, Array] = {}
    for name, facts in call.operands():
        array = getattr(gradients, name)
        if len(facts.shape) == 2:
            changed[name] = array[0, ...]
        elif call.layout == "...LHD":
            changed[name] = _swap(array, -2, -3)
    return gradients._replace(**changed) if changed else gradients


def positions_matter(call: Call) -> bool:
    """Return whether the result may depend on the positions of the rows among the keys."""
    return (
        call.is_causal
        or (call.window or (None, None)) != (None, None)
        or isinstance(call.mask, Mask)
        or isinstance(call.score_mod, Score)
    )


def keeps_axes(call: Call) -> bool:
    """Return whether the caller's axes are those that a kernel knows, in arguments and results."""
    is_moved = call.layout == "...LHD" or isinstance(call.query_offset, ArrayFacts)
    is_moved = is_moved or None in (*call.query.shape, *call.key.shape)
    return not is_moved and not _has_rank_2(call)


def is_flat(call: Call) -> bool:
    """Return whether all arrays of a call are of rank 2, so that the result has no head axis."""
    value = call.value or call.key
    return len(call.query.shape) == len(call.key.shape) == len(value.shape) == 2


def _has_rank_2(call: Call) -> bool:
    value = call.value or call.key
    return 2 in (len(call.query.shape), len(call.key.shape), len(value.shape))


def _swap(array: Array, one: int, other: int) -> Array:
    axes = list(range(len(array.shape)))
    axes[one], axes[other] = axes[other], axes[one]
    return library_of(array).xp.permute_dims(array, tuple(axes))
