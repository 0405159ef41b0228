"""Ranks exchange tokens for heads, compute whole sequences of some heads, and exchange back.

References
----------
.. [1] Jacobs et al., "DeepSpeed Ulysses", 2023, arXiv:2309.14509.
"""

from __future__ import annotations

import math
from typing import Any

from polyattn._api.partial import Partial
from polyattn._base.arrays import Array, library_of
from polyattn._core.expressions.parts import Part
from polyattn.parallel.call import OptionGradients, ParallelCall
from polyattn.parallel.communicator import Communicator
from polyattn.parallel.strategy import Strategy
from polyattn.parallel.token_layout import permute, unpermute


class Heads(Strategy):
    """Ranks exchange tokens for heads."""

    name = "heads"

    def reasons_against(self, call: ParallelCall) -> list[str]:
        problem, size = call.problem, call.size
        reasons = []
        if problem.heads % size:
            reasons.append(f"H = {problem.heads} query heads are not a multiple of {size} ranks")
        elif problem.key_heads % size and size % max(problem.key_heads, 1):
            reasons.append(
                f"G = {problem.key_heads} key heads and {size} ranks: one must divide the other"
            )
        return reasons

    def pairs(self, call: ParallelCall) -> tuple[float, ...]:
        """Return the number of pairs of chunks of all heads that each rank's heads make."""
        return (call.visible_pairs / call.size,) * call.size

    def bytes_sent(self, call: ParallelCall) -> int:
        problem, size = call.problem, call.size
        rows = math.prod(problem.batch) * problem.heads * problem.query_length
        numbers = rows * (problem.head_size + problem.value_size)
        repeated = _repeats(call) * self.bytes_of_keys(call)
        return (numbers * call.bytes_per_number // size + repeated) * (size - 1) // size

    def forward(self, call: ParallelCall, ranks: Communicator, *arrays: Array) -> Any:
        own, block = self._by_heads(call, ranks, arrays), self._block(call, ranks)
        partial = call.partial(own, block, sinks=True)
        return self._by_tokens(call, ranks, partial.output), partial

    def backward(
        self, call: ParallelCall, ranks: Communicator, arrays: Any, saved: Partial, gradient: Array
    ) -> tuple[Array, Array, Array, OptionGradients]:
        own = self._by_heads(call, ranks, arrays)
        (of_output,) = self._exchanged(call, ranks, [gradient])
        block = self._block(call, ranks)
        *gradients, shares = call.gradients(own, saved, of_output, block, sinks=True)
        dq, dk, dv = (self._by_tokens(call, ranks, x) for x in gradients)
        times = _repeats(call)
        return dq, _sum_repeats(dk, times), _sum_repeats(dv, times), shares

    def _block(self, call: ParallelCall, ranks: Communicator) -> Part:
        count = call.problem.heads // call.size
        return call.block(heads=(ranks.rank * count, count))

    def _by_heads(self, call: ParallelCall, ranks: Communicator, arrays: Any) -> list[Array]:
        """Return whole sequences of this rank's heads, in order."""
        query, *keys = arrays
        times = _repeats(call)
        if times > 1:
            keys = [library_of(x).xp.repeat(x, times, axis=-3) for x in keys]
        return self._exchanged(call, ranks, [query, *keys])

    def _exchanged(self, call: ParallelCall, ranks: Communicator, arrays: Any) -> list[Array]:
        parts = [ranks.exchange(array, -3, -2) for array in arrays]
        return [unpermute(part, call.size, layout=call.layout) for part in parts]

    def _by_tokens(self, call: ParallelCall, ranks: Communicator, array: Array) -> Array:
        """Return this rank's tokens of all heads."""
        return ranks.exchange(permute(array, call.size, layout=call.layout), -2, -3)


def _repeats(call: ParallelCall) -> int:
    """Return how often a key head is repeated, so that each rank has one."""
    heads = call.problem.key_heads
    return call.size // heads if 0 < heads < call.size else 1


def _sum_repeats(gradient: Array, times: int) -> Array:
    if times == 1:
        return gradient
    xp, shape = library_of(gradient).xp, tuple(gradient.shape)
    split = (*shape[:-3], shape[-3] // times, times, *shape[-2:])
    return xp.sum(xp.reshape(gradient, split), axis=-3)
