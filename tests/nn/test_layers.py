"""The layers around attention: what each computes, in every library, and how they are made."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.special
from optional import jax, jnp, torch

from polyattn import attention, masks, nn, scores
from polyattn.nn.shapes import broadcastable

RNG = np.random.default_rng(5)
X, CONTEXT = RNG.normal(size=(2, 7, 24)), RNG.normal(size=(2, 9, 20))
IDS = RNG.integers(0, 11, size=(2, 7))


def close(a, b, tolerance=2e-6):
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, np.abs(b).max()))


def float32(x):
    return np.asarray(x, dtype=np.float32)


def heads_of(x, weight, bias, heads):
    y = x @ weight + bias
    return y.reshape(*y.shape[:-1], heads, -1).swapaxes(-2, -3)


def projected(layer, x=X, heads=4):
    """The queries, keys and values of a layer's own maps."""
    maps = (layer.query, layer.key, layer.value)
    return [heads_of(x, a.weight, 0 if a.bias is None else a.bias, heads) for a in maps]


def joined(layer, output):
    """The outputs of the heads, mapped to tokens."""
    flat = output.swapaxes(1, 2).reshape(*output.shape[:1], output.shape[2], -1)
    return flat @ layer.output.weight + (0 if layer.output.bias is None else layer.output.bias)


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


def test_another_seed_gives_other_weights_and_no_two_arrays_the_same():
    like = np.zeros(1)
    one, other = (gpt(like, seed=seed).parameters() for seed in (0, 1))
    drawn = [name for name in one if name.endswith("weight") and "norm" not in name]
    assert all(np.all(one[name] != other[name]) for name in drawn)
    firsts = [one[name].ravel()[0] / np.abs(one[name]).max() for name in drawn]
    assert len(set(firsts)) == len(firsts)


def test_weights_are_spread_as_glorot_has_them():
    weight = nn.Linear.init(300, 500, like=np.zeros(1)).weight
    bound = math.sqrt(6 / 800)
    assert np.abs(weight).max() <= bound
    assert weight.var() == pytest.approx(bound**2 / 3, rel=0.02)
    assert weight.mean() == pytest.approx(0, abs=0.001)


def test_parameters_are_named_by_where_they_are_and_replaced_by_name():
    model = gpt(np.zeros(1))
    names = model.parameters()
    assert "stack.blocks.1.attention.query.weight" in names
    doubled = model.with_parameters({name: 2 * array for name, array in names.items()})
    assert doubled.stack.blocks[0].feed_forward.up.weight[0, 0] == pytest.approx(
        2 * model.stack.blocks[0].feed_forward.up.weight[0, 0]
    )
    assert doubled.stack.blocks[0].feed_forward.activation == "silu"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p.pop("embedding.weight"), r"missing: embedding.weight"),
        (lambda p: p.update(other=np.zeros(1)), r"unknown: other"),
        (
            lambda p: p.update({"embedding.weight": np.zeros((2, 2))}),
            r"embedding.weight has the shape \(11, 24\); got \(2, 2\)",
        ),
    ],
)
def test_parameters_that_do_not_fit_are_refused_by_name(change, said):
    model = gpt(np.zeros(1))
    parameters = model.parameters()
    change(parameters)
    with pytest.raises(ValueError, match=said):
        model.with_parameters(parameters)


def test_a_module_prints_its_parts_with_their_shapes_and_says_alike_ones_once():
    said = repr(gpt(np.zeros(1, dtype=np.float32)))
    assert said.splitlines()[:5] == [
        "Transformer(tied=False, embedding_scale=1.0)",
        "  embedding: Embedding(weight: (11, 24) float32)",
        "  stack: Stack()",
        "    blocks[0–1]: EncoderBlock(pre_norm=True)",
        "      attention: MultiHeadAttention(heads=4, key_heads=2, head_size=6, is_causal=True)",
    ]
    other = nn.EncoderBlock.init(24, 2, like=np.zeros(1))
    mixed = repr(nn.Stack((*gpt(np.zeros(1)).stack.blocks, other)))
    assert "blocks[0–1]: " in mixed
    assert "blocks[2]: " in mixed
    assert (
        repr(nn.Linear.init(24, 24, like=np.zeros(1)))
        == "Linear(weight: (24, 24) float64, bias: (24,) float64)"
    )


