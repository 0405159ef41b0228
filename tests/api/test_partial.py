"""Partial attention and merging: the monoid of partials over disjoint sets of keys."""

import math
from itertools import pairwise, permutations

import numpy as np
import pytest
from arrays import LIBRARIES, NUMPY, STRICT, TORCH, tiles_of
from optional import torch

from polyattn import Partial, attention_partial, merge
from polyattn.conformance import CASES, assert_accurate

KERNELS = {"dense": "dense", "tiles": tiles_of(8)}


def partials_of(case, library, kernel, cuts):
    """The partials over pieces of the keys; the sinks belong to no key and go with the first."""
    (query, key, value), options = case.arguments()
    offset = options.pop("query_offset", case.S - case.L)
    edges = (0, *cuts, case.S)
    for first, last in pairwise(edges):
        own = {n: x[..., first:last] if n in ("mask", "bias") else x for n, x in options.items()}
        options.pop("sinks", None)
        own = {n: library.to(x) if isinstance(x, np.ndarray) else x for n, x in own.items()}
        arrays = (query, key[..., first:last, :], value[..., first:last, :])
        yield attention_partial(
            *map(library.to, arrays), **own, query_offset=offset - first, kernel=kernel
        )


MERGED = ["window", "bias as mask", "causal x sinks", "mask hides some rows", "rank 5"]


@pytest.mark.parametrize(
    ("name", "which", "library"),
    [(name, ("dense", "tiles")[turn % 2], LIBRARIES[turn % 3]) for turn, name in enumerate(MERGED)],
    ids=str,
)
def test_partials_merge_to_the_whole(name, which, library):
    """In any order and any grouping; so `merge` is associative and commutative up to rounding."""
    parts = list(partials_of(CASES[name], library, KERNELS[which], (3, 4)))
    wholes = [merge(*some) for some in permutations(parts)]
    a, b, c = parts
    wholes += [merge(merge(a, b), c), merge(a, merge(b, c)), merge(merge(c, a), b)]
    for whole in wholes:
        assert isinstance(whole, Partial)
        assert_accurate(library.back(whole.output), CASES[name], library.back(whole.logsumexp))


@pytest.mark.parametrize(("library", "dtype"), [(NUMPY, "float16"), (TORCH, "bfloat16")], ids=str)
def test_a_partial_for_every_key(library, dtype):
    case = CASES[f"causal, {dtype}"]
    whole = merge(*partials_of(case, library, "dense", range(1, case.S)))
    assert library.back(whole.output).dtype == dtype
    assert_accurate(library.back(whole.output), case, library.back(whole.logsumexp))


@pytest.mark.parametrize(
    ("name", "kernel", "library"),
    [("causal x L > S", "dense", TORCH), ("nan seen by later rows", "tiles", STRICT)],
    ids=str,
)
def test_the_identity_of_merge_changes_no_bit(name, library, kernel):
    partial = library.call(attention_partial, CASES[name], kernel=KERNELS[kernel])
    output, logsumexp = map(library.back, partial)
    nothing = Partial(
        library.to(np.zeros_like(output)), library.to(np.full_like(logsumexp, -np.inf))
    )
    for merged in (merge(partial), merge(partial, nothing), merge(nothing, partial, nothing)):
        assert np.array_equal(library.back(merged.output), output, equal_nan=True)
        assert np.array_equal(library.back(merged.logsumexp), logsumexp, equal_nan=True)


def test_a_nan_merges_into_its_own_rows_only():
    a, b = partials_of(CASES["plain"], NUMPY, "dense", (4,))
    clean = merge(a, b).output
    b.output[1, 1, 2], b.logsumexp[1, 1, 2] = math.nan, math.nan
    merged = merge(a, b).output
    assert np.isnan(merged[1, 1, 2]).all()
    merged[1, 1, 2] = clean[1, 1, 2]
    np.testing.assert_array_equal(merged, clean)


def test_merge_refuses_what_does_not_fit():
    x = np.ones((2, 5, 4), np.float32)
    one = attention_partial(x, x, x)
    for given, message in (
        ((), "at least one"),
        ((one, attention_partial(x[:1], x[:1], x[:1])), "one shape"),
        (((one.output, one.logsumexp[..., None]),), "without the last axis"),
        ((one, attention_partial(*(3 * [x.astype("f8")]))), "one dtype"),
        ((one, tuple(map(torch.from_numpy, one))), "one library"),
        (((x.astype(int), one.logsumexp),), "one of the dtypes float16"),
        (((one.output, one.logsumexp.astype(int)),), "one of the dtypes float16"),
        *(((no,), r"merge\(\*partials\)") for no in (None, 3, x, (x,), (x, x, x), [one, one], {})),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            merge(*given)
