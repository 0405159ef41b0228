"""The layout of axes: every conversion between the caller's axes and the kernels'."""

from __future__ import annotations

from typing import Any

from polyattn._base.arrays import Array, ArrayFacts, Chunks, index_range, length_of, library_of
from polyattn._core.call.facts import Call, axes_of
from polyattn._core.call.gradients import Gradients
from polyattn._core.call.operands import ARGUMENTS, Operands
from polyattn._core.call.pages import gathered, in_one_piece, scattered
from polyattn._core.expressions.masks import Mask
from polyattn._core.expressions.scores import Score


def chunks_heads_first(
    call: Call, arrays: list[tuple[str, ArrayFacts]]
) -> tuple[tuple[str, Chunks], ...]:
    """Return the chunks of each array of a call that is cut, on the axes that a kernel knows."""
    by_name: list[tuple[str, Chunks]] = []
    for name, facts in arrays:
        chunks = facts.chunks
        if chunks is None:
            continue
        if name in ARGUMENTS and len(chunks) == 2:
            chunks = ((1,), *chunks)
        elif name in ARGUMENTS and call.layout == "...LHD":
            *batch, length, heads, size = chunks
            chunks = (*batch, heads, length, size)
        by_name.append((name, chunks))
    return tuple(by_name)


def heads_first(call: Call, operands: Operands, *, reads_pages: bool = False) -> Operands:
    """Return the operands of a call with the axes that a kernel knows.

    Paged keys and values are gathered, unless the kernel reads pages in place.
    """
    changed: dict[str, Any] = {}
    for name, _ in call.operands() if call.layout == "...LHD" or 2 in _ranks(call) else ():
        changed[name] = _argument_heads_first(call, getattr(operands, name))
    if isinstance(call.query_offset, ArrayFacts):
        offset: Any = operands.query_offset
        changed["query_offset"] = offset[..., None, None, None]
    elif call.query_offset is None and positions_matter(call):
        lengths = [axes_of(facts.shape, call.layout)[2] for facts in (call.query, call.key)]
        if None in lengths and call.block_table is None:
            query, key = (changed.get(name, getattr(operands, name)) for name in ("query", "key"))
            offset = length_of(key, -2) - length_of(query, -2)
            # Added to an array: torch would take the number of its example for a bare symbol.
            zero = index_range(library_of(query).xp, 0, 1, query)
            changed["query_offset"] = (zero + offset)[:, None, None]
    operands = operands._replace(**changed) if changed else operands
    return operands if reads_pages else in_one_piece(operands)


def tangent_heads_first(call: Call, operands: Operands, name: str, array: Array) -> Array:
    """Return the tangent of an argument with the axes that a kernel knows."""
    if name not in ("query_tangent", "key_tangent", "value_tangent"):
        return array
    array = _argument_heads_first(call, array)
    is_whole = operands.block_table is None or name == "query_tangent"
    return array if is_whole else gathered(array, operands)


def result_heads_first(call: Call, name: str, array: Array) -> Array:
    """Return a result of a call, or its gradient, with the axes that a kernel knows."""
    if is_flat(call):
        return array[None, ...]
    axis = -1 if name.startswith("logsumexp") else -2
    return _swap(array, axis, axis - 1) if call.layout == "...LHD" else array


def _argument_heads_first(call: Call, array: Array) -> Array:
    if len(array.shape) == 2:
        return array[None, ...]
    return _swap(array, -2, -3) if call.layout == "...LHD" else array


def as_called(call: Call, output: Array, logsumexp: Array | None) -> tuple[Array, Array | None]:
    """Return a kernel's results with the axes of the caller."""
    if len(call.query.shape) == 2 and is_flat(call):
        return output[0, ...], None if logsumexp is None else logsumexp[0, ...]
    if call.layout == "...LHD":
        output = _swap(output, -2, -3)
        logsumexp = None if logsumexp is None else _swap(logsumexp, -1, -2)
    return output, logsumexp


def gradients_as_called(call: Call, operands: Operands, gradients: Gradients) -> Gradients:
    """Return a kernel's gradients with the axes of the caller."""
    changed: dict[str, Array] = {}
    for name, facts in call.operands():
        array = getattr(gradients, name)
        if operands.block_table is not None and name != "query":
            pool = _argument_heads_first(call, getattr(operands, name))
            array = changed[name] = scattered(array, operands, pool)
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
    return call.layout == "...HLD" and not isinstance(call.query_offset, ArrayFacts)


def has_all_axes(call: Call) -> bool:
    """Return whether query, key and value have heads, and lengths that are known."""
    return None not in (*call.query.shape, *call.key.shape) and 2 not in _ranks(call)


def swapped(call: Call, x: Operands) -> Operands:
    """Return operands as `heads_first` does, of a call that has all axes, and reads its pages."""
    if isinstance(call.query_offset, ArrayFacts):
        offset: Any = x.query_offset
        x = x._replace(query_offset=offset[..., None, None, None])
    if call.layout == "...HLD":
        return x
    query, key, value = (_swap(array, -2, -3) for array in x[:3])
    return x._replace(query=query, key=key, value=value)


def is_flat(call: Call) -> bool:
    """Return whether all arrays of a call are of rank 2, so that the result has no head axis."""
    return _ranks(call) == {2}


def _ranks(call: Call) -> set[int]:
    value = call.key if call.value is None else call.value
    return {len(call.query.shape), len(call.key.shape), len(value.shape)}


def _swap(array: Array, one: int, other: int) -> Array:
    module = type(array).__module__
    if module in ("numpy", "torch"):  # in a third of the time
        return array.swapaxes(one, other) if module == "numpy" else array.transpose(one, other)
    axes = list(range(len(array.shape)))
    axes[one], axes[other] = axes[other], axes[one]
    return library_of(array).xp.permute_dims(array, tuple(axes))
