"""Gradients on torch: as one step of autograd, of any order and mode, in memory for a tile."""

import pytest
import torch
from arrays import close, draw, tiles_of, to_torch
from torch.autograd import gradcheck, gradgradcheck

from polyattn import attention, attention_partial, attention_weights, masks, scores
from polyattn._kernels.tiled import Tiled
from polyattn._kernels.weights import Weights
from polyattn_torch import fused_node

pytestmark = [
    # torch imports what it deprecates.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]


def leaves(*shapes):
    """Return tensors of float64 that need a gradient."""
    return [x.requires_grad_() for x in draw(*shapes, to=to_torch, dtype="float64")]


@pytest.fixture
def inputs():
    return leaves((1, 2, 3, 2), (1, 1, 5, 2), (1, 1, 5, 2))


@pytest.mark.slow
def test_of_first_and_second_order_by_every_array(inputs):
    def attend(query, key, value, bias, sinks, slopes):
        options = {"score_mod": scores.alibi(slopes), "softcap": 1.5, "kernel": tiles_of(24)}
        return attention(query, key, value, is_causal=True, bias=bias, sinks=sinks, **options)

    arrays = [*inputs, *leaves((1, 2, 3, 5), (2,), (2,))]
    assert gradcheck(attend, arrays, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(attend, arrays, fast_mode=True)


#: Modes of differentiation of a function at some queries, along some.
MODES = {
    "tangent": lambda f, x, along: torch.func.jvp(f, (x[0],), (along[0],))[1],
    "hessian": lambda f, x, along: torch.func.hessian(f)(x[0]),
    "map of gradients": lambda f, x, along: torch.func.vmap(torch.func.grad(f))(x),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_torch_func(mode):
    query, key, value = draw((2, 1, 2, 5, 3), (2, 5, 3), (2, 5, 3), to=to_torch, dtype="float64")

    def loss(query):
        return attention(query, key, value, is_causal=True).square().sum()

    def textbook(query):
        seen = torch.ones(5, 5, dtype=torch.bool).tril()
        weights = (query @ key.mT / 3**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ value).square().sum()

    found, expected = (MODES[mode](f, query, query.flip(0)) for f in (loss, textbook))
    close(found, expected)


def test_a_map_over_lengths():
    query, lengths = draw((2, 4, 9, 8), to=to_torch)[0], torch.tensor([3, 8])

    def call(query, lengths):
        mask = masks.padding(lengths) & masks.segments(torch.arange(9) // 7)
        return attention(query, query, query, mask=mask)

    close(torch.func.vmap(call)(query, lengths), call(query, lengths))


def test_gradients_of_the_logsumexp_only_and_of_a_batch_of_them(inputs):
    query, key, value = inputs
    found = attention_partial(query, key, value).logsumexp
    expected = (query @ key.mT / 2**0.5).logsumexp(-1)
    given = torch.randn(3, *found.shape, dtype=found.dtype)
    by_item = [torch.autograd.grad(expected, key, one, retain_graph=True)[0] for one in given]
    gradient = torch.autograd.grad(found, key, given[0], retain_graph=True)[0]
    close(gradient, by_item[0])
    batched = torch.autograd.grad(found, key, given, is_grads_batched=True)[0]
    close(batched, torch.stack(by_item))
    assert gradgradcheck(
        lambda *x: attention_partial(*x, value).logsumexp, (query, key), fast_mode=True
    )


def test_a_function_keeps_the_gradients_of_what_it_closes_over(inputs):
    query, key, value = inputs
    (table,) = leaves(2)

    def attend(table):
        return attention(query, key, value, score_mod=lambda s, b, h, i, j: s * table[h])

    assert gradcheck(attend, (table,))


@pytest.mark.parametrize("name", ["attention", "weights"])
def test_gradients_of_16_bits_are_rounded_once_operation_by_operation(name, monkeypatch):
    monkeypatch.setattr(Tiled, "tile", 100)
    monkeypatch.setattr(Weights, "tile", 8 * 65 * 9)
    shapes = {
        **{"query": (2, 8, 65, 8), "key": (2, 2, 65, 8), "value": (2, 2, 65, 8)},
        **{"bias": (1, 8, 1, 65), "sinks": (8,), "table": (32, 8)},
    }
    *arrays, along = draw(*shapes.values(), (2, 8, 65, 65), to=to_torch, dtype="bfloat16")
    given = dict(zip(shapes, arrays, strict=True))
    factor = torch.ones((), requires_grad=True)

    def found(dtype):
        x = {name: one.to(dtype).requires_grad_() for name, one in given.items()}
        query, key, value, bias, sinks, table = x.values()
        # What reads a tensor with a graph of its own is differentiated operation by operation.
        rule = scores.relative_bias(table) >> (lambda s, b, h, i, j: (factor * s).sin())
        options = {"bias": bias, "sinks": sinks, "score_mod": rule}
        if name == "weights":
            x.pop("value")
            output = attention_weights(query, key, **options)
        else:
            output = attention(query, key, value, **options, kernel="tiled")
        cotangent = along[..., : output.shape[-1]].to(output.dtype)
        return zip(x, torch.autograd.grad(output, tuple(x.values()), cotangent), strict=True)

    for (operand, one), (_, exact) in zip(found(torch.bfloat16), found(torch.float32), strict=True):
        assert torch.allclose(one.float(), exact, rtol=2**-8, atol=1e-5), operand


def saved_by(function):
    """Return the result of a function, and the bytes of memory that autograd saves for it."""
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function()
    return result, sum(storages.values())


def test_memory_is_for_a_tile():
    """What autograd keeps for the backward pass does not grow with L · S."""
    query, key, value = leaves(*[(1, 2048, 8)] * 3)
    kernel = tiles_of(2**16)
    output, saved = saved_by(lambda: attention(query, key, value, softcap=2.0, kernel=kernel))
    assert saved <= 5 * query.nbytes
    output.sum().backward()
    assert query.grad is not None


def test_a_batch_of_calls_keeps_no_weights():
    """Autograd outside of vmap sees each call as one step."""
    (query,) = leaves((2, 1, 2, 64, 8))
    mapped = torch.func.vmap(lambda query: attention(query, query, query, softcap=2.0))
    output, saved = saved_by(lambda: mapped(query))
    assert saved <= 3 * query.nbytes
    expected = attention(query, query, query, softcap=2.0)
    gradients = [torch.autograd.grad(one, query, query.detach())[0] for one in (output, expected)]
    close(*gradients)


@pytest.mark.parametrize("kernel", ["sdpa", "dense"])
def test_a_second_derivative_by_an_expanded_tensor(kernel):
    def second(arrays):
        leaves = [array.detach().requires_grad_() for array in arrays]
        output = attention(*leaves[:3], bias=leaves[3], kernel=kernel)
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), leaves)

    arrays = draw(*[(2, 2, 4, 4)] * 4, to=to_torch, dtype="float64")
    arrays[1] = arrays[1][:1, :, :1].expand(2, 2, 4, 4)
    close(second(arrays), second([array.contiguous() for array in arrays]))


@pytest.mark.parametrize("empty", ["key", "value"])
def test_an_empty_output_depends_on_its_bias(empty):
    keys, size = ({"key": 2, "value": 2} | {empty: 0}).values()
    query, key, value = torch.ones(2, 2, 2), torch.ones(2, keys, 2), torch.ones(2, keys, size)
    bias = torch.ones(2, 2, keys, requires_grad=True)
    output = attention(query, key, value, bias=bias)
    (gradient,) = torch.autograd.grad(output.sum(), bias)
    assert gradient.shape == bias.shape
    assert not gradient.any()


def test_a_bias_of_16_bits_with_a_gradient_needs_one_forward_pass(monkeypatch):
    query, key, value = (torch.ones(1, 2, 5, 8, dtype=torch.bfloat16) for _ in range(3))
    bias = torch.zeros(5, 5, dtype=torch.bfloat16, requires_grad=True)
    by_tiles, calls = fused_node.KernelNode.results, []

    def counted(*x, **options):
        calls.append(0)
        return by_tiles(*x, **options)

    monkeypatch.setattr(fused_node.KernelNode, "results", counted)
    monkeypatch.setattr(fused_node, "_forward", lambda *_, **options: 1 / 0)
    output = attention(query, key, value, bias=bias)
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert len(calls) == 1


def test_a_bias_of_16_bits_has_the_same_gradient_under_torch_func():
    query, key, value, bias = draw(*[(5, 5)] * 4, to=to_torch, dtype="bfloat16")
    value = (1 + value.float() * 2**-8).bfloat16()  # whose mean is rounded to 1

    def total(bias):
        return attention(query, key, value, bias=bias, kernel="sdpa").sum()

    leaf = bias.clone().requires_grad_()
    total(leaf).backward()
    close(torch.func.grad(total)(bias), leaf.grad)