def test_a_module_cannot_be_changed():
    with pytest.raises(AttributeError):
        nn.Linear(np.eye(2)).weight = np.eye(3)


# ---- layers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_norms_are_those_of_torch(library, dtype):
    to, back = library
    x, weight, bias = (np.asarray(a, dtype=dtype) for a in (3 * X + 1, X[0, 0], X[0, 1]))
    layer = nn.LayerNorm(to(weight), to(bias), 1e-3)
    tensors = [torch.tensor(a) for a in (x, weight, bias)]
    tolerance = 2e-6 if dtype == "float32" else 1e-14
    expected = torch.nn.functional.layer_norm(tensors[0], (24,), *tensors[1:], eps=1e-3)
    assert str(back(layer(to(x))).dtype) in (dtype, "float32")  # JAX knows no float64 by default
    if back(layer(to(x))).dtype == dtype:
        close(back(layer(to(x))), expected, tolerance)
        expected = torch.nn.functional.rms_norm(tensors[0], (24,), tensors[1] + 1, eps=1e-3)
        close(back(nn.RMSNorm(to(weight), 1e-3, offset=1.0)(to(x))), expected, tolerance)


IN_16_BITS = [
    (name, dtype) for name in ("numpy", "torch", "jax") for dtype in ("float16", "bfloat16")
]


def in_16_bits(name, dtype, x):
    """Numbers rounded to a dtype as an array of a library, and the same in float64."""
    rounded = np.asarray(x).astype(dtype)  # ml_dtypes, which JAX imports, knows bfloat16
    wide = rounded.astype(np.float64)
    to = {
        "numpy": lambda: rounded,
        "torch": lambda: torch.tensor(wide).to(getattr(torch, dtype)),
        "jax": lambda: jnp.asarray(rounded),
    }[name]
    return to(), wide


def close_to_a_rounding(found, exact, dtype, noise):
    """Half a unit in the last place of the dtype, and some of those of float32."""
    found = found.double().numpy() if isinstance(found, torch.Tensor) else np.asarray(found)
    assert str(found.dtype) in (dtype, "float64")
    limits = jnp.finfo(dtype)
    bound = float(limits.eps) / 2 * np.abs(exact) + float(limits.tiny) / 2 + noise
    assert (np.abs(found.astype(np.float64) - exact) <= bound).all()


