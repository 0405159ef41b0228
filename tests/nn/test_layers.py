"""The layers around attention: what each computes, in every library, and how they are made."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.special
import scipy.stats
from arrays import close, draw
from optional import jnp, torch

import polyattn
from polyattn import attention, masks, nn
from polyattn.nn.passes import BLOCK_ROWS, affine

RNG = np.random.default_rng(5)
X, CONTEXT = RNG.normal(size=(2, 7, 24)), RNG.normal(size=(2, 9, 20))
IDS = RNG.integers(0, 11, size=(2, 7))


def float32(x):
    return np.asarray(x, dtype=np.float32)


# ---- modules -----------------------------------------------------------------------------------


def gpt(like, **options):
    shared = {"like": like, "is_causal": True, "positions": 16, "key_heads": 2}
    return nn.Transformer.init(
        *(11, 24, 4, 2), **shared | {"gated": True, "activation": "silu"} | options
    )


def test_a_seed_gives_the_same_weights_to_the_last_bit_in_every_library(library):
    to, back = library
    expected = gpt(np.zeros(1, dtype=np.float32), seed=3).parameters()
    found = gpt(to(float32([0])), seed=3).parameters()
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert np.array_equal(back(array), expected[name]), name


def test_another_seed_gives_other_weights_spread_as_glorot_has_them():
    like = np.zeros(1)
    one, other = (gpt(like, seed=seed).parameters() for seed in (0, 1))
    drawn = [name for name in one if name.endswith("weight") and "norm" not in name]
    assert all(np.all(one[name] != other[name]) for name in drawn)
    weight, bound = nn.Linear.init(300, 500, like=like).weight, math.sqrt(6 / 800)
    assert np.abs(weight).max() <= bound
    assert weight.var() == pytest.approx(bound**2 / 3, rel=0.02)
    assert weight.mean() == pytest.approx(0, abs=0.001)


def test_parameters_are_replaced_by_name_and_refused_where_they_do_not_fit():
    model = gpt(np.zeros(1))
    arrays = model.parameters()
    doubled = model.with_parameters({name: 2 * array for name, array in arrays.items()})
    up = doubled.stack.blocks[0].feed_forward.up.weight
    np.testing.assert_array_equal(up, 2 * arrays["stack.blocks.0.feed_forward.up.weight"])
    assert doubled.stack.blocks[0].feed_forward.activation == "silu"
    wrong = {"embedding.weight": np.zeros((2, 2))}
    for parameters, said in (
        ({}, "missing: .*embedding.weight"),
        (arrays | {"other": np.zeros(1)}, "unknown: other"),
        (arrays | wrong, r"embedding.weight has the shape \(11, 24\); got \(2, 2\)"),
    ):
        with pytest.raises(ValueError, match=said):
            model.with_parameters(parameters)


def test_a_module_prints_its_parts_with_their_shapes_and_equal_ones_once():
    other = nn.EncoderBlock.init(24, 2, like=np.zeros(1))
    said = repr(nn.Stack((*gpt(np.zeros(1)).stack.blocks, other))).splitlines()
    assert said[:4] == [
        "Stack()",
        "  blocks[0–1]: EncoderBlock(pre_norm=True)",
        "    attention: MultiHeadAttention(heads=4, key_heads=2, head_size=6, is_causal=True)",
        "      query: Linear(weight: (24, 24) float64, bias: (24,) float64)",
    ]
    assert "  blocks[2]: EncoderBlock(pre_norm=True)" in said


# ---- layers ------------------------------------------------------------------------------------


IN_16_BITS = [
    ("numpy", "float16"),
    ("torch", "float16"),
    ("torch", "bfloat16"),
    ("jax", "bfloat16"),
]


def check_rounded_once(library, dtype, layer, exact, *arrays, noise):
    """Compare a layer of rounded arrays, to half a unit in the last place and noise of float32."""
    to, back = library
    rounded = [x.astype(dtype) for x in arrays]
    found, wide = back(layer(*map(to, rounded))), [x.astype(np.float64) for x in rounded]
    assert found.dtype == dtype
    expected, limits = exact(*wide), jnp.finfo(dtype)
    bound = float(limits.eps) / 2 * np.abs(expected) + float(limits.tiny) / 2
    assert (np.abs(found.astype(np.float64) - expected) <= bound + noise(expected, *wide)).all()


@pytest.mark.parametrize(
    ("library", "dtype"),
    [("numpy", "float32"), ("strict", "float32"), *IN_16_BITS[:3]],
    indirect=["library"],
)
def test_norms_are_rounded_once(library, dtype):
    def layer_norm(x, weight, bias):
        centred = x - x.mean(-1, keepdims=True)
        normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3)
        return normal * weight + bias

    def rms_norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (weight + 1)

    def noise(expected, x, weight, *bias):
        return 4e-6 * np.abs(weight).max()

    arrays = 100 * X, X[0, 0] + 2, X[0, 1]
    check = functools.partial(check_rounded_once, library, dtype, noise=noise)
    check(lambda x, *given: nn.LayerNorm(*given, 1e-3)(x), layer_norm, *arrays)
    check(lambda x, weight: nn.RMSNorm(weight, offset=1.0)(x), rms_norm, *arrays[:2])


EXACT = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * scipy.special.ndtr(x),
    "gelu_tanh": lambda x: x * scipy.special.expit(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    "silu": lambda x: x * scipy.special.expit(x),
}


@pytest.mark.parametrize("activation", EXACT)
@pytest.mark.parametrize(("library", "dtype"), IN_16_BITS, indirect=["library"])
def test_activations_of_16_bits_are_rounded_once(library, dtype, activation):
    def noise(expected, x):  # a subnormal number within may count as 0
        return 1e-5 * np.abs(expected) + 1e-38 * x**2

    x = np.concatenate((np.linspace(-60, 60, 9601), [-6e4, 6e4]))
    layer, exact = nn.layers.ACTIVATIONS[activation], EXACT[activation]
    check_rounded_once(library, dtype, layer, exact, x, noise=noise)


@pytest.mark.parametrize("activation", EXACT)
@pytest.mark.parametrize("library", ["numpy", "torch"], indirect=True)
def test_activations_keep_their_digits_far_below_0(library, activation):
    to, back = library
    for kind in (np.float32, np.float64):
        x = np.linspace(-9, 9, 20001).astype(kind)
        found = back(nn.layers.ACTIVATIONS[activation](to(x)))
        exact = EXACT[activation](x.astype(np.float64))
        # Far below 0 a rounding of the exponent multiplies the result, and it is up to x⁴ / 14.
        bound = np.finfo(found.dtype).eps * (8 + x.astype(np.float64) ** 4 / 14)
        assert (np.abs(found - exact) <= bound * np.abs(exact)).all()
    far = to(float32([-1e10, -1e3, 1e3, 1e10]))
    found = back(nn.layers.ACTIVATIONS[activation](far))
    assert np.array_equal(found, float32([0, 0, 1e3, 1e10]))
    nan = to(float32([np.nan]))
    assert np.isnan(back(nn.layers.ACTIVATIONS[activation](nan)))[0]


def test_both_derivatives_of_gelu_are_right_in_torch():
    numbers = np.linspace(-8, 8, 1001)
    x = torch.from_numpy(numbers).requires_grad_()
    nn.layers.ACTIVATIONS["gelu"](x).sum().backward()
    slope = scipy.special.ndtr(numbers) + numbers * scipy.stats.norm.pdf(numbers)
    np.testing.assert_allclose(x.grad.numpy(), slope, rtol=0, atol=1e-15)
    assert torch.autograd.gradgradcheck(nn.erf.gelu, x[::200].detach().requires_grad_())


# In NumPy, layers work on blocks of rows and on threads.
ROWS = 3 * BLOCK_ROWS + 7


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(3, ROWS, 24), (24,), (0, 24)])
def test_a_map_in_blocks_is_the_product(threads, shape):
    x, weight, bias = draw(shape, (24, 16), (16,))
    for offset in (None, bias):
        with polyattn.use_threads(threads):
            found = affine(x, weight, offset)
        close(found, x @ weight + (0 if offset is None else offset))
        assert found.dtype == np.float32


def test_a_map_of_rows_that_are_not_side_by_side_is_the_product():
    x, weight = draw((24, ROWS), (24, 16))
    close(affine(x.T, weight, None), x.T @ weight)
    assert affine(x.T, weight.astype(np.float64), None).dtype == np.float64  # as NumPy promotes


@pytest.mark.parametrize("make", [nn.LayerNorm.init, nn.RMSNorm.init])
def test_a_norm_of_many_rows_is_that_of_each(make):
    (x,) = draw((ROWS, 200))
    norm = make(200, like=x)
    np.testing.assert_array_equal(norm(x)[::97], np.stack([norm(row) for row in x[::97]]))


@pytest.mark.needs("torch")
def test_a_norm_is_a_function_of_torch_but_in_same_bits(monkeypatch):
    x = torch.ones(2, 8)
    norm = nn.LayerNorm.init(8, like=x)
    monkeypatch.setattr(torch.nn.functional, "layer_norm", lambda x, *_: x)
    assert norm(x) is x
    with polyattn.same_bits():
        assert norm(x) is not x


# ---- attention ---------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["numpy", "torch", "strict"], indirect=True)
@pytest.mark.parametrize(("fused", "bias"), [(False, True), (True, False)])
def test_multi_head_attention_is_projections_around_attention(library, fused, bias):
    to, back = library
    layer = nn.MultiHeadAttention.init(
        *(24, 4), key_heads=2, head_size=10, value_size=3, bias=bias, fused=fused, like=to(X)
    )
    x = back(to(X))
    arrays = {name: back(array) for name, array in layer.parameters().items()}
    if fused:
        weights = np.split(arrays["fused.weight"], [40, 60], axis=1)
    else:
        weights = [arrays[f"{name}.weight"] for name in ("query", "key", "value")]
    assert [w.shape for w in weights] == [(24, 40), (24, 20), (24, 6)]
    assert ("output.bias" in arrays) == bias
    q, k, v = (
        (x @ w).reshape(2, 7, h, -1).swapaxes(1, 2) for w, h in zip(weights, (4, 2, 2), strict=True)
    )
    together = attention(q, k, v, is_causal=True, window=(3, 0))
    expected = together.swapaxes(1, 2).reshape(2, 7, 12) @ arrays["output.weight"]
    close(back(layer(to(X), is_causal=True, window=(3, 0))), expected)


MHA = nn.MultiHeadAttention.init
PLAIN, TURNED = MHA(24, 4, like=X), MHA(24, 4, rotary=nn.Rotary(6), like=X)
LINEAR, TIED = nn.Linear.init(24, 5, like=X), gpt(X, positions=8, tied=True)
WRONG = np.ones((3, 4))
REFUSED = {
    "a count": (lambda: MHA(24, 0, like=X), "heads must be at least 1; got 0"),
    "heads of a size": (lambda: MHA(24, 5, like=X), "5 heads do not divide a size of 24"),
    "groups": (lambda: MHA(24, 4, key_heads=3, like=X), "multiple of key_heads"),
    "fused with context": (lambda: MHA(24, 4, fused=True, context_size=5, like=X), "one size"),
    "no maps": (
        lambda: nn.MultiHeadAttention(None, None, None, None, 4, 4, 6, is_causal=False),
        "or only fused",
    ),
    "activation": (lambda: nn.FrameEmbedding(LINEAR, LINEAR, "tanh"), "one of relu, gelu.*'tanh'"),
    "patch": (lambda: nn.PatchEmbedding(LINEAR, None, (1, 8, 8), 3), r"3 pixels do not divide"),
    "an odd size": (lambda: nn.Sinusoidal(5), "must be even.*got 5"),
    "rotary beyond heads": (lambda: MHA(24, 4, rotary=nn.Rotary(8), like=X), "size 6; got 8"),
    "pairing": (lambda: nn.Rotary(8, pairing="both"), "'halves' or 'neighbours'; got 'both'"),
    "frequencies": (lambda: nn.Rotary(8, frequencies=(1.0,)), "4 frequencies; got 1"),
    "short vectors": (lambda: nn.Rotary(8)(np.ones((3, 5)), range(3)), "5 components have no 8"),
    "last axis": (lambda: LINEAR(WRONG), r"last axis is 24; got \(3, 4\) float64"),
    "library": (lambda: LINEAR(torch.ones(24)), r"takes numpy arrays.* of torch"),
    "dtype": (lambda: LINEAR(float32(X)), "has float64 parameters; got x in float32"),
    "floats as ids": (lambda: nn.Embedding(WRONG)(np.ones(2)), "ids must be an integer array of n"),
    "cache of a stack": (lambda: TIED(IDS, cache=PLAIN), "pass all of them as caches="),
    "too few caches": (lambda: TIED(IDS, caches=TIED.caches(9)[:1]), "2 blocks has a cache; got 1"),
    "cache and context": (lambda: PLAIN(X, X, cache=PLAIN.cache(9, like=X)), "another sequence"),
    "rotary and context": (lambda: TURNED(X, X[:, :3]), "another sequence"),
    "no axis of tokens": (lambda: PLAIN(X[0, 0]), r"shape \(\.\.\., L, size\); got \(24,\)"),
    "ids without axes": (lambda: TIED(np.asarray(3)), r"shape \(\.\.\., L\); got \(\)"),
    "positions": (lambda: TIED(IDS[:, [0] * 9]), "8 learned positions; got 9 tokens"),
    "positions after a cache": (
        lambda: TIED(IDS[:, :2], caches=TIED(IDS, caches=TIED.caches(16, batch=(2,)))[1]),
        "8 learned positions; got 9 tokens",
    ),
    "two maps": (
        lambda: nn.Transformer(TIED.embedding, TIED.stack, output=LINEAR, tied=True),
        "give one of them",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name):
    make, said = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=said):
        make()


def test_numbers_of_numpy_are_settings():
    norm = nn.RMSNorm.init(6, like=X, epsilon=np.float32(1e-6))
    rotary = nn.Rotary(np.int64(6), frequencies=np.ones(3))
    layer = MHA(np.int64(24), np.int64(4), like=X, query_norm=norm, rotary=rotary)
    names = set(PLAIN.parameters()) | {"query_norm.weight"}
    assert set(layer.parameters()) == names
    assert "size=" in repr(layer)
    assert isinstance(layer.rotary.frequencies, tuple)


def test_a_norm_that_is_given_is_copied_for_every_layer():
    norm = nn.RMSNorm.init(6, like=X)
    parameters = gpt(np.zeros(1), query_norm=norm, key_norm=norm).parameters()
    of_norms = [id(a) for name, a in parameters.items() if "query_n" in name or "key_n" in name]
    assert len(set(of_norms)) == len(of_norms) == 4


def test_a_block_without_biases_has_none_and_a_list_of_blocks_is_a_stack():
    for kind in (nn.EncoderBlock, nn.DecoderBlock):
        names = kind.init(24, 4, bias=False, gated=True, norm=nn.RMSNorm, like=X).parameters()
        assert not [name for name in names if "bias" in name]
    stack = nn.Stack([nn.EncoderBlock.init(24, 4, like=X)])
    assert "blocks.0.attention.query.weight" in stack.parameters()


def test_a_norm_has_one_dtype_for_few_rows_and_many():
    layer = nn.LayerNorm.init(64, like=np.zeros(1, np.float32))
    few, many = (layer(np.ones((1, n, 64), np.float16)).dtype for n in (10, 10000))
    assert few == many


# ---- blocks and models -------------------------------------------------------------------------


CAUSAL = MHA(24, 4, key_heads=2, is_causal=True, like=X)


def test_a_layer_is_causal_as_it_was_made_unless_a_call_says_otherwise():
    ahead = replace(CAUSAL, is_causal=False)
    for given in ({}, {"is_causal": None}, {"is_causal": True}):
        close(CAUSAL(X, **given), ahead(X, is_causal=True), 0)
        close(CAUSAL(X, **given)[:, :3], CAUSAL(X[:, :3]))
        assert not np.triu(CAUSAL.weights(X, **given), 1).any()
    for given in ({}, {"is_causal": None}, {"is_causal": False}):
        close(ahead(X, **given), CAUSAL(X, is_causal=False), 0)
        assert np.triu(ahead.weights(X, **given), 1).any()
    assert MHA(24, 4, like=X).is_causal is False
    assert "is_causal=True" in repr(CAUSAL)
    assert "is_causal=False" in repr(ahead)


def test_decoder_blocks_are_causal_and_read_the_context():
    block = nn.DecoderBlock.init(24, 4, context_size=20, like=X, rotary=nn.Rotary(6))
    assert gpt(X, pre_norm=False).stack.norm is None
    found = block(X, CONTEXT)
    close(block(X[:, :3], CONTEXT), found[:, :3])
    y = X + block.attention(block.attention_norm(X), is_causal=True)
    y = y + block.cross_attention(block.cross_attention_norm(y), CONTEXT)
    close(found, y + block.feed_forward(block.feed_forward_norm(y)))
    seen = block(X, CONTEXT, context_mask=masks.prefix(4))
    close(seen, block(X, CONTEXT[:, :4]))


def test_the_weights_of_a_decoder_block_are_of_its_causal_self_attention():
    like = np.zeros(1)
    model = nn.Transformer.init(9, 8, 2, 1, like=like, is_causal=True, cross=True)
    context, keep = np.ones((2, 5, 8)), np.arange(5) < 3
    (found,) = model.weights(np.asarray([[1, 2, 3]] * 2), context, context_mask=keep)
    assert found.shape == (2, 2, 3, 3)
    assert not found[..., 0, 1:].any()


def test_a_layer_has_its_own_options_and_a_call_overrides_them():
    x, plain = X, nn.MultiHeadAttention.init(24, 4, like=X)
    own = {"scale": 2.0, "softcap": 1.5, "window": (2, 0)}
    layer = nn.MultiHeadAttention.init(24, 4, like=x, **own)
    np.testing.assert_array_equal(layer(x), plain(x, **own))
    np.testing.assert_array_equal(layer.weights(x), plain.weights(x, **own))
    wider = {"window": (5, 0), "scale": 1.0}
    np.testing.assert_array_equal(layer(x, **wider), plain(x, **own | wider))
    assert np.abs(layer(x) - layer(x, **wider)).max() > 1e-3
