"""Attention as one step of torch's autograd, which saves arguments and results but no weights.

The gradients are a step of their own, so that they need as little memory where torch records how
they are computed, as it always does under torch.func. The second derivative of a number is
symmetric: so the step of the gradients is differentiated by forward mode, and no weights are saved
in any order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.autograd.forward_ad as forward_mode

from polyattn.plugin import Problem
from polyattn_torch.batched_gradients import item_by_item
from polyattn_torch.device_info import has_autocast

Tensors = Sequence[torch.Tensor]
#: One entry for each tensor of a step, None where there is nothing.
Optionals = Sequence[torch.Tensor | None]


class Step(Protocol):
    """A call of attention as a function of tensors, with its derivatives."""

    problem: Problem

    def result(self, tensors: Tensors) -> Tensors:
        """Return output and logsumexp."""

    def gradients(
        self,
        tensors: Tensors,
        results: Tensors,
        of_results: Optionals,
        wanted: Sequence[bool],
        *,
        by_operations: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of the tensors that are wanted, from those of the results.

        By operations that torch can differentiate, or any.
        """

    def tangents(self, tensors: Tensors, results: Tensors, moved: Optionals) -> Tensors:
        """Return the tangents of output and logsumexp from those of the tensors."""


def in_transform() -> bool:
    """Return whether torch.func transforms the caller; torch.compile can trace this."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_recorded(problem: Problem) -> bool:
    """Return whether a call is to be differentiated, as far as it is known beforehand."""
    if torch.compiler.is_compiling() and in_transform():
        return False  # In a program, torch.func differentiates operations only.
    if "grad" in problem.transforms or "jvp" in problem.transforms:
        return True
    # A tensor under vmap does not say whether autograd outside of it follows.
    followed = problem.requires_grad or "vmap" in problem.transforms
    return followed and torch.is_grad_enabled()


def apply(step: Step, tensors: Tensors) -> Tensors:
    """Return output and logsumexp of a step, recorded by autograd."""
    if torch.compiler.is_compiling():
        return _Compiled.apply(step, *tensors)  # type: ignore[no-any-return, no-untyped-call]
    return _applied(_Attention, step, *tensors)


def _applied(function: type[torch.autograd.Function], *arguments: Any) -> Tensors:
    """Apply a function as `apply` of torch 2.9 to 2.13 does, without a look at its signature.

    The look takes most of the time of `apply`.
    """
    if torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]
    alive = torch._functorch.utils.unwrap_dead_wrappers(arguments)
    return super(torch.autograd.Function, function).apply(*alive)  # type: ignore[misc, no-any-return]


class _Compiled(torch.autograd.Function):
    """The step of the results, without forward mode: torch.compile refuses a step that has it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(step: Step, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(step.result(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.step, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)
        if "jvp" in ctx.step.problem.transforms:
            ctx.save_for_forward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *of_results: torch.Tensor | None) -> tuple[Any, ...]:
        step, wanted = ctx.step, list(ctx.needs_input_grad[1:])
        *tensors, output, logsumexp = ctx.saved_tensors
        if of_results[0] is None and of_results[1] is None:
            return None, *[None] * len(wanted)

        def gradients(of_output: torch.Tensor | None, of_logsumexp: torch.Tensor | None) -> Any:
            if of_output is None:
                of_output = torch.zeros_like(output)
            given = of_output, of_logsumexp, output, logsumexp, *tensors
            asked = _Asked(step, wanted)
            if torch.compiler.is_compiling() or not _may_be_differentiated():
                return _Gradients.forward(asked, *given)
            return _applied(_Gradients, asked, *given)

        with autocast_disabled(output.device.type):
            return None, *_placed(item_by_item(gradients, of_results), wanted)


class _Attention(_Compiled):
    """The step of the results."""

    @staticmethod
    def jvp(ctx: Any, _: None, *moved: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        *tensors, output, logsumexp = ctx.saved_tensors
        with autocast_disabled(output.device.type):
            return tuple(ctx.step.tangents(tensors, (output, logsumexp), moved))


class _Asked:
    """A step and the gradients asked for: one argument, which torch.func takes whole."""

    def __init__(self, step: Step, wanted: Sequence[bool]) -> None:
        self.step, self.wanted = step, wanted

    def gradients(
        self, of_results: Optionals, results: Tensors, tensors: Tensors
    ) -> tuple[torch.Tensor, ...]:
        """Return them by operations that torch can differentiate."""
        return self.step.gradients(tensors, results, of_results, self.wanted, by_operations=True)


class _Gradients(torch.autograd.Function):
    """The step of the gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        asked: _Asked,
        of_output: torch.Tensor,
        of_logsumexp: torch.Tensor | None,
        output: torch.Tensor,
        logsumexp: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        results = output, logsumexp
        return asked.step.gradients(tensors, results, (of_output, of_logsumexp), asked.wanted)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.asked, *saved = inputs
        ctx.has_logsumexp = saved[1] is not None
        ctx.set_materialize_grads(False)
        saved = [one for one in saved if one is not None]
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, *moved_gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Differentiate (gradients · moved) by forward mode: its second derivative is symmetric."""
        # Output and logsumexp move with the tensors, so they have no gradient of their own.
        of_results, results, tensors = _saved(ctx)
        step, wanted = ctx.asked.step, list(ctx.needs_input_grad[5:])
        gradients = functools.partial(_Asked(step, wanted).gradients, of_results)

        def moved_by(*moved_gradients: torch.Tensor | None) -> list[torch.Tensor | None]:
            moved = _placed(moved_gradients, ctx.asked.wanted)
            by_results = step.tangents(tensors, results, moved)
            found: Tensors = ()
            if any(wanted):
                found = moved_along(gradients, (results, tensors), (by_results, moved))
            by_logsumexp = by_results[1] if ctx.has_logsumexp else None
            return [by_results[0], by_logsumexp, None, None, *_placed(found, wanted)]

        with autocast_disabled(results[0].device.type):
            return None, *item_by_item(moved_by, moved_gradients)

    @staticmethod
    def jvp(ctx: Any, *moved: Any) -> tuple[torch.Tensor, ...]:
        groups = _saved(ctx)
        with autocast_disabled(groups[1][0].device.type):
            return moved_along(ctx.asked.gradients, groups, (moved[1:3], moved[3:5], moved[5:]))


def _may_be_differentiated() -> bool:
    """Return whether the caller's operations may be."""
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return True
    return in_forward_mode()


def in_forward_mode() -> bool:
    """Return whether a level of forward mode is entered."""
    return bool(getattr(forward_mode, "_current_level", -1) >= 0)


def _saved(ctx: Any) -> tuple[Optionals, Tensors, Tensors]:
    """Return the gradients of the results, the results, and the tensors."""
    of_output, *rest = ctx.saved_tensors
    of_logsumexp = rest.pop(0) if ctx.has_logsumexp else None
    return (of_output, of_logsumexp), rest[:2], rest[2:]


def _placed(found: Optionals, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
    """Return None between the gradients that were wanted."""
    rest = iter(found)
    return [next(rest) if is_wanted else None for is_wanted in wanted]


def autocast_disabled(kind: str) -> AbstractContextManager[Any]:
    """Turn autocast off, which may be at work in a backward pass too."""
    if not is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)


def is_autocast_enabled(kind: str) -> bool:
    """Return whether autocast is at work on a kind of device."""
    is_available = kind == "cpu" or has_autocast(kind)
    return is_available and torch.is_autocast_enabled(kind)


def moved_along(
    function: Callable[..., tuple[torch.Tensor, ...]],
    groups: Sequence[Optionals],
    moved: Sequence[Optionals],
) -> tuple[torch.Tensor, ...]:
    """Return the derivatives of a function of groups of tensors along tangents, None for none."""
    places = [
        (n, m) for n, group in enumerate(moved) for m, one in enumerate(group) if one is not None
    ]
    # torch gives a tangent the strides of its primal, but cannot write to an expanded one.
    primals = [groups[n][m].contiguous() for n, m in places]  # type: ignore[union-attr]
    tangents = [moved[n][m].to(groups[n][m].dtype) for n, m in places]  # type: ignore[union-attr]

    def of_moved(*numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = [list(group) for group in groups]
        for (n, m), number in zip(places, numbers, strict=True):
            given[n][m] = number
        return function(*given)

    if not in_forward_mode() or in_transform():
        found = torch.func.jvp(of_moved, tuple(primals), tuple(tangents))[1]
        return tuple(found)
    return _at_this_level(of_moved, primals, tangents)


def _at_this_level(
    function: Callable[..., tuple[torch.Tensor, ...]], primals: Tensors, tangents: Tensors
) -> tuple[torch.Tensor, ...]:
    """Return directional derivatives at the level of forward mode that calls for them."""
    unpack: Any = forward_mode.unpack_dual
    make_dual: Any = forward_mode.make_dual
    if torch._C._is_fwd_grad_enabled() and any(
        unpack(one).tangent is not None for one in (*primals, *tangents)
    ):
        raise NotImplementedError(
            "torch.autograd.forward_ad has one level, and this derivative needs two: take it by"
            " torch.func.jvp, whose levels nest"
        )
    enabled: Any = forward_mode._set_fwd_grad_enabled
    with enabled(True):
        duals = [
            make_dual(unpack(primal).primal, unpack(tangent).primal)
            for primal, tangent in zip(primals, tangents, strict=True)
        ]
        found = [unpack(one) for one in function(*duals)]
    return tuple(
        torch.zeros_like(one.primal) if one.tangent is None else one.tangent for one in found
    )
