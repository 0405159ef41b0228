"""Evaluate mask and score expressions in NumPy, only from their fields.

No method of an expression is called, so that its results can be checked against these.
"""

# ruff: noqa: N806 -- the letters are those of the semantics

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from polyattn._core.expressions import masks, neighborhood, patterns, scores, selections, tree
from polyattn._core.tiles import compiled

Array = np.ndarray[Any, Any]


class CallRows(NamedTuple):
    """The shape of a call, the positions of its rows, and which of them to compute."""

    batch: tuple[int, ...]  # broadcast
    shape: tuple[int, int, int]  # H, L and S
    offset: Any = None  # query_offset=
    sampled: tuple[int, ...] | None = None  # the rows to compute; None for all

    @property
    def indices(self) -> tuple[int, ...]:
        """The query rows to compute."""
        return tuple(range(self.shape[1])) if self.sampled is None else self.sampled

    def of(self, array: Any) -> Any:
        """Return the sampled rows of an array that broadcasts to (..., L, anything)."""
        if array is None or self.sampled is None or array.ndim < 2 or array.shape[-2] == 1:
            return array
        return array[..., self.sampled, :]

    def each(self, numbers: Any, *ends: int) -> Array:
        """Broadcast an array of axes `ends` to all batch items, with a flat batch."""
        items = math.prod(self.batch)
        return np.broadcast_to(np.asarray(numbers), (*self.batch, *ends)).reshape(items, *ends)

    def positions(self, b: Any, i: Any) -> Any:
        """Return the positions of rows among the keys."""
        _, L, S = self.shape
        return i + self.each(S - L if self.offset is None else self.offset)[b]


def gathered(pool: Any, table: Any) -> Any:
    """Return the keys of each item of a table of pages, one after another."""
    if table is None:
        return pool
    pages = np.moveaxis(pool[table], -4, -3)  # (..., G, pages, keys of a page, D)
    *batch, G, many, page, size = pages.shape
    return pages.reshape(*batch, G, many * page, size)


def plainly(mask: Any, score_mod: Any, rows: CallRows) -> tuple[Any, Any]:
    """Replace a mask expression by an array and a score expression by a function."""
    if isinstance(mask, masks.Mask):
        H, L, S = rows.shape
        b, h, i, j = np.ogrid[: math.prod(rows.batch), :H, :L, :S]
        seen = _sees(mask, rows, b, h, rows.of(i), j)
        whole = (H, len(rows.indices), S)
        seen = np.broadcast_to(seen, (math.prod(rows.batch), *whole))
        mask = seen.reshape(*rows.batch, *whole)
    elif isinstance(mask, np.ndarray):
        mask = rows.of(mask)
    if isinstance(score_mod, scores.Score):
        score_mod = _function(score_mod, rows)
    return mask, score_mod


