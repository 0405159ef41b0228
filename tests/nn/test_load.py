"""Weights from elsewhere: what is made of them computes what those that had them compute."""

import json
import os
import shutil
import sys

import ml_dtypes
import numpy as np
import pytest
import tiny_models
import torch
from libraries import from_torch, to_torch

from polyattn import nn

FLOAT32 = np.zeros(1, dtype=np.float32)
WIDE = {np.float32: torch.float32, np.float64: torch.float64}


@pytest.fixture(params=["numpy", "torch", "jax"])
def library(request):
    """How NumPy arrays go to a library and come back."""
    if request.param == "jax":
        return pytest.importorskip("jax.numpy").asarray, np.asarray
    return {"numpy": (np.asarray, np.asarray), "torch": (to_torch, from_torch)}[request.param]


def close(found, expected, dtype=np.float32, scale=1.0):
    """Compare to a few roundings of what the numbers' largest has."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == dtype
    bound = 40 * np.finfo(dtype).eps * max(1.0, float(np.abs(expected).max())) * scale
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


def tokens(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# ---- torch.nn ----------------------------------------------------------------------------------

KEEP = np.array([[True] * 7, [True] * 4 + [False] * 3])


def theirs_of(layer, dtype, *args, **options):
    layer = layer.to(WIDE[dtype]).eval()
    for parameter in layer.parameters():  # biases begin with 0, which would hide them
        torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        return layer(*map(torch.from_numpy, args), **options)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both"])
def test_torch_attention_is_torchs_own(dtype, bias, masks):
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(16, 4, bias=bias, batch_first=True)
    x = tokens(2, 7, 16, dtype=dtype)
    padded, causal = masks in ("padding", "both"), masks in ("causal", "both")
    expected = theirs_of(
        layer,
        dtype,
        *(x, x, x),
        key_padding_mask=torch.from_numpy(~KEEP) if padded else None,
        attn_mask=torch.triu(torch.ones(7, 7, dtype=torch.bool), 1) if causal else None,
    )[0]
    ours = nn.load.torch_attention(layer.state_dict(), 4, like=np.zeros(1, dtype=dtype))
    mask = KEEP[:, None, None, :] if padded else None
    close(ours(x, mask=mask, is_causal=causal), expected, dtype)


@pytest.mark.parametrize("sizes", [(16, 16), (10, 10), (10, 6)])
@pytest.mark.parametrize("bias", [True, False])
def test_torch_attention_to_another_sequence_is_torchs_own(sizes, bias):
    torch.manual_seed(0)
    kdim, vdim = sizes
    layer = torch.nn.MultiheadAttention(16, 4, bias=bias, kdim=kdim, vdim=vdim, batch_first=True)
    x, key, value = tokens(2, 5, 16), tokens(2, 7, kdim, seed=1), tokens(2, 7, vdim, seed=2)
    value = key if kdim == vdim else value
    expected = theirs_of(layer, np.float32, x, key, value)[0]
    ours = nn.load.torch_attention(layer.state_dict(), 4, like=FLOAT32)
    context = key if kdim == vdim else np.concatenate([key, value], axis=-1)
    close(ours(x, context), expected)


@pytest.mark.parametrize("at", ["one context", "x twice", "three"])
def test_torch_attention_takes_query_key_and_value_of_one_size(at):
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    x, key, value = (tokens(2, 5, 16, seed=n) for n in range(3))
    given = {"one context": (x, key, key), "x twice": (x, x, value), "three": (x, key, value)}[at]
    expected = theirs_of(layer, np.float32, *given)[0]
    ours = nn.load.torch_attention(layer.state_dict(), 4, like=FLOAT32)
    close(ours(*given), expected)
    with pytest.raises(ValueError, match="describe the sequence of x"):
        ours(x, values=x, cache=ours.cache(8, like=FLOAT32, batch=(2,)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("causal", [False, True])
def test_torch_encoder_layer_is_torchs_own(dtype, norm_first, activation, causal):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        16, 4, 24, activation=activation, batch_first=True, norm_first=norm_first,
        layer_norm_eps=1e-3, bias=not causal,
    )  # fmt: skip
    x = tokens(2, 7, 16, dtype=dtype)
    options = {"src_key_padding_mask": torch.from_numpy(~KEEP)}
    if causal:
        options["src_mask"] = torch.triu(torch.ones(7, 7, dtype=torch.bool), 1)
    expected = theirs_of(layer, dtype, x, **options)
    ours = nn.load.torch_encoder_layer(
        layer.state_dict(), 4, like=np.zeros(1, dtype=dtype), activation=activation,
        norm_first=norm_first, epsilon=1e-3,
    )  # fmt: skip
    found = ours(x, mask=KEEP[:, None, None, :], is_causal=causal)
    close(found[KEEP], np.asarray(expected)[KEEP], dtype, scale=4)


def test_a_prefix_picks_one_layer_of_a_larger_model():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    whole = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = tokens(2, 7, 16)
    expected = theirs_of(whole, np.float32, x)
    for number in range(2):
        x = nn.load.torch_encoder_layer(whole.state_dict(), 4, like=x, prefix=f"layers.{number}.")(
            x
        )
    close(x, expected, scale=4)
    with pytest.raises(ValueError, match=r"'layers\.2\.'; the first names are layers\.0"):
        nn.load.torch_encoder_layer(whole.state_dict(), 4, like=x, prefix="layers.2.")


def test_parameters_are_in_the_library_device_and_dtype_of_like(library):
    to, back = library
    state = torch.nn.MultiheadAttention(16, 4, dtype=torch.float64).state_dict()
    x = to(tokens(2, 3, 16))
    layer = nn.load.torch_attention(state, 4, like=x)
    for parameter in layer.parameters().values():
        assert type(parameter) is type(x)
        assert parameter.dtype == x.dtype
    np.testing.assert_array_equal(
        back(layer.fused.weight), state["in_proj_weight"].numpy().T.astype(np.float32)
    )


def test_parameters_are_copies():
    source = torch.nn.MultiheadAttention(16, 4)
    layer = nn.load.torch_attention(dict(source.named_parameters()), 4, like=torch.zeros(1))
    assert not any(array.requires_grad for array in layer.parameters().values())
    for array in layer.parameters().values():
        array.zero_()
    assert source.in_proj_weight.abs().max() > 0


def test_every_name_that_does_not_fit_is_listed_at_once():
    state = torch.nn.MultiheadAttention(16, 4).state_dict()
    del state["out_proj.bias"]
    state["in_proj_weight"] = torch.zeros(40, 16)
    state["in_proj_bias"] = torch.zeros(48, dtype=torch.int8)
    state["extra"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"do not fit a torch\.nn\.MultiheadAttention") as caught:
        nn.load.torch_attention(state, 4, like=FLOAT32)
    said = str(caught.value)
    assert "in_proj_weight: expected (48, 16), got (40, 16)" in said
    assert "in_proj_bias: expected float16, bfloat16, float32, float64, got int8" in said
    assert "extra: unknown, (3,) float32" in said
    block = torch.nn.TransformerEncoderLayer(16, 4, 24).state_dict()
    del block["linear2.weight"]
    with pytest.raises(ValueError, match=r"linear2\.weight: missing, expected \(16, 24\)"):
        nn.load.torch_encoder_layer(block, 4, like=FLOAT32)


def test_what_there_is_no_place_for_is_refused_by_name():
    state = torch.nn.MultiheadAttention(16, 4, add_bias_kv=True).state_dict()
    with pytest.raises(ValueError, match="bias_k and bias_v, of add_bias_kv=True"):
        nn.load.torch_attention(state, 4, like=FLOAT32)
    state = torch.nn.MultiheadAttention(16, 4).state_dict()
    with pytest.raises(ValueError, match="5 heads do not divide the layer's size of 16"):
        nn.load.torch_attention(state, 5, like=FLOAT32)
    with pytest.raises(ValueError, match="floating dtype; got int64"):
        nn.load.torch_attention(state, 4, like=np.zeros(1, dtype=np.int64))
    with pytest.raises(ValueError, match=r"no out_proj\.weight of 2 axes.*they have a \(3,\)"):
        nn.load.torch_attention({"a": np.zeros(3)}, 4, like=FLOAT32)


# ---- Keras -------------------------------------------------------------------------------------


# Keras hands NumPy its variables in an older way than NumPy 2 asks for.
old_arrays = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def keras():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "torch")
        yield pytest.importorskip("keras")


@old_arrays
@pytest.mark.parametrize(
    "options", [{}, {"value_dim": 5}, {"use_bias": False}, {"output_shape": 9}]
)
@pytest.mark.parametrize("by", ["order", "name"])
def test_keras_attention_is_kerass_own(keras, options, by):
    layer = keras.layers.MultiHeadAttention(4, 3, **options)
    x, context = tokens(2, 5, 16), tokens(2, 7, 10, seed=1)
    layer.build(x.shape, context.shape)
    layer.set_weights([tokens(*w.shape, seed=n) for n, w in enumerate(layer.get_weights())])
    weights, prefix = layer.get_weights(), ""
    if by == "name":
        weights = {weight.path: weight.numpy() for weight in layer.weights}
        prefix = f"{layer.name}/"
    ours = nn.load.keras_attention(weights, like=FLOAT32, prefix=prefix)
    to_numpy = keras.ops.convert_to_numpy
    close(ours(x, context), to_numpy(layer(x, context)), scale=4)
    causal = ours(x, context, is_causal=True, query_offset=0)
    close(causal, to_numpy(layer(x, context, use_causal_mask=True)), scale=4)


@old_arrays
def test_keras_keys_and_values_of_other_tokens_are_one_context(keras):
    layer = keras.layers.MultiHeadAttention(4, 3)
    x, key, value = tokens(2, 5, 16), tokens(2, 7, 10, seed=1), tokens(2, 7, 6, seed=2)
    expected = keras.ops.convert_to_numpy(layer(x, value, key))
    ours = nn.load.keras_attention(layer.get_weights(), like=FLOAT32)
    close(ours(x, np.concatenate([key, value], axis=-1)), expected)


@old_arrays
@pytest.mark.parametrize("causal", [False, True])
def test_a_keras_layers_config_has_its_window(keras, causal):
    layer = keras.layers.MultiHeadAttention(4, 3, sliding_window=2)
    x, value = tokens(2, 9, 16), tokens(2, 9, 16, seed=1)
    layer.build(x.shape, x.shape)
    ours = nn.load.keras_attention(layer.get_weights(), layer.get_config(), like=FLOAT32)
    expected = layer(x, value, use_causal_mask=causal)
    close(ours(x, value, is_causal=causal), keras.ops.convert_to_numpy(expected))
    axes = keras.layers.MultiHeadAttention(4, 3, attention_axes=(1, 2)).get_config()
    with pytest.raises(ValueError, match=r"attention_axes is \(1, 2\)"):
        nn.load.keras_attention(layer.get_weights(), axes, like=FLOAT32)


@old_arrays
def test_a_keras_gate_is_refused_by_name(keras):
    layer = keras.layers.MultiHeadAttention(4, 3, use_gate=True)
    layer.build((2, 5, 16), (2, 5, 16))
    with pytest.raises(ValueError, match="8 weights, or 4 without biases; got 10"):
        nn.load.keras_attention(layer.get_weights(), like=FLOAT32)
    named = {weight.path: weight.numpy() for weight in layer.weights}
    with pytest.raises(ValueError, match="use_gate=True"):
        nn.load.keras_attention(named, like=FLOAT32, prefix=f"{layer.name}/")


# ---- models of transformers --------------------------------------------------------------------

IDS = np.random.default_rng(3).integers(0, 50, (2, 9))
LLAMA = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 16,
}  # fmt: skip
TYPED = LLAMA | {"model_type": "llama"}
ROPES = {
    "plain": {"rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    "yarn told": {
        "rope_type": "yarn", "factor": 8.0, "beta_fast": 4.0, "beta_slow": 2.0, "mscale": 0.7,
        "mscale_all_dim": 0.4, "original_max_position_embeddings": 16,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
}  # fmt: skip


def made(transformers, family, **config):
    """Return a tiny model of random weights, none of them 0 or 1."""
    names = {"bert": ("Bert", "Model"), "gpt2": ("GPT2", "LMHeadModel")}
    name, kind = names.get(family, ("Llama", "ForCausalLM"))
    torch.manual_seed(0)
    own = getattr(transformers, f"{name}Config")(**config)
    model = getattr(transformers, f"{name}{kind}")(own).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def sharp(theirs):
    """Return a model whose scores are so large that its positions are seen in its logits."""
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(30)
    return theirs


@pytest.fixture(scope="module")
def bert(transformers):
    return made(
        transformers, "bert", vocab_size=50, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=48, max_position_embeddings=16,
    )  # fmt: skip


@pytest.fixture(scope="module")
def gpt2(transformers):
    return made(transformers, "gpt2", vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=16)


def logits_of(model, ids=IDS, **inputs):
    with torch.no_grad():
        output = model(input_ids=torch.from_numpy(ids), **inputs)
    return output[0].numpy()


def sources(model, folder):
    """Yield a model's weights and config, as arrays and as files."""
    model.save_pretrained(folder)
    yield model.state_dict(), model.config.to_dict()
    yield folder, None
    yield folder / "model.safetensors", None


