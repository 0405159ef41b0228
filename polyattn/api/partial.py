"""Attention over some of the keys, as a value that can be joined with others.

Partials over disjoint sets of keys form a commutative monoid: `merge` is associative up to rounding
and its identity is the output 0 with the logsumexp −inf, which is what no key at all gives.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, Unpack

from polyattn.api.attention import compute
from polyattn.api.options import AttentionOptions, check_names
from polyattn.arrays import Array, cast, facts_of, library_of, quiet
from polyattn.call.features import DTYPES

__all__ = ["Partial", "attention_partial", "merge"]


class Partial(NamedTuple):
    """What attention over some of the keys gives.

    Attributes
    ----------
    output : Array
        The attention over these keys, shape (..., H, L, E) in the layout of the call.
    logsumexp : Array
        Natural logarithm of the sum of the exponentials of these keys' scores, the shape of the
        output less its last axis, at least float32.
    """

    output: Array
    logsumexp: Array


def attention_partial(
    query: Array, key: Array, value: Array, **options: Unpack[AttentionOptions]
) -> Partial:
    """Compute attention over some of the keys, to be joined with attention over others.

    Parameters
    ----------
    query, key, value : Array
        As for `attention`; key and value are those of some keys only.
    **options
        As for `attention`: mask, bias, is_causal, window, query_offset, scale, softcap, score_mod,
        sinks, dropout, similarity, layout, backend and kernel. Indices and positions count from the
        first of these keys, so `query_offset` is the position of the queries among them. Give
        sinks with one part only. There is no `normalizer`: only softmax has a logsumexp.

    Returns
    -------
    Partial
        The output, as of `attention`, and the logsumexp, shape (..., H, L) in the layout of the
        output, in float32, or float64 for float64 inputs; −inf for a row that sees no key.

    See Also
    --------
    merge : Join partials.

    Examples
    --------
    >>> import numpy as np
    >>> from polyattn import attention_partial
    >>> x = np.ones((8, 5, 64), dtype=np.float32)
    >>> output, logsumexp = attention_partial(x, x, x)
    >>> output.shape, logsumexp.shape
    ((8, 5, 64), (8, 5))
    """
    check_names("attention_partial", options)
    given: dict[str, Any] = {"backend": None, "kernel": None} | dict(options)
    return Partial(*compute(query, key, value, logsumexp=True, **given))


def merge(*partials: Partial) -> Partial:
    """Join attention over disjoint sets of keys into attention over all of them.

    Parameters
    ----------
    *partials : Partial
        Partials of one shape, library and dtype, at least one. A sink belongs in one of them only.

    Returns
    -------
    Partial
        Attention over the keys of all of them.

    Raises
    ------
    TypeError
        If nothing is given, or arrays of several libraries or dtypes.
    ValueError
        If the shapes differ.

    See Also
    --------
    attention_partial : Attention over some of the keys.

    Notes
    -----
    This is the merge of split-key decoding [1]_; its error is that of the logsumexp's rounding.

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
                "merge takes Partials, or pairs (output, logsumexp), each by itself:"
                f" merge(*partials); got a {type(partial).__name__}"
            )
    _check(partials)
    library = library_of(partials[0][0])
    with quiet(library.name):
        return functools.reduce(_merge_two, (Partial(*p) for p in partials))


def _check(partials: tuple[Partial, ...]) -> None:
    facts = [(facts_of(p[0], "output"), facts_of(p[1], "logsumexp")) for p in partials]
    for output, logsumexp in facts:
        if output.dtype not in DTYPES or logsumexp.dtype not in ("float32", "float64"):
            raise TypeError(
                f"an output has one of the dtypes {', '.join(DTYPES)} and a logsumexp float32 or"
                f" float64; got output {output} and logsumexp {logsumexp}"
            )
        given = f"output {output} and logsumexp {logsumexp}"
        if output.shape[:-1] != logsumexp.shape:
            raise ValueError(
                f"a logsumexp must have the shape of its output less the last axis; got {given}"
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
        for one in (output, logsumexp):
            # One that is nowhere in particular goes where the others are.
            elsewhere = one.device and first.device and one.device != first.device
            if one.library != first.library or elsewhere:
                raise TypeError(
                    "partials must be of one library and on one device; got"
                    f" {first.library} {first.device} and {one.library} {one.device}"
                )


def _merge_two(one: Partial, other: Partial) -> Partial:
    xp = library_of(one.output).xp
    top = xp.maximum(one.logsumexp, other.logsumexp)
    # Where both are empty there is nothing to subtract: −inf − −inf is no number.
    shift = xp.where(top == -math.inf, xp.zeros_like(top), top)
    weight_one, weight_other = xp.exp(one.logsumexp - shift), xp.exp(other.logsumexp - shift)
    total = weight_one + weight_other
    some = xp.where(total == 0, xp.ones_like(total), total)
    output = (
        _lift(xp, one) * weight_one[..., None] + _lift(xp, other) * weight_other[..., None]
    ) / some[..., None]
    logsumexp = xp.where(total == 0, top, shift + xp.log(some))
    return Partial(cast(xp, output, one.output.dtype), logsumexp)


def _lift(xp: object, partial: Partial) -> Array:
    return cast(xp, partial.output, partial.logsumexp.dtype)
