"""torch's own scaled_dot_product_attention, for what it computes by the semantics exactly.

On the CPU a row without keys gives 0, as it should (torch >= 2.5). What torch does not hand on, or
computes wrongly, goes another way, which is looked up once and costs the plain call nothing.
"""

from __future__ import annotations

import torch.nn.functional as F

from polyattn.plugin import Array, Backend, Kernel, Operands, Problem
from polyattn_torch.attn_mask import attn_mask, made_mask
from polyattn_torch.batched import one_batch_axis
from polyattn_torch.device_info import facts_of
from polyattn_torch.engine_report import remark_on
from polyattn_torch.quirks import refusals
from polyattn_torch.route import route_of, why_no_engine
from polyattn_torch.selftest import TESTED, disagreement
from polyattn_torch.workarounds import Arrays, detoured, returned

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
            "logsumexp",
            "mask",
            "mask_mod",
            "mask_expression",
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
        reasons = refusals(problem, facts_of(problem.device))
        if "jvp" in problem.transforms:
            reasons.append("it has no forward derivative")
        without = why_no_engine(problem)
        if without is not None:
            return [*reasons, without]
        made = made_mask(problem, banded=route_of(problem).banded)
        if made > LARGEST_MADE_MASK:
            reasons.append(f"it needs a mask made for it, here of {made:,} elements")
        if problem.device_kind in TESTED and not reasons:
            found = disagreement(problem.device_kind, self)
            reasons += [] if found is None else [found]
        return reasons

    def only_on_request(self, problem: Problem) -> str | None:
        """torch.func.vmap knows no rule for it on the CPU."""
        if "vmap" in problem.transforms:
            return "torch.func.vmap would call it item by item"
        return None

    def remark(self, problem: Problem) -> str | None:
        """Name the engine that torch would take."""
        return remark_on(problem, route_of(problem))

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        route = route_of(problem)
        query = one_batch_axis(problem, operands.query)
        key = one_batch_axis(problem, operands.key)
        value = one_batch_axis(problem, operands.value)
        mask, empty, logsumexp = None, None, None
        if route.masked:
            mask = attn_mask(problem, operands, backend, banded=route.banded)
        if route.detours:
            (query, key, value, mask), empty = detoured(
                problem, route.detours, Arrays(query, key, value, mask)
            )
        if route.engine is None:
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=route.is_causal,
                scale=problem.scale, enable_gqa=route.enable_gqa,
            )  # fmt: skip
        else:
            output, logsumexp = route.engine.call(problem, query, key, value, mask)
        if route.detours:
            output, logsumexp = returned(problem, output, logsumexp, empty)
        if len(problem.batch) != 1:
            output = output.reshape(*problem.batch, *output.shape[-3:])
            if logsumexp is not None:
                logsumexp = logsumexp.reshape(*problem.batch, *logsumexp.shape[-2:])
        return output, logsumexp
