"""Register modules, caches and expressions as pytrees: ``jit``, ``grad`` and ``vmap`` accept them.

Arrays are the leaves; settings are part of the structure, which is the cache key of a compiled
function.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

import jax

from polyattn._base.arrays import is_array
from polyattn._base.forks import forkable_lock
from polyattn.integrations import subclasses
from polyattn.nn.cache import KVCache
from polyattn.nn.module import Module, holds_modules, is_parameter
from polyattn.nn.paged_cache import PagedCache
from polyattn.nn.quantized_cache import QuantizedCache
from polyattn.plugin import Expression, joined, split

__all__ = ["register"]
__dir__ = __all__.copy

T = TypeVar("T")

_lock, _registered = forkable_lock(), set[type]()


def register() -> None:
    """Register masks, scores, caches and all subclasses of `polyattn.nn.Module` as pytrees.

    The leaves of a mask or score are its arrays, such as segment ids or slopes; the rest of it is
    static. A second call adds the subclasses that were defined since the first.

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
    kinds: list[type[Any]] = [KVCache, PagedCache, QuantizedCache, *subclasses(Module)]
    with _lock:
        for kind in kinds:
            if kind not in _registered:
                jax.tree_util.register_pytree_with_keys(kind, _flatten, _unflattener(kind))
                _registered.add(kind)
        for kind in set(subclasses(Expression)) - _registered:
            jax.tree_util.register_pytree_node(kind, _leaves_of, joined)
            _registered.add(kind)


def _leaves_of(value: Expression) -> tuple[list[Any], Any]:
    skeleton, arrays = split(value, is_array)
    return arrays, skeleton


def _is_child(name: str, value: Any) -> bool:
    """Return whether a field holds arrays. A cache's numbers are some, or Python's where known."""
    return (
        name in ("length", "dropped")
        or is_parameter(value)
        or isinstance(value, KVCache)  # of a QuantizedCache
        or holds_modules(value)
    )


def _flatten(value: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    children: list[tuple[Any, Any]] = []
    # In a value that JAX unflattened, anything may stand in place of arrays.
    known = getattr(value, "_children", None)
    names, settings = [], []
    for field in fields(value):
        content = getattr(value, field.name)
        if field.name in known if known is not None else _is_child(field.name, content):
            children.append((jax.tree_util.GetAttrKey(field.name), content))
            names.append(field.name)
        elif field.compare:
            settings.append((field.name, content))
    return children, (tuple(names), tuple(settings))


def _unflattener(kind: type[T]) -> Any:
    def unflatten(structure: tuple[Any, ...], children: Any) -> T:
        # JAX also passes objects that are not arrays, which __post_init__ might refuse.
        names, settings = structure
        value = object.__new__(kind)
        object.__setattr__(value, "_children", names)
        for name, content in (*zip(names, children, strict=True), *settings):
            object.__setattr__(value, name, content)
        for field in fields(kind):  # type: ignore[arg-type]
            # Two trees may share arrays, so neither inherits a cache's right to write to them.
            if not field.compare:
                object.__setattr__(value, field.name, field.default)
        return value

    return unflatten
