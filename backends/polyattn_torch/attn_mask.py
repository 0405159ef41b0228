"""What scaled_dot_product_attention is given as attn_mask: all that hides keys, and the bias.

Its is_causal counts from the first key, so it stands for square scores alone; any other band is
made a mask of, unless an engine takes it as numbers.
"""

from __future__ import annotations

import functools
import math
import operator

import array_api_compat.torch as xp
import torch

from polyattn.plugin import Backend, Indices, Mask, Operands, Problem, Span, band, is_full
from polyattn_torch.batched import whole_score_axes

__all__ = [
    "as_bias",
    "attn_mask",
    "empty_rows",
    "is_bare",
    "is_square_causal",
    "made_mask",
    "may_have_empty_rows",
    "needs_band",
    "takes_mask",
]


def is_square_causal(problem: Problem) -> bool:
    """Whether torch's is_causal means just what this problem's band means."""
    return (
        problem.is_causal
        and problem.window[0] is None
        and problem.query_offset == 0
        and problem.query_length == problem.key_length
        and is_bare(problem)
    )


def needs_band(problem: Problem) -> bool:
    """Whether causal and window hide a key that is_causal would not."""
    whole = Span(0, problem.query_length), Span(0, problem.key_length)
    return not (is_full(problem, *whole) or is_square_causal(problem))


def takes_mask(problem: Problem) -> bool:
    """Whether scaled_dot_product_attention is given an attn_mask."""
    return not is_bare(problem) or needs_band(problem)


def is_bare(problem: Problem) -> bool:
    """Whether positions alone can hide a key."""
    return problem.features.isdisjoint(("mask", "mask_mod", "mask_expression", "bias"))


def may_have_empty_rows(problem: Problem) -> bool:
    """Whether a row may be left without keys by what goes into attn_mask."""
    if not is_bare(problem) or problem.query_offset is None:
        return takes_mask(problem)
    low, high = band(problem)
    below = low is not None and low > problem.key_length - problem.query_length
    return below or (high is not None and high < 0)


def made_mask(problem: Problem, *, banded: bool) -> int:
    """Return how many elements a mask may have that is not there yet.

    Parameters
    ----------
    problem : Problem
        The facts of the call.
    banded : bool
        Whether causal and window go into it.

    Returns
    -------
    int
        Their number.
    """
    scores = problem.query_length * problem.key_length
    if "mask_mod" in problem.features:
        return scores * math.prod(problem.batch) * problem.heads
    if problem.mask_spec is not None:
        return math.prod(_made_shape(problem, problem.mask_spec, banded=banded))
    if not banded:
        return 0
    return scores * (math.prod(problem.batch) if problem.query_offset is None else 1)


def _made_shape(problem: Problem, form: Mask, *, banded: bool) -> torch.Size:
    """Return the shape of what a mask value without functions says, by tensors without data."""

    def stand_in(*shape: int, dtype: str = "int64") -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    mask = form.map(lambda _, facts: stand_in(*facts.shape, dtype=facts.dtype))
    like, offset = stand_in(0), stand_in(*problem.batch, 1, 1, 1)
    x = Operands(like, like, like, mask, None, offset, None, None)
    rows, columns = Span(0, problem.query_length), Span(0, problem.key_length)
    seen = Indices(problem, xp, x, rows, columns).visible(banded=banded)
    made: torch.Tensor = functools.reduce(operator.and_, seen)
    return made.shape


def attn_mask(
    problem: Problem, x: Operands, backend: Backend, *, banded: bool
) -> torch.Tensor | None:
    """Return all that hides keys and the bias as one tensor.

    Parameters
    ----------
    problem, x, backend
        As a kernel is given them.
    banded : bool
        Whether causal and window go into it.

    Returns
    -------
    Tensor or None
        Bool or float, of the axes (batch, H, L, S), each whole or 1; None if nothing is hidden.
    """
    mask: torch.Tensor | None = None
    rows, columns = Span(0, problem.query_length), Span(0, problem.key_length)
    indices = Indices(problem, backend.xp, x, rows, columns)
    for seen in indices.visible(banded=banded):
        mask = seen if mask is None else mask & seen
    if x.bias is not None:
        bias = _as_scores(problem, x.bias)
        mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
    return None if mask is None else whole_score_axes(problem, mask)


def as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask as the bias that means the same; a bias as it is."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


def empty_rows(mask: torch.Tensor) -> torch.Tensor:
    """Return which rows a mask or bias leaves no key, its last axis kept."""
    seen = mask if mask.dtype == torch.bool else mask != -torch.inf
    return ~seen.any(dim=-1, keepdim=True)


def _as_scores(problem: Problem, bias: torch.Tensor) -> torch.Tensor:
    """Return the bias in a dtype that sdpa takes and that loses nothing of the scores' own."""
    if problem.bias_dtype == problem.dtype:
        return bias
    return bias.to(getattr(torch, problem.accumulator))
