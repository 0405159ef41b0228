"""Dropout: the published generator, the same bits in every library and for every tile."""

import numpy as np
import pytest
from arrays import FAR, NUMPY, STRICT, TORCH, Library
from optional import jax, jnp, torch

from polyattn import attention
from polyattn._base.arrays import library_of
from polyattn._core.tiles.dropout import philox
from polyattn.conformance.reference import philox as philox_reference

JAX = Library("jax", jnp.asarray, np.asarray, ("float32",))
B, H, G, L, S = 2, 4, 2, 9, 23
RNG = np.random.default_rng(3)
# Weights that are all alike, and values of which each key has its own, so that the output tells
# which keys were kept.
QUERY = np.zeros((B, H, L, 3), np.float32)
KEY = RNG.normal(size=(B, G, S, 3)).astype(np.float32)
VALUE = np.broadcast_to(np.eye(S, dtype=np.float32), (B, G, S, S))
RATE, SEED = 0.3, 2**40 + 17

# Of kat_vectors in Random123, the authors' own: counter, key, words.
PUBLISHED = [
    ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
]


def expected(seed=SEED):
    return philox_reference.keep_mask(RATE, seed, (B,), (H, L, S)) / (1 - RATE) / S


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
@pytest.mark.parametrize("to", [np.uint32, torch.tensor], ids=["numpy", "torch"])
def test_philox_gives_the_published_words(to, counter, key, words):
    arrays = tuple(to([word]) for word in counter)
    found = philox(library_of(arrays[0]).xp, arrays, key)
    assert tuple(int(word[0]) for word in found) == words
    assert philox_reference.philox(counter, key) == words


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_a_seed_and_a_start_may_be_unsigned(dtype):
    arrays = [torch.tensor(x) for x in (QUERY, KEY, VALUE)]
    seed, start = torch.tensor(12345, dtype=dtype), torch.zeros(4, dtype=dtype)
    output = attention(*arrays, dropout=(RATE, seed, start)).numpy()
    np.testing.assert_array_equal(output != 0, expected(12345) != 0)


@pytest.mark.parametrize("library", [STRICT, FAR, JAX], ids=str)
def test_a_seed_may_be_an_array(library):
    arrays = [library.to(x) for x in (QUERY, KEY, VALUE)]
    seed = library.to(np.asarray(12345, np.int32))

    def dropped(*arrays, seed):
        return attention(*arrays, dropout=(RATE, seed), backend="array-api")

    dropped = jax.jit(dropped) if library is JAX else dropped
    output = library.back(dropped(*arrays, seed=seed))
    np.testing.assert_array_equal(output != 0, expected(12345) != 0)


def test_the_share_that_is_dropped_is_the_rate():
    for rate in (0.001, 0.5, 0.9):
        kept = philox_reference.keep_mask(rate, 7, (1,), (4, 32, 64))
        assert abs(kept.mean() - (1 - rate)) < 5 * (rate * (1 - rate) / kept.size) ** 0.5


FOUR = "four integers of at least 0"


@pytest.mark.parametrize(
    ("dropout", "error", "words"),
    [
        ((0.1, 2**64), ValueError, "2\\*\\*64"),
        ((0.1, -1), ValueError, "-1"),
        ((0.1, np.array([1, 2])), TypeError, "one integer"),
        ((0.1, np.array(1.0)), TypeError, "one integer"),
        ((0.1, 0, (1, 2, 3)), TypeError, FOUR),
        ((0.1, 0, (0, 0, -1, 0)), ValueError, FOUR),
        ((0.1, 0, 4), TypeError, FOUR),
        ((0.1, 0, np.zeros(4)), TypeError, FOUR),
    ],
    ids=str,
)
def test_what_is_no_dropout_is_refused(dropout, error, words):
    with pytest.raises(error, match=words):
        attention(QUERY, KEY, VALUE, dropout=dropout)


@pytest.mark.parametrize("library", [NUMPY, TORCH], ids=str)
def test_a_part_drops_what_the_whole_drops_there(library):
    whole = attention(QUERY, KEY, VALUE, dropout=(RATE, SEED)) != 0
    keys, rows = slice(2, 15), slice(3, 8)
    given = QUERY[1:, 2:, rows], KEY[1:, 1:, keys], VALUE[1:, 1:, keys]
    for start in ((1, 2, 3, 2), library.to(np.array([1, 2, 3, 2]))):
        part = attention(*map(library.to, given), dropout=(RATE, SEED, start))
        kept = library.back(part)[..., keys] != 0
        np.testing.assert_array_equal(kept, whole[1:, 2:, rows, keys])