@pytest.mark.parametrize(("name", "dtype"), IN_16_BITS)
def test_norms_of_16_bits_are_rounded_once(name, dtype):
    x, wide = in_16_bits(name, dtype, 100 * X)
    (weight, w), (bias, b) = (in_16_bits(name, dtype, a) for a in (X[0, 0] + 2, X[0, 1]))
    noise = 1e-6 * np.abs(w).max()
    centred = wide - wide.mean(-1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    close_to_a_rounding(nn.LayerNorm(weight, bias)(x), normal * w + b, dtype, 4 * noise)
    square = (wide**2).mean(-1, keepdims=True)
    expected = wide / np.sqrt(square + 1e-6) * (w + 1)
    close_to_a_rounding(nn.RMSNorm(weight, offset=1.0)(x), expected, dtype, 4 * noise)


EXACT = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * scipy.special.ndtr(x),
    "gelu_tanh": lambda x: x * scipy.special.expit(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    "silu": lambda x: x * scipy.special.expit(x),
}


@pytest.mark.parametrize("activation", EXACT)
@pytest.mark.parametrize(("name", "dtype"), IN_16_BITS)
def test_activations_of_16_bits_are_rounded_once(name, dtype, activation):
    x, wide = in_16_bits(name, dtype, np.concatenate((np.linspace(-60, 60, 9601), [-6e4, 6e4])))
    exact = EXACT[activation](wide)
    # A subnormal number within may count as 0.
    noise = 1e-5 * np.abs(exact) + 1e-38 * wide**2
    close_to_a_rounding(nn.layers.ACTIVATIONS[activation](x), exact, dtype, noise)


@pytest.mark.parametrize("activation", EXACT)
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


def test_jax_adds_axes_only_where_it_refuses_another_rank():
    x, bias = jnp.zeros((2, 3, 4)), jnp.zeros(4)
    assert broadcastable(x, bias).shape == (1, 1, 4)
    with jax.numpy_rank_promotion("allow"):
        assert broadcastable(x, bias) is bias


def test_a_gate_multiplies_what_goes_up(library):
    to, back = library
    up, gate, down = (float32(a) for a in (X[0, :, :5].T, X[1, :, :5].T, X[0, :, :5]))
    layer = nn.FeedForward(
        nn.Linear(to(up)), nn.Linear(to(down[:, :5])), nn.Linear(to(gate)), "silu"
    )
    x = float32(X[0, :3, :5])
    g = x @ gate
    close(back(layer(to(x))), (g / (1 + np.exp(-g)) * (x @ up)) @ down[:, :5], 2e-5)


def test_an_embedding_takes_ids_of_any_shape_and_gives_tied_logits(library):
    to, back = library
    table = float32(RNG.normal(size=(11, 6)))
    layer = nn.Embedding(to(table))
    assert np.array_equal(back(layer(to(IDS))), table[IDS])
    assert np.array_equal(back(layer(to(IDS[0, 0]))), table[IDS[0, 0]])
    close(back(layer.logits(to(table[:2]))), table[:2] @ table.T)


# ---- attention ---------------------------------------------------------------------------------


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
    q, k, v = (heads_of(x, w, 0, h) for w, h in zip(weights, (4, 2, 2), strict=True))
    together = attention(q, k, v, is_causal=True, window=(3, 0))
    expected = together.swapaxes(1, 2).reshape(2, 7, 12) @ arrays["output.weight"]
    close(back(layer(to(X), is_causal=True, window=(3, 0))), expected, 1e-5)


def test_biases_are_added_where_they_belong():
    layer = nn.MultiHeadAttention.init(24, 4, like=X)
    arrays = layer.parameters()
    given = {n: RNG.normal(size=a.shape) if "bias" in n else a for n, a in arrays.items()}
    layer = layer.with_parameters(given)
    close(layer(X), joined(layer, attention(*projected(layer))), 1e-12)


@pytest.mark.parametrize("library", ["numpy", "torch", "strict"], indirect=True)
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_cross_attention_takes_keys_and_values_of_the_context(library, fused):
    to, back = library
    other = RNG.normal(size=(2, 9, 24)) if fused else CONTEXT
    layer = nn.MultiHeadAttention.init(
        24, 4, key_heads=2, context_size=None if fused else 20, fused=fused, like=to(X)
    )
    found = back(layer(to(X), to(other)))
    rows = [back(layer(to(X[:, n : n + 1]), to(other))) for n in range(7)]
    close(found, np.concatenate(rows, axis=1), 1e-5)
    shuffled = other[:, RNG.permutation(9)]
    close(back(layer(to(X), to(shuffled))), found, 1e-5)
    assert np.abs(back(layer(to(X), to(other + 1))) - found).max() > 1e-3


def test_masks_scores_and_scale_rules_are_those_of_attention():
    layer = nn.MultiHeadAttention.init(24, 4, like=X)
    options = {
        "mask": masks.causal() & ~masks.window(0, 0) | masks.prefix(1),
        "score_mod": scores.alibi(4) >> scores.temperature(0.5),
        "scale": scores.long_sequence(),
    }
    close(layer(X, **options), joined(layer, attention(*projected(layer), **options)), 1e-12)


def test_queries_and_keys_are_normalised_head_by_head():
    norm = nn.RMSNorm(RNG.random(6) + 0.5)
    layer = nn.MultiHeadAttention.init(24, 4, query_norm=norm, key_norm=norm, like=X)
    q, k, v = projected(layer)
    q, k = (a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-6) * norm.weight for a in (q, k))
    close(layer(X), joined(layer, attention(q, k, v)), 1e-12)
    assert "query_norm.weight" in layer.parameters()


