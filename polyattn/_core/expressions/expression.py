"""Expressions: immutable objects that describe a step of attention and may carry arrays.

Expressions compare by content and print as the code that makes them. Arrays are read only to
compare or print. `split` takes an expression apart, and `joined` puts it together again::

    masks.causal() & masks.padding(lengths)
    skeleton: (And, (tuple, (Band, None, 0), (Padding, ..., 0)))
    carried:  [lengths]

The skeleton can be hashed and pickled. With the facts of arrays in it, it is the `spec()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

from polyattn._base.arrays import ArrayFacts, facts_of, is_array, library_of
from polyattn._base.host import Destination, is_host, memory_of
from polyattn._base.tracing import is_compiling, shape_text
from polyattn._core.expressions.parts import Part

V = TypeVar("V", bound="Expression")
# Arrays of the caller, and the memory of each as it was placed.
Copies = list[tuple[Any, bytearray]]
# What an expression carries: the class and the field of each, and the object.
Carried = list[tuple[Any, str, Any]]


class _Placeholder(str):
    """A text that `split` takes, unlike the texts of fields."""


#: The placeholder for a function in a spec.
FUNCTION = _Placeholder("function")
# Larger arrays print as their shape and dtype.
MOST_PRINTED = 64
#: The types of fields that a skeleton or a key holds as they are, beside tuples of them.
PLAIN = frozenset((bool, int, float, str, type(None)))
#: The fields that hold where a part begins among the rows or the keys of the whole, for classes
#: that count from there; for the whole 0, or None where `check` has to tell it from a part.
STARTS = {"first_row": "rows", "first_key": "columns"}
# What an expression remembers, beside its fields.
_REMEMBERED = frozenset(("_placed", "_form", "_hash"))


class Expression:
    """A frozen dataclass whose fields are plain, arrays, functions, expressions, or tuples of them.

    The code that makes it is ``module.name(fields)``.
    """

    module: ClassVar[str]
    name: ClassVar[str]
    __match_args__: ClassVar[tuple[str, ...]] = ()
    #: The axes of the scores that the array in a field follows, as for `axes_of_last`. None for a
    #: class that says nothing of them: a part of the scores refuses it.
    axes: ClassVar[dict[str, str] | None] = None
    #: The fields that hold how many of the first "rows" or "columns" there are.
    counts: ClassVar[dict[str, str]] = {}

    def map(self: V, change: Callable[[str, Any], Any]) -> V:
        """Return the expression with ``change(field, x)`` for each array and function x."""
        return self._changed(
            lambda _, name, x: change(name, x) if is_array(x) or callable(x) else x
        )

    def placed(self: V, destination: Destination) -> V:
        """Return the expression with the NumPy arrays that it carries placed beside the query.

        The expression keeps the arrays until the caller writes to its own, except traced ones: they
        belong to the program that is traced. The same expression comes back if nothing moves.
        """
        if is_compiling():
            return self.map(lambda name, x: destination.put(name, x) if is_host(x) else x)
        if self.form is not None and not any(map(is_host, self.form[1])):
            return self
        return self._placed_and_copies(destination)[0]

    def _placed_and_copies(self: V, destination: Destination) -> tuple[V, Copies]:
        """Return the expression as `placed` does, and a copy of each array that moved."""
        remembers = not isinstance(destination.like, ArrayFacts)
        kept = self.__dict__.get("_placed", {}).get(destination.key) if remembers else None
        # 1M ids compare in 0.02 of the time of a call with one row, a quarter of that of placing.
        if kept is not None and all(copy == memory_of(array) for array, copy in kept[1]):
            placed: V = self if kept[0] is None else kept[0]
            return placed, kept[1]
        copies: Copies = []

        def put(name: str, field: Any) -> Any:
            if isinstance(field, Expression):
                new, within = field._placed_and_copies(destination)
                copies.extend(within)
                return new
            if not is_host(field):
                return field
            copy = bytearray(memory_of(field))
            new = destination.put(name, field)
            if new is not field:
                copies.append((field, copy))
            return new

        new = self._rebuilt(put)
        if remembers and not any(facts_of(x).traced for x in split(new, is_array)[1]):
            keeps = new if copies else None  # not itself
            self.__dict__.setdefault("_placed", {})[destination.key] = keeps, copies
        return new if copies else self, copies

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _REMEMBERED}

    @property
    def form(self) -> tuple[Any, tuple[Any, ...]] | None:
        """The skeleton and the arrays; None if the expression also carries functions or tables.

        It is made once: an array may change in place, but which arrays there are stays.
        """
        if "_form" not in self.__dict__:
            skeleton, carried = split(self)
            # Functions may change, and tables of bytes are too large for a key.
            only_arrays = all(map(is_array, carried))
            self.__dict__["_form"] = (skeleton, tuple(carried)) if only_arrays else None
        known: tuple[Any, tuple[Any, ...]] | None = self.__dict__["_form"]
        return known

    def within(self) -> list[Any]:
        """Return the expressions in the fields of this one."""
        fields = [getattr(self, name) for name in self.__match_args__]
        every = [one for x in fields for one in (x if type(x) is tuple else (x,))]
        return [one for one in every if isinstance(one, Expression)]

    def check(self, dims: Any) -> None:
        """Raise if the expression does not fit the lengths of a call."""
        for one in self.within():
            one.check(dims)

    def carried(self) -> list[tuple[str, Any]]:
        """Return the name and the object of each array and function in the expression."""
        everything: Carried = []
        _skeleton_of(self, (None, ""), everything, None)
        carried = []
        for _, name, x in everything:
            if is_array(x) or callable(x):
                carried.append((name, x))
        return carried

    def with_array_per_axis(self: V) -> V:
        """Return an equal expression that has an array of its own for each axis of the scores."""
        return self._rebuilt(
            lambda _, x: x.with_array_per_axis() if isinstance(x, Expression) else x
        )

    def with_lengths(self: V, change: Callable[[int], Any]) -> V:
        """Return the expression with each length replaced that is one number for all items."""

        def changed(name: str, field: Any) -> Any:
            if isinstance(field, Expression):
                return field.with_lengths(change)
            return change(field) if name in self.counts and isinstance(field, int) else field

        return self._rebuilt(changed)

    @classmethod
    def _axes_of(cls, field: str) -> str:
        """Return the axes of the scores that the array in a field follows."""
        axes = (cls.axes or {}).get(field)
        if axes is None:
            raise TypeError(f"{cls._refusal()}: its class does not give the axes of `{field}`")
        return axes

    @classmethod
    def _refusal(cls) -> str:
        named = f"{cls.module}.{getattr(cls, 'name', cls.__name__)}"
        return f"{named} cannot be cut into parts of the scores"

    def map_arrays(self: V, change: Callable[[str, Any], Any]) -> V:
        """Return the expression with each array replaced by ``change(axes, array)``.

        The axes of the scores are those that the array follows.
        """
        return self._changed(
            lambda cls, name, x: change(cls._axes_of(name), x) if is_array(x) else x
        )

    def arrays(self) -> list[tuple[str, Any]]:
        """Return the axes of the scores that each array follows and the array."""
        carried: Carried = []
        _skeleton_of(self, (None, ""), carried, None)
        return [(cls._axes_of(name), x) for cls, name, x in carried if is_array(x)]

    def part(self, part: Part) -> Any:
        """Return the expression over a part of the scores, counted from its first row and key.

        Its arrays may be cut to the part already, and the fields of `STARTS` and `counts` move.
        Raises TypeError if the class does not give `axes`: its meaning in a part is unknown.
        """
        if self.axes is None:
            raise TypeError(f"{self._refusal()}: its class does not give `axes`")

        def changed(name: str, field: Any) -> Any:
            if isinstance(field, Expression):
                return field.part(part)
            if name in self.counts:
                return part.counted(field, getattr(part, self.counts[name]).start)
            if name in STARTS:
                first = 0 if field is None else field
                return part.counted(first, -getattr(part, STARTS[name]).start)
            if is_array(field):
                return part.array(field, self._axes_of(name))
            return part.shifted(field) if callable(field) else field

        return self._rebuilt(changed)

    def _rebuilt(self: V, change: Callable[[str, Any], Any]) -> V:
        """Replace each field, or what a tuple in it holds, by its name."""
        fields = [_replaced(name, getattr(self, name), change) for name in self.__match_args__]
        return type(self)(*fields)

    def spec(
        self: V, facts: Callable[[Any, str], ArrayFacts] = facts_of, *, tables: bool = False
    ) -> V:
        """Return the expression without functions and tables, with the facts of its arrays."""

        def fact(_: type, name: str, x: Any) -> Any:
            if is_array(x):
                return facts(x, name)
            if isinstance(x, bytes):
                return x if tables else b""
            return FUNCTION if callable(x) else x

        return self._changed(fact)

    def _changed(self: V, change: Callable[[Any, str, Any], Any]) -> V:
        """Return the expression with ``change(class, field, x)`` for each x that it carries."""
        carried: Carried = []
        skeleton = _skeleton_of(self, (None, ""), carried, None)
        changed: V = joined(skeleton, [change(*place_and_x) for place_and_x in carried])
        return changed

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(getattr(self, n), getattr(other, n)) for n in self.__match_args__)

    def __hash__(self) -> int:
        # Made once: caches of problems, which hold expressions, are looked into in each call.
        if "_hash" not in self.__dict__:
            fields = [_key(getattr(self, name)) for name in self.__match_args__]
            self.__dict__["_hash"] = hash((type(self), *fields))
        return self.__dict__["_hash"]  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        cls, names = type(self), list(self.__match_args__)
        # A class has the defaults of its fields as attributes.
        while names and hasattr(cls, n := names[-1]) and _same(getattr(self, n), getattr(cls, n)):
            names.pop()
        given = [shown(getattr(self, name)) for name in names]
        return f"{self.module}.{self.name}({', '.join(given)})"


def split(value: Any, takes: Callable[[Any], bool] | None = None) -> tuple[Any, list[Any]]:
    """Take an expression apart.

    Parameters
    ----------
    value : Expression, tuple of them, or any
        What is taken apart, with the expressions and tuples in it.
    takes : callable, optional
        Whether a field that is no expression or tuple is taken; the others stay in the skeleton. By
        default arrays, functions and tables are taken.

    Returns
    -------
    skeleton : Hashable
        A tuple of the class and the fields of each expression and tuple, ``...`` for what is taken.
    carried : list
        What is taken, in order.
    """
    carried: Carried = []
    return _skeleton_of(value, (None, ""), carried, takes), [x for *_, x in carried]


def joined(skeleton: Any, carried: Iterable[Any]) -> Any:
    """Put an expression together again: the one that has a skeleton and carries these, in order."""
    rest = iter(carried)
    if skeleton is ...:
        return next(rest)
    if type(skeleton) is not tuple:
        return skeleton
    fields = []
    for field in skeleton[1:]:
        fields.append(joined(field, rest))
    return tuple(fields) if skeleton[0] is tuple else skeleton[0](*fields)


# Not inside of another function: one that names itself is in a reference cycle, which would keep
# what it closes over, such as the tensors of a step, until the garbage collector runs.
def _skeleton_of(field: Any, place: tuple[Any, str], carried: Carried, takes: Any) -> Any:
    cls: Any = type(field)
    fields = [cls]
    if isinstance(field, Expression):
        for name in cls.__match_args__:
            fields.append(_skeleton_of(getattr(field, name), (cls, name), carried, takes))
    elif cls is tuple:
        for part in field:
            fields.append(_skeleton_of(part, place, carried, takes))
    elif cls not in PLAIN if takes is None else takes(field):
        carried.append((*place, field))
        return ...
    else:
        return field
    return tuple(fields)


def _replaced(name: str, field: Any, change: Callable[[str, Any], Any]) -> Any:
    if type(field) is tuple:
        return tuple([_replaced(name, part, change) for part in field])
    return change(name, field)


def has_function(value: Any) -> bool:
    """Return whether the expression that a spec was made from has a function."""
    return FUNCTION in (split(value)[1] if isinstance(value, Expression) else (value,))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple) and not is_array(one):
        return len(one) == len(other) and all(map(_same, one, other))
    if not (is_array(one) and is_array(other)) or isinstance(one, ArrayFacts):
        return bool(type(one) is type(other) and one == other)
    facts = facts_of(one), facts_of(other)
    if any(fact.traced for fact in facts) or facts[0] != facts[1]:
        return False  # a traced array equals only itself
    return bool(library_of(one).xp.all(one == other))


def _key(field: Any) -> Any:
    if is_array(field) and not isinstance(field, ArrayFacts):
        return tuple(field.shape), str(field.dtype)
    return tuple(map(_key, field)) if isinstance(field, tuple) else field


def shown(field: Any) -> str:
    """Return a field as code, or as its shape and dtype if the code would be long."""
    if isinstance(field, ArrayFacts):
        return f"<{shape_text(field.shape)} {field.dtype}>"
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
    # An empty list does not show the lengths of the axes inside it.
    if not known or math.prod(facts.shape) > MOST_PRINTED or 0 in facts.shape[:-1]:
        return f"<{facts} of {module}>"
    numbers = _listed(array, facts.dtype)
    for name in ("inf", "nan"):
        numbers = numbers.replace(name, f"{module}.{name}")
    return f"{module}.asarray({numbers}, dtype={module}.{facts.dtype})"


def _listed(array: Any, dtype: str) -> str:
    if len(array.shape):
        entries = [_listed(array[n, ...], dtype) for n in range(array.shape[0])]
        return f"[{', '.join(entries)}]"
    kind = bool if dtype == "bool" else float if "float" in dtype else int
    # int() of an array of torch refuses uint64 from 2**63 on.
    return repr(kind(array.item() if hasattr(array, "item") else array))
