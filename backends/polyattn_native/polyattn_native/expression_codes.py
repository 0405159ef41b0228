"""The options of a call as arguments of an operator, which takes text, numbers and tensors only.

A code is the skeleton of the options as JSON, and what may change from call to call is beside it.
Those of `padding(T, 5)` and a window are::

    code     [8, ["tensor", "int", "int"], ["builtins:tuple",
              ["polyattn._core.expressions.patterns:Padding", "...", "..."],
              ["builtins:tuple", "...", null]]]
    tensors  [T]
    numbers  [5, 256]

It begins with the version of the library. The code names classes, so a program that torch.compile
keeps on disk can run in another process of the same version.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from functools import lru_cache
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from polyattn.plugin import joined, split


class Open(NamedTuple):
    """An integer of which no plan depends: it becomes an array, as which all are alike."""

    number: int


class Coded(NamedTuple):
    """Options in a code, and what it leaves out."""

    code: str
    tensors: list[torch.Tensor]
    #: As tensors, because torch 2.13's inductor may pass on an old float.
    floats: list[torch.Tensor]
    numbers: list[int]
    #: Those that a code calls open, which differ from call to call.
    opened: list[int]


# The kinds of what is beside a code, but for floats. A table of bytes is of a compiled mask, and
# lost, as in a spec.
_KINDS = {"open": Open, "tensor": torch.Tensor, "bytes": bytes, "int": int}


def coded(version: int, options: tuple[Any, ...]) -> Coded:
    """Return options in a code, for one version of the library."""
    skeleton, fields = split(options, _is_beside)
    kinds: list[str] = []
    beside: dict[str, list[Any]] = {"tensor": [], "float": [], "int": [], "open": []}
    for field in fields:
        kind = _kind_of(field)
        kinds.append(kind)
        if kind == "float":
            field = torch.full((), field, dtype=torch.float64, device="cpu")
        if kind != "bytes":
            beside[kind].append(field.number if kind == "open" else field)
    return Coded(_code_of(version, tuple(kinds), skeleton), *beside.values())


def decoded(
    code: str, tensors: Iterable[torch.Tensor], floats: Iterable[float], numbers: Iterable[int],
    opened: Iterable[int],
) -> Any:  # fmt: skip
    """Return the options."""
    _, kinds, skeleton = _read(code)
    fields = {"tensor": iter(tensors), "float": iter(floats), "int": iter(numbers)}
    fields |= {"open": map(np.asarray, opened), "bytes": repeat(b"")}
    return joined(_with_classes(skeleton), [next(fields[kind]) for kind in kinds])


def can_code(options: tuple[Any, ...]) -> bool:
    """Return whether a code can have options, by their specs.

    Their numbers have 64 bits, their fields hold no string, and modules name their classes.
    """
    skeleton, fields = split(options, _is_beside)
    for field in fields:
        if isinstance(field, str) or (isinstance(field, int) and not -(2**63) <= field < 2**63):
            return False
    return bool(_is_found(skeleton))


def _is_beside(field: Any) -> bool:
    return field is not None and not isinstance(field, bool)


def _kind_of(field: Any) -> str:
    for kind, cls in _KINDS.items():
        if isinstance(field, cls):
            return kind
    return "float"


def _is_found(skeleton: Any) -> bool:
    """Return whether names find its classes: those of functions, and older ones, they do not."""
    try:
        found = _with_classes(json.loads(_code_of(0, (), skeleton))[2])
    except AttributeError:
        return False
    return bool(found == skeleton)


def _code_of(version: int, kinds: tuple[str, ...], skeleton: Any) -> str:
    return json.dumps((version, kinds, skeleton), default=_name_of)


# Constants in a program, which would otherwise be tied to all modules of the process: as
# torch.compiler.assume_constant_result does, which takes a second, to import the compiler.
_constants: list[Any] = [_is_found, _code_of]
for _function in _constants:
    _function._dynamo_marked_constant = True


_read = lru_cache(maxsize=4096)(json.loads)


def _name_of(thing: Any) -> str:
    return "..." if thing is ... else f"{thing.__module__}:{thing.__qualname__}"


def _with_classes(skeleton: Any) -> Any:
    """Return a skeleton that JSON holds, with the classes that its names find."""
    if type(skeleton) is list:
        module, _, path = skeleton[0].partition(":")
        cls = attrgetter(path)(sys.modules[module])
        return cls, *map(_with_classes, skeleton[1:])
    return ... if skeleton == "..." else skeleton