MHA = nn.MultiHeadAttention.init
PLAIN, TURNED = MHA(24, 4, like=X), MHA(24, 4, rotary=nn.Rotary(6), like=X)
LINEAR, TIED = nn.Linear.init(24, 5, like=X), gpt(X, positions=8, tied=True)
IMAGE = nn.PatchEmbedding(nn.Linear(np.ones((16, 2))), None, (1, 8, 8), 4)
WRONG = np.ones((3, 4))


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: MHA(24, 0, like=X), ValueError, "heads must be at least 1; got 0"),
        (
            lambda: MHA(24, 4, head_size=0, like=X),
            ValueError,
            "head_size must be at least 1; got 0",
        ),
        (lambda: nn.Linear.init(-4, 4, like=X), ValueError, "inputs must be at least 0; got -4"),
        (lambda: nn.Embedding.init(4, 0, like=X), ValueError, "size must be at least 1; got 0"),
        (lambda: MHA(24, 5, like=X), ValueError, "5 heads do not divide a size of 24"),
        (lambda: MHA(24, 4, key_heads=3, like=X), ValueError, "multiple of key_heads"),
        (lambda: MHA(24, 4, fused=True, context_size=5, like=X), ValueError, "one size"),
        (lambda: MHA(24, 4, windw=(1, 0), like=X), TypeError, "'windw'"),
        (
            lambda: nn.MultiHeadAttention(None, None, None, None, 4, 4, 6, is_causal=False),
            ValueError,
            "or only fused",
        ),
        (
            lambda: nn.FeedForward.init(8, like=X, activation="tanh"),
            ValueError,
            "one of relu, gelu.*'tanh'",
        ),
        (
            lambda: nn.FrameEmbedding(LINEAR, LINEAR, "tanh"),
            ValueError,
            "one of relu, gelu.*'tanh'",
        ),
        (lambda: IMAGE(np.ones((1, 8, 4))), ValueError, r"'...', 1, 8, 8\); got \(1, 8, 4\)"),
        (lambda: nn.Linear.init(4, 4, like=X, seed=-1), ValueError, "seed must be at least 0"),
        (lambda: nn.Sinusoidal(5), ValueError, "must be even.*got 5"),
        (lambda: MHA(24, 4, rotary=nn.Rotary(8), like=X), ValueError, "head size 6; got 8"),
        (lambda: nn.Rotary(7), ValueError, "must be even.*got 7"),
        (lambda: nn.Rotary(8, pairing="both"), ValueError, "'halves' or 'neighbours'; got 'both'"),
        (lambda: nn.Rotary(8, frequencies=(1.0,)), ValueError, "4 frequencies; got 1"),
        (lambda: nn.Rotary(8)(np.ones((3, 5)), range(3)), ValueError, "5 components have no 8"),
        (lambda: LINEAR(WRONG), ValueError, r"last axis is 24; got \(3, 4\) float64"),
        (lambda: LINEAR(torch.ones(24)), ValueError, r"takes numpy arrays.* of torch"),
        (lambda: LINEAR(float32(X)), TypeError, "has float64 parameters; got x in float32"),
        (lambda: nn.LayerNorm.init(24, like=X)(WRONG), ValueError, r"this norm .* is 24; got \(3"),
        (lambda: nn.RMSNorm.init(24, like=X)(WRONG), ValueError, r"this norm .* is 24; got \(3"),
        (lambda: nn.Embedding(WRONG)(np.ones(2)), TypeError, "ids must be an integer array of num"),
        (
            lambda: TIED(IDS, cache=TIED.caches(5, batch=(1,))),
            TypeError,
            "pass all of them as caches=",
        ),
        (lambda: PLAIN(X, X, cache=PLAIN.cache(9, like=X)), ValueError, "another sequence"),
        (lambda: PLAIN(X, values=X, cache=PLAIN.cache(9, like=X)), ValueError, "another sequence"),
        (lambda: TURNED(X, X[:, :3]), ValueError, "another sequence"),
        (lambda: PLAIN(X[0, 0]), ValueError, r"shape \(\.\.\., L, size\); got \(24,\)"),
        (
            lambda: TIED(np.asarray(3)),
            ValueError,
            r"ids must have the shape \(\.\.\., L\); got \(\)",
        ),
        (lambda: TIED(IDS[:, [0] * 9]), ValueError, "8 learned positions; got 9 tokens"),
        (
            lambda: nn.Transformer(TIED.embedding, TIED.stack, output=LINEAR, tied=True),
            ValueError,
            "give one of them",
        ),
        (
            lambda: nn.Transformer(IMAGE, TIED.stack, tied=True),
            ValueError,
            "only the embedding of tokens computes logits",
        ),
    ],
)
def test_what_cannot_be_made_or_called_is_refused(make, error, said):
    with pytest.raises(error, match=said):
        make()