def held(found, expected):
    """Compare to 2e-6, whatever the numbers are."""
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


# JAX compiles each operation for seconds: Llama's are most of the others'.
elsewhere = pytest.mark.parametrize(
    "library", ["numpy", "torch", pytest.param("jax", marks=pytest.mark.slow)], indirect=True
)


@elsewhere
def test_bert_is_transformers_own(bert, tmp_path, library):
    to, back = library
    keep = np.ones(IDS.shape, dtype=bool)
    keep[1, 5:] = False
    kinds = (IDS % 2).astype(np.int32)
    expected = logits_of(
        bert, attention_mask=torch.from_numpy(keep), token_type_ids=torch.from_numpy(kinds).long()
    )
    for weights, config in sources(bert, tmp_path):
        model = nn.load.model(weights, config, like=to(FLOAT32))
        ids, mask = to(IDS.astype(np.int32)), to(keep[:, None, None, :])
        found = back(model(ids, segments=to(kinds), mask=mask))
        held(found[keep], expected[keep])


@elsewhere
def test_gpt2_is_transformers_own(gpt2, tmp_path, library):
    to, back = library
    expected = logits_of(gpt2)
    for weights, config in sources(gpt2, tmp_path):
        model = nn.load.model(weights, config, like=to(FLOAT32))
        held(back(model(to(IDS.astype(np.int32)), is_causal=True)), expected)


