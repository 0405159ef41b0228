"""Gradients on torch: as one step of autograd, of any order, in memory for a tile."""

import copy

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

from polyattn import attention, attention_partial, attention_weights, scores
from polyattn._kernels.tiled import Tiled
from polyattn._kernels.weights import Weights
from polyattn_torch import fused_node

pytestmark = [
    # torch imports what it deprecates.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]
WINDOW = {"window": (2, 0), "query_offset": 1}


def small_tiles():
    kernel = Tiled()
    kernel.tile = 24
    return kernel


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    return draw(1, 2, 3, 2), draw(1, 1, 5, 2), draw(1, 1, 5, 2)


OPTIONS = {
    "causal": {"is_causal": True},
    "softcap": {"softcap": 1.5},
    "window": WINDOW,
    "bias": {"bias": (1, 2, 3, 5)},
    "sinks": {"sinks": (2,), "is_causal": True},
    "slopes": {"slopes": (2,)},
}


def call(options, **given):
    """A function of tensors only: query, key, value, and those that the options name by shape."""
    names = [name for name, x in options.items() if isinstance(x, tuple) and name != "window"]
    fixed = {name: x for name, x in options.items() if name not in names} | given

    def attend(query, key, value, *others):
        named = dict(zip(names, others, strict=True))
        if "slopes" in named:
            named["score_mod"] = scores.alibi(named.pop("slopes"))
        return attention(query, key, value, **fixed, **named)

    return attend, [draw(*options[name]) for name in names]


@pytest.mark.parametrize(
    "name", ["causal", *(pytest.param(name, marks=pytest.mark.slow) for name in [*OPTIONS][1:])]
)
def test_of_first_and_second_order(name, inputs):
    attend, others = call(OPTIONS[name])
    assert gradcheck(attend, (*inputs, *others), check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(attend, (*inputs, *others), fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "bias"])
def test_of_second_order_in_tiles(name, inputs):
    attend, others = call(OPTIONS[name], kernel=small_tiles())
    assert gradcheck(attend, (*inputs, *others), check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(attend, (*inputs, *others), fast_mode=True)


def test_torch_func(inputs):
    query, key, value = (x.detach() for x in inputs)

    def loss(query, **options):
        return attention(query, key, value, is_causal=True, **options).square().sum()

    expected = torch.autograd.functional.hessian(lambda x: loss(x, kernel="dense"), query)
    torch.testing.assert_close(torch.func.hessian(loss)(query), expected)
    gradient = torch.func.grad(loss)(query)
    _, pullback = torch.func.vjp(loss, query)
    torch.testing.assert_close(pullback(torch.ones((), dtype=query.dtype))[0], gradient)
    along = torch.randn_like(query)
    _, slope = torch.func.jvp(loss, (query,), (along,))
    torch.testing.assert_close(slope, (gradient * along).sum())
    several = torch.stack([query, 2 * query])
    by_item = torch.stack([torch.func.grad(loss)(x) for x in several])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(several), by_item)


def test_forward_mode(inputs):
    query, key, value = (x.detach() for x in inputs)
    along = torch.randn_like(key)
    with dual_level():
        output = attention(query, make_dual(key, along), value, is_causal=True)
        tangent = unpack_dual(output).tangent
    _, expected = torch.func.jvp(
        lambda key: attention(query, key, value, is_causal=True, kernel="dense"), (key,), (along,)
    )
    torch.testing.assert_close(tangent, expected)


def test_gradients_of_the_logsumexp_only_and_of_a_batch_of_them(inputs):
    query, key, value = inputs
    found = attention_partial(query, key, value).logsumexp
    expected = (query @ key.mT / 2**0.5).logsumexp(-1)
    given = torch.randn(3, *found.shape, dtype=found.dtype)
    by_item = [torch.autograd.grad(expected, key, one, retain_graph=True)[0] for one in given]
    gradient = torch.autograd.grad(found, key, given[0], retain_graph=True)[0]
    torch.testing.assert_close(gradient, by_item[0])
    batched = torch.autograd.grad(found, key, given, is_grads_batched=True)[0]
    torch.testing.assert_close(batched, torch.stack(by_item))
    assert gradgradcheck(
        lambda *x: attention_partial(*x, value).logsumexp, (query, key), fast_mode=True
    )


def test_a_function_keeps_the_gradients_of_what_it_closes_over(inputs):
    query, key, value = inputs
    table = draw(2)

    def attend(table):
        return attention(query, key, value, score_mod=lambda s, b, h, i, j: s * table[h])

    assert gradcheck(attend, (table,))


@pytest.mark.parametrize("name", ["attention", "weights"])
def test_gradients_of_16_bits_are_rounded_once_operation_by_operation(name, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(Tiled, "tile", 100)
    monkeypatch.setattr(Weights, "tile", 8 * 65 * 9)
    shapes = {
        **{"query": (2, 8, 65, 8), "key": (2, 2, 65, 8), "value": (2, 2, 65, 8)},
        **{"bias": (1, 8, 1, 65), "sinks": (8,), "table": (32, 8)},
    }
    given = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    along = torch.randn(2, 8, 65, 65).bfloat16()
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


@pytest.mark.slow
def test_compiled_with_gradients(inputs):
    def loss(query, key, value):
        return attention(query, key, value, is_causal=True, softcap=2.0).square().sum()

    expected = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for found, right in zip(torch.autograd.grad(compiled(*inputs), inputs), expected, strict=True):
        torch.testing.assert_close(found, right)


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
    query, key, value = (torch.randn(1, 2048, 8, requires_grad=True) for _ in range(3))
    kernel = copy.copy(Tiled())
    kernel.tile = 2**16
    output, saved = saved_by(lambda: attention(query, key, value, softcap=2.0, kernel=kernel))
    assert saved <= 5 * query.nbytes
    output.sum().backward()
    assert query.grad is not None


def test_a_batch_of_calls_keeps_no_weights():
    """Autograd outside of vmap sees each call as one step."""
    query = draw(2, 1, 2, 64, 8)
    mapped = torch.func.vmap(lambda query: attention(query, query, query, softcap=2.0))
    output, saved = saved_by(lambda: mapped(query))
    assert saved <= 3 * query.nbytes
    expected = attention(query, query, query, softcap=2.0)
    along = torch.randn_like(query)
    torch.testing.assert_close(
        torch.autograd.grad(output, query, along), torch.autograd.grad(expected, query, along)
    )


@pytest.mark.parametrize("kernel", ["sdpa", "dense", "tiled"])
@pytest.mark.parametrize("name", ["query", "key", "value", "bias"])
def test_a_second_derivative_by_an_expanded_tensor(kernel, name):
    torch.manual_seed(0)
    shapes = {
        "query": (2, 2, 4, 3),
        "key": (2, 2, 4, 3),
        "value": (2, 2, 4, 3),
        "bias": (2, 2, 4, 4),
    }
    arrays = {one: torch.randn(shape, dtype=torch.float64) for one, shape in shapes.items()}
    arrays[name] = arrays[name][:1, :, :1].expand(shapes[name])

    def second(arrays):
        leaves = [array.detach().requires_grad_() for array in arrays]
        *qkv, bias = leaves
        output = attention(*qkv, bias=bias, kernel=kernel)
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), leaves)

    plain = [array.contiguous() for array in arrays.values()]
    torch.testing.assert_close(second(arrays.values()), second(plain))


@pytest.mark.parametrize("empty", ["batch", "heads", "query", "key", "value"])
def test_an_empty_output_depends_on_its_bias(empty):
    sizes = dict.fromkeys(("batch", "heads", "query", "key", "value"), 2) | {empty: 0}
    batch, heads, rows, keys, size = sizes.values()
    query, key = torch.randn(batch, heads, rows, 2), torch.randn(batch, heads, keys, 2)
    bias = torch.randn(batch, heads, rows, keys, requires_grad=True)
    output = attention(query, key, torch.randn(batch, heads, keys, size), bias=bias)
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
    torch.manual_seed(0)
    query, key, value, bias = (torch.randn(5, 5) for _ in range(4))
    query, key, bias = (x.bfloat16() for x in (query, key, bias))
    value = (1 + value * 2**-8).bfloat16()  # whose mean is rounded to 1

    def total(bias):
        return attention(query, key, value, bias=bias, kernel="sdpa").sum()

    leaf = bias.clone().requires_grad_()
    total(leaf).backward()
    torch.testing.assert_close(torch.func.grad(total)(bias), leaf.grad)
