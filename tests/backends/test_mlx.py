"""MLX as a backend: the suite on its default device, and what only its arrays need."""

import numpy as np
import pytest
from arrays import close, draw

import polyattn
from polyattn import attention, explain, masks, merge
from polyattn._base.arrays import library_of
from polyattn._kernels.tiled import Tiled
from polyattn.conformance import KernelVariant, Target
from polyattn.conformance.cases.gradient_cases import GRADIENT_CASES
from polyattn.conformance.checks.gradients import check_gradients
from polyattn.conformance.suite import BackendSuite

mx = pytest.importorskip("mlx.core")

from polyattn_mlx.backend import MlxBackend  # noqa: E402


class TestMlx(BackendSuite):
    """Its fused kernels, for Metal and CUDA, run only where there is such a device."""

    backend = "mlx"
    thorough = False


def numbers(*shape, dtype=mx.float32):
    return draw(shape, to=mx.array)[0].astype(dtype)


@pytest.fixture
def asked(monkeypatch):
    """What the kernel asks of MLX: the dtype of the query, and the options."""
    seen = []
    real = mx.fast.scaled_dot_product_attention

    def recorded(query, *arrays, **options):
        seen.append((query.dtype, options["mask"], options["force_fused"]))
        return real(query, *arrays, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", recorded)
    return seen


def test_causal_rows_need_no_mask_array(asked):
    q, k = numbers(2, 3, 8), numbers(2, 5, 8)
    attention(q, k, k, is_causal=True)
    assert asked[0][1] == "causal"
    attention(k, q, q, is_causal=True)  # the first rows see no key
    assert asked[1][1].shape[-2:] == (5, 3)


def test_without_a_fused_kernel_16_bits_are_summed_in_float32(asked):
    x = numbers(2, 5, 8, dtype=mx.float16)
    output = attention(x, x, x, backend="mlx:cpu")
    assert output.dtype == mx.float16
    assert [(one[0], one[2]) for one in asked] == [(mx.float16, True), (mx.float32, False)]
    asked.clear()
    attention(x, x, x, sinks=numbers(2))  # which are not rounded to 16 bits
    assert [one[0] for one in asked] == [mx.float32]


def test_a_gradient_does_not_pass_through_the_maximum():
    softmax = MlxBackend().softmax
    given = mx.array([[1.0, 2.0, 0.5]])
    gradient = mx.grad(lambda x: mx.sum(softmax(x)[0]))(given)
    np.testing.assert_allclose(np.asarray(gradient), np.asarray(softmax(given)[0]), rtol=1e-6)


def test_gradients_of_16_bits_in_tiles_are_rounded_once():
    target = Target("mlx")
    case = GRADIENT_CASES["keys of mean 64, bfloat16"]
    assert check_gradients(target, KernelVariant(Tiled(), small_tiles=True), case)


def test_float64_is_computed_in_float64():
    x = np.random.default_rng(0).standard_normal((2, 5, 8))
    array = mx.array(x, mx.float64)
    with pytest.raises(polyattn.UnsupportedError, match="its softmax is in float32"):
        attention(array, array, array, kernel="fast")
    found = attention(array, array, array, is_causal=True)
    assert found.dtype == mx.float64
    assert abs(np.asarray(found) - attention(x, x, x, is_causal=True)).max() < 1e-14
    parts = [polyattn.attention_partial(array, y, y) for y in (array[:, :2], array[:, 2:])]
    joined = merge(*parts)
    assert abs(np.asarray(joined.output) - attention(x, x, x)).max() < 1e-14


def test_float64_is_lacking_on_a_gpu(monkeypatch):
    backend = MlxBackend()
    assert backend.lacks("float64") is None
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert "on the CPU only" in backend.lacks("float64")
    assert backend.lacks("float32") is None


@pytest.mark.parametrize(
    ("device", "variable", "is_rounded"),
    [("cpu", "1", False), ("gpu", "1", True), ("gpu", "0", False)],
)
def test_explain_says_how_a_gpu_rounds(device, variable, is_rounded, monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(getattr(mx, device)))
    monkeypatch.setenv("MLX_ENABLE_TF32", variable)
    x = numbers(2, 5, 8)
    assert ("as TF32 where the GPU can" in str(explain(x, x, x))) == is_rounded


def test_nothing_is_computed_while_a_call_is_traced():
    # Inside mx.compile, arrays have no values: to evaluate one is an error.
    x = numbers(2, 5, 8)
    for options in ({"is_causal": True}, {"window": (1, 1), "softcap": 2.0}):
        found = mx.compile(lambda x, options=options: attention(x, x, x, **options))(x)
        assert mx.allclose(found, attention(x, x, x, **options), atol=1e-6)


def test_a_benchmark_evaluates_the_result(monkeypatch):
    evaluated = []
    monkeypatch.setattr(mx, "eval", evaluated.append)
    result = MlxBackend().compile(lambda x: attention(x, x, x))(numbers(2, 5, 8))
    assert evaluated[0] is result


def test_no_gradient_is_lost_on_the_way_to_another_library():
    x = numbers(2, 5, 8)
    with pytest.raises(polyattn.UnsupportedError, match="query is traced, transformed, lazy"):
        mx.grad(lambda x: attention(x, x, x, backend="numpy").sum())(x)


def test_arrays_go_there_and_come_back_in_their_dtype():
    (x,) = draw((2, 5, 8), dtype="bfloat16")
    found = attention(x[:, ::-1], x, x, backend="mlx")
    assert isinstance(found, np.ndarray)
    assert found.dtype == x.dtype
    close(found, attention(x[:, ::-1], x, x))


@pytest.mark.parametrize(
    "mask",
    [
        [[True, False, True]] * 3,
        np.array(False),
        lambda b, h, i, j: True,
        masks.compile(lambda b, h, i, j: True, 3),
    ],
    ids=["list", "none", "function", "compiled"],
)
def test_bools_of_the_host_are_masks(mask):
    x = numbers(1, 2, 3, 4)
    for kernel in (None, "dense"):
        found = attention(x, x, x, mask=mask, kernel=kernel)
        close(found, attention(*[np.array(x)] * 3, mask=mask))


# What a process wrote before decides what MLX reads in place of an array without entries.
OF_NOTHING = """
import mlx.core as mx, numpy as np
from polyattn import attention
from polyattn._base.arrays import library_of

written = [mx.array(np.full(n, 7, np.float32)) + n for n in (1, 1, 2, 4) for _ in range(9)]
mx.eval(written)
del written
query, none = (mx.array(np.ones((2, n, 4), np.float32)) for n in (3, 0))
for kernel in ("tiled", "dense"):
    assert not np.array(attention(query, none, none, kernel=kernel)).any()
none = mx.array(np.ones((3, 0), np.float32))
xp = library_of(none).xp
assert not xp.any(xp.sum(none, axis=1)) and xp.all(none) and not xp.any(none)
"""


def test_a_sum_over_nothing_reads_no_memory(run_python):
    run_python(OF_NOTHING)


def test_of_equal_scores_the_lower_keys_are_taken():
    rng = np.random.default_rng(0)
    query, key = (rng.integers(-1, 2, (2, n, 3)).astype(np.float32) for n in (5, 300))
    given = mx.array(query), mx.array(key)
    for count in (1, 40, 299, 400):
        wanted = polyattn.top_keys(query, key, count, scale=1.0)
        np.testing.assert_array_equal(polyattn.top_keys(*given, count, scale=1.0), wanted)
    for count in (3, 40):
        wanted = polyattn.attention_weights(query, key, top=count, scale=1.0).keys
        found = polyattn.attention_weights(*given, top=count, scale=1.0).keys
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("axis", "is_descending"), [(0, False), (-1, True)])
def test_equal_numbers_keep_their_order_in_a_sort(axis, is_descending):
    for length in (0, 1, 500):
        x = np.random.default_rng(0).integers(0, 7, (3, length)).astype(np.float32)
        xp = library_of(mx.array(x)).xp
        order = xp.argsort(mx.array(x), axis=axis, descending=is_descending, stable=True)
        wanted = np.argsort(-x if is_descending else x, axis=axis, kind="stable")
        np.testing.assert_array_equal(order, wanted)
