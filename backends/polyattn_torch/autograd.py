"""Attention as one node of torch's autograd graph, which saves tensors and results but no weights.

An `AutogradNode` is a call of attention as a function of a list of tensors. It says how to compute
three things; two classes of `torch.autograd.Function` ask it for them:

    torch asks for             torch calls                       the node computes
    ─────────────────────────  ────────────────────────────────  ───────────────────────────────
    the output                 `_AttentionOutput.forward`        `results`
    a gradient                 `_AttentionOutput.backward`,      `gradients`
                               `_AttentionGradients.forward`
    a forward derivative       `_AttentionOutput.jvp`            `tangents`
    that of a gradient         `_AttentionGradients.jvp`         `directional` of `gradients`
    a gradient of a gradient   `_AttentionGradients.backward`    `tangents`, and `directional` of
                                                                 `gradients`, by symmetry

The gradients are a node of their own, so that they need as little memory where torch records how
they are computed, as it always does under torch.func. No weights are saved in any order.

There are two nodes: `kernel_node.KernelNode` for a kernel that has `backward`, and
`fused_node.FusedNode` for torch's flash attention on the CPU. `TorchBackend.run` asks
`kernel_node.node_of` for the first, `Sdpa` asks `fused_node.recorded` for the second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_mode

from polyattn.plugin import Problem
from polyattn_torch.batched_gradients import apply_batched
from polyattn_torch.device_info import has_autocast

Tensors = Sequence[torch.Tensor]
#: One entry for each tensor, None where there is nothing.
Optionals = Sequence[torch.Tensor | None]


class GradientRequest(NamedTuple):
    """The arguments from which a node computes gradients."""

    tensors: Tensors
    results: Tensors  # output and logsumexp
    cotangents: Optionals  # of these
    wanted: Sequence[bool]  # for each tensor, whether its gradient is asked for
    by_operations: bool = False  # whether torch must be able to differentiate what is computed


class AutogradNode:
    """A call of attention as a function of tensors, with its derivatives."""

    problem: Problem

    def results(self, tensors: Tensors) -> Tensors:
        """Return output and logsumexp."""
        raise NotImplementedError

    def gradients(self, request: GradientRequest) -> tuple[torch.Tensor, ...]:
        """Return the gradients of the tensors that are wanted, in their dtypes."""
        raise NotImplementedError

    def tangents(self, tensors: Tensors, results: Tensors, tangents: Optionals) -> Tensors:
        """Return the tangents of output and logsumexp, in their dtypes, from those of tensors."""
        raise NotImplementedError


def in_transform() -> bool:
    """Return whether torch.func transforms the caller, or torch.compile traces it (torch 2.13)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_recorded(problem: Problem) -> bool:
    """Return whether a call is to be differentiated, as far as it is known beforehand."""
    if torch.compiler.is_compiling() and in_transform():
        # In a program, torch.func differentiates operations only. One node would save no weights in
        # the others, but compile two to three times as long, and lack the second derivative.
        return False
    if "grad" in problem.transforms or "jvp" in problem.transforms:
        return True
    # A tensor under vmap does not say whether autograd outside of it follows.
    followed = problem.requires_grad or "vmap" in problem.transforms
    return followed and torch.is_grad_enabled()


