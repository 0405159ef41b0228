"""Random calls, large ones too, against the textbook formula in float64.

Each call is made from its number only.
"""

import numpy as np
import pytest
from optional import torch
from random_options import random_options

from polyattn import attention, masks, scores
from polyattn.conformance.cases.case import with_arrays
from polyattn.conformance.reference.textbook import textbook

# Lengths at which blocks of rows, tiles and parts of keys begin or end.
EDGES = (1, 2, 15, 16, 17, 127, 128, 129, 511, 512, 513, 1024, 1025, 2048, 4096, 5000)
MOST_SCORES = 2**23
LIBRARIES = {"numpy": np.asarray, "torch": torch.asarray}


def length(rng):
    if rng.random() < 0.4:
        return int(rng.choice(EDGES))
    return int(np.exp(rng.uniform(0, np.log(5000))))


def shapes(rng):
    """Return the batch axes, H, G, L, S, D and E of a call of at most `MOST_SCORES` scores."""
    while True:
        batch = (int(rng.integers(1, 5)),)
        groups, members = rng.integers(1, 4, size=2).tolist()
        rows, keys = length(rng), length(rng)
        if np.prod(batch, dtype=int) * groups * members * rows * keys <= MOST_SCORES:
            size = int(rng.choice([1, 3, 8, 16]))
            value_size = size if rng.random() < 0.7 else int(rng.choice([1, 5, 12]))
            return batch, groups * members, groups, rows, keys, size, value_size


def ids(rng, batch, tokens):
    found = rng.integers(0, 6, size=(*batch, tokens)).astype(rng.choice(["int64", "int8"]))
    return found if rng.random() < 0.3 else np.sort(found, axis=-1)


def random_mask(rng, batch, heads, rows, keys, depth=0):
    """Return a mask of any kind, or masks joined."""
    if depth < 2 and rng.random() < 0.35:
        one, other = (random_mask(rng, batch, heads, rows, keys, depth + 1) for _ in range(2))
        return ~one if rng.random() < 0.2 else one & other if rng.random() < 0.5 else one | other
    own_batch = batch if rng.random() < 0.5 else ()

    def lengths(most):
        if rng.random() < 0.4:
            return int(rng.integers(0, most + 2))
        return rng.integers(0, most + 2, size=own_batch)

    def array():
        last = (heads, rows, keys), (1, rows, keys), (1, 1, keys), (heads, rows, 1)
        shape = (*([1] * (len(batch) - len(own_batch))), *own_batch, *last[rng.integers(4)])
        found = rng.random(shape) < rng.choice([0.02, 0.5, 0.98])
        found[..., : shape[-2] // 2, :] &= rng.random() < 0.7
        return found

    kinds = (
        lambda: masks.causal(),
        lambda: masks.window(*(None if x > 900 else int(x) for x in rng.integers(0, 1000, 2))),
        lambda: masks.prefix(lengths(keys)),
        lambda: masks.padding(lengths(keys), lengths(rows) if rng.random() < 0.3 else None),
        lambda: masks.segments(ids(rng, own_batch, rows), ids(rng, own_batch, keys)),
        lambda: masks.positions(
            ids(rng, own_batch, rows) * 5,
            ids(rng, own_batch, keys) * 5 - 1,
            masks.window(int(rng.integers(0, 20)), 0) | masks.prefix(2),
        ),
        lambda: masks.tree(
            np.maximum(np.arange(rows) - rng.integers(1, 5, (*own_batch, rows)), -1)
        ),
        lambda: masks.dilated(int(rng.integers(1, 200))),
        lambda: (
            masks.neighborhood((keys,), (min(keys, 9),), stride=2 if keys > 1 else 1)
            if keys
            else masks.causal()
        ),
        lambda: masks.global_tokens(*rng.integers(0, keys + 1, 3).tolist()),
        lambda: masks.dense(array()),
        lambda: masks.rule(lambda b, h, i, j: (i // 100 + j // 64 + h + b) % 3 > 0),
    )
    return kinds[rng.integers(len(kinds))]()


def random_call(seed):
    """Return query, key and value of float32 in NumPy, and options of `attention`."""
    rng = np.random.default_rng(seed)
    batch, heads, groups, rows, keys, size, value_size = shapes(rng)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    def chance(share):
        return rng.random() < share

    one_less = tuple(1 if chance(0.2) else n for n in batch)
    arrays = [
        normal(*batch, heads, rows, size),
        normal(*one_less, groups, keys, size),
        normal(*batch, groups, keys, value_size),
    ]
    options = random_options(seed, *batch, heads, rows, keys)
    if chance(0.5):
        options["mask"] = random_mask(rng, batch, heads, rows, keys)
    if chance(0.05):
        options["similarity"] = scores.cosine()
    if chance(0.04):
        options["normalizer"] = (scores.sigmoid(), scores.sparsemax())[rng.integers(2)]
        options.pop("sinks", None)
    if rows * keys * heads >= 2**16:
        options.pop("dropout", None)
    if chance(0.2):
        options["layout"] = "...LHD"
        arrays = [np.ascontiguousarray(np.swapaxes(x, -3, -2)) for x in arrays]
    return arrays, options


def sample(rng, rows):
    """Return some rows: the ends, and others."""
    return tuple(sorted({0, rows - 1, *rng.integers(0, rows, size=6).tolist()}))


@np.errstate(all="ignore")
def check(seed, library):
    """Hold a sample of a call's rows against the formula."""
    arrays, options = random_call(seed)
    layout = options.get("layout")
    rows = sample(np.random.default_rng(seed), arrays[0].shape[-3 if layout else -2])
    wide = {name: with_arrays(x, widened) for name, x in options.items()}
    exact, _ = textbook(*(x.astype("float64") for x in arrays), **wide, rows=rows)
    to = LIBRARIES[library]
    given = {name: with_arrays(x, to) for name, x in options.items()}
    found = np.asarray(attention(*map(to, arrays), **given))
    assert found.dtype == np.float32
    found = np.take(found, rows, axis=-3 if layout else -2)
    np.testing.assert_allclose(found, exact, rtol=2e-3, atol=2e-4)


def widened(x):
    return x.astype("float64") if x.dtype == np.float32 else x


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("first", range(0, 160, 40))
def test_random_calls(library, first):
    for seed in range(first, first + 40):
        try:
            check(seed, library)
        except Exception as error:
            raise AssertionError(f"call {seed}: {random_call(seed)[1]}") from error
