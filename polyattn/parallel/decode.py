"""Each rank computes all rows over its own keys, and the ranks merge their partial results.

For decoding: few rows, and a long cache whose keys are spread over the ranks.
"""

from __future__ import annotations

import math
from typing import Any

from polyattn._api.partial import Partial, merge
from polyattn._base.arrays import Array, cast, library_of
from polyattn.parallel.call import OptionGradients, ParallelCall
from polyattn.parallel.communicator import Communicator
from polyattn.parallel.strategy import Strategy, Sums
from polyattn.parallel.token_layout import slots


class Decode(Strategy):
    """All ranks hold all rows, and each its own keys."""

    name = "decode"
    shares_rows = False

    def pairs(self, call: ParallelCall) -> tuple[float, ...]:
        """Return the number of chunks of keys that each rank computes."""
        return (float(slots(call.layout)),) * call.size

    def bytes_sent(self, call: ParallelCall) -> int:
        problem = call.problem
        rows = math.prod(problem.batch) * problem.heads * problem.query_length
        bytes_per_row = (problem.value_size + 1) * (8 if problem.dtype == "float64" else 4)
        return (call.size - 1) * rows * bytes_per_row

    def forward(self, call: ParallelCall, ranks: Communicator, *arrays: Array) -> Any:
        query, *keys = arrays
        chunks = zip(call.owned(ranks.rank), call.split(*keys), strict=True)
        own = merge(*[call.partial((query, *own), call.block(keys=n)) for n, own in chunks])
        outputs, logsumexps = ranks.stack(own.output), ranks.stack(own.logsumexp)
        everything = [Partial(outputs[n, ...], logsumexps[n, ...]) for n in range(call.size)]
        if "sinks" in call.options:
            everything.append(_sink(call, everything[0]))
        total = merge(*everything)
        return total.output, total

    def backward(
        self, call: ParallelCall, ranks: Communicator, arrays: Any, saved: Partial, gradient: Array
    ) -> tuple[Array, Array, Array, OptionGradients]:
        """Return the gradients; all but those of the keys are whole on every rank."""
        query, *keys = arrays
        sums = Sums()
        chunks = zip(call.owned(ranks.rank), call.split(*keys), strict=True)
        for n, (columns, chunk) in enumerate(chunks):
            block = call.block(keys=columns)
            *own, share = call.gradients((query, *chunk), saved, gradient, block, sinks=n == 0)
            if "sinks" in share:  # through the logsumexp, each rank has them whole
                share["sinks"] = [x / call.size for x in share["sinks"]]
            sums = sums.added(0, n, (*own, share))
        dq, dk, dv, shares = sums.joined()
        shares = {name: [_sum_over(ranks, x) for x in shares[name]] for name in shares}
        return _sum_over(ranks, dq), dk, dv, shares


def _sum_over(ranks: Communicator, array: Array) -> Array:
    return library_of(array).xp.sum(ranks.stack(array), axis=0)


def _sink(call: ParallelCall, like: Partial) -> Partial:
    """Return the sinks as a part: a logit without a value."""
    xp = library_of(like.output).xp
    sinks = cast(xp, call.options["sinks"], like.logsumexp.dtype)[:, None]
    logsumexp = xp.broadcast_to(sinks, tuple(like.logsumexp.shape))
    return Partial(xp.zeros_like(like.output), logsumexp)
