"""The array that a mask expression or function becomes for a call."""

from __future__ import annotations

from functools import lru_cache

import array_api_compat.numpy as xp
import numpy as np

from polyattn._core.tiles.visibility import made_shape
from polyattn.plugin import Backend, Operands, Problem, visible_keys


@lru_cache(maxsize=256)
def mask_shape(problem: Problem) -> tuple[int, ...] | None:
    """Return the shape of the array, or None without a mask expression or function."""
    spec = problem.mask_spec
    if spec is None or "mask_mod" in problem.features:
        return made_shape(problem, banded=False)

    # Only which axes are longer than 1 matters.
    def short(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([min(length, 2) for length in shape])

    *batch, heads, rows, keys = short(problem.scores)
    few = problem._replace(batch=tuple(batch), heads=heads, query_length=rows, key_length=keys)
    mask = spec.map(lambda _, facts: np.zeros(short(facts.shape), facts.dtype))
    unused, offset = np.zeros(0), np.zeros((*few.batch, 1, 1, 1), int)
    x = Operands(query=unused, key=unused, value=unused, mask=mask, query_offset=offset)
    seen = visible_keys(few, x, xp, banded=False)
    assert seen is not None
    whole = problem.scores[-seen.ndim :]
    return tuple([one if one == 1 else all_ for one, all_ in zip(seen.shape, whole, strict=True)])


def with_mask_array(problem: Problem, x: Operands, backend: Backend) -> Operands:
    """Return the operands with an array in place of a mask expression or function."""
    if mask_shape(problem) is None:
        return x
    return x._replace(mask=visible_keys(problem, x, backend.xp, banded=False))
