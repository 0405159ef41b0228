"""Variable-length keys: what a length means with other options, and which are refused."""

import importlib
import re

import numpy as np
import pytest
from arrays import close, draw
from optional import da, jax, jnp, torch

from polyattn import attention, nn, parallel, scores

pytestmark = pytest.mark.with_native

B, H, G, L, S, D = 4, 4, 2, 3, 9, 8
QUERY, KEY, VALUE = draw((B, H, L, D), (B, G, S, D), (B, G, S, D), dtype="float64")
LENGTHS = np.array([9, 4, 1, 0])


def one_by_one(query=QUERY, key=KEY, value=VALUE, lengths=LENGTHS, **options):
    """Attend item by item, to the keys that each has."""
    return np.stack(
        [
            attention(query[b], key[b][:, :n], value[b][:, :n], **options)
            for b, n in enumerate(lengths)
        ]
    )


def test_alibi_counts_from_the_last_key_of_each_item():
    options = {"score_mod": scores.alibi(H)}
    output = attention(QUERY, KEY, VALUE, key_lengths=LENGTHS, **options)
    close(output, one_by_one(**options))


@pytest.mark.parametrize("dtype", ["uint8", "uint64", ">i8"])
def test_lengths_of_any_integers(dtype):
    lengths = LENGTHS.astype(dtype)
    output = attention(QUERY, KEY, VALUE, key_lengths=lengths, is_causal=True)
    close(output, one_by_one(is_causal=True))
    given = map(torch.from_numpy, (QUERY, KEY, VALUE))
    close(attention(*given, key_lengths=lengths.tolist()), one_by_one())


SCALES = {
    "alone": {},
    "a softcap": {"softcap": 2.0, "is_causal": True},
    "cosine": {"similarity": scores.cosine()},
}


@pytest.mark.parametrize("options", SCALES)
@pytest.mark.parametrize("length", [0, 4])
def test_the_scale_of_long_sequences_is_that_of_the_length(options, length):
    options = SCALES[options] | {"scale": scores.long_sequence()}
    expected = one_by_one(lengths=[length] * B, **options)
    for n in (9, length):  # one after another: no plan of another length runs
        output = attention(QUERY, KEY, VALUE, key_lengths=n, **options)
    close(output, expected)
    cut = [da.from_array(x, chunks=(2, 2, 3, -1)) for x in (QUERY, KEY, VALUE)]
    found = attention(*cut, key_lengths=length, **options).compute()
    close(found, expected)

    def on_each_rank(ranks):
        part = slice(3 * ranks.rank, 3 * ranks.rank + 3)
        own = {"key_lengths": length, "strategy": "decode", **options}
        return parallel.attention(QUERY, KEY[:, :, part], VALUE[:, :, part], over=ranks, **own)

    for output in parallel.run_threads(3, on_each_rank):
        close(output, expected)


def test_the_scale_of_long_sequences_needs_one_length():
    options, token = {"scale": scores.long_sequence()}, KEY[:, :, :1]
    said = r"is one number for all items.* multiply the query of an item by its length \*\* -0.5"
    for backend in ("numpy", "dask", "onnxruntime"):
        with pytest.raises(ValueError, match=said):
            attention(QUERY, KEY, VALUE, key_lengths=LENGTHS, backend=backend, **options)
    importlib.import_module("polyattn.integrations.jax").register()
    token = jnp.asarray(token)
    cache = nn.KVCache.init(G, D, 16, like=token, batch=(B,)).append(token, token)

    def step(cache, query):
        return attention(query, cache.keys, cache.values, **cache.options(options))

    step(cache, jnp.asarray(QUERY[:, :, :1]))
    with pytest.raises(ValueError, match=said):
        jax.jit(step)(cache, jnp.asarray(QUERY[:, :, :1]))
    scaled = QUERY * np.maximum(LENGTHS, 1)[:, None, None, None] ** -0.5
    output = attention(scaled, KEY, VALUE, key_lengths=LENGTHS)
    close(output, one_by_one(**options))


def test_ranks_get_their_parts():
    def on_each_rank(ranks):
        part = slice(3 * ranks.rank, 3 * ranks.rank + 3)
        query = QUERY[:, :, ranks.rank : ranks.rank + 1]
        options = {"key_lengths": LENGTHS, "is_causal": True, "strategy": "ring"}
        return parallel.attention(query, KEY[:, :, part], VALUE[:, :, part], over=ranks, **options)

    expected = one_by_one(is_causal=True)
    for rank, output in enumerate(parallel.run_threads(3, on_each_rank)):
        close(output, expected[:, :, rank : rank + 1])


RANGE = "key_lengths must be from 0 to S = 9, the number of keys in the arrays; got"
KIND = "key_lengths must be an integer or an integer array of the batch"


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        (-1, ValueError, f"{RANGE} -1"),
        ([1, 2, 3, -4], ValueError, f"{RANGE} [1, 2, 3, -4]"),
        (np.array([1, 2, 3, 10]), ValueError, f"{RANGE} array([ 1,  2,  3, 10])"),
        (LENGTHS[:, None], ValueError, "must broadcast to the batch axes (4,); got (4, 1)"),
        (2.0, TypeError, f"{KIND}, the number of keys of each item; got 2.0"),
        ([1.0, 2.0, 3.0, 4.0], TypeError, KIND),
    ],
)
def test_wrong_lengths_are_refused(lengths, error, message):
    for to in (np.asarray, torch.from_numpy):
        with pytest.raises(error, match=re.escape(message)):
            attention(*map(to, (QUERY, KEY, VALUE)), key_lengths=lengths)
