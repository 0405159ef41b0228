"""The tiles of the scores that FlexAttention computes, and the mask for those only partly visible.

torch.compile traces this together with the call. So a rule's result is reduced to tiles as it is
computed, and nothing as large as the scores is held.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from polyattn.plugin import Mask, Operands, PointIndices, Problem, TileGrid
from polyattn.plugin.internal import score_axes

#: Rows and keys of a tile: FlexAttention's default, a multiple of its CUDA kernels' tiles.
TILE = 128


def block_mask(problem: Problem, x: Operands, mask: Mask, xp: Any) -> Any:
    """Return the call's combined mask as FlexAttention's BlockMask."""
    from torch.nn.attention.flex_attention import BlockMask

    indices = point_indices(problem, x)

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return mask.seen(indices(b, h, i, j))

    if mask.has_rule:
        any_visible, all_visible = _evaluated(problem, x, mask)
    else:
        coverage = TileGrid(problem, x, xp, (TILE, TILE), x.query).of(mask)
        any_visible, all_visible = (score_axes(problem, table, xp) for table in coverage)
    return BlockMask.from_kv_blocks(
        *_listed(any_visible & ~all_visible), *_listed(any_visible & all_visible),
        BLOCK_SIZE=TILE, mask_mod=mask_mod,
        seq_lengths=(problem.query_length, problem.key_length),
        compute_q_blocks=problem.requires_grad,
    )  # fmt: skip


def point_indices(problem: Problem, x: Operands) -> Callable[..., PointIndices]:
    """Return a function (b, h, i, j) -> PointIndices; each index is a number or an array."""
    offset: Any = problem.query_offset
    if offset is None:
        offsets: Any = x.query_offset
        offset = offsets.expand(*problem.batch, 1, 1, 1).reshape(-1).long()
    return lambda b, h, i, j: PointIndices(b, h, i, j, offset=offset, batch=problem.batch)


def _evaluated(problem: Problem, x: Operands, mask: Mask) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether any and all keys of each tile are visible, (B or 1, H or 1, rows, keys)."""
    device, lengths = x.query.device, (problem.query_length, problem.key_length)
    down, across = (-(-length // TILE) for length in lengths)
    # A tile beyond the last row or key repeats it, which changes neither result.
    i, j = (
        torch.arange(tiles * TILE, device=device).clamp(max=length - 1)
        for tiles, length in zip((down, across), lengths, strict=True)
    )
    b = torch.arange(math.prod(problem.batch), device=device).reshape(-1, 1, 1, 1, 1, 1)
    h = torch.arange(problem.heads, device=device).reshape(-1, 1, 1, 1, 1)
    i, j = i.reshape(down, 1, TILE, 1), j.reshape(across, 1, TILE)
    visible = mask.seen(point_indices(problem, x)(b, h, i, j))
    visible = visible.reshape(*(1,) * (6 - visible.ndim), *visible.shape)
    visible = visible.expand(*visible.shape[:2], down, across, TILE, TILE)
    return visible.any(-1).any(-1), visible.all(-1).all(-1)


def _listed(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of marked tiles in each row, and all tile numbers, marked ones first."""
    marks = tiles.int()
    order = marks.argsort(dim=-1, descending=True, stable=True)
    return marks.sum(dim=-1, dtype=torch.int32), order.int()
