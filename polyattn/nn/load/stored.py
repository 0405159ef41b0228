"""Modules that name their weights first and are given them once every name and shape is checked.

A loader builds the module as it will be, with a `Stored` wherever a parameter goes: which stored
arrays it comes of, and how. `fill` then compares all of them with what there is, and reads.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from polyattn.arrays import Array, cast, facts_of, library_of
from polyattn.dispatch.transfer import convert_like
from polyattn.nn.layers import LayerNorm, Linear, RMSNorm
from polyattn.nn.module import Module

__all__ = [
    "Stored",
    "fill",
    "joined",
    "layer_norm",
    "linear",
    "numbered",
    "renamed",
    "rms_norm",
    "turned",
    "vector",
    "within",
]

M = TypeVar("M", bound=Module)
Shape = tuple[int, ...]
# Others, such as those of 8 bits, are codes, which mean nothing without their scales.
NUMBERS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, eq=False)
class Stored:
    """A parameter that is still elsewhere; it stands where its array will.

    Attributes
    ----------
    shape : tuple of int
        Of the parameter.
    sources : mapping of str to tuple of int
        The names that the stored arrays have, and their shapes.
    make : callable
        The parameter, of the standard's namespace and the arrays in that order.
    """

    shape: Shape
    sources: Mapping[str, Shape]
    make: Callable[..., Array] = field(default=lambda xp, array: array)
    dtype: Any = None  # as an array has one


def fill(module: M, weights: Mapping[str, Array], *, like: Array, origin: str) -> M:
    """Return the module with arrays in place of what was `Stored`.

    Parameters
    ----------
    module : Module
        All its parameters are `Stored`.
    weights : mapping of str to Array
        The arrays by the names that these ask for, and no others.
    like : Array
        Its library, device and dtype are the parameters'.
    origin : str
        What an error calls the weights.
    """
    facts = facts_of(like, "like")
    if facts.dtype not in NUMBERS:
        raise ValueError(f"like must have a floating dtype; got {like.dtype}")
    xp = library_of(like).xp
    wanted: dict[str, Stored] = module.parameters()
    _check(wanted.values(), weights, origin)

    def read(stored: Stored) -> Array:
        arrays = [cast(xp, _placed(weights[name], like), like.dtype) for name in stored.sources]
        # A copy: training here must not reach the model that the weights came from.
        return xp.asarray(stored.make(xp, *arrays), copy=True)

    # One by one, through the shapes that each promises.
    return module.with_parameters({name: read(stored) for name, stored in wanted.items()})


def _placed(array: Array, like: Array) -> Array:
    return convert_like(array.detach() if hasattr(array, "detach") else array, like)


def _check(wanted: Iterable[Stored], weights: Mapping[str, Array], origin: str) -> None:
    """Raise one error that lists every name, shape and dtype that does not fit."""
    expected = {name: shape for stored in wanted for name, shape in stored.sources.items()}
    wrong = []
    given = {name: facts_of(array, name) for name, array in weights.items()}
    for name, shape in expected.items():
        if name not in given:
            wrong.append(f"{name}: missing, expected {shape}")
        elif given[name].shape != shape:
            wrong.append(f"{name}: expected {shape}, got {given[name].shape}")
        elif given[name].dtype not in NUMBERS:
            wrong.append(f"{name}: expected {', '.join(NUMBERS)}, got {given[name].dtype}")
    unknown = given.keys() - expected
    wrong += [f"{name}: unknown, {given[name]}" for name in given if name in unknown]
    if wrong:
        raise ValueError(f"weights do not fit {origin}:\n  " + "\n  ".join(wrong))


# ---- what modules are made of ------------------------------------------------------------------


def vector(name: str, *shape: int) -> Stored:
    """Return a parameter that is stored as it is."""
    return Stored(shape, {name: shape})


def linear(name: str, inputs: int, outputs: int, bias: bool = True) -> Linear:
    """Return a linear map of a torch.nn.Linear, which stores (outputs, inputs)."""
    return joined([name], inputs, [outputs], bias)


def joined(names: list[str], inputs: int, outputs: list[int], bias: bool = True) -> Linear:
    """Return one linear map of several torch.nn.Linear of the same tokens, side by side."""
    shapes = {f"{name}.weight": (width, inputs) for name, width in zip(names, outputs, strict=True)}
    weight = Stored((inputs, sum(outputs)), shapes, turned)
    if not bias:
        return Linear(weight)
    lengths = {f"{name}.bias": (width,) for name, width in zip(names, outputs, strict=True)}
    return Linear(weight, Stored((sum(outputs),), lengths, _one_after_another))


def turned(xp: Any, *arrays: Array) -> Array:
    """Make the weight of a map of those that torch stores, (outputs, inputs) each."""
    return xp.matrix_transpose(_one_after_another(xp, *arrays))


def _one_after_another(xp: Any, *arrays: Array) -> Array:
    return arrays[0] if len(arrays) == 1 else xp.concat(arrays, axis=0)


def layer_norm(name: str, size: int, epsilon: float, bias: bool = True) -> LayerNorm:
    """Return the normalisation of a torch.nn.LayerNorm."""
    offset = vector(f"{name}.bias", size) if bias else None
    return LayerNorm(vector(f"{name}.weight", size), offset, epsilon)


def rms_norm(name: str, size: int, epsilon: float) -> RMSNorm:
    """Return a normalisation that stores a weight alone."""
    return RMSNorm(vector(f"{name}.weight", size), epsilon)


# ---- names -------------------------------------------------------------------------------------


def renamed(weights: Mapping[str, Array], name_of: Callable[[str], str | None]) -> dict[str, Array]:
    """Return the arrays by the names that a function makes of theirs, without those of None."""
    found: dict[str, Array] = {}
    sources: dict[str, str] = {}
    for name, array in weights.items():
        if not isinstance(name, str):
            raise ValueError(f"weights are arrays by name; got the name {reprlib.repr(name)}")
        own = name_of(name)
        if own is None:
            continue
        if own in found:
            raise ValueError(f"{sources[own]} and {name} are one weight, {own}: leave one out")
        facts_of(array, name)
        found[own], sources[own] = array, name
    return found


def within(weights: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """Return what has names with a prefix, without it."""
    found = renamed(
        weights, lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None
    )
    if not found:
        raise ValueError(f"no weight has a name that begins with {prefix!r}; {_first(weights)}")
    return found


def numbered(weights: Mapping[str, Array], prefix: str, count: int, setting: str) -> list[str]:
    """Return the names of a model's blocks, if the weights have as many as a setting says."""
    rests = (name.removeprefix(prefix) for name in weights if name.startswith(prefix))
    there = len({number for number, dot, _ in (rest.partition(".") for rest in rests) if dot})
    if count > there:
        raise ValueError(
            f"config: {setting} is {count}, and weights have {there} blocks, whose names begin"
            f" with {prefix}0. and so on; {_first(weights)}"
        )
    return [f"{prefix}{number}" for number in range(count)]


def _first(weights: Mapping[str, Array]) -> str:
    return f"they begin with {', '.join(list(weights)[:3]) or 'none'}"
