"""Families of models: each computes what transformers computes with the same checkpoint."""

import json

import numpy as np
import pytest
from arrays import close
from optional import torch
from tiny_models import DECODERS, ENCODERS, FLOAT32, IDS, SENSES, SIZES, library, loaded, refused

from polyattn import nn
from polyattn.nn.load.settings import Settings


def outputs_of(model, ids=IDS, **inputs):
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(ids).long(), **inputs)[0].numpy()


# ---- outputs -----------------------------------------------------------------------------------

KEEP = np.arange(13) < np.array([[13], [8]])
SEEN = np.random.default_rng(4).standard_normal((2, 3, 12, 12)).astype(np.float32)
HEARD = np.random.default_rng(5).standard_normal((2, 6, 20)).astype(np.float32)
CAUSAL, BASE = "AutoModelForCausalLM", "AutoModel"
HEADS = {
    "vit": ("AutoModelForImageClassification", "AutoModelForMaskedImageModeling"),
    "whisper": ("AutoModelForSpeechSeq2Seq", "AutoModelForAudioClassification"),
} | dict.fromkeys(ENCODERS, ("AutoModelForMaskedLM",))
MODELS = [
    *((name, CAUSAL) for name in DECODERS),
    *((name, BASE) for name in ("gpt2", "gemma2", "gemma3_text")),
    *((name, head) for name, heads in HEADS.items() for head in (BASE, *heads)),
]


def inputs_of(name):
    """Return what a model of transformers takes, what the same one here takes, and its options."""
    if name in DECODERS:
        return {"input_ids": IDS}, IDS, {}
    if name == "vit":
        return {"pixel_values": SEEN}, SEEN, {}
    if name == "whisper":
        return {"input_features": HEARD}, HEARD, {}
    ids = np.where(KEEP, IDS, ENCODERS[name].get("pad_token_id", 0)).astype(np.int32)
    given = {"input_ids": ids, "attention_mask": KEEP.astype(np.int32)}
    if name != "bert":
        return given, ids, {"mask": KEEP[:, None, None, :]}
    segments = (IDS % 2).astype(np.int32)
    options = {"mask": KEEP[:, None, None, :], "segments": segments}
    return given | {"token_type_ids": segments}, ids, options


def output_of(theirs, name):
    """Return what a model of transformers, or the encoder in it, computes."""
    if name not in DECODERS:
        theirs = getattr(theirs, theirs.base_model_prefix, theirs)
    if name == "whisper":
        theirs = theirs.encoder if hasattr(theirs, "encoder") else theirs.get_encoder()
    given = {key: torch.from_numpy(x) for key, x in inputs_of(name)[0].items()}
    with torch.no_grad():
        return theirs(**given)[0].numpy()


@pytest.mark.parametrize("name", ["bert", "mpnet", "gpt2", "qwen3"])
def test_the_weights_of_a_model_are_transformers_own(made, name):
    theirs = made(name, (DECODERS | ENCODERS)[name], BASE)
    more = {"logits": False} if name in DECODERS else {}
    model = loaded(theirs, **more)
    inputs, ids, options = inputs_of(name)
    given = {key: torch.from_numpy(x) for key, x in inputs.items()}
    with torch.no_grad():
        expected = theirs(**given, output_attentions=True).attentions
    found = model.weights(ids, **options)
    assert len(found) == len(expected)
    for ours, layer in zip(found, expected, strict=True):
        close(ours, layer.numpy())
    last = model.weights(ids, **options, heads=1, rows=[-1])
    close(last[-1], found[-1][:, 1:2, -1:])


