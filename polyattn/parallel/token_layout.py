"""The tokens that each rank holds: layouts, and the ways to them and back.

Cut into equal chunks, a sequence is laid out over n ranks in one of two ways: ``contiguous``, rank
r holds chunk r of n; ``zigzag``, rank r holds the chunks r and 2n − 1 − r of 2n. Causal rows see
the keys before them, so with ``zigzag`` all ranks have the same work.
"""

from __future__ import annotations

from typing import Any

from polyattn._base.arguments import check_int
from polyattn._base.arrays import Array, index_range, library_of
from polyattn._base.slices import joined, split, take
from polyattn.parallel.over import communicator_of

#: The layouts, and the number of chunks that a rank holds.
LAYOUTS = {"contiguous": 1, "zigzag": 2}


def check_layout(layout: Any) -> None:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        heads = "; arrays have heads before length" if "HD" in str(layout) else ""
        raise ValueError(f'layout must be "contiguous" or "zigzag"{heads}; got {layout!r}')


def slots(layout: str) -> int:
    """Return the number of chunks that a rank holds."""
    return LAYOUTS[layout]


def chunks_of(rank: Any, size: int, layout: str) -> tuple[Any, ...]:
    """Return the numbers of the chunks that a rank holds, in its order."""
    return (rank,) if layout == "contiguous" else (rank, 2 * size - 1 - rank)


def check_size(size: Any) -> int:
    return check_int("the number of ranks", size, least=1)


def _check_divisible(length: int, size: int, layout: str) -> None:
    count = size * slots(layout)
    if length % count:
        raise ValueError(
            f"the array has {length} tokens, which {size} ranks cannot share in {count} equal"
            f" chunks (layout={layout!r}): pad it to {-(-length // count) * count} tokens and hide"
            " the padding by masks.padding"
        )


def permute(array: Array, size: int, *, layout: str = "zigzag", axis: int = -2) -> Array:
    """Return a whole sequence in the order in which equal parts of it are those of the ranks.

    Parameters
    ----------
    array : Array
        The whole sequence.
    size : int
        The number of ranks.
    layout : {"contiguous", "zigzag"}
        The layout.
    axis : int
        The axis of tokens.

    Returns
    -------
    Array
        The array, its tokens in the order of the ranks.

    Raises
    ------
    ValueError
        If the ranks cannot share the tokens in equal chunks.

    See Also
    --------
    unpermute : Undo it.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import parallel
    >>> parallel.permute(np.arange(8), 2, axis=0)
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    return _reordered(array, _order(array, size, layout, axis), axis)


def unpermute(array: Array, size: int, *, layout: str = "zigzag", axis: int = -2) -> Array:
    """Return a sequence in its own order from that of `permute`.

    Parameters
    ----------
    array : Array
        The parts of all ranks, concatenated.
    size, layout, axis : int, str and int
        As for `permute`.

    Returns
    -------
    Array
        The array, its tokens in the order of the sequence.

    Raises
    ------
    ValueError
        If the ranks cannot share the tokens in equal chunks.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import parallel
    >>> parallel.unpermute(np.asarray([0, 1, 6, 7, 2, 3, 4, 5]), 2, axis=0)
    array([0, 1, 2, 3, 4, 5, 6, 7])
    """
    order = _order(array, size, layout, axis)
    return _reordered(array, sorted(range(len(order)), key=order.__getitem__), axis)


def shard(array: Array, *, over: Any, layout: str = "contiguous", axis: int = -2) -> Array:
    """Return the tokens of a whole sequence that this rank holds.

    Parameters
    ----------
    array : Array
        The whole sequence.
    over : object
        The ranks, as for `polyattn.parallel.attention`.
    layout : {"contiguous", "zigzag"}
        The layout.
    axis : int
        The axis of tokens.

    Returns
    -------
    Array
        This rank's tokens.

    Raises
    ------
    ValueError
        If the ranks cannot share the tokens in equal chunks.
    """
    ranks = communicator_of(over)
    check_layout(layout)
    _check_divisible(array.shape[axis], ranks.size, layout)
    length = array.shape[axis] // (ranks.size * slots(layout))
    chunks = chunks_of(ranks.rank, ranks.size, layout)
    return joined([take(array, axis, chunk * length, length) for chunk in chunks], axis)


def positions(array: Array, *, over: Any, layout: str = "contiguous", axis: int = -2) -> Array:
    """Return the positions in the sequence of the tokens that this rank holds.

    Rotary and other position embeddings need them: a rank's tokens do not begin at 0.

    Parameters
    ----------
    array : Array
        This rank's tokens, such as its query.
    over, layout, axis : object, str and int
        As for `shard`.

    Returns
    -------
    Array of int
        The positions, one axis, in the library and on the device of the array.

    Raises
    ------
    ValueError
        If the layout is neither of the two.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import parallel
    >>> own = np.ones((4, 16))
    >>> parallel.run_threads(
    ...     2, lambda ranks: parallel.positions(own, over=ranks, layout="zigzag").tolist()
    ... )
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    ranks = communicator_of(over)
    check_layout(layout)
    length = array.shape[axis] // slots(layout)
    first = index_range(library_of(array).xp, 0, length, array)
    chunks = chunks_of(ranks.rank, ranks.size, layout)
    return joined([first + chunk * length for chunk in chunks], 0)


def _order(array: Array, size: int, layout: str, axis: int) -> list[int]:
    """Return the chunks in the order of the ranks."""
    check_layout(layout)
    _check_divisible(array.shape[axis], check_size(size), layout)
    return [chunk for rank in range(size) for chunk in chunks_of(rank, size, layout)]


def _reordered(array: Array, order: list[int], axis: int) -> Array:
    if order == sorted(order):
        return array
    chunks = split(array, len(order), axis)
    return joined([chunks[n] for n in order], axis)
