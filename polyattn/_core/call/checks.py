"""Examine a call: check it as a whole and state its facts in the letters of the semantics.

Checks see only shapes, dtypes, libraries and options, never the contents of an array. So they work
on traced and lazy arrays, and do not wait for a device. They come before any conversion.
"""

from __future__ import annotations

import math
from typing import Any

from polyattn._base.arguments import Shape
from polyattn._base.arrays import ArrayFacts, accumulator_of, broadcast_shapes
from polyattn._base.tracing import shape_text
from polyattn._core.call.facts import Call, axes_of
from polyattn._core.call.features import DTYPES, FEATURES, default_scale, newest_offset
from polyattn._core.call.layout import chunks_heads_first, positions_matter
from polyattn._core.call.operands import named_arrays
from polyattn._core.call.options import GRADIENT_NUMBERS, OPTIONS, with_gradient
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.indices import ScoreDims, check_shape_of_scores
from polyattn._core.expressions.masks import Mask
from polyattn._core.expressions.replacements import ByNorm, LongSequence
from polyattn._core.expressions.scores import Score

_OF_FLOATS = with_gradient("array")
# The options whose arrays follow axes of the scores, with these axes.
_SHAPED = {name: option.axes for name, option in OPTIONS.items() if option.axes in (".HLS", "H")}
_Named = list[tuple[str, ArrayFacts]]


def examine(call: Call) -> Problem:
    """Check a call as a whole and return its Problem."""
    operands, arrays = call.operands(), call.arrays()
    _check_dtypes(call, operands)
    _check_lengths(arrays)
    _check_tangents(call)
    page = None
    if call.block_table is not None:
        _check_pages(call, operands[1:])
        page = axes_of(call.key.shape, call.layout)[2]
        call = call.with_whole_keys()
        operands, arrays = call.operands(), call.arrays()
    _check_range(call)
    problem = _without_features(call, operands, arrays, page)
    needed = [name for name, feature in FEATURES.items() if feature.needs(call, problem)]
    problem = problem._replace(features=frozenset(needed))
    _check_shapes(call, operands, problem.scores)
    _check_expressions(call, problem)
    return problem


def _without_features(call: Call, operands: _Named, arrays: _Named, page: int | None) -> Problem:
    """State the facts of a call, all but the features that it needs."""
    batch, heads, key_heads, rows, keys, head_size, value_size = _common_lengths(call, operands)
    chunks = chunks_heads_first(call, arrays)
    offset = call.query_offset if positions_matter(call) else None
    offset = newest_offset(call, rows, keys) if offset is None else offset
    traced = any(facts.traced for _, facts in arrays)
    return Problem(
        library=call.query.library,
        device=call.query.device,
        dtype=call.query.dtype,
        batch=batch,
        heads=heads,
        key_heads=key_heads,
        query_length=rows,
        key_length=keys,
        head_size=head_size,
        value_size=value_size,
        is_causal=call.is_causal,
        window=call.window or (None, None),
        query_offset=None if isinstance(offset, ArrayFacts) else offset,
        scale=_scale(call.scale, default_scale(call, head_size), keys),
        softcap=call.softcap,
        mask=call.mask.shape if isinstance(call.mask, ArrayFacts) else None,
        bias=None if call.bias is None else call.bias.shape,
        bias_dtype=None if call.bias is None else call.bias.dtype,
        features=frozenset(),
        requires_grad=any(facts.requires_grad for _, facts in arrays),
        trained=frozenset([name for name, facts in arrays if facts.requires_grad]),
        transforms=call.transforms,
        traced=traced,
        mask_spec=call.mask if isinstance(call.mask, Mask) else None,
        score_spec=call.score_mod if isinstance(call.score_mod, Score) else None,
        similarity_spec=call.similarity,
        score_norm=call.scale if isinstance(call.scale, ByNorm) else None,
        normalizer=call.normalizer,
        dropout=call.dropout,
        dropout_start=None if isinstance(call.dropout_start, ArrayFacts) else call.dropout_start,
        chunks=chunks,
        layout=call.layout if traced else "...HLD",
        page=page,
    )


