"""Keys in pages in programs of XLA: read through a table, or copied where only whole keys do."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from polyattn.plugin import Array, Operands, Problem, in_one_piece, with_rank

#: With a table, these lie in pages, and have no axes of the batch.
POOLS = ("key", "value")


def through_table(problem: Problem, x: Operands, stop: Array) -> dict[str, Array]:
    """Return the table, whose pages are all there, and a query of NaN where one was not."""
    table: Any = x.block_table
    rank, pages = len(stop.shape), x.key.shape[0]
    table = with_rank(table[..., None, None, :], rank)
    begins = with_rank(jnp.arange(0, problem.key_length, problem.page, "int32"), rank)
    is_wrong = (begins < stop) & ((table < 0) | (table >= pages))
    query = jnp.where(jnp.any(is_wrong, -1, keepdims=True), jnp.nan, with_rank(x.query, rank))
    return {"query": query, "table": jnp.clip(table, 0, pages - 1).astype("int32")}


def without_pages(given: dict[str, Array], call: dict[str, Array]) -> dict[str, Array]:
    """Return arrays by name, those of pools as copies of the pages that a call reads."""
    if "table" not in call:
        return given
    lengths = jnp.max(call["stop"], (-3, -2, -1))
    x = Operands.of_options(block_table=call["table"][..., 0, 0, :], key_lengths=lengths)
    pools = {n: a.reshape(a.shape[-4:]) for n, a in given.items() if n in POOLS}
    x = in_one_piece(x._replace(**pools))
    return {n: getattr(x, n) if n in POOLS else a for n, a in given.items() if n != "table"}