@pytest.mark.parametrize("rope", ["plain", "yarn told"])
def test_llama_is_transformers_own(transformers, tmp_path, library, rope):
    to, back = library
    theirs = made(transformers, "llama", **LLAMA, rope_parameters=dict(ROPES[rope]))
    expected = logits_of(theirs)
    for weights, config in sources(theirs, tmp_path):
        model = nn.load.model(weights, config, like=to(FLOAT32))
        held(back(model(to(IDS.astype(np.int32)), is_causal=True)), expected)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("length", [9, 40])
@pytest.mark.parametrize("told", [False, True])
def test_rotary_scaling_is_transformers_own(transformers, rope, length, told):
    theirs = sharp(made(transformers, "llama", **LLAMA, rope_parameters=dict(ROPES[rope])))
    ids = np.random.default_rng(5).integers(0, 50, (1, length))
    expected = logits_of(theirs, ids)
    longer = {"length": length} if rope == "dynamic" and told else {}
    model = nn.load.model(theirs.state_dict(), theirs.config.to_dict(), like=FLOAT32, **longer)
    close(model(ids, is_causal=True), expected, scale=8)
    close(model(ids, is_causal=True, positions=range(length)), expected, scale=8)


@pytest.fixture(scope="module")
def dynamic(transformers):
    return sharp(made(transformers, "llama", **LLAMA, rope_parameters=dict(ROPES["dynamic"])))


