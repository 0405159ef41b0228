"""Kernel that calls FlexAttention, compiled for each problem.

Compiling takes seconds, so it runs without `kernel=` only where it pays: for mask and score rules
over many scores on CUDA, where the array-API kernels write every step to memory. On the CPU it
needs a C++ compiler and gains less. The compiled function is cached by the problem and the code of
the rules, so that another mask array, or a rule that closes over other arrays, reuses it.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from polyattn.plugin import (
    Array,
    Backend,
    Kernel,
    Mask,
    Operands,
    Problem,
    Score,
    combined_mask,
    one_batch_axis,
)
from polyattn_torch.block_mask import Tiles, block_mask, known_tiles, point_indices

try:
    from torch.nn.attention.flex_attention import AuxRequest
except ImportError:  # torch 2.9 and before
    AuxRequest = None  # type: ignore[assignment, misc]

WITHOUT_GRADIENT = {"cpu": "the CPU", "mps": "MPS"}
try:
    HAS_TRITON = importlib.util.find_spec("triton") is not None
except ValueError:  # a module without a spec that a program put in its place
    HAS_TRITON = False

# From this many scores on (64 MiB of float32: L = S = 1024 with 16 heads) a call on CUDA is worth
# compiling for. A single row is not: each length would be compiled again.
WORTH_COMPILING = 2**24


class Flex(Kernel):
    """`torch.nn.attention.flex_attention`, compiled."""

    name = "flex"
    features = frozenset({
        "batch_broadcast", "bias", "causal", "grouped_heads", "logsumexp", "mask", "mask_mod",
        "mask_expression", "query_offset", "query_offset_array", "scale", "score_mod",
        "score_expression", "softcap", "value_size", "window",
    })  # fmt: skip
    only_on: ClassVar[Mapping[str, frozenset[str]]] = {"logsumexp": frozenset({"cuda"})}
    promises = frozenset()
    takes_empty = False
    compiles = True

    def only_on_request(self, problem: Problem) -> str | None:
        """Compile a call that did not ask for it only where that pays."""
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
        """Return why FlexAttention cannot compute the problem."""
        if problem.is_symbolic:
            return ["its blocks need known lengths"]
        reasons = []
        if problem.transforms:
            reasons.append("it is compiled, which torch.func cannot transform")
        if problem.device_kind == "cpu" and problem.dtype == "float64":
            reasons.append("it does not support float64 on the CPU")
        if problem.device_kind == "cuda":
            reasons += _reasons_on_cuda(problem)
        if problem.device_kind == "meta":
            reasons.append("it does not support meta tensors")
        if problem.device_kind in WITHOUT_GRADIENT and problem.requires_grad:
            where = WITHOUT_GRADIENT[problem.device_kind]
            reasons.append(f"it has no gradient on {where} (pytorch#169646)")
        if AuxRequest is None and "logsumexp" in problem.features:
            reasons.append("it returns the logsumexp from torch 2.10 on")
        if problem.converted and not problem.features.isdisjoint(("mask_mod", "score_mod")):
            reasons.append("it compiles mask and score functions; these belong to another library")
        return reasons

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        flex = _call if torch.compiler.is_compiling() else _compiled(problem, _codes(operands))
        # Outside of the compiled function, which does not support expanded views.
        query, key, value = (one_batch_axis(problem, tensor, backend.xp) for tensor in operands[:3])
        operands = operands._replace(query=query, key=key, value=value)
        tiles = known_tiles(problem, operands, combined_mask(problem, operands), backend)
        output, logsumexp = flex(problem, operands, backend.xp, tiles), None
        if "logsumexp" in problem.features:
            output, auxiliary = output
            logsumexp = auxiliary.lse.reshape(*problem.batch, *output.shape[-3:-1])
        return output.reshape(*problem.batch, *output.shape[-3:]), logsumexp


def _reasons_on_cuda(problem: Problem) -> list[str]:
    reasons = []
    if not HAS_TRITON:
        reasons.append("it is compiled by Triton, which is not installed")
    if problem.dtype == "float64":
        reasons.append("it does not support float64 on CUDA")
    if min(problem.head_size, problem.value_size) < 16:
        reasons.append("on CUDA it supports vectors of 16 or more numbers")
    return reasons


def _call(problem: Problem, x: Operands, xp: Any, tiles: Tiles | None) -> Any:
    """Return flex_attention's result; this function is what torch.compile compiles."""
    from torch.nn.attention.flex_attention import flex_attention

    mask = combined_mask(problem, x)
    aux: Any = {"return_aux": AuxRequest(lse=True)} if "logsumexp" in problem.features else {}
    return flex_attention(
        x.query, x.key, x.value, score_mod=_score_mod(problem, x),
        block_mask=None if mask is None else block_mask(problem, x, mask, xp, tiles),
        scale=problem.scale, enable_gqa="grouped_heads" in problem.features, **aux,
    )  # fmt: skip


def _codes(x: Operands) -> tuple[Any, ...]:
    """Return the code objects of the rules: a cache key that keeps no array alive."""
    rules: list[Any] = []
    for operand in (x.mask, x.score_mod):
        if isinstance(operand, (Mask, Score)):
            rules += [thing for _, thing in operand.carried()]
        else:
            rules.append(operand)
    return tuple([getattr(rule, "__code__", None) for rule in rules])


@functools.lru_cache(maxsize=256)
def _compiled(problem: Problem, codes: tuple[Any, ...]) -> Callable[..., Any]:
    # Dynamo compiles a code object in a few variants only. A new one for each problem and rule
    # leaves all the variants to what the rule closes over.
    function = types.FunctionType(_call.__code__.replace(), _call.__globals__)
    return torch.compile(function, fullgraph=True, dynamic=False)


def _score_mod(problem: Problem, x: Operands) -> Callable[..., torch.Tensor] | None:
    """Return softcap, score_mod and bias as one score function, or None without them."""
    if problem.softcap is None and x.score_mod is None and x.bias is None:
        return None
    indices = point_indices(problem, x)

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if problem.softcap is not None:
            score = problem.softcap * torch.tanh(score / problem.softcap)
        if isinstance(x.score_mod, Score):
            score = x.score_mod.apply(score, indices(b, h, i, j))
        elif x.score_mod is not None:
            score = indices(b, h, i, j).by_score_mod(x.score_mod, score)
        return score if x.bias is None else score + indices(b, h, i, j).of_scores(x.bias)

    return score_mod
