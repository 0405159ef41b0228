"""torch's kernels read no key beyond a length, whatever it holds."""

import math

import numpy as np
import pytest
from arrays import close, draw, to_torch
from optional import torch

from polyattn import attention, masks, scores
from polyattn._kernels import dense
from polyattn._kernels.dense_kernel import Dense
from polyattn_torch import lengths as by_lengths
from polyattn_torch.sdpa import Sdpa

F = torch.nn.functional
B, H, G, L, S, D = 4, 4, 2, 3, 300, 16
QUERY, KEY, VALUE = draw((B, H, L, D), (B, G, S, D), (B, G, S, D), to=to_torch)
LENGTHS = {
    "one": torch.full((B,), 130),
    "a number": 130,
    "ragged": torch.tensor([130, 7, 99, 300], dtype=torch.int32),
    "beyond": torch.tensor([130, 400, -1, 5]),
    "of all": torch.tensor([130]),
}
OPTIONS = {
    "nothing": {},
    "causal": {"is_causal": True},
    "window": {"window": (20, 0)},
    "offset": {"is_causal": True, "query_offset": torch.tensor([5, 80, 200, 7])},
    "bias": {"bias": KEY[:1, :1, :1, :1] * VALUE[:1, 0, None, :, 0]},
    "of keys": {"score_mod": scores.alibi(H) >> scores.softcap(9.0), "sinks": QUERY[0, :, 0, 0]},
    "function": {"score_mod": lambda s, b, h, i, j: s + 0.01 * j * b},
}


def numbers(given):
    return torch.as_tensor(given).clamp(0, S).expand(B).tolist()


def poisoned(lengths, **options):
    """Return arrays with NaN and infinities beyond the lengths."""
    key, value = KEY.clone(), VALUE.clone()
    for b, n in enumerate(numbers(lengths)):
        key[b, :, n:], value[b, :, n:] = math.nan, math.inf
    for one in (key, value):
        one.requires_grad_(options.get("grad", False))
    return QUERY, key, value