def compiled(kind, function):
    if kind == "torch":
        return torch.compile(function, backend="eager", fullgraph=True, dynamic=True)
    return __import__("jax").jit(function) if kind == "jax" else function


@pytest.mark.parametrize("kind", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_dynamic_scaling_follows_the_length_in_a_compiled_function(dynamic, kind):
    to, back = tiny_models.library(kind)
    config = dynamic.config.to_dict()
    model = nn.load.model(dynamic.state_dict(), config, like=to(FLOAT32))
    run = compiled(kind, lambda ids: model(ids, is_causal=True))
    for length in (9, 23, 40):
        ids = np.random.default_rng(5).integers(0, 50, (1, length))
        close(back(run(to(ids.astype(np.int32)))), logits_of(dynamic, ids), scale=8)


def test_dynamic_scaling_follows_a_cache_as_in_transformers(dynamic):
    model = nn.load.model(dynamic.state_dict(), dynamic.config.to_dict(), like=FLOAT32)
    caches, theirs = model.caches(40, batch=(2,)), None
    for ids in np.split(np.random.default_rng(5).integers(0, 50, (2, 32)), [13, 15, 20, 21], 1):
        with torch.no_grad():
            expected = dynamic(torch.from_numpy(ids), past_key_values=theirs, use_cache=True)
        theirs = expected.past_key_values
        found, caches = model(ids, caches=caches, is_causal=True)
        close(found, expected.logits, scale=8)


def test_rotary_scaling_under_its_old_names_is_understood(transformers):
    theirs = made(transformers, "llama", **LLAMA, rope_parameters=dict(ROPES["linear"]))
    config = theirs.config.to_dict()
    del config["rope_parameters"]
    config |= {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    model = nn.load.model(theirs.state_dict(), config, like=FLOAT32)
    close(model(IDS, is_causal=True), logits_of(theirs), scale=4)


def test_hidden_states_take_the_place_of_logits_where_none_are_asked_for(gpt2, transformers):
    config = gpt2.config.to_dict()
    model = nn.load.model(gpt2.state_dict(), config, like=FLOAT32, logits=False)
    close(model(IDS, is_causal=True), logits_of(gpt2.transformer), scale=4)
    bare = nn.load.model(gpt2.transformer.state_dict(), config, like=FLOAT32)
    close(bare(IDS, is_causal=True), logits_of(gpt2), scale=4)
    llama = made(transformers, "llama", **LLAMA)
    model = nn.load.model(
        llama.model.state_dict(), llama.config.to_dict(), like=FLOAT32, logits=False
    )
    close(model(IDS, is_causal=True), logits_of(llama.model), scale=4)


def test_heads_prefixes_buffers_and_old_names_of_bert_are_known(bert, transformers):
    state = {f"bert.{name}": array for name, array in bert.state_dict().items()}
    state["cls.predictions.bias"] = torch.zeros(50)
    state["bert.embeddings.position_ids"] = torch.arange(16)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("m.bias", "m.beta"): array
        for name, array in state.items()
    }
    assert old.keys() != state.keys()
    for weights in (state, old):
        model = nn.load.model(weights, bert.config.to_dict(), like=FLOAT32)
        close(model(IDS), logits_of(bert), scale=4)


def test_buffers_of_gpt2_and_llama_are_known(gpt2, transformers):
    state = gpt2.state_dict() | {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16, dtype=torch.bool),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    nn.load.model(state, gpt2.config.to_dict(), like=FLOAT32)
    llama = made(transformers, "llama", **LLAMA)
    state = llama.state_dict() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    nn.load.model(state, llama.config.to_dict(), like=FLOAT32)


def test_a_tied_output_map_that_is_another_is_refused(gpt2):
    state = gpt2.state_dict() | {"lm_head.weight": torch.ones(50, 32)}
    with pytest.raises(ValueError, match=r"lm_head\.weight and wte\.weight are tied"):
        nn.load.model(state, gpt2.config.to_dict(), like=FLOAT32)


def test_a_tied_model_may_be_stored_under_the_name_of_its_output_map(gpt2):
    state = gpt2.state_dict()
    state["lm_head.weight"] = state.pop("transformer.wte.weight")
    config = gpt2.config.to_dict()
    model = nn.load.model(state, config, like=FLOAT32)
    close(model(IDS, is_causal=True), logits_of(gpt2), scale=4)
    del config["tie_word_embeddings"]  # whose default is true
    bare = nn.load.model(state, config, like=FLOAT32, logits=False)
    np.testing.assert_array_equal(bare.embedding.weight, model.embedding.weight)
    assert not bare.tied
    config["tie_word_embeddings"] = False
    with pytest.raises(ValueError, match=r"wte\.weight: missing"):
        nn.load.model(state, config, like=FLOAT32, logits=False)


def test_a_base_model_is_told_how_it_is_loaded(transformers):
    llama = made(transformers, "llama", **LLAMA)
    with pytest.raises(ValueError, match=r"lm_head\.weight: missing.* pass logits=False"):
        nn.load.model(llama.model.state_dict(), llama.config.to_dict(), like=FLOAT32)


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("bert", {"model_type": "t5"}, "model_type is 't5'; this function reads 'gpt2'"),
        ("bert", {"model_type": None}, "model_type is None; add it to the config; this"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'rel"),
        ("bert", {"hidden_act": "mish"}, "hidden_act must be one of gelu.*; got 'mish'"),
        ("bert", {"num_attention_heads": None}, "config has no num_attention_heads"),
        ("bert", {"num_attention_heads": 5}, "num_attention_heads 5 does not divide hidden_size"),
        ("bert", {"layer_norm_eps": "small"}, "layer_norm_eps must be a positive number.*; got 's"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is T"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False"),
        ("gpt2", {"n_layer": 0}, r"n_layer must be a positive integer.*; got 0"),
        ("gpt2", {"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false; got 1"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 2}}, "got 'longrope'"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "config has no factor"),
        (
            "llama",
            {"quantization_config": {"bits": 4, "quant_method": "awq"}},
            r"quantization_config of config: quant_method must be absent: load .* got 'awq'",
        ),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "truncate": False}},
            "truncate is False",
        ),
    ],
)
def test_a_config_that_is_not_understood_is_refused_by_name(family, change, said):
    sizes = LLAMA | {"n_embd": 32, "n_layer": 2, "n_head": 4}
    with pytest.raises(ValueError, match=said):
        nn.load.model({}, sizes | {"model_type": family} | change, like=FLOAT32)


