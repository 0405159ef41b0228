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

from polyattn._base.arrays import is_array
from polyattn.plugin import Array, split

Size = tuple[int, int]


class Explicit:
    """A function of a tile, and the arrays that it uses, for each size of tile."""

    # It takes the tile's first row, its first key, and scores if it has them.

    def __init__(self, graphs: dict[Size, Any], arrays: dict[Size, list[Array]]) -> None:
        self.graphs, self.arrays = graphs, arrays

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

    def __call__(self, first: tuple[Any, Any], size: Size, *scores: Array) -> Array:
        """Return its result for a tile."""
        function = jaxpr_as_fun(ClosedJaxpr(self.graphs[size], self.arrays[size]))
        (result,) = function(*(jnp.asarray(at, "int32") for at in first), *scores)
        return result


def split_explicit(operand: Any) -> tuple[Any, list[Any]]:
    """Return the skeleton of an expression or explicit function, and its arrays and functions."""
    return split(operand, lambda x: is_array(x) or isinstance(x, Explicit))


jax.tree_util.register_pytree_node(
    Explicit,
    lambda rule: ((rule.arrays,), tuple(rule.graphs.items())),
    lambda graphs, arrays: Explicit(dict(graphs), *arrays),
)
