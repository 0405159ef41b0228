"""Attention over some of the keys, which can be merged with attention over the others.

Partials over disjoint sets of keys form a commutative monoid: `merge` is associative up to
rounding, and its identity is the partial over no keys, output 0 with logsumexp −inf.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, Unpack

from polyattn._api.attention import AttentionOptions
from polyattn._api.names import with_our_names
from polyattn._api.run import PlannedCall, planned_call, run_planned
from polyattn._base.arrays import (
    Array,
    accumulator_of,
    cast,
    facts_of,
    library_of,
    quiet,
)
from polyattn._base.autocast import autocast
from polyattn._base.same_bits import keeps_bits
from polyattn._core.call.describe import describe
from polyattn._core.call.features import DTYPES
from polyattn._core.call.options import AUTOCAST
from polyattn._dispatch.errors import UnsupportedError


class Partial(NamedTuple):
    """The result of attention over some of the keys.

    Attributes
    ----------
    output : Array
        The attention over these keys, shape (..., H, L, E) in the layout of the call.
    logsumexp : Array
        Natural logarithm of the sum of the exponentials of these keys' scores, shape of the output
        without its last axis, in float32 or float64.
    """

    output: Array
    logsumexp: Array


@with_our_names()
def attention_partial(
    query: Array,
    key: Array,
    value: Array,
    *,
    dtype: str | None = None,
    **options: Unpack[AttentionOptions],
) -> Partial:
    """Compute attention over some of the keys, to be merged with attention over the others.

    Parameters
    ----------
    query, key, value : Array
        As for `attention`, with only some of the keys and their values.
    dtype : {"float32", "float64"}, optional
        The dtype of the output: that of the inputs by default, or that of the logsumexp, which
        keeps the digits of 16-bit inputs for `merge`. The inputs are cast to it first.
    **options
        As for `attention`: mask, bias, is_causal, window, query_offset, key_lengths, block_table,
        scale, softcap, score_mod, sinks, dropout, similarity, layout, backend and kernel. Indices
        and positions count from the first of these keys, so `query_offset` is the position of the
        queries among them, and `key_lengths` the number of these keys. Give sinks with one part
        only. There is no `normalizer`: only softmax has a logsumexp.

    Returns
    -------
    Partial
        The output, as from `attention`, and the logsumexp, shape (..., H, L) in the layout of the
        output, in float32, or float64 for float64 inputs; −inf for a row that sees no key.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As for `attention`; ValueError if `dtype` is neither of the two.

    See Also
    --------
    merge : Join partials over disjoint sets of keys.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention_partial
    >>> x = np.ones((8, 5, 64), dtype=np.float32)
    >>> output, logsumexp = attention_partial(x, x, x)
    >>> output.shape, logsumexp.shape
    ((8, 5, 64), (8, 5))
    """
    arguments = autocast({"query": query, "key": key, "value": value, **options}, AUTOCAST)
    arrays = {name: arguments.pop(name) for name in ("query", "key", "value")}
    if dtype is not None:
        arrays = _in_dtype(dtype, arrays)
    partial: Any = _planned(*arrays.values(), **arguments)  # `run_planned` returns its results
    return partial  # type: ignore[no-any-return]


@run_planned(lambda results: Partial(*results), logsumexp=True)
def _planned(query: Array, key: Array, value: Array, **options: Any) -> PlannedCall:
    backend, kernel = options.pop("backend", None), options.pop("kernel", None)
    described = describe(query, key, value, **options, logsumexp=True)
    return planned_call(*described, backend, kernel)


def _in_dtype(dtype: str, arrays: dict[str, Array]) -> dict[str, Array]:
    """Return the arrays in this dtype, theirs or that of the logsumexp."""
    own = facts_of(arrays["query"], "query").dtype
    allowed = dict.fromkeys((own, accumulator_of(own)))
    if dtype not in allowed:
        raise ValueError(f"dtype must be {' or '.join(allowed)} for this query; got {dtype!r}")
    libraries = {name: library_of(array, name).xp for name, array in arrays.items()}
    return {name: cast(xp, arrays[name], getattr(xp, dtype)) for name, xp in libraries.items()}


def merge(*partials: Partial) -> Partial:
    """Join attention over disjoint sets of keys into attention over all of them.

    Parameters
    ----------
    *partials : Partial
        At least one partial; all of one shape, library and dtype. Only one may include the sinks.

    Returns
    -------
    Partial
        Attention over the keys of all partials.

    Raises
    ------
    TypeError
        If there is no partial, or if libraries, devices or dtypes differ.
    ValueError
        If the shapes differ.
    UnsupportedError
        In a block of `same_bits`: a merge rounds, so its bits depend on the parts.

    See Also
    --------
    attention_partial : Attention over some of the keys.

    Notes
    -----
    This is the merge of split-key decoding [1]_. Its error comes from the logsumexp's rounding.

    References
    ----------
    .. [1] Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference", 2023.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention, attention_partial, merge
    >>> q, k, v = (np.random.default_rng(0).standard_normal((3, 2, 6, 4)))
    >>> left = attention_partial(q, k[:, :2], v[:, :2])
    >>> right = attention_partial(q, k[:, 2:], v[:, 2:])
    >>> bool(np.allclose(merge(left, right).output, attention(q, k, v)))
    True
    """
    if not partials:
        raise TypeError("merge needs at least one Partial; got none")
    for partial in partials:
        if not isinstance(partial, tuple) or len(partial) != 2:
            raise TypeError(
                "merge takes Partials, or pairs (output, logsumexp), as separate arguments:"
                f" merge(*partials); got a {type(partial).__name__}"
            )
    if keeps_bits() and len(partials) > 1:
        raise UnsupportedError(
            "a merge of partial results has bits that depend on the parts, so it is refused in"
            " same_bits(): call attention over all keys at once"
        )
    _check_alike(partials)
    library = library_of(partials[0][0])
    with quiet(library.name):
        return functools.reduce(_merge_two, (Partial(*p) for p in partials))


def _check_alike(partials: tuple[Partial, ...]) -> None:
    facts = [(facts_of(p[0], "output"), facts_of(p[1], "logsumexp")) for p in partials]
    for output, logsumexp in facts:
        if output.dtype not in DTYPES or logsumexp.dtype not in ("float32", "float64"):
            raise TypeError(
                f"an output has one of the dtypes {', '.join(DTYPES)} and a logsumexp float32 or"
                f" float64; got output {output} and logsumexp {logsumexp}"
            )
        if output.shape[:-1] != logsumexp.shape:
            raise ValueError(
                "a logsumexp must have the shape of its output without the last axis; got output"
                f" {output} and logsumexp {logsumexp}"
            )
        first, first_logsumexp = facts[0]
        if output.shape != first.shape:
            raise ValueError(
                f"partials must have one shape; got outputs {first.shape} and {output.shape}"
            )
        if (output.dtype, logsumexp.dtype) != (first.dtype, first_logsumexp.dtype):
            raise TypeError(
                f"partials must have one dtype; got output {first}, logsumexp {first_logsumexp},"
                f" and output {output}, logsumexp {logsumexp}"
            )
        for array in (output, logsumexp):
            # An array without a device goes where the others are.
            elsewhere = array.device and first.device and array.device != first.device
            if array.library != first.library or elsewhere:
                raise TypeError(
                    "partials must be of one library and on one device; got"
                    f" {first.library} {first.device} and {array.library} {array.device}"
                )


def _merge_two(left: Partial, right: Partial) -> Partial:
    xp = library_of(left.output).xp
    top = xp.maximum(left.logsumexp, right.logsumexp)
    # If both are empty, there is nothing to subtract: −inf − −inf is NaN.
    shift = xp.where(top == -math.inf, xp.zeros_like(top), top)
    weights = [xp.exp(partial.logsumexp - shift) for partial in (left, right)]
    total = weights[0] + weights[1]
    divisor = xp.where(total == 0, xp.ones_like(total), total)
    # Divided first: an array as large as the output less at the peak.
    left_output, right_output = (
        cast(xp, partial.output, partial.logsumexp.dtype) * (weight / divisor)[..., None]
        for partial, weight in zip((left, right), weights, strict=True)
    )
    output = left_output + right_output
    logsumexp = xp.where(total == 0, top, shift + xp.log(divisor))
    return Partial(cast(xp, output, left.output.dtype), logsumexp)