def test_a_length_is_for_dynamic_scaling_alone():
    with pytest.raises(ValueError, match=r"length needs dynamic scaling .* positive; got 40"):
        nn.load.model({}, TYPED, like=FLOAT32, length=40)


# ---- files -------------------------------------------------------------------------------------


def test_a_model_in_many_files_is_read_by_its_index(gpt2, tmp_path):
    gpt2.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = nn.load.model(tmp_path, like=FLOAT32)
    close(model(IDS, is_causal=True), logits_of(gpt2), scale=4)


def test_a_whole_file_precedes_an_index_as_in_transformers(gpt2, tmp_path):
    doubled = {name: 2 * array for name, array in gpt2.state_dict().items()}
    gpt2.save_pretrained(tmp_path, max_shard_size="20KB", state_dict=doubled)
    gpt2.save_pretrained(tmp_path / "whole")
    (tmp_path / "whole" / "model.safetensors").rename(tmp_path / "model.safetensors")
    model = nn.load.model(tmp_path, like=FLOAT32)
    close(model(IDS, is_causal=True), logits_of(gpt2), scale=4)


@elsewhere
def test_a_file_of_bfloat16_is_read_bit_for_bit(gpt2, tmp_path, library):
    to, back = library
    safetensors = pytest.importorskip("safetensors.torch")
    state = {name: array.bfloat16() for name, array in gpt2.transformer.state_dict().items()}
    safetensors.save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(gpt2.config.to_dict()))
    expected = state["wte.weight"].float().numpy()
    for like in (FLOAT32, FLOAT32.astype(ml_dtypes.bfloat16)):
        model = nn.load.model(tmp_path, like=to(like))
        assert model.embedding.weight.dtype == to(like).dtype
        np.testing.assert_array_equal(back(model.embedding.weight).astype(np.float32), expected)


def test_what_is_no_source_is_said(tmp_path, gpt2):
    config = gpt2.config.to_dict()
    with pytest.raises(FileNotFoundError, match=r"there is no .*model\.safetensors"):
        nn.load.model(tmp_path, config, like=FLOAT32)
    with pytest.raises(FileNotFoundError, match=r"there is no .*config\.json: pass config="):
        nn.load.model(tmp_path, like=FLOAT32)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is not a \.safetensors file"):
        nn.load.model(tmp_path / "pytorch_model.bin", config, like=FLOAT32)
    with pytest.raises(TypeError, match="pass config="):
        nn.load.model(gpt2.state_dict(), like=FLOAT32)
    with pytest.raises(TypeError, match=r"pass config\.to_dict\(\)"):
        nn.load.model(gpt2.state_dict(), gpt2.config, like=FLOAT32)
    with pytest.raises(TypeError, match="weights is a GPT2LMHeadModel; pass a mapping"):
        nn.load.model(gpt2, config, like=FLOAT32)


