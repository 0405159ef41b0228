"""Wrong calls: each error comes before any work, quotes the arguments and says how to fix them."""

import importlib
import re
import warnings

import array_api_strict
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask

import polyattn
from polyattn import UnsupportedError, attention, attention_partial, masks, scores
from polyattn._dispatch import registry

Q = np.zeros((2, 4, 5, 8), np.float32)
K = np.zeros((2, 2, 7, 8), np.float32)
V = np.zeros((2, 2, 7, 3), np.float32)


def refused(error, *pieces, q=Q, k=K, v=V, **options):
    """Check that a call raises an error whose message contains all the pieces."""
    with pytest.raises(error) as caught:
        attention(q, k, v, **options)
    for piece in pieces:
        assert piece in str(caught.value)
    with pytest.raises(error):
        attention_partial(q, k, v, **options)


# ---- not an array ----


@pytest.mark.parametrize("what", [[[1.0]], 1.0, None, "abc"])
def test_other_objects(what):
    kind = type(what).__name__
    refused(TypeError, f"query is a {kind}", "numpy.asarray", q=what)
    refused(TypeError, f"value is a {kind}", "numpy.asarray", v=what)


def test_numpy_matrix():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        matrix = np.matrix([[1.0, 2.0]])
    refused(TypeError, "key is a numpy.matrix", "numpy.asarray(key)", k=matrix)


def test_masked_array():
    masked = np.ma.masked_array(V, V == 0)
    refused(TypeError, "value is a masked array", "value.data", "mask=", v=masked)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
def test_masked_tensor():
    masked = torch.masked.masked_tensor(torch.ones(5, 7), torch.ones(5, 7, dtype=torch.bool))
    refused(TypeError, "bias is a masked tensor", "bias.get_data()", "mask=", bias=masked)


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [
        ("sparse.core", "SparseArray", "value.todense()"),
        ("blosc2.ndarray", "NDArray", "value[...]"),
    ],
)
def test_arrays_that_are_no_ordinary_ones(module, name, hint):
    what = type(name, (), {"__module__": module})()
    refused(TypeError, "value is a", f"pass {hint}", v=what)


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
def test_quantized_tensor():
    quantized = torch.quantize_per_tensor(torch.ones(5, 7), 0.1, 0, torch.qint8)
    refused(TypeError, "bias is a sparse, quantized", "bias.dequantize()", bias=quantized)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("where", [{}, {"kernel": "tiled"}, {"backend": "numpy"}], ids=str)
def test_causal_bias_of_torch(make, where):
    q, k, v = map(torch.from_numpy, (Q, K, V))
    bias = make(5, 7)
    for name in ("bias", "mask", "sinks", "query_offset"):
        refused(
            TypeError, f"{name} is torch's CausalBias", "is_causal=True",
            q=q, k=k, v=v, **{name: bias}, **where,
        )  # fmt: skip
    for inside in ({"mask": masks.causal() | bias}, {"score_mod": scores.alibi(bias)}):
        refused(TypeError, "is torch's CausalBias", q=q, k=k, v=v, **inside, **where)
    for value in (masks.dense, masks.segments, masks.prefix):
        with pytest.raises(TypeError, match="CausalBias"):
            value(bias)


def test_block_mask_of_torch():
    blocks = create_block_mask(lambda b, h, i, j: j <= i, None, None, 5, 7, device="cpu")
    for name in ("mask", "bias"):
        refused(TypeError, f"{name} is torch's BlockMask", ".mask_mod, in mask=", **{name: blocks})


