"""The gradients of a call by the library's own differentiation: torch's, JAX's or MLX's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from polyattn import UnsupportedError, attention
from polyattn._base.arrays import facts_of
from polyattn._core.call.options import GRADIENT_ARRAYS
from polyattn.conformance.cases.case import ARRAYS, Case
from polyattn.conformance.checks.target import Arguments, Target
from polyattn.conformance.reference.gradients import cotangent
from polyattn.plugin import Kernel


def torch_vjp(function: Callable[..., Any], inputs: list[Any], along: Any) -> Any:
    torch = importlib.import_module("torch")
    inputs = [x.requires_grad_() for x in inputs]
    output = function(*inputs)
    assert output.requires_grad, "the output does not require a gradient"
    gradients = torch.autograd.grad(output, inputs, along, allow_unused=True)
    pairs = zip(inputs, gradients, strict=True)
    return [torch.zeros_like(x) if gradient is None else gradient for x, gradient in pairs]


#: How each library differentiates a function of arrays: with the inputs and the cotangent.
VJP: dict[str, Callable[[Callable[..., Any], list[Any], Any], Any]] = {
    "torch": torch_vjp,
    "jax": lambda f, inputs, along: importlib.import_module("jax").vjp(f, *inputs)[1](along),
    "mlx": lambda f, inputs, along: importlib.import_module("mlx.core").vjp(f, inputs, [along])[1],
}


def gradients_of(
    function: Callable[..., Any], inputs: dict[str, Any], along: Any
) -> dict[str, Any]:
    """Return the gradients of a function of named arrays, by their library."""

    def call(*given: Any) -> Any:
        return function(**dict(zip(inputs, given, strict=True)))

    arrays = list(inputs.values())
    gradients = VJP[facts_of(arrays[0]).library](call, arrays, along)
    return dict(zip(inputs, gradients, strict=True))


def by_library(
    target: Target, case: Case, kernel: Kernel, arguments: Arguments
) -> dict[str, Any] | None:
    """Return the gradients by the library of the arrays, or None if the kernel refuses."""
    along = target.to(cotangent(case))

    def differentiated(*arrays: Any, **options: Any) -> Any:
        named = dict(zip(ARRAYS, arrays, strict=True)) | options
        inputs = {name: named.pop(name) for name in GRADIENT_ARRAYS if name in named}
        return gradients_of(partial(attention, **named), inputs, along)

    try:
        gradients: dict[str, Any] = target.call(case, kernel, differentiated, arguments)
    except UnsupportedError:
        # Only torch's arrays show beforehand that they will be differentiated.
        if any(getattr(x, "requires_grad", False) for x in arguments[0]):
            is_refused = target.explain(case, kernel, arguments).chosen is None
            assert is_refused, f"{case}: explain says that it runs, and the call is refused"
        return None
    return gradients
