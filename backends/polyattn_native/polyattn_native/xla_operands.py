"""Arrays of a call of the library as operands of a kernel that reads neither pages nor ranges."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax.numpy as jnp

from polyattn.plugin import Array, Operands, Problem, in_one_piece, with_rank
from polyattn_native.xla_scores import expression, shapes_of

Arrays = dict[str, Array]
#: With a table these lie in pages, and have no batch axes.
POOLS = ("key", "value")


def operands(problem: Problem, arrays: Arrays) -> tuple[Problem, Operands]:
    """Return a call of the library as one of a kernel, which reads whole keys and one mask."""
    arrays = without_pages(arrays, arrays)
    column = with_rank(jnp.arange(problem.key_length, dtype="int32"), len(problem.batch) + 3)
    ends = {"first": operator.ge, "stop": operator.lt}
    conditions = [sees(column, arrays[name]) for name, sees in ends.items() if name in arrays]
    conditions += [arrays["mask"]] if "mask" in arrays else []
    mask = functools.reduce(operator.and_, conditions) if conditions else None
    features = (problem.features - {"mask"}) | {"logsumexp"}
    features |= set() if mask is None else {"mask"}
    features |= {"causal"} if problem.is_causal else set()
    features |= {"window"} if problem.window != (None, None) else set()
    bias = arrays.get("bias")
    problem = problem._replace(
        features=features,
        mask=None if mask is None else mask.shape,
        bias=None if bias is None else bias.shape,
    )
    seed: Any = (arrays["seed_low"], arrays["seed_high"]) if "seed_low" in arrays else None
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    return problem, Operands(
        query, key, value, mask=mask, bias=bias, sinks=arrays.get("sinks"), seed=seed,
        dropout_start=arrays.get("start"), query_offset=arrays.get("positions"),
        score_mod=expression(problem, [arrays[name] for name in shapes_of(problem)]),
    )  # fmt: skip


def without_pages(given: Arrays, call: Arrays) -> Arrays:
    """Return arrays by name, those of pools as copies of the pages that a call reads."""
    if "table" not in call:
        return given
    lengths = jnp.max(call["stop"], (-3, -2, -1))
    x = Operands.of_options(block_table=call["table"][..., 0, 0, :], key_lengths=lengths)
    pools = {n: a.reshape(a.shape[-4:]) for n, a in given.items() if n in POOLS}
    x = in_one_piece(x._replace(**pools))
    return {n: getattr(x, n) if n in POOLS else a for n, a in given.items() if n != "table"}
