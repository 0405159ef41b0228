"""Hugging Face transformers with polyattn's attention: what its own attention gives, or an error.

Models are tiny and drawn at random. Where a row is padding, polyattn gives 0 and eager the mean of
everything, so what is compared is what comes of real tokens.
"""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import DECODERS, ENCODERS, SENSES, SIZES
from transformers.masking_utils import create_bidirectional_mask

from polyattn import UnknownBackendError
from polyattn.integrations import transformers as ours

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "run-here.md"
VOCABULARY, LENGTH, WINDOW = 50, 12, 4
ENDLESS = {"eos_token_id": None}

# What is made of which settings, and how many times a forward pass attends.
FAMILIES = {
    "bert": ("BertForMaskedLM", ENCODERS["bert"], 3),
    "gpt2": ("GPT2LMHeadModel", DECODERS["gpt2"] | ENDLESS, 2),
    "llama": ("LlamaForCausalLM", SIZES | ENDLESS, 3),
    "mistral": ("MistralForCausalLM", SIZES | ENDLESS | {"sliding_window": WINDOW}, 3),
    # The scores are far enough from 0 that a cap of 0.1 shows.
    "gemma2": (
        "Gemma2ForCausalLM",
        DECODERS["gemma2"] | ENDLESS | {"attn_logit_softcapping": 0.1, "initializer_range": 0.3},
        3,
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        SIZES | ENDLESS
        | {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
        3,
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
            "num_heads": 4, "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 1,
        },
        6,
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        SENSES["whisper"] | ENDLESS
        | {"max_target_positions": 64, "suppress_tokens": None, "begin_suppress_tokens": None},
        4,
    ),
    "vit": ("ViTForImageClassification", SENSES["vit"], 2),
}  # fmt: skip
LANGUAGE = [family for family in FAMILIES if family != "vit"]


@pytest.fixture(autouse=True, scope="module")
def _registered():
    """Of one thread, too: so small a model only waits for more."""
    ours.register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def model_of(family):
    """A model whose weights are large enough for attention to be far from uniform."""
    name, settings, _ = FAMILIES[family]
    kind = getattr(transformers, name)
    torch.manual_seed(1)
    # Tied embeddings would give the token that was given, for ever.
    weights = {"initializer_range": 0.2, "init_std": 0.2, "tie_word_embeddings": False}
    return kind(kind.config_class(**weights | settings)).eval()


