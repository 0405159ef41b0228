"""Attention over keys that are made a piece at a time, such as those of a quantised cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from polyattn._api.partial import Partial, attention_partial, merge
from polyattn._base.arrays import Array, ArrayFacts, as_facts
from polyattn._base.slices import Slice
from polyattn._core.call.describe import describe
from polyattn._core.call.parts import options_of, options_of_part
from polyattn._core.call.problem import examine
from polyattn._core.expressions.parts import Part


def attention_over_pieces(
    query: Array,
    key: ArrayFacts,
    value: ArrayFacts,
    pieces: Iterable[tuple[int, Array, Array]],
    **options: Any,
) -> Array:
    """Return `attention` over keys and values of which only the facts are known as a whole.

    Each of the pieces is the index of its first key, its keys and its values, in the dtype of
    sums; there is at least one. They are joined in this dtype, in which the query must be.
    """
    if options.pop("normalizer", None) is not None:
        raise ValueError(
            "keys in pieces are joined by their logsumexp, which only softmax has: omit normalizer,"
            " or give a KVCache"
        )
    selection = {name: options.pop(name) for name in ("backend", "kernel") if name in options}
    call, operands = describe(query, key, value, **options, facts=as_facts)
    problem = examine(call)
    given = options_of(problem, operands)
    joined: Partial | None = None
    for start, keys, values in pieces:
        part = Part(
            problem.batch,
            tuple([Slice(0, length) for length in problem.batch]),
            Slice(0, problem.heads),
            Slice(0, problem.query_length),
            Slice(start, keys.shape[-2]),
            given.get("query_offset", 0),
        )
        own = options_of_part(given, part) | selection
        partial = attention_partial(query, keys, values, **own)
        joined = partial if joined is None else merge(joined, partial)
        given.pop("sinks", None)  # which count once
    assert joined is not None
    return joined.output
