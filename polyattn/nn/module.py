"""Hold parameters as plain arrays in frozen dataclasses, and create their first values.

A module is immutable and its functions are pure. A library differentiates or compiles functions of
`parameters`, a dictionary of arrays, and `with_parameters` makes a module from such a dictionary.
Autograd, ``jit`` and ``vmap`` of any library therefore need no knowledge of polyattn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from polyattn._base.arguments import check_int
from polyattn._base.arrays import Array, cast, facts_of, is_array, library_of, numbers_like

M = TypeVar("M", bound="Module")


class Module:
    """A frozen dataclass whose fields are arrays, modules, tuples of modules, or settings."""

    def parameters(self) -> dict[str, Array]:
        """Return the arrays by name, such as ``"blocks.0.attention.query.weight"``."""
        return dict(_arrays(self))

    def with_parameters(self: M, parameters: Mapping[str, Array]) -> M:
        """Return the same module with other arrays.

        Parameters
        ----------
        parameters : mapping of str to Array
            All arrays, with the names and shapes of `parameters`.

        Returns
        -------
        Module

        Raises
        ------
        ValueError
            If names or shapes differ.
        """
        current = self.parameters()
        differences = {
            "missing": current.keys() - set(parameters),
            "unknown": set(parameters) - current.keys(),
        }
        if any(differences.values()):
            listed = [f"{kind}: {', '.join(sorted(n))}" for kind, n in differences.items() if n]
            raise ValueError("parameters do not fit the module; " + "; ".join(listed))
        # Each is read once: a library may record that it was.
        new = {name: parameters[name] for name in current}
        for name, array in current.items():
            if tuple(new[name].shape) != tuple(array.shape):
                raise ValueError(
                    f"the parameter {name} has the shape {tuple(array.shape)}; got"
                    f" {tuple(new[name].shape)}"
                )
        changed: M = _replaced(self, "", new)
        return changed

    def copied(self: M) -> M:
        """Return the same module with copies of its arrays."""
        parameters = self.parameters().items()
        copies = {name: library_of(a).xp.asarray(a, copy=True) for name, a in parameters}
        return self.with_parameters(copies)

    def __repr__(self) -> str:
        return "\n".join(_lines(self, ""))


def is_parameter(value: Any) -> bool:
    """Return whether a field is an array of parameters; an integer of NumPy is a setting."""
    return is_array(value) and not isinstance(value, np.integer)


def _children(value: Any) -> list[tuple[str, Any]]:
    """Return the fields of a module or the items of a tuple, by name."""
    if isinstance(value, Module):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]  # type: ignore[arg-type]
    return [(str(n), item) for n, item in enumerate(value)] if isinstance(value, tuple) else []


def _arrays(value: Any, path: str = "") -> Iterator[tuple[str, Array]]:
    if is_parameter(value):
        yield path.removeprefix("."), value
    for name, child in _children(value):
        yield from _arrays(child, f"{path}.{name}")


def _replaced(value: Any, path: str, arrays: Mapping[str, Array]) -> Any:
    if is_parameter(value):
        return arrays[path.removeprefix(".")]
    new = {name: _replaced(child, f"{path}.{name}", arrays) for name, child in _children(value)}
    if isinstance(value, Module):
        return type(value)(**new)
    return tuple(new.values()) if isinstance(value, tuple) else value


def _lines(module: Module, name: str) -> Iterator[str]:
    """Yield a line for each module in a module: its name, type, settings and array shapes."""
    details: list[str] = []
    inner: list[tuple[str, Any]] = []
    for field, value in _children(module):
        if is_parameter(value):
            dtype = str(value.dtype).rpartition(".")[2]
            details.append(f"{field}: {tuple(value.shape)} {dtype}")
        elif holds_modules(value):
            inner.append((field, value))
        elif value is not None:
            details.append(f"{field}={value!r}")
    yield f"{name}{type(module).__name__}({', '.join(details)})"
    for label, value in inner:
        several = isinstance(value, tuple)
        lines = _grouped_lines(value, label) if several else _lines(value, f"{label}: ")
        yield from (f"  {line}" for line in lines)


def _grouped_lines(modules: tuple[Any, ...], name: str) -> Iterator[str]:
    """Yield the lines of a tuple of modules, once for equal ones in a row."""
    lines = [list(_lines(module, "")) for module in modules]
    number = 0
    for (head, *rest), run in groupby(lines):
        last = number + len(list(run)) - 1
        yield f"{name}[{number}]: {head}" if last == number else f"{name}[{number}–{last}]: {head}"
        yield from rest
        number = last + 1


def holds_modules(value: Any) -> bool:
    """Return whether a field holds a module or a tuple of modules."""
    values = value if isinstance(value, tuple) else (value,)
    return any(isinstance(item, Module) for item in values)


class Initializer:
    """Create parameters: equal in every library for the same seed and order of calls."""

    def __init__(self, like: Array, xp: Any, seed: int) -> None:
        if not xp.isdtype(like.dtype, "real floating"):
            raise TypeError(f"parameters have the dtype of like, a float; got {facts_of(like)}")
        self._like, self._xp = like, xp
        # NumPy guarantees the same words of a bit generator in every version, but not the same
        # distributions.
        self._words = np.random.Philox(np.random.SeedSequence(check_int("seed", seed, least=0)))

    def uniform(self, shape: tuple[int, ...], bound: float) -> Array:
        """Return numbers between −bound and bound with 24 random bits each: exact in float32."""
        words = self._words.random_raw(math.prod(shape)) >> np.uint64(40)
        return self._array((words * 2.0**-23 - 1).reshape(shape) * bound)

    def fill(self, shape: tuple[int, ...], value: float) -> Array:
        """Return an array filled with one number."""
        return self._array(np.full(shape, value))

    def _array(self, numbers: Any) -> Array:
        # NumPy lacks some dtypes, such as bfloat16; every library accepts its float32.
        xp, dtype = self._xp, self._like.dtype
        wide = dtype == xp.float64
        numbers = numbers if wide else numbers.astype(np.float32)
        array = numbers_like(xp, numbers, xp.float64 if wide else xp.float32, self._like)
        return cast(xp, array, dtype)
