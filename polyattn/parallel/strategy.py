"""A strategy: a way to share one call of attention among ranks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from polyattn._api.partial import Partial
from polyattn._base.arrays import Array
from polyattn._base.same_bits import keeps_bits
from polyattn._base.slices import joined, split
from polyattn._core.expressions.replacements import ByNorm
from polyattn.parallel.call import OptionGradients, ParallelCall, add_shares
from polyattn.parallel.communicator import Communicator


class Strategy(ABC):
    """A way to share a call among ranks, written over a `Communicator`."""

    name: str
    #: Whether each rank holds its part of the rows; otherwise all hold all rows.
    shares_rows = True

    def reasons_against(self, call: ParallelCall) -> list[str]:
        """Return why it cannot compute a call: here, the options that need all keys of a row."""
        problem = call.problem
        options = [] if problem.normalizer is None else [f"normalizer={problem.normalizer!r}"]
        if isinstance(problem.score_norm, ByNorm):
            options.append(f"scale={problem.score_norm!r}")
        if keeps_bits():
            options.append("same_bits()")
        parts = "it joins attention over parts of the keys"
        return [f"{parts}, and {option} needs whole rows" for option in options]

    def pairs(self, call: ParallelCall) -> tuple[float, ...]:
        """Return the number of pairs of chunks that each rank computes."""
        chunks = range(call.chunks)
        return tuple(
            float(sum(self.computes(call, a, b) for a in call.owned(rank) for b in chunks))
            for rank in range(call.size)
        )

    def computes(self, call: ParallelCall, rows: int, keys: int) -> bool:
        """Return whether a pair of chunks is computed."""
        return bool(call.is_visible(rows, keys))

    @abstractmethod
    def bytes_sent(self, call: ParallelCall) -> int:
        """Return the bytes that a rank sends for the output."""

    @abstractmethod
    def forward(self, call: ParallelCall, ranks: Communicator, *arrays: Array) -> Any:
        """Return the output, and a partial that `backward` needs."""

    @abstractmethod
    def backward(
        self, call: ParallelCall, ranks: Communicator, arrays: Any, saved: Partial, gradient: Array
    ) -> tuple[Array, Array, Array, OptionGradients]:
        """Return the gradients of query, key and value, and the share of those of the options."""

    def bytes_of_keys(self, call: ParallelCall) -> int:
        """Return the bytes of the keys and values that a rank holds."""
        problem = call.problem
        each = problem.head_size + problem.value_size
        keys = math.prod(problem.batch) * problem.key_heads * problem.key_length
        return keys * each * call.bytes_per_number // call.size


class Sums(NamedTuple):
    """Gradients added up, of chunks of keys and values by turns, of chunks of rows, of options."""

    keys: tuple[Any, ...] = ()
    rows: tuple[Any, ...] = ()
    options: OptionGradients = {}  # noqa: RUF012 -- nothing writes to it

    def added(self, row: int, key: int, gradients: Any) -> Sums:
        """Return the sums with the gradients of a chunk of rows and a chunk of keys."""
        dq, dk, dv, shares = gradients
        keys = _plus(_plus(self.keys, 2 * key, dk), 2 * key + 1, dv)
        return Sums(keys, _plus(self.rows, row, dq), add_shares(self.options, shares))

    def joined(self) -> tuple[Array, Array, Array, OptionGradients]:
        """Return the gradients of all rows, keys and values, and of the options."""
        return joined(self.rows), joined(self.keys[::2]), joined(self.keys[1::2]), self.options


def _plus(sums: tuple[Any, ...], place: int, array: Array) -> tuple[Any, ...]:
    """Return sums with an array added to one of them, the first time as the next one."""
    total = sums[place] + array if place < len(sums) else array
    return (*sums[:place], total, *sums[place + 1 :])


def split_partial(partial: Partial, count: int) -> list[Partial]:
    """Return the partials of equal chunks of rows."""
    logsumexps: Any = [None] * count
    if partial.logsumexp is not None:
        logsumexps = split(partial.logsumexp, count, -1)
    return list(map(Partial, split(partial.output, count), logsumexps))


def joined_partials(parts: Sequence[Partial]) -> Partial:
    """Return the partial of all rows from those of chunks of them."""
    output = joined([part.output for part in parts])
    if parts[0].logsumexp is None:
        return Partial(output, None)
    return Partial(output, joined([part.logsumexp for part in parts], -1))
