"""Kernel for paged keys: FlashAttention on CUDA, which gathers them by the block table.

It is the operator below `torch.nn.attention.varlen.varlen_attn`, whose module takes two seconds to
import. The pools are read in place, with any strides. A call that it does not support is left to
the kernels after it, which get a gathered, contiguous copy.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from polyattn.plugin import Array, Backend, CachePadding, Kernel, Operands, Problem, one_batch_axis
from polyattn_torch.device_info import describe_device
from polyattn_torch.engines import (
    ABSENT,
    FLASH_ARGUMENTS,
    HALF,
    HALF_ONLY,
    LENGTHS,
    aligned,
    operator,
)

_flash = operator("_flash_attention_forward", *FLASH_ARGUMENTS, "seqused_k", "block_table")
# What FlashAttention cuts a page into, and its largest head.
PAGE, LARGEST_HEAD = 256, 256


class Paged(Kernel):
    """FlashAttention over the pages of a block table."""

    name = "paged"
    features = frozenset({
        "batch_broadcast", "block_table", "causal", "grouped_heads", "logsumexp",
        "mask_expression", "query_offset", "query_offset_array", "scale", "window",
    })  # fmt: skip
    devices = frozenset({"cuda"} if _flash is not None else ())
    # A weight of 0 meets the value of a key that a window hides.
    promises = frozenset()
    takes_empty = False

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why FlashAttention cannot read the pages of a problem."""
        if "block_table" not in problem.features:
            return ["it supports paged keys only, without gradients"]
        if _flash is None:
            return [ABSENT]
        device, reasons = describe_device(problem.device), []
        if (device.capability or (0, 0)) < (8, 0):
            reasons.append("it needs compute capability 8.0")
        if problem.dtype not in HALF:
            reasons.append(HALF_ONLY)
        if not isinstance(problem.mask_spec, CachePadding):
            reasons.append("it hides keys by key_lengths and a window only, the newest query last")
        if problem.is_symbolic:
            reasons.append(LENGTHS)
        elif (problem.page or 0) % PAGE:
            reasons.append(f"its pages hold a multiple of {PAGE} keys; these hold {problem.page}")
        if problem.head_size > LARGEST_HEAD or problem.head_size % 8:
            reasons.append(f"its vectors have a multiple of 8 numbers, up to {LARGEST_HEAD}")
        return reasons

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        x: Any = operands
        items, rows = math.prod(problem.batch), problem.query_length
        query = one_batch_axis(problem, x.query, backend.xp).transpose(1, 2).flatten(0, 1)
        table = x.block_table.expand(*problem.batch, -1).reshape(items, -1)
        # The lengths are not checked: beyond the table FlashAttention would read other memory.
        lengths = x.key_lengths.clamp(0, problem.key_length).expand(problem.batch).reshape(items)
        count = torch.arange(items + 1, dtype=torch.int32, device=query.device)
        left, right = problem.window
        left, right = -1 if left is None else left, -1 if right is None else right
        right = 0 if problem.is_causal else right
        output, logsumexp, *_ = _flash(
            aligned(query), aligned(x.key.transpose(1, 2)), aligned(x.value.transpose(1, 2)),
            count * rows, count * problem.key_length, rows, problem.key_length, 0.0,
            (left, right) == (-1, 0), False, scale=problem.scale, window_size_left=left,
            window_size_right=right, seqused_k=lengths.int().contiguous(),
            block_table=table.int().contiguous(),
        )  # fmt: skip
        shape = (*problem.batch, rows, problem.heads)
        output = output.reshape(*shape, -1).transpose(-3, -2)
        if "logsumexp" not in problem.features:
            return output, None
        logsumexp = logsumexp.T.reshape(shape).transpose(-2, -1)
        # FlashAttention gives +inf for a row that sees no key.
        return output, logsumexp.masked_fill(logsumexp == torch.inf, -torch.inf)
