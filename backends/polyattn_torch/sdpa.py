"""torch's own scaled_dot_product_attention, for what it computes by the semantics exactly.

Its is_causal counts from the first key, so it is used for square scores alone; any other band is
passed as a mask. On the CPU a row without keys gives 0, as it should (torch >= 2.5).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from polyattn.plugin import Array, Backend, Indices, Kernel, Operands, Problem, Span, is_full
from polyattn_torch.batched import one_batch_axis, whole_score_axes

__all__ = ["Sdpa"]

# Above this many elements (64 MiB of bool) a mask made only to hold positions costs more than it
# saves: tiled skips what the mask would hide.
LARGEST_MADE_MASK = 2**26


class Sdpa(Kernel):
    """`torch.nn.functional.scaled_dot_product_attention`."""

    name = "sdpa"
    features = frozenset(
        {
            "batch_broadcast",
            "bias",
            "causal",
            "grouped_heads",
            "mask",
            "mask_mod",
            "query_offset",
            "query_offset_array",
            "scale",
            "value_size",
            "window",
        }
    )
    # torch multiplies a masked key's weight 0 with whatever its value holds.
    poison_safe = False

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why torch would compute something else, or too dearly."""
        reasons = []
        if "jvp" in problem.transforms:
            reasons.append("it has no forward derivative")
        made = _made_mask(problem)
        if made > LARGEST_MADE_MASK:
            reasons.append(f"it needs a mask made for it, here of {made:,} elements")
        if (
            problem.bias_dtype not in (None, problem.dtype)
            and problem.dtype in ("float16", "bfloat16")
            and problem.device_kind != "cpu"
        ):
            # pytorch#191612: cuDNN reads the bits of a float32 mask as 16-bit numbers.
            reasons.append(f"it cannot add a {problem.bias_dtype} bias to {problem.dtype} scores")
        return reasons

    def only_on_request(self, problem: Problem) -> str | None:
        """torch.func.vmap knows no rule for it on the CPU."""
        if "vmap" in problem.transforms:
            return "torch.func.vmap would call it item by item"
        return None

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output."""
        mask = _mask(problem, operands, backend) if problem.masks else None
        output = F.scaled_dot_product_attention(
            one_batch_axis(problem, operands.query),
            one_batch_axis(problem, operands.key),
            one_batch_axis(problem, operands.value),
            attn_mask=mask,
            # A plain bool, where torch.compile would make a symbol of the lengths compared.
            is_causal=True if mask is None and _is_square_causal(problem) else False,  # noqa: SIM210
            scale=problem.scale,
            enable_gqa="grouped_heads" in problem.features,
        )
        if len(problem.batch) != 1:
            output = output.reshape(*problem.batch, *output.shape[-3:])
        return output, None


def _is_square_causal(problem: Problem) -> bool:
    """Whether torch's is_causal means just what this problem's band means."""
    return (
        problem.is_causal
        and problem.window[0] is None
        and problem.query_offset == 0
        and problem.query_length == problem.key_length
        and problem.features.isdisjoint(("mask", "mask_mod", "bias"))
    )


def _hides_nothing(problem: Problem) -> bool:
    return is_full(problem, Span(0, problem.query_length), Span(0, problem.key_length))


def _needs_mask(problem: Problem) -> bool:
    return not (_hides_nothing(problem) or _is_square_causal(problem))


def _made_mask(problem: Problem) -> int:
    """Return how many elements a mask may have that is not there yet."""
    scores = problem.query_length * problem.key_length
    if "mask_mod" in problem.features:
        return scores * math.prod(problem.batch) * problem.heads
    if not _needs_mask(problem):
        return 0
    return scores * (math.prod(problem.batch) if problem.query_offset is None else 1)


def _mask(problem: Problem, x: Operands, backend: Backend) -> torch.Tensor | None:
    """Return all that hides keys and the bias as one attn_mask, or None."""
    mask: torch.Tensor | None = None
    rows, columns = Span(0, problem.query_length), Span(0, problem.key_length)
    indices = Indices(problem, backend.xp, x.query, rows, columns)
    for seen in indices.visible(x, banded=_needs_mask(problem)):
        mask = seen if mask is None else mask & seen
    if x.bias is not None:
        bias = _as_scores(problem, x.bias)
        mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
    return None if mask is None else whole_score_axes(problem, mask)


def _as_scores(problem: Problem, bias: torch.Tensor) -> torch.Tensor:
    """Return the bias in a dtype that sdpa takes and that loses nothing of the scores' own."""
    if problem.bias_dtype == problem.dtype:
        return bias
    return bias.to(getattr(torch, problem.accumulator))
