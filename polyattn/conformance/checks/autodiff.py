"""The gradients of a call by the library's own differentiation: torch's, JAX's or MLX's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from polyattn import UnsupportedError, attention
from polyattn._core.call.options import GRADIENT_ARRAYS
from polyattn.conformance.cases.case import Case
from polyattn.conformance.checks.target import Target
from polyattn.conformance.reference.gradients import cotangent
from polyattn.plugin import Kernel

Arguments = tuple[list[Any], dict[str, Any]]


def differentiable(arrays: Iterable[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that have gradients, by name."""
    named = dict(zip(("query", "key", "value"), arrays, strict=True)) | options
    return {name: named[name] for name in GRADIENT_ARRAYS if name in named}


def torch_vjp(function: Callable[..., Any], inputs: list[Any], along: Any) -> Any:
    torch = importlib.import_module("torch")
    inputs = [x.requires_grad_() for x in inputs]
    output = function(*inputs)
    assert output.requires_grad, "the output does not require a gradient"
    gradients = torch.autograd.grad(output, inputs, along, allow_unused=True)
    pairs = zip(inputs, gradients, strict=True)
    return [torch.zeros_like(x) if gradient is None else gradient for x, gradient in pairs]


def jax_vjp(function: Callable[..., Any], inputs: list[Any], along: Any) -> Any:
    return importlib.import_module("jax").vjp(function, *inputs)[1](along)


def mlx_vjp(function: Callable[..., Any], inputs: list[Any], along: Any) -> Any:
    return importlib.import_module("mlx.core").vjp(function, inputs, [along])[1]


def by_library(
    vjp: Callable[..., Any], target: Target, case: Case, kernel: Kernel, arguments: Arguments
) -> dict[str, Any] | None:
    """Return the gradients by a library, which `vjp` calls, or None if the kernel refuses."""
    along = target.to(cotangent(case))

    def differentiated(*arrays: Any, **options: Any) -> Any:
        inputs = differentiable(arrays, options)
        others = {name: x for name, x in options.items() if name not in inputs}

        def call(*given: Any) -> Any:
            return attention(**dict(zip(inputs, given, strict=True)), **others)

        gradients = vjp(call, list(inputs.values()), along)
        return dict(zip(inputs, gradients, strict=True))

    try:
        gradients: dict[str, Any] = target.call(case, kernel, differentiated, arguments)
    except UnsupportedError:
        # Only torch's arrays show beforehand that they will be differentiated.
        if any(getattr(x, "requires_grad", False) for x in arguments[0]):
            is_refused = target.explain(case, kernel, arguments).chosen is None
            assert is_refused, f"{case}: explain says that it runs, and the call is refused"
        return None
    return gradients


#: How each library differentiates a function of arrays: with the inputs and the cotangent.
VJP: dict[str, Callable[[Callable[..., Any], list[Any], Any], Any]] = {
    "torch": torch_vjp,
    "jax": jax_vjp,
    "mlx": mlx_vjp,
}