def test_numbers_of_numpy_are_settings():
    norm = nn.RMSNorm.init(6, like=X, epsilon=np.float32(1e-6))
    rotary = nn.Rotary(np.int64(6), frequencies=np.ones(3))
    layer = MHA(np.int64(24), np.int64(4), like=X, query_norm=norm, rotary=rotary)
    names = set(PLAIN.parameters()) | {"query_norm.weight"}
    assert set(layer.parameters()) == names
    assert "size=" in repr(layer)
    assert isinstance(layer.rotary.frequencies, tuple)


def test_the_rotary_positions_of_a_decoder_block_are_those_of_its_own_sequence():
    block = nn.DecoderBlock.init(24, 4, rotary=nn.Rotary(6), like=X)
    assert block.attention.rotary is not None
    assert block.cross_attention.rotary is None


def test_no_tokens_and_no_items_give_an_empty_result(library):
    to, back = library
    layer = nn.MultiHeadAttention.init(24, 4, key_heads=2, like=to(float32([0])))
    for shape in ((2, 0, 24), (0, 5, 24)):
        assert back(layer(to(np.zeros(shape, np.float32)))).shape == shape


def test_a_norm_that_is_given_is_copied_for_every_layer():
    norm = nn.RMSNorm.init(6, like=X)
    model = gpt(np.zeros(1), query_norm=norm, key_norm=norm)
    arrays = [
        a for name, a in model.parameters().items() if "query_norm" in name or "key_norm" in name
    ]
    assert len({id(array) for array in arrays}) == len(arrays) == 4


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


def test_more_tokens_than_learned_positions_after_a_cache_are_refused():
    model = gpt(np.zeros(1), positions=8)
    _, caches = model(IDS, caches=model.caches(16, batch=(2,)), is_causal=True)
    with pytest.raises(ValueError, match="8 learned positions; got 9 tokens"):
        model(IDS[:, :2], caches=caches, is_causal=True)


# ---- blocks and models -------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_blocks_add_what_they_compute_before_or_after_the_norm(norm):
    block = nn.EncoderBlock.init(24, 4, norm=norm, like=X)
    y = X + block.attention(block.attention_norm(X))
    close(block(X), y + block.feed_forward(block.feed_forward_norm(y)), 1e-12)
    block = nn.EncoderBlock.init(24, 4, norm=norm, pre_norm=False, like=X)
    y = block.attention_norm(X + block.attention(X))
    close(block(X), block.feed_forward_norm(y + block.feed_forward(y)), 1e-12)


CAUSAL = MHA(24, 4, key_heads=2, is_causal=True, like=X)


def test_a_layer_is_causal_as_it_was_made_unless_a_call_says_otherwise():
    ahead = replace(CAUSAL, is_causal=False)
    for given in ({}, {"is_causal": None}, {"is_causal": True}):
        close(CAUSAL(X, **given), ahead(X, is_causal=True), 0)
        close(CAUSAL(X, **given)[:, :3], CAUSAL(X[:, :3]), 1e-12)
        assert not np.triu(CAUSAL.weights(X, **given), 1).any()
    for given in ({}, {"is_causal": None}, {"is_causal": False}):
        close(ahead(X, **given), CAUSAL(X, is_causal=False), 0)
        assert np.triu(ahead.weights(X, **given), 1).any()
    assert MHA(24, 4, like=X).is_causal is False
    assert "is_causal=True" in repr(CAUSAL)
    assert "is_causal=False" in repr(ahead)


