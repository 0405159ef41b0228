"""Count the rows of any function that have other bits where their sequence is cut."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyattn._base.text_table import table
from polyattn.conformance.cases.cache_cases import Arguments
from polyattn.conformance.cases.case import Array
from polyattn.conformance.checks.cuts import CUTS, HEADS, Run, differing
from polyattn.conformance.checks.target import Target
from polyattn.conformance.functions.signatures import (
    Function,
    NoArgumentError,
    arguments_for,
    in_our_words,
)

Counts = dict[str, str | tuple[int, int]]


def rows_with_other_bits(function: Function, target: Target) -> Counts:
    """Return how many rows differ, and of how many, or why that is not known, by cut and dtype."""
    found: Counts = {}
    run = runner(in_our_words(function), target)
    for dtype in ("float32", "float16", "bfloat16"):
        for cut in CUTS if target.has(dtype) else ():
            options = "window" if cut == "keys evicted" else "causal"
            try:
                one: Any = differing(cut, options, dtype, run, HEADS, 64)
            except NoArgumentError as error:
                one = f"no argument for {error}"
            except Exception as error:
                one = f"{type(error).__name__}: {error}".splitlines()[0]
            found[f"{cut}, {dtype}"] = one
    return found


def lines(found: Counts) -> list[str]:
    """Return the counts as the lines of a table."""
    texts = [x if isinstance(x, str) else f"{x[0]:,} of {x[1]:,}" for x in found.values()]
    head = ("", "rows with other bits than in the whole call")
    return table([head, *zip(found, texts, strict=True)])


def runner(function: Function, target: Target) -> Run:
    """Return a function that calls another, whose names are ours, and gives its output."""

    def run(arguments: Arguments) -> tuple[Array, ...]:
        keywords = arguments_for(function, _in_plain_words(arguments))
        arrays, given = target.placed((arguments[0], keywords))
        returned = function(*arrays, **given)
        return (target.back(returned[0] if isinstance(returned, tuple) else returned),)

    return run


def _in_plain_words(arguments: Arguments) -> dict[str, Any]:
    """Return options that mean the same to all: a mask as an array where L is not S."""
    (query, key, _), options = arguments
    if "block_table" in options:  # one row sees all keys
        left_out = {"query_offset"} | ({"is_causal"} if query.shape[2] == 1 else set())
        return {name: x for name, x in options.items() if name not in left_out}
    j = np.arange(key.shape[2])
    p = np.arange(query.shape[2])[:, None] + options.get("query_offset", 0)
    left, _ = options.get("window", (len(j), 0))
    within = (j <= p) if options.get("is_causal") else np.full((len(p), len(j)), True)
    mask = options.get("mask", True)
    seen = within & (mask(0, 0, p, j) if callable(mask) else mask) & (j >= p - left)
    seen = seen & (j < options.get("key_lengths", [len(j)])[0])
    if seen.all():
        return {}
    if len(p) == len(j) and np.array_equal(seen, within):
        return {"is_causal": True}
    return {"mask": np.broadcast_to(seen, (1, 1, len(p), len(j)))}
