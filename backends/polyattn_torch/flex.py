"""torch's FlexAttention, compiled for each problem.

Compiling takes seconds, so a call must be worth it or ask for it by name: a mask or score rule over
many scores on CUDA is, where the array-API kernels write each step to memory. On the CPU it takes a
C++ compiler and gains less. What is compiled is kept by the static facts and the rules' code, so
that masks of other arrays and rules that close over others find it made.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from polyattn.plugin import Array, Backend, Kernel, Mask, Operands, Problem, Score, combined_mask
from polyattn_torch.batched import one_batch_axis
from polyattn_torch.block_mask import block_mask, single

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
            "mask_expression",
            "query_offset",
            "query_offset_array",
            "scale",
            "score_mod",
            "score_expression",
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
        by_rule = not problem.features.isdisjoint(
            ("mask_mod", "mask_expression", "score_mod", "score_expression")
        )
        if (
            by_rule
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
        flex = _call if torch.compiler.is_compiling() else _compiled(problem, _codes(operands))
        # Before what is compiled, in which FlexAttention takes no views that broadcast.
        query, key, value = (one_batch_axis(problem, tensor) for tensor in operands[:3])
        operands = operands._replace(query=query, key=key, value=value)
        output, logsumexp = flex(problem, operands, backend.xp), None
        if "logsumexp" in problem.features:
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


def _call(problem: Problem, x: Operands, xp: Any) -> Any:
    """Return what flex_attention does: all that torch.compile is to see of a call."""
    from torch.nn.attention.flex_attention import flex_attention

    mask = combined_mask(problem, x)
    aux: Any = {"return_aux": AuxRequest(lse=True)} if "logsumexp" in problem.features else {}
    return flex_attention(
        x.query, x.key, x.value, score_mod=_score_mod(problem, x),
        block_mask=None if mask is None else block_mask(problem, x, mask, xp),
        scale=problem.scale, enable_gqa="grouped_heads" in problem.features, **aux,
    )  # fmt: skip


def _codes(x: Operands) -> tuple[Any, ...]:
    """Return what tells one rule from another without keeping what it closes over alive."""
    rules: list[Any] = []
    for given in (x.mask, x.score_mod):
        if isinstance(given, (Mask, Score)):
            rules += [thing for _, thing in given.carried()]
        else:
            rules.append(given)
    return tuple([getattr(rule, "__code__", None) for rule in rules])


@functools.lru_cache(maxsize=256)
def _compiled(problem: Problem, codes: tuple[Any, ...]) -> Callable[..., Any]:
    # Dynamo refuses to compile a code object in more than a few variants; one of its own for each
    # problem and rule leaves all of them to what the rule closes over.
    function = types.FunctionType(_call.__code__.replace(), _call.__globals__)
    return torch.compile(function, fullgraph=True, dynamic=False)


def _score_mod(problem: Problem, x: Operands) -> Callable[..., torch.Tensor] | None:
    """Return steps 2 to 4 of the formula as one score function, or None if there are none."""
    if problem.softcap is None and x.score_mod is None and x.bias is None:
        return None
    at = single(problem, x)

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if problem.softcap is not None:
            score = problem.softcap * torch.tanh(score / problem.softcap)
        if isinstance(x.score_mod, Score):
            score = x.score_mod.apply(score, at(b, h, i, j))
        elif x.score_mod is not None:
            score = x.score_mod(score, b, h, i, j)
        return score if x.bias is None else score + at(b, h, i, j).of_scores(x.bias)

    return score_mod
