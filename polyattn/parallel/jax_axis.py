"""Ranks that are the devices along a mesh axis, inside ``jax.shard_map``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax as untyped_lax

from polyattn._base.arrays import Array
from polyattn.parallel.communicator import Communicator

lax: Any = untyped_lax


class JaxAxis(Communicator):
    """The devices along a mesh axis. One program runs on all, so `rank` is traced."""

    def __init__(self, name: str) -> None:
        try:
            self.axis, self.size = name, lax.axis_size(name)
        except NameError:
            raise ValueError(
                f"over={name!r} names a mesh axis that is absent here: call it inside jax.shard_map"
                " over a mesh that has this axis"
            ) from None

    @property
    def rank(self) -> Array:
        return lax.axis_index(self.axis)

    def shift(self, arrays: Sequence[jax.Array], by: int = 1) -> Any:
        pairs = [(rank, (rank + by) % self.size) for rank in range(self.size)]
        return lax.ppermute(tuple(arrays), self.axis, pairs)

    def wait(self, handle: Any) -> Any:
        return handle

    def gather(self, array: jax.Array, axis: int) -> Array:
        if array.size == 0:  # which XLA gathers on no CPU
            return jnp.concatenate([array] * self.size, axis)
        return lax.all_gather(array, self.axis, axis=axis % array.ndim, tiled=True)

    def exchange(self, array: jax.Array, split: int, concat: int) -> Array:
        split, concat = split % array.ndim, concat % array.ndim
        return lax.all_to_all(array, self.axis, split, concat, tiled=True)

    def gather_bytes(self, message: bytes, like: jax.Array) -> list[bytes]:
        """Return the message of this program, which all devices run."""
        return [message] * self.size

    def stack(self, array: jax.Array) -> Array:
        """Return the arrays of all devices, which JAX knows to be the same on each."""
        # An all-gather gives the same numbers, but JAX takes them to differ.
        mine = jnp.arange(self.size).reshape(-1, *[1] * array.ndim) == self.rank
        return lax.psum(jnp.where(mine, array, jnp.zeros_like(array)), self.axis)

    def repeat(self, count: int, step: Callable[[Any, Any], Any], state: Any) -> Any:
        """Return the state after steps 0 to count − 1, compiled as a loop."""
        return lax.fori_loop(0, count, step, state) if count > 0 else state

    def when(self, condition: Any, change: Callable[[Any], Any], state: Any) -> Any:
        """Return the changed state if a condition holds on this device, or the state as it is."""
        if isinstance(condition, bool):
            return change(state) if condition else state
        return lax.cond(condition, change, lambda same: same, state)
