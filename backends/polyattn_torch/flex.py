"""torch's FlexAttention, compiled for each problem.

Compiling takes seconds, so a call must be worth it or ask for it by name: a mask or score function
over many scores on CUDA is, where the array-API kernels write each step to memory. On the CPU it
takes a C++ compiler and gains less.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from polyattn.plugin import Array, Backend, Kernel, Operands, Problem, in_band
from polyattn_torch.batched import one_batch_axis, whole_score_axes

__all__ = ["Flex"]

try:
    from torch.nn.attention.flex_attention import AuxRequest
except ImportError:  # torch 2.9 and before
    AuxRequest = None  # type: ignore[assignment, misc]

WITHOUT_GRADIENT = {"cpu": "the CPU", "mps": "MPS"}
HAS_TRITON = importlib.util.find_spec("triton") is not None

# From this many scores on (64 MiB of float32), those of L = S = 1024 with 16 heads, a call on CUDA
# is worth compiling for. One row at a time, of which each length would compile anew, is below.
WORTH_COMPILING = 2**24


class Flex(Kernel):
    """`torch.nn.attention.flex_attention`, compiled."""

    name = "flex"
    features = frozenset(
        {
            "batch_broadcast",
            "bias",
            "causal",
            "grouped_heads",
            "logsumexp",
            "mask",
            "mask_mod",
            "query_offset",
            "query_offset_array",
            "scale",
            "score_mod",
            "softcap",
            "value_size",
            "window",
        }
    )
    only_on: ClassVar[Mapping[str, frozenset[str]]] = {"logsumexp": frozenset({"cuda"})}
    poison_safe = False
    compiles = True

    def only_on_request(self, problem: Problem) -> str | None:
        """Compiling is not for a call that did not ask for it, unless it is worth it."""
        by_function = not problem.features.isdisjoint(("mask_mod", "score_mod"))
        if (
            by_function
            and problem.device_kind == "cuda"
            and problem.query_length > 1
            and math.prod(problem.scores) >= WORTH_COMPILING
        ):
            return None
        return "it compiles for seconds at the first call of each shape"

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why FlexAttention cannot take the problem."""
        reasons = []
        if problem.transforms:
            reasons.append("it is compiled, which torch.func cannot transform")
        if 0 in problem.scores or 0 in (problem.head_size, problem.value_size):
            reasons.append("it takes no empty arrays")
        if problem.device_kind == "cpu" and problem.dtype == "float64":
            reasons.append("it has no float64 on the CPU")
        if problem.device_kind == "cuda":
            reasons += _reasons_on_cuda(problem)
        if problem.device_kind == "meta":
            reasons.append("it takes no tensors without data")
        if problem.device_kind in WITHOUT_GRADIENT and problem.requires_grad:
            where = WITHOUT_GRADIENT[problem.device_kind]
            reasons.append(f"it has no gradient on {where} (pytorch#169646)")
        if AuxRequest is None and "logsumexp" in problem.features:
            reasons.append("this release of torch returns no logsumexp from it")
        if problem.converted and not problem.features.isdisjoint(("mask_mod", "score_mod")):
            reasons.append("it compiles mask and score functions, which are of another library")
        return reasons

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        query, key, value = (one_batch_axis(problem, tensor) for tensor in operands[:3])
        flex = _call if torch.compiler.is_compiling() else _compiled(problem, _codes(operands))
        aux: Any = {"return_aux": AuxRequest(lse=True)} if "logsumexp" in problem.features else {}
        output = flex(
            query, key, value, _score_mod(problem, operands), problem.scale,
            "grouped_heads" in problem.features, **aux,
        )  # fmt: skip
        logsumexp = None
        if aux:
            output, auxiliary = output
            logsumexp = auxiliary.lse.reshape(*problem.batch, *output.shape[-3:-1])
        return output.reshape(*problem.batch, *output.shape[-3:]), logsumexp


def _reasons_on_cuda(problem: Problem) -> list[str]:
    reasons = []
    if not HAS_TRITON:
        reasons.append("it is compiled by Triton, which is not installed")
    if problem.dtype == "float64":
        reasons.append("it has no float64 on CUDA")
    if min(problem.head_size, problem.value_size) < 16:
        reasons.append("it takes vectors of 16 and more on CUDA")
    return reasons


def _call(
    query: Any, key: Any, value: Any, score_mod: Any, scale: float, enable_gqa: bool, **aux: Any
) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(
        query, key, value, score_mod=score_mod, scale=scale, enable_gqa=enable_gqa, **aux
    )


def _codes(x: Operands) -> tuple[Any, ...]:
    """Return what tells one rule from another without keeping what it closes over alive."""
    return tuple(getattr(rule, "__code__", None) for rule in (x.mask, x.score_mod))


@functools.lru_cache(maxsize=256)
def _compiled(problem: Problem, codes: tuple[Any, ...]) -> Callable[..., Any]:
    # Dynamo refuses to compile a code object in more than a few variants; one of its own for each
    # problem and rule leaves all of them to what the rule closes over.
    function = types.FunctionType(_call.__code__.replace(), _call.__globals__)
    return torch.compile(function, fullgraph=True, dynamic=False)


def _score_mod(problem: Problem, x: Operands) -> Callable[..., torch.Tensor] | None:
    """Return steps 2 to 5 of the formula as one score function, or None if there are none."""
    bias = None if x.bias is None else _whole(problem, x.bias)
    mask = None if x.mask is None or callable(x.mask) else _whole(problem, x.mask)
    rule = x.mask if callable(x.mask) else None
    offsets: Any = None
    if problem.query_offset is None:
        given: Any = x.query_offset
        offsets = given.expand(*problem.batch, 1, 1, 1).reshape(-1).long()
    if problem.features.isdisjoint(
        ("softcap", "score_mod", "bias", "mask", "mask_mod", "causal", "window")
    ):
        return None

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if problem.softcap is not None:
            score = problem.softcap * torch.tanh(score / problem.softcap)
        if x.score_mod is not None:
            score = x.score_mod(score, b, h, i, j)
        if bias is not None:
            score = score + bias[b, h, i, j]
        if rule is not None:
            score = torch.where(_as_mask(rule(b, h, i, j), i), score, -torch.inf)
        if mask is not None:
            score = torch.where(mask[b, h, i, j], score, -torch.inf)
        seen = in_band(problem, i, j, None if offsets is None else offsets[b])
        return score if seen is None else torch.where(seen, score, -torch.inf)

    return score_mod


def _as_mask(seen: Any, like: torch.Tensor) -> torch.Tensor:
    if isinstance(seen, bool):
        return torch.full_like(like, seen, dtype=torch.bool)
    if seen.dtype != torch.bool:
        raise TypeError(f"the mask function must return a bool array; it returned {seen.dtype}")
    return seen  # type: ignore[no-any-return]


def _whole(problem: Problem, tensor: torch.Tensor) -> torch.Tensor:
    items = math.prod(problem.batch)
    return whole_score_axes(problem, tensor).expand(items, *problem.scores[-3:])
