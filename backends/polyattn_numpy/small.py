"""Small calls by ten to twenty calls of NumPy: there Python takes most of the time.

The kernel `dense` takes 1.2 to 4 times as long, `tiled` 1.5 to 7 times if there is one item. What
follows from positions alone is computed in the first call.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from polyattn.plugin import Array, Backend, Indices, Kernel, Operands, Problem, Span, split
from polyattn_numpy.scratch import ones, xp
from polyattn_numpy.tiling import is_tiny


class Small(Kernel):
    """The formula at once, for few scores."""

    name = "small"
    features = frozenset({
        "bias", "causal", "grouped_heads", "logsumexp", "mask", "mask_expression", "mask_mod",
        "query_offset", "query_offset_array", "scale", "score_expression", "score_mod", "softcap",
        "value_size", "window",
    })  # fmt: skip
    promises = Kernel.promises | {"batch_invariant"}
    takes_empty = False

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why the arrays are not NumPy's own floats."""
        only = problem.dtype == problem.accumulator
        return [] if only else ["it supports float32 and float64 only"]

    def only_on_request(self, problem: Problem) -> str | None:
        """Leave larger calls to tiles."""
        return None if is_tiny(problem) else "the problem is large: tiles are faster"

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        query, key, value = operands[:3]
        grouped = problem.heads != problem.key_heads
        if grouped:
            rows = problem.group_size * problem.query_length
            query = query.reshape(*query.shape[:-3], problem.key_heads, rows, problem.head_size)
        s = np.matmul(query * problem.scale, key.swapaxes(-1, -2))
        if not PLAIN.issuperset(problem.features):
            s = changed(problem, operands, s.reshape(problem.scores)).reshape(s.shape)
        maximum = s.max(axis=-1, keepdims=True)
        # A row of −inf only has weights of 0, not NaN.
        np.subtract(s, np.maximum(maximum, _LEAST[s.dtype.char]), s)
        np.exp(s, s)
        total = np.matmul(s, ones(problem.key_length, s.dtype))
        output = np.matmul(s, value)
        output /= np.maximum(total, 1)  # it is 0, or at least the 1 of the maximum
        logsumexp = None
        if "logsumexp" in problem.features:
            logsumexp = (np.log(total) + maximum)[..., 0]
        if grouped:
            output = output.reshape(*problem.scores[:-1], problem.value_size)
            logsumexp = None if logsumexp is None else logsumexp.reshape(problem.scores[:-1])
        if problem.masks and not math.isfinite(np.vdot(output, output)):
            # Hidden numbers may have spoiled it. The other items stay as in any other batch.
            kept = np.isfinite(output).all(axis=(-3, -2, -1), keepdims=True)
            exact, exact_logsumexp = backend.tiled(problem, operands, backend)
            output = np.where(kept, output, exact)
            if logsumexp is not None:
                logsumexp = np.where(kept[..., 0], logsumexp, exact_logsumexp)
        if not query.dtype.isnative:
            output = output.astype(query.dtype)
        return output, logsumexp


#: The features that change no score.
PLAIN = frozenset({"grouped_heads", "logsumexp", "query_offset", "scale", "value_size"})
_LEAST: dict[str, Any] = {dtype: np.finfo(dtype).min for dtype in "fd"}
_HIDDEN = np.array(-math.inf, np.float32)  # in 0.7 of the time of a Python number


def changed(problem: Problem, x: Operands, s: Array) -> Array:
    """Return scores after the steps that follow the product."""
    # Larger ones, on request, are not kept.
    known = (by_position if is_tiny(problem) else by_position.__wrapped__)(problem)
    if problem.softcap is not None:
        s = problem.softcap * np.tanh(s / problem.softcap)
    if known.leaves_score_mod:
        s = np.array(indices(problem, x).modified(s))  # a function may return what is not its own
    if known.added is not None:
        s = s + known.added
    if x.bias is not None:
        s = s + (x.bias if x.bias.dtype is s.dtype else x.bias.astype(s.dtype))
    if known.leaves_masks:
        banded = problem.query_offset is None
        arrays: Any = [x.mask] if isinstance(x.mask, np.ndarray) and not banded else None
        for seen in arrays or indices(problem, x).visible(banded=banded):
            s = np.where(seen, s, _HIDDEN)
    return s


class ByPosition(NamedTuple):
    """The scores that positions alone decide, and which steps are left to each call."""

    added: Array | None  # to the scores: −inf where a key is hidden
    leaves_masks: bool
    leaves_score_mod: bool


@lru_cache(maxsize=64)
def by_position(problem: Problem) -> ByPosition:
    """Return what the problem itself says of masks and rules: they have no array or function."""
    mask, score_mod, features = problem.mask_spec, problem.score_spec, problem.features
    banded = problem.query_offset is not None  # the positions are known
    knows_mask = banded and features.isdisjoint(("mask", "mask_mod")) and not split(mask)[1]
    adds = banded and score_mod is not None and score_mod.is_additive and not split(score_mod)[1]
    known = Operands.of_options(
        mask=mask if knows_mask else None, score_mod=score_mod if adds else None
    )
    lead = (1,) * len(problem.batch)
    at = indices(problem, known)
    added = at.modified(np.zeros((*lead, *problem.scores[-3:]), problem.accumulator))
    for seen in at.visible(banded=banded):
        added = np.where(seen, added, _HIDDEN)
    return ByPosition(
        added if added.any() else None,
        not knows_mask,
        not adds and not features.isdisjoint(("score_mod", "score_expression")),
    )


def indices(problem: Problem, x: Operands) -> Indices:
    """Return the indices of all scores."""
    return Indices(problem, xp, x, Span(0, problem.query_length), Span(0, problem.key_length))
