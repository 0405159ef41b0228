"""The attn_mask of scaled_dot_product_attention: everything that hides keys, and the bias.

Its is_causal counts from the first key, so it fits square scores only; any other band becomes a
mask, unless an engine takes it as window parameters.
"""

from __future__ import annotations

import math

import array_api_compat.torch as xp
import torch

from polyattn._core.tiles.visibility import band_from, made_shape, score_axes
from polyattn.plugin import Indices, Operands, Problem, Span, band, column_span, visible_keys


def is_square_causal(problem: Problem) -> bool:
    """Return whether torch's is_causal means exactly this problem's band."""
    # Also where both lengths are unknown: it counts from the first key, whatever they are.
    return (
        problem.query_length == problem.key_length
        and problem.masks_by_position_only
        and band_from(problem, 0) == (None, 0)
    )


def needs_band(problem: Problem) -> bool:
    """Return whether causal and window hide keys that is_causal cannot."""
    return band(problem) != (None, None) and not is_square_causal(problem)


def seen_keys(problem: Problem) -> Span:
    """Return the keys that causal and window leave to some row; all keys if they leave none."""
    keys = column_span(problem, Span(0, problem.query_length))
    return keys if keys.length > 0 else Span(0, problem.key_length)


def takes_mask(problem: Problem) -> bool:
    """Return whether scaled_dot_product_attention needs an attn_mask."""
    return not problem.masks_by_position_only or needs_band(problem)


def made_mask(problem: Problem, keys: Span, *, banded: bool) -> int:
    """Return the most elements of a mask built for the call on some keys."""
    # 0 if it exists already, or is of unknown size: other kernels would hold as many scores.
    mask = None
    if problem.mask_spec is not None and "mask_mod" not in problem.features:
        mask = _shape_of_expression(problem, keys)
    made = made_shape(problem._replace(key_length=keys.length), banded=banded, mask=mask)
    return 0 if made is None else math.prod(made)


def _shape_of_expression(problem: Problem, keys: Span) -> tuple[int, ...] | None:
    """Return the shape of the mask that an expression without functions gives, by meta tensors."""
    if problem.is_symbolic or problem.mask_spec is None:
        return None

    def stand_in(*shape: int, dtype: str = "int64") -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    mask = problem.mask_spec.map(lambda _, facts: stand_in(*facts.shape, dtype=facts.dtype))
    like, offset = stand_in(0), stand_in(*problem.batch, 1, 1, 1)
    x = Operands(like, like, like, mask=mask, query_offset=offset)
    made = visible_keys(problem, x, xp, keys, banded=False)
    return None if made is None else tuple(made.shape)


def attn_mask(problem: Problem, x: Operands, keys: Span, *, banded: bool) -> torch.Tensor | None:
    """Return mask and bias of some keys as one tensor (b, H, L, S), each axis whole or 1."""
    mask = visible_keys(problem, x, xp, keys, banded=banded)
    if x.bias is not None:
        bias = Indices(problem, xp, x, Span(0, problem.query_length), keys).of_scores(x.bias)
        if problem.bias_dtype != problem.dtype:
            bias = bias.to(getattr(torch, problem.accumulator))
        mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
    length = x.key.shape[-2] if problem.is_symbolic else keys.length
    return None if mask is None else _of_whole_rows(problem, score_axes(problem, mask, xp), length)


def _of_whole_rows(problem: Problem, mask: torch.Tensor, length: int) -> torch.Tensor:
    """Expand a column for all keys on CUDA, whose memory-efficient kernel refuses it."""
    if problem.device_kind != "cuda" or mask.shape[-1] != 1:
        return mask
    return mask.expand(*mask.shape[:-1], length).contiguous()


def as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a bool mask as an equivalent bias; a bias unchanged."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