@pytest.mark.parametrize("kind", [nn.KVCache, nn.PagedCache, nn.QuantizedCache])
def test_a_causal_layer_is_causal_over_a_cache(kind):
    whole = CAUSAL(X)
    cache, found = CAUSAL.cache(16, like=X, batch=(2,), kind=kind), []
    for start, stop in ((0, 4), (4, 5), (5, 7)):
        some, cache = CAUSAL(X[:, start:stop], cache=cache)
        found.append(some)
    close(np.concatenate(found, axis=1), whole, 1e-12)


def test_models_and_layers_from_parts_say_whether_they_are_causal():
    for make in (
        lambda: nn.Transformer.init(9, 8, 2, 1, like=X),
        lambda: nn.MultiHeadAttention(None, None, None, None, 4, 4, 6, PLAIN.query),
    ):
        with pytest.raises(
            TypeError, match="missing 1 required keyword-only argument: 'is_causal'"
        ):
            make()
    for given, expected in (({}, True), ({"is_causal": False}, False)):
        block = nn.DecoderBlock.init(24, 4, like=X, **given)
        assert block.attention.is_causal is expected
        assert block.cross_attention.is_causal is False


def test_decoder_blocks_are_causal_and_read_the_context():
    block = nn.DecoderBlock.init(24, 4, context_size=20, like=X)
    found = block(X, CONTEXT)
    close(block(X[:, :3], CONTEXT), found[:, :3], 1e-12)
    y = X + block.attention(block.attention_norm(X), is_causal=True)
    y = y + block.cross_attention(block.cross_attention_norm(y), CONTEXT)
    close(found, y + block.feed_forward(block.feed_forward_norm(y)), 1e-12)
    seen = block(X, CONTEXT, context_mask=masks.prefix(4))
    close(seen, block(X, CONTEXT[:, :4]), 1e-12)


def test_the_weights_of_a_decoder_block_are_of_its_causal_self_attention():
    like = np.zeros(1)
    model = nn.Transformer.init(9, 8, 2, 1, like=like, is_causal=True, cross=True)
    context, keep = np.ones((2, 5, 8)), np.arange(5) < 3
    (found,) = model.weights(np.asarray([[1, 2, 3]] * 2), context, context_mask=keep)
    assert found.shape == (2, 2, 3, 3)
    assert not found[..., 0, 1:].any()


def test_a_mask_of_the_tokens_of_each_item_is_told_its_axes():
    model = nn.Transformer.init(9, 8, 2, 1, like=np.zeros(1), is_causal=False)
    keep = np.arange(5) < np.asarray([[3], [5]])
    with pytest.raises(ValueError, match=r": write mask\[:, None, None, :\] for the keys of each"):
        model(np.ones((2, 5), np.int64), mask=keep)
    model(np.ones((2, 5), np.int64), mask=keep[:, None, None, :])


def test_a_backend_and_a_kernel_are_of_both_attentions_of_a_decoder(monkeypatch):
    asked = []

    def spy(*arrays, **options):
        asked.append((options.get("backend"), options.get("kernel")))
        return attention(*arrays, **options)

    monkeypatch.setattr("polyattn.nn.attention.attention", spy)
    block = nn.DecoderBlock.init(24, 4, like=X)
    block(X, X, backend="array-api", kernel="dense")
    assert asked == [("array-api", "dense")] * 2


