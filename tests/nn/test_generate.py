"""Generation: transformers' own greedy tokens, and samples that are one on every library."""

import numpy as np
import pytest
from optional import torch
from tiny_models import DECODERS, FLOAT32, IDS, library, loaded

from polyattn import masks, nn
from polyattn.integrations.jax import register

# Small models whose output map is tied to the embedding repeat one token.
UNTIED = {"tie_word_embeddings": False}
SETTINGS = {f"{name} untied": DECODERS[name] | UNTIED for name in ("gpt2", "gemma3_text")}


@pytest.mark.with_native
@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_tokens_are_transformers_own(made, name):
    theirs = made(name, SETTINGS[name])
    model = loaded(theirs)
    ids = torch.from_numpy(IDS).long()
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options).numpy()
    assert len(np.unique(expected[:, IDS.shape[1] :])) > 3  # or any of them would be right
    np.testing.assert_array_equal(nn.generate(model, IDS, 24), expected)


def fixed(*probabilities):
    """Return a decoder that gives every next token these probabilities."""
    n = len(probabilities)
    embedding = nn.Embedding(np.zeros((n, 1)))
    output = nn.Linear(np.zeros((1, n)), np.log(probabilities))
    block = nn.EncoderBlock.init(1, 1, like=np.zeros(1), is_causal=True)
    return nn.Transformer(embedding, nn.Stack((block,)), output=output)


def shares(model, **options):
    """Return the shares of tokens among 2,000 samples."""
    found = nn.generate(model, np.zeros((100, 1), dtype=np.int64), 20, **options)[:, 1:]
    return np.bincount(found.ravel(), minlength=4) / found.size


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, [0.1, 0.4, 0.3, 0.2]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 9 / 30, 4 / 30]),
        ({"temperature": 1.0, "top_k": 2}, [0, 4 / 7, 3 / 7, 0]),
        ({"temperature": 1.0, "top_p": 0.69}, [0, 4 / 7, 3 / 7, 0]),
        ({"temperature": 1.0, "top_p": 0.71}, [0, 4 / 9, 3 / 9, 2 / 9]),
        ({"temperature": 1.0, "top_p": 1e-9}, [0, 1, 0, 0]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.5}, [0, 4 / 7, 3 / 7, 0]),
        ({}, [0, 1, 0, 0]),
    ],
)
def test_samples_have_the_probabilities_that_are_asked_for(options, expected):
    found = shares(fixed(0.1, 0.4, 0.3, 0.2), seed=3, **options)
    assert not found[np.asarray(expected) == 0].any()
    np.testing.assert_allclose(found, expected, atol=0.04)  # 3.6 standard deviations


def test_a_sequence_draws_the_same_samples_whatever_is_beside_it():
    model = fixed(0.1, 0.4, 0.3, 0.2)
    ids = np.zeros((3, 1), dtype=np.int64)
    whole = nn.generate(model, ids, 20, temperature=1.0, seed=5)
    np.testing.assert_array_equal(
        nn.generate(model, ids[:2], 20, temperature=1.0, seed=5), whole[:2]
    )
    np.testing.assert_array_equal(nn.generate(model, ids[0], 20, temperature=1.0, seed=5), whole[0])
    other = nn.generate(model, ids, 20, temperature=1.0, seed=6)
    assert len({tuple(row) for row in (*whole, *other)}) == 6


def test_logits_of_float64_are_compared_in_float64():
    model = nn.Transformer.init(50, 8, 2, 1, like=np.zeros(1), is_causal=True)
    last, weight = model.hidden(IDS, is_causal=True)[0, -1], np.zeros((8, 50))
    weight[:, 3], weight[:, 7] = last, last * (1 + 1e-12)
    model = model.with_parameters(model.parameters() | {"output.weight": weight})
    assert nn.generate(model, IDS[:1], 1)[0, -1] == 7


def test_a_stop_token_ends_its_row_and_the_last_one_ends_all():
    model, ids = fixed(0.2, 0.2, 0.2, 0.4), np.zeros((4, 1), dtype=np.int64)
    free = nn.generate(model, ids, 40, temperature=1.0)[:, 1:]
    ended = nn.generate(model, ids, 40, temperature=1.0, stop=[3, 2])[:, 1:]
    firsts = [int(np.argmax(np.isin(row, [2, 3]))) for row in free]
    assert ended.shape == (4, max(firsts) + 1)
    for row, until, before in zip(ended, firsts, free, strict=True):
        np.testing.assert_array_equal(row[: until + 1], before[: until + 1])
        assert (row[until:] == row[until]).all()
    for stop in (3, np.int64(3), np.asarray(3), np.asarray([3])):
        assert nn.generate(model, ids[0], 9, stop=stop).tolist() == [0, 3]
    assert nn.generate(model, ids[0], 9, stop=None).shape == (10,)


