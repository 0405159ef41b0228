"""Report for `explain`: which engine scaled_dot_product_attention chooses, and why no other one.

Nothing is computed: torch is asked with empty tensors of one batch item. Questions that it cannot
answer are left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch

from polyattn.plugin import Problem
from polyattn_torch.quirks import Workaround
from polyattn_torch.route import Route

# The results of torch._fused_sdp_choice.
ENGINES = ("math", "flash", "efficient", "cudnn", "overrideable")


class StandIns(NamedTuple):
    """Empty tensors and options to ask torch about, in the order of SDPAParams."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    is_causal: bool
    enable_gqa: bool


def report_engine(problem: Problem, route: Route) -> str | None:
    """Describe how torch would compute a problem; None if unknown, such as without the device."""
    try:
        return "; ".join(_clauses(problem, route))
    except Exception:  # out of memory, no such device, a release that cannot be asked
        return None


def _clauses(problem: Problem, route: Route) -> Iterator[str]:
    if route.engine is not None:
        yield f"torch's engine: {route.engine.name}, called by name"
    else:
        stand_ins = _stand_ins(problem, route)
        name = _choice(stand_ins, problem.scale)
        yield f"torch's engine: {name}{', which holds all scores' if name == 'math' else ''}"
        if problem.device_kind == "cuda":
            yield from _why_not(stand_ins, name)
    yield from (item.value for item in sorted(route.workarounds, key=lambda item: item.name))
    if problem.device_kind == "cuda" and problem.dtype == "float32":
        yield f"float32 matmul precision: {torch.get_float32_matmul_precision()}"


def _choice(stand_ins: StandIns, scale: float) -> str:
    number = torch._fused_sdp_choice(*stand_ins[:6], scale=scale, enable_gqa=stand_ins.enable_gqa)
    return ENGINES[number]


def _stand_ins(problem: Problem, route: Route) -> StandIns:
    sizes = (problem.head_size, problem.value_size)
    if Workaround.PAD in route.workarounds:
        sizes = (max(sizes), max(sizes))
    repeated = Workaround.REPEAT_HEADS in route.workarounds
    keys = (1, problem.heads if repeated else problem.key_heads, problem.key_length)
    dtype = getattr(torch, problem.dtype)

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=problem.device)

    mask = None
    if route.masked:
        is_bias = "bias" in problem.features or Workaround.BIAS in route.workarounds
        scores = (1, 1, problem.query_length, problem.key_length)
        mask = empty(*scores, dtype=dtype if is_bias else torch.bool)
    query = empty(1, problem.heads, problem.query_length, sizes[0])
    query.requires_grad_(problem.requires_grad)
    key, value = (empty(*keys, size) for size in sizes)
    return StandIns(query, key, value, mask, 0.0, route.is_causal, route.enable_gqa)


def _why_not(stand_ins: StandIns, chosen: str) -> Iterator[str]:
    """Yield the reasons why each other engine could not be chosen."""
    params = torch.backends.cuda.SDPAParams(*stand_ins)
    for name in ("cudnn", "flash", "efficient"):
        can_use = getattr(torch.backends.cuda, f"can_use_{name}_attention")
        if name == chosen:
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            usable = can_use(params, debug=True)
        reasons = [_shorten(str(warning.message)) for warning in caught]
        reasons = [text for text in reasons if text and "not used because" not in text]
        if not usable and reasons:
            yield f"{name}: {', '.join(dict.fromkeys(reasons))}"


def _shorten(message: str) -> str:
    return message.partition(" (Triggered internally")[0].strip().rstrip(".")
