"""Report for `explain`: which engine scaled_dot_product_attention chooses.

Nothing is computed: torch is asked with empty tensors of one batch item. Questions that it cannot
answer are left out, such as why it chooses no other engine: it prints the reasons only.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from polyattn.plugin import Problem
from polyattn_torch.quirks import Workaround
from polyattn_torch.route import Route

# The results of torch._fused_sdp_choice.
ENGINES = ("math", "flash", "efficient", "cudnn", "overrideable")


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
        name = _choice(problem, route)
        yield f"torch's engine: {name}{', which holds all scores' if name == 'math' else ''}"
    yield from (item.value for item in sorted(route.workarounds, key=lambda item: item.name))
    if problem.device_kind == "cuda" and problem.dtype == "float32":
        yield f"float32 matmul precision: {torch.get_float32_matmul_precision()}"


def _choice(problem: Problem, route: Route) -> str:
    """Ask torch for the engine that it would choose."""
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
    number = torch._fused_sdp_choice(
        query, key, value, mask, 0.0, route.is_causal,
        scale=problem.scale, enable_gqa=route.enable_gqa,
    )  # fmt: skip
    return ENGINES[number]