def padding(side):
    """The mask of the real tokens of two sequences."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if side is not None:
        mask[1, slice(0, 5) if side == "left" else slice(-5, None)] = 0
    return mask


def inputs_of(family, side=None):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (2, LENGTH), generator=generator)
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 12, 12, generator=generator)}
    if family == "whisper":
        features = torch.randn(2, 6, 20, generator=generator)
        return {
            "input_features": features,
            "decoder_input_ids": ids,
            "decoder_attention_mask": padding(side),
        }
    inputs = {"input_ids": ids, "attention_mask": padding(side)}
    if family == "t5":
        inputs |= {"decoder_input_ids": ids.flip(1), "decoder_attention_mask": padding(side)}
    return inputs


def run(model, implementation, **inputs):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs)


def real(logits, side):
    return logits if logits.ndim == 2 else logits[padding(side).bool()]


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture
def calls(monkeypatch):
    """The options of each call of `polyattn.attention`, in order."""
    found, attention = [], ours.attention

    def counted(*arrays, **options):
        found.append(options)
        return attention(*arrays, **options)

    monkeypatch.setattr(ours, "attention", counted)
    return found


# ---- the families ----


@pytest.mark.parametrize(
    ("family", "side"),
    [(family, "left") for family in LANGUAGE] + [("mistral", "right"), ("vit", None)],
)
def test_logits_are_those_of_eager(family, side, calls):
    model, inputs = model_of(family), inputs_of(family, side)
    expected = run(model, "eager", **inputs).logits
    assert calls == []
    found = run(model, "polyattn", **inputs).logits
    assert len(calls) == FAMILIES[family][-1]
    if family == "bert":  # as small as what it hides allows
        assert {tuple(call["mask"].shape) for call in calls} == {(2, 1, 1, LENGTH)}
    close(real(found, side), real(expected, side))


# ---- generation ----


def generated(family, implementation, side, **options):
    model, inputs = model_of(family), inputs_of(family, side)
    model.set_attn_implementation(implementation)
    if family in ("t5", "whisper"):
        del inputs["decoder_attention_mask"]
        # Of T5, whose values know no positions, one token repeated would say nothing of a cache.
        start = inputs.pop("decoder_input_ids")
        inputs |= {"decoder_input_ids": start[:, :4]} if family == "t5" else {}
    return model.generate(
        **inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False, use_cache=True,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip


FIXED = {"cache_implementation": "static", "disable_compile": True}


@pytest.mark.parametrize(
    ("family", "side", "options"),
    [
        ("mistral", "left", {}),
        ("t5", None, {}),
        ("whisper", "left", {}),
        ("gemma2", "left", FIXED),
        ("llama", None, FIXED),
    ],
)
def test_generation_with_a_cache_gives_the_same_tokens(family, side, options, calls):
    expected, found = (generated(family, x, side, **options) for x in ("eager", "polyattn"))
    torch.testing.assert_close(found.sequences, expected.sequences)
    logits = torch.stack(found.logits)
    close(logits, torch.stack(expected.logits))
    assert (logits[1:] - logits[:-1]).abs().amax((1, 2)).min() > 1e-3  # what is cached matters
    assert found.past_key_values is not None
    assert len(calls) >= 8 * 2
    if options and side is None:
        assert calls[0]["query_offset"] == 0  # the first tokens, with the cache's empty end


# ---- masks ----


def test_a_mask_keeps_its_rows_for_who_slices_it():
    """VisualBERT, DeepSeek-V4 and others cut masks, or join them."""
    config = transformers.BertConfig(**ENCODERS["bert"], attn_implementation="polyattn")
    embeddings = torch.zeros(2, LENGTH, 32)
    mask = create_bidirectional_mask(config, embeddings, padding("left"))
    assert mask.shape == (2, 1, LENGTH, LENGTH)
    assert mask.untyped_storage().nbytes() == 2 * LENGTH


def test_a_mask_of_numbers_and_a_bias_are_both_added():
    module, (x, mask, bias) = torch.nn.Module(), torch.randn(3, 1, 2, 6, 6)
    found, _ = ours._attend(None, None, module, x, x, x, mask, position_bias=bias)
    expected, _ = ours._attend(None, None, module, x, x, x, mask + bias)
    close(found, expected)


def test_a_window_is_kept_where_there_is_no_mask():
    module = torch.nn.Module()
    x = torch.randn(1, 2, 9, 8)
    found, _ = ours._attend(None, None, module, x, x, x, None, sliding_window=3)
    rows, keys = torch.arange(9)[:, None], torch.arange(9)
    mask = (keys <= rows) & (keys > rows - 3)
    expected, _ = ours._attend(None, None, module, x, x, x, mask[None, None])
    close(found, expected)
    module.is_causal = False
    with pytest.raises(ValueError, match="sliding window of 3 among 9 keys"):
        ours._attend(None, None, module, x, x, x, None, sliding_window=3)


# ---- dtypes, training, weights ----


def test_the_output_is_as_eager_hands_it_back():
    x = torch.randn(2, 4, 6, 8, dtype=torch.bfloat16)
    output, weights = ours._attend(
        None, None, torch.nn.Module(), x, x, x[..., :5], None, output_attentions=True
    )
    assert output.shape == (2, 6, 4, 5)
    assert output.is_contiguous()
    assert weights.shape == (2, 4, 6, 6)
    assert weights.dtype == torch.bfloat16
    assert ours._attend(None, None, torch.nn.Module(), x, x, x, None)[1] is None


def test_dropout_is_drawn_from_torchs_generator_and_only_in_training(calls):
    module = torch.nn.Module()
    x = torch.randn(2, 4, 9, 8)

    def attend(seed):
        torch.manual_seed(seed)
        return ours._attend(None, None, module, x, x, x, None, dropout=0.5)[0]

    first, again, other = attend(0), attend(0), attend(1)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert (first != other).any()
    assert [call["dropout"][0] for call in calls] == [0.5] * 3
    module.eval()
    torch.testing.assert_close(attend(0), attend(1), rtol=0, atol=0)


@pytest.mark.parametrize("family", ["gpt_oss", "t5"])
def test_weights_are_those_of_eager(family):
    model, inputs = model_of(family), inputs_of(family, "right")
    inputs["output_attentions"] = True
    theirs, found = (run(model, name, **inputs) for name in ("eager", "polyattn"))
    names = [name for name in theirs if name.endswith("attentions")]
    assert len(names) == (3 if family == "t5" else 1)
    for name in names:
        for weights, expected in zip(found[name], theirs[name], strict=True):
            close(*(x.mT.movedim(-1, 1)[padding("right").bool()] for x in (weights, expected)))


def test_a_backend_and_a_kernel_are_chosen_by_name(calls):
    ours.register("polyattn_numpy", backend="numpy", kernel="tiled")
    model, inputs = model_of("llama"), inputs_of("llama", "left")
    expected = run(model, "eager", **inputs).logits
    close(real(run(model, "polyattn_numpy", **inputs).logits, "left"), real(expected, "left"))
    assert {(call["backend"], call["kernel"]) for call in calls} == {("numpy", "tiled")}


# ---- refused ----


def attend_with(mask=None, **options):
    x = torch.zeros(2, 4, 6, 8)
    return ours._attend(None, None, torch.nn.Linear(1, 1), x, x, x, mask, **options)


REFUSED = {
    "shape": ({"mask": torch.ones(2, 6) > 0}, r"mask of shape \(2, 6\).*\(batch, heads, L, S\)"),
    "text": ({"mask": "causal"}, "attention mask 'causal'"),
    "integers": ({"mask": torch.ones(2, 1, 6, 6).int()}, "torch.int32; it must be .* bool"),
    "heads": ({"head_mask": torch.ones(4)}, "Linear .*head_mask.*'eager'"),
    "sinks": ({"sinks": torch.ones(2, 4, 6, 1)}, "row to row.*sinks="),
    "cache": ({"cache": object()}, "paged cache"),
    "packed": ({"cu_seq_lens_q": torch.tensor([0, 2, 6])}, "2 sequences packed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_lost_is_refused(name):
    options, message = REFUSED[name]
    with pytest.raises((ValueError, NotImplementedError), match=message):
        attend_with(**options)


def test_a_model_that_attends_by_itself_is_refused():
    config = transformers.BloomConfig(vocab_size=9, hidden_size=8, n_layer=1, n_head=2)
    config._attn_implementation = "polyattn"
    model = transformers.BloomModel(config)
    for mask in (None, torch.ones(1, 3)):
        with pytest.raises(NotImplementedError, match="bloom models compute attention by the"):
            model(torch.tensor([[3, 4, 5]]), attention_mask=mask)


NAMES = ["flash_attention_2", "a/b"]


@pytest.mark.parametrize(
    ("name", "options", "error", "said"),
    [(name, {}, ValueError, f"none of transformers' own.*got '{name}'") for name in NAMES]
    + [
        (None, {}, TypeError, "name must be a string"),
        ("polyattn_nope", {"backend": "nope"}, UnknownBackendError, "'nope'"),
        ("polyattn_nope", {"kernel": 3}, TypeError, "kernel"),
    ],
)
def test_what_is_registered_is_checked(name, options, error, said):
    with pytest.raises(error, match=said):
        ours.register(name, **options)
    assert "polyattn_nope" not in transformers.AttentionInterface().valid_keys()


def test_the_page_lists_the_families_that_are_tested():
    listed = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert listed == [FAMILIES[family][0] for family in FAMILIES]
