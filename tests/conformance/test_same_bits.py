"""Cuts of a sequence: that right functions have the same bits in each, and others do not."""

import functools
import json

import numpy as np
import pytest

from polyattn.cli import main
from polyattn.conformance.checks.cuts import CUTS, HEADS, LENGTH, differing
from polyattn.conformance.checks.target import Target
from polyattn.conformance.functions.same_bits import rows_with_other_bits, runner

ON_NUMPY = Target("array-api", "numpy")


def in_order(query, key, value, *, mask=None, is_causal=False, block):
    """Attention whose sums are over keys in order, in blocks that begin at multiples of one."""
    rows, keys = query.shape[2], key.shape[2]
    seen = np.tri(rows, keys, dtype=bool) if is_causal else np.ones((1, 1, rows, keys), bool)
    seen = np.broadcast_to(seen if mask is None else mask, (*query.shape[:3], keys))
    output = np.zeros_like(query)
    for at in np.ndindex(query.shape[:3]):
        if not seen[at].any():
            continue
        key_of, value_of = (x[at[:2]][seen[at]] for x in (key, value))
        scores = (key_of * query[at]).sum(-1)
        weights = np.exp(scores - scores.max())[:, None]
        begins = np.flatnonzero(np.diff(np.flatnonzero(seen[at]) // block, prepend=-1))
        total, weighted = (
            functools.reduce(np.add, [np.add.accumulate(x)[-1] for x in np.split(y, begins[1:])])
            for y in (weights, weights * value_of)
        )
        output[at] = weighted / total
    return output


def count(cut, block):
    options = "window" if cut == "keys evicted" else "causal"
    function = functools.partial(in_order, block=block)
    return differing(cut, options, "float32", runner(function, ON_NUMPY), HEADS, 8)


@pytest.mark.parametrize("cut", ["decoded", "keys evicted"])
def test_one_order_of_sums_gives_the_same_bits(cut):
    different, rows = count(cut, block=2 * LENGTH)
    assert (different, rows >= 80) == (0, True)


def test_blocks_that_begin_at_key_0_show_where_other_keys_come_first():
    assert count("keys evicted", block=256)[0] > 0


@pytest.mark.slow
def test_the_command_counts_the_rows_of_a_function(capsys):
    assert main(["check", "--callable", "polyattn:attention", "--same-bits", "--json"]) == 1
    counts = json.loads(capsys.readouterr().out)
    assert {name.rpartition(", ")[0] for name in counts} == set(CUTS)
    assert counts["decoded, float32"][0] > 40
    assert counts["decoded, float32"][1] == 88


def test_what_a_function_has_no_argument_for_or_raises_is_said():
    found = rows_with_other_bits(lambda query, key, value, is_causal=False: 1 / 0, ON_NUMPY)
    assert set(found.values()) == {
        "ZeroDivisionError: division by zero",
        "no argument for mask",
    }
