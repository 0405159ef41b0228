"""PyTorch with masks and scores as values: the mask that is made, torch.func, arrays of NumPy."""

import numpy as np
import pytest
import torch

from polyattn import attention, explain, masks, scores
from polyattn._core.call.checks import examine
from polyattn._core.call.describe import describe
from polyattn._core.call.layout import heads_first
from polyattn.plugin import Span
from polyattn_torch.attn_mask import attn_mask, made_mask

RNG = torch.Generator().manual_seed(0)
L, S = 200, 300
Q, K, V = (torch.randn(2, n, m, 16, generator=RNG) for n, m in ((4, L), (2, S), (2, S)))
ROWS, KEYS = ((torch.arange(n) // 70 + torch.tensor([[0], [1]])) // 2 for n in (L, S))
LENGTHS = torch.tensor([130, 299])


def blocks_of(b, h, i, j):
    return (i // 100 + j // 100) % 2 == 0


MASKS = {
    "packed": masks.segments(ROWS, KEYS),
    "packed, causal": masks.segments(ROWS[0], KEYS[0]) & masks.causal(),
    "positions": masks.positions(ROWS * 9, KEYS * 9 - 2, masks.window(9, 0) & masks.dilated(2)),
    "padding": masks.padding(LENGTHS, torch.tensor([0, 140])),
    "padding of keys": masks.padding(LENGTHS),
    "prefix": masks.causal() | masks.prefix(LENGTHS),
    "all but an array": ~masks.dense(torch.rand(2, 1, L, S, generator=RNG) > 0.5),
    "one axis": masks.dense(torch.arange(S) < 140) | masks.prefix(2),
    "a function": masks.rule(blocks_of) & masks.padding(LENGTHS),
    "a table": masks.compile(blocks_of, L, S, like=Q) & masks.padding(LENGTHS),
}


def described(**options):
    """Return the problem and the operands as a kernel is given them."""
    call, operands = describe(Q, K, V, **options)
    return examine(call), heads_first(call, operands)


@pytest.mark.parametrize("case", MASKS)
def test_a_mask_is_counted_as_it_is_made(case):
    problem, operands = described(mask=MASKS[case])
    made = attn_mask(problem, operands, Span(0, S), banded=False)
    counted = made_mask(problem, Span(0, S), banded=False)
    if "mask_mod" in problem.features:  # what a function depends on is not known beforehand
        assert counted == 2 * 4 * L * S >= made.numel()
    else:
        assert counted == made.numel()


def test_the_offset_of_each_item_is_counted_too():
    problem, _ = described(query_offset=LENGTHS, mask=MASKS["packed, causal"])
    assert made_mask(problem, Span(0, S), banded=True) == 2 * L * S
    assert made_mask(problem, Span(0, S), banded=False) == L * S


def test_a_mask_that_is_large_is_made_where_the_kernel_is_named(monkeypatch):
    monkeypatch.setattr("polyattn._core.tiles.visibility.LARGEST_MADE", L * S - 1)
    options = {"mask": MASKS["packed"]}
    left = explain(Q, K, V, **options)
    assert left.chosen.kernel != "sdpa"
    (status,) = (c.status for c in left.candidates if c.kernel == "sdpa")
    assert status == "on request"
    named = explain(Q, K, V, kernel="sdpa", **options).chosen
    assert (named.kernel, named.reasons) == ("sdpa", ())
    assert "it would need a mask of 120,000 elements" in named.on_request
    found = attention(Q, K, V, kernel="sdpa", **options)
    torch.testing.assert_close(found, attention(Q, K, V, kernel="dense", **options))


@pytest.mark.slow
def test_a_large_mask_of_a_batch_that_a_program_leaves_open(monkeypatch):
    monkeypatch.setattr("polyattn._core.tiles.visibility.LARGEST_MADE", 8)
    run = torch.compile(attention, backend="eager", fullgraph=True)
    for items in (2, 3):
        q, ids = torch.zeros(items, 1, 4, 2), torch.arange(4).expand(items, 4).contiguous()
        mask = masks.segments(ids)
        torch.testing.assert_close(run(q, q, q + 1, mask=mask), q + 1)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [None, "tiled", "dense"])
def test_func_maps_and_differentiates_calls_with_mask_values(kernel):
    q, k, v = Q[:, :, :9], *(x[:, :, :9].repeat(1, 2, 1, 1) for x in (K, V))
    lengths = torch.tensor([3, 8])

    def call(q, k, v, lengths, kernel=kernel):
        mask = masks.padding(lengths) & masks.segments(torch.arange(9) // 7)
        return attention(q, k, v, mask=mask, kernel=kernel)

    mapped = torch.func.vmap(call)(q, k, v, lengths)
    torch.testing.assert_close(mapped, call(q, k, v, lengths))
    gradient = torch.func.grad(lambda q: call(q, k, v, lengths).square().sum())(q)
    leaf = q.clone().requires_grad_()
    call(leaf, k, v, lengths, kernel="dense").square().sum().backward()
    torch.testing.assert_close(gradient, leaf.grad)


OF_NUMPY = {
    "packed": {"mask": masks.segments(ROWS.numpy(), KEYS.numpy())},
    "a function": {"mask": masks.rule(lambda b, h, i, j: np.less(i, j)) | masks.prefix(2)},
    "slopes": {"score_mod": scores.alibi(np.linspace(0, 1, 4, dtype=np.float32))},
    "weight": {"similarity": scores.additive(np.linspace(-1, 1, 16, dtype=np.float32))},
}


@pytest.mark.parametrize("case", OF_NUMPY)
def test_values_of_numpy_go_along_to_torch(case):
    q, k, v = (x.numpy() for x in (Q, K, V))
    output = attention(q, k, v, backend="torch", **OF_NUMPY[case])
    assert type(output) is np.ndarray
    expected = attention(q, k, v, kernel="dense", **OF_NUMPY[case])
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
