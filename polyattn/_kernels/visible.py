"""The visible scores: the tiles that hold some, and products over visible keys only.

Between the steps a score of −inf marks an absent key. 0 · NaN is NaN, so a value that is not finite
must not reach the rows that do not see its key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from polyattn._base.arrays import Array
from polyattn._base.span import Span
from polyattn._core.call.operands import Operands
from polyattn._core.call.problem import Problem
from polyattn._core.tiles.axes import fold_heads, unfold_heads
from polyattn._core.tiles.band import column_span
from polyattn._core.tiles.coverage import TileQuery, combined_mask
from polyattn._core.tiles.indices import Indices
from polyattn.plugin import Backend


def visible_tiles(
    problem: Problem, x: Operands, backend: Backend, rows: Span, tiles: Iterable[Span]
) -> Iterator[tuple[Span, bool]]:
    """Yield the keys of each tile that may hold a visible score, and whether it hides some."""
    if 0 in problem.scores:
        return
    mask, seen = combined_mask(problem, x), column_span(problem, rows)
    reads = not problem.transforms and not problem.traced and backend.is_eager(x.query)
    for columns in tiles:
        if columns.stop <= seen.start or columns.start >= seen.stop:
            continue
        if mask is None:
            yield columns, False
            continue
        coverage = TileQuery(problem, x, backend.xp, rows, columns, reads=reads).of(mask)
        if coverage.any_visible:
            yield columns, not coverage.all_visible


def compared(
    problem: Problem,
    backend: Backend,
    compare: Callable[[Array, Array], Array],
    query: Array,
    key: Array,
) -> Array:
    """Return a function of queries and keys; a gradient of 0 stays 0 where one is not finite."""
    if not problem.may_be_differentiated or not problem.masks:
        return compare(query, key)
    if not problem.transforms and backend.is_eager(query):
        sums = [backend.xp.sum(backend.constant(x)) for x in (query, key)]  # one that overflows too
        if all(bool(backend.xp.isfinite(total)) for total in sums):
            return compare(query, key)
    return backend.compared(compare, query, key)


def without_hidden(
    problem: Problem,
    x: Operands,
    scores: Array,
    at: Indices,
    visible: list[Array],
    cap: Callable[[Array], Array],
) -> Array:
    """Return scores, 0 where hidden if a library differentiates what is not finite there."""
    if not problem.may_be_differentiated or not problem.masks:
        return scores
    if problem.softcap is None and x.score_mod is None:
        return scores
    seen = visible if x.bias is None else [*visible, at.of_bias(x.bias) != -math.inf]
    for shown in seen:
        scores = at.xp.where(shown, scores, 0.0)
    if x.score_mod is None:
        return scores
    return at.xp.where(at.modified(cap(scores)) != -math.inf, scores, 0.0)


def hide(xp: Any, scores: Array, seen: Array) -> Array:
    """Return scores with −inf wherever a key is not seen."""
    return xp.where(seen, scores, -math.inf)


def weighted_sum(
    problem: Problem, backend: Backend, weights: Array, scores: Array, value: Array
) -> Array:
    """Return weights · value, without the values of absent keys.

    Weights (..., H, l, s) are 0 and scores −inf where a key is absent.
    """
    xp = backend.xp
    weights = fold_heads(problem, weights, xp)
    if not problem.masks:
        return unfold_heads(problem, backend.matmul(weights, value), xp)
    seen = fold_heads(problem, scores, xp) != -math.inf
    return unfold_heads(problem, visible_product(problem, backend, weights, seen, value), xp)


def visible_product(
    problem: Problem, backend: Backend, weights: Array, seen: Array, x: Array
) -> Array:
    """Return weights · x, to which x adds nothing where it is not seen.

    Weights (..., m, n) are 0 where the bool array `seen` (..., m, n) is False; x is (..., n, k).
    """
    xp = backend.xp
    if not problem.masks:
        return backend.matmul(weights, x)
    if not problem.transforms and backend.is_eager(x):
        # An entry that is not finite spoils its column in every row, even with weight 0.
        plain = backend.matmul(weights, x)
        if bool(xp.all(xp.isfinite(plain))):
            return plain
    return backend.visible_product(weights, seen, x)
