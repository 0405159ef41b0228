"""Check the gradients of a library's own differentiation against the textbook's."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from polyattn import attention, explain
from polyattn.arrays import facts_of
from polyattn.conformance.cases.case import Case
from polyattn.conformance.cases.catalogue import CASES, HIDDEN, PAIRED
from polyattn.conformance.checks.target import KernelVariant, Target
from polyattn.conformance.reference.gradients import cotangent, gradient_yardsticks
from polyattn.conformance.reference.tolerance import Deviation, deviation
from polyattn.dispatch.errors import UnsupportedError
from polyattn.plugin import Kernel

__all__ = ["GRADIENT_CASES", "POISONED_GRADIENT_CASES", "check_gradients", "has_gradients"]


def has_gradients(target: Target) -> bool:
    """Return whether this module can differentiate in the library of the target."""
    return target.library.partition(".")[0] in BY


def check_gradients(
    target: Target, variant: KernelVariant, case: Case
) -> dict[str, Deviation] | None:
    """Check that the gradients are as accurate as the textbook's; None if the call is refused."""
    arguments = target.arguments(case)
    by = BY.get(facts_of(arguments[0][0]).library)
    gradients = None if by is None else by(target, case, variant.for_case(case), arguments)
    if gradients is None:
        return None
    deviations = {}
    for name, yard in gradient_yardsticks(case).items():
        off = deviation(target.back(gradients[name]), yard, f"{case}: gradient of {name}")
        assert off.fault is None, off.fault
        deviations[name] = off
    return deviations


Arguments = tuple[list[Any], dict[str, Any]]


def differentiable(arrays: Iterable[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that have gradients, by name."""
    named = dict(zip(("query", "key", "value"), arrays, strict=True))
    return named | {name: options[name] for name in ("bias", "sinks") if name in options}


def by_torch(
    target: Target, case: Case, kernel: Kernel, arguments: Arguments
) -> dict[str, Any] | None:
    """Return the gradients by torch's autograd, or None if the kernel refuses."""
    torch = importlib.import_module("torch")
    arrays, options = arguments
    inputs = differentiable(arrays, options)
    for x in inputs.values():
        x.requires_grad_()
    if explain(*arrays, **options, backend=target.backend, kernel=kernel).chosen is None:
        return None
    output = target.call(case, kernel, arguments=arguments)
    assert output.requires_grad, f"{case}: the output does not require a gradient"
    along = target.to(cotangent(case))
    gradients = torch.autograd.grad(output, tuple(inputs.values()), along, allow_unused=True)
    return {
        name: torch.zeros_like(x) if gradient is None else gradient
        for (name, x), gradient in zip(inputs.items(), gradients, strict=True)
    }


def by_jax(
    target: Target, case: Case, kernel: Kernel, arguments: Arguments
) -> dict[str, Any] | None:
    """Return the gradients by JAX, or None if the kernel refuses."""
    jax = importlib.import_module("jax")
    along = target.to(cotangent(case))

    def differentiated(*arrays: Any, **options: Any) -> Any:
        inputs = differentiable(arrays, options)
        others = {name: x for name, x in options.items() if name not in inputs}
        _, back = jax.vjp(lambda inputs: attention(**inputs, **others), inputs)
        return back(along)[0]

    try:
        gradients: dict[str, Any] = target.call(case, kernel, differentiated, arguments)
    except UnsupportedError:
        # An array of JAX does not show beforehand that it will be differentiated.
        return None
    return gradients


BY = {"torch": by_torch, "jax": by_jax}

NAMES = (
    *PAIRED,
    "plain",
    "padding mask",
    "mask (L, 1)",
    "bias (H, 1, S)",
    "bias (B, 1, L, 1)",
    "bias as mask",
    "sink of -inf",
    "offset below 0",
    "scale below 0",
    "one key/value head",
    "key without batch axes",
    "value alone in a batch",
    "decode",
    "mask hides some rows",
    "mask hides some rows, sinks",
    "mask hides all",
    "causal, L > S",
    "bias hides some rows",
    "sink of -inf in an empty row",
    "S = 0",
    "equal scores",
    "many",
    "65 x 65, causal",
    "64 x 65",
    "mask value",
    "mask value hides some rows",
    "composed masks, offset below 0",
    "score value",
    "score value x mask value",
    "score value x offset array",
    "score value of a function",
)


def in_both_dtypes(names: Iterable[str]) -> Iterator[Case]:
    for name in names:
        yield CASES[name]
        yield replace(CASES[name], name=f"{name}, float64", dtype="float64")


#: Cases whose gradients are checked, by name.
GRADIENT_CASES = {case.name: case for case in in_both_dtypes(NAMES)}

#: Cases with NaN or infinity in hidden keys and values: no gradient may change.
POISONED_GRADIENT_CASES = {
    name: CASES[name]
    for name in (
        *(f"nan under {how}" for how in HIDDEN if how not in ("window", "causal")),
        *("inf under mask array", "nan in a key under mask array"),
        "nan under a mask value",
    )
}