def record(node: AutogradNode, tensors: Tensors) -> Tensors:
    """Return output and logsumexp of a node, recorded by autograd."""
    if torch.compiler.is_compiling():
        return _OutputInProgram.apply(node, *tensors)  # type: ignore[no-any-return, no-untyped-call]
    return apply_function(_AttentionOutput, node, *tensors)


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> Tensors:
    """Apply a function as its `apply` does, by a row of `quirks.SHORTCUTS`."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]
    alive = torch._functorch.utils.unwrap_dead_wrappers(arguments)
    return super(torch.autograd.Function, function).apply(*alive)  # type: ignore[misc, no-any-return]


class _OutputInProgram(torch.autograd.Function):
    """Output and logsumexp, without forward mode: torch.compile refuses a function that has it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(node: AutogradNode, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(node.results(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.node, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)
        if "jvp" in ctx.node.problem.transforms:
            ctx.save_for_forward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        wanted = list(ctx.needs_input_grad[1:])
        *tensors, output, logsumexp = ctx.saved_tensors
        if cotangents[0] is None and cotangents[1] is None:
            return None, *[None] * len(wanted)
        function = _GradientFunction(ctx.node, wanted)

        def gradients(of_output: torch.Tensor | None, of_logsumexp: torch.Tensor | None) -> Any:
            if of_output is None:
                of_output = torch.zeros_like(output)
            x = of_output, of_logsumexp, output, logsumexp, *tensors
            if torch.compiler.is_compiling() or not _may_be_differentiated():
                return _AttentionGradients.forward(function, *x)
            return apply_function(_AttentionGradients, function, *x)

        with autocast_disabled(output.device.type):
            return None, *_with_gaps(apply_batched(gradients, cotangents), wanted)


class _AttentionOutput(_OutputInProgram):
    """Output and logsumexp."""

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        *tensors, output, logsumexp = ctx.saved_tensors
        with autocast_disabled(output.device.type):
            return tuple(ctx.node.tangents(tensors, (output, logsumexp), tangents))


class _GradientFunction:
    """The wanted gradients of a node as a function of (of_output, of_logsumexp, output, …).

    An object, since torch.func would take a tuple apart.
    """

    def __init__(self, node: AutogradNode, wanted: Sequence[bool]) -> None:
        self.node, self.wanted = node, wanted

    def __call__(self, *x: Any, by_operations: bool = True) -> tuple[torch.Tensor, ...]:
        """Return them from cotangents, results and tensors."""
        return self.node.gradients(
            GradientRequest(x[4:], x[2:4], x[:2], self.wanted, by_operations)
        )


class _AttentionGradients(torch.autograd.Function):
    """The gradients, from (of_output, of_logsumexp, output, logsumexp, *tensors)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        function: _GradientFunction,
        of_output: torch.Tensor,
        of_logsumexp: torch.Tensor | None,
        output: torch.Tensor,
        logsumexp: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        x = of_output, of_logsumexp, output, logsumexp, *tensors
        return function(*x, by_operations=False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.function, *x = inputs
        ctx.has_logsumexp = x[1] is not None
        ctx.set_materialize_grads(False)
        saved = [one for one in x if one is not None]
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, *directions: torch.Tensor | None) -> tuple[Any, ...]:
        """Differentiate (gradients · directions) by forward mode along these directions."""
        # Output and logsumexp follow the tensors, so they have no gradient of their own.
        x, node = _saved(ctx), ctx.function.node
        wanted = list(ctx.needs_input_grad[5:])

        def along(*directions: torch.Tensor | None) -> list[torch.Tensor | None]:
            tangents = _with_gaps(directions, ctx.function.wanted)
            of_results = node.tangents(x[4:], x[2:4], tangents)
            of_tensors: Tensors = ()
            if any(wanted):
                function = _GradientFunction(node, wanted)
                of_tensors = directional(function, x, [None, None, *of_results, *tangents])
            of_logsumexp = of_results[1] if ctx.has_logsumexp else None
            return [of_results[0], of_logsumexp, None, None, *_with_gaps(of_tensors, wanted)]

        with autocast_disabled(x[2].device.type):
            return None, *apply_batched(along, directions)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        x = _saved(ctx)
        with autocast_disabled(x[2].device.type):
            return directional(ctx.function, x, tangents)


def _may_be_differentiated() -> bool:
    """Return whether the caller's operations may be."""
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return True
    return in_forward_mode()


def in_forward_mode() -> bool:
    """Return whether a level of forward mode is entered."""
    return bool(getattr(forward_mode, "_current_level", -1) >= 0)


def _saved(ctx: Any) -> list[Any]:
    """Return what `_AttentionGradients` was given."""
    of_output, *rest = ctx.saved_tensors
    return [of_output, *rest] if ctx.has_logsumexp else [of_output, None, *rest]


def _with_gaps(gradients: Optionals, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
    """Return an entry for each tensor, None for those whose gradient is not wanted."""
    rest = iter(gradients)
    return [next(rest) if is_wanted else None for is_wanted in wanted]


def autocast_disabled(kind: str) -> AbstractContextManager[Any]:
    """Turn autocast off, which may be enabled in a backward pass too."""
    if not is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)


def is_autocast_enabled(kind: str) -> bool:
    """Return whether autocast is enabled for a kind of device."""
    is_available = kind == "cpu" or has_autocast(kind)
    return is_available and torch.is_autocast_enabled(kind)


def directional(
    function: Callable[..., tuple[torch.Tensor, ...]], primals: Optionals, tangents: Optionals
) -> tuple[torch.Tensor, ...]:
    """Return the derivatives of a function of tensors along tangents, None for a tangent of 0."""
    places = [n for n, tangent in enumerate(tangents) if tangent is not None]
    # torch gives a tangent the strides of its primal, but cannot write to an expanded one.
    at: list[Any] = [primals[n].contiguous() for n in places]  # type: ignore[union-attr]
    along = [tangents[n].to(x.dtype) for n, x in zip(places, at, strict=True)]  # type: ignore[union-attr]

    def of_places(*x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(primals)
        for n, one in zip(places, x, strict=True):
            given[n] = one
        return function(*given)

    if not in_forward_mode() or in_transform():
        return tuple(torch.func.jvp(of_places, tuple(at), tuple(along))[1])
    return _at_this_level(of_places, at, along)


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
        results = [unpack(one) for one in function(*duals)]
    return tuple(
        torch.zeros_like(one.primal) if one.tangent is None else one.tangent for one in results
    )
