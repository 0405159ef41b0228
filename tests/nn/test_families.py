"""Families of models: each computes what transformers computes with the same checkpoint."""

import numpy as np
import pytest
import torch
from tiny_models import DECODERS, ENCODERS, FAMILIES, FLOAT32, IDS, library

from polyattn import nn


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
@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
def test_a_decoder_reads_caches_on_every_library(made, name, kind):
    to, back = library(kind)
    theirs = made(name, DECODERS[name])
    model = nn.load.model(theirs.state_dict(), theirs.config.to_dict(), like=to(FLOAT32))
    _, caches = model(to(IDS[:, :9]), caches=model.caches(16, batch=(2,)), is_causal=True)
    found, _ = model(to(IDS[:, 9:]), caches=caches, is_causal=True)
    close(back(found), outputs_of(theirs)[:, 9:])


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
