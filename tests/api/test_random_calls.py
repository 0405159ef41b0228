"""Random calls, large ones too, against the textbook formula in float64.

Each call is made from its number only.
"""

import numpy as np
import pytest
from arrays import draw
from optional import torch
from random_options import random_options

from polyattn import attention, scores
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


def random_call(seed):
    """Return query, key and value of float32 in NumPy, and options of `attention`."""
    rng = np.random.default_rng(seed)
    batch, heads, groups, rows, keys, size, value_size = shapes(rng)

    def chance(share):
        return rng.random() < share

    one_less = tuple(1 if chance(0.2) else n for n in batch)
    arrays = draw(
        (*batch, heads, rows, size),
        (*one_less, groups, keys, size),
        (*batch, groups, keys, value_size),
        seed=seed,
    )
    options = random_options(seed, *batch, heads, rows, keys)
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


@np.errstate(all="ignore")
def check(seed, library):
    """Hold a sample of a call's rows against the formula."""
    arrays, options = random_call(seed)
    layout = options.get("layout")
    last = arrays[0].shape[-3 if layout else -2] - 1
    rows = tuple({0, last, *np.random.default_rng(seed).integers(0, last + 1, 6).tolist()})
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
