"""Decide where a call runs: on which backend and device, and which arrays must move there.

No array moves unless a backend is named. A conversion that would lose a gradient graph or meet a
traced array is refused before any work. Within one library nothing is lost.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from polyattn._base.arrays import LONG_NAMES, ArrayFacts
from polyattn._base.tracing import is_compiling
from polyattn._core.call.facts import Call
from polyattn._core.call.narrowed import Banded
from polyattn._core.call.operands import ARGUMENTS
from polyattn._core.call.problem import Problem
from polyattn._dispatch import registry
from polyattn._dispatch.transfer import conversion_loss
from polyattn.plugin import Backend, BackendSpec, Kernel


class Placement(NamedTuple):
    """A backend that could run a call, and the operands that must move there."""

    backend: Backend | None  # None for the array-API kernels where only shapes are known
    kernels: tuple[Kernel, ...]
    problem: Problem  # with the library and device of the backend
    moved: frozenset[str]  # the operands of another library or device
    band: Banded | None = None  # what `run` gives the kernel in place of the problem and all keys


class Refusal(NamedTuple):
    """The reason why a backend cannot be loaded, or cannot run this call."""

    status: str  # "unavailable" or "refused"
    reason: str


def find_placement(call: Call, problem: Problem, name: str, xp: Any) -> Placement | Refusal:
    """Return where the backend ``name`` or ``name:device`` would run a call, or why it cannot."""
    stem, _, device = name.partition(":")
    if stem == registry.ARRAY_API:
        return _array_api_placement(call, problem, device, xp)
    failure = registry.load(stem)
    if failure is not None:
        return Refusal("unavailable", failure)
    backend, spec = registry.loaded(stem), registry.spec_of(stem)
    target = _target_device(call, spec, device)
    if isinstance(target, Refusal):
        return target
    arrays = call.arrays()
    moved = _operands_to_move(arrays, spec, target)
    reason = _reason_against(call, arrays, problem, spec, target, moved)
    if reason is not None:
        return Refusal("refused", reason)
    if moved or (problem.library, problem.device) != (spec.namespaces[0], target):
        problem = problem._replace(library=spec.namespaces[0], device=target, converted=bool(moved))
    return Placement(backend, registry.kernels_of(backend), problem, moved)


def _array_api_placement(call: Call, problem: Problem, device: str, xp: Any) -> Placement | Refusal:
    locations = sorted({(facts.library, facts.device) for _, facts in call.arrays()})
    # An array without a device goes where the others of its library are.
    devices = [device for _, device in locations if device]
    if device or len({library for library, _ in locations}) > 1 or len(devices) > 1:
        listed = " and ".join(f"{library} {where}".strip() for library, where in locations)
        reason = f"it computes where the arrays are and does not move them; they are on {listed}"
        return Refusal("refused", reason)
    backend = None if xp is None else registry.array_api_backend(xp)
    return Placement(backend, registry.kernels_of(backend), problem, frozenset())


def _target_device(call: Call, spec: BackendSpec, requested: str) -> str | Refusal:
    """Return the device that a call runs on; "" if the backend chooses it itself."""
    home = call.query.device
    is_native = call.query.library in spec.namespaces
    if not requested:
        return home if is_native else next(iter(registry.devices_of(spec.name)), "")
    # If only a kind of device is requested, the call stays on the query's device of that kind.
    stays = is_native and home.partition(":")[0] == requested
    device = home if stays else registry.device_of(spec.name, requested)
    if device is None:
        available = ", ".join(registry.devices_of(spec.name)) or "none"
        return Refusal("refused", f"there is no device {requested!r} here; available: {available}")
    unplaced = [name for name, facts in call.arrays() if facts.traced and not facts.device]
    if unplaced and device != registry.devices_of(spec.name)[0]:
        reason = (
            f"{unplaced[0]} is traced, and is computed on the device of the traced function: run"
            f" that function on {device}, and name the backend without a device"
        )
        return Refusal("refused", reason)
    return device


def _operands_to_move(
    arrays: list[tuple[str, ArrayFacts]], spec: BackendSpec, device: str
) -> frozenset[str]:
    return frozenset(
        [
            name.partition(".")[0]  # the argument, if the array is part of an expression
            for name, facts in arrays
            if name in ARGUMENTS or facts.library not in spec.accepts
            if facts.library not in spec.namespaces
            # The device of a traced array may be unknown; such an array is not moved.
            or (device and facts.device != device and (facts.device or not facts.traced))
        ]
    )


def _reason_against(
    call: Call, arrays: list[tuple[str, ArrayFacts]], problem: Problem, spec: BackendSpec,
    device: str, moved: frozenset[str],
) -> str | None:  # fmt: skip
    if problem.dtype not in spec.dtypes:
        return f"it does not take {problem.dtype}"
    if device and (kind := device.partition(":")[0]) not in spec.devices:
        return (
            f"it does not run on {device}: the spec of {spec.name} lists"
            f" {', '.join(spec.devices)}; if it can, add devices={(*spec.devices, kind)} there"
        )
    if moved and is_compiling():
        return "inside torch.compile no array can be converted or moved"
    dtype_reason = registry.loaded(spec.name).lacks(problem.dtype)
    if dtype_reason is not None:
        return dtype_reason
    for name, facts in arrays:
        is_moved = name.partition(".")[0] in moved
        if facts.traced and "query" in moved and not is_moved:
            return (
                f"{name} is traced, so the result has no values to convert back to"
                f" {call.query.library}: pass arrays of one library"
            )
        if is_moved and facts.device == "meta":
            return f"{name} is on the device meta, without values to move"
        if facts.library not in spec.namespaces:
            lost = conversion_loss(name, facts, problem.transforms)
            if lost is not None:
                return lost
    return None


def check_one_place(call: Call) -> None:
    """Raise if the arrays are of several libraries or on several devices."""
    query, library = call.query, call.query.library
    arrays = call.arrays()
    for name, facts in arrays:
        if facts.library != library and facts.library not in _accepted(call, name):
            # A query in NumPy follows the others: they may be on a GPU.
            moved, where = ("query", facts) if library == "numpy" else (name, query)
            raise TypeError(
                f"query is an array of {query.library} and {name} one of {facts.library}; pass"
                f" {_conversion(moved, where)}"
            )
    # An array without a device goes where the others are, and an accepted one stays.
    on_devices = [one for one in arrays if one[1].library == library and one[1].device]
    for name, facts in on_devices:
        first, where = on_devices[0]
        if facts.device != where.device:
            raise ValueError(
                f"{first} is on {where.device} and {name} on {facts.device}; pass"
                f" {_on_device(name, first, where)}"
            )


def _accepted(call: Call, name: str) -> tuple[str, ...]:
    """Return the libraries that an array of a call may have beside that of the query."""
    if name in ARGUMENTS:
        return ()
    serving = registry.serving(call.query.library)
    return tuple(one for backend in serving for one in registry.accepted(backend))


def _conversion(name: str, where: ArrayFacts) -> str:
    """Return the code that makes an array one of another library, on its device."""
    module = LONG_NAMES.get(where.library, where.library)
    device = f", device={where.device!r}" if where.library == "torch" else ""
    return f"{module}.asarray({name}{device})"


def _on_device(name: str, first: str, where: ArrayFacts) -> str:
    """Return the code that moves an array to a device of its library."""
    if where.library == "torch":
        return f"{name}.to({where.device!r})"
    if where.library == "jax":
        return f"jax.device_put({name}, {first}.device)"
    return f"{name}.to_device({first}.device)"
