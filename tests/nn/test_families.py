"""Families of models: each computes what transformers computes with the same checkpoint."""

import numpy as np
import pytest
import torch
from tiny_models import DECODERS, ENCODERS, FAMILIES, FLOAT32, IDS, SENSES, library

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


# ---- images and sound --------------------------------------------------------------------------

SEEN = np.random.default_rng(4).standard_normal((2, 3, 12, 12)).astype(np.float32)
HEARD = np.random.default_rng(5).standard_normal((2, 6, 20)).astype(np.float32)


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
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


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
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
