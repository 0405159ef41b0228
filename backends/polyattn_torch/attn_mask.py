"""The attn_mask of scaled_dot_product_attention: everything that hides keys, and the bias.

Its is_causal counts from the first key, so it fits square scores only; any other band becomes a
mask, unless an engine takes it as window parameters.
"""

from __future__ import annotations

import functools
import math
import operator

import array_api_compat.torch as xp
import torch

from polyattn.plugin import (
    Backend,
    Indices,
    Mask,
    Operands,
    Problem,
    Span,
    band,
    column_span,
    is_full,
)

__all__ = [
    "as_bias",
    "attn_mask",
    "empty_rows",
    "is_square_causal",
    "made_mask",
    "masks_by_position_only",
    "may_have_empty_rows",
    "needs_band",
    "on_keys",
    "seen_keys",
    "takes_mask",
    "visible_scores",
]


def is_square_causal(problem: Problem) -> bool:
    """Return whether torch's is_causal means exactly this problem's band.

    Also where both lengths are unknown: it counts from the first key, whatever they are.
    """
    return (
        problem.is_causal
        and problem.window[0] is None
        and problem.query_offset == 0
        and problem.query_length == problem.key_length
        and masks_by_position_only(problem)
    )


def needs_band(problem: Problem) -> bool:
    """Return whether causal and window hide keys that is_causal cannot."""
    if problem.is_symbolic:
        return band(problem) != (None, None) and not is_square_causal(problem)
    whole = Span(0, problem.query_length), Span(0, problem.key_length)
    return not (is_full(problem, *whole) or is_square_causal(problem))


def seen_keys(problem: Problem) -> Span:
    """Return the keys that causal and window leave to some row; all keys if they leave none."""
    whole = Span(0, problem.key_length)
    if problem.is_symbolic or band(problem) == (None, None):
        return whole
    keys = column_span(problem, Span(0, problem.query_length))
    return keys if keys.length > 0 else whole


def on_keys(problem: Problem, keys: Span) -> Problem:
    """Return the problem of some of the keys, whose masks hide the others."""
    if keys == (0, problem.key_length):
        return problem
    offset = problem.query_offset
    assert offset is not None
    return problem._replace(key_length=keys.length, query_offset=offset - keys.start)


def visible_scores(problem: Problem) -> int:
    """Return how many of the scores of a head causal and window leave."""
    rows, keys = problem.query_length, problem.key_length
    if problem.query_offset is None:
        return rows * keys
    low, high = band(problem)
    before = 0 if low is None else _triangle(rows - 1 + low, rows, keys)
    after = 0 if high is None else _triangle(keys - 1 - high, rows, keys)
    return rows * keys - before - after


def _triangle(longest: int, rows: int, keys: int) -> int:
    """Return the sum of `longest`, `longest` - 1, … over the rows, each from 0 to `keys`."""
    whole = min(max(0, longest - keys), rows)
    longest = max(0, longest - whole)
    count = min(longest, rows - whole)
    return whole * keys + count * (2 * longest - count + 1) // 2


def takes_mask(problem: Problem) -> bool:
    """Return whether scaled_dot_product_attention needs an attn_mask."""
    return not masks_by_position_only(problem) or needs_band(problem)


def masks_by_position_only(problem: Problem) -> bool:
    """Return whether keys are hidden only by causal and window."""
    return problem.features.isdisjoint(("mask", "mask_mod", "mask_expression", "bias"))


def may_have_empty_rows(problem: Problem) -> bool:
    """Return whether attn_mask may leave a row without keys."""
    if problem.is_symbolic or not masks_by_position_only(problem) or problem.query_offset is None:
        return takes_mask(problem)
    low, high = band(problem)
    below = low is not None and low > problem.key_length - problem.query_length
    return below or (high is not None and high < 0)


def made_mask(problem: Problem, keys: Span, *, banded: bool) -> int:
    """Return the most elements of a mask built for the call on some keys.

    0 if the mask exists already, or is of unknown size: other kernels would hold as many scores.
    """
    if problem.is_symbolic:
        return 0
    scores = problem.query_length * keys.length
    if "mask_mod" in problem.features:
        return scores * math.prod(problem.batch) * problem.heads
    if problem.mask_spec is not None:
        return math.prod(_made_shape(problem, problem.mask_spec, keys, banded=banded))
    if not banded:
        return 0
    return scores * (math.prod(problem.batch) if problem.query_offset is None else 1)


def _made_shape(problem: Problem, spec: Mask, keys: Span, *, banded: bool) -> torch.Size:
    """Return the shape of the mask that an expression without functions gives, by meta tensors."""

    def stand_in(*shape: int, dtype: str = "int64") -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    mask = spec.map(lambda _, facts: stand_in(*facts.shape, dtype=facts.dtype))
    like, offset = stand_in(0), stand_in(*problem.batch, 1, 1, 1)
    x = Operands(like, like, like, mask, None, offset, None, None)
    rows = Span(0, problem.query_length)
    parts = Indices(problem, xp, x, rows, keys).visible(banded=banded)
    made: torch.Tensor = functools.reduce(operator.and_, parts)
    return made.shape


def attn_mask(
    problem: Problem, x: Operands, backend: Backend, keys: Span, *, banded: bool
) -> torch.Tensor | None:
    """Return mask and bias of some keys as one tensor (b, H, L, S), each axis whole or 1."""
    mask: torch.Tensor | None = None
    indices = Indices(problem, backend.xp, x, Span(0, problem.query_length), keys)
    for visible in indices.visible(banded=banded):
        mask = visible if mask is None else mask & visible
    if x.bias is not None:
        bias = _as_scores(problem, indices.of_scores(x.bias))
        mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
    return None if mask is None else _whole_score_axes(problem, mask)


def as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a bool mask as an equivalent bias; a bias unchanged."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


def empty_rows(mask: torch.Tensor) -> torch.Tensor:
    """Return which rows of a mask or bias have no visible key, keeping the last axis."""
    visible = mask if mask.dtype == torch.bool else mask != -torch.inf
    return ~visible.any(dim=-1, keepdim=True)


def _as_scores(problem: Problem, bias: torch.Tensor) -> torch.Tensor:
    """Return the bias in the query's dtype or, if it has another, in the accumulator's."""
    if problem.bias_dtype == problem.dtype:
        return bias
    return bias.to(getattr(torch, problem.accumulator))


def _whole_score_axes(problem: Problem, tensor: torch.Tensor) -> torch.Tensor:
    """Return a mask or bias with the axes (batch, H, L, S), each whole or 1."""
    rank = max(4, len(problem.batch) + 3)
    tensor = tensor.reshape(*(1,) * (rank - tensor.ndim), *tensor.shape)
    if rank == 4:
        return tensor
    last = tensor.shape[-3:]
    return tensor.expand(*problem.batch, *last).reshape(math.prod(problem.batch), *last)