@pytest.mark.parametrize(
    ("name", "head", "kind"),
    [(*model, "numpy") for model in MODELS]
    + [
        ("llama", BASE, "torch"),
        ("vit", BASE, "torch"),
        pytest.param("llama", BASE, "jax", marks=pytest.mark.slow),
    ],
)
def test_a_model_is_transformers_own(made, tmp_path, name, head, kind):
    to, back = library(kind)
    theirs = made(name, (DECODERS | ENCODERS | SENSES)[name], head)
    theirs.save_pretrained(tmp_path)
    expected = output_of(theirs, name)
    _, x, options = inputs_of(name)
    options = {n: to(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
    for weights, config in ((tmp_path, None), (theirs.state_dict(), theirs.config.to_dict())):
        model = nn.load.model(weights, config, like=to(FLOAT32), logits=head == CAUSAL)
        found = back(model(to(x), **options))
        at = KEEP if name in ENCODERS else ...
        close(found[at], expected[at])


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma3_text"])
def test_a_decoder_is_causal_unless_its_config_or_the_call_says_otherwise(made, name):
    theirs = made(name, DECODERS[name] | {"is_causal": False})
    ahead = outputs_of(theirs)
    model = loaded(theirs)
    close(model(IDS), ahead)
    with pytest.raises(ValueError, match="the model is not causal"):
        nn.generate(model, IDS, 1)
    model = loaded(theirs, changes={"is_causal": True})
    assert all(block.attention.is_causal for block in model.stack.blocks)
    assert np.abs(model(IDS) - ahead).max() > 0.01
    if not any(block.attention.window for block in model.stack.blocks):
        close(model(IDS, is_causal=False), ahead)
    close(loaded(theirs, changes={"is_causal": None})(IDS), ahead)  # null


# ---- rotary positions ---------------------------------------------------------------------------

LLAMA = SIZES | {"max_position_embeddings": 16, "num_hidden_layers": 2}
ROPES = {
    "plain": {"rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    "yarn of null": {
        "rope_type": "yarn", "factor": None, "original_max_position_embeddings": 8,
    },
    "yarn told": {
        "rope_type": "yarn", "factor": 8.0, "beta_fast": 4.0, "beta_slow": 2.0,
        "attention_factor": 1.2, "original_max_position_embeddings": 16,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
}  # fmt: skip


def rotated(made, rope, **changes):
    """Return a Llama whose scores are so large that its positions are seen in its logits."""
    settings = LLAMA | {"rope_parameters": dict(ROPES[rope])} | changes
    theirs = made(f"llama {rope}", settings)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if ("q_proj" in name or "k_proj" in name) and parameter.std() < 1:
                parameter.mul_(30)
    return theirs


@pytest.mark.parametrize(
    ("told", "length", "rope"), [*((False, 40, rope) for rope in ROPES), (True, 40, "dynamic")]
)
def test_rotary_scaling_is_transformers_own(made, told, length, rope):
    theirs = rotated(made, rope)
    ids = np.random.default_rng(5).integers(0, 50, (1, length))
    expected = outputs_of(theirs, ids)
    longer = {"length": length} if told else {}
    model = loaded(theirs, **longer)
    close(model(ids), expected)
    close(model(ids, positions=range(length)), expected)


def test_dynamic_scaling_follows_a_cache_as_in_transformers(made):
    theirs = rotated(made, "dynamic")
    model, cached = loaded(theirs), None
    caches = model.caches(40, batch=(2,))
    for ids in np.split(np.random.default_rng(5).integers(0, 50, (2, 32)), [13, 15, 20, 21], 1):
        with torch.no_grad():
            expected = theirs(torch.from_numpy(ids), past_key_values=cached, use_cache=True)
        cached = expected.past_key_values
        found, caches = model(ids, caches=caches)
        close(found, expected.logits)


def test_rotary_scaling_under_its_old_names_is_understood(made):
    theirs = rotated(made, "linear")
    old = {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    found = loaded(theirs, changes=old | {"rope_parameters": None})(IDS)
    close(found, outputs_of(theirs))


# ---- names of weights ---------------------------------------------------------------------------


def test_names_of_other_heads_of_buffers_and_old_ones_are_known(made):
    bert = made("bert", ENCODERS["bert"], "AutoModel")
    state = {f"bert.{name}": array for name, array in bert.state_dict().items()}
    state |= {"cls.predictions.bias": torch.zeros(50)}
    state |= {"bert.embeddings.position_ids": torch.arange(16)}
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("m.bias", "m.beta"): array
        for name, array in state.items()
    }
    assert old.keys() != state.keys()
    model = nn.load.model(old, bert.config.to_dict(), like=FLOAT32)
    close(model(IDS), outputs_of(bert))
    for name, more in {
        "gpt2": ("transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"),
        "llama": ("model.layers.0.self_attn.rotary_emb.inv_freq",),
    }.items():
        theirs = made(name, DECODERS[name])
        buffers = dict.fromkeys(more, torch.ones(4))
        nn.load.model(theirs.state_dict() | buffers, theirs.config.to_dict(), like=FLOAT32)


def test_a_tied_model_may_be_stored_under_the_name_of_its_output_map(made):
    gpt2 = made("gpt2", DECODERS["gpt2"])
    state = gpt2.state_dict()
    state["lm_head.weight"] = state.pop("transformer.wte.weight")
    config = gpt2.config.to_dict()
    model = nn.load.model(state, config, like=FLOAT32)
    close(model(IDS), outputs_of(gpt2))
    del config["tie_word_embeddings"]  # whose default is true
    bare = nn.load.model(state, config, like=FLOAT32, logits=False)
    np.testing.assert_array_equal(bare.embedding.weight, model.embedding.weight)
    assert not bare.tied
    another = gpt2.state_dict() | {"lm_head.weight": torch.ones(50, 32)}
    with pytest.raises(ValueError, match=r"lm_head\.weight and wte\.weight are tied"):
        nn.load.model(another, gpt2.config.to_dict(), like=FLOAT32)
    config["tie_word_embeddings"] = False
    with pytest.raises(ValueError, match=r"wte\.weight: missing"):
        nn.load.model(state, config, like=FLOAT32, logits=False)


def test_a_base_model_has_logits_if_the_embedding_is_tied_or_is_told_how_it_is_loaded(made):
    gpt2, llama = (made(name, DECODERS[name]) for name in ("gpt2", "llama"))
    state = gpt2.transformer.state_dict()
    bare = nn.load.model(state, gpt2.config.to_dict(), like=FLOAT32)
    close(bare(IDS), outputs_of(gpt2))
    with pytest.raises(ValueError, match=r"lm_head\.weight: missing.* pass logits=False"):
        nn.load.model(llama.model.state_dict(), llama.config.to_dict(), like=FLOAT32)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("vit", SEEN[..., :8], r"pixels must have the shape .*, 3, 12, 12\).*12, 8\)"),
        ("whisper", HEARD.repeat(2, axis=-1), "there are 10 learned positions; got 20 tokens"),
        ("whisper", HEARD[:, :5], "last axis is 18"),
    ],
)
def test_images_and_sound_of_other_sizes_are_refused(made, name, given, said):
    model = loaded(made(name, SENSES[name], BASE))
    with pytest.raises(ValueError, match=said):
        model(given)


# ---- settings of anyone ------------------------------------------------------------------------

ALL = DECODERS | ENCODERS | SENSES
# Texts of JSON, as Python's parser takes it, which knows more numbers.
VALUES = [
    *("null", "[]", "{}", '"x"', "-1", "0", "1", "2.5", "true", "NaN", "Infinity", "1e400"),
    *("1e300", "1e-30", "1" + "0" * 9, "1" + "0" * 18, "1" + "0" * 400, "[" * 400 + "]" * 400),
    *('{"a":' * 400 + "1" + "}" * 400, "[1]", "[[]]", '["sliding_attention"]'),
    *('["x", "x", "x"]', '{"full_attention": 3}', f"[{', '.join(['1' + '0' * 400] * 3)}]"),
    '{"full_attention": {"rope_type": "x"}, "sliding_attention": {}}',
]


def with_setting(config, name, value):
    """Return a config in which a setting has a value, a text."""
    return json.loads(json.dumps(config | {name: "here"}).replace('"here"', value))


class Recorded(dict):
    """The settings of a config, which note those that are read."""

    def get(self, name, default=None):
        self.read.add(name)
        return super().get(name, default)

    def __contains__(self, name):
        self.read.add(name)
        return super().__contains__(name)


@pytest.mark.parametrize("name", ["bert", "gpt2", "gemma2", "whisper", "modernbert"])
def test_every_setting_is_understood_or_refused_by_name(made, monkeypatch, name):
    theirs = made(name, ALL[name], CAUSAL if name in DECODERS else BASE)
    state, config = theirs.state_dict(), theirs.config.to_dict()
    init, Recorded.read = Settings.__init__, {"model_type"}

    def record(self, config, origin="config"):
        init(self, config, origin)
        if origin == "config":  # and no section of it
            self._config = Recorded(self._config)

    with monkeypatch.context() as patch:
        patch.setattr(Settings, "__init__", record)
        assert refused(state, config) is None
    for setting in sorted(Recorded.read):
        for value in VALUES:
            said = refused(state, with_setting(config, setting, value))
            if said is not None:
                rope = "rope_" in setting and "rope_" in said
                assert setting in said or rope or "do not fit" in said, (value, said)
                assert len(said) < 10_000


def rope(kind, **more):
    """Return settings of rotary positions."""
    return {"rope_parameters": ROPES.get(kind, {"rope_type": kind}) | more}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("bert", {"model_type": "t5"}, "model_type is 't5'; this function reads 'gpt2'"),
        ("bert", {"model_type": None}, "model_type is None; add it to the config; this"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'rel"),
        ("bert", {"hidden_act": "mish"}, "hidden_act must be one of gelu.*; got 'mish'"),
        ("bert", {"num_attention_heads": None}, "config has no num_attention_heads"),
        ("bert", {"num_attention_heads": 5}, "num_attention_heads 5 does not divide hidden_size"),
        ("gpt2", {"n_layer": 0}, r"n_layer must be a positive integer.*; got 0"),
        ("gpt2", {"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false; got 1"),
        ("llama", rope("longrope", factor=2), "got 'longrope'"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "config has no factor"),
        (
            "llama",
            {"quantization_config": {"bits": 4, "quant_method": "awq"}},
            r"quantization_config of config: quant_method must be absent: load .* got 'awq'",
        ),
        ("llama", rope("yarn", truncate=None), "truncate is None"),
        ("llama", rope("yarn", mscale=0.7), "mscale is 0.7"),
        ("llama", {"head_dim": 5} | rope("linear"), "must be even, for rotary posi.*; got 5"),
        ("llama", {"num_key_value_heads": 3}, "a divisor of num_attention_heads 4; got 3"),
        ("llama", {"rms_norm_eps": float("inf")}, "number in the range of float32; got inf"),
        ("llama", {"rope_parameters": "x"}, "config: rope_parameters must be a mapping of"),
        (
            "llama",
            rope("llama3", high_freq_factor=1.0),
            r"larger than low_freq_factor, 1\.0; got 1",
        ),
        ("llama", rope("yarn", rope_theta=1), "rope_theta must be larger than 1, for yarn; got 1"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types is .* None only"),
        ("phi3", {"partial_rotary_factor": 0.4}, "rotate an even number of the 8 comp.*; got 0.4"),
        ("gemma3_text", {"layer_types": ["linear_attention"] * 3}, "a list of full_attention and "),
        ("vit", {"patch_size": 5}, "patch_size must be a divisor of image_size 12; got 5"),
    ],
)
def test_a_config_that_is_not_understood_is_refused_by_name(name, change, said):
    config = {"model_type": name} | ALL[name] | change
    with pytest.raises(ValueError, match=said):
        nn.load.model({}, config, like=FLOAT32)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gpt2", {"n_layer": 10**9}, r"n_layer is 10{9}, and weights .* 2 blocks.*h\.0\. and"),
        ("bert", {"num_hidden_layers": 4}, "num_hidden_layers is 4, and weights of .* have 3"),
        ("llama", {"head_dim": 10**12}, r"q_proj\.weight: expected \(4000000000000, 32\)"),
    ],
)
def test_settings_are_held_to_the_weights(made, tmp_path, name, change, said):
    made(name, ALL[name], "AutoModel").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | rope("linear") | change))
    with pytest.raises(ValueError, match=said):
        nn.load.model(tmp_path, like=FLOAT32)


def test_a_length_is_for_dynamic_scaling_alone_and_positive():
    plain = {"model_type": "llama"} | LLAMA
    dynamic = plain | rope("dynamic")
    for config, length in ((plain, 40), (dynamic, 10**400), (dynamic, 0)):
        with pytest.raises(ValueError, match=r"length needs dynamic scaling .* positive; got"):
            nn.load.model({}, config, like=FLOAT32, length=length)
    with pytest.raises(TypeError, match="length must be an integer"):
        nn.load.model({}, dynamic, like=FLOAT32, length="40")
