"""Pass caches into a graph and out of it, as arrays that are inputs and outputs with names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from polyattn._base.arrays import Array, as_facts, is_array
from polyattn.nn.cache import KVCache
from polyattn.nn.paged_cache import PagedCache
from polyattn.nn.quantized_cache import QuantizedCache

Shape = tuple[int | str, ...]
Caches = KVCache | tuple[KVCache, ...]


def are_caches(thing: Any) -> TypeGuard[Caches]:
    """Return whether this is a cache, or a tuple or list of caches."""
    if isinstance(thing, (tuple, list)):
        return bool(thing) and all(isinstance(one, KVCache) for one in thing)
    return isinstance(thing, KVCache)


def check_kind(name: str, thing: Any) -> None:
    """Raise for caches of a kind that no operator of ONNX writes to."""
    for one in thing if isinstance(thing, (tuple, list)) else (thing,):
        if isinstance(one, (PagedCache, QuantizedCache)):
            raise TypeError(
                f"{name} holds a {type(one).__name__}, which no operator of ONNX writes to: give"
                " KVCaches, such as those of model.caches()"
            )


def _numbered(name: str, caches: Caches) -> dict[str, KVCache]:
    """Return each cache by the beginning of its arrays' names."""
    if isinstance(caches, KVCache):
        return {name: caches}
    return {f"{name}.{n}": cache for n, cache in enumerate(caches)}


def arrays_of(name: str, caches: Caches) -> dict[str, tuple[str, Shape]]:
    """Return the dtype and shape of each array of caches that are an input."""
    arrays: dict[str, tuple[str, Shape]] = {}
    for begin, cache in _numbered(name, caches).items():
        if cache.first or cache.dropped:
            raise ValueError(
                f"the cache {begin} has slid: a model cannot know which tokens it dropped. Give one"
                " that has not, such as those of model.caches()"
            )
        for end, memory in (("key", cache.key), ("value", cache.value)):
            facts = as_facts(memory)
            arrays[f"{begin}.{end}"] = facts.dtype, facts.shape
    return arrays | {f"{name}.length": ("int64", ())}


def with_caches(
    inputs: Mapping[str, Shape | Caches], arrays: Mapping[str, Array]
) -> dict[str, Any]:
    """Return the arguments of a function, whose caches have the arrays of the graph."""
    arguments: dict[str, Any] = {}
    for name, one in inputs.items():
        if not are_caches(one):
            arguments[name] = arrays[name]
            continue
        made = [
            KVCache(arrays[f"{begin}.key"], arrays[f"{begin}.value"], arrays[f"{name}.length"])
            for begin in _numbered(name, one)
        ]
        arguments[name] = made[0] if isinstance(one, KVCache) else tuple(made)
    return arguments


def named(result: Any, inputs: Mapping[str, Shape | Caches]) -> dict[str, Array]:
    """Return the outputs of a function, and their names."""
    taken = [name for name, one in inputs.items() if are_caches(one)]
    parts = _parts(result)
    for part in parts.values():
        if not (is_array(part) or are_caches(part)):
            raise TypeError(
                "a function must return an array, or several in a tuple or a dictionary; this one"
                f" returned a {type(part).__name__}"
            )
    caches = [part for part in parts.values() if are_caches(part)]
    if len(caches) != len(taken):
        raise ValueError(
            "a function returns the caches that follow those it takes, which are"
            f" {len(taken)}; this one returned {len(caches)}"
        )
    outputs = {name: part for name, part in parts.items() if not are_caches(part)}
    for name, part in zip(taken, caches, strict=True):
        for begin, cache in _numbered(f"next_{name}", part).items():
            outputs |= {f"{begin}.key": cache.key, f"{begin}.value": cache.value}
        outputs[f"next_{name}.length"] = cache.length
    return outputs


def _parts(result: Any) -> dict[str, Any]:
    """Return the arrays and the caches that a function returned, by name."""
    if isinstance(result, Mapping):
        return dict(result)
    if not isinstance(result, tuple) or are_caches(result):
        return {"output": result}
    names = [f"output_{n}" for n in range(len(result))]
    arrays = [n for n, part in enumerate(result) if not are_caches(part)]
    if len(arrays) == 1 and len(result) > 1:
        names[arrays[0]] = "output"
    return dict(zip(getattr(result, "_fields", names), result, strict=True))
