"""Families of models: each computes what transformers computes with the same checkpoint."""

import numpy as np
import pytest
import torch
from tiny_models import DECODERS, ENCODERS, FAMILIES, FLOAT32, IDS, SENSES, library

from polyattn import nn

# JAX compiles each operation for each shape.
KINDS = ["numpy", "torch", pytest.param("jax", marks=pytest.mark.slow)]


#: What two families are held to without their heads or with caches. In this dtype transformers
#: itself is up to 3.5e-6 away from the same model in float64: norms of each part, with weights of
#: about 1, magnify the order of sums. All others are held to 2e-6, and differ by 2e-7.
WIDER = {"gemma2": 5e-6, "gemma3_text": 5e-6}


def close(found, expected, atol=2e-6):
    """Compare absolutely, whatever the size of the numbers."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


def outputs_of(model, ids=IDS, **inputs):
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(ids).long(), **inputs)[0].numpy()


# ---- decoders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_is_transformers_own(made, tmp_path, name):
    theirs = made(name, DECODERS[name])
    theirs.save_pretrained(tmp_path)
    model = nn.load.model(tmp_path, like=FLOAT32)
    close(model(IDS, is_causal=True), outputs_of(theirs))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_decoder_without_a_head_is_transformers_own(made, tmp_path, name):
    theirs = made(name, DECODERS[name], "AutoModel")
    theirs.save_pretrained(tmp_path)
    model = nn.load.model(tmp_path, like=FLOAT32, logits=False)
    close(model(IDS, is_causal=True), outputs_of(theirs), WIDER.get(name, 2e-6))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_text", "smollm3", "olmo2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_reads_caches_on_every_library(made, name, kind):
    to, back = library(kind)
    theirs = made(name, DECODERS[name])
    model = nn.load.model(theirs.state_dict(), theirs.config.to_dict(), like=to(FLOAT32))
    _, caches = model(to(IDS[:, :9]), caches=model.caches(16, batch=(2,)), is_causal=True)
    found, _ = model(to(IDS[:, 9:]), caches=caches, is_causal=True)
    close(back(found), outputs_of(theirs)[:, 9:], WIDER.get(name, 2e-6))


# ---- encoders ----------------------------------------------------------------------------------

KEEP = np.arange(13) < np.array([[13], [8]])


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("kind", ["AutoModel", "AutoModelForMaskedLM"])
def test_an_encoder_is_transformers_own(made, tmp_path, name, kind):
    theirs = made(name, ENCODERS[name], kind)
    theirs.save_pretrained(tmp_path)
    ids = np.where(KEEP, IDS, ENCODERS[name].get("pad_token_id", 0))
    base = getattr(theirs, theirs.base_model_prefix, theirs)
    expected = outputs_of(base, ids, attention_mask=torch.from_numpy(KEEP).long())
    model = nn.load.model(tmp_path, like=FLOAT32)
    found = model(ids, mask=KEEP[:, None, None, :])
    close(found[KEEP], expected[KEEP])


# ---- images and sound --------------------------------------------------------------------------

SEEN = np.random.default_rng(4).standard_normal((2, 3, 12, 12)).astype(np.float32)
HEARD = np.random.default_rng(5).standard_normal((2, 6, 20)).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "head", ["AutoModel", "AutoModelForImageClassification", "AutoModelForMaskedImageModeling"]
)
def test_vit_is_transformers_own(made, tmp_path, head, kind):
    to, back = library(kind)
    theirs = made("vit", SENSES["vit"], head)
    theirs.save_pretrained(tmp_path)
    base = getattr(theirs, theirs.base_model_prefix, theirs)
    with torch.no_grad():
        expected = base(torch.from_numpy(SEEN))[0].numpy()
    for weights in (tmp_path, theirs.state_dict()):
        model = nn.load.model(weights, theirs.config.to_dict(), like=to(FLOAT32))
        close(back(model(to(SEEN))), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "head", ["AutoModel", "AutoModelForSpeechSeq2Seq", "AutoModelForAudioClassification"]
)
def test_the_encoder_of_whisper_is_transformers_own(made, tmp_path, head, kind):
    to, back = library(kind)
    theirs = made("whisper", SENSES["whisper"], head)
    theirs.save_pretrained(tmp_path)
    encoder = theirs.encoder if hasattr(theirs, "encoder") else theirs.get_encoder()
    with torch.no_grad():
        expected = encoder(torch.from_numpy(HEARD))[0].numpy()
    model = nn.load.model(tmp_path, like=to(FLOAT32))
    close(back(model(to(HEARD))), expected)


def test_images_and_sound_of_other_sizes_are_refused(made):
    theirs = made("vit", SENSES["vit"], "AutoModel")
    model = nn.load.model(theirs.state_dict(), theirs.config.to_dict(), like=FLOAT32)
    with pytest.raises(ValueError, match=r"pixels must have the shape .*\(3, 12, 12\).*12, 8\)"):
        model(SEEN[..., :8])
    theirs = made("whisper", SENSES["whisper"], "AutoModel")
    model = nn.load.model(theirs.state_dict(), theirs.config.to_dict(), like=FLOAT32)
    with pytest.raises(ValueError, match="there are 10 learned positions; got 11 tokens"):
        model(np.concatenate([HEARD, HEARD[..., :1]], axis=-1))
    with pytest.raises(ValueError, match="last axis is 18"):
        model(HEARD[:, :5])


# ---- settings of anyone ------------------------------------------------------------------------

ALL = DECODERS | ENCODERS | SENSES
#: The settings that only some families read.
READ = {
    "mistral": "sliding_window layer_types",
    "qwen2 with windows": "use_sliding_window sliding_window max_window_layers layer_types",
    "phi3 rotated in part": "partial_rotary_factor sliding_window rms_norm_eps",
    "gemma2": (
        "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping hidden_activation"
        " use_bidirectional_attention head_dim"
    ),
    "gemma3_text": (
        "layer_types sliding_window_pattern rope_parameters rope_local_base_freq sliding_window"
        " rope_theta attn_logit_softcapping"
    ),
    "smollm3": "no_rope_layers no_rope_layer_interval mlp_bias layer_types use_sliding_window",
    "roberta": "pad_token_id max_position_embeddings position_embedding_type",
    "distilbert": "dim n_heads n_layers hidden_dim activation",
    "mpnet": "relative_attention_num_buckets",
    "modernbert": (
        "norm_eps norm_bias local_attention global_attn_every_n_layers rope_parameters"
        " global_rope_theta layer_types hidden_activation mlp_bias rope_scaling"
    ),
    "vit": "image_size patch_size num_channels qkv_bias layer_norm_eps hidden_act",
    "whisper": (
        "d_model encoder_layers encoder_attention_heads encoder_ffn_dim num_mel_bins"
        " max_source_positions activation_function"
    ),
}
VALUES = [
    *(None, [], {}, "x", -1, 0, 1, 2.5, True, float("nan"), float("inf"), 1e-30, 10**18, 10**400),
    *([1], [[]], ["sliding_attention"], ["x"] * 3, {"full_attention": 3}, [10**400] * 3),
    {"full_attention": {"rope_type": "x"}, "sliding_attention": {}},
]


@pytest.mark.parametrize("name", READ)
def test_every_setting_is_understood_or_refused_by_name(made, name):
    kind = "AutoModelForCausalLM" if name in DECODERS else "AutoModel"
    theirs = made(name, ALL[name], kind)
    state, config = theirs.state_dict(), theirs.config.to_dict()
    for setting in READ[name].split():
        for value in VALUES:
            try:
                nn.load.model(state, config | {setting: value}, like=FLOAT32)
            except ValueError as error:
                said = str(error)
                rope = "rope_" in setting and "rope_" in said
                assert setting in said or rope or "weights do not fit" in said, (value, said)
                assert len(said) < 10_000


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "mistral",
            {"layer_types": ["full_attention"] * 3},
            "layer_types is .* None only",
        ),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "longrope"}},
            "rope_type must be .*longrope",
        ),
        ("phi3", {"partial_rotary_factor": 0.4}, "rotate an even number of the 8 comp.*; got 0.4"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma3_text", {"model_type": "gemma3"}, "model_type is 'gemma3'"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50"),
        ("gemma3_text", {"layer_types": ["linear_attention"] * 3}, "a list of full_attention and "),
        ("smollm3", {"no_rope_layers": [2, 0, 1]}, "no_rope_layers must be a list of 0 and 1"),
        ("mpnet", {"relative_attention_num_buckets": 8}, "relative_attention_num_buckets is 8"),
        ("roberta", {"is_decoder": True}, "is_decoder is True"),
        ("vit", {"patch_size": 5}, "patch_size must be a divisor of image_size 12; got 5"),
    ],
)
def test_a_config_that_is_not_understood_is_refused_by_name(name, change, said):
    config = {"model_type": name} | ALL[name] | change
    with pytest.raises(ValueError, match=said):
        nn.load.model({}, config, like=FLOAT32)