@pytest.mark.parametrize("few", [0, 2**60], ids=["a call for each", "one call"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("lengths", ["ragged", "beyond"])
def test_what_lies_beyond_a_length_reaches_nothing(lengths, option, few, monkeypatch):
    monkeypatch.setattr(by_lengths, "MANY_NUMBERS", few)
    lengths, options = LENGTHS[lengths], OPTIONS[option]
    clean = [x.double().numpy() for x in (QUERY, KEY, VALUE)]
    newest = {"query_offset": np.asarray(lengths) + np.zeros(B, int) - L}
    given = {n: np.asarray(x) if torch.is_tensor(x) else x for n, x in (newest | options).items()}
    expected = attention(*clean, key_lengths=np.array(numbers(lengths)), **given)
    close(attention(*poisoned(lengths), key_lengths=lengths, **options), expected)
    leaves = poisoned(lengths, grad=True)
    recorded = attention(*leaves, key_lengths=lengths, **options)
    close(recorded, expected)
    recorded.sum().backward()
    for leaf in leaves[1:]:
        for b, n in enumerate(numbers(lengths)):
            assert torch.isfinite(leaf.grad[b]).all()
            assert not leaf.grad[b, :, n:].any()


def test_what_lies_beyond_reaches_nothing_in_a_program_and_beside_another_mask():
    ragged = LENGTHS["ragged"]
    arrays, seen = poisoned(ragged), masks.padding(ragged) & ~masks.prefix(2)
    expected = attention(QUERY, KEY, VALUE, mask=seen, kernel="dense")
    close(attention(*arrays, mask=seen), expected)
    recorded = torch.fx.experimental.proxy_tensor.make_fx(
        lambda *x: attention(*x, key_lengths=ragged)
    )(*arrays)
    close(recorded(*arrays), attention(QUERY, KEY, VALUE, key_lengths=ragged, kernel="dense"))


@pytest.mark.parametrize("lengths", ["one", "a number", "ragged", "of all"])
def test_the_engine_gets_the_keys_that_an_item_has_and_no_mask(lengths, monkeypatch):
    monkeypatch.setattr(by_lengths, "MANY_NUMBERS", 0)
    given, calls, function = LENGTHS[lengths], [], F.scaled_dot_product_attention

    def spy(q, k, v, *, attn_mask=None, **options):
        calls.append((*k.shape[::2], attn_mask))
        return function(q, k, v, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    attention(QUERY, KEY, VALUE, key_lengths=given)
    wanted = [(1, n, None) for n in numbers(given)] if lengths == "ragged" else [(B, 130, None)]
    assert calls == wanted


def test_other_kernels_get_the_keys_up_to_the_longest_length(monkeypatch):
    widths, scores_of = [], dense.scores
    monkeypatch.setattr(
        dense, "scores", lambda *x, **o: widths.append(x[4].shape[-2]) or scores_of(*x, **o)
    )
    attention(QUERY, KEY, VALUE, key_lengths=torch.tensor([7, 99, 5, 0]), kernel="dense")
    assert sum(widths) == 99


class Unsafe(Dense):
    """The formula, as a kernel that may multiply what is hidden by 0."""

    name = "unsafe"
    promises = Dense.promises - {"poison_safe"}


class WithoutOffsets(Unsafe):
    """It aligns causal rows to the newest query, whatever the offset."""

    name = "without_offsets"
    features = frozenset({"causal", "mask_expression", "logsumexp"})

    def __call__(self, problem, operands, backend):
        assert problem.query_offset == problem.key_length - problem.query_length
        return super().__call__(problem, operands, backend)


LONG = draw((2, 4, 8, 32), (2, 4, 300, 32), (2, 4, 300, 32), to=to_torch)


def test_items_of_a_ragged_batch_keep_what_goes_by_the_whole_call():
    options = {"score_mod": lambda s, b, h, i, j: s * (b + 1), "dropout": (0.3, 5)}
    lengths = torch.tensor([100, 290])
    found, wanted = (
        attention(*LONG, key_lengths=lengths, kernel=kernel, **options)
        for kernel in (Unsafe(), "dense")
    )
    close(found, wanted, 100)


def test_a_kernel_that_is_cut_gets_no_offset_that_it_does_not_declare():
    given = {"key_lengths": 16, "query_offset": 292, "is_causal": True}
    found = attention(*LONG, kernel=WithoutOffsets(), **given)
    close(found, attention(*LONG, kernel="dense", **given))


def test_a_kernel_with_derivatives_keeps_them_beside_a_mask():
    class Opaque(Unsafe):
        def __call__(self, *given):
            with torch.no_grad():
                return super().__call__(*given)

    grads = []
    for kernel in (Opaque(), "dense"):
        query = LONG[0].clone().requires_grad_()
        attention(query, *LONG[1:], mask=masks.prefix(3), kernel=kernel).sum().backward()
        grads.append(query.grad)
    close(*grads)


def test_layers_with_the_same_lengths_have_one_problem(monkeypatch):
    """Kernels find what they know of a problem, such as the engine of torch, by its identity."""
    problems = []

    def call(kernel, problem, operands, backend):
        problems.append(problem)
        return real(kernel, problem, operands, backend)

    real = Sdpa.__call__
    monkeypatch.setattr(Sdpa, "__call__", call)
    for length in (130, 131, 130):
        for layer in range(3):
            key, value = KEY + layer, VALUE * (layer + 1)
            lengths = torch.full((B,), length)
            found = attention(QUERY, key, value, key_lengths=lengths, kernel="sdpa")
            expected = attention(QUERY, key[:, :, :length], value[:, :, :length], kernel="dense")
            close(found, expected)
    assert len(problems) == 9
    assert len({id(problem) for problem in problems}) == 2
