"""Other conventions through ours: ONNX's own test vectors, and JAX's function by its side."""

import functools
import importlib
import inspect
import warnings

import ml_dtypes
import numpy as np
import pytest
from arrays import LIBRARIES
from optional import jax, jnp, torch
from pairs import TO, ours

from polyattn.dialects import dot_product_attention, flash_attn, keras, onnx_attention
from polyattn.dialects.flash_attn import flash_attn_with_kvcache
from polyattn.dialects.torch import varlen_attn
from polyattn.dialects.xformers import memory_efficient_attention


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


def runs():
    """Yield each case, on one of the libraries that have its dtypes."""
    assert len(CASES) >= 93
    for number, case in enumerate(CASES):
        in_16_bits = any(x.dtype.name in HALF for x in case[0].data_sets[0][0])
        library = LIBRARIES[number % (2 if in_16_bits else 3)]
        yield pytest.param(case, library, id=f"{case[0].name}-{library}")


@pytest.mark.with_native
@pytest.mark.parametrize(("case", "library"), list(runs()))
def test_onnx(case, library):
    test, node, helper = case
    inputs, outputs = test.data_sets[0]
    given = dict(zip([name for name in node.input if name], inputs, strict=True))
    arrays = [library.to(given[name]) if name else None for name in node.input]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if "qk_matmul_output" in node.output:
        attributes = {"qk_matmul_output_mode": 0} | attributes
    result = onnx_attention(*arrays, **attributes)._asdict()
    expected = dict(zip([name for name in node.output if name], outputs, strict=True))
    for name, array in expected.items():
        actual = library.back(result[name])
        assert actual.dtype == array.dtype
        # What is expected in 16 bits was computed in 16 bits, softmax and all.
        rtol = max(test.rtol, 2 * float(ml_dtypes.finfo(array.dtype).eps))
        one, other = actual.astype("f8"), array.astype("f8")
        np.testing.assert_allclose(one, other, rtol=rtol, atol=test.atol)


_rng = np.random.default_rng(1)
BTNH = [_rng.standard_normal((2, n, h, 8), dtype=np.float32) for n, h in ((6, 4), (9, 2), (9, 2))]
SHORTER = _rng.integers(1, 9, (4, 6, 1))
ENDS = {"query_seq_lengths": np.array([3, 6]), "key_value_seq_lengths": np.array([9, 4])}
OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "bias": {"bias": _rng.standard_normal((2, 4, 6, 9), dtype=np.float32)},
    "mask": {"mask": np.arange(9) < _rng.integers(1, 9, (2, 1, 6, 1))},
    "bias per head": {"bias": _rng.standard_normal((4, 1, 9), dtype=np.float32)},
    "mask per head": {"mask": np.arange(9) < SHORTER, "key_value_seq_lengths": np.array([9, 4])},
    "mask and bias of keys": {
        "mask": np.arange(9) < 5, "bias": _rng.standard_normal((1, 9), dtype=np.float32),
    },
    "mask per head only": {"mask": np.arange(9) < SHORTER},
    "window": {"local_window_size": 2},
    "window of two": {"local_window_size": (3, 1), "is_causal": True},
    "lengths": ENDS,
    "scale without axes": {"scale": np.array(0.3, "f4"), "implementation": "xla"},
}  # fmt: skip
WITHOUT_A_BATCH = (
    {"is_causal": True, "key_value_seq_lengths": np.array([4])},
    {"mask": np.tril(np.ones((1, 4, 6, 9), bool)), "bias": np.ones((1, 1, 1, 9), "f4")},
)


def test_jax():
    """Jitted at once: JAX compiles for a quarter of a second else, each time."""
    own, arrays = dot_product_attention, [x[0] for x in BTNH]
    in_jax = ("mask per head", "window of two", "lengths", "scale without axes")

    def traced(*btnh):
        given = {
            name: {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in one.items()}
            for name, one in OPTIONS.items()
        }
        batches = {name: jax.nn.dot_product_attention(*btnh, **x) for name, x in given.items()}
        alone = [
            jax.nn.dot_product_attention(*map(jnp.asarray, arrays), **x) for x in WITHOUT_A_BATCH
        ]
        found = {name: own(*btnh, **given[name], return_residual=True) for name in in_jax}
        return batches, alone, found

    expected, alone, found = jax.jit(traced)(*BTNH)
    for name, options in OPTIONS.items():
        output = own(*BTNH, **options)
        np.testing.assert_allclose(output, expected[name], atol=2e-6, err_msg=name)
        partial = own(*BTNH, **options, return_residual=True)
        assert partial.logsumexp.shape == output.shape[:-1]
    for name, partial in found.items():
        np.testing.assert_allclose(partial.output, expected[name], atol=2e-6, err_msg=name)
        assert partial.logsumexp.shape == partial.output.shape[:-1]
    for options, one in zip(WITHOUT_A_BATCH, alone, strict=True):
        np.testing.assert_allclose(own(*arrays, **options), one, atol=2e-6)


