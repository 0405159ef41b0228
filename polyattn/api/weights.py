"""The weights of attention as an array, for looking at: nothing of the output depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

from polyattn.api.options import AttentionOptions, check_names
from polyattn.arguments import check_int
from polyattn.arrays import Array
from polyattn.call.describe import describe
from polyattn.call.layout import heads_first, is_flat
from polyattn.call.problem import examine
from polyattn.dispatch.request import request
from polyattn.dispatch.select import select
from polyattn.kernels.weights import Weights
from polyattn.span import Span

__all__ = ["TopWeights", "attention_weights"]

# What names rows or heads.
WHICH = "an integer, a sequence of them, or a slice"


class TopWeights(NamedTuple):
    """The largest weights of each row, the largest first.

    Attributes
    ----------
    weights : Array
        The weights, shape (..., H, L, k).
    keys : Array of int
        Which keys they are of, shape (..., H, L, k).
    """

    weights: Array
    keys: Array


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

    Whole, they take memory for L · S numbers a head. Some rows or heads, the largest of each row,
    or the sums for each key take memory for what is returned and a block of rows.

    Parameters
    ----------
    query : Array
        Queries, as for `attention`.
    key : Array
        Keys, as for `attention`.
    logsumexp : Array, optional
        Of an `attention_partial` of the same call, or one that merged several, which spares finding
        it again, and makes the weights of some keys those that they have among all.
    rows, heads : slice, int or sequence of int, optional
        Which query rows and query heads; all by default.
    top : int, optional
        How many of the largest weights of each row to return, from 1 to S. Where S is 0 there are
        none to return, whatever the number.
    per_key : bool
        Whether to return, for each key, the sum of its weights over the rows.
    **options
        As for `attention`: mask, bias, is_causal, window, query_offset, scale, softcap, score_mod,
        sinks, dropout, similarity, normalizer, layout and backend. The layout is that of query, key
        and logsumexp.

    Returns
    -------
    Array or TopWeights
        The weights, shape (..., H, L, S) whatever the layout, in float32, or float64 for float64
        inputs: with `per_key` (..., H, S), with `top` a pair of weights and keys, (..., H, L, top).
        H and L are of the heads and rows asked for. Arrays of rank 2 give a result without H.

    Raises
    ------
    IndexError
        If a row or head is none of the call's.
    TypeError, ValueError, UnsupportedError
        As for `attention`.

    See Also
    --------
    attention : What they are the weights of.

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
    backend = options.pop("backend", None)
    given: dict[str, Any] = dict(options)
    call, operands = describe(
        query, key, None, for_weights=True, known_logsumexp=logsumexp, **given
    )
    problem = examine(call)
    kernel = Weights(
        _spans("rows", rows, problem.query_length),
        _spans("heads", heads, problem.heads),
        _top(top, problem.key_length),
        per_key,
    )
    if top is not None and per_key:
        raise ValueError("top and per_key are not to be given together")
    plan = select(call, problem, query, request(backend), kernel)
    weights, keys = plan.run(heads_first(call, operands))
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


def _spans(name: str, given: Any, length: int) -> tuple[Span, ...] | None:
    """Return which rows or heads are asked for, those that follow one another together."""
    if given is None:
        return None
    if isinstance(given, slice):
        numbers = list(range(*given.indices(length)))
    elif isinstance(given, Sequence) and not isinstance(given, str):
        numbers = [check_int(name, number, WHICH) for number in given]
    else:
        numbers = [check_int(name, given, WHICH)]
    spans: list[Span] = []
    for number in numbers:
        if not -length <= number < length:
            raise IndexError(f"{name}: there are {length}, and {number} is none of them")
        place = number % length
        if spans and spans[-1].stop == place:
            spans[-1] = Span(spans[-1].start, place + 1)
        else:
            spans.append(Span(place, place + 1))
    if not spans and length:
        raise ValueError(f"{name} must name at least one; got {given!r}")
    return tuple(spans)
