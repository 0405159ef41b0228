"""Immutable values that describe a step of attention, and may carry arrays and functions.

A value is compared by what it says, prints as the code that makes it, and never reads an array but
to compare it or to print it. Its *form*, the same value with facts in place of arrays, is what a
decision may be remembered by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

from polyattn.arrays import ArrayFacts, facts_of, is_array, library_of

__all__ = ["FUNCTION", "Expression", "has_function", "named"]

V = TypeVar("V", bound="Expression")

#: What stands in a form where a function was.
FUNCTION = "function"
# Arrays of more elements print as what they are of.
MOST_PRINTED = 64


class Expression:
    """A frozen dataclass whose fields are plain, or arrays, functions, values, tuples of values.

    Attributes
    ----------
    module, name : str
        What makes it: ``module.name(fields)``.
    """

    module: ClassVar[str]
    name: ClassVar[str]
    __match_args__: ClassVar[tuple[str, ...]] = ()

    def map(self: V, change: Callable[[str, Any], Any]) -> V:
        """Return the value with each array and function that it carries replaced.

        Parameters
        ----------
        change : callable
            Given the name and the array or function, what is to stand in its place.
        """
        return self._map(change, lambda table: table)

    def _map(self: V, change: Callable[[str, Any], Any], other: Callable[[bytes], bytes]) -> V:
        """Return the value with each array and function replaced, and each table of bytes."""

        def changed(name: str, field: Any) -> Any:
            if is_array(field) or (callable(field) and not isinstance(field, Expression)):
                return change(name, field)
            if isinstance(field, Expression):
                return field._map(change, other)
            if isinstance(field, tuple):
                return tuple([changed(name, one) for one in field])
            return other(field) if isinstance(field, bytes) else field

        return type(self)(*[changed(name, getattr(self, name)) for name in self.__match_args__])

    def carried(self) -> list[tuple[str, Any]]:
        """Return the name of each array and function that it carries, and the thing itself."""
        found: list[tuple[str, Any]] = []

        def note(name: str, thing: Any) -> Any:
            found.append((name, thing))
            return thing

        self.map(note)
        return found

    def spec(self: V, facts: Callable[[Any, str], ArrayFacts]) -> V:
        """Return the value with facts in place of arrays, no functions, and tables that are empty.

        Parameters
        ----------
        facts : callable
            What gives the facts of an array, and says its name where there are none.
        """
        return self._map(
            lambda name, x: facts(x, name) if is_array(x) else FUNCTION, lambda table: b""
        )

    def filled(self: V, value: Expression) -> V:
        """Return a form with the tables of the value that it is of.

        Parameters
        ----------
        value : Value
            The value.
        """
        tables: list[bytes] = []

        def note(table: bytes) -> bytes:
            tables.append(table)
            return table

        value._map(lambda name, x: x, note)
        rest = iter(tables)
        return self._map(lambda name, x: x, lambda table: next(rest)) if tables else self

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(getattr(self, n), getattr(other, n)) for n in self.__match_args__)

    def __hash__(self) -> int:
        return hash((type(self), *(_key(getattr(self, name)) for name in self.__match_args__)))

    def __repr__(self) -> str:
        fields = [(name, getattr(self, name)) for name in self.__match_args__]
        while fields and _same(fields[-1][1], getattr(type(self), fields[-1][0], _NOTHING)):
            fields.pop()
        given = [shown(field) for _, field in fields]
        return f"{self.module}.{self.name}({', '.join(given)})"


# What no field is.
_NOTHING = object()


def has_function(value: Any) -> bool:
    """Say whether a form had a function of the caller's in it."""
    if isinstance(value, Expression):
        return any(has_function(getattr(value, name)) for name in value.__match_args__)
    if isinstance(value, tuple) and not is_array(value):
        return any(has_function(one) for one in value)
    return isinstance(value, str) and value == FUNCTION


def named(value: Expression | None, of: str) -> Iterator[tuple[str, ArrayFacts]]:
    """Yield the name and facts of each array in a form: the argument's name and the field's."""
    if value is not None:
        for name, thing in value.carried():
            yield f"{of}.{name}", thing


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple) and not is_array(one):
        return len(one) == len(other) and all(map(_same, one, other))
    if not (is_array(one) and is_array(other)) or isinstance(one, ArrayFacts):
        return bool(type(one) is type(other) and one == other)
    facts = facts_of(one), facts_of(other)
    if any(fact.traced for fact in facts) or facts[0] != facts[1]:
        return False  # what has no values yet is equal to itself alone
    return bool(library_of(one).xp.all(one == other))


def _key(field: Any) -> Any:
    if is_array(field) and not isinstance(field, ArrayFacts):
        return tuple(field.shape), str(field.dtype)
    return tuple(map(_key, field)) if isinstance(field, tuple) else field


def shown(field: Any) -> str:
    """Return a field as it is written in code, where that is short enough to read."""
    if isinstance(field, ArrayFacts):
        return f"<{field.shape} {field.dtype}>"
    if isinstance(field, str) and field == FUNCTION:
        return "<function>"
    if is_array(field):
        return _shown_array(field)
    if isinstance(field, tuple):
        return "(" + ", ".join(map(shown, field)) + ("," if len(field) == 1 else "") + ")"
    if callable(field) and not isinstance(field, Expression):
        return str(getattr(field, "__qualname__", None) or repr(field))
    return repr(field)


def _shown_array(array: Any) -> str:
    facts = facts_of(array)
    module = "jax.numpy" if facts.library == "jax" else facts.library
    known = not facts.traced and facts.device != "meta"
    # A list of no lists does not say how long they would be.
    if not known or math.prod(facts.shape) > MOST_PRINTED or 0 in facts.shape[:-1]:
        return f"<{facts.shape} {facts.dtype} of {module}>"
    numbers = _listed(array, facts.dtype)
    for name in ("inf", "nan"):
        numbers = numbers.replace(name, f"{module}.{name}")
    return f"{module}.asarray({numbers}, dtype={module}.{facts.dtype})"


def _listed(array: Any, dtype: str) -> str:
    if len(array.shape):
        entries = [_listed(array[n, ...], dtype) for n in range(array.shape[0])]
        return f"[{', '.join(entries)}]"
    kind = bool if dtype == "bool" else float if "float" in dtype else int
    return repr(kind(array))
