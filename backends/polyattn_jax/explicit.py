"""Mask and score functions whose closures are explicit.

A function may use arrays of the code around it, and gradients may be taken of those. JAX's custom
rules take gradients of arguments only, so each function is traced once for each size of tile, and
the arrays that it uses become arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from polyattn.plugin import Array

Size = tuple[int, int]


class Explicit:
    """A function of a tile, and the arrays that it uses, for each size of tile."""

    # It takes the tile's first row, its first key, and scores if it has them.

    def __init__(self, graphs: dict[Size, Any], arrays: dict[Size, list[Array]]) -> None:
        self._graphs, self.arrays = graphs, arrays

    @classmethod
    def of(cls, traced: dict[Size, tuple[Callable[..., Array], tuple[Any, ...]]]) -> Explicit:
        """Trace a function for sizes of tiles, each with arguments like those to come."""
        closed = {
            size: jax.make_jaxpr(function)(*like) for size, (function, like) in traced.items()
        }
        return cls(
            {size: one.jaxpr for size, one in closed.items()},
            {
                size: [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in one.consts]
                for size, one in closed.items()
            },
        )

    def with_arrays(self, arrays: dict[Size, list[Array]]) -> Explicit:
        """Return the function with other arrays in place of those that it uses."""
        return Explicit(self._graphs, arrays)

    def carried(self) -> list[tuple[str, Any]]:
        """Return what an expression would carry: the function itself."""
        return [("rule", self)]

    def map(self, change: Callable[[str, Any], Any]) -> Any:
        """Change what is carried, as `Expression.map` does."""
        return change("rule", self)

    def __call__(self, first: tuple[Any, Any], size: Size, *scores: Array) -> Array:
        """Return its result for a tile."""
        function = jaxpr_as_fun(ClosedJaxpr(self._graphs[size], self.arrays[size]))
        (result,) = function(*(jnp.asarray(at, "int32") for at in first), *scores)
        return result


def arrays_of(operand: Any) -> list[Any]:
    """Return the arrays of an expression or an explicit function, in order."""
    return [x.arrays if isinstance(x, Explicit) else x for _, x in operand.carried()]


def with_arrays(operand: Any, arrays: list[Any]) -> Any:
    """Return an expression or an explicit function with other arrays, in order."""
    rest = iter(arrays)
    return operand.map(
        lambda _, x: x.with_arrays(next(rest)) if isinstance(x, Explicit) else next(rest)
    )
