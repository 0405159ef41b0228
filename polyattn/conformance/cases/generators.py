"""Generate masks, biases, offsets and functions of the indices for cases.

The functions use only operators, and a cast or `where` to combine an index with a score, so that
they run on the arrays of every library.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from polyattn._base.arrays import cast, library_of
from polyattn.conformance.cases.case import Case, Generated, Shape


def shape_of(case: Case, axes: str) -> Shape:
    """Return the lengths of axes: letters of the semantics, B for the batch, 1 and 2 as they are.

    Without letters, it is the shape of the scores.
    """
    lengths: dict[str, Shape] = {"B": case.batch, "H": (case.H,), "L": (case.L,), "S": (case.S,)}
    lengths |= {"1": (1,), "2": (2,)}
    return tuple(n for axis in axes for n in lengths[axis]) if axes else case.score_shape


def normal(axes: str = "", dtype: str | None = None) -> Generated:
    """Return an array of normal numbers, of axes as for `shape_of`."""
    return Generated(lambda case, rng: rng.normal(size=shape_of(case, axes)), dtype)


def random_mask(axes: str = "") -> Generated:
    """Return a mask that shows most keys, of axes as for `shape_of`."""
    return Generated(lambda case, rng: rng.random(shape_of(case, axes)) < 0.7)


def mask_with_empty_rows(case: Case, rng: Any) -> Any:
    mask = rng.random(case.score_shape) < 0.7
    mask[..., ::3, :] = False
    return mask


def mask_without(*hidden: int) -> Generated:
    """Return a mask `(L, S)` that hides some keys from every row."""
    return Generated(lambda case, rng: np.tile(~np.isin(np.arange(case.S), hidden), (case.L, 1)))


def bias_with(hide: Callable[[Any, Any], Any]) -> Generated:
    """Return a bias that is -inf where `hide(i, j)` and normal elsewhere."""

    def make(case: Case, rng: Any) -> Any:
        i, j = np.arange(case.L)[:, None], np.arange(case.S)
        return np.where(hide(i, j), -np.inf, rng.normal(size=case.score_shape))

    return Generated(make)


def padding(case: Case, rng: Any) -> Any:
    """Return a mask `(batch, 1, 1, S)`: each batch item has its own length."""
    lengths = rng.integers(1, max(case.S, 1) + 1, size=(*case.full_batch, 1, 1, 1))
    mask = np.arange(case.S) < lengths
    return mask[0, 0] if case.one_head else mask


def offsets(case: Case, rng: Any) -> Any:
    return np.resize([5, -4, case.S, 0], case.full_batch)


def key_lengths(case: Case, rng: Any) -> Any:
    return np.resize([case.S // 2, 1, 0, case.S], case.full_batch)


def shuffled_pages(case: Case, rng: Any) -> Any:
    pages = case.shapes[1][0]
    return rng.permutation(pages).reshape(*case.batch, pages // math.prod(case.batch))


def like(score: Any, index: Any) -> Any:
    """Cast an index to the dtype of a score: the standard does not mix kinds of dtypes."""
    return cast(library_of(score).xp, index, score.dtype)


def bent(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Change the score nonlinearly, so that the order of the steps matters."""
    near = like(score, (i - j) * (i - j) < 9)
    head = like(score, 1 + h + 2 * b)
    return 0.25 * score * score + score / head + near


def slope_of_bent(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Return the derivative of `bent` with respect to the score."""
    return 0.5 * score + 1 / like(score, 1 + h + 2 * b)


def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score - like(score, abs(i - j)) * 0.125 / like(score, h + 1)


def hiding(where: Callable[..., Any]) -> Callable[..., Any]:
    """Return a score function that is -inf where `where(b, h, i, j)` holds."""

    def score_mod(score: Any, *at: Any) -> Any:
        xp = library_of(score).xp
        return xp.where(where(*at), xp.full_like(score, -math.inf), score)

    return score_mod


def two_in_three(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i + 2 * j + b + h) % 3 != 0