def _check_dtypes(call: Call, operands: _Named) -> None:
    for name, facts in operands:
        if facts.dtype not in DTYPES:
            raise TypeError(
                f"{name} has dtype {facts.dtype}; attention takes {', '.join(DTYPES)}:"
                " cast it first"
            )
    if len({facts.dtype for _, facts in operands}) > 1:
        dtypes = ", ".join(f"{name} {facts.dtype}" for name, facts in operands)
        raise TypeError(f"query, key and value must have one dtype; got {dtypes}: cast them to one")
    if isinstance(call.mask, ArrayFacts) and call.mask.dtype != "bool":
        dtype = call.mask.dtype
        if "float" in dtype:
            to_bool = "mask.bool()" if call.mask.library == "torch" else "mask.astype(bool)"
            hint = (
                f"one of 0 and 1, as Flax makes it, is {to_bool}; a float array that is added to"
                " the scores goes in bias="
            )
        else:
            hint = "True takes part, False does not: pass mask != 0 or mask == 0, as you mean it"
        raise TypeError(f"mask must be a bool array or a function; got dtype {dtype}: {hint}")
    for name in _OF_FLOATS:
        extra = getattr(call, name)
        if extra is not None and extra.dtype not in DTYPES:
            hint = "; a bool array goes in mask=" if extra.dtype == "bool" else ""
            raise TypeError(f"{name} must be a float array; got dtype {extra.dtype}{hint}")


def _check_lengths(arrays: _Named) -> None:
    for name, facts in arrays:
        if any(length != length for length in facts.shape):  # dask: NaN, for an unknown length
            raise ValueError(
                f"{name} has the shape {facts.shape}, whose lengths are not all known;"
                " compute them first (dask: compute_chunk_sizes())"
            )


def _check_pages(call: Call, pools: _Named) -> None:
    """Raise unless key and value with a block table are pools of pages."""
    letters = "(pages, G, page, D)" if call.layout == "...HLD" else "(pages, page, G, D)"
    if any(len(facts.shape) != 4 for _, facts in pools) or 0 in pools[0][1].shape[:1]:
        raise _shape_error(
            call, f"with block_table, key and value are at least one page {letters};"
        )
    if len({facts.shape[0] for _, facts in pools}) > 1:
        raise _shape_error(call, "key and value must have one number of pages;")


def _check_range(call: Call) -> None:
    # Scores are float32 for all but float64.
    largest, smallest = (1.7e308, 2.3e-308) if call.query.dtype == "float64" else (3.4e38, 1.2e-38)
    for name in GRADIENT_NUMBERS:
        value = getattr(call, name)
        if isinstance(value, float) and value != 0 and not smallest <= abs(value) <= largest:
            raise ValueError(
                f"{name} must be within the range of the scores' dtype, {smallest} to {largest};"
                f" got {value!r}"
            )


def _common_lengths(call: Call, operands: _Named) -> tuple[Shape, int, int, int, int, int, int]:
    """Return batch axes, H, G, L, S, D and E, of query, key and value together, or raise."""
    for name, facts in operands:
        if len(facts.shape) < 2:
            raise _shape_error(call, f"{name} needs at least the axes length and size; got")
        if None in axes_of(facts.shape, call.layout)[1::2]:
            reason = "lengths and batch axes may be unknown, but not heads and sizes; got"
            raise _shape_error(call, reason)
    q_batch, heads, query_length, head_size = axes_of(call.query.shape, call.layout)
    k_batch, key_heads, key_length, key_size = axes_of(call.key.shape, call.layout)
    v_batch, value_heads, value_length, value_size = axes_of(
        (call.value or call.key).shape, call.layout
    )
    if head_size != key_size:
        raise _shape_error(
            call, f"vectors of query and key must have one size D; got {head_size} and {key_size}:"
        )
    if None not in (key_length, value_length) and key_length != value_length:
        raise _shape_error(
            call, f"key and value must have one length S; got {key_length} and {value_length}:"
        )
    if key_heads != value_heads:
        raise _shape_error(
            call,
            f"key and value must have one number of heads G; got {key_heads} and {value_heads}:",
        )
    if (key_heads == 0 and heads != 0) or (key_heads and heads % key_heads):
        other = "" if call.layout == "...LHD" else '; if length comes before heads, layout="...LHD"'
        raise _shape_error(
            call,
            f"the number of query heads must be a multiple of that of key heads; got {heads} and"
            f" {key_heads}:",
            other,
        )
    batch = broadcast_shapes(q_batch, k_batch, v_batch)
    if batch is None:
        raise _shape_error(
            call,
            f"batch axes must be equal or 1 to broadcast; got {q_batch}, {k_batch}, {v_batch}:",
        )
    key_length = value_length if key_length is None else key_length
    return batch, heads, key_heads, query_length, key_length, head_size, value_size