class Wrapper(torch.Tensor):
    """A tensor whose values are in another tensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        bare = [x.inner if isinstance(x, cls) else x for x in args]
        return function(*bare, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_a_wrapper_tensor_is_not_converted(backend):
    q, k, v = map(torch.from_numpy, (Q, K, V))
    bias = Wrapper(torch.ones(5, 7))
    assert attention(q, k, v, bias=bias, kernel="dense").shape == (2, 4, 5, 3)
    refused(UnsupportedError, "bias is traced", q=q, k=k, v=v, bias=bias, backend=backend)


def test_object_array():
    refused(TypeError, "query has dtype object", "cast it first", q=Q.astype(object))


# ---- dtypes ----


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool", "complex64", "complex128"])
def test_dtypes_that_are_not_supported(dtype):
    for name, array in (("q", Q), ("k", K), ("v", V)):
        refused(TypeError, f"has dtype {dtype}", "float32", **{name: array.astype(dtype)})


def test_dtypes_that_differ():
    refused(TypeError, "query float32, key float64, value float32", "cast them", k=K.astype("f8"))


def test_mask_of_integers():
    refused(TypeError, "int64", "mask != 0", mask=np.ones((5, 7), np.int64))


def test_mask_of_floats():
    refused(TypeError, "float32", "mask.astype(bool)", "bias=", mask=np.ones((5, 7), np.float32))
    tensors = [torch.from_numpy(x) for x in (Q, K, V)]
    with pytest.raises(TypeError, match=r"is mask\.bool\(\)"):
        attention(*tensors, mask=torch.ones(5, 7))


def test_bias_of_bools():
    refused(TypeError, "bias", "bool", "mask=", bias=np.ones((5, 7), bool))


def test_sinks_of_integers():
    refused(TypeError, "sinks", "int64", sinks=np.zeros(4, np.int64))


def test_query_offset_of_floats():
    refused(TypeError, "query_offset", "float32", query_offset=np.zeros(2, np.float32))
    refused(TypeError, "query_offset", "1.5", query_offset=1.5)


# ---- libraries and devices ----


def test_arrays_of_different_libraries():
    refused(
        TypeError,
        "array of numpy",
        "key one of torch",
        "torch.asarray(query",
        k=torch.zeros(K.shape),
    )
    refused(TypeError, "mask one of torch", mask=torch.ones(5, 7, dtype=torch.bool))


def test_arrays_on_different_devices():
    strict = array_api_strict
    near = strict.zeros((3, 2), dtype=strict.float32)
    far = strict.zeros((3, 2), dtype=strict.float32, device=strict.Device("device1"))
    refused(ValueError, "query is on", "key on", "device1", q=near, k=far, v=near)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:.*nested:UserWarning")
@pytest.mark.parametrize(
    "special",
    [
        (torch.eye(4).to_sparse(), "query is a sparse, quantized"),
        (torch.nested.nested_tensor([torch.ones(2, 3)], layout=torch.jagged), "masks.segments"),
    ],
    ids=["sparse", "nested"],
)
def test_special_tensors(special):
    tensor, message = special
    refused(TypeError, message, q=tensor)


# ---- shapes ----


def test_rank_below_two():
    refused(ValueError, "query (5,)", "(..., H, L, D)", q=np.zeros(5, np.float32))


def test_vector_sizes_that_differ():
    refused(ValueError, "8 and 6", "key (2, 2, 7, 6)", k=K[..., :6])


def test_lengths_that_differ():
    refused(ValueError, "7 and 6", "value (2, 2, 6, 3)", v=V[:, :, :6])


def test_key_and_value_heads_that_differ():
    refused(ValueError, "2 and 1", "value (2, 1, 7, 3)", v=V[:, :1])


def test_query_heads_not_a_multiple_of_key_heads():
    refused(ValueError, "3 and 2", 'layout="...LHD"', q=Q[:, :3])


def test_query_heads_without_key_heads():
    refused(ValueError, "4 and 0", k=K[:, :0], v=V[:, :0])
    assert attention(Q[:, :0], K[:, :0], V[:, :0]).shape == (2, 0, 5, 3)


def test_batch_axes_that_do_not_broadcast():
    refused(ValueError, "(2,), (3,), (2,)", "broadcast", k=np.zeros((3, 2, 7, 8), np.float32))


def test_shapes_are_quoted_in_the_callers_layout():
    refused(
        ValueError,
        "query (2, 5, 4, 8)",
        "(..., L, H, D)",
        q=Q.swapaxes(1, 2),
        k=K.swapaxes(1, 2)[..., :6],
        v=V.swapaxes(1, 2),
        layout="...LHD",
    )


def test_mask_of_rank_three_for_rank_four():
    refused(ValueError, "(4, 5, 7)", "mask[:, None]", "mask[None]", mask=np.ones((4, 5, 7), bool))
    refused(ValueError, "could be batch or heads", mask=masks.causal() | np.ones((4, 5, 7), bool))
    for mask in (np.ones((4, 5, 7), bool), np.ones((2, 4, 5, 7), bool)):
        refused(ValueError, "mask[:, None]", q=Q[None], k=K[None], v=V[None], mask=mask)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax", "array_api_strict"])
def test_a_mask_of_rank_three_that_is_not_ambiguous(library):
    xp = importlib.import_module("jax.numpy" if library == "jax" else library)
    rng = np.random.default_rng(0)
    query, key, value = (xp.asarray(rng.random(x.shape, np.float32)) for x in (Q, K, V))
    seen = np.arange(7) % 3 != np.arange(5)[:, None] % 2
    kernels = {"numpy": ("tiled", "dense"), "torch": ("sdpa", "tiled"), "jax": ("xla",)}
    for rows in (seen[None], seen[None, :1]):
        mask, matrix = xp.asarray(rows), xp.asarray(rows[0])
        for kernel in kernels.get(library, (None,)):
            expected = attention(query, key, value, mask=matrix, kernel=kernel)
            for variant in (mask, masks.dense(mask) & masks.window(3, 3) | masks.dense(mask)):
                output = attention(query, key, value, mask=variant, kernel=kernel)
                np.testing.assert_allclose(np.asarray(output), np.asarray(expected), rtol=1e-5)


def test_mask_and_bias_that_do_not_broadcast():
    refused(ValueError, "mask (5, 6)", "(2, 4, 5, 7)", mask=np.ones((5, 6), bool))
    refused(ValueError, "bias (2, 2, 5, 7)", bias=np.zeros((2, 2, 5, 7), np.float32))
    refused(ValueError, "mask (3, 2, 4, 5, 7)", mask=np.ones((3, 2, 4, 5, 7), bool))


def test_a_mask_does_not_widen_the_batch():
    refused(
        ValueError, "mask (6, 1, 1, 7)", q=Q[:1], k=K[:1], v=V[:1], mask=np.ones((6, 1, 1, 7), bool)
    )


def test_sinks_of_the_wrong_shape():
    refused(ValueError, "(4,)", "got (2,)", sinks=np.zeros(2, np.float32))


def test_query_offset_of_the_wrong_shape():
    refused(ValueError, "query_offset", "(2,)", "got (3,)", query_offset=np.zeros(3, int))
    refused(ValueError, "query_offset", "got (1, 2)", query_offset=np.zeros((1, 2), int))


# ---- options ----


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scale_that_is_not_finite(scale):
    refused(ValueError, "scale must be finite", repr(scale), scale=scale)


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_numbers_outside_the_range_of_the_dtype(name):
    for value in (1e39, 1e-46):
        refused(ValueError, f"{name} must be within the range", repr(value), **{name: value})
        double = {"q": Q.astype("f8"), "k": K.astype("f8"), "v": V.astype("f8")}
        attention(*double.values(), **{name: value})
    refused(ValueError, f"{name} must be finite", **{name: 10**400})


@pytest.mark.parametrize("scale", ["1", np.ones(3), True])
def test_scale_that_is_not_a_number(scale):
    refused(TypeError, "scale must be a number", scale=scale)


@pytest.mark.parametrize("softcap", [0, -1.0])
def test_softcap_not_above_zero(softcap):
    refused(ValueError, "softcap must be above 0", repr(softcap), softcap=softcap)


def capped(cap):
    """Return the score rule that the messages advise."""
    return lambda s, b, h, i, j: cap * jnp.tanh(s / cap)


def test_what_is_advised_for_a_softcap_that_is_an_array():
    refused(TypeError, "Pass float(softcap)", softcap=np.asarray(5.0))
    refused(TypeError, "Pass float(softcap)", softcap=torch.tensor(5.0))
    refused(TypeError, "pass score_mod=", "tanh(s / softcap[h])", softcap=np.ones(4))
    refused(TypeError, "must be a number; got (5,)", softcap=(5,))
    with pytest.raises(TypeError, match=r"dropout rate must be a number; got array\(0.5\)$"):
        attention(Q, K, V, dropout=(np.asarray(0.5), 1))


def test_what_is_advised_for_a_softcap_or_a_window_that_is_traced():
    q, k, v = map(jnp.asarray, np.random.default_rng(0).random((3, 4, 5, 8), np.float32))
    with pytest.raises(TypeError, match="static argument, or pass score_mod=lambda s, b, h, i, j"):
        jax.jit(lambda cap: attention(q, k, v, softcap=cap))(5.0)
    found = jax.jit(lambda cap: attention(q, k, v, score_mod=capped(cap)))(5.0)
    np.testing.assert_allclose(found, attention(q, k, v, softcap=5.0), rtol=1e-6)

    def within(left, right, offset=0):
        return lambda b, h, i, j: (i + offset - left <= j) & (j <= i + offset + right)

    match = r"static argument, or pass mask=lambda b, h, i, j: \(i \+ offset - left <= j\)"
    for window in (lambda end: (end, 0), lambda end: (None, end)):
        with pytest.raises(TypeError, match=match):
            jax.jit(lambda end, window=window: attention(q, k, v, window=window(end)))(2)
    found = jax.jit(lambda left: attention(q, k, v, mask=within(left, 1)))(2)
    np.testing.assert_allclose(found, attention(q, k, v, window=(2, 1)), rtol=1e-6)


def test_window_ends_below_zero():
    refused(ValueError, "at least 0", "(-1, 0)", window=(-1, 0))


@pytest.mark.parametrize("window", [256, (1,), (1, 2, 3), (1.5, 0), "ab"])
def test_window_that_is_not_a_pair(window):
    refused(TypeError, "(left, right)", "(255, 0)", repr(window), window=window)


@pytest.mark.parametrize("dropout", [(1.0, 0), (-0.1, 0)])
def test_dropout_out_of_range(dropout):
    refused(ValueError, "[0, 1)", repr(dropout), dropout=dropout)


def test_dropout_without_a_seed():
    refused(TypeError, "(rate, seed)", "0.1", dropout=0.1)
    refused(TypeError, "seed must be one integer", dropout=(0.1, None))


def test_dropout_is_refused_by_a_kernel_that_does_not_declare_it():
    options = {"dropout": (0.1, 0), "kernel": "sdpa", "backend": "torch"}
    refused(polyattn.UnsupportedError, "cannot take this call", "not compute dropout", **options)


@pytest.mark.parametrize("is_causal", [1, "yes", None])
def test_is_causal_that_is_not_a_bool(is_causal):
    refused(TypeError, "is_causal must be True or False", repr(is_causal), is_causal=is_causal)


def test_unknown_layout():
    refused(ValueError, "...HLD", "'bshd'", layout="bshd")
    refused(ValueError, "...HLD", layout=np.array("...HLD"))


def test_score_mod_that_is_not_a_function():
    refused(TypeError, "score_mod must be a function", score_mod=1)


def test_functions_with_the_wrong_parameters():
    refused(
        TypeError, "the mask function must take (b, h, i, j)", "(i, j)", mask=lambda i, j: i > j
    )
    refused(TypeError, "score_mod must take (score, b, h, i, j)", score_mod=lambda s: s)
    attention(Q, K, V, mask=lambda *indices: True, score_mod=lambda s, *indices: s)


def test_a_mask_function_that_returns_numbers():
    refused(TypeError, "must return a bool array", "int64", mask=lambda b, h, i, j: i + j)


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (1.0, TypeError, "the result of score_mod is a float"),
        (np.zeros((5, 6)), ValueError, "must broadcast to (2, 4, 5, 7)"),
        (np.zeros((1, 2, 4, 5, 7)), ValueError, "it returned (1, 2, 4, 5, 7)"),
        (np.zeros((5, 7), complex), TypeError, "complex128"),
        (torch.zeros(5, 7), TypeError, "arrays of numpy and must return one"),
    ],
)
def test_a_score_function_that_returns_something_else(returned, error, message):
    refused(error, message, score_mod=lambda s, b, h, i, j: returned)
    if error is not TypeError:
        refused(error, message, score_mod=lambda s, b, h, i, j: returned, backend="torch")


def test_a_mask_function_that_returns_the_wrong_shape():
    refused(ValueError, "must broadcast to (2, 4, 5, 7)", mask=lambda *_: np.ones((5, 6), bool))
    refused(ValueError, "must broadcast to", mask=lambda *_: np.ones((3, 1, 1, 1, 1), bool))


# ---- backends ----


def test_unknown_backend():
    refused(polyattn.UnknownBackendError, "'nunpy'", "did you mean 'numpy'?", backend="nunpy")
    refused(ValueError, "array-api, auto", backend="numpy,acme")


def test_malformed_backend_names():
    refused(TypeError, "named by a string", backend=3)
    refused(ValueError, "missing in backend='numpy,,torch'", backend="numpy,,torch")
    refused(ValueError, "missing in backend=[]", backend=[])
    refused(ValueError, "auto:cuda", "takes no device", backend="auto:cuda")


def test_unknown_kernel():
    refused(polyattn.UnsupportedError, "no kernel of that name", "tiled, dense", kernel="flash")
    refused(polyattn.UnsupportedError, "kernel='' cannot", kernel="")


@pytest.mark.parametrize("kernel", [3, ["dense"]])
def test_kernel_that_is_not_a_name(kernel):
    refused(TypeError, "named by a string", repr(kernel), kernel=kernel)


def test_unavailable_device():
    refused(NotImplementedError, "no device 'cuda:7'", "cpu", backend="torch:cuda:7")


def test_the_error_lists_every_candidate():
    with pytest.raises(polyattn.UnsupportedError) as caught:
        attention(Q, K, V, softcap=2.0, backend="torch,numpy", kernel="sdpa")
    text = str(caught.value)
    assert re.search(r"torch +sdpa +refused +it does not compute softcap", text)
    assert re.search(r"numpy +sdpa +refused +it has no kernel of that name", text)
    assert caught.value.explanation.chosen is None


# ---- order of the checks ----


def test_refusals_come_before_any_conversion(monkeypatch):
    assert registry.load("torch") is None
    backend = type(registry.loaded("torch"))
    monkeypatch.setattr(backend, "place", lambda *_: pytest.fail("converted before the checks"))
    refused(ValueError, "8 and 6", k=K[..., :6], backend="torch")
    refused(TypeError, "int64", mask=np.ones((5, 7), int), backend="torch")


def test_an_option_is_checked_after_an_equal_valid_one():
    attention(Q, K, V, window=(1, 0))
    refused(TypeError, "(1.0, 0)", window=(1.0, 0))
