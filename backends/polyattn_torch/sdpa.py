"""Kernel that calls scaled_dot_product_attention, for calls that it computes correctly.

On the CPU a row without keys gives 0, as it should (torch >= 2.5). Where torch cannot return a
result, or computes it wrongly, a `Route` names an engine or workarounds. It is decided once, and a
plain call costs nothing more.
"""

from __future__ import annotations

import math

import torch.nn.functional as F

from polyattn._core.tiles.axes import reason_against_batch
from polyattn._core.tiles.visibility import visible_scores, why_too_large
from polyattn.plugin import (
    Array,
    Backend,
    Kernel,
    Operands,
    Problem,
    may_have_empty_rows,
    one_batch_axis,
)
from polyattn_torch.attn_mask import attn_mask, made_mask
from polyattn_torch.device_info import describe_device
from polyattn_torch.engine_report import report_engine
from polyattn_torch.engines import aligned, in_onnx_export
from polyattn_torch.fused_node import recorded, takes
from polyattn_torch.quirks import refusals
from polyattn_torch.route import Route, route_and_options, route_of, why_no_engine
from polyattn_torch.selftest import TESTED, self_test
from polyattn_torch.workarounds import EngineInputs, apply_workarounds, undo_workarounds

# With a mask, torch's engine on the CPU computes every score. The mask is made first: an element of
# it, and the float that the engine makes of a bool, takes 0.8 of the time of a score of one head,
# which few heads do not share. The kernel tiled takes 1.6 times as long for a score, and twice that
# under an array of bools, which leaves no tile full. It computes those that are visible and, in the
# tiles at their edge, about 2000 more in each row of one head, fewer where more heads make its
# tiles smaller; or one tile where rows are few. Measured with 1 and 8 heads, from 1024 to 8192
# tokens, forward and backward.
MADE_TIME, TILED_TIME, EDGE_OF_ONE_HEAD = 0.8, 1.6, 2000
# Beside a bias that is trained, whose gradient the engine computes for every score.
TILED_TIME_OF_TRAINED_BIAS = 1.1


class Sdpa(Kernel):
    """`torch.nn.functional.scaled_dot_product_attention`."""

    name = "sdpa"
    features = frozenset({
        "batch_broadcast", "bias", "causal", "grouped_heads", "logsumexp", "mask", "mask_mod",
        "mask_expression", "query_offset", "query_offset_array", "scale", "value_size", "window",
    })  # fmt: skip
    # torch multiplies a masked key's weight 0 by its value, which may be NaN.
    promises = frozenset()
    takes_band = True

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why torch would compute another result."""
        reason = reason_against_batch(problem)
        if reason is not None:
            return [reason]
        reasons = refusals(problem, describe_device(problem.device))
        if "jvp" in problem.transforms and not takes(problem):
            reasons.append("it does not support forward derivatives")
        no_engine = why_no_engine(problem)
        if no_engine is not None:
            return [*reasons, no_engine]
        if in_onnx_export() and may_have_empty_rows(problem):
            reasons.append(
                "below opset 23 torch.onnx.export gives a row without keys the mean of the values"
            )
        if problem.device_kind in TESTED and not reasons:
            failure = self_test(problem.device_kind, self)
            reasons += [] if failure is None else [failure]
        return reasons

    def only_on_request(self, problem: Problem) -> str | None:
        """Leave vmap to other kernels, and masks that are large or for which `tiled` is faster."""
        if "vmap" in problem.transforms:  # torch has no batching rule for sdpa on the CPU
            return "torch.func.vmap would call it item by item"
        if problem.is_symbolic:
            return None
        route = route_of(problem)
        made = made_mask(problem, route.keys, banded=route.banded)
        return why_too_large(made) or _why_tiled(problem, route, made)

    def remark(self, problem: Problem) -> str | None:
        """Name the engine that torch would use."""
        route = route_of(problem)
        return report_engine(route.problem, route)

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        query, key, value = operands[:3]
        if query.is_cuda:  # torch's engines do not look at addresses
            query, key, value = aligned(query), aligned(key), aligned(value)
        route, options = route_and_options(problem)
        if options is not None:
            return F.scaled_dot_product_attention(query, key, value, **options), None
        mask, empty, logsumexp = None, None, None
        if route.masked:
            mask = attn_mask(problem, operands, route.keys, banded=route.banded)
        whole, problem = problem, route.problem
        if problem.key_length != whole.key_length:
            key, value = (x[..., slice(*route.keys), :] for x in (key, value))
        query, key, value = (one_batch_axis(problem, x, backend.xp) for x in (query, key, value))
        inputs = EngineInputs(query, key, value, mask)
        if route.workarounds:
            inputs, empty = apply_workarounds(problem, route.workarounds, inputs)
        output: Array | None
        if route.engine is not None:
            output, logsumexp = route.engine.call(problem, inputs)
        else:
            output = recorded(problem, inputs, backend, is_causal=route.is_causal)
        if output is None:
            output = F.scaled_dot_product_attention(
                *inputs[:3], attn_mask=inputs.mask, is_causal=route.is_causal,
                scale=problem.scale, enable_gqa=route.enable_gqa,
            )  # fmt: skip
        if route.workarounds:
            output, logsumexp = undo_workarounds(problem, output, logsumexp, empty)
        if len(problem.batch) != 1:
            output = output.reshape(*problem.batch, *output.shape[-3:])
            if logsumexp is not None:
                logsumexp = logsumexp.reshape(*problem.batch, *logsumexp.shape[-2:])
        return output, logsumexp


def _why_tiled(problem: Problem, route: Route, made: int) -> str | None:
    """Return why the kernel `tiled` is faster than torch's engine on the CPU with its mask."""
    if problem.device_kind != "cpu":
        return None
    problem = route.problem
    rows, computed = problem.query_length, problem.query_length * problem.key_length
    if made < computed:  # no mask is made, or a small one
        return None
    heads = max(1, math.prod(problem.scores[:-2]))
    visible, edge = visible_scores(problem), EDGE_OF_ONE_HEAD / heads**0.5
    if problem.mask_spec is not None and "mask_mod" not in problem.features:
        # Its numbers show empty tiles, but only while it runs: we count half, as under causal.
        visible = min(visible, computed // 2)
    time = TILED_TIME
    if "mask" in problem.features:
        time *= 2
    elif "bias" in problem.trained:
        time = TILED_TIME_OF_TRAINED_BIAS
    if time * (visible + edge * max(rows, edge)) >= computed + MADE_TIME * made / heads:
        return None
    return (
        f"with a mask of {made:,} elements it computes all {computed:,} scores of a head; tiled"
        f" computes about {visible:,}"
    )
