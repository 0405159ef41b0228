"""Masks that say by arrays or a function which keys each row sees."""

from __future__ import annotations

from collections.abc import Callable

from polyattn._base.arguments import check_int, check_signature, got
from polyattn._base.arrays import Array, facts_of, is_array
from polyattn._base.host import as_array, is_unreadable
from polyattn._base.tracing import traced_tensor
from polyattn._core.expressions.expression import Expression
from polyattn._core.expressions.indices import INDEX_LIMIT
from polyattn._core.expressions.mask_arrays import check_ids, check_parents, check_positions
from polyattn._core.expressions.masks import DenseMask, Mask, RuleMask
from polyattn._core.expressions.selections import Blocks, Selected, lists_of_edges, sorted_lists
from polyattn._core.expressions.tree import Tree, ancestors_of

__all__ = ["blocks", "dense", "edges", "rule", "selected", "tree"]
__dir__ = __all__.copy


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
        As for `selected`.

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
        raise ValueError(f"masks.blocks: size is a number, or one of rows and keys; {got(size)}")
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
        raise TypeError(f"masks.rule takes a function (b, h, i, j) -> bool; {got(function)}")
    if isinstance(function, Mask):
        return function
    check_signature("the mask function", function, "b, h, i, j")
    return RuleMask(function)
