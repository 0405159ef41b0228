"""Where torch's scaled_dot_product_attention is wrong without a word, and the way round each.

A row is data: a predicate of the problem and of the runtime's facts alone, so that it can be tried
on a machine that has neither the device nor the release. Predicates ask for the device first.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from polyattn.plugin import Problem
from polyattn_torch.attn_mask import is_square_causal, may_have_empty_rows, takes_mask
from polyattn_torch.device_info import Facts

__all__ = ["QUIRKS", "Quirk", "Reroute", "refusals", "reroutes"]


class Reroute(Enum):
    """What `Sdpa` can do about a quirk."""

    REFUSE = "left to the array-API kernels"
    AVOID_CUDNN = "not by cuDNN"
    BIAS = "the mask as a bias in the query's dtype"
    CLEAR_EMPTY_ROWS = "rows without keys shown all of them, and cleared"
    CONTIGUOUS = "views copied"
    EXPAND_MASK = "the mask with all axes whole"
    EXPLICIT_MASK = "a mask in place of is_causal"
    PAD = "vectors padded to one size"
    REPEAT_HEADS = "key/value heads repeated"


class Quirk(NamedTuple):
    """One thing that goes wrong.

    Attributes
    ----------
    where : str
        The device, the engine and the releases.
    predicate : callable
        Whether a problem meets it, by (problem, facts).
    effect : str
        What torch would do, as a clause about it.
    reroute : Reroute
        What is done instead.
    upstream : str
        Where it is reported.
    """

    where: str
    predicate: Callable[[Problem, Facts], bool]
    effect: str
    reroute: Reroute
    upstream: str


def reroutes(problem: Problem, facts: Facts) -> frozenset[Reroute]:
    """Return every way round that a problem needs."""
    return frozenset([quirk.reroute for quirk in QUIRKS if quirk.predicate(problem, facts)])


def refusals(problem: Problem, facts: Facts) -> list[str]:
    """Return why a problem is not for torch at all."""
    return [
        f"{quirk.effect} ({quirk.upstream})"
        for quirk in QUIRKS
        if quirk.reroute is Reroute.REFUSE and quirk.predicate(problem, facts)
    ]


# ---- predicates ----


def _is_half(problem: Problem) -> bool:
    return problem.dtype in ("float16", "bfloat16")


def _is_grouped(problem: Problem) -> bool:
    return "grouped_heads" in problem.features


def _misreads_the_bias(problem: Problem, facts: Facts) -> bool:
    return (
        facts.device != "cpu"
        and _is_half(problem)
        and problem.bias_dtype not in (None, problem.dtype)
    )


def _has_a_nan_gradient(problem: Problem, facts: Facts) -> bool:
    return (
        facts.device == "cuda"
        and facts.prefers_cudnn
        and facts.torch >= (2, 11)
        and (problem.requires_grad or "grad" in problem.transforms)
        and _is_half(problem)
        and problem.key_length % 128 == 64
        and takes_mask(problem)
    )


def _has_empty_rows_in_cudnn(problem: Problem, facts: Facts) -> bool:
    return (
        facts.device == "cuda"
        and facts.prefers_cudnn
        and (facts.cudnn or ()) < (9, 25)
        and _is_half(problem)
        and may_have_empty_rows(problem)
    )


def _corrupts_few_groups(problem: Problem, facts: Facts) -> bool:
    return (
        facts.device == "cuda"
        and facts.prefers_cudnn
        and (facts.capability or (0, 0))[0] == 10
        and (facts.cudnn or ()) < (9, 26)
        and _is_half(problem)
        and _is_grouped(problem)
        and problem.key_heads < 8
    )


def _misreads_expanded_keys(problem: Problem, facts: Facts) -> bool:
    return facts.device == "cuda" and problem.key_length % 32 == 1 and takes_mask(problem)


def _overruns_its_mask(problem: Problem, facts: Facts) -> bool:
    return (
        facts.device == "cuda"
        and not (facts.prefers_cudnn and _is_half(problem))
        and problem.query_length * problem.key_length >= 2**31
        and takes_mask(problem)
    )


def _mps_before_2_11(problem: Problem, facts: Facts) -> bool:
    return facts.device == "mps" and facts.torch < (2, 11)


def _mps_leaks(problem: Problem, facts: Facts) -> bool:
    return (
        facts.device == "mps"
        and facts.torch < (2, 13)
        and _is_half(problem)
        and problem.query_length > 1
        and is_square_causal(problem)
    )


def _mps_sizes(problem: Problem, facts: Facts) -> bool:
    return facts.device == "mps" and problem.value_size != problem.head_size


def _mps(problem: Problem, facts: Facts) -> bool:
    return facts.device == "mps"


def _mps_scale(problem: Problem, facts: Facts) -> bool:
    return facts.device == "mps" and "scale" in problem.features


def _mps_mask(problem: Problem, facts: Facts) -> bool:
    return facts.device == "mps" and (takes_mask(problem) or _mps_leaks(problem, facts))


def _mps_groups(problem: Problem, facts: Facts) -> bool:
    return facts.device == "mps" and _is_grouped(problem)


def _loses_an_empty_logsumexp(problem: Problem, facts: Facts) -> bool:
    return (
        facts.device in ("cpu", "cuda")
        and "logsumexp" in problem.features
        and may_have_empty_rows(problem)
    )


def _cpu_sizes(problem: Problem, facts: Facts) -> bool:
    return (
        facts.device == "cpu"
        and problem.value_size != problem.head_size
        and 0 not in (problem.value_size, problem.head_size)
        and not problem.transforms
        # In 16 bits the slow way is the more accurate one: flash rounds the weights.
        and not _is_half(problem)
    )


# ---- the table ----

QUIRKS = (
    Quirk(
        "CUDA, cuDNN, torch >= 2.11; not known of other accelerators",
        _misreads_the_bias,
        "it reads the bits of a bias in another dtype than the scores' as 16-bit numbers",
        Reroute.REFUSE,  # a cast would lose what the bias has beyond 16 bits
        "pytorch#191612",
    ),
    Quirk(
        "CUDA, cuDNN, torch >= 2.11",
        _has_a_nan_gradient,
        "its gradient of the query is NaN, for a mask and S % 128 == 64",
        Reroute.AVOID_CUDNN,
        "pytorch#196678",
    ),
    Quirk(
        "CUDA, cuDNN < 9.25",
        _has_empty_rows_in_cudnn,
        "a row without keys is undefined, and its gradients NaN",
        Reroute.CLEAR_EMPTY_ROWS,
        "cudnn-frontend#262, #943",
    ),
    Quirk(
        "CUDA, compute capability 10, cuDNN < 9.26",
        _corrupts_few_groups,
        "fewer than 8 key/value heads in groups give other numbers",
        Reroute.REPEAT_HEADS,
        "pytorch#193893",
    ),
    Quirk(
        "CUDA, memory-efficient",
        _misreads_expanded_keys,
        "expanded keys and values give other numbers, for a mask and S % 32 == 1",
        Reroute.CONTIGUOUS,
        "pytorch#191937",
    ),
    Quirk(
        "CUDA, memory-efficient",
        _overruns_its_mask,
        "it overruns a mask of 2³¹ elements",
        Reroute.REFUSE,
        "pytorch#162588",
    ),
    Quirk(
        "MPS, torch < 2.11",
        _mps_before_2_11,
        "it reads beyond its arrays on MPS before torch 2.11",
        Reroute.REFUSE,
        "pytorch#174861",
    ),
    Quirk(
        "MPS, torch < 2.13",
        _mps_leaks,
        "is_causal in 16 bits lets up to 3 later keys through",
        Reroute.EXPLICIT_MASK,
        "pytorch#195910",
    ),
    Quirk(
        "MPS",
        _mps_sizes,
        "value vectors of another size give other shapes and numbers",
        Reroute.PAD,
        "pytorch#176767",
    ),
    Quirk(
        "MPS, torch >= 2.8",
        _mps,
        "views give other numbers",
        Reroute.CONTIGUOUS,
        "pytorch#181133",
    ),
    Quirk(
        "MPS",
        _mps_mask,
        "a mask with axes of 1 gives other numbers",
        Reroute.EXPAND_MASK,
        "pytorch#184180",
    ),
    Quirk(
        "MPS",
        _mps_mask,
        "a mask in another dtype than the query's may be misread",
        Reroute.BIAS,
        "no report; a precaution",
    ),
    Quirk(
        "MPS",
        _mps_scale,
        "it takes the scale of an earlier call on MPS",
        Reroute.REFUSE,
        "pytorch#184122",
    ),
    Quirk(
        "MPS",
        _mps_groups,
        "grouped heads give other numbers, or with a mask crash",
        Reroute.REPEAT_HEADS,
        "pytorch#149132",
    ),
    Quirk(
        "CPU, flash, which gives 0; CUDA, where engines differ",
        _loses_an_empty_logsumexp,
        "the logsumexp of a row without keys is not -inf",
        Reroute.CLEAR_EMPTY_ROWS,
        "seen in torch 2.13",
    ),
    Quirk(
        "CPU",
        _cpu_sizes,
        "value vectors of another size leave it the slow way, which holds all scores",
        Reroute.PAD,
        "seen in torch 2.13",
    ),
)
