"""Masks by the positions and the segments of rows and keys."""

from __future__ import annotations

from typing import Any

from polyattn._base.arguments import check_int, check_window, got
from polyattn._base.arrays import Array
from polyattn._core.expressions.indices import INDEX_LIMIT
from polyattn._core.expressions.mask_arrays import check_ids, check_lengths, check_positions
from polyattn._core.expressions.masks import Mask
from polyattn._core.expressions.neighborhood import neighborhood_of
from polyattn._core.expressions.patterns import (
    Band,
    Dilated,
    GlobalTokens,
    Padding,
    Positions,
    Prefix,
    Segments,
    by_index,
)

__all__ = [
    "causal",
    "dilated",
    "global_tokens",
    "neighborhood",
    "padding",
    "positions",
    "prefix",
    "segments",
    "window",
]
__dir__ = __all__.copy


def causal() -> Mask:
    """Show the keys up to the row's position.

    Returns
    -------
    Mask
        Row i sees key j where ``j <= i + query_offset``.

    Examples
    --------
    >>> from polyattn import masks
    >>> masks.causal() & masks.window(256, 0) | masks.prefix(16)
    masks.causal() & masks.window(256, 0) | masks.prefix(16)
    """
    return Band(None, 0)


def window(left: int | None, right: Any = ...) -> Mask:
    """Show the keys near the row's position.

    Parameters
    ----------
    left, right : int or None
        Number of keys before and after the position, itself not counted; None for no bound. A
        window of 256 tokens that ends at the row's position is ``window(255, 0)``.

    Returns
    -------
    Mask
        Row i sees key j where ``p - left <= j <= p + right``, with ``p = i + query_offset``.
    """
    # A call with one number is told how to write both.
    return Band(*check_window(left if right is ... else (left, right)))


def prefix(lengths: int | Array) -> Mask:
    """Show the first keys to every row: ``causal() | prefix(n)`` is a prefix language model.

    Parameters
    ----------
    lengths : int or Array of int
        Number of keys, or an array of one number per batch item, shape (...).

    Returns
    -------
    Mask
        Every row sees key j where ``j < length``.

    Examples
    --------
    >>> from polyattn import masks
    >>> masks.causal() | masks.prefix(16)
    masks.causal() | masks.prefix(16)
    """
    return Prefix(check_lengths("masks.prefix: lengths", lengths))


def padding(
    key_lengths: int | Array | None = None, query_lengths: int | Array | None = None
) -> Mask:
    """Hide the padding at the end of each batch item.

    Parameters
    ----------
    key_lengths : int or Array of int, optional
        Number of real (non-padding) keys, or an array of one number per batch item, shape (...).
    query_lengths : int or Array of int, optional
        Number of real rows, in the same form; the rows after them see no key and have output 0.

    Returns
    -------
    Mask
        Row i sees key j where ``j < key_length`` and ``i < query_length``.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention, masks
    >>> x = np.ones((2, 8, 5, 64), dtype=np.float32)
    >>> attention(x, x, x, mask=masks.padding(np.array([3, 5]))).shape
    (2, 8, 5, 64)
    """
    if key_lengths is None and query_lengths is None:
        raise TypeError("masks.padding takes key_lengths, query_lengths, or both")
    names = ("masks.padding: key_lengths", "masks.padding: query_lengths")
    return Padding(
        *[
            None if lengths is None else check_lengths(name, lengths)
            for name, lengths in zip(names, (key_lengths, query_lengths), strict=True)
        ]
    )


def segments(query_ids: Array, key_ids: Array | None = None) -> Mask:
    """Show each row the keys of its segment, such as of documents packed into one sequence.

    Parameters
    ----------
    query_ids : Array of int
        The segment of each row, shape (..., L).
    key_ids : Array of int, optional
        The segment of each key, shape (..., S); by default `query_ids`.

    Returns
    -------
    Mask
        Row i sees key j where ``query_ids[i] == key_ids[j]``.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention, masks
    >>> x = np.ones((8, 6, 64), dtype=np.float32)
    >>> documents = masks.segments(np.array([0, 0, 0, 1, 1, 2]))
    >>> attention(x, x, x, mask=documents & masks.causal()).shape
    (8, 6, 64)
    """
    rows = check_ids("masks.segments: query_ids", query_ids)
    return Segments(
        rows, None if key_ids is None else check_ids("masks.segments: key_ids", key_ids)
    )