# JAX compiles each operation for each shape; test_cache.py has a compiled decoder.
@pytest.mark.parametrize("library", ["numpy", "torch", "strict"], indirect=True)
def test_a_whole_transformer_of_encoder_and_decoder(library):
    to, back = library
    like, sines = to(float32([0])), nn.Sinusoidal(24)
    shared = {"like": like, "positions": sines}
    encoder = nn.Transformer.init(11, 24, 4, 2, **shared, is_causal=False, logits=False)
    decoder = nn.Transformer.init(13, 24, 4, 2, **shared, is_causal=True, cross=True, seed=1)
    source, target = to(IDS), to(IDS[:, :5])
    memory = encoder(source)
    assert tuple(memory.shape) == (2, 7, 24)
    found = back(decoder(target, memory))
    assert found.shape == (2, 5, 13)
    later = np.concatenate([IDS[:, :2], IDS[:, 2:5] + 1], axis=1)
    close(back(decoder(to(later), memory))[:, :2], found[:, :2], 1e-5)
    changed = IDS.copy()
    changed[:, -1] = (changed[:, -1] + 1) % 11
    assert np.abs(back(decoder(target, encoder(to(changed)))) - found).max() > 1e-4


def test_a_post_norm_model_has_no_last_norm_and_segments_and_norm_after_the_embedding():
    like = np.zeros(1)
    settings = {"is_causal": False, "positions": 9, "pre_norm": False, "logits": False}
    model = nn.Transformer.init(11, 24, 4, 1, like=like, **settings)
    assert model.stack.norm is None
    kinds, norm = nn.Embedding.init(2, 24, like=like, seed=8), nn.LayerNorm.init(24, like=like)
    model = nn.Transformer(
        model.embedding, model.stack, model.positions, segments=kinds, embedding_norm=norm
    )
    whole = model.embedding.weight[IDS] + model.positions.weight[:7]
    close(model.embed(IDS), norm(whole + kinds.weight[0]), 1e-12)
    close(model.embed(IDS, segments=IDS % 2), norm(whole + kinds.weight[IDS % 2]), 1e-12)
    close(model(IDS), model.stack(norm(whole + kinds.weight[0])), 1e-12)


def test_logits_are_tied_to_the_embedding_or_have_a_map_of_their_own():
    like = np.zeros(1)
    tied = nn.Transformer.init(11, 24, 4, 1, like=like, is_causal=True, tied=True)
    assert tied.output is None
    vectors = tied.stack(tied.embedding(IDS))
    close(tied(IDS), vectors @ tied.embedding.weight.T, 1e-12)


def test_an_embedding_scale_multiplies_tokens_and_not_positions():
    model = gpt(np.zeros(1))
    scaled = nn.Transformer(model.embedding, model.stack, model.positions, embedding_scale=3.0)
    expected = 3 * model.embedding.weight[IDS] + model.positions.weight[:7]
    close(scaled.embed(IDS), expected, 1e-12)


def test_a_layer_has_its_own_options_and_a_call_overrides_them():
    x, plain = X, nn.MultiHeadAttention.init(24, 4, like=X)
    own = {"scale": 2.0, "softcap": 1.5, "window": (2, 0)}
    layer = nn.MultiHeadAttention.init(24, 4, like=x, **own)
    np.testing.assert_array_equal(layer(x), plain(x, **own))
    np.testing.assert_array_equal(layer.weights(x), plain.weights(x, **own))
    wider = {"window": (5, 0), "scale": 1.0}
    np.testing.assert_array_equal(layer(x, **wider), plain(x, **own | wider))
    assert np.abs(layer(x) - layer(x, **wider)).max() > 1e-3


def test_a_norm_of_all_heads_normalises_before_they_are_split():
    norm = nn.RMSNorm(np.linspace(0.5, 2, 24))
    layer = nn.MultiHeadAttention.init(24, 4, like=X, query_norm=norm)
    _, key, value = projected(layer)
    query = heads_of(norm(layer.query(X)), np.eye(24), 0, 4)
    close(layer(X), joined(layer, attention(query, key, value)), 1e-12)


def test_norms_of_what_parts_add_precede_the_sum():
    x, block = X, nn.EncoderBlock.init(24, 4, like=X, norm=nn.RMSNorm)
    norms = [nn.RMSNorm(np.full(24, factor)) for factor in (0.5, 2.0)]
    block = replace(
        block, attention_norm=None, feed_forward_norm=None,
        attention_output_norm=norms[0], feed_forward_output_norm=norms[1],
    )  # fmt: skip
    middle = x + norms[0](block.attention(x))
    np.testing.assert_array_equal(block(x), middle + norms[1](block.feed_forward(middle)))