def test_a_callback_sees_each_token_and_can_end_the_generation():
    model, ids = fixed(0.1, 0.4, 0.3, 0.2), np.zeros((2, 3), dtype=np.int32)
    seen = []
    found = nn.generate(model, ids, 6, temperature=1.0, on_token=seen.append)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(np.stack(seen, axis=-1), found[:, 3:])
    assert nn.generate(model, ids, 6, on_token=lambda tokens: True).shape == (2, 4)


RAGGED = {
    "rotary": ({"rotary": nn.Rotary(4), "key_heads": 1}, {}),
    "learned positions": ({"positions": 16, "tied": True}, {}),
    "a mask of positions": (
        {"rotary": nn.Rotary(4)},
        {"mask": masks.causal() & (masks.window(2, 0) | masks.prefix(2)), "is_causal": False},
    ),
    "a mask that sees ahead": (
        {"positions": 16},
        {"mask": masks.causal() | masks.prefix(3), "is_causal": False},
    ),
}
PROMPTS = [[5, 7, 1, 2, 8, 3, 3], [4], [1, 2, 3]]


def small(to, **settings):
    return nn.Transformer.init(9, 8, 2, 1, like=to(FLOAT32), is_causal=True, seed=3, **settings)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("numpy", name) for name in RAGGED),
        ("torch", "rotary"),
        pytest.param("jax", "rotary", marks=pytest.mark.slow),
    ],
)
def test_prompts_of_different_lengths_are_continued_as_each_by_itself(kind, name):
    (settings, options), (to, back) = RAGGED[name], library(kind)
    own, model = small(np.asarray, **settings), small(to, **settings)
    alone = [nn.generate(own, np.asarray(p), 6, **options).tolist() for p in PROMPTS]
    if kind == "jax":
        register()
        options = {"jit": pytest.importorskip("jax").jit}
    assert nn.generate(model, PROMPTS, 6, **options) == alone
    if kind == "jax":
        return
    ids = np.full((3, 7), -1)
    for row, prompt in zip(ids, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    found = back(nn.generate(model, to(ids), 6, lengths=[7, 1, 3], **options))
    assert found.shape == (3, 13)
    for row, expected in zip(found.tolist(), alone, strict=True):
        assert row == expected + expected[-1:] * (13 - len(expected))


def test_a_listed_prompt_ends_with_the_token_that_stopped_it():
    model = fixed(0.2, 0.2, 0.2, 0.4)
    prompts = [[0, 0], [0], [1, 1, 1]]
    found = nn.generate(model, prompts, 40, temperature=1.0, stop=[3])
    assert len({len(row) for row in found}) > 1
    for row, prompt in zip(found, prompts, strict=True):
        assert row[: len(prompt)] == prompt
        assert row.index(3) == len(row) - 1
    assert nn.generate(model, [[0], [0]], 2) == [[0, 3, 3]] * 2


@pytest.mark.parametrize("kind", [nn.KVCache, nn.PagedCache, nn.QuantizedCache])
def test_caches_of_any_kind_hold_the_tokens_before_the_prompt(kind):
    model, ids = small(np.asarray, positions=16), np.asarray([[5, 7, 1], [8, 3, 3]])
    settings = {"window": 1, "block": 2} if kind is nn.QuantizedCache else {}
    caches = model.caches(16, batch=(2,), kind=kind, **settings)
    expected = nn.generate(model, ids, 4)
    np.testing.assert_array_equal(nn.generate(model, ids, 4, caches=caches), expected)
    _, caches = model.hidden(ids[:, :2], caches=caches, is_causal=True)
    found = nn.generate(model, ids[:, 2:], 4, caches=caches)
    np.testing.assert_array_equal(found, expected[:, 2:])
    if kind is nn.PagedCache:
        forked = tuple([cache.fork([0, 1, 0]) for cache in caches])
        found = nn.generate(model, [[1, 4], [3], [1]], 4, caches=forked)
        assert [found[1], found[2]] == [expected[1, 2:].tolist(), expected[0, 2:].tolist()]
        alone = nn.generate(model, np.asarray([5, 7, 1, 4]), 4)
        assert found[0] == alone[2:].tolist()


def test_a_compiled_step_is_refused_where_pages_lack():
    model = nn.Transformer.init(9, 8, 2, 1, like=FLOAT32, is_causal=True, tied=True)
    ids, settings = np.asarray([[1, 4, 3]]), {"batch": (1,), "kind": nn.PagedCache, "page": 2}
    caches = model.caches(4, **settings)
    _, grown = model(np.asarray([[5, 7, 1, 4, 3]]), caches=caches)
    assert grown[0].capacity == 8  # in a table for 4 pages, of which the pool has 3
    with pytest.raises(ValueError, match=r"cannot add pages, and the 4 of this .*, or more pages="):
        nn.generate(model, ids, 1, caches=grown, jit=lambda step: 1 / 0)
    found = nn.generate(model, ids[:, :1], 1, caches=grown, jit=lambda step: step)
    assert found.shape == (1, 2)


SHORT = nn.Transformer.init(9, 8, 2, 1, like=FLOAT32, is_causal=True, positions=8)
AHEAD = nn.Transformer.init(9, 8, 2, 1, like=FLOAT32, is_causal=False)
HALVES = fixed(0.5, 0.5)
WIDE = nn.Transformer(nn.Embedding(np.zeros((300, 2), np.float32)), HALVES.stack, tied=True)
ONE = np.zeros((1, 1), dtype=np.int64)


REFUSED = {
    "steps": ({"steps": 0}, "steps must be at least 1; got 0"),
    "temperature": ({"temperature": float("nan")}, "must be 0 or a positive number; got nan"),
    "top_p": ({"top_p": 0.0}, "top_p must be above 0 and at most 1; got 0"),
    "floats": ({"ids": np.zeros((1, 1))}, "ids must be integers of the shape"),
    "no tokens": ({"ids": ONE[:, :0]}, "ids must be integers of the shape"),
    "learned positions": ({"model": SHORT, "ids": ONE[0].repeat(4), "steps": 6}, "8 .* got 9 t"),
    "caches": ({"caches": [ONE]}, "a cache for each of the 1 blocks; got"),
    "capacity": (
        {"caches": HALVES.caches(4, batch=(1,)), "steps": 5, "jit": lambda step: 1 / 0},
        "5 tokens need a capacity of as many; got 4",
    ),
    "an empty prompt": (
        {"ids": [[1], []]},
        r"one token for each, such as \[\[5, 7\], \[11\]\]; got",
    ),
    "one list": ({"ids": [1, 1]}, "at least one token for each"),
    "lists and lengths": ({"ids": [[1], [0, 1]], "lengths": [1, 2]}, "omit lengths"),
    "lengths": ({"lengths": [2]}, r"from 1 to L, one for each .*\(1, 1\) int64 and got \[2\]"),
    "lengths of one": ({"ids": ONE[0], "lengths": [1]}, r"one for each prompt of ids \(B, L\)"),
    "one length in caches": (
        {"ids": [[1], [0, 1]], "caches": HALVES.caches(9, batch=(2,))},
        "different lengths need caches with a length for each item: omit caches, or",
    ),
    "positions": ({"positions": np.arange(3)}, "each token after the one before.*: omit positi"),
    "another's name": ({"max_new_tokens": 3}, r"^generate\(\) has no argument .*; pass steps=$"),
    "a misspelt name": ({"temprature": 3}, r"^generate\(\) got .* did you mean 'temperature'\?"),
    "an unknown token": (
        {"ids": np.asarray([0, 2]), "jit": lambda step: 1 / 0},
        r"token id 2 at \(1,\) is out of range: there are 2",
    ),
    "a narrow dtype": (
        {"model": WIDE, "ids": ONE.astype(np.uint8)},
        r"ids of uint8 cannot hold .* up to 299; give int32 or int64",
    ),
    "no logits": (
        {"model": nn.Transformer(HALVES.embedding, HALVES.stack)},
        "no logits: load a decoder with logits=True; an encoder, .* nothing to generate",
    ),
    "not causal": ({"model": AHEAD, "is_causal": None}, "pass is_causal=True here, or .*False and"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_is_refused(name):
    options, said = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=said):
        nn.generate(**({"model": HALVES, "ids": ONE, "steps": 1} | options))
