"""Which engine scaled_dot_product_attention takes for a problem, and why not the others.

Nothing is computed: torch is asked with empty tensors of one batch item. What it cannot be asked
is left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch

from polyattn.plugin import Problem
from polyattn_torch.quirks import Reroute
from polyattn_torch.route import Route

__all__ = ["remark_on"]

# What torch._fused_sdp_choice returns.
ENGINES = ("math", "flash", "efficient", "cudnn", "overrideable")


class StandIns(NamedTuple):
    """What torch is asked about, in the order in which SDPAParams takes it."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    is_causal: bool
    enable_gqa: bool


def remark_on(problem: Problem, route: Route) -> str | None:
    """Return what there is to say of how torch would compute a problem.

    Parameters
    ----------
    problem : Problem
        The facts of the call.
    route : Route
        How it is computed.

    Returns
    -------
    str or None
        None where torch cannot say, as for a device that is not here.
    """
    try:
        return "; ".join(_clauses(problem, route))
    except Exception:  # out of memory, no such device, a release that cannot be asked
        return None


def _clauses(problem: Problem, route: Route) -> Iterator[str]:
    if route.engine is not None:
        yield f"torch's engine: {route.engine.name}, called by name"
    else:
        asked = _stand_ins(problem, route)
        name = _choice(asked, problem.scale)
        yield f"torch's engine: {name}{', which holds all scores' if name == 'math' else ''}"
        if problem.device_kind == "cuda":
            yield from _why_not(asked, name)
    yield from (f"{quirk.value}" for quirk in sorted(route.detours, key=lambda r: r.name))
    if problem.device_kind == "cuda" and problem.dtype == "float32":
        yield f"float32 matmul precision: {torch.get_float32_matmul_precision()}"


def _choice(asked: StandIns, scale: float) -> str:
    number = torch._fused_sdp_choice(
        asked.query, asked.key, asked.value, asked.mask, asked.dropout, asked.is_causal,
        scale=scale, enable_gqa=asked.enable_gqa,
    )  # fmt: skip
    return ENGINES[number]


def _stand_ins(problem: Problem, route: Route) -> StandIns:
    sizes = (problem.head_size, problem.value_size)
    if Reroute.PAD in route.detours:
        sizes = (max(sizes), max(sizes))
    heads = problem.heads if Reroute.REPEAT_HEADS in route.detours else problem.key_heads
    dtype = getattr(torch, problem.dtype)
    lengths = (problem.query_length, problem.key_length)
    mask = None
    if route.masked:
        is_bias = "bias" in problem.features or Reroute.BIAS in route.detours
        mask = torch.empty(
            1, 1, *lengths, dtype=dtype if is_bias else torch.bool, device=problem.device
        )
    query, key, value = (
        torch.empty(1, *shape, dtype=dtype, device=problem.device)
        for shape in (
            (problem.heads, lengths[0], sizes[0]),
            (heads, lengths[1], sizes[0]),
            (heads, lengths[1], sizes[1]),
        )
    )
    query.requires_grad_(problem.requires_grad)
    return StandIns(query, key, value, mask, 0.0, route.is_causal, route.enable_gqa)


def _why_not(asked: StandIns, chosen: str) -> Iterator[str]:
    """Yield why each engine that was not chosen could not be."""
    params = torch.backends.cuda.SDPAParams(*asked)
    for name in ("cudnn", "flash", "efficient"):
        can_use = getattr(torch.backends.cuda, f"can_use_{name}_attention")
        if name == chosen:
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            usable = can_use(params, debug=True)
        said = [_in_short(str(warning.message)) for warning in caught]
        said = [text for text in said if text and "not used because" not in text]
        if not usable and said:
            yield f"{name}: {', '.join(dict.fromkeys(said))}"


def _in_short(message: str) -> str:
    return message.partition(" (Triggered internally")[0].strip().rstrip(".")
