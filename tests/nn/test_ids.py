"""The integers of a call: one for each token, beside the tokens, in range where a look is free."""

import numpy as np
import pytest
from optional import torch
from tiny_models import FLOAT32, library

from polyattn import nn
from polyattn.nn.ids import check_range

IDS = np.asarray([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]])
PLACES = np.arange(5) * 2


@pytest.fixture(params=["numpy", "torch"])
def to(request):
    return library(request.param)[0]


def models(to):
    """Yield a model with rotary positions, and one with learned positions and segments."""
    like = to(FLOAT32)
    yield nn.Transformer.init(9, 8, 2, 1, like=like, is_causal=True, rotary=nn.Rotary(4))
    model = nn.Transformer.init(9, 8, 2, 1, like=like, is_causal=True, positions=12)
    segments = nn.Embedding.init(3, 8, like=like, seed=1)
    yield nn.Transformer(model.embedding, model.stack, model.positions, segments)


def test_positions_of_the_host_are_placed_beside_the_tokens(to):
    for model in models(to):
        expected = model(to(IDS), positions=to(PLACES))
        for given in (PLACES, PLACES.tolist(), range(0, 10, 2), [PLACES.tolist()] * 2):
            found = model(to(IDS), positions=given)
            np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    expected = model(to(IDS), segments=to(IDS % 3))
    found = model(to(IDS), segments=(IDS % 3).tolist())
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_ids_of_few_bits_are_ids(to):
    table = to(np.arange(258, dtype=np.float32)[:, None])
    found = nn.LearnedPositions(table, offset=2)(to(np.asarray([0, 255], np.uint8)))
    assert found.tolist() == [[2], [257]]


@pytest.mark.parametrize("shape", [(2, 1), (1, 2, 5)])
@pytest.mark.parametrize("name", ["positions", "segments"])
def test_there_is_an_integer_for_each_token(to, shape, name):
    rotary, learned = models(to)
    said = rf"{name} must have an integer for each token.* of \(2, 5\); got"
    given = {name: np.zeros(shape, dtype=np.int64)}
    with pytest.raises(ValueError, match=said):
        learned(to(IDS), **given)
    if name == "positions":
        layer = rotary.stack.blocks[0].attention
        x = to(np.zeros((2, 5, 8), np.float32))
        for call in (lambda: rotary(to(IDS), **given), lambda: layer(x, **given)):
            with pytest.raises(ValueError, match=said):
                call()
        with pytest.raises(ValueError, match=said):
            layer.rotary(to(np.zeros((2, 3, 5, 4), np.float32)), **given)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ids": IDS + 4}, r"the token id 9 at \(0, 4\) is out of range: there are 9, from 0 to 8"),
        ({"ids": IDS - 3}, r"the token id -2 at \(0, 0\)"),
        ({"positions": PLACES + 8}, r"the position 12 at \(2,\) .* there are 12, from 0 to 11"),
        ({"segments": IDS - 2}, r"the segment -1 at \(0, 0\) .* there are 3, from 0 to 2"),
    ],
)
def test_a_number_out_of_range_is_named_with_its_place(to, options, said):
    *_, model = models(to)
    with pytest.raises(ValueError, match=said):
        model(**({"ids": to(IDS)} | {name: to(x) for name, x in options.items()}))


def test_positions_of_another_library_are_refused():
    *_, model = models(np.asarray)
    with pytest.raises(TypeError, match=r"positions must be an array of numpy, .* of torch"):
        model(IDS, positions=torch.arange(5))
    positions = nn.LearnedPositions(np.zeros((6, 2)), offset=2)
    assert positions(np.asarray([-2, 3], np.int8)).shape == (2, 2)
    with pytest.raises(ValueError, match=r"the position 4 .* there are 6, from -2 to 3"):
        positions(np.asarray([4], np.uint8))


def test_numbers_of_a_graph_or_a_device_are_not_read():
    table = torch.zeros(3, 2)
    check_range("id", torch.zeros(3, dtype=torch.int64, device="meta"), range(1))
    torch.func.vmap(nn.Embedding(table))(torch.asarray([[0], [2]]))


def test_only_generate_waits_for_numbers_of_jax():
    jax = pytest.importorskip("jax")
    table, ids = jax.numpy.zeros((3, 2)), jax.numpy.asarray([0, 3])
    assert nn.Embedding(table)(ids).shape == (2, 2)  # which would raise if it read the 3
    model = nn.Transformer(nn.Embedding(table), nn.Stack(()), tied=True)
    with pytest.raises(ValueError, match=r"the token id 3 at \(1,\) is out of range: there are 3"):
        nn.generate(model, ids, 1)


def test_segments_that_a_model_does_not_have_are_refused():
    table = np.zeros((3, 2), np.float32)
    model = nn.Transformer(nn.Embedding(table), nn.Stack(()), tied=True)
    with pytest.raises(ValueError, match="has no vectors of segments: omit segments"):
        model(np.asarray([0, 2]), segments=[0, 1])
