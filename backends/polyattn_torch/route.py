"""Which engine computes a problem, and by which detours: decided once, by static facts."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from polyattn.plugin import Problem
from polyattn_torch.attn_mask import is_bare, is_square_causal, needs_band
from polyattn_torch.device_info import Facts, facts_of
from polyattn_torch.engines import EFFICIENT, FLASH, WITH_LOGSUMEXP, Engine
from polyattn_torch.quirks import Reroute, reroutes

__all__ = ["Route", "route_of", "why_no_engine"]


class Route(NamedTuple):
    """How a problem is computed.

    Attributes
    ----------
    engine : Engine or None
        Who is called; None for scaled_dot_product_attention, which chooses one itself.
    detours : frozenset of Reroute
        What is done about `QUIRKS`.
    banded : bool
        Whether causal and window go into attn_mask.
    masked : bool
        Whether anything does.
    is_causal : bool
        Whether torch's is_causal is set.
    enable_gqa : bool
        Whether key/value heads are fewer.
    """

    engine: Engine | None
    detours: frozenset[Reroute]
    banded: bool
    masked: bool
    is_causal: bool
    enable_gqa: bool


def route_of(problem: Problem) -> Route:
    """Return how to compute a problem that there is no reason against."""
    if torch.compiler.is_compiling():
        return _route(problem)
    try:
        return _remembered(problem)
    except TypeError:  # lengths that are symbols cannot be remembered by
        return _route(problem)


def _route(problem: Problem) -> Route:
    facts = facts_of(problem.device)
    detours = reroutes(problem, facts)
    engine = _engine(problem, facts, detours)
    if engine is FLASH:  # the quirks are of other engines and of masks
        detours = frozenset()
    # Plain bools, where torch.compile would make symbols of the lengths compared.
    by_position = False if engine is FLASH else needs_band(problem)
    banded = True if by_position or Reroute.EXPLICIT_MASK in detours else False  # noqa: SIM210
    masked = banded or not is_bare(problem)
    is_causal = True if not masked and is_square_causal(problem) else False  # noqa: SIM210
    grouped = "grouped_heads" in problem.features and Reroute.REPEAT_HEADS not in detours
    return Route(engine, detours, banded, masked, is_causal, grouped)


_remembered = functools.lru_cache(maxsize=4096)(_route)


def _engine(problem: Problem, facts: Facts, detours: frozenset[Reroute]) -> Engine | None:
    if facts.device == "cuda" and needs_band(problem) and FLASH.against(problem, facts) is None:
        return FLASH
    wanted = _wanted(problem, facts, detours)
    return next((engine for engine in wanted if engine.against(problem, facts) is None), None)


def _wanted(problem: Problem, facts: Facts, detours: frozenset[Reroute]) -> tuple[Engine, ...]:
    """Return the engines of which one must be called by name, best first."""
    if "logsumexp" in problem.features:
        return WITH_LOGSUMEXP.get(facts.device, ())
    return (EFFICIENT,) if Reroute.AVOID_CUDNN in detours else ()


def why_no_engine(problem: Problem) -> str | None:
    """Return why no engine does what must be called by name, or None."""
    facts = facts_of(problem.device)
    with_logsumexp = "logsumexp" in problem.features
    if with_logsumexp and (problem.requires_grad or problem.transforms):
        return "its logsumexp has no derivative"
    engines = _wanted(problem, facts, reroutes(problem, facts))
    why = [(engine.name, engine.against(problem, facts)) for engine in engines]
    if any(reason is None for _, reason in why) or not (why or with_logsumexp):
        return None
    said = "; ".join(f"{name}: {reason}" for name, reason in why)
    what = "gives the logsumexp" if with_logsumexp else "is to be trusted"
    return f"no engine of torch {what} here" + (f" ({said})" if said else "")
