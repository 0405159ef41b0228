"""Keys and values travel around the ranks, and each rank joins what its rows see of them.

With the layout "zigzag" this is the zigzag ring: all ranks compute the same number of pairs of
chunks of a causal call. Only the pairs of which a row may see a key are computed, and keys travel
no further than some rank needs them.

References
----------
.. [1] Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from polyattn._api.partial import Partial, merge
from polyattn._base.arrays import Array
from polyattn._base.slices import split
from polyattn.parallel.call import OptionGradients, ParallelCall
from polyattn.parallel.communicator import Communicator
from polyattn.parallel.strategy import Strategy, Sums, joined_partials, split_partial
from polyattn.parallel.token_layout import slots


class Ring(Strategy):
    """Keys and values travel around the ranks."""

    name = "ring"

    def computes(self, call: ParallelCall, rows: int, keys: int) -> bool:
        return rows == keys or super().computes(call, rows, keys)  # its own keys are at hand

    def bytes_sent(self, call: ParallelCall) -> int:
        return (_turns(call) - 1) * self.bytes_of_keys(call)

    def forward(self, call: ParallelCall, ranks: Communicator, *arrays: Array) -> Any:
        query, *keys = arrays
        queries = split(query, slots(call.layout))
        own = zip(queries, call.split(*keys), call.owned(ranks.rank), strict=True)
        first = [_part(call, (row, *key), n, n, sinks=True) for row, key, n in own]

        def add(a: int, b: int, key: Any, rows: Any, keys: Any, totals: Any) -> Any:
            part = _part(call, (queries[a], *key), rows, keys)
            joined = merge(totals.rows[a], part)
            return Sums(rows=(*totals.rows[:a], joined, *totals.rows[a + 1 :]))

        total = joined_partials(_around(call, ranks, keys, Sums(rows=tuple(first)), add).rows)
        return total.output, total

    def backward(
        self, call: ParallelCall, ranks: Communicator, arrays: Any, saved: Partial, gradient: Array
    ) -> tuple[Array, Array, Array, OptionGradients]:
        """Return the gradients; those of keys and values travel with them, and then home."""
        query, *keys = arrays
        count = slots(call.layout)
        parts = split(query, count), split_partial(saved, count), split(gradient, count)
        each, sums = list(zip(*parts, strict=True)), Sums()
        own = zip(each, call.split(*keys), call.owned(ranks.rank), strict=True)
        for n, (row, key, chunk) in enumerate(own):
            sums = sums.added(n, n, _gradients(call, row, key, chunk, chunk, sinks=True))

        def add(a: int, b: int, key: Any, rows: Any, keys: Any, sums: Any) -> Any:
            return sums.added(a, b, _gradients(call, each[a], key, rows, keys))

        return _around(call, ranks, keys, sums, add).joined()


def _around(
    call: ParallelCall, ranks: Communicator, keys: Any, sums: Sums, add: Callable[..., Sums]
) -> Sums:
    """Return the sums after all turns; those of the keys travel with these, and then home."""

    def visit(turn: Any, keys: Any, sums: Sums) -> Sums:
        own, there = call.owned(ranks.rank), call.owned((ranks.rank - turn) % call.size)
        chunks = call.split(*keys)
        for a, rows in enumerate(own):
            for b, columns in enumerate(there):
                # Own pairs of equal chunks are the first of all.
                needed = call.is_visible(rows, columns) & ((a != b) | (turn != 0))
                sums = ranks.when(needed, partial(add, a, b, chunks[b], rows, columns), sums)
        return sums

    def turn(number: Any, state: Any) -> Any:
        keys, sums = state
        arriving = ranks.shift(keys)
        sums = visit(number, keys, sums)
        following = ranks.shift(sums.keys) if sums.keys else None
        keys = tuple(ranks.wait(arriving))
        return keys, sums._replace(keys=tuple(ranks.wait(following))) if following else sums

    last = _turns(call) - 1
    keys, sums = ranks.repeat(last, turn, (tuple(keys), sums))
    sums = visit(last, keys, sums)
    if sums.keys and last:
        sums = sums._replace(keys=tuple(ranks.wait(ranks.shift(sums.keys, -last))))
    return sums


def _turns(call: ParallelCall) -> int:
    """Return for how many turns some rank needs the keys that arrive."""
    size = call.size
    return 1 + max(
        turn
        for turn in range(size)
        for rank in range(size)
        if turn == 0
        or any(
            call.is_visible(rows, keys)
            for rows in call.owned(rank)
            for keys in call.owned((rank - turn) % size)
        )
    )


def _part(call: ParallelCall, arrays: Any, rows: Any, keys: Any, sinks: bool = False) -> Partial:
    block = call.block(rows, keys)
    return call.partial(arrays, block, sinks=sinks, full=call.is_full(rows, keys))


def _gradients(
    call: ParallelCall, row: Any, key: Any, rows: Any, keys: Any, sinks: bool = False
) -> Any:
    query, partial, gradient = row
    block, full = call.block(rows, keys), call.is_full(rows, keys)
    return call.gradients((query, *key), partial, gradient, block, sinks=sinks, full=full)
