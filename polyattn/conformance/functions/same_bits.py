"""Count the rows of any function that have other bits where their sequence is cut."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyattn._base.text_table import table
from polyattn.conformance.cases.cache_cases import Arguments
from polyattn.conformance.cases.case import Array, with_arrays
from polyattn.conformance.checks.cuts import CUTS, HEADS, CutCase, Run
from polyattn.conformance.checks.target import Target
from polyattn.conformance.functions.serving import Function, NoArgumentError
from polyattn.conformance.functions.signatures import arguments_for, in_our_words


def rows_with_other_bits(function: Function, target: Target) -> dict[str, str | tuple[int, int]]:
    """Return how many rows differ, and of how many, or why that is not known, by cut and dtype."""
    found: dict[str, str | tuple[int, int]] = {}
    run = runner(in_our_words(function), target)
    for dtype in ("float32", "float16", "bfloat16"):
        for cut in CUTS if target.has(dtype) else ():
            case = CutCase(cut, "window" if cut == "keys evicted" else "causal", dtype, 64)
            try:
                found[f"{cut}, {dtype}"] = case.differing(run, HEADS)
            except NoArgumentError as error:
                found[f"{cut}, {dtype}"] = f"no argument for {error}"
            except Exception as error:
                found[f"{cut}, {dtype}"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def lines(found: dict[str, str | tuple[int, int]]) -> list[str]:
    """Return the results as the lines of a table."""
    texts = [("", "rows with other bits than in the whole call")]
    for name, one in found.items():
        texts.append((name, one if isinstance(one, str) else f"{one[0]:,} of {one[1]:,}"))
    return table(texts)


def runner(function: Function, target: Target) -> Run:
    """Return a function that calls another, whose names are ours, and gives its output."""

    def run(arguments: Arguments) -> tuple[Array, ...]:
        keywords = arguments_for(function, _in_plain_words(arguments))
        given = {name: with_arrays(x, target.to) for name, x in keywords.items()}
        returned = function(*(target.to(x) for x in arguments[0]), **given)
        return (target.back(returned[0] if isinstance(returned, tuple) else returned),)

    return run


def _in_plain_words(arguments: Arguments) -> dict[str, Any]:
    """Return options that mean the same to all: a mask as an array where L is not S."""
    (query, key, _), options = arguments
    offset, causal = options.get("query_offset", 0), options.get("is_causal", False)
    if "block_table" in options:
        others = {name: x for name, x in options.items() if name != "query_offset"}
        return others if query.shape[2] > 1 else {n: others[n] for n in others if n != "is_causal"}
    i, j = np.arange(query.shape[2])[:, None], np.arange(key.shape[2])
    within = (j <= i + offset) if causal else (i >= 0) & (j >= 0)
    mask = options.get("mask", True)
    seen = within & (mask(0, 0, i, j) if callable(mask) else mask)
    seen = seen & (j < options.get("key_lengths", [len(j)])[0])
    if "window" in options:
        seen = seen & (j >= i + offset - options["window"][0])
    if seen.all():
        return {}
    if causal and len(i) == len(j) and np.array_equal(seen, within):
        return {"is_causal": True}
    return {"mask": np.broadcast_to(seen, (1, 1, len(i), len(j)))}
