"""Saving: transformers reads back what it would have written."""

import json

import ml_dtypes
import numpy as np
import pytest
from optional import torch
from tiny_models import DECODERS, ENCODERS, FAMILIES, FLOAT32, SENSES, library

from polyattn import nn

safetensors = pytest.importorskip("safetensors.numpy")
CAUSAL, BASE = "AutoModelForCausalLM", "AutoModel"
CASES = [(name, CAUSAL) for name in FAMILIES] + [(name, BASE) for name in ENCODERS]


def loaded(theirs, like=FLOAT32, **more):
    """Return a model and its settings."""
    config = theirs.config.to_dict()
    return nn.load.model(theirs.state_dict(), config, like=like, **more), config


@pytest.mark.parametrize(("name", "kind"), [*CASES, ("qwen2", BASE), ("vit", BASE)])
def test_transformers_reads_back_what_was_saved(made, transformers, tmp_path, name, kind):
    theirs = made(name, (DECODERS | ENCODERS | SENSES)[name], kind)
    more = {"logits": False} if name in DECODERS and kind == BASE else {}
    model, config = loaded(theirs, **more)
    nn.save(model, tmp_path, config)
    again, facts = getattr(transformers, kind).from_pretrained(tmp_path, output_loading_info=True)
    assert not facts["unexpected_keys"]
    assert all("pooler" in name for name in facts["missing_keys"])
    state = again.state_dict()
    for key, array in theirs.state_dict().items():
        if "pooler" not in key:
            np.testing.assert_array_equal(state[key].numpy(), array.numpy(), err_msg=key)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("torch", np.float32),
        ("torch", ml_dtypes.bfloat16),
        pytest.param("jax", ml_dtypes.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_models_of_every_library_and_dtype_are_saved_bit_for_bit(made, tmp_path, kind, dtype):
    to, back = library(kind)
    model, config = loaded(made("phi3", DECODERS["phi3"], CAUSAL), like=to(FLOAT32.astype(dtype)))
    nn.save(model, tmp_path / "new" / "folder", config)
    again = nn.load.model(tmp_path / "new" / "folder", like=to(FLOAT32.astype(dtype)))
    for name, array in again.parameters().items():
        assert array.dtype == model.embedding.weight.dtype
        np.testing.assert_array_equal(back(array), back(model.parameters()[name]), err_msg=name)


def test_a_trained_model_is_saved_with_the_config_of_its_folder(made, tmp_path):
    made("qwen3", DECODERS["qwen3"], CAUSAL).save_pretrained(tmp_path)
    model = nn.load.model(tmp_path, like=torch.zeros(1))
    trained = {name: (2 * a).requires_grad_() for name, a in model.parameters().items()}
    nn.save(model.with_parameters(trained), tmp_path / "trained", tmp_path)
    again = nn.load.model(tmp_path / "trained", like=FLOAT32)
    weight = model.embedding.weight.numpy()
    np.testing.assert_array_equal(again.embedding.weight, 2 * weight)
    config = (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "trained" / "config.json").read_text()) == json.loads(config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, and the model has 3 blocks"),
        ({"intermediate_size": 40}, r"feed_forward\.up\.weight has the shape \(32, 40\); got"),
        ({"rms_norm_eps": 0.5}, r"epsilon=0\.5, .* and the model has .*epsilon=1e-06"),
        ({"tie_word_embeddings": True}, r"unknown: output\.weight"),
        ({"model_type": "t5"}, "model_type is 't5'; this function reads 'gpt2'"),
        ({"hidden_act": "mish"}, "hidden_act must be one of"),
    ],
)
def test_a_config_of_another_model_is_refused_before_anything_is_written(
    made, tmp_path, change, said
):
    model, config = loaded(made("qwen2", DECODERS["qwen2"], CAUSAL))
    with pytest.raises(ValueError, match=said):
        nn.save(model, tmp_path / "no", config | change)
    with pytest.raises(TypeError, match="config is of type int, not a mapping"):
        nn.save(model, tmp_path / "no", 3)
    assert not (tmp_path / "no").exists()


def test_an_encoder_has_no_logits(made):
    with pytest.raises(ValueError, match="a BERT is an encoder, which has no logits: leave out"):
        loaded(made("bert", ENCODERS["bert"], BASE), logits=True)
