"""Write to an array at indices, in new memory: once for all libraries."""

from __future__ import annotations

import math
from typing import Any

from polyattn._base.arrays import Array, index_range, library_of, zeros
from polyattn._base.tracing import is_transformed

# The libraries whose arrays can be written in place, at arrays of indices.
_WRITABLE = ("cupy", "mlx", "numpy", "torch")


def scatter(whole: Any, at: tuple[Any, ...], values: Any) -> Array:
    """Return an array with values at places, each an array of integers or a whole axis."""
    if library_of(whole).name == "jax":
        new: Array = whole.at[at].set(values)
        return new
    return written(whole + 0, at, values)


def rows_placed(rows: Array, numbers: Array, length: int) -> Array | None:
    """Return zeros (length, ...) with rows (n, ...) at numbers that differ.

    None for a library whose arrays cannot be written at arrays of indices.
    """
    library = library_of(rows)
    if library.name not in (*_WRITABLE, "jax"):
        return None
    whole = zeros(library.xp, (length, *rows.shape[1:]), rows.dtype, rows)
    if library.name == "torch":  # by a function, which its vmap takes
        place = whole.index_copy if is_transformed() else whole.index_copy_
        return place(0, numbers.long(), rows)
    return (
        whole.at[numbers].set(rows) if library.name == "jax" else written(whole, (numbers,), rows)
    )


def written(whole: Any, at: tuple[Any, ...], values: Any) -> Array:
    """Return an array to which values were written at places, as `scatter` does in a new one."""
    if library_of(whole).name in _WRITABLE:
        whole[at] = values
        return whole
    # The standard knows one place at a time.
    shape = next(one.shape for one in at if not isinstance(one, slice))
    for number in range(math.prod(shape)):
        index = tuple([number // math.prod(shape[n + 1 :]) % size for n, size in enumerate(shape)])
        place = [one if isinstance(one, slice) else int(one[index]) for one in at]
        whole[(*place, ...)] = values[(*index, ...)]
    return whole


def marked(numbers: Array, length: int) -> Array | None:
    """Return (..., length), True at the numbers of each list (..., K); others mark nothing.

    None for a library whose arrays cannot be written at arrays of indices.
    """
    library, lists = library_of(numbers), math.prod(numbers.shape[:-1])
    if library.name not in (*_WRITABLE, "jax"):
        return None
    xp, width = library.xp, length + 1  # the last place of each list is for the others
    at = xp.where((numbers < 0) | (numbers > length), xp.full_like(numbers, length), numbers)
    start = xp.reshape(index_range(xp, 0, lists, numbers) * width, (*numbers.shape[:-1], 1))
    at = xp.reshape(at + start, (-1,))
    whole = zeros(xp, (lists * width,), xp.bool, numbers)
    if library.name == "torch":  # by a function, which its vmap takes
        whole = whole.index_fill(0, at, True)
    elif library.name == "jax":
        whole = whole.at[at].set(True)
    else:
        whole[at] = True
    return xp.reshape(whole, (*numbers.shape[:-1], width))[..., :length]


def scatter_add(whole: Any, numbers: Array, parts: Array) -> Array:
    """Return an array with parts added at numbers of its first axis; it may write to the array."""
    if hasattr(whole, "at"):  # JAX and MLX
        return whole.at[numbers].add(parts)
    if hasattr(whole, "index_add"):  # torch
        return whole.index_add(0, numbers, parts)
    if len(parts.shape) == 1 and hasattr(library_of(whole).xp.add, "at"):  # NumPy and CuPy
        library_of(whole).xp.add.at(whole, numbers, parts)
        return whole
    for number in range(parts.shape[0]):
        whole[int(numbers[number]), ...] += parts[number, ...]
    return whole


def add_lists(whole: Any, lists: Array, parts: Array) -> Array:
    """Return an array with parts (n, K, size) added at the numbers of each list (n, K).

    The numbers of a list differ, but for that of the last place, whose sum is of no use.
    """
    if library_of(whole).name == "numpy":  # in an eighth of the time of numpy.add.at
        for numbers, part in zip(lists, parts, strict=True):
            whole[numbers] += part
        return whole
    xp = library_of(whole).xp
    numbers = xp.reshape(lists, (-1,))
    parts = xp.reshape(parts, (numbers.shape[0], parts.shape[-1]))
    if library_of(whole).name == "cupy":
        xp.add.at(whole, numbers, parts)
        return whole
    if hasattr(whole, "index_add_") and not (parts.requires_grad or is_transformed()):
        return whole.index_add_(0, numbers, parts)  # without a copy of the whole
    return scatter_add(whole, numbers, parts)
