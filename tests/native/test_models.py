"""Whole models in `same_bits`: logits, tokens and samples do not depend on how prompts are cut."""

import numpy as np
import pytest
import torch

import polyattn
from polyattn import masks, nn

#: A decoder for each kind of layer that families of models have.
LLAMA = {
    "gated": True, "activation": "silu", "norm": nn.RMSNorm, "bias": False, "key_heads": 2,
    "rotary": nn.Rotary(12), "layers": 3, "inner": 100,
}  # fmt: skip
DECODERS = {
    "llama": LLAMA,
    "gpt2": {"positions": 80, "tied": True, "fused": True, "activation": "gelu_tanh"},
    "gemma": LLAMA
    | {
        "activation": "gelu_tanh", "layers": 2, "window": (5, 0), "softcap": 4.0, "scale": 0.2,
        "rotary": nn.Rotary(12, frequencies=nn.yarn_scaling(12, 4.0)[0], magnitude=1.1),
        "logits_softcap": 2.5, "tied": True,
    },
    "heads of 64, wide": {
        "head_size": 64, "inner": 600, "pre_norm": False, "activation": "relu", "key_heads": 1,
        "rotary": nn.Rotary(64, pairing="neighbours"),
    },
}  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 90, (3, 37))
LIBRARIES = {"numpy": np.asarray, "torch": torch.from_numpy}


def decoder(settings, library, dtype="float32"):
    """Return a decoder of random parameters, of which some are as torch stores them."""
    given = {"layers": 3, "positions": None, "is_causal": True} | settings
    cap = given.pop("logits_softcap", None)
    layers, head_size = given.pop("layers"), given.get("head_size", 12)
    size = {12: 48}.get(head_size, 40)
    model = nn.Transformer.init(90, size, 4, layers, like=np.zeros(1, dtype), **given)
    rng = np.random.default_rng(1)
    drawn = {
        name: (rng.standard_normal(a.shape[::-1]) * 0.2 + (a.ndim == 1)).astype(dtype).T
        for name, a in model.parameters().items()
    }
    model = model.with_parameters({name: LIBRARIES[library](a) for name, a in drawn.items()})
    fields = {name: getattr(model, name) for name in model.__dataclass_fields__}
    return nn.Transformer(**fields | {"logits_softcap": cap})


def same(found, expected, message=""):
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected), message)


@pytest.mark.parametrize(
    ("name", "library"), [*((name, "numpy") for name in DECODERS), ("llama", "torch")]
)
def test_logits_are_the_same_however_a_prompt_is_cut(name, library):
    model, put = decoder(DECODERS[name], library), LIBRARIES[library]
    ids = put(IDS)
    with polyattn.same_bits(), torch.no_grad():
        whole = np.asarray(model(ids))
        same(model(ids[1:2])[0], whole[1], "alone")
        same(model(ids[:, :20]), whole[:, :20], "a prefix")
        for kind, size in ((nn.KVCache, 7), (nn.PagedCache, 1)):
            caches = model.caches(5, batch=(3,), kind=kind)
            for start in range(0, 37, size):
                stop = start + size
                logits, caches = model(ids[:, start:stop], caches=caches)
                same(logits, whole[:, start:stop], f"{kind.__name__}, {start} to {stop}")
        first = model.caches(64, batch=(1,))
        _, first = model(ids[:1, :20], caches=first)
        for row in (0, 1):  # two continuations of one prompt
            both = np.concatenate([IDS[:1, :20], IDS[row : row + 1, 20:]], axis=1)
            logits, _ = model(put(both[:, 20:]), caches=first)
            same(logits[0], np.asarray(model(put(both)))[0, 20:], "forked")


@pytest.mark.parametrize("library", LIBRARIES)
def test_texts_and_samples_depend_on_their_own_prompt(library):
    model, put = decoder(DECODERS["gpt2"], library), LIBRARIES[library]
    prompts = [IDS[0, :20].tolist(), IDS[1, :3].tolist(), IDS[2, :11].tolist()]
    samples = {"temperature": 1.5, "seed": 3, "top_p": 0.95}
    for sampled in ({}, samples):
        options = {"same_bits": True, **sampled}
        texts = nn.generate(model, prompts, 30, **options)
        same(nn.generate(model, prompts[:1], 30, **options)[0], texts[0])
        plain = nn.generate(model, put(np.asarray(prompts[:1])), 30, **options)
        same(plain[0], texts[0], "a plain cache")
        with polyattn.same_bits(), torch.no_grad():
            last = model(put(np.asarray([texts[0]])))[0, 19:-1]
        if not sampled:
            same(np.asarray(last).argmax(-1), texts[0][20:], "from the logits of the whole text")


@pytest.mark.parametrize(("library", "dtype"), [("numpy", "float32"), ("torch", "float64")])
def test_an_encoder_gives_the_vectors_of_each_text_alone(library, dtype):
    settings = {"is_causal": False, "positions": 40, "pre_norm": False, "logits": False}
    model, put = decoder(settings, library, dtype), LIBRARIES[library]
    lengths = (37, 5, 20)
    keep = np.arange(37) < np.asarray(lengths)[:, None]
    text, place = np.nonzero(keep)
    with polyattn.same_bits(), torch.no_grad():
        padded = model(put(IDS), mask=put(keep[:, None, None, :]))
        packed = model(put(IDS[keep]), positions=put(place), mask=masks.segments(put(text)))
        for row, length in enumerate(lengths):
            alone = model(put(IDS[row : row + 1, :length]))
            same(padded[row, :length], alone[0], f"{length} tokens")
            same(packed[text == row], alone[0], f"{length} tokens, packed")


def test_a_compiled_step_is_refused():
    model = decoder(DECODERS["gpt2"], "numpy")
    with pytest.raises(TypeError, match="omit jit"):
        nn.generate(model, IDS, 2, same_bits=True, jit=lambda step: step)
