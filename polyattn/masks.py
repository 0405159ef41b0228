"""Create masks, which state the keys that each row may see and compose by ``&``, ``|`` and ``~``.

The position of row i is ``i + query_offset``, as for ``is_causal=`` and ``window=``::

    attention(q, k, v, mask=masks.causal() & masks.window(256, 0) | masks.prefix(16))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyattn._base.arguments import check_int, check_signature, check_window
from polyattn._base.arrays import Array, facts_of, is_array
from polyattn._base.host import as_array, is_unreadable
from polyattn._base.tracing import traced_tensor
from polyattn._core.expressions.expression import Expression
from polyattn._core.expressions.indices import INDEX_LIMIT
from polyattn._core.expressions.mask_arrays import (
    check_ids,
    check_lengths,
    check_parents,
    check_positions,
)
from polyattn._core.expressions.masks import DenseMask, Mask, RuleMask
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
from polyattn._core.expressions.selections import (
    Blocks,
    Selected,
    lists_of_edges,
    sorted_lists,
)
from polyattn._core.expressions.tree import Tree, ancestors_of
from polyattn._core.tiles.compiled import compile

__all__ = [
    "Mask",
    "blocks",
    "causal",
    "compile",
    "dense",
    "dilated",
    "edges",
    "global_tokens",
    "neighborhood",
    "padding",
    "positions",
    "prefix",
    "rule",
    "segments",
    "selected",
    "tree",
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
            f" &, | and ~; got {other!r}. Compose others with the result: masks.positions(...) &"
            " other"
        )
    return Positions(rows, keys, mask)


def tree(parents: Array) -> Mask:
    """Show each draft of a tree the past, itself and its ancestors, to verify all at once.

    Parameters
    ----------
    parents : Array of int or bool
        The index of the parent of each draft among the drafts, less than its own, or −1 for none:
        shape (..., L). Or, as bool of shape (..., L, L), which drafts each one sees, of itself and
        those before it.

    Returns
    -------
    Mask
        Row i sees key j where ``j < query_offset``, or ``j - query_offset`` is i or an ancestor
        of it.

    Raises
    ------
    ValueError
        If a parent is out of range, where the array is in NumPy. In other libraries, such a parent
        counts as none.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention, masks
    >>> key = np.ones((8, 100, 64), dtype=np.float32)
    >>> drafts = masks.tree(np.array([-1, 0, 0, 1]))  # two continuations of draft 0
    >>> attention(key[:, -4:], key, key, mask=drafts).shape
    (8, 4, 64)
    """
    name = "masks.tree: parents"
    if is_unreadable(parents):  # as a tensor it has a dtype; an array is placed where the query is
        return Tree(ancestors_of(check_parents(name, traced_tensor(parents))).numpy())
    return Tree(ancestors_of(check_parents(name, parents)))


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
        The positions of these tokens.

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
    if not integers or min(integers) < 0:
        raise ValueError(f"masks.global_tokens takes positions of at least 0; got {positions!r}")
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


def selected(indices: Array) -> Mask:
    """Show each row the keys that are named for it, such as the best ones of an index.

    Parameters
    ----------
    indices : Array of int
        The keys of each row, of this call and in any order, and −1 for none: shape (..., H, L, K),
        where H or L may be 1, and (L, K) is for all heads. A key named twice counts once, and a
        number of S or above names none. The mask keeps a copy.

    Returns
    -------
    Mask
        Row i of head h sees key j where j is in ``indices[..., h, i, :]``.

    Raises
    ------
    ValueError
        If a number is below −1, where the array is in NumPy. Elsewhere it names no key.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention, masks
    >>> x = np.ones((8, 4, 64), dtype=np.float32)
    >>> keys = np.array([[0, -1], [1, 0], [0, 2], [3, 1]])
    >>> attention(x, x, x, mask=masks.selected(keys) & masks.causal()).shape
    (8, 4, 64)
    """
    return Selected(_lists("masks.selected: indices", indices))


def blocks(table: Array, size: int | tuple[int, int]) -> Mask:
    """Show blocks of rows the blocks of keys that are named for them.

    Parameters
    ----------
    table : Array of int
        The numbers of the blocks of keys that each block of rows sees, in any order, and −1 for
        none: shape (..., H, ceil(L / rows), K), where H may be 1. A number of ceil(S / keys) or
        above names none. The mask keeps a copy.
    size : int or tuple of int
        The rows and the keys of a block, or one number for both. Row i is in block i // rows, and
        key j in block j // keys; the last blocks may be smaller.

    Returns
    -------
    Mask
        Row i of head h sees key j where ``j // keys`` is in ``table[..., h, i // rows, :]``.

    Raises
    ------
    ValueError
        If a number is below −1, where the array is in NumPy. Elsewhere it names no block.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention, masks
    >>> x = np.ones((8, 256, 64), dtype=np.float32)
    >>> chosen = np.array([[0, -1], [0, 1], [0, 2], [1, 3]])
    >>> attention(x, x, x, mask=masks.blocks(chosen, 64) & masks.causal()).shape
    (8, 256, 64)
    """
    sizes = size if isinstance(size, tuple) else (size, size)
    if len(sizes) != 2:
        raise ValueError(f"masks.blocks: size is a number, or one of rows and keys; got {size!r}")
    rows, keys = (
        min(check_int("masks.blocks: size", number, least=1), INDEX_LIMIT) for number in sizes
    )
    return Blocks(_lists("masks.blocks: table", table, keys), (rows, keys))


def edges(rows: Array, keys: Array, query_length: int) -> Mask:
    """Show each row the keys to which it has an edge of a graph.

    Parameters
    ----------
    rows, keys : Array of int
        The row and the key of each edge, shape (edges,), in any order. An edge given twice counts
        once. The numbers are read: the arrays may not be traced.
    query_length : int
        L, the number of rows. Rows without edges see no key.

    Returns
    -------
    Mask
        The `selected` keys of each row, (L, K), where K is the most edges of a row.

    Raises
    ------
    TypeError, ValueError
        If the arrays differ in length or cannot be read, or a number is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import masks
    >>> masks.edges(np.array([0, 2, 2]), np.array([1, 0, 2]), 3)
    masks.selected(numpy.asarray([[-1, 1], [-1, -1], [0, 2]], dtype=numpy.int64))

    Of a matrix of SciPy the edges are ``m = m.tocoo(); masks.edges(m.row, m.col, m.shape[0])``.
    """
    length = check_int("masks.edges: query_length", query_length, least=0)
    rows, keys = (
        check_ids(f"masks.edges: {name}", ids) for name, ids in (("rows", rows), ("keys", keys))
    )
    for name, ids in (("rows", rows), ("keys", keys)):
        if is_unreadable(ids) or facts_of(ids).traced:
            raise TypeError(
                f"masks.edges reads its arrays, and {name} is traced: make the mask before, or give"
                " masks.selected the keys of each row"
            )
    if len(rows.shape) != 1 or rows.shape != keys.shape:
        shapes = f"{tuple(rows.shape)} and {tuple(keys.shape)}"
        raise ValueError(f"masks.edges: rows and keys must have one shape (edges,); got {shapes}")
    return Selected(lists_of_edges(rows, keys, length))


def _lists(name: str, numbers: Array, size: int = 1) -> Array:
    if is_unreadable(numbers):  # as a tensor it has a dtype; an array is placed where the query is
        return sorted_lists(name, check_ids(name, traced_tensor(numbers)), size).numpy()
    return sorted_lists(name, check_positions(name, numbers), size)


def dense(array: Array) -> Mask:
    """Turn a bool array into a mask that composes.

    Parameters
    ----------
    array : Array of bool
        True where a key takes part; broadcasts to (..., H, L, S), with that rank or at most 2.

    Returns
    -------
    Mask
        A row sees a key where the array is True.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import masks
    >>> masks.causal() & masks.dense(np.array([True, False, True]))
    masks.causal() & masks.dense(numpy.asarray([True, False, True], dtype=numpy.bool))
    """
    array = as_array("masks.dense: array", array)
    if is_unreadable(array):  # the call checks it, as a tensor
        return DenseMask(array)
    if not is_array(array) or facts_of(array, "masks.dense: array").dtype != "bool":
        got = facts_of(array) if is_array(array) else repr(array)
        raise TypeError(f"masks.dense takes a bool array, True where a key takes part; got {got}")
    return DenseMask(array)


def rule(function: Callable[..., Array]) -> Mask:
    """Turn a function in FlexAttention's form into a mask that composes.

    Parameters
    ----------
    function : callable
        A function ``(b, h, i, j) -> bool`` of index arrays that broadcast with one another.

    Returns
    -------
    Mask
        A row sees a key where the function returns True. Its empty tiles are known only if the
        mask is compiled: see `compile`.

    Examples
    --------
    >>> from polyattn import masks
    >>> def even(b, h, i, j):
    ...     return (i + j) % 2 == 0
    >>> masks.rule(even) & masks.causal()
    masks.rule(even) & masks.causal()
    """
    if not callable(function) or (
        isinstance(function, Expression) and not isinstance(function, Mask)
    ):
        raise TypeError(f"masks.rule takes a function (b, h, i, j) -> bool; got {function!r}")
    if isinstance(function, Mask):
        return function
    check_signature("the mask function", function, "b, h, i, j")
    return RuleMask(function)
