"""Models of transformers over many ranks: what each computes is what one device computes."""

import threading

import pytest
import torch
from transformers import LlamaConfig, LlamaModel, MistralConfig, MistralModel
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)

from polyattn import attention, attention_weights, parallel
from polyattn.integrations.transformers import _attend, register
from polyattn.integrations.transformers_ranks import Ranks

SIZE = 2
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
}


class OfThisThread(parallel.Communicator):
    """The rank of the thread that calls: a model is registered once for all of them."""

    own, size = threading.local(), SIZE

    def __getattribute__(self, name):
        if name in ("rank", "shift", "wait", "gather", "exchange"):
            return getattr(OfThisThread.own.ranks, name)
        return super().__getattribute__(name)


def model_of(kind):
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaModel(LlamaConfig(**SMALL)).double()
    return MistralModel(MistralConfig(**SMALL, sliding_window=5)).double()


def over_ranks(model, tokens, layout, strategy, mask, **more):
    """Return the output of a model over ranks, and its parameters' gradients summed over them."""
    register("polyattn_ranks", over=OfThisThread(), strategy=strategy, layout=layout)
    state = model.state_dict()
    config = type(model.config).from_dict(model.config.to_dict())
    config._attn_implementation = "polyattn_ranks"

    def run(ranks):
        OfThisThread.own.ranks = ranks
        copy = type(model)(config).double()
        copy.load_state_dict(state)
        own = parallel.shard(tokens, over=ranks, layout=layout, axis=-1)
        at = parallel.positions(own, over=ranks, layout=layout, axis=-1)[None]
        given = {"attention_mask": mask, "position_ids": at, "use_cache": False, **more}
        output = copy(own, **given).last_hidden_state
        loss = (output**2 * output.shape[1]).sum()
        loss.backward()
        return output.detach(), [p.grad for p in copy.parameters()]

    found = parallel.run_threads(SIZE, run)
    output = torch.cat([output for output, _ in found], dim=1)
    gradients = [sum(some) for some in zip(*[x for _, x in found], strict=True)]
    return parallel.unpermute(output, SIZE, layout=layout), gradients


@pytest.mark.parametrize(
    ("kind", "layout", "strategy", "padded"),
    [
        ("llama", "zigzag", "ring", True),
        pytest.param("window", "contiguous", "ring", False, marks=pytest.mark.slow),
        pytest.param("window", "zigzag", "heads", True, marks=pytest.mark.slow),
    ],
)
def test_a_model_over_ranks_is_the_model(kind, layout, strategy, padded):
    model = model_of(kind)
    tokens = torch.randint(0, 50, (2, 16))
    mask = torch.ones_like(tokens) if padded or layout == "zigzag" else None
    if padded:
        mask[1, :5] = 0
    register()
    model.set_attn_implementation("polyattn")
    expected = model(
        tokens, attention_mask=mask, use_cache=False, position_ids=torch.arange(16)[None]
    )
    expected = expected.last_hidden_state
    seen = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    (expected**2 * 8).sum().backward()
    output, gradients = over_ranks(model, tokens, layout, strategy, mask)
    torch.testing.assert_close(output[seen], expected[seen], atol=1e-12, rtol=0)
    if not padded:  # what a model computes at padding is its own
        for found, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad, atol=1e-9, rtol=1e-9)


def test_packed_sequences_over_ranks_do_not_see_one_another():
    model, tokens, ends = model_of("llama"), torch.randint(0, 50, (1, 16)), [0, 5, 6, 16]
    register()
    model.set_attn_implementation("polyattn")
    parts = [model(part, use_cache=False) for part in tokens.tensor_split(ends[1:-1], dim=1)]
    expected = torch.cat([part.last_hidden_state for part in parts], dim=1)
    # Positions go on, as rotary embeddings see distances only.
    ones, packed = torch.ones_like(tokens), torch.tensor(ends, dtype=torch.int32)
    output, _ = over_ranks(model, tokens, "zigzag", "ring", ones, cu_seq_lens_q=packed)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)


def test_dropout_over_ranks_has_one_seed_and_is_that_of_one_device():
    whole, module, seeds = torch.randn(1, 4, 16, 8).double(), torch.nn.Module(), []

    def run(ranks):
        OfThisThread.own.ranks = ranks
        own, of_ranks = (
            parallel.shard(whole, over=ranks),
            Ranks(OfThisThread(), "ring", "contiguous"),
        )
        return _attend(None, None, module, *[own] * 3, None, ranks=of_ranks, dropout=0.3)[0]

    drawn = Ranks.seed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "seed", lambda *given: seeds.append(drawn(*given)) or seeds[-1])
        found = torch.cat(parallel.run_threads(SIZE, run), dim=1).transpose(1, 2)
    assert len({int(seed) for seed in seeds}) == 1
    expected = attention(*[whole] * 3, is_causal=True, dropout=(0.3, seeds[0]))
    torch.testing.assert_close(found, expected, atol=1e-13, rtol=0)


def test_packed_sequences_are_kept_apart_under_any_mask():
    ranks, x, ends = Ranks(OfThisThread(), "ring", "contiguous"), torch.ones(1, 2, 2, 4), [0, 1, 4]
    every = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    mask = ranks.visibility(None, x, every, torch.tensor(ends), None, None)["mask"]
    seen = attention_weights(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 4, 4), mask=mask)
    assert (seen > 0).sum() == 1 + 9


PACKED = packed_sequence_mask_function(torch.zeros(1, 8, dtype=int))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"layout": "zigzag"}, ValueError, "give the model an attention_mask of the whole"),
        ({"padding": torch.ones(1, 8)}, ValueError, r"whole sequence, \(1, 16\).* got \(1, 8\)"),
        ({"keys": 9}, NotImplementedError, "does not support a cache"),
        ({"function": PACKED}, NotImplementedError, "cannot tell packed sequences"),
    ],
)
def test_masks_that_a_rank_cannot_know_are_refused(given, error, message):
    given = {"layout": "contiguous", "padding": None, "keys": 8} | given
    function = given.get("function", causal_mask_function)
    ranks = Ranks(OfThisThread(), "ring", given["layout"])
    with pytest.raises(error, match=message):
        ranks.mask(1, 8, given["keys"], 0, 0, function, given["padding"], {})


def test_other_masks_are_made_for_the_whole_sequence():
    ranks = Ranks(OfThisThread(), "ring", "contiguous")
    assert ranks.mask(1, 8, 8, 0, 0, sliding_window_causal_mask_function(3), None, {}) is None
    chunked = chunked_causal_mask_function(5, torch.zeros(1, dtype=int))
    mask = ranks.mask(1, 8, 8, 0, 0, chunked, None, {})
    assert mask.shape == (1, 1, 16, 16)
    assert mask[0, 0, 12].nonzero().flatten().tolist() == [10, 11, 12]
    padding = ranks.mask(1, 8, 16, 0, 0, causal_mask_function, torch.ones(1, 16), {})
    assert padding.shape == (1, 1, 1, 16)


def test_options_that_would_be_wrong_are_refused():
    x = torch.ones(1, 2, 8, 4)
    with pytest.raises(NotImplementedError, match="over= does not support position_bias"):
        Ranks(OfThisThread(), "ring", "contiguous").attend(x, x, x, {"position_bias": x})