def test_what_is_there_in_place_of_weights_is_said_with_what_to_do(tmp_path, gpt2):
    config = gpt2.config.to_dict()
    with pytest.raises(FileNotFoundError, match=r"snapshot_download\('openai/gpt2'\)"):
        nn.load.model("openai/gpt2", like=FLOAT32)
    packed = {"h.0.attn.c_attn.qweight": np.zeros((4, 4), np.int32)}
    with pytest.raises(ValueError, match=r"c_attn\.qweight is quantized, as GPTQ and AWQ"):
        nn.load.model(packed, config, like=FLOAT32)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    for given in (None, config):
        with pytest.raises(FileNotFoundError, match=r"there is pytorch_model\.bin, a pickle"):
            nn.load.model(tmp_path, given, like=FLOAT32)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"an adapter of PEFT, .*merge_and_unload"):
        nn.load.model(tmp_path, like=FLOAT32)


def test_a_missing_package_is_named_with_the_command(monkeypatch, gpt2, tmp_path):
    gpt2.save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        nn.load.model(tmp_path, like=FLOAT32)


# ---- files and settings of anyone --------------------------------------------------------------

# The settings that a loader reads, of which some stand for others or are often absent.
READ = {
    "bert": (
        "model_type hidden_size num_hidden_layers num_attention_heads intermediate_size vocab_size"
        " type_vocab_size max_position_embeddings layer_norm_eps hidden_act is_decoder"
        " position_embedding_type"
    ),
    "gpt2": (
        "model_type n_embd n_layer n_head n_inner vocab_size n_positions layer_norm_epsilon"
        " activation_function scale_attn_weights scale_attn_by_inverse_layer_idx"
        " add_cross_attention tie_word_embeddings"
    ),
    "llama": (
        "model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
        " intermediate_size vocab_size rms_norm_eps hidden_act attention_bias mlp_bias rope_theta"
        " rope_parameters rope_scaling partial_rotary_factor max_position_embeddings"
        " original_max_position_embeddings tie_word_embeddings"
    ),
}
# As Python's parser takes them, which knows more numbers than JSON.
VALUES = [
    *("null", "[]", "{}", '"x"', "-1", "0", "2.5", "true", "NaN", "Infinity", "1e400", "1e300"),
    *("1" + "0" * 9, "1" + "0" * 18, "1" + "0" * 400, "[" * 400 + "]" * 400),
    '{"a":' * 400 + "1" + "}" * 400,
]


@pytest.fixture(scope="module")
def folders(bert, gpt2, transformers, tmp_path_factory):
    """Return a folder of each family's tiny model."""
    llama = made(transformers, "llama", **LLAMA, head_dim=8)
    found = {}
    for family, model in {"bert": bert, "gpt2": gpt2, "llama": llama}.items():
        found[family] = tmp_path_factory.mktemp(family)
        model.save_pretrained(found[family])
    return found


def copied(folder, to):
    """Return a copy of a model's folder, to be spoilt."""
    return shutil.copytree(folder, to, dirs_exist_ok=True)


def with_setting(config, name, value):
    """Return the text of a config in which a setting has a value, itself text."""
    text = json.dumps(config | {name: "here"})
    return text.replace(f'"{name}": "here"', f'"{name}": {value}')


def refused(folder):
    """Return what is said of a model, or None if it is loaded."""
    try:
        nn.load.model(folder, like=FLOAT32)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("family", READ)
def test_every_setting_is_understood_or_refused_by_name(family, folders, tmp_path):
    folder = copied(folders[family], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert refused(folder) is None
    for name in READ[family].split():
        for value in VALUES:
            (folder / "config.json").write_text(with_setting(config, name, value))
            said = refused(folder)
            assert said is None or name in said or "do not fit" in said, (name, value, said)
            assert said is None or len(said) < 10_000


@pytest.mark.parametrize("rope", ["linear", "dynamic", "yarn told", "llama3"])
def test_every_setting_of_rotary_positions_is_understood_or_refused_by_name(
    rope, folders, tmp_path
):
    folder = copied(folders["llama"], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    given = {"rope_theta": 1e4, "attention_factor": 1.0, **ROPES[rope]}
    for name in [*given, "type", "partial_rotary_factor", "truncate"]:
        for value in [*VALUES, "1", "1e-300", "1e-37", "3e38"]:
            text = with_setting(config, "rope_parameters", with_setting(given, name, value))
            (folder / "config.json").write_text(text)
            said = refused(folder)
            assert said is None or name.removeprefix("rope_") in said, (name, value, said)


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        (
            "gpt2",
            {"n_layer": 10**9},
            r"n_layer is 10{9}, and .* have 2 blocks.*h\.0\. and",
        ),
        (
            "bert",
            {"num_hidden_layers": 3},
            "num_hidden_layers is 3, and weights of .* have 2",
        ),
        ("llama", {"head_dim": 10**12}, r"q_proj\.weight: expected \(4000000000000, 32\)"),
        ("llama", {"head_dim": 5}, "head_dim must be even, for rotary positions; got 5"),
        ("llama", {"num_key_value_heads": 3}, "a divisor of num_attention_heads 4; got 3"),
        (
            "llama",
            {"rms_norm_eps": float("inf")},
            "number in the range of float32; got inf",
        ),
        ("llama", {"rope_parameters": "x"}, r"config\.json: rope_parameters must be a mapping of"),
        (
            "llama",
            {"rope_parameters": ROPES["llama3"] | {"high_freq_factor": 1.0}},
            r"of .*config\.json: high_freq_factor must be larger than low_freq_factor, 1\.0; got 1",
        ),
        (
            "llama",
            {"rope_parameters": ROPES["yarn"] | {"rope_theta": 1}},
            "rope_theta must be larger than 1, for yarn; got 1",
        ),
    ],
)
def test_settings_are_held_to_their_range_and_to_the_weights(
    family, change, said, folders, tmp_path
):
    folder = copied(folders[family], tmp_path)
    config = json.loads((folder / "config.json").read_text()) | change
    if "rope_parameters" not in change:  # where frequencies are computed, by the size of a head
        config["rope_parameters"] = ROPES["linear"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=said):
        nn.load.model(folder, like=FLOAT32)


