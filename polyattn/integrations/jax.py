"""Modules and caches as JAX's pytrees, so that ``jit``, ``grad`` and ``vmap`` take them whole.

The arrays are the leaves; settings are part of the structure, by which a compiled function is
remembered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, TypeVar

import jax

from polyattn.arrays import is_array
from polyattn.nn.cache import KVCache
from polyattn.nn.module import Module

__all__ = ["register"]

T = TypeVar("T")

_registered: set[type] = set()


def register() -> None:
    """Make pytrees of all kinds of `polyattn.nn.Module` that there are, and of `KVCache`.

    Called again, it adds the kinds that were defined since.

    Examples
    --------
    >>> import jax
    >>> from polyattn import nn
    >>> from polyattn.integrations.jax import register
    >>> register()
    >>> layer = nn.Linear.init(3, 2, like=jax.numpy.zeros(1))
    >>> jax.grad(lambda layer: layer(jax.numpy.ones(3)).sum())(layer).bias
    Array([1., 1.], dtype=float32)
    """
    kinds: list[type[Any]] = [KVCache, *_kinds(Module)]
    for kind in kinds:
        if kind not in _registered:
            _registered.add(kind)
            jax.tree_util.register_pytree_with_keys(kind, _flatten, _unflattener(kind))


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    for one in kind.__subclasses__():
        yield one
        yield from _kinds(one)


def _is_inner(name: str, value: Any) -> bool:
    """Whether a field holds arrays, as a cache's length is, which is a number where it is known."""
    if isinstance(value, tuple):
        return any(isinstance(one, Module) for one in value)
    return name == "length" or is_array(value) or isinstance(value, Module)


def _flatten(thing: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    inner: list[tuple[Any, Any]] = []
    # Of a thing that JAX made: what it puts in place of arrays may be anything.
    known = getattr(thing, "_inner", None)
    names, settings = [], []
    for field in fields(thing):
        value = getattr(thing, field.name)
        if field.name in known if known is not None else _is_inner(field.name, value):
            inner.append((jax.tree_util.GetAttrKey(field.name), value))
            names.append(field.name)
        elif field.compare:
            settings.append((field.name, value))
    return inner, (tuple(names), tuple(settings))


def _unflattener(kind: type[T]) -> Any:
    def unflatten(structure: tuple[Any, ...], inner: Any) -> T:
        # JAX puts things that are no arrays in their place too, which `init` would refuse.
        names, settings = structure
        thing = object.__new__(kind)
        object.__setattr__(thing, "_inner", names)
        for name, value in (*zip(names, inner, strict=True), *settings):
            object.__setattr__(thing, name, value)
        for field in fields(kind):  # type: ignore[arg-type]
            # Two trees may hold the same arrays: who may write to them is not handed on.
            if not field.compare:
                object.__setattr__(thing, field.name, field.default)
        return thing

    return unflatten
