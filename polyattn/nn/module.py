"""Modules: parameters as plain arrays in frozen dataclasses, and functions of them that are pure.

A module is a value. What a library differentiates or compiles is `parameters`, a dictionary of
arrays, and `with_parameters` makes the module of others, so that autograd, ``jit`` and ``vmap`` of
any library pass through without knowing of polyattn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from polyattn.arguments import check_int
from polyattn.arrays import Array, cast, facts_of, is_array, library_of, numbers_like

__all__ = ["Draws", "Module"]

M = TypeVar("M", bound="Module")


class Module:
    """A frozen dataclass whose fields are arrays, modules, tuples of modules, or settings."""

    def parameters(self) -> dict[str, Array]:
        """Return the arrays by their names, such as ``"blocks.0.attention.query.weight"``."""
        return dict(_arrays(self))

    def with_parameters(self: M, parameters: Mapping[str, Array]) -> M:
        """Return the same module with other arrays.

        Parameters
        ----------
        parameters : mapping of str to Array
            All of them, by the names and with the shapes of `parameters`.

        Returns
        -------
        Module
            A new one.

        Raises
        ------
        ValueError
            If names or shapes are others.
        """
        own = self.parameters()
        missing, unknown = sorted(own.keys() - parameters), sorted(parameters.keys() - own)
        if missing or unknown:
            said = [
                f"{what}: {', '.join(names)}"
                for what, names in (("missing", missing), ("unknown", unknown))
                if names
            ]
            raise ValueError("parameters do not fit the module; " + "; ".join(said))
        for name, array in own.items():
            if tuple(parameters[name].shape) != tuple(array.shape):
                raise ValueError(
                    f"the parameter {name} has the shape {tuple(array.shape)}; got"
                    f" {tuple(parameters[name].shape)}"
                )
        changed: M = _replaced(self, "", parameters)
        return changed

    def copied(self: M) -> M:
        """Return the same module with arrays of its own."""
        own = self.parameters()
        copies = {name: library_of(a).xp.asarray(a, copy=True) for name, a in own.items()}
        return self.with_parameters(copies)

    def __repr__(self) -> str:
        return "\n".join(_lines(self, ""))


def _arrays(thing: Any, path: str = "") -> Iterator[tuple[str, Array]]:
    if is_array(thing):
        yield path, thing
    elif isinstance(thing, Module):
        for field in fields(thing):  # type: ignore[arg-type]
            yield from _arrays(getattr(thing, field.name), _under(path, field.name))
    elif isinstance(thing, tuple):
        for number, one in enumerate(thing):
            yield from _arrays(one, _under(path, str(number)))


def _replaced(thing: Any, path: str, arrays: Mapping[str, Array]) -> Any:
    if is_array(thing):
        return arrays[path]
    if isinstance(thing, Module):
        own = {
            field.name: _replaced(getattr(thing, field.name), _under(path, field.name), arrays)
            for field in fields(thing)  # type: ignore[arg-type]
        }
        return type(thing)(**own)
    if isinstance(thing, tuple):
        return tuple([_replaced(one, _under(path, str(n)), arrays) for n, one in enumerate(thing)])
    return thing


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _lines(module: Module, name: str) -> Iterator[str]:
    """Yield a line for each module in a module: its name, kind, settings, and arrays' shapes."""
    said: list[str] = []
    inner: list[tuple[str, Any]] = []
    for field in fields(module):  # type: ignore[arg-type]
        value = getattr(module, field.name)
        if is_array(value):
            dtype = str(value.dtype).rpartition(".")[2]
            said.append(f"{field.name}: {tuple(value.shape)} {dtype}")
        elif _is_inner(value):
            inner.append((field.name, value))
        elif value is not None:
            said.append(f"{field.name}={value!r}")
    yield f"{name}{type(module).__name__}({', '.join(said)})"
    for label, value in inner:
        several = isinstance(value, tuple)
        lines = _alike(value, label) if several else _lines(value, f"{label}: ")
        yield from (f"  {line}" for line in lines)


def _alike(things: tuple[Any, ...], name: str) -> Iterator[str]:
    """Yield the lines of a tuple of modules, once for those that follow one another alike."""
    lines = [list(_lines(thing, "")) for thing in things]
    number = 0
    for (head, *rest), run in groupby(lines):
        last = number + len(list(run)) - 1
        yield f"{name}[{number}]: {head}" if last == number else f"{name}[{number}–{last}]: {head}"
        yield from rest
        number = last + 1


def _is_inner(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(isinstance(one, Module) for one in value)
    return isinstance(value, Module)


class Draws:
    """Numbers to begin with: the same in every library, for the same seed and order of asking.

    Parameters
    ----------
    like : Array
        An array of the library, device and dtype that they are to have.
    xp : module
        The standard's namespace of the library.
    seed : int
        0 or more.
    """

    def __init__(self, like: Array, xp: Any, seed: int) -> None:
        if check_int("seed", seed) < 0:
            raise ValueError(f"seed must be at least 0; got {seed!r}")
        if not xp.isdtype(like.dtype, "real floating"):
            raise TypeError(f"parameters have the dtype of like, a float; got {facts_of(like)}")
        self._like, self._xp = like, xp
        # Of what NumPy draws, the words of a bit generator are what never changes.
        self._words = np.random.Philox(np.random.SeedSequence(seed))

    def uniform(self, shape: tuple[int, ...], bound: float) -> Array:
        """Return numbers between −bound and bound, of 24 random bits each: exact in float32."""
        words = self._words.random_raw(math.prod(shape)) >> np.uint64(40)
        return self._array((words * 2.0**-23 - 1).reshape(shape) * bound)

    def fill(self, shape: tuple[int, ...], value: float) -> Array:
        """Return an array of one number."""
        return self._array(np.full(shape, value))

    def _array(self, numbers: Any) -> Array:
        # By float32, which every library takes from NumPy, to those that NumPy does not know.
        xp, own = self._xp, self._like.dtype
        wide = own == xp.float64
        numbers = numbers if wide else numbers.astype(np.float32)
        array = numbers_like(xp, numbers, xp.float64 if wide else xp.float32, self._like)
        return cast(xp, array, own)