def test_a_head_of_two_numbers_has_one_frequency_however_it_is_scaled():
    assert nn.ntk_scaling(2, 8.0) == (1.0,)


def test_a_length_and_an_epsilon_are_numbers(transformers):
    config = TYPED | {"rope_parameters": ROPES["dynamic"]}
    with pytest.raises(TypeError, match="length must be an integer"):
        nn.load.model({}, config, like=FLOAT32, length="40")
    with pytest.raises(ValueError, match=r"length needs dynamic scaling and must be positive"):
        nn.load.model({}, config, like=FLOAT32, length=10**400)
    state = torch.nn.TransformerEncoderLayer(16, 4, 24).state_dict()
    for epsilon in (float("inf"), float("nan"), -1.0, "1e-5"):
        with pytest.raises(ValueError, match="epsilon must be 0 or a positive number"):
            nn.load.torch_encoder_layer(state, 4, like=FLOAT32, epsilon=epsilon)
    with pytest.raises(TypeError, match="heads must be an integer"):
        nn.load.torch_encoder_layer(state, "4", like=FLOAT32)


def test_weights_have_names_of_text_each_once(gpt2):
    config = gpt2.config.to_dict()
    for load in (
        lambda weights: nn.load.model(weights, config, like=FLOAT32),
        lambda weights: nn.load.torch_attention(weights, 4, like=FLOAT32),
    ):
        with pytest.raises(ValueError, match="weights are arrays by name; got the name 0"):
            load({0: FLOAT32})
        with pytest.raises(TypeError, match=r"lm_head\.weight is a int, not an array"):
            load({"lm_head.weight": 3, "wte.weight": 4})
    state = gpt2.state_dict() | {"wte.weight": torch.ones(50, 32)}
    with pytest.raises(ValueError, match=r"transformer\.wte\.weight and wte\.weight are one"):
        nn.load.model(state, config, like=FLOAT32)


def indexed(folder, name="model-1.safetensors", **more):
    """Put a folder's weights into one file that an index names; return it and the index."""
    shard = folder / "model-1.safetensors"
    (folder / "model.safetensors").rename(shard)
    names = pytest.importorskip("safetensors.numpy").load_file(shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, name) | more}))
    return shard, index


def test_an_index_names_no_file_outside_its_folder(folders, tmp_path):
    folder = copied(folders["gpt2"], tmp_path / "one")
    shard, index = indexed(folder)
    (tmp_path / "other").mkdir()
    other = shard.rename(tmp_path / "other" / shard.name)
    good = index.read_text()
    for name in (f"../other/{shard.name}", f"..\\other\\{shard.name}", str(other), "C:x", "a/../b"):
        index.write_text(good.replace(shard.name, json.dumps(name)[1:-1]))
        said = refused(folder)
        assert said is not None
        assert str(index) in said
        assert f"{name!r}, which is outside the folder" in said
    # The Hugging Face cache: names in the folder, links to files elsewhere.
    index.write_text(good)
    (folder / shard.name).symlink_to(other)
    assert refused(folder) is None
    # A folder of the folder.
    (folder / "sub").mkdir()
    (folder / shard.name).rename(folder / "sub" / shard.name)
    index.write_text(good.replace(shard.name, f"sub/{shard.name}"))
    assert refused(folder) is None


def test_an_index_says_which_file_has_a_weight(folders, tmp_path):
    folder = copied(folders["gpt2"], tmp_path)
    shard, index = indexed(folder, extra="model-1.safetensors")
    said = refused(folder)
    assert said == f"{shard} has no extra, which {index} says it has"
    # The same name in another file, of other numbers, is not the model's.
    save_file = pytest.importorskip("safetensors.numpy").save_file
    names = json.loads(index.read_text())["weight_map"]
    del names["extra"]
    save_file({"extra": FLOAT32, next(iter(names)): FLOAT32}, folder / "z")
    index.write_text(json.dumps({"weight_map": names | {"lm_head.weight": "z"}}))
    assert "z has no lm_head.weight" in refused(folder)
    save_file(dict.fromkeys([*names, "h.0.attn.bias"], FLOAT32), folder / "z")
    index.write_text(json.dumps({"weight_map": names | {"h.0.attn.bias": "z"}}))
    assert refused(folder) is None
    (folder / "z").unlink()
    with pytest.raises(FileNotFoundError, match=r"z, which .*index\.json names"):
        nn.load.model(folder, like=FLOAT32)


