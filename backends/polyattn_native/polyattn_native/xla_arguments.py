"""The arguments of the library in a program of JAX: arrays by name, each with all axes; and back.

A call becomes what the library takes: masks by position and lengths are ends of n ranges of keys
for each row, other masks an array, a score expression numbers by the distance of a key from its
row, a seed six words::

    query (..., H, L, D)    key (..., G, S, D)      value (..., G, S, E)
    first, stop (..., H, L, n)                      mask, bias (..., H, L, S)
    by_distance (..., H, 1, L + S - 1)              sinks (H)      seed (6)
    key, value (P, G, page, ·)                      table (..., 1, 1, pages)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from polyattn.plugin import (
    Array,
    Indices,
    Mask,
    Operands,
    PointIndices,
    Problem,
    Score,
    Span,
    in_one_piece,
    saturating_sum,
    with_rank,
)
from polyattn_native.arrays import FAR
from polyattn_native.distance_scores import LIMIT, scale_and_rest
from polyattn_native.visible import Ranges, kind_of, known_ends
from polyattn_native.xla_call import POOLS, Arrays


def arguments(problem: Problem, x: Operands) -> tuple[Problem, Arrays]:
    """Return a call of arrays, those of expressions in lists, and the arguments by name."""
    rank, exact = len(problem.batch) + 3, problem.accumulator
    given: dict[str, Any] = {"query": x.query, "key": x.key, "value": x.value}
    given |= _masks(problem, x)
    if x.bias is not None:
        given["bias"] = x.bias.astype(exact)
    arrays = {name: with_rank(array, rank) for name, array in given.items()}
    if x.block_table is not None:
        arrays |= _through_table(problem, x, arrays["stop"])
    if problem.score_spec is not None:
        numbers = by_distance(problem, x, x.score_mod)
        arrays |= {} if numbers is None else {"by_distance": numbers}
        problem = problem._replace(scale=scale_and_rest(problem, problem.score_spec)[0])
    if x.sinks is not None:
        arrays["sinks"] = x.sinks.astype(exact)
    if problem.dropout:
        start: Any = problem.dropout_start
        start = x.dropout_start if start is None else np.asarray(start) % 2**32
        words = [jnp.stack(_words_of(x.seed)), jnp.asarray(start).astype("uint32")]
        arrays["seed"] = jnp.concatenate(words)
    if problem.query_offset is None:  # first and stop have causal and window
        problem = problem._replace(is_causal=False, window=(None, None), query_offset=0)
    return problem._replace(mask_spec=None, mask=None, bias=None, score_spec=None), arrays


def filled(expression: Any, arrays: Any) -> Any:
    """Return an expression with its arrays from a list."""
    rest = iter(arrays)
    return expression.map(lambda *_: next(rest))


def is_range(mask: Mask) -> bool:
    """Return whether a mask leaves each row a first and a last key, whatever its arrays hold."""
    return kind_of(mask) in ("window", "prefix", "padding")


def is_constant(mask: Mask) -> bool:
    """Return whether a mask is no array and no such range, and says all about itself."""
    return not (is_range(mask) or mask.carried())


def constant_ends(problem: Problem, masks: Iterable[Mask]) -> tuple[Any, Any] | None:
    """Return the ends of the few ranges that constant masks leave each row, or None."""
    masks = [mask for mask in masks if is_constant(mask)]
    if not masks or problem.query_offset is None:
        return None
    mask = functools.reduce(operator.and_, masks)
    offset = max(-FAR, min(problem.query_offset, FAR))
    lengths = problem.query_length, problem.key_length
    return known_ends(mask, lengths, offset, problem.batch, problem.heads)


def _masks(problem: Problem, x: Operands) -> Arrays:
    """Return the first and last keys of the rows, and the mask that is an array."""
    found: dict[str, Any] = {}
    ranges = Ranges(problem, x, jnp)
    if problem.mask_spec is None:
        found |= {} if x.mask is None else {"mask": x.mask}
        ends = None
    else:
        conditions = filled(problem.mask_spec, x.mask).conditions
        ends = constant_ends(problem, conditions)
        others = []
        for one in conditions:
            if is_range(one):
                ranges.add(one)
            elif ends is None or not is_constant(one):
                others.append(one)
        if others:
            whole = Span(0, problem.query_length), Span(0, problem.key_length)
            at = Indices(problem, jnp, x, *whole)
            found["mask"] = functools.reduce(operator.and_, [one.seen(at) for one in others])
    if problem.query_offset is None and problem.band is not None:
        ranges.add(problem.band)
    for name, join in (("first", jnp.maximum), ("stop", jnp.minimum)):
        rows = getattr(ranges, name)
        rows = None if rows is None else rows[:, None, :, None]
        if ends is not None:
            of_masks = jnp.asarray(ends[name == "stop"])
            rows = of_masks if rows is None else join(rows, of_masks)
        if rows is not None:
            lead = problem.batch if rows.shape[0] != 1 else (1,) * len(problem.batch)
            found[name] = rows.reshape(*lead, *rows.shape[1:])
    return found


def _through_table(problem: Problem, x: Operands, stop: Array) -> Arrays:
    """Return the table, whose pages are all there, and a query of NaN where one was not."""
    table: Any = x.block_table
    rank, pages = len(stop.shape), x.key.shape[0]
    table = with_rank(table[..., None, None, :], rank)
    begins = with_rank(jnp.arange(0, problem.key_length, problem.page, "int32"), rank)
    is_wrong = (begins < jnp.max(stop, -1, keepdims=True)) & ((table < 0) | (table >= pages))
    query = jnp.where(jnp.any(is_wrong, -1, keepdims=True), jnp.nan, with_rank(x.query, rank))
    return {"query": query, "table": jnp.clip(table, 0, pages - 1).astype("int32")}


def _words_of(seed: Any) -> tuple[Array, Array]:
    """Return the low and high word of a seed."""
    if isinstance(seed, tuple):
        return seed
    high = seed >> 32 if seed.dtype.itemsize > 4 else jnp.zeros_like(seed)
    return seed.astype("uint32"), high.astype("uint32")


def by_distance(problem: Problem, x: Operands, carried: Any) -> Array | None:
    """Return what the score expression with these arrays adds at each distance, if it does.

    The axes are (..., H, 1, n), from the first key and the last row on.
    """
    exact = [array.astype(problem.accumulator) for array in carried]
    rest = scale_and_rest(problem, filled(problem.score_spec, exact))[1]
    if not rest:
        return None
    rank, rows, keys = len(problem.batch) + 3, problem.query_length, problem.key_length
    offset: Any = x.query_offset if problem.query_offset is None else problem.query_offset
    offset = jnp.asarray(saturating_sum(offset, 0, jnp, jnp.dtype("int32"), LIMIT))
    away = with_rank(jnp.arange(1 - rows, keys, dtype="int32"), rank) - with_rank(offset, rank)
    head = with_rank(jnp.arange(problem.heads, dtype="int32").reshape(-1, 1, 1), rank)
    zero = jnp.zeros((1,) * rank, "int32")
    at = PointIndices(zero, head, zero, away)
    shape = (*away.shape[:-3], problem.heads, 1, away.shape[-1])
    numbers = jnp.zeros(shape, problem.accumulator)
    for part in rest:
        numbers = part.apply(numbers, at)
    return numbers


# ---- back ----


@dataclass(frozen=True, eq=False, repr=False)
class DistanceBias(Score):
    """Numbers (..., H, 1, L + S - 1), added by the distance of a key from its row."""

    name: ClassVar[str] = "distance_bias"
    numbers: Any
    rows: int

    def apply(self, scores: Array, at: Any) -> Array:
        """Return scores with the numbers added."""
        index = (at.column - at.row + (self.rows - 1)).reshape(at.row.shape[-2], -1)
        return scores + jnp.take(self.numbers[..., 0, :], index, axis=-1)


def operands(problem: Problem, arrays: Arrays) -> tuple[Problem, Operands]:
    """Return a call of the library as one of a kernel, which reads whole keys and one mask."""
    arrays = gathered(arrays, arrays)
    column = with_rank(jnp.arange(problem.key_length, dtype="int32"), len(problem.batch) + 3)
    ends = {"first": operator.ge, "stop": operator.lt}
    # (..., L, S, n)
    of_ranges = [
        sees(column[..., None], arrays[name][..., None, :])
        for name, sees in ends.items()
        if name in arrays
    ]
    conditions = [jnp.any(functools.reduce(operator.and_, of_ranges), -1)] if of_ranges else []
    conditions += [arrays["mask"]] if "mask" in arrays else []
    mask = functools.reduce(operator.and_, conditions) if conditions else None
    bias, sinks, numbers = map(arrays.get, ("bias", "sinks", "by_distance"))
    rule = None if numbers is None else DistanceBias(numbers, problem.query_length)
    features = {"mask": mask, "bias": bias, "sinks": sinks, "score_expression": rule}
    features |= {"softcap": problem.softcap, "dropout": arrays.get("seed")}
    features |= {"causal": problem.is_causal or None, "window": any(problem.window) or None}
    problem = problem._replace(
        features=frozenset(["logsumexp", *[n for n, one in features.items() if one is not None]]),
        mask=None if mask is None else mask.shape,
        bias=None if bias is None else bias.shape,
        score_spec=None if rule is None else rule.spec(),
        dropout_start=None,
    )
    words = arrays.get("seed", jnp.zeros(6, "uint32"))
    return problem, Operands(
        arrays["query"], arrays["key"], arrays["value"], mask=mask, bias=bias, sinks=sinks,
        score_mod=rule, seed=(words[0], words[1]), dropout_start=words[2:],
    )  # fmt: skip


def gathered(given: Arrays, call: Arrays) -> Arrays:
    """Return arrays by name, those of pools as contiguous copies of the pages that a call reads."""
    if "table" not in call:
        return given
    lengths = jnp.max(call["stop"], (-3, -2, -1))
    x = Operands.of_options(block_table=call["table"][..., 0, 0, :], key_lengths=lengths)
    # Pools have as many axes as the other arrays.
    pools = {n: given[n].reshape(given[n].shape[-4:]) for n in POOLS if n in given}
    x = in_one_piece(x._replace(**pools))
    return {n: getattr(x, n) if n in POOLS else a for n, a in given.items() if n != "table"}
