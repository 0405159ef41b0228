"""Arrays to the backend that was named, and the result back to where the query lives.

Nothing moves unless a backend is named. What would be lost on the way is refused beforehand: a
graph of gradients, an array that is still being traced. Within one library nothing is lost.
"""

from __future__ import annotations

from polyattn.arrays import Array, is_compiling
from polyattn.call.describe import Call
from polyattn.call.problem import Problem
from polyattn.dispatch import registry
from polyattn.dispatch.transfer import Placement, Refusal, conversion_loss
from polyattn.plugin import BackendSpec

__all__ = ["find_placement"]


def find_placement(
    call: Call, problem: Problem, query: Array | None, name: str
) -> Placement | Refusal:
    """Return where a backend would compute a call, or why it cannot.

    Parameters
    ----------
    call, problem
        The facts of the call.
    query : Array or None
        The query, or None where only its shape is known.
    name : str
        The backend, as ``name`` or ``name:device``.
    """
    stem, _, device = name.partition(":")
    if stem == registry.ARRAY_API:
        return _own_site(call, problem, query, device)
    failure = registry.load(stem)
    if failure is not None:
        return Refusal("unavailable", failure)
    backend, spec = registry.loaded(stem), registry.spec_of(stem)
    if device:
        found = registry.device_of(stem, device)
        home = call.query.device
        if call.query.library in spec.namespaces and home.partition(":")[0] == device:
            found = home  # the kind alone is asked for, and this is one of it
        if found is None:
            at_hand = ", ".join(registry.devices_of(stem)) or "none"
            return Refusal("refused", f"there is no device {device!r} here; there is {at_hand}")
        unplaced = [name for name, facts in call.arrays() if facts.traced and not facts.device]
        if unplaced and found != registry.devices_of(stem)[0]:
            reason = (
                f"{unplaced[0]} is traced, and is computed wherever the whole of what is traced"
                f" is: put that on {found}, and name the backend without a device"
            )
            return Refusal("refused", reason)
    elif call.query.library in spec.namespaces:
        found = call.query.device
    else:
        found = next(iter(registry.devices_of(stem)), "")  # or wherever it puts them
    moved = _to_move(call, spec, found)
    refusal = _refusal(call, problem, spec, found, moved)
    if refusal is not None:
        return Refusal("refused", refusal)
    there = problem._replace(library=spec.namespaces[0], device=found, converted=bool(moved))
    return Placement(backend, registry.kernels_of(backend), there, moved)


def _own_site(
    call: Call, problem: Problem, query: Array | None, device: str
) -> Placement | Refusal:
    places = sorted({(facts.library, facts.device) for _, facts in call.arrays()})
    # One that is nowhere in particular goes where the others of its library are.
    apart = len({library for library, _ in places}) > 1 or len([w for _, w in places if w]) > 1
    if device or apart:
        given = " and ".join(f"{library} {where}".strip() for library, where in places)
        reason = f"it computes where the arrays are and moves none; they are on {given}"
        return Refusal("refused", reason)
    backend = None if query is None else registry.array_api_backend(query)
    return Placement(backend, registry.kernels_of(backend), problem, frozenset())


def _to_move(call: Call, spec: BackendSpec, device: str) -> frozenset[str]:
    return frozenset(
        [
            name.partition(".")[0]  # of the argument, where the array is part of a value
            for name, facts in call.arrays()
            if facts.library not in spec.namespaces
            # Nobody knows where a traced array of no device will be.
            or (device and facts.device != device and (facts.device or not facts.traced))
        ]
    )


def _refusal(
    call: Call, problem: Problem, spec: BackendSpec, device: str, moved: frozenset[str]
) -> str | None:
    if problem.dtype not in spec.dtypes:
        return f"it does not take {problem.dtype}"
    if device and device.partition(":")[0] not in spec.devices:
        return f"it does not run on {device}"
    if moved and is_compiling():
        return "inside torch.compile no array can be converted or moved"
    lacking = registry.loaded(spec.name).lacks(problem.dtype)
    if lacking is not None:
        return lacking
    for name, facts in call.arrays():
        is_moved = name.partition(".")[0] in moved
        if facts.traced and "query" in moved and not is_moved:
            return (
                f"{name} is traced, and the result has no values yet to take back to"
                f" {call.query.library}: pass arrays of one library"
            )
        if is_moved and facts.device == "meta":
            return f"{name} is on the device meta, without values to move"
        lost = (
            None
            if facts.library in spec.namespaces
            else conversion_loss(name, facts, problem.transforms)
        )
        if lost is not None:
            return lost
    return None


def check_one_place(call: Call) -> None:
    for name, facts in call.arrays():
        if facts.library != call.query.library:
            raise TypeError(
                f"query is an array of {call.query.library} and {name} one of {facts.library};"
                " convert one of them, or name the backend that is to take them all, for example"
                ' backend="numpy"'
            )
    # One that is nowhere in particular goes where the others are.
    placed = [(name, facts) for name, facts in call.arrays() if facts.device]
    for name, facts in placed:
        first, where = placed[0]
        if facts.device != where.device:
            raise ValueError(
                f"{first} is on {where.device} and {name} on {facts.device}; move one of them,"
                ' or name the backend that is to take them all, for example backend="numpy"'
            )
