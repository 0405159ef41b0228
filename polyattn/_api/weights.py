"""The weights of attention as an array, for inspection only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

from polyattn._api.attention import AttentionOptions
from polyattn._api.names import check_names, with_our_names
from polyattn._base.arguments import check_int
from polyattn._base.arrays import Array, facts_of, library_of
from polyattn._base.autocast import autocast
from polyattn._base.span import Span
from polyattn._core.call.checks import examine
from polyattn._core.call.describe import describe
from polyattn._core.call.layout import heads_first, is_flat, result_heads_first
from polyattn._core.call.options import AUTOCAST
from polyattn._dispatch.request import request
from polyattn._dispatch.select import select
from polyattn._kernels.weights import Weights

# The types that select rows or heads, for messages.
WHICH = "an integer, a sequence of them, or a slice"


class TopWeights(NamedTuple):
    """The largest weights of each row, the largest first.

    Attributes
    ----------
    weights : Array
        The weights, shape (..., H, L, k).
    keys : Array of int
        The keys of these weights, shape (..., H, L, k).
    """

    weights: Array
    keys: Array


@with_our_names()
def attention_weights(
    query: Array,
    key: Array,
    *,
    logsumexp: Array | None = None,
    rows: slice | Sequence[int] | int | None = None,
    heads: slice | Sequence[int] | int | None = None,
    top: int | None = None,
    per_key: bool = False,
    **options: Unpack[AttentionOptions],
) -> Array | TopWeights:
    """Compute the weights that `attention` multiplies the values with.

    All weights take memory for L · S numbers per head. Some rows or heads, the largest weights of
    each row, or the sums for each key take memory for the result and one block of rows.

    Parameters
    ----------
    query : Array
        Queries, as for `attention`.
    key : Array
        Keys, as for `attention`.
    logsumexp : Array, optional
        Logsumexp of an `attention_partial` of the same call, which saves computing it; or of
        merged partials, which makes the weights those among all keys.
    rows, heads : slice, int or sequence of int, optional
        The query rows and query heads to compute; all by default.
    top : int, optional
        Number of largest weights of each row to return, from 1 to S; of equal weights above 0, the
        smaller key comes first. If S is 0, no weights are returned for any number.
    per_key : bool
        Whether to return, for each key, the sum of its weights over the rows.
    **options
        As for `attention`: mask, bias, is_causal, window, query_offset, key_lengths, block_table,
        scale, softcap, score_mod, sinks, dropout, similarity, normalizer, layout and backend. The
        layout is that of query, key and logsumexp.

    Returns
    -------
    Array or TopWeights
        The weights, shape (..., H, L, S) in either layout, in float32, or float64 for float64
        inputs. With `per_key` the shape is (..., H, S); with `top` the result is a pair of weights
        and keys, (..., H, L, top). H and L count the selected heads and rows. Arrays of rank 2 give
        a result without H.

    Raises
    ------
    IndexError
        If a row or head is out of range.
    TypeError, ValueError, UnsupportedError
        As for `attention`.

    See Also
    --------
    attention : Multiply the values with these weights.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention_weights
    >>> x = np.ones((8, 5, 64), dtype=np.float32)
    >>> attention_weights(x, x, is_causal=True).shape
    (8, 5, 5)
    >>> attention_weights(x, x, is_causal=True, heads=0, rows=[4], top=2).weights
    array([[[0.2, 0.2]]], dtype=float32)
    """
    check_names("attention_weights", options, without=("kernel",))
    arguments = autocast({"query": query, "key": key, "value": None, **options}, AUTOCAST)
    backend = arguments.pop("backend", None)
    call, operands = describe(**arguments, for_weights=True)
    if logsumexp is not None:
        call = call._replace(known_logsumexp=facts_of(logsumexp, "logsumexp"))
    problem = examine(call)
    if problem.is_symbolic and not (rows is None and top is None):
        raise ValueError(f"rows= and top= need lengths that are known; got {call.query.shape}")
    kernel = Weights(
        _spans("rows", rows, problem.query_length),
        _spans("heads", heads, problem.heads),
        _top(top, problem.key_length),
        per_key,
    )
    if top is not None and per_key:
        raise ValueError("top and per_key cannot be given together")
    plan = select(call, problem, request(backend), kernel, library_of(operands.query).xp)
    known = None if logsumexp is None else result_heads_first(call, "logsumexp", logsumexp)
    weights, keys = plan.weights(heads_first(call, operands), known)
    if is_flat(call):
        weights, keys = weights[0, ...], None if keys is None else keys[0, ...]
    return weights if keys is None else TopWeights(weights, keys)


def _top(top: Any, length: int) -> int | None:
    if top is None:
        return None
    number = check_int("top", top)
    if number < 1 or number > length > 0:
        raise ValueError(f"top must be from 1 to S = {length}; got {top!r}")
    return min(number, length)


def _spans(name: str, selection: Any, length: int) -> tuple[Span, ...] | None:
    """Return the selected rows or heads as spans of consecutive ones; None for all."""
    if selection is None:
        return None
    spans: list[Span] = []
    for index in selected(name, selection, length):
        if spans and spans[-1].stop == index:
            spans[-1] = Span(spans[-1].start, index + 1)
        else:
            spans.append(Span(index, index + 1))
    return tuple(spans)


def selected(name: str, selection: Any, length: int) -> list[int]:
    """Return the indices from 0 on, one at least of a length above 0, that a selection names."""
    if isinstance(selection, slice):
        numbers = list(range(*selection.indices(length)))
    elif isinstance(selection, Sequence) and not isinstance(selection, str):
        numbers = [check_int(name, number, WHICH) for number in selection]
    else:
        numbers = [check_int(name, selection, WHICH)]
    for number in numbers:
        if not -length <= number < length:
            raise IndexError(f"index {number} is out of range for {length} {name}")
    if not numbers and length:
        raise ValueError(f"{name} must name at least one; got {selection!r}")
    return [number % length for number in numbers]