def positions(query_positions: Array, key_positions: Array, mask: Mask | None = None) -> Mask:
    """Evaluate a mask by given positions instead of indices.

    Use it for padding on the left, circular caches, and packed sequences with an offset each.

    Parameters
    ----------
    query_positions : Array of int
        The position of each row, shape (..., L).
    key_positions : Array of int
        The position of each key, shape (..., S). A key at a position below 0 is absent.
    mask : Mask, optional
        `causal`, the default, `window`, `dilated`, `global_tokens`, `prefix`, or what ``&``, ``|``
        and ``~`` make of them.

    Returns
    -------
    Mask
        Row i sees key j where `mask` shows the key ``key_positions[j]`` to a row at
        ``query_positions[i]``.

    Raises
    ------
    TypeError
        If a part of `mask` goes by the indices of rows and keys.
    ValueError
        If int64 cannot hold a position, where the array is in NumPy.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention, masks
    >>> x = np.ones((8, 6, 64), dtype=np.float32)
    >>> places = np.array([-1, -1, 0, 1, 2, 3])  # two tokens of padding
    >>> mask = masks.positions(places, places, masks.window(1, 0))
    >>> attention(x, x, x, mask=mask).shape
    (8, 6, 64)
    """
    rows = check_positions("masks.positions: query_positions", query_positions)
    keys = check_positions("masks.positions: key_positions", key_positions)
    mask = causal() if mask is None else mask
    other = by_index(mask) if isinstance(mask, Mask) else mask
    if other is not None:
        raise TypeError(
            "masks.positions takes causal, window, dilated, global_tokens and prefix, composed by"
            f" &, | and ~; {got(other)}. Compose others with the result: masks.positions(...) &"
            " other"
        )
    return Positions(rows, keys, mask)


def dilated(step: int) -> Mask:
    """Show every `step`-th key, counted from the row's position.

    Parameters
    ----------
    step : int
        The distance between neighbouring keys, at least 1.

    Returns
    -------
    Mask
        Row i sees key j where ``j - p`` is a multiple of `step`, with ``p = i + query_offset``.

    Examples
    --------
    >>> from polyattn import masks
    >>> masks.window(64, 64) & masks.dilated(4)
    masks.window(64, 64) & masks.dilated(4)
    """
    return Dilated(check_int("masks.dilated: step", step, least=1))


def global_tokens(*positions: int) -> Mask:
    """Show some keys to every row, and every key to the rows of the same tokens.

    Parameters
    ----------
    *positions : int
        The positions of these tokens, below 2**30.

    Returns
    -------
    Mask
        Row i sees key j where j or ``i + query_offset`` is one of them.

    Examples
    --------
    >>> from polyattn import masks
    >>> masks.window(64, 64) | masks.global_tokens(0, 1)
    masks.window(64, 64) | masks.global_tokens(0, 1)
    """
    integers = tuple([check_int("masks.global_tokens: a position", n) for n in positions])
    if not integers or min(integers) < 0 or max(integers) >= INDEX_LIMIT:
        raise ValueError(
            f"masks.global_tokens takes positions from 0 to 2**30 - 1; {got(positions)}"
        )
    return GlobalTokens(integers)


def neighborhood(
    shape: int | tuple[int, ...],
    kernel_size: int | tuple[int, ...],
    *,
    stride: int | tuple[int, ...] = 1,
    dilation: int | tuple[int, ...] = 1,
    is_causal: bool | tuple[bool, ...] = False,
) -> Mask:
    """Show the nearest tokens on a grid, as neighbourhood attention of NATTEN does.

    Parameters
    ----------
    shape : int or tuple of int
        The lengths of one to three axes of the grid, whose tokens are in row-major order.
    kernel_size : int or tuple of int
        The tokens that a window has along each axis, one number for all or one an axis.
    stride : int or tuple of int
        So many neighbouring rows share a window, at most `kernel_size`.
    dilation : int or tuple of int
        The distance between tokens of a window; ``kernel_size * dilation`` is at most the length.
    is_causal : bool or tuple of bool
        Whether a window along the axis ends at the row's own coordinate.

    Returns
    -------
    Mask
        The window has its row in the middle; at an end of the grid it moves inside and stays as
        large. A causal one becomes smaller. S is the number of tokens of the grid, or less where
        the first axis is causal.

    Raises
    ------
    TypeError, ValueError
        If a number is wrong, or the numbers of the axes differ.

    References
    ----------
    Hassani et al., Generalized Neighborhood Attention, https://arxiv.org/abs/2504.16922

    Examples
    --------
    >>> from polyattn import masks
    >>> mask = masks.neighborhood((16, 16), 5)
    >>> mask
    masks.neighborhood((16, 16), (5, 5))
    """
    return neighborhood_of(shape, kernel_size, stride, dilation, is_causal)