TEXTS = (b"", b"{", b"[]", b"3", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"[" * 10_000, b'{"a":' * 10_000)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_file_of_settings_that_is_damaged_is_named(name, folders, tmp_path):
    folder = copied(folders["gpt2"], tmp_path)
    file = folder / name
    if "index" in name:
        (folder / "model.safetensors").unlink()
    index = (b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}')
    for text in (*TEXTS, *(index if "index" in name else ())):
        file.write_bytes(text)
        assert str(file) in refused(folder), text


def test_weights_that_are_damaged_are_refused_with_their_files_name(folders, tmp_path):
    folder = copied(folders["gpt2"], tmp_path)
    file = folder / "model.safetensors"
    good = file.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    cuts = [good[:length] for length in (0, 5, 8, 50, header - 1, header, len(good) - 1)]
    lengths = [length.to_bytes(8, "little") + good[8:] for length in (0, header, 10**8, 2**63)]
    one = b'{"dtype":"F32","shape":[%b],"data_offsets":[0,4]}'
    headers = [
        b'{"a":' + one % b"1" + b',"b":' + one % b"1" + b"}",  # overlapping
        b'{"a":' + one % b"-1" + b"}",
        b'{"a":' + one % (b"1," * 69 + b"1") + b"}",
        b'{"a":' + one.replace(b"4]", b"0]") % b"4611686018427387904,0,4611686018427387904" + b"}",
        b'{"a":' + one.replace(b"F32", b"F8_E4M3") % b"4" + b"}",
        *TEXTS,
    ]
    headers = [len(text).to_bytes(8, "little") + text + b"\0" * 4 for text in headers]
    for data in (*cuts, *lengths, *headers, good + b"\0"):
        file.write_bytes(data)
        assert str(file) in refused(folder), data[:80]
    rng = np.random.default_rng(0)
    for _ in range(100):
        flipped = bytearray(good)
        flipped[rng.integers(header)] ^= 1 << rng.integers(8)
        file.write_bytes(flipped)
        said = refused(folder)  # A name that is another one, at least.
        assert said is None or str(file) in said or "weights" in said


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_folder_in_a_files_place_is_no_file(name, folders, tmp_path):
    folder = copied(folders["gpt2"], tmp_path)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(FileNotFoundError, match=rf"there is no .*{name}: a folder has this name"):
        nn.load.model(folder, like=FLOAT32)
    (folder / name).rmdir()
    if os.name != "posix":
        return
    os.mkfifo(folder / name)
    with pytest.raises(FileNotFoundError, match=rf"there is no .*{name}: a device or pipe has"):
        nn.load.model(folder, like=FLOAT32)


def hostile_folders():
    """Yield what a file of weights, an index or a config may hold to flood a message."""
    many = {f"h.{n % 2}.\x1b[31m{n}": FLOAT32 for n in range(3000)}
    many["\x1b" * 100_000] = FLOAT32
    kind = {"a": {"dtype": "\x1b" * 100_000, "shape": [1], "data_offsets": [0, 4]}}
    index = "model.safetensors.index.json"
    yield {"model.safetensors": many}, "and 3,"
    yield {"model.safetensors": kind}, "model.safetensors is damaged"
    yield {"model.safetensors": {"\x1b" * 100_000: FLOAT32}, "n_layer": 7}, "(100,000 characters)"
    yield {index: dict.fromkeys(many, "z"), "z": {"a": FLOAT32}}, "and 2,981 more, which"
    yield {index: {"a": "../" + "\x1b" * 100_000}}, "outside the folder"
    yield {index: {"a": "\x1b" * 200}}, "there is no"


@pytest.mark.parametrize(("content", "said"), list(hostile_folders()), ids=lambda x: str(x)[:20])
def test_a_message_is_short_and_printable_and_names_the_path(content, said, folders, tmp_path):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    folder = copied(folders["gpt2"], tmp_path)
    (folder / "model.safetensors").unlink()
    for name, value in content.items():
        if name == "n_layer":
            config = json.loads((folder / "config.json").read_text()) | {name: value}
            (folder / "config.json").write_text(json.dumps(config))
        elif name.endswith(".json"):
            (folder / name).write_text(json.dumps({"weight_map": value}))
        elif isinstance(next(iter(value.values())), dict):
            header = json.dumps(value).encode()
            data = len(header).to_bytes(8, "little") + header + b"\0" * 4
            (folder / name).write_bytes(data)
        else:
            save_file(value, folder / name)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        nn.load.model(folder, like=FLOAT32)
    message = str(caught.value)
    assert said in message
    assert str(folder) in message
    assert len(message) < 5000
    assert message.replace("\n", "").isprintable()
