"""Compare the calls that ranks make together, before they send arrays to one another.

Ranks whose calls differ would compute wrong numbers, or wait for one another for ever. What decides
that is static, so a digest of it is enough. Every rank sends it at every call: one that remembered
an earlier call would not know whether the others remember it too.
"""

from __future__ import annotations

import hashlib
import json
import numbers
from typing import Any

from polyattn._base.arrays import Array, is_array
from polyattn._base.host import is_host, is_sequence
from polyattn._core.expressions.expression import Expression
from polyattn.parallel.communicator import Communicator

#: What each rank may choose for itself.
OWN = {"backend", "kernel"}


def check_one_call(ranks: Communicator, arrays: dict[str, Array], options: dict[str, Any]) -> None:
    """Raise an error, the same on every rank, if the ranks' calls differ in static facts."""
    if ranks.size == 1:
        return
    like = next(iter(arrays.values()))
    call = json.dumps(_described(arrays, options)).encode()
    digests = ranks.gather_bytes(hashlib.blake2b(call, digest_size=16).digest(), like)
    if len(set(digests)) == 1:
        return
    # All ranks have the same digests, so all come here.
    lengths = ranks.gather_bytes(len(call).to_bytes(4, "big"), like)
    longest = max(int.from_bytes(length, "big") for length in lengths)
    calls = ranks.gather_bytes(call.ljust(longest), like)
    raise ValueError(_message([json.loads(call) for call in calls]))


def _described(arrays: dict[str, Array], options: dict[str, Any]) -> dict[str, str]:
    """Return what decides a call, as text, before anything of it is checked."""
    facts = {}
    for name, array in arrays.items():
        facts[f"{name}.shape"] = str(tuple(getattr(array, "shape", ())))
        facts[f"{name}.dtype"] = str(getattr(array, "dtype", type(array).__name__))
    for name in sorted(options.keys() - OWN):
        if options[name] is not None and options[name] is not False:
            facts[name] = _shown(options[name])
    return facts


def _shown(given: Any) -> str:
    """Return an option as text: a number by its value, an array by its shape and dtype."""
    if is_sequence(given):
        return f"({', '.join(map(_shown, given))})"
    if isinstance(given, Expression):
        return repr(given.spec())
    if is_host(given) and given.shape == ():
        given = given.item()
    if is_array(given):
        return f"<{tuple(given.shape)} {given.dtype}>"
    if isinstance(given, (str, numbers.Number)):
        return repr(given)
    return f"a {type(given).__name__}"


def _message(calls: list[dict[str, str]]) -> str:
    """Say in what the call of the first rank differs from that of the next one that does."""
    first = calls[0]
    rank = next(rank for rank, call in enumerate(calls) if call != first)
    other = calls[rank]
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    differences = (
        f"{name} is {first.get(name, 'not given')} on rank 0,"
        f" {other.get(name, 'not given')} on rank {rank}"
        for name in names
    )
    text = f"all ranks must make the same call; {'; '.join(differences)}"
    if {"query.shape", "key.shape", "value.shape"} & set(names):
        text += (
            ". Query, key and value have one shape on every rank: if the ranks cannot share a"
            " sequence equally, pad it and hide the padding by masks.padding"
        )
    return text
