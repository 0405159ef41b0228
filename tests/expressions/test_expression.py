"""Expressions as values: they print as the code that makes them, compare by content, and copy."""

import copy
import pickle

import numpy as np
import pytest
from optional import array_api_strict, jax, torch

from polyattn import masks, scores


def later(b, h, i, j):
    return i >= j


def earlier(b, h, i, j):
    return i <= j


def halved(s, b, h, i, j):
    return s / 2


NAMES = {"numpy": np, "torch": torch, "jax": jax, "masks": masks, "scores": scores}
NAMES |= {"later": later, "earlier": earlier, "halved": halved}
NAMES |= {"array_api_strict": array_api_strict}

VALUES = [
    masks.causal(),
    masks.window(3, None),
    masks.padding(3, 2),
    masks.padding(np.array([3, 4])),
    masks.prefix(array_api_strict.asarray([3, 4])),
    masks.segments(np.array([0, 1])),
    *(masks.segments(xp.asarray([0, 1])) for xp in (torch, jax and jax.numpy) if xp),
    masks.dilated(3),
    masks.positions(np.array([0, 1]), np.array([1, 0]), masks.causal() | ~masks.prefix(2)),
    masks.tree(np.array([[-1, 0], [-1, -1]])),
    masks.global_tokens(3, 1, 3),
    masks.dense(np.array([[True, False]])),
    masks.rule(later),
    masks.rule(earlier),
    masks.causal() & masks.window(1, 1) | ~masks.prefix(2) & ~(masks.causal() | masks.dilated(2)),
    masks.compile(masks.causal() | masks.prefix(1), 6, 8, query_offset=1, tile=3),
    masks.compile(masks.dense(np.ones((1, 3, 1, 6), bool)) & later, 6, heads=3),
    scores.softcap(3),
    scores.temperature(np.float32(0.5)),
    scores.alibi(np.array([0.1, np.inf, -np.inf], np.float32)),
    scores.relative_bias(np.ones((4, 2)), bidirectional=False, max_distance=30),
    scores.softcap(3) >> halved >> scores.alibi(2),
    scores.cosine(),
    scores.distance(1),
    *([scores.additive(jax.numpy.ones(3))] if jax else []),
    scores.long_sequence(),
    scores.by_norm(),
    scores.sigmoid(),
]
if torch:
    VALUES += [
        masks.tree(torch.tensor([-1, 0, 0])),
        scores.alibi(torch.tensor([0.5, 2.0], dtype=torch.bfloat16)),
    ]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_evaluates_copies_and_pickles_to_its_equal(value):
    assert eval(repr(value), NAMES) == value
    hash(value)  # which it remembers: in another process the hash of a string is another
    for again in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert again == value
        assert "_hash" not in vars(again)
        assert hash(again) == hash(value)


def test_different_values_are_different():
    for n, one in enumerate(VALUES):
        assert [m for m, other in enumerate(VALUES) if one == other] == [n]


def test_large_and_empty_arrays_print_as_shapes_and_numbers_beyond_int64_as_they_are():
    assert repr(masks.dense(np.zeros((0, 3), bool))) == "masks.dense(<(0, 3) bool of numpy>)"
    assert repr(masks.segments(np.zeros(65, int))) == "masks.segments(<(65,) int64 of numpy>)"
    nothing = masks.dense(np.zeros(0, bool))
    assert eval(repr(nothing), NAMES) == nothing
    far = masks.segments(torch.asarray(np.array([2**63 + 5], "uint64")))
    assert repr(far) == f"masks.segments(torch.asarray([{2**63 + 5}], dtype=torch.uint64))"
