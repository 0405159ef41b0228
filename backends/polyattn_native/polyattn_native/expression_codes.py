"""The options of a call as arguments of an operator, which takes text, numbers and tensors only.

A code has a word for each class and field, in order, and what may change from call to call is
beside it. Those of `causal() & padding(T, 5)` and a window are::

    code     polyattn._core.expressions.masks:And tuple 2
             polyattn._core.expressions.patterns:Band None int
             polyattn._core.expressions.patterns:Padding tensor int
             tuple 2 int None
    tensors  [T]
    numbers  [0, 5, 256]

Before them is a word with the version of the library. The code names classes, so a program that
torch.compile keeps on disk can run in another process of the same version.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from polyattn.plugin import Expression


class Open(NamedTuple):
    """An integer of which no plan depends: it becomes an array, as which all are alike."""

    number: int


class Coded(NamedTuple):
    """Options in a code, and what it leaves out."""

    words: list[str]
    tensors: list[torch.Tensor]
    #: As tensors, because torch 2.13's inductor may pass on an old float.
    floats: list[torch.Tensor]
    numbers: list[int]
    #: Those that a code calls open, which differ from call to call.
    opened: list[int]

    def add(self, field: Any) -> None:
        """Add an option, an expression or a field of one."""
        if isinstance(field, Expression):
            self.words.append(_name_of(type(field)))
            for name in field.__match_args__:
                self.add(getattr(field, name))
        elif isinstance(field, Open):
            self.words.append("open")
            self.opened.append(field.number)
        elif isinstance(field, tuple):
            self.words.extend(["tuple", str(len(field))])
            for one in field:
                self.add(one)
        elif isinstance(field, torch.Tensor):
            self.words.append("tensor")
            self.tensors.append(field)
        elif isinstance(field, bytes):  # the table of a compiled mask, which a spec lacks too
            self.words.append("bytes")
        elif field is None or isinstance(field, bool):
            self.words.append(str(field))
        elif isinstance(field, int):
            self.words.append("int")
            self.numbers.append(field)
        else:
            self.words.append("float")
            self.floats.append(torch.full((), field, dtype=torch.float64, device="cpu"))


def decoded(
    code: str, tensors: Iterable[torch.Tensor], floats: Iterable[float], numbers: Iterable[int],
    opened: Iterable[int],
) -> list[Any]:  # fmt: skip
    """Return what was added, in order."""
    words = iter(_words_of(code)[1:])
    fields = {"tensor": iter(tensors), "float": iter(floats), "int": iter(numbers)}
    fields["open"] = map(np.asarray, opened)
    return [_field(word, words, fields) for word in words]


@lru_cache(maxsize=4096)
def _words_of(code: str) -> list[str]:
    return code.split()


def _field(word: str, words: Iterator[str], fields: dict[str, Iterator[Any]]) -> Any:
    if word in fields:
        return next(fields[word])
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if word == "tuple":
        return tuple([_field(next(words), words, fields) for _ in range(int(next(words)))])
    cls = _class_of(word)
    return cls(*[_field(next(words), words, fields) for _ in cls.__match_args__])


_CONSTANTS = {"None": None, "True": True, "False": False, "bytes": b""}


def can_code(field: Any) -> bool:
    """Return whether a code can have an option, by its spec.

    Its numbers have 64 bits, its fields hold no string, and modules name its classes.
    """
    if isinstance(field, Expression):
        fields = [getattr(field, name) for name in field.__match_args__]
        return _is_found(type(field)) and all(map(can_code, fields))
    if isinstance(field, tuple):  # the facts of an array are one too
        return hasattr(field, "dtype") or all(map(can_code, field))
    if isinstance(field, int):
        return -(2**63) <= field < 2**63
    return not isinstance(field, str)


def _name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


# Without it a program would be tied to all modules of the process.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_found(cls: type) -> bool:
    """Return whether a name finds this class: those of functions, and older ones, it does not."""
    try:
        return _class_of(_name_of(cls)) is cls
    except AttributeError:
        return False


def _class_of(name: str) -> Any:
    module, _, path = name.partition(":")
    return attrgetter(path)(sys.modules[module])
