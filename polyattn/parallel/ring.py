"""Keys and values travel around the ranks, and each rank joins what its rows see of them.

With the layout "zigzag" this is the zigzag ring: all ranks compute the same number of pairs of
chunks of a causal call. Only the pairs of which a row may see a key are computed, and keys travel
no further than some rank needs them.

References
----------
.. [1] Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023.
"""

from __future__ import annotations

from typing import Any

from polyattn._api.partial import Partial, merge
from polyattn._base.arrays import Array
from polyattn._base.slices import joined, split
from polyattn.parallel.call import OptionGradients, ParallelCall, add_shares
from polyattn.parallel.communicator import Communicator
from polyattn.parallel.strategy import Strategy, joined_partials, needs_whole_rows, split_partial
from polyattn.parallel.token_layout import slots


class Ring(Strategy):
    """Keys and values travel around the ranks."""

    name = "ring"

    def reasons_against(self, call: ParallelCall) -> list[str]:
        return needs_whole_rows(call)

    def computes(self, call: ParallelCall, rows: int, keys: int) -> bool:
        return rows == keys or super().computes(call, rows, keys)  # its own keys are at hand

    def bytes_sent(self, call: ParallelCall) -> int:
        return (_turns(call) - 1) * self.bytes_of_keys(call)

    def forward(self, call: ParallelCall, ranks: Communicator, *arrays: Array) -> Any:
        query, *keys = arrays
        turns, count = _turns(call), slots(call.layout)
        queries, own = split(query, count), call.owned(ranks.rank)
        parts = zip(queries, *_chunks(keys, count), strict=True)
        first = [_part(call, x, at, at, sinks=True) for at, x in zip(own, parts, strict=True)]

        def turn(number: Any, state: Any) -> Any:
            keys, totals = state
            arriving = ranks.shift(keys)
            totals = _joined_turn(call, ranks, number, queries, keys, totals)
            return tuple(ranks.wait(arriving)), totals

        keys, totals = ranks.repeat(turns - 1, turn, (tuple(keys), tuple(first)))
        totals = _joined_turn(call, ranks, turns - 1, queries, keys, totals)
        total = joined_partials(totals)
        return total.output, total

    def backward(
        self, call: ParallelCall, ranks: Communicator, arrays: Any, saved: Partial, gradient: Array
    ) -> tuple[Array, Array, Array, OptionGradients]:
        """Return the gradients; those of keys and values travel with them, and then home."""
        query, *keys = arrays
        turns, count = _turns(call), slots(call.layout)
        partials, gradients = split_partial(saved, count), split(gradient, count)
        rows = list(zip(split(query, count), partials, gradients, strict=True))
        state = _own_gradients(call, ranks, rows, keys)

        def turn(number: Any, state: Any) -> Any:
            keys, state = state
            arriving = ranks.shift(keys)
            sums, of_keys, shares = _added_turn(call, ranks, number, rows, keys, state)
            following = ranks.shift([x for pair in of_keys for x in pair])
            keys = tuple(ranks.wait(arriving))
            return keys, (sums, _paired(ranks.wait(following)), shares)

        keys, state = ranks.repeat(turns - 1, turn, (tuple(keys), state))
        sums, of_keys, shares = _added_turn(call, ranks, turns - 1, rows, keys, state)
        if turns > 1:
            home = ranks.shift([x for pair in of_keys for x in pair], 1 - turns)
            of_keys = _paired(ranks.wait(home))
        dk, dv = (joined(list(chunks)) for chunks in zip(*of_keys, strict=True))
        return joined(list(sums)), dk, dv, shares


def _paired(arrays: Any) -> tuple[tuple[Array, Array], ...]:
    return tuple(zip(arrays[::2], arrays[1::2], strict=True))


def _chunks(keys: Any, count: int) -> list[list[Array]]:
    """Return the chunks of keys, and those of values."""
    return [split(array, count) for array in keys]


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


def _each_pair(call: ParallelCall, ranks: Communicator, turn: Any) -> Any:
    """Yield the slots and chunks of a turn's pairs, and whether the pair is to be computed."""
    own, there = call.owned(ranks.rank), call.owned((ranks.rank - turn) % call.size)
    for a, rows in enumerate(own):
        for b, keys in enumerate(there):
            # Own pairs of equal chunks are the first of all.
            yield a, b, rows, keys, call.is_visible(rows, keys) & ((a != b) | (turn != 0))


def _part(call: ParallelCall, arrays: Any, rows: Any, keys: Any, sinks: bool = False) -> Partial:
    block = call.block(rows, keys)
    return call.partial(arrays, block, sinks=sinks, full=call.is_full(rows, keys))


def _joined_turn(
    call: ParallelCall, ranks: Communicator, turn: Any, queries: Any, keys: Any, totals: Any
) -> tuple[Partial, ...]:
    """Return the totals of own rows, joined with the keys that are here at a turn."""
    chunks, totals = _chunks(keys, slots(call.layout)), list(totals)
    for a, b, rows, at, needed in _each_pair(call, ranks, turn):
        arrays = (queries[a], *[array[b] for array in chunks])

        def add(total: Partial, arrays: Any = arrays, rows: Any = rows, at: Any = at) -> Partial:
            return merge(total, _part(call, arrays, rows, at))

        totals[a] = ranks.when(needed, add, totals[a])
    return tuple(totals)


def _gradients(
    call: ParallelCall, row: Any, key: Any, rows: Any, keys: Any, sinks: bool = False
) -> Any:
    query, partial, gradient = row
    block, full = call.block(rows, keys), call.is_full(rows, keys)
    return call.gradients((query, *key), partial, gradient, block, sinks=sinks, full=full)


def _own_gradients(call: ParallelCall, ranks: Communicator, rows: Any, keys: Any) -> Any:
    """Return the sums of gradients after the pairs of each own chunk with itself."""
    chunks = zip(*_chunks(keys, slots(call.layout)), strict=True)
    sums: list[Array] = []
    of_keys: list[tuple[Array, Array]] = []
    shares: OptionGradients = {}
    for at, row, key in zip(call.owned(ranks.rank), rows, chunks, strict=True):
        dq, dk, dv, share = _gradients(call, row, key, at, at, sinks=True)
        sums.append(dq)
        of_keys.append((dk, dv))
        shares = add_shares(shares, share)
    return tuple(sums), tuple(of_keys), shares


def _added_turn(
    call: ParallelCall, ranks: Communicator, turn: Any, row: Any, keys: Any, state: Any
) -> Any:
    """Return the sums of gradients, with those of the keys that are here at a turn."""
    chunks = list(zip(*_chunks(keys, slots(call.layout)), strict=True))
    for a, b, rows, at, needed in _each_pair(call, ranks, turn):

        def add(state: Any, a: int = a, b: int = b, rows: Any = rows, at: Any = at) -> Any:
            sums, of_keys, shares = state
            dq, dk, dv, share = _gradients(call, row[a], chunks[b], rows, at)
            pair = of_keys[b][0] + dk, of_keys[b][1] + dv
            return (
                (*sums[:a], sums[a] + dq, *sums[a + 1 :]),
                (*of_keys[:b], pair, *of_keys[b + 1 :]),
                add_shares(shares, share),
            )

        state = ranks.when(needed, add, state)
    return state
