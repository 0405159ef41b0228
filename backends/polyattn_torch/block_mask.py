"""Which tiles of the scores FlexAttention computes, and by what it masks those that it must.

torch.compile traces this with the call itself. So what a rule says of each key is looked at as it
is made, and nothing as large as the scores is held.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from polyattn.plugin import Mask, Operands, PointIndices, Problem, TileGrid

__all__ = ["TILE", "block_mask", "single"]

#: Rows and keys of a tile: FlexAttention's own number, which its kernels on CUDA divide.
TILE = 128


def block_mask(problem: Problem, x: Operands, mask: Mask, xp: Any) -> Any:
    """Return a mask as FlexAttention takes it.

    Parameters
    ----------
    problem, x
        As a kernel is given them.
    mask : Mask
        All that masks in the call.
    xp : module
        The standard's namespace of torch.

    Returns
    -------
    BlockMask
        Its tiles: those to compute, which of them to mask, and how.
    """
    from torch.nn.attention.flex_attention import BlockMask

    at = single(problem, x)

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return mask.seen(at(b, h, i, j))

    if mask.has_rule:
        some, every = _looked_at(problem, x, mask)
    else:
        answer = TileGrid(problem, x, xp, (TILE, TILE), x.query).of(mask)
        some, every = (_flat(problem, table) for table in answer)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every), *_listed(some & every), BLOCK_SIZE=TILE, mask_mod=mask_mod,
        seq_lengths=(problem.query_length, problem.key_length),
        compute_q_blocks=problem.requires_grad,
    )  # fmt: skip


def single(problem: Problem, x: Operands) -> Callable[..., PointIndices]:
    """Return what makes the place of single indices, or of arrays of them.

    Parameters
    ----------
    problem, x
        As a kernel is given them.

    Returns
    -------
    callable
        A function (b, h, i, j) -> Called.
    """
    offset: Any = problem.query_offset
    if offset is None:
        given: Any = x.query_offset
        offset = given.expand(*problem.batch, 1, 1, 1).reshape(-1).long()
    return lambda b, h, i, j: PointIndices(b, h, i, j, offset=offset, batch=problem.batch)


def _looked_at(problem: Problem, x: Operands, mask: Mask) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether any and whether all keys of each tile are seen, (B or 1, H or 1, rows, keys).

    A tile that reaches beyond the last row or key has that once more, which changes neither.
    """
    device, lengths = x.query.device, (problem.query_length, problem.key_length)
    down, across = (-(-length // TILE) for length in lengths)
    i, j = (
        torch.arange(tiles * TILE, device=device).clamp(max=length - 1)
        for tiles, length in zip((down, across), lengths, strict=True)
    )
    b = torch.arange(math.prod(problem.batch), device=device).reshape(-1, 1, 1, 1, 1, 1)
    h = torch.arange(problem.heads, device=device).reshape(-1, 1, 1, 1, 1)
    place = single(problem, x)(b, h, i.reshape(down, 1, TILE, 1), j.reshape(across, 1, TILE))
    seen = mask.seen(place)
    seen = seen.reshape(*(1,) * (6 - seen.ndim), *seen.shape)
    seen = seen.expand(*seen.shape[:2], down, across, TILE, TILE)
    return seen.any(-1).any(-1), seen.all(-1).all(-1)


def _flat(problem: Problem, table: torch.Tensor) -> torch.Tensor:
    """Return a table (..., H, rows, keys) with one batch axis; each of both axes whole or 1."""
    lead = table.shape[:-3]
    items = 1 if math.prod(lead) == 1 else math.prod(problem.batch)
    table = table.reshape(*(1,) * (3 - table.ndim), *table.shape)
    if items != 1:
        table = table.expand(*problem.batch, *table.shape[-3:])
    return table.reshape(items, *table.shape[-3:])


def _listed(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many tiles of each row of them are marked, and which: those first, in order."""
    marks = tiles.int()
    order = marks.argsort(dim=-1, descending=True, stable=True)
    return marks.sum(dim=-1, dtype=torch.int32), order.int()
