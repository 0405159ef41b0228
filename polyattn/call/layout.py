"""The layout of axes: every conversion between the caller's axes and the kernels'."""

from __future__ import annotations

from polyattn.arrays import Array, ArrayFacts, library_of
from polyattn.call.describe import Call, Operands

__all__ = ["heads_first", "is_flat"]


def is_flat(call: Call) -> bool:
    """Whether all arrays of a call are of rank 2, so that the result has no axis of heads."""
    return len(call.query.shape) == len(call.key.shape) == len(call.value.shape) == 2


def heads_first(call: Call, operands: Operands) -> Operands:
    """Return the operands of a call with the axes that a kernel knows."""
    ranks = (len(call.query.shape), len(call.key.shape), len(call.value.shape))
    swapped = call.layout == "...LHD" and not is_flat(call)
    if isinstance(call.query_offset, ArrayFacts):
        operands = operands._replace(query_offset=_per_item(operands.query_offset))
    known = operands.known_logsumexp
    if known is not None and (swapped or is_flat(call)):
        known = _swap(known, -1, -2) if swapped else known[None, ...]
        operands = operands._replace(known_logsumexp=known)
    if swapped or 2 in ranks:
        operands = operands._replace(
            query=_heads_first(operands.query, swapped),
            key=_heads_first(operands.key, swapped),
            value=_heads_first(operands.value, swapped),
        )
    return operands


def _per_item(offset: Array) -> Array:
    return library_of(offset).xp.reshape(offset, (*offset.shape, 1, 1, 1))


def _heads_first(array: Array, swapped: bool) -> Array:
    if len(array.shape) == 2:
        return array[None, ...]
    return _swap(array, -2, -3) if swapped else array


def _swap(array: Array, one: int, other: int) -> Array:
    axes = list(range(len(array.shape)))
    axes[one], axes[other] = axes[other], axes[one]
    return library_of(array).xp.permute_dims(array, tuple(axes))
