"""Attention over keys that are made a piece at a time, such as those of a quantised cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from polyattn._api.partial import Partial, attention_partial, merge
from polyattn._api.run import PlannedCall, plan_of, run_planned
from polyattn._base.arrays import Array, ArrayFacts, as_facts, facts_of
from polyattn._base.quantized import Quantized
from polyattn._base.slices import Slice
from polyattn._base.tracing import is_autocast_on
from polyattn._core.call.checks import examine
from polyattn._core.call.describe import describe
from polyattn._core.call.parts import options_of, options_of_part
from polyattn._core.expressions.parts import Part


class Piece(NamedTuple):
    """Some keys and their values, in the dtype of sums."""

    start: Any  #: the index of the first key; an array where the library traces
    key: Array | Quantized
    value: Array | Quantized
    length: Array | None = None  #: how many of them count, where that is traced; all if None


def attention_over_pieces(
    query: Array,
    key: ArrayFacts,
    value: ArrayFacts,
    pieces: Iterable[Piece],
    in_floats: Callable[[], Iterable[Piece]],
    **options: Any,
) -> Array:
    """Return `attention` over keys and values of which only the facts are known as a whole.

    There is at least one piece. They are joined in the dtype of sums, in which the query must be.
    For a kernel that reads no integers, ``in_floats()`` stands for a piece of integers.
    """
    if options.pop("normalizer", None) is not None:
        raise ValueError(
            "chunked keys are merged by logsumexp, which only softmax has: omit normalizer,"
            " or give a KVCache"
        )
    selection = {name: options.pop(name) for name in ("backend", "kernel") if name in options}
    call, operands = describe(query, key, value, **options, facts=as_facts)
    problem = examine(call)
    given = options_of(problem, operands)

    def partial_of(piece: Piece) -> Partial | None:
        start, keys, values, length = piece
        part = Part(
            problem.batch,
            tuple([Slice(0, length) for length in problem.batch]),
            Slice(0, problem.heads),
            Slice(0, problem.query_length),
            Slice(start, keys.shape[-2]),
            given.get("query_offset", 0),
        )
        own = options_of_part(given, part) | selection
        if length is not None:
            own["key_lengths"] = length
        if isinstance(keys, Quantized):
            partial = attention_over_integers(query, keys, values, **own)
        else:
            partial = attention_partial(query, keys, values, dtype=problem.accumulator, **own)
        if partial is not None:
            given.pop("sinks", None)  # which count once
        return partial

    def partials() -> Iterator[Partial]:
        for piece in pieces:
            partial = partial_of(piece)
            yield from map(partial_of, in_floats()) if partial is None else (partial,)

    return functools.reduce(merge, partials()).output


def attention_over_integers(
    query: Array,
    key: Quantized,
    value: Quantized,
    *,
    backend: Any = None,
    kernel: Any = None,
    **options: Any,
) -> Partial | None:
    """Return `attention_partial` over integers, or None if its kernel needs floats."""
    if is_autocast_on():  # which casts the floats of the other pieces
        return None
    over: Partial | None = _over(query, key, value, backend=backend, kernel=kernel, **options)
    return over


@run_planned(lambda results: Partial(*results), logsumexp=True)
def _over(
    query: Array, key: Quantized, value: Quantized, *, backend: Any, kernel: Any, **options: Any
) -> Any:
    call, operands = describe(query, key, value, **options, logsumexp=True, facts=_facts)
    plan = plan_of(call, query, backend, kernel)
    if plan.placement.moved or not plan.kernel.reads_quantized(plan.placement.problem):
        return None
    return PlannedCall(call, operands, plan)


def _facts(array: Any, name: str) -> ArrayFacts:
    if isinstance(array, Quantized):
        return facts_of(array.steps, name)._replace(shape=array.shape)
    return as_facts(array, name)
