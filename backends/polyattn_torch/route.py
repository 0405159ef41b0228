"""Choice of torch's engine and of the workarounds for a problem, made once from static facts.

torch's is_causal counts from the first key. `_route` decides whether it fits, or whether causal and
window become a mask; docs/recipes.md says where this and each other step is.

An offset that is an array, one for each item, is always a mask. `flex` gets positions from
`block_mask.point_indices`, the core's kernels from `Indices.position` and `patterns.Band`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch.compiler import is_compiling

from polyattn._core.call.narrowed import narrowed
from polyattn.plugin import Problem, Span
from polyattn_torch.attn_mask import is_square_causal, needs_band, seen_keys
from polyattn_torch.device_info import DeviceInfo, describe_device
from polyattn_torch.engines import EFFICIENT, FLASH, WITH_LOGSUMEXP, TorchEngine
from polyattn_torch.quirks import Workaround, workarounds_for


class Route(NamedTuple):
    """The way in which torch computes a problem."""

    keys: Span  # those that torch gets
    problem: Problem  # over these keys, whose mask is that of all
    engine: TorchEngine | None  # None: scaled_dot_product_attention chooses
    workarounds: frozenset[Workaround]
    banded: bool  # causal and window go into attn_mask
    masked: bool  # there is an attn_mask
    is_causal: bool  # torch's is_causal is set
    enable_gqa: bool

    def passes_as_given(self, problem: Problem) -> bool:
        """Return whether torch's function takes the tensors as they are, and records nothing."""
        changes = self.engine is not None or self.workarounds or self.masked
        changes = changes or self.problem.key_length != problem.key_length
        one_axis = len(problem.batch) == 1 and "batch_broadcast" not in problem.features
        return one_axis and not (changes or problem.requires_grad or problem.transforms)


def route_of(problem: Problem) -> Route:
    """Return the route of a problem that `Sdpa` supports."""
    if is_compiling():
        return _route(problem)
    try:
        return _cached_route(problem)
    except TypeError:  # symbolic lengths cannot be hashed
        return _route(problem)


def route_and_options(problem: Problem) -> tuple[Route, dict[str, Any] | None]:
    """Return the route, and torch's options if tensors go to its function as they are."""
    if is_compiling():
        return _route(problem), None
    global _latest
    latest, route, options = _latest
    # By identity: a problem has many fields to hash, and a repeated call has the same object.
    if latest is not problem:
        route, options = route_of(problem), None
        if route.passes_as_given(problem):
            given = {"is_causal": route.is_causal, "enable_gqa": route.enable_gqa}
            options = {name: True for name, is_given in given.items() if is_given}
            if "scale" in problem.features:
                options["scale"] = problem.scale
        _latest = problem, route, options
    return route, options


_latest: Any = None, None, None


def _route(problem: Problem) -> Route:
    device = describe_device(problem.device)
    # On other devices engines and their bugs depend on the number of keys: not measured there.
    cuts = problem.masks_by_position and device.kind == "cpu" and _has_static_lengths(problem)
    keys = seen_keys(problem) if cuts else Span(0, problem.key_length)
    problem = narrowed(problem, keys) if keys.length != problem.key_length else problem
    workarounds = workarounds_for(problem, device)
    engine = _engine(problem, device, workarounds)
    if engine is FLASH:  # the quirks concern other engines, and masks
        workarounds = frozenset()
    # Plain bools: torch.compile would make symbols of comparisons of lengths.
    by_position = False if engine is FLASH else needs_band(problem)
    banded = True if by_position or Workaround.EXPLICIT_MASK in workarounds else False  # noqa: SIM210
    masked = banded or not problem.masks_by_position_only
    is_causal = True if not masked and is_square_causal(problem) else False  # noqa: SIM210
    grouped = "grouped_heads" in problem.features and Workaround.REPEAT_HEADS not in workarounds
    return Route(keys, problem, engine, workarounds, banded, masked, is_causal, grouped)


def _has_static_lengths(problem: Problem) -> bool:
    """Return whether lengths are numbers, not symbols of a program."""
    # torch 2.13 fails on the strides of a part whose length it computes of symbols.
    if problem.is_symbolic or not is_compiling():
        return not problem.is_symbolic
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(problem.query_length) and has_static_value(problem.key_length)


_cached_route = functools.lru_cache(maxsize=4096)(_route)


def _engine(
    problem: Problem, device: DeviceInfo, workarounds: frozenset[Workaround]
) -> TorchEngine | None:
    takes_band = device.kind == "cuda" and needs_band(problem)
    if takes_band and FLASH.reason_against(problem, device) is None:
        return FLASH
    engines = _engines_by_name(problem, device, workarounds)
    return next((one for one in engines if one.reason_against(problem, device) is None), None)


def _engines_by_name(
    problem: Problem, device: DeviceInfo, workarounds: frozenset[Workaround]
) -> tuple[TorchEngine, ...]:
    """Return the engines that can replace torch's own choice, best first; one must run."""
    if "logsumexp" in problem.features:
        return WITH_LOGSUMEXP.get(device.kind, ())
    return (EFFICIENT,) if Workaround.AVOID_CUDNN in workarounds else ()


def why_no_engine(problem: Problem) -> str | None:
    """Return why no engine that must be called by name can run, or None."""
    device = describe_device(problem.device)
    with_logsumexp = "logsumexp" in problem.features
    if with_logsumexp and (problem.requires_grad or problem.transforms):
        return "its logsumexp is not differentiable"
    engines = _engines_by_name(problem, device, workarounds_for(problem, device))
    reasons = [(engine.name, engine.reason_against(problem, device)) for engine in engines]
    if any(reason is None for _, reason in reasons) or not (reasons or with_logsumexp):
        return None
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons)
    what = "returns the logsumexp" if with_logsumexp else "can be trusted"
    return f"no engine of torch {what} here" + (f" ({listed})" if listed else "")
