"""Families of models: each computes what transformers computes with the same checkpoint."""

import numpy as np
import pytest
import torch
from libraries import from_torch, to_torch

from polyattn import nn

FLOAT32 = np.zeros(1, dtype=np.float32)
IDS = np.random.default_rng(3).integers(3, 50, (2, 13)).astype(np.int32)
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 128,
}  # fmt: skip
GEMMA = SIZES | {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 5}
ROPE = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 5e4, "original_max_position_embeddings": 32,
}  # fmt: skip
#: Settings of tiny models, by family and what is special in them.
DECODERS = {
    "mistral": SIZES | {"sliding_window": 4},
    "mistral without a window": SIZES | {"sliding_window": None, "head_dim": 12},
    "qwen2": SIZES,
    "qwen2 with windows": SIZES
    | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": SIZES | {"head_dim": 12, "rope_parameters": ROPE},
    "phi3": SIZES,
    "phi3 rotated in part": SIZES | {"partial_rotary_factor": 0.5, "sliding_window": 6},
    "gemma2": GEMMA,
    "gemma2 without softcaps": GEMMA
    | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    "gemma3_text": GEMMA
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma3_text with a softcap": GEMMA | {"final_logit_softcapping": 1.5},
    "olmo2": SIZES,
    "smollm3": SIZES | {"no_rope_layer_interval": 2},
    "smollm3 with windows": SIZES
    | {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 4},
}
#: One of each family.
FAMILIES = [name for name in DECODERS if " " not in name]


@pytest.fixture(params=["numpy", "torch", "jax"])
def library(request):
    """How NumPy arrays go to a library and come back."""
    if request.param == "jax":
        return pytest.importorskip("jax.numpy").asarray, np.asarray
    return {"numpy": (np.asarray, np.asarray), "torch": (to_torch, from_torch)}[request.param]


@pytest.fixture(scope="module")
def transformers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        module = pytest.importorskip("transformers")
        module.logging.set_verbosity_error()
        module.logging.disable_progress_bar()
        return module


@pytest.fixture(scope="module")
def made(transformers):
    """Return tiny models of random weights, none of them 0 or 1, by name and kind of head."""
    models = {}

    def make(name, settings, kind="AutoModelForCausalLM"):
        if (name, kind) not in models:
            torch.manual_seed(0)
            config = transformers.AutoConfig.for_model(name.split()[0], **settings)
            config._attn_implementation = "eager"  # with softcaps
            model = getattr(transformers, kind).from_config(config).eval()
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.1)
            models[name, kind] = model
        return models[name, kind]

    return make


def close(found, expected):
    """Compare to 2e-6 of the largest number, or of 1."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == np.float32
    bound = 2e-6 * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


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
    close(model(IDS, is_causal=True), outputs_of(theirs))


@pytest.mark.parametrize("name", ["gemma3_text", "smollm3", "olmo2"])
def test_a_decoder_reads_caches_on_every_library(made, name, library):
    to, back = library
    theirs = made(name, DECODERS[name])
    model = nn.load.model(theirs.state_dict(), theirs.config.to_dict(), like=to(FLOAT32))
    _, caches = model(to(IDS[:, :9]), caches=model.caches(16, batch=(2,)), is_causal=True)
    found, _ = model(to(IDS[:, 9:]), caches=caches, is_causal=True)
    close(back(found), outputs_of(theirs)[:, 9:])
