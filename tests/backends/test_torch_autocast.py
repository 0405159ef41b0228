"""torch.autocast: attention follows it as torch's own function does, and nothing else changes."""

import functools

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from arrays import close, draw, to_torch

from polyattn import (
    attention,
    attention_backward,
    attention_jvp,
    attention_partial,
    attention_vjp,
    attention_weights,
    explain,
    nn,
    parallel,
)

Q, K, V, BIAS = draw(*[(2, 4, 6, 8)] * 3, (6, 6), to=to_torch)
HALF, BRAIN = torch.float16, torch.bfloat16


def equal(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize(
    "dtypes", [(F32, F32, F32), (F32, BRAIN, HALF), (F64, F64, F64), (F64, F32, F32)]
)
def test_the_dtype_is_that_of_torchs_own_function(dtypes):
    def result(function):
        arrays = [x.to(dtype) for x, dtype in zip((Q, K, V), dtypes, strict=True)]
        try:
            return function(*arrays).dtype
        except (TypeError, RuntimeError):
            return "error"

    with torch.autocast("cpu", dtype=BRAIN):
        assert result(attention) == result(F.scaled_dot_product_attention)


@pytest.mark.parametrize("kernel", ["sdpa", "tiled", "dense"])
def test_a_call_is_that_of_arrays_cast_before(kernel):
    sinks = torch.full((4,), 0.1) if kernel != "sdpa" else None  # which 16 bits cannot hold
    options = {"sinks": sinks, "kernel": kernel}
    want = attention(*(x.to(BRAIN) for x in (Q, K, V)), bias=BIAS.to(BRAIN), **options)
    with torch.autocast("cpu", dtype=BRAIN):
        equal(attention(Q, K, V, bias=BIAS, **options), want)
        with torch.autocast("cpu", enabled=False):
            assert attention(Q, K, V, kernel=kernel).dtype == torch.float32
        with torch.autocast("cpu", dtype=HALF):
            assert attention(Q, K, V, kernel=kernel).dtype == HALF


def test_autocast_of_another_device_does_nothing():
    torch.set_autocast_enabled("xpu", True)  # as on a machine that has one
    try:
        assert attention(Q, K, V).dtype == torch.float32
        assert attention(Q, K, V).dtype == torch.float32
        with pytest.raises(TypeError, match=r"key must be torch\.float32 of torch"):
            nn.KVCache(K, V).append(K.to(BRAIN), V.to(BRAIN))
    finally:
        torch.set_autocast_enabled("xpu", False)


def test_a_repeated_call_sees_autocast_begin_and_end():
    plain, cast = attention(Q, K, V), attention(Q.to(BRAIN), K.to(BRAIN), V.to(BRAIN))
    for _ in range(2):
        equal(attention(Q, K, V), plain)
        with torch.autocast("cpu", dtype=BRAIN):
            for _ in range(2):
                equal(attention(Q, K, V), cast)
                equal(attention(Q.to(BRAIN), K.to(BRAIN), V.to(BRAIN)), cast)
        equal(attention(Q.to(BRAIN), K.to(BRAIN), V.to(BRAIN)), cast)


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_have_the_dtypes_of_the_arguments(compiles):
    def attend(*arrays):
        return attention(*arrays[:3], bias=arrays[3], softcap=5.0)

    def cast_by_hand(*arrays):
        return attend(*[x.to(BRAIN) for x in arrays])

    def gradients(function, autocast):
        leaves = [x.clone().requires_grad_() for x in (Q, K.to(BRAIN), V, BIAS)]
        with torch.autocast("cpu", dtype=BRAIN, enabled=autocast):
            output = function(*leaves)
        output.backward(torch.ones_like(output))
        return output, *[leaf.grad for leaf in leaves]

    followed, by_hand = attend, cast_by_hand
    if compiles:
        followed, by_hand = (
            torch.compile(one, fullgraph=True, backend="aot_eager")
            for one in (attend, cast_by_hand)
        )
    # Otherwise AOTAutograd differentiates float32 products under autocast.
    with torch._functorch.config.patch(backward_pass_autocast="off"):
        equal(gradients(followed, True), gradients(by_hand, False))
    assert followed(Q, K, V, BIAS).dtype == torch.float32


def test_all_functions_follow():
    cast = [x.to(BRAIN) for x in (Q, K, V)]
    partial = attention_partial(*cast)
    with torch.autocast("cpu", dtype=BRAIN):
        equal(tuple(attention_partial(Q, K, V)), tuple(partial))
        wide = attention_partial(Q, K, V, dtype="float32").output
        equal(attention_weights(Q, K), attention_weights(*cast[:2]))
        moved = attention_jvp((Q, K, V), {"query": Q, "value": V, "bias": BIAS}, bias=BIAS)
        found = attention_backward(Q, K, V, partial, cast[0])
    equal(wide, attention_partial(*cast, dtype="float32").output)
    bias = BIAS.to(BRAIN)
    tangents = {"query": cast[0], "value": cast[2], "bias": bias}
    equal(moved, attention_jvp(cast, tangents, bias=bias))
    assert {x.dtype for x in found[:3]} == {torch.float32}
    want = attention_backward(*cast, partial, cast[0])
    equal([x.to(BRAIN) for x in found[:3]], list(want[:3]))


@pytest.mark.parametrize("forward", [False, True])
def test_a_pullback_belongs_to_its_call(forward):
    with torch.autocast("cpu", dtype=BRAIN, enabled=forward):
        output, pullback = attention_vjp(Q, K, V, bias=BIAS)
    gradient = torch.ones_like(output)
    outside = pullback(gradient)
    with torch.autocast("cpu", dtype=BRAIN):
        inside = pullback(gradient)
    assert {x.dtype for x in outside if x is not None} == {torch.float32}
    equal(list(outside[:4]), list(inside[:4]))


def test_explain_says_what_is_cast():
    with torch.autocast("cpu", dtype=BRAIN):
        of_arrays = explain(Q, K.to(BRAIN), V, bias=BIAS)
        of_shapes = explain(Q.shape, K.shape, V.shape, library="torch")
        others = explain(Q.shape, K.shape, V.shape), explain(Q.double(), K.double(), V.double())
        of_ranks = parallel.explain(Q.shape, Q.shape, Q.shape, over=2, library="torch")
        with pytest.raises(ValueError, match="'torch' is not usable on 'foo'"):
            explain(Q.shape, K.shape, V.shape, library="torch", device="foo")
    assert "bfloat16, torch on cpu\nautocast:  query, value, bias to bfloat16\n" in str(of_arrays)
    assert of_arrays.as_dict()["autocast"] == ["query", "value", "bias"]
    assert of_shapes.autocast == ("query", "key", "value")
    assert of_shapes.problem.dtype == of_ranks.call.problem.dtype == "bfloat16"
    assert all(other.autocast == () and "autocast" not in str(other) for other in others)


def test_tensors_are_cast_before_they_go_to_another_backend():
    want = attention(*(x.to(BRAIN) for x in (Q, K, V)), backend="numpy")
    with torch.autocast("cpu", dtype=BRAIN):
        equal(attention(Q, K, V, backend="numpy"), want)


def test_ranks_follow():
    def attend(ranks, to, dtype, bias):
        own = [parallel.shard(x.to(dtype), over=ranks) for x in (Q, K, V)]
        options = {"over": ranks, "strategy": "ring", "bias": bias.to(dtype)}
        with torch.autocast("cpu", dtype=BRAIN, enabled=to == BRAIN):
            output = parallel.attention(*own, **options)
            _, pullback = parallel.attention_vjp(*own, **options)
            explained = parallel.explain(*own, **options).call.problem.dtype
        found = pullback(torch.ones_like(output))
        return output, explained, found.bias, *found[:3]

    followed = parallel.run_threads(
        2, functools.partial(attend, to=BRAIN, dtype=Q.dtype, bias=BIAS)
    )
    by_hand = parallel.run_threads(2, functools.partial(attend, to=None, dtype=BRAIN, bias=BIAS))
    for (output, dtype, *gradients), want in zip(followed, by_hand, strict=True):
        equal(output, want[0])
        assert dtype == want[1]
        assert {x.dtype for x in gradients} == {torch.float32}
        equal([x.to(BRAIN) for x in gradients], list(want[2:]))


def test_a_map_is_that_of_torch():
    layer = nn.Linear.init(8, 5, like=Q)
    for x in (Q, Q.to(BRAIN), Q.to(HALF)):
        with torch.autocast("cpu", dtype=BRAIN):
            equal(layer(x), F.linear(x, layer.weight.mT, layer.bias))
    with torch.autocast("cpu"), pytest.raises(TypeError, match="float32 parameters"):
        layer(Q.double())


def test_a_cache_takes_other_dtypes_under_autocast_only():
    cache = nn.KVCache.init(4, 8, 8, like=Q.to(BRAIN), batch=(2,))
    with torch.autocast("cpu", dtype=BRAIN):
        more = cache.append(Q.clone().requires_grad_(), K)
    assert (more.key.dtype, more.value.dtype) == (BRAIN, BRAIN)
    equal(more.keys.detach(), Q.to(BRAIN))
    with pytest.raises(TypeError, match="as the cache is"):
        cache.append(Q, K)


@pytest.mark.parametrize("to", [F32, F64])
def test_a_quantised_cache_follows_autocast_as_a_cache_does(to):
    query, key, value = (x.to(to) for x in (Q[:, :, -1:], K, V))
    settings = {"like": key, "batch": (2,)}
    cache = nn.QuantizedCache.init(4, 8, 8, window=2, block=4, **settings).append(key, value)
    other = nn.KVCache.init(4, 8, 8, **settings).append(key, value)
    hidden = BIAS[-1:].clone()
    hidden[:, 1] = torch.finfo(torch.float32).min  # −inf in bfloat16
    options = {"is_causal": True, "bias": hidden.to(to)}
    with torch.autocast("cpu", dtype=BRAIN):
        found = cache.attention(query, **options)
        expected = attention(query, other.keys, other.values, **options)
        plain = cache.attention(query)
    assert found.dtype == plain.dtype == expected.dtype
    close(found.to(BRAIN), expected.to(BRAIN), 4)
