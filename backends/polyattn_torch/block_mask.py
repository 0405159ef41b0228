"""The tiles of the scores that FlexAttention computes, and the mask for those only partly visible.

The intervals of a mask give its tiles exactly where its arrays can be read before the call. Else
torch.compile traces this together with the call. So a rule's result is reduced to tiles as it is
computed, and nothing as large as the scores is held.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from polyattn._core.tiles.visibility import score_axes
from polyattn.plugin import Backend, Mask, Operands, PointIndices, Problem, TileGrid

#: Rows and keys of a tile: FlexAttention's default, a multiple of its CUDA kernels' tiles.
TILE = 128
# Of more intervals in a row the least and greatest numbers of each tile are known in less time.
MOST_INTERVALS = 64
Tiles = tuple[torch.Tensor, torch.Tensor]  # whether any and whether all keys of each are visible


def block_mask(problem: Problem, x: Operands, mask: Mask, xp: Any, tiles: Tiles | None) -> Any:
    """Return the call's combined mask as FlexAttention's BlockMask, of known tiles or others."""
    from torch.nn.attention.flex_attention import BlockMask

    indices = point_indices(problem, x)

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return mask.seen(indices(b, h, i, j))

    if tiles is not None:
        any_visible, all_visible = tiles
    elif mask.has_rule:
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


def known_tiles(problem: Problem, x: Operands, mask: Mask | None, backend: Backend) -> Tiles | None:
    """Return the tiles of the call's combined mask by its intervals, None if these are unknown."""
    if mask is None or mask.has_rule or torch.compiler.is_compiling():
        return None
    offset: Any = problem.query_offset
    arrays: list[Any] = [array for _, array in mask.carried()]
    if offset is None:
        offset = x.query_offset[..., 0, 0, 0]  # type: ignore[index]
        arrays.append(offset)
    # To read an array elsewhere would wait for its device.
    if not all(isinstance(array, torch.Tensor) and backend.is_eager(array) for array in arrays):
        return None
    tables = _tables.__wrapped__ if arrays else _tables
    lengths = problem.query_length, problem.key_length
    found = tables(mask, lengths, offset, problem.batch, problem.heads)
    return found and tuple([torch.from_numpy(table).to(x.query.device) for table in found])


@lru_cache(maxsize=16)
def _tables(mask: Mask, lengths: tuple[int, int], offset: Any, batch: Any, heads: int) -> Any:
    found = mask.intervals(
        lengths, offset, batch=batch, heads=heads, most=MOST_INTERVALS, evaluates=False
    )
    return None if found is None else found.tiles(lengths, (TILE, TILE))


def point_indices(problem: Problem, x: Operands) -> Callable[..., PointIndices]:
    """Return a function (b, h, i, j) -> PointIndices; each index is a number or an array."""
    offset: Any = problem.query_offset
    if offset is None:
        offsets: Any = x.query_offset
        offset = offsets.expand(*problem.batch, 1, 1, 1).reshape(-1).long()
    return lambda b, h, i, j: PointIndices(b, h, i, j, offset=offset, batch=problem.batch)


def _evaluated(problem: Problem, x: Operands, mask: Mask) -> Tiles:
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
