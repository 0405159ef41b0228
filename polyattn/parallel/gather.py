"""Each rank gathers all keys and values, and computes its own rows."""

from __future__ import annotations

from typing import Any

from polyattn._api.partial import Partial
from polyattn._base.arrays import Array
from polyattn._base.slices import place, split, take
from polyattn._core.expressions.parts import Part
from polyattn.parallel.call import OptionGradients, ParallelCall
from polyattn.parallel.communicator import Communicator
from polyattn.parallel.strategy import Strategy, Sums, joined_partials, split_partial
from polyattn.parallel.token_layout import permute, slots, unpermute


class Gather(Strategy):
    """Each rank gathers all keys and values."""

    name = "gather"

    def reasons_against(self, call: ParallelCall) -> list[str]:
        return []

    def bytes_sent(self, call: ParallelCall) -> int:
        return (call.size - 1) * self.bytes_of_keys(call)

    def forward(self, call: ParallelCall, ranks: Communicator, *arrays: Array) -> Any:
        query, *keys = arrays
        everything = self._gathered(call, ranks, keys)
        queries = split(query, slots(call.layout))
        parts = [
            call.partial((part, *_seen(block, everything)), block, sinks=True)
            for block, part in zip(_blocks(call, ranks), queries, strict=True)
        ]
        whole = joined_partials(parts)
        return whole.output, whole

    def backward(
        self, call: ParallelCall, ranks: Communicator, arrays: Any, saved: Partial, gradient: Array
    ) -> tuple[Array, Array, Array, OptionGradients]:
        """Return the gradients, those of the keys summed over the ranks."""
        query, *keys = arrays
        everything, count = self._gathered(call, ranks, keys), slots(call.layout)
        rows = split(query, count), split_partial(saved, count), split(gradient, count)
        sums = Sums()
        for n, (block, part, partial, of) in enumerate(
            zip(_blocks(call, ranks), *rows, strict=True)
        ):
            own = (part, *_seen(block, everything))
            dq, dk, dv, share = call.gradients(own, partial, of, block, sinks=True)
            start, length = block.columns.start, call.problem.key_length
            dk, dv = (place(x, -2, start, length) for x in (dk, dv))
            sums = sums.added(n, 0, (dq, dk, dv, share))
        dq, *of_keys, shares = sums.joined()
        of_keys = [permute(x, call.size, layout=call.layout) for x in of_keys]
        dk, dv = (ranks.scatter_sum(x, -2) for x in of_keys)
        return dq, dk, dv, shares

    def _gathered(self, call: ParallelCall, ranks: Communicator, keys: Any) -> list[Array]:
        return [unpermute(ranks.gather(x, -2), call.size, layout=call.layout) for x in keys]


def _blocks(call: ParallelCall, ranks: Communicator) -> list[Part]:
    """Return own chunks of rows, each with the keys that it may see."""
    blocks = []
    for rows in call.owned(ranks.rank):
        first, count = call.seen_by(rows)
        blocks.append(call.block(rows, first, count=count))
    return blocks


def _seen(block: Part, keys: list[Array]) -> list[Array]:
    return [take(array, -2, *block.columns) for array in keys]
