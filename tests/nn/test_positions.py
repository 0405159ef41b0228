"""Positions: sines, learned vectors, rotary pairs and their scalings, relative biases."""

from fractions import Fraction

import numpy as np
import pytest
from optional import jax, jnp, make_fx, torch, turn_halves, turn_neighbours

from polyattn import nn, scores
from polyattn._base.arrays import library_of
from polyattn.nn.positions import SharedAngles

RNG = np.random.default_rng(6)
X = RNG.normal(size=(2, 3, 5, 16))


HERE = pytest.mark.parametrize("library", ["numpy", "torch"], indirect=True)


def cosines(positions, frequencies):
    angles = torch.tensor(positions)[..., None] * torch.tensor(frequencies, dtype=torch.float64)
    return angles.cos(), angles.sin()


def plain(size):
    return [10000.0 ** (-2 * n / size) for n in range(size // 2)]


@HERE
def test_halves_turn_as_in_llama_and_neighbours_as_in_gpt_j(library):
    to, back = library
    positions = np.asarray([4, 0, 7, 900, 2])
    cos, sin = cosines(positions, plain(16))
    x = torch.tensor(X)
    both = [torch.cat((part, part), dim=-1)[None] for part in (cos, sin)]
    halves, _ = turn_halves(x, x, *both)
    found = back(nn.Rotary(16)(to(X), to(positions)))
    tolerance = 1e-4 if found.dtype == np.float32 else 1e-9
    np.testing.assert_allclose(found, halves, atol=tolerance)
    neighbours = turn_neighbours(x.transpose(1, 2), sin[None], cos[None]).transpose(1, 2)
    found = back(nn.Rotary(16, pairing="neighbours")(to(X), to(positions)))
    np.testing.assert_allclose(found, neighbours, atol=tolerance)


def test_16_bit_vectors_are_turned_by_angles_of_float32():
    x = torch.tensor(X).bfloat16()
    positions = torch.arange(5) + 4000
    found = nn.Rotary(16)(x, positions).float()
    exact = nn.Rotary(16)(x.double(), positions)
    assert (found - exact).abs().max() < 0.04


FREQUENCIES = {
    "plain": plain(16),
    "yarn": nn.yarn_scaling(16, 8.0)[0],
}
FAR_POSITIONS = [8192, 10**6, 10**6 + 1, 2**24 - 1, 2**24 + 1, 123_456_789, 2**31 - 1]


def exact_angles(positions, frequencies):
    """Angles modulo 2π, by integers."""
    turns = [Fraction(f) / Fraction("6.283185307179586476925286766559005768") for f in frequencies]
    return 2 * np.pi * np.asarray([[float(p * turn % 1) for turn in turns] for p in positions])


@pytest.mark.parametrize("frequencies", FREQUENCIES.values(), ids=FREQUENCIES)
@HERE
def test_angles_of_far_positions_are_exact(library, frequencies):
    to, back = library
    like, positions = to(np.zeros(1, np.float32)), to(np.asarray(FAR_POSITIONS))
    angles = exact_angles(FAR_POSITIONS, frequencies)
    found = nn.Rotary(16, frequencies=tuple(frequencies)).tables(positions, like=like)
    for table, function in zip(found, (np.cos, np.sin), strict=True):
        np.testing.assert_allclose(back(table), function(angles), rtol=0, atol=1e-6)
    both = np.stack((np.sin(angles), np.cos(angles)), axis=-1).reshape(-1, 16)
    if frequencies == plain(16):
        found = back(nn.Sinusoidal(16)(positions, like=like))
        np.testing.assert_allclose(found, both, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("library", "dtype"),
    [("numpy", "uint8"), ("numpy", "int32"), ("torch", "uint32")],
    indirect=["library"],
)
def test_near_positions_have_the_angles_of_products(library, dtype):
    to, _ = library
    like = to(np.zeros(1, np.float32))
    positions = np.arange(256) if dtype == "uint8" else np.arange(8191, 0, -31)
    found = nn.Rotary(16).tables(to(positions.astype(dtype)), like=like)
    products = to(positions.astype(np.float32)[:, None] * np.asarray(plain(16), np.float32))
    xp = library_of(like).xp
    for table, function in zip(found, (xp.cos, xp.sin), strict=True):
        assert (table == function(products)).all()


@pytest.mark.slow
def test_positions_that_are_traced_have_exact_angles_too():
    rotary, positions = nn.Rotary(16), np.asarray(FAR_POSITIONS, np.int32)
    expected = rotary.tables(positions, like=np.zeros(1, np.float32))
    found = jax.jit(lambda p: rotary.tables(p, like=jnp.zeros(1)))(positions)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    compiled = torch.compile(
        lambda p: rotary.tables(p, like=torch.zeros(1)), backend="aot_eager", dynamic=True
    )
    found = np.stack(compiled(torch.tensor(positions)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_a_trace_by_near_positions_has_exact_angles_of_far_ones():
    rotary, near = nn.Rotary(16), torch.arange(len(FAR_POSITIONS))
    expected = rotary.tables(torch.tensor(FAR_POSITIONS), like=torch.zeros(1))[1]
    for trace in (torch.jit.trace, lambda function, p: make_fx(function)(p)):
        found = trace(lambda p: rotary.tables(p, like=torch.zeros(1))[1], near)
        torch.testing.assert_close(found(torch.tensor(FAR_POSITIONS)), expected)


def test_the_defaults_of_yarn_are_those_of_the_paper():
    frequencies, magnitude = nn.yarn_scaling(16, 8.0)
    told = {"base": 10000.0, "trained": 4096, "fast": 32.0, "slow": 1.0}
    assert nn.yarn_scaling(16, 8.0, **told) == (frequencies, magnitude)
    assert nn.ntk_scaling(2, 8.0) == (1.0,)  # the one frequency, however it is scaled


def test_a_relative_bias_is_t5s_and_a_parameter():
    relative = nn.RelativeBias.init(4, 8, like=X, max_distance=16, bidirectional=False)
    options = {"max_distance": 16, "bidirectional": False}
    layer, x = nn.MultiHeadAttention.init(16, 4, like=X), X[0]
    expected = layer(x, score_mod=scores.relative_bias(relative.weight, **options))
    np.testing.assert_array_equal(layer(x, score_mod=relative()), expected)
    assert list(relative.parameters()) == ["weight"]
    assert np.abs(expected - layer(x)).max() > 1e-6


def test_the_layers_of_a_model_share_angles(monkeypatch):
    near, far = (nn.Rotary(4, base, dynamic=(2.0, 4)) for base in (10.0, 100.0))
    like, ids, positions = np.zeros(1), np.asarray([[1, 2, 3]] * 2), [[0, 1, 9], [2, 3, 4]]
    made = [nn.EncoderBlock.init(8, 2, like=like, rotary=one) for one in (near, far, near)]
    stack = nn.Stack(made)
    model = nn.Transformer(nn.Embedding.init(5, 8, like=like), stack)
    expected = stack(model.embed(ids), positions=positions)
    model, calls = model.with_parameters(model.parameters()), []  # whose encodings are equal
    inner = nn.Rotary._angles_of

    def count(rotary, xp, positions, *others):
        calls.append(isinstance(positions, SharedAngles))
        return inner(rotary, xp, positions, *others)

    monkeypatch.setattr(nn.Rotary, "_angles_of", count)
    np.testing.assert_array_equal(model(ids, positions=positions), expected)
    assert calls == [False, False, True, True, True]


# ---- the length of each item --------------------------------------------------------------------

IDS, LENGTHS = RNG.integers(0, 11, (2, 8)), np.asarray([7, 3])


def dynamic_model(like):
    """Return a model whose rates have changed at 7 tokens, and at 3 as well, but less."""
    return nn.Transformer.init(
        *(11, 16, 2, 2), like=like, is_causal=True, scale=8.0, rotary=nn.Rotary(8, dynamic=(9.0, 2))
    )


def alone(model, ids, length):
    """Return the logits of a prompt of this length, and of the token after it, in a cache."""
    first, caches = model(ids[:, :length], caches=model.caches(9, batch=(1,)))
    return first, model(ids[:, 7:], caches=caches)[0]


def in_pages(model, ids):
    """Return the same of both items, whose prompts are padded to one length."""
    caches = model.caches(9, batch=(2,), kind=nn.PagedCache, page=4)
    prompts, caches = model(ids[:, :7], caches=caches, counts=LENGTHS)
    return prompts, model(ids[:, 7:], caches=caches)[0]


PROMPTS = {"key_lengths": LENGTHS, "query_offset": 0}  # padded, without a cache
WAYS = {
    "pages": in_pages,
    "lengths": lambda model, ids: (model(ids[:, :7], **PROMPTS),),
    "positions": lambda model, ids: (
        model(ids[:, :7], positions=np.minimum(np.arange(7), LENGTHS[:, None] - 1)),
    ),
}


@pytest.mark.parametrize(
    ("library", "way"),
    [*(("numpy", way) for way in WAYS), ("torch", "lengths")],
    indirect=["library"],
)
def test_the_rates_of_dynamic_scaling_are_those_of_each_item_alone(library, way):
    to, back = library
    ids, own = to(IDS), dynamic_model(np.zeros(1, np.float32))
    found = WAYS[way](dynamic_model(to(np.zeros(1, np.float32))), ids)
    for item, length in enumerate(LENGTHS):
        expected = alone(own, IDS[item : item + 1], length)
        for one, other in zip(found, expected, strict=False):
            shown = back(one)[item, : other.shape[1]]
            np.testing.assert_allclose(shown, other[0], rtol=0, atol=1e-4)


def test_lengths_that_are_no_number_for_each_item_are_refused():
    model = dynamic_model(np.zeros(1))
    with pytest.raises(ValueError, match=r"key_lengths must have an .* for each item.*\(3,\)"):
        model(IDS, key_lengths=[1, 2, 3])