def _sees(mask: masks.Mask, rows: CallRows, b: Any, h: Any, i: Any, j: Any) -> Any:
    _, L, S = rows.shape
    p = rows.positions(b, i)
    match mask:
        case masks.And(parts):
            return np.all(np.broadcast_arrays(*[_sees(m, rows, b, h, i, j) for m in parts]), axis=0)
        case masks.Or(parts):
            return np.any(np.broadcast_arrays(*[_sees(m, rows, b, h, i, j) for m in parts]), axis=0)
        case masks.Not(part):
            return np.logical_not(_sees(part, rows, b, h, i, j))
        case patterns.Band(left, right):
            behind, ahead = np.maximum(p - j, 0), np.maximum(j - p, 0)
            return (left is None or behind <= left) & (right is None or ahead <= right)
        case patterns.Dilated(step):
            return np.gcd(abs(p - j), step) == step
        case patterns.GlobalTokens(positions):
            return np.isin(j, positions) | np.isin(p, positions)
        case neighborhood.Neighborhood():
            table = np.zeros((S + abs(p).max() + L, S), bool)
            for row in range(math.prod(mask.shape)):
                table[row, [key for key in _neighbors(mask, row) if key < S]] = True
            return table[np.maximum(p, -1), j]
        case patterns.Prefix(lengths):
            return rows.each(lengths)[b] > j
        case patterns.Padding(key_lengths, query_lengths):
            keys = S if key_lengths is None else key_lengths
            queries = L if query_lengths is None else query_lengths
            return (rows.each(keys)[b] > j) & (rows.each(queries)[b] > i)
        case patterns.Segments(query_ids, key_ids):
            keys = query_ids if key_ids is None else key_ids
            return rows.each(query_ids, L)[b, i] == rows.each(keys, S)[b, j]
        case patterns.Positions(query_positions, key_positions, within):
            return _sees_by_position(within, rows, b, i, j, query_positions, key_positions)
        case tree.Tree(ancestors):
            past = p - i
            table = np.zeros((*ancestors.shape[:-1], S + abs(past).max() + L), bool)
            table[..., :L] = ancestors
            return (j < past) | rows.each(table, L, table.shape[-1])[b, i, np.maximum(j - past, 0)]
        case selections.Selected(indices):
            named = rows.each(indices, rows.shape[0], L, indices.shape[-1])
            return np.any(named[b, h, i] == j[..., None], axis=-1)
        case selections.Blocks(table, (down, across)):
            named = rows.each(table, rows.shape[0], -(-L // down), table.shape[-1])
            return np.any(named[b, h, i // down] == j[..., None] // across, axis=-1)
        case masks.DenseMask(array):
            return rows.each(array, *rows.shape)[b, h, i, j]
        case masks.RuleMask(function):
            return function(b, h, i, j)
        case compiled.Compiled(within):
            return _sees(within, rows, b, h, i, j)
    raise TypeError(f"{mask!r} is not a known mask")


def _neighbors(mask: neighborhood.Neighborhood, row: int) -> list[int]:
    """Return the tokens that a token of a grid sees, axis by axis."""
    tokens = [0]
    for axis, length in enumerate(mask.shape):
        numbers = (mask.kernel_size, mask.stride, mask.dilation, mask.is_causal)
        size, stride, dilation, is_causal = (x[axis] for x in numbers)
        own = row // math.prod(mask.shape[axis + 1 :]) % length
        phase = list(range(own % dilation, length, dilation))  # the coordinates that may see it
        at = phase.index(own)
        # Neighbouring rows share the window of the last of them, or of the one in the middle.
        group = range(at - at % stride, at - at % stride + stride)
        leader = min(group[-1 if is_causal else stride // 2], len(phase) - 1)
        if is_causal:
            seen = [x for n, x in enumerate(phase) if leader - size < n <= at]
        else:
            start = leader - size // 2
            while start < 0:
                start += 1
            while start + size > len(phase):
                start -= 1
            seen = phase[start : start + size]
        tokens = [token * length + x for token in tokens for x in seen]
    return tokens


def _sees_by_position(
    mask: masks.Mask,
    rows: CallRows,
    b: Any,
    i: Any,
    j: Any,
    query_positions: Any,
    key_positions: Any,
) -> Any:
    """Return which keys a mask shows where a row of each position could see keys of each."""
    _, L, S = rows.shape
    places = rows.each(query_positions, L)[b, i], rows.each(key_positions, S)[b, j]
    # A call whose rows and keys are all the positions, from the least that is not absent.
    least = min(0, int(places[0].min(initial=0)))
    many = 1 + max([int(x.max(initial=0)) for x in places]) - least
    whole = CallRows(rows.batch, (1, many, many), offset=least)
    at = np.ogrid[: b.shape[0], :1, :many, :many]
    seen = np.broadcast_to(_sees(mask, whole, *at), (b.shape[0], 1, many, many))
    visible = seen[b, 0, places[0] - least, np.maximum(places[1], 0)]
    return visible & (places[1] >= 0)


def _function(score: scores.Score, rows: CallRows) -> Callable[..., Any]:
    """Return a score expression as a function of (score, b, h, i, j)."""
    match score:
        case scores.Chain(parts):
            functions = [_function(part, rows) for part in parts]

            def chain(s: Any, *at: Any) -> Any:
                for function in functions:
                    s = function(s, *at)
                return s

            return chain
        case scores.Softcap(cap):
            return lambda s, *at: np.tanh(s / cap) * cap
        case scores.Temperature(t):
            return lambda s, *at: s / t
        case scores.Alibi(slopes):
            slopes = _published_slopes(slopes) if isinstance(slopes, int) else slopes

            def alibi(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
                far = abs(j - rows.positions(b, i))
                return s - slopes.astype(s.dtype)[h] * far.astype(s.dtype)

            return alibi
        case scores.RelativeBias(table, both_ways, most):

            def relative(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
                bucket = _bucket(j - rows.positions(b, i), table.shape[0], both_ways, most)
                return s + table.astype(s.dtype)[bucket, h]

            return relative
        case scores.Function(rule):
            return rule
    raise TypeError(f"{score!r} is not a known score")


def _published_slopes(heads: int) -> Array:
    """Return the slopes of ALiBi's authors, by their recursion over the powers of two."""
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (n + 1) / whole) for n in range(whole)]
    if heads > whole:
        slopes += _published_slopes(2 * whole)[0::2][: heads - whole].tolist()
    return np.asarray(slopes)


def _bucket(relative: Any, buckets: int, both_ways: bool, most: int) -> Any:
    """Return T5's bucket by its logarithm, corrected where it rounds below a whole number."""
    after = relative > 0
    if both_ways:
        buckets, distance = buckets // 2, abs(relative)
    else:
        distance = np.maximum(-relative, 0)
    exact = buckets // 2
    ratio = np.log(np.maximum(distance, exact) / exact) / math.log(most / exact)
    beyond = exact + np.floor(ratio * (buckets - exact) + 1e-9).astype(int)
    bucket = np.where(distance < exact, distance, np.minimum(beyond, buckets - 1))
    return bucket + np.where(after & both_ways, buckets, 0)
