"""Other conventions through ours: ONNX's own test vectors, and torch's function by its side."""

import importlib
import warnings

import array_api_strict
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from polyattn import attention, use_backend
from polyattn._dispatch import registry
from polyattn.dialects import dot_product_attention, onnx_attention, scaled_dot_product_attention


def onnx_cases():
    """Return the node tests that the ONNX project publishes for Attention."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        onnx = importlib.import_module("onnx")
        node = importlib.import_module("onnx.backend.test.case.node")
        importlib.import_module("onnx.backend.test.case.node.attention")
    cases = [case for case in node._NodeTestCases if "_expanded" not in case.name]
    return [(case, case.model.graph.node[0], onnx.helper) for case in cases]


CASES = onnx_cases()
HALF = ("bfloat16", "float16")
assert registry.load("torch") is None
TORCH = registry.loaded("torch")
LIBRARIES = {
    "numpy": (lambda x: x, lambda x: x),
    "torch": (lambda x: TORCH.place(x, None), lambda x: TORCH.fetch(x)),
    "strict": (array_api_strict.asarray, np.asarray),
}


def test_there_are_as_many_as_are_known():
    assert len(CASES) >= 93


def runs():
    """Yield each case for each library that has its dtypes."""
    for case in CASES:
        in_16_bits = any(x.dtype.name in HALF for x in case[0].data_sets[0][0])
        for library in LIBRARIES:
            if not (in_16_bits and library == "strict"):
                yield pytest.param(case, library, id=f"{case[0].name}-{library}")


@pytest.mark.parametrize(("case", "library"), list(runs()))
def test_onnx(case, library):
    test, node, helper = case
    inputs, outputs = test.data_sets[0]
    there, back = LIBRARIES[library]
    given = dict(zip([name for name in node.input if name], inputs, strict=True))
    arrays = [there(given[name]) if name else None for name in node.input]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if "qk_matmul_output" in node.output:
        attributes = {"qk_matmul_output_mode": 0} | attributes
    result = onnx_attention(*arrays, **attributes)._asdict()
    expected = dict(zip([name for name in node.output if name], outputs, strict=True))
    for name, array in expected.items():
        actual = back(result[name])
        assert actual.dtype == array.dtype
        # What is expected in 16 bits was computed in 16 bits, softmax and all.
        rtol = max(test.rtol, 2 * float(ml_dtypes.finfo(array.dtype).eps))
        one, other = actual.astype("f8"), array.astype("f8")
        np.testing.assert_allclose(one, other, rtol=rtol, atol=test.atol)


RNG = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(2, h, n, 8, generator=RNG) for h, n in ((4, 6), (4, 9), (4, 9)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.rand(6, 9, generator=RNG) > 0.5},
        {"attn_mask": torch.rand(4, 6, 9, generator=RNG) > 0.5},
        {"attn_mask": torch.randn(2, 1, 6, 9, generator=RNG)},
        {"attn_mask": torch.zeros(6, 9, dtype=torch.bool)},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("heads", [4, 2])
def test_torch(options, heads):
    k, v, gqa = K[:, :heads], V[:, :heads], {"enable_gqa": heads != 4}
    expected = torch.nn.functional.scaled_dot_product_attention(Q, k, v, **options, **gqa)
    torch.testing.assert_close(scaled_dot_product_attention(Q, k, v, **options, **gqa), expected)
    on_numpy = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    output = scaled_dot_product_attention(*(x.numpy() for x in (Q, k, v)), **on_numpy, **gqa)
    np.testing.assert_allclose(output, expected, atol=2e-6)


@pytest.mark.parametrize(
    "bias",
    [causal_upper_left(6, 9), causal_lower_right(6, 9), causal_lower_right(9, 9)],
    ids=["upper left", "lower right", "square"],
)
def test_torch_takes_a_causal_bias_for_what_it_describes(bias):
    expected = torch.nn.functional.scaled_dot_product_attention(Q, K, V, bias)
    for backend in ("torch", "numpy"):
        with use_backend(backend):
            output = scaled_dot_product_attention(Q, K, V, bias)
        torch.testing.assert_close(output, expected, atol=2e-6, rtol=0)
    output = scaled_dot_product_attention(*(x.numpy() for x in (Q, K, V)), bias)
    np.testing.assert_allclose(output, expected, atol=2e-6)


def test_a_causal_bias_of_other_lengths_or_for_others_is_refused():
    with pytest.raises(ValueError, match=r"lower_right\(5, 9\), but the scores are \(6, 9\)"):
        scaled_dot_product_attention(Q, K, V, causal_lower_right(5, 9))
    with pytest.raises(TypeError, match="attn_mask is torch's CausalBias"):
        onnx_attention(Q, K, V, causal_lower_right(6, 7))


def _jax_cases():
    rng = np.random.default_rng(0)
    return {
        "plain": {},
        "scale": {"scale": 0.3},
        "causal": {"is_causal": True},
        "bias": {"bias": rng.standard_normal((2, 4, 6, 9), dtype=np.float32)},
        "mask": {"mask": np.arange(9) < rng.integers(1, 9, (2, 1, 6, 1))},
        "bias per head": {"bias": rng.standard_normal((4, 1, 9), dtype=np.float32)},
        "mask per head": {
            "mask": np.arange(9) < rng.integers(1, 9, (4, 6, 1)),
            "key_value_seq_lengths": np.array([9, 4]),
        },
        "mask and bias of keys": {
            "mask": np.arange(9) < 5,
            "bias": rng.standard_normal((1, 9), dtype=np.float32),
        },
        "mask per head alone": {"mask": np.arange(9) < rng.integers(1, 9, (4, 6, 1))},
        "window": {"local_window_size": 2},
        "window of two": {"local_window_size": (3, 1), "is_causal": True},
        "lengths": {
            "query_seq_lengths": np.array([3, 6]),
            "key_value_seq_lengths": np.array([9, 4]),
        },
    }


_rng = np.random.default_rng(1)
BTNH = [_rng.standard_normal((2, n, h, 8), dtype=np.float32) for n, h in ((6, 4), (9, 2), (9, 2))]


@pytest.mark.parametrize("case", _jax_cases())
def test_jax(case):
    def options(asarray):
        given = _jax_cases()[case].items()
        return {n: asarray(x) if isinstance(x, np.ndarray) else x for n, x in given}

    def both(function, arrays, asarray):
        output = function(*arrays, **options(asarray))
        return output, function(*arrays, **options(asarray), return_residual=True)

    ours = dot_product_attention
    expected, in_jax = jax.jit(
        lambda *arrays: (
            jax.nn.dot_product_attention(*arrays, **options(jnp.asarray)),
            both(ours, arrays, jnp.asarray),
        )
    )(*BTNH)
    for output, partial in (both(ours, BTNH, np.asarray), in_jax):
        np.testing.assert_allclose(output, expected, atol=2e-6)
        assert partial.logsumexp.shape == expected.shape[:-1]


def test_jax_without_a_batch():
    arrays = [x[0] for x in BTNH]
    for options in (
        {"is_causal": True, "key_value_seq_lengths": np.array([4])},
        {"mask": np.tril(np.ones((1, 4, 6, 9), bool)), "bias": np.ones((1, 1, 1, 9), "f4")},
    ):
        expected = jax.nn.dot_product_attention(*map(jnp.asarray, arrays), **options)
        np.testing.assert_allclose(dot_product_attention(*arrays, **options), expected, atol=2e-6)


def test_what_torch_refuses_or_only_torch_can_do():
    with pytest.raises(ValueError, match="enable_gqa=True"):
        scaled_dot_product_attention(Q, K[:, :2], V[:, :2])
    with pytest.raises(ValueError, match="not both"):
        scaled_dot_product_attention(Q, K, V, torch.ones(6, 9, dtype=torch.bool), is_causal=True)
    with pytest.raises(NotImplementedError, match=r"query is of jax.*dropout=\(0\.1, seed\)"):
        scaled_dot_product_attention(*(jnp.asarray(x) for x in (Q, K, V)), dropout_p=0.1)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"dropout_p must be at least 0 and below 1; got 1\.0"):
        scaled_dot_product_attention(Q, K, V, dropout_p=1.0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_torch_drops_with_a_seed_of_its_generator(compiles):
    """A drop-in for training: other weights at each step, the same after manual_seed."""

    def train(q, rate):
        return scaled_dot_product_attention(q, K, V, dropout_p=rate, is_causal=True)

    step = torch.compile(train, fullgraph=True, backend="eager") if compiles else train
    state = torch.random.get_rng_state()
    leaf = Q.clone().requires_grad_()
    torch.manual_seed(3)
    first, second = step(leaf, 0.25), step(leaf, 0.25)
    torch.manual_seed(3)
    torch.testing.assert_close(step(leaf, 0.25), first, rtol=0, atol=0)
    torch.manual_seed(3)
    seed = int(torch.randint(2**62, ()))
    torch.random.set_rng_state(state)
    same = {"dropout": (0.25, seed), "is_causal": True, "query_offset": 0}
    torch.testing.assert_close(first, attention(Q, K, V, **same))
    assert not torch.equal(first, second)
    first.sum().backward()
    assert leaf.grad.abs().sum() > 0
    step(leaf, 0.0)
    assert torch.equal(torch.random.get_rng_state(), state)


X = np.ones((2, 4, 5, 8), np.float32)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (X, {"past_key": X}, "or neither"),
        (X, {"past_key": X, "past_value": X, "nonpad_kv_seqlen": np.array([5, 5])}, "not both"),
        (X[:, 0], {"q_num_heads": 3, "kv_num_heads": 3}, "3 heads do not divide a width of 8"),
        (X[:, 0], {}, "q_num_heads and kv_num_heads"),
        (X, {"qk_matmul_output_mode": 4}, "must be 0, 1, 2 or 3; got 4"),  # there is no fifth step
    ],
)
def test_inputs_of_onnx_that_do_not_go_together(x, options, message):
    with pytest.raises(ValueError, match=message):
        onnx_attention(x, x, x, **options)


@pytest.mark.parametrize("name", ["window", "padding", "bias"])
def test_the_steps_of_onnx_lead_to_the_output(name):
    rng = np.random.default_rng(0)
    shapes = [(2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)]
    inputs = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    options = {
        "window": {"left_window_size": 2, "right_window_size": 1, "softcap": 2.0},
        "padding": {"nonpad_kv_seqlen": np.array([7, 6]), "is_causal": 1},
        "bias": {"attn_mask": rng.standard_normal((2, 1, 5, 7), dtype=np.float32), "scale": 0.5},
    }[name]
    steps = [onnx_attention(*inputs, **options, qk_matmul_output_mode=n)[3] for n in range(4)]
    output = onnx_attention(*inputs, **options)
    assert output.qk_matmul_output is None
    scores = inputs[0] @ np.repeat(inputs[1], 2, axis=1).swapaxes(-1, -2)
    np.testing.assert_allclose(steps[0], scores * options.get("scale", 8**-0.5), atol=2e-6)
    cap = options.get("softcap")
    np.testing.assert_allclose(
        steps[1], cap * np.tanh(steps[0] / cap) if cap else steps[0], atol=2e-6
    )
    weights = np.exp(steps[2] - steps[2].max(-1, keepdims=True))
    np.testing.assert_allclose(steps[3], weights / weights.sum(-1, keepdims=True), atol=2e-6)
    np.testing.assert_allclose(steps[3] @ np.repeat(inputs[2], 2, axis=1), output.Y, atol=2e-6)