X = np.ones((2, 4, 5, 8), np.float32)
_ENDS = np.array([0, 3, 6])
#: Functions of query, key, value (B, L, H, D) and a scale.
SCALED = {
    "keras": lambda *x: keras.dot_product_attention(*x[:3], scale=x[3]),
    "xformers": lambda *x: memory_efficient_attention(*x[:3], scale=x[3]),
    "flash_attn": lambda *x: flash_attn.flash_attn_func(*x[:3], softmax_scale=x[3]),
    "a cache": lambda *x: flash_attn.flash_attn_with_kvcache(*x[:3], softmax_scale=x[3]),
    "packed": lambda *x: flash_attn.flash_attn_varlen_func(
        *[x[n][0, ...] for n in range(3)], _ENDS, _ENDS, 3, 3, softmax_scale=x[3]
    ),
    "varlen_attn": lambda *x: varlen_attn(
        *[x[n][0, ...] for n in range(3)], _ENDS, _ENDS, 3, 3, scale=x[3]
    ),
}


@pytest.mark.parametrize(
    ("name", "library"), [(name, "numpy") for name in SCALED] + [("xformers", "torch")]
)
def test_a_scale_may_be_an_array_without_axes(name, library):
    x = [_rng.standard_normal((2, 6, 4, 8), dtype=np.float32) for _ in "qkv"]
    found = SCALED[name](*map(TO[library], x), TO[library](np.array(0.3, "f4")))
    np.testing.assert_allclose(found, SCALED[name](*x, 0.3), atol=2e-6)


def test_a_scale_that_jax_traces_has_a_gradient():
    x = [jnp.asarray(x) for x in BTNH]

    def total(function, scale):
        return (function(*x, scale=scale / jnp.sqrt(8)) ** 2).sum()

    own, theirs = (
        jax.jit(jax.grad(functools.partial(total, function)))(0.9)
        for function in (dot_product_attention, jax.nn.dot_product_attention)
    )
    np.testing.assert_allclose(own, theirs, rtol=1e-4)


IN_KERAS = [
    {"bias": OPTIONS["bias per head"]["bias"], "mask": np.arange(9) < SHORTER[None]},
    {"mask": np.eye(2, 9, 1)[:, None, None] == 0, "is_causal": True},
    {"scale": 0.3, "flash_attention": False},
]


@pytest.mark.slow
def test_keras(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    original = pytest.importorskip("keras").ops.dot_product_attention
    for options in IN_KERAS:
        found = keras.dot_product_attention(*BTNH, **options)
        np.testing.assert_allclose(found, original(*BTNH, **options), atol=2e-6)
    own, theirs = map(inspect.signature, (keras.dot_product_attention, original))
    assert list(own.parameters) == list(theirs.parameters)


def test_options_of_keras():
    x, own = BTNH[0], keras.dot_product_attention
    numbers, lower = np.tri(6, dtype=np.int32)[None, None], {"is_causal": True}
    np.testing.assert_array_equal(own(x, x, x, mask=numbers), own(x, x, x, **lower))
    found = own(x, x, x, attn_logits_soft_cap=0.5, scale=0.3, bias=numbers * 1.0, **lower)
    expected = ours(x, x, x, softcap=0.5, scale=0.3, bias=numbers * 1.0, query_offset=0, **lower)
    np.testing.assert_allclose(found, expected[0], atol=2e-6)


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


@pytest.mark.with_native
@pytest.mark.parametrize("name", ["flash_attn", "jax", "onnx"])
def test_nan_in_unwritten_slots_has_no_effect_on_torch(name):
    query, lengths = torch.randn(3, 2, 4, 8), torch.tensor([5, 2, 7])
    caches = [torch.randn(3, 9, 2, 8) for _ in range(2)]
    spoilt = [x.clone() for x in caches]
    for b, n in enumerate(lengths.tolist()):
        for x in spoilt:
            x[b, n:] = torch.nan

    def call(key, value):
        if name == "flash_attn":
            pad = torch.tensor([1, 0, 2])
            options = {"cache_seqlens": lengths, "cache_leftpad": pad, "causal": True}
            return flash_attn_with_kvcache(query, key, value, **options)
        mask = torch.arange(9) != 1
        if name == "jax":
            rows = torch.tensor([2, 1, 2])
            options = {"key_value_seq_lengths": lengths, "query_seq_lengths": rows}
            return dot_product_attention(query, key, value, mask=mask, **options)
        arrays = (x.transpose(1, 2) for x in (query, key, value))
        return onnx_attention(*arrays, mask, nonpad_kv_seqlen=lengths, is_causal=1).Y

    torch.testing.assert_close(call(*spoilt), call(*caches))