def _shape_error(call: Call, reason: str, hint: str = "") -> ValueError:
    """Return an error that ends with the shapes of the call and their letters."""
    shapes = ", ".join([f"{name} {shape_text(facts.shape)}" for name, facts in call.operands()])
    letters = (
        "(..., H, L, D), (..., G, S, D), (..., G, S, E)"
        if call.layout == "...HLD"
        else "(..., L, H, D), (..., S, G, D), (..., S, G, E)"
    )
    return ValueError(f"{reason} {shapes}, for {letters}{hint}")


def _check_shapes(call: Call, operands: _Named, scores: Shape) -> None:
    """Raise if the shape of an array does not follow from those of query, key and value."""
    rank = max(2, *(len(facts.shape) for _, facts in operands))
    for name, axes in _SHAPED.items():
        array = getattr(call, name)
        if axes == ".HLS" and isinstance(array, ArrayFacts):
            check_shape_of_scores(name, array.shape, scores[-rank:])
        elif axes == "H" and array is not None and array.shape != (scores[-3],):
            raise ValueError(
                f"{name} must hold one number per query head, shape ({scores[-3]},); got"
                f" {array.shape}"
            )
    _check_results(call, scores, rank)
    if isinstance(call.query_offset, ArrayFacts):
        offset, batch = call.query_offset.shape, scores[:-3]
        if len(offset) > len(batch) or broadcast_shapes(offset, batch) != batch:
            raise ValueError(
                "query_offset as an array gives one offset per batch item: its shape must broadcast"
                f" to {batch}; got {offset}"
            )


def _check_results(call: Call, scores: Shape, rank: int) -> None:
    """Check the arrays of a call for weights or gradients that are shaped as its results."""
    rows = scores[:-1][-max(1, rank - 1) :]
    if call.layout == "...LHD" and rank > 2:
        rows = (*rows[:-2], rows[-1], rows[-2])
    *_, value_size = axes_of((call.value or call.key).shape, call.layout)
    residuals = call.residuals
    known = residuals.logsumexp if residuals else call.known_logsumexp
    if known is not None and (known.shape != rows or known.dtype not in ("float32", "float64")):
        raise ValueError(
            f"logsumexp must be that of attention_partial for this call, {rows} in float32"
            f" or float64; got {known}"
        )
    if residuals is None:
        return
    if known is None and call.normalizer is None:
        raise ValueError("a gradient needs the logsumexp: pass the result of attention_partial")
    accumulator = accumulator_of(call.query.dtype)
    gradients = [] if call.cotangents is None else named_arrays(call.cotangents)
    for name, given in (("output", residuals.output), *gradients):
        shape = rows if name == "logsumexp_gradient" else (*rows, value_size)
        if given.shape != shape:
            raise ValueError(f"{name} must have the shape {shape} of the result; got {given}")
        if given.dtype not in (call.query.dtype, accumulator):
            raise TypeError(
                f"{name} must be {call.query.dtype} as the query, or {accumulator}; got {given}"
            )


def _check_tangents(call: Call) -> None:
    for name, tangent in [] if call.tangents is None else named_arrays(call.tangents):
        argument = name.removesuffix("_tangent")
        of = getattr(call, argument)
        if of is None:
            raise ValueError(f"there is a tangent of {argument}, and no {argument} in the call")
        if (tangent.shape, tangent.dtype) != (of.shape, of.dtype):
            raise ValueError(
                f"the tangent of {argument} must have its shape and dtype, {of}; got {tangent}"
            )


def _scale(scale: Any, default: float, key_length: int | None) -> float:
    if isinstance(scale, LongSequence):
        keys = key_length if scale.keys is None else scale.keys
        if keys is None:
            raise ValueError(f"scale={scale!r} needs a key length that is known")
        return default / math.sqrt(max(keys, 1))
    return default if scale is None or isinstance(scale, ByNorm) else float(scale)


def _check_expressions(call: Call, problem: Problem) -> None:
    dims = ScoreDims(
        problem.batch, problem.heads, problem.query_length, problem.key_length, problem.query_offset
    )
    if problem.mask_spec is not None:
        problem.mask_spec.check(dims)
    if problem.score_spec is not None:
        problem.score_spec.check(dims)
    if problem.similarity_spec is not None:
        problem.similarity_spec.check(problem.head_size)
    if problem.normalizer is not None:
        known = call.residuals.logsumexp if call.residuals else call.known_logsumexp
        asked = call.logsumexp or known is not None
        for name, is_given in (("sinks", call.sinks is not None), ("logsumexp", asked)):
            if is_given:
                raise ValueError(
                    f"normalizer={problem.normalizer!r} supports no {name}; only softmax does"
                )
