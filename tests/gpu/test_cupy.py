"""CuPy on a GPU: its kernel agrees with the formula, waits for nothing, and minds streams."""

from functools import partial

import cupy
import cupy_checks
import cupyx
import numpy as np
import pytest

from polyattn import attention, attention_backward, attention_partial, masks
from polyattn.conformance.suite import BackendSuite
from polyattn_cupy import products

if not cupy.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:cupyx.allow_synchronize will be removed")

RNG = np.random.default_rng(0)
HALVES = ["float16", "bfloat16"]
PLACE = cupy_checks.Place(None, cupy.asarray, cupy.asnumpy, unit=2.0**-23)


class TestCupy(BackendSuite):
    backend = "cupy"


class TestCupyOnNumpy(BackendSuite):
    backend = "cupy"
    library = "numpy"
    thorough = False


def randn(*shape, dtype="float16"):
    return RNG.standard_normal(shape).astype(np.float32).astype(dtype)


agree = partial(cupy_checks.agree, place=PLACE)
gradients_agree = partial(cupy_checks.gradients_agree, place=PLACE)
# Of some rows all keys, or those of a whole tile.
HIDDEN = RNG.random((2, 1, 130, 192)) > 0.5
HIDDEN[1, 0, 3], HIDDEN[0, 0, 64:128] = False, False


def test_cublas_is_found():
    assert products.why_no_cublas() is None


CALLS = {
    "plain": (256, 256, 8, {}),
    "odd": (77, 191, 8, {}),
    "one key": (1, 1, 2, {}),
    "causal": (100, 333, 2, {"is_causal": True}),
    "causal, rows without keys": (333, 100, 2, {"is_causal": True}),
    "window, causal": (200, 200, 8, {"window": (64, 0)}),
    "window to the right": (200, 200, 8, {"window": (None, 3)}),
    "decode": (1, 777, 2, {"is_causal": True}),
    "softcap": (100, 192, 2, {"softcap": 5.0, "scale": 1.0}),
    "mask": (130, 192, 2, {"mask": HIDDEN}),
    "key lengths, causal": (130, 192, 2, {"key_lengths": np.array([150, 9]), "is_causal": True}),
    "documents": (192, 192, 2, {"mask": masks.segments(np.arange(192) // 50) & masks.causal()}),
    "bias that hides": (130, 192, 2, {"bias": np.where(HIDDEN, 0, -np.inf).astype("float32")}),
    "bias": (130, 256, 2, {"bias": randn(1, 8, 130, 256, dtype="float32")}),
    "bias for all, causal": (192, 192, 2, {"bias": randn(192, 192), "is_causal": True}),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kernel", ["fused", "tiled"])
def test_kernels_and_their_gradients_at_larger_sizes(kernel, name, dtype):
    length, keys, groups, options = CALLS[name]
    q = randn(2, 8, length, 64, dtype=dtype)
    k, v = randn(2, groups, keys, 64, dtype=dtype), randn(2, groups, keys, 64, dtype=dtype)
    agree(kernel, q, k, v, **options)
    if kernel == "fused" and "bias" in options:  # it has no gradient beside one
        return
    for logsumexp in (False, True):
        gradients_agree(kernel, q, k, v, logsumexp=logsumexp, **options)


@pytest.mark.parametrize("dtype", HALVES)
def test_no_score_is_so_low_that_a_masked_key_is_seen(dtype):
    q, k = np.ones((1, 1, 64, 8), dtype), np.zeros((1, 1, 256, 8), dtype)
    k[..., :128, 0] = -60_000
    mask = np.arange(256) < 128
    agree("fused", q, k, randn(1, 1, 256, 8, dtype=dtype), mask=mask, scale=8.0)


def test_nothing_waits_for_the_device():
    q, k, v = (cupy.asarray(randn(1, 4, 64, 64)) for _ in range(3))
    mask = cupy.asarray(RNG.random((64, 64)) > 0.5)
    options = [{}, {"is_causal": True}, {"mask": mask}, {"window": (3, 3)}]
    options.append({"key_lengths": cupy.asarray([40]), "is_causal": True})
    for each in options:  # what is compiled is compiled
        attention_partial(q, k, v, kernel="fused", **each)
    with cupyx.allow_synchronize(False):
        for each in options:
            attention_partial(q, k, v, kernel="fused", **each)


def test_it_runs_on_the_callers_stream():
    """Were it to run on another, it would read the arrays before they are written."""
    arrays = [randn(1, 4, 512, 64) for _ in range(3)]
    expected = agree("fused", *arrays).output
    busy = cupy.ones((4096, 4096), "float32")
    for _ in range(3):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            late = [cupy.zeros(x.shape, x.dtype) for x in arrays]
            there = [cupy.asarray(x) for x in arrays]
            stream.synchronize()
            for _ in range(20):
                busy = busy @ busy * 1e-4
            for mine, x in zip(late, there, strict=True):
                mine[...] = x
            output = attention(*late, kernel="fused")
        stream.synchronize()
        np.testing.assert_array_equal(cupy.asnumpy(output), cupy.asnumpy(expected))


def test_arrays_of_torch_and_of_cupy_go_to_the_other_without_a_copy():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    from polyattn._dispatch import registry

    tensor = torch.randn(2, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    assert registry.load("cupy") is None
    assert registry.loaded("cupy").place(tensor, "cuda:0").data.ptr == tensor.data_ptr()
    output = attention(tensor, tensor, tensor, backend="cupy")
    assert output.device == tensor.device
    torch.testing.assert_close(output, attention(tensor, tensor, tensor), atol=2e-2, rtol=2e-2)

    q = cupy.asarray(randn(2, 4, 64, 64))
    assert registry.load("torch") is None
    assert registry.loaded("torch").place(q, "cuda:0").data_ptr() == q.data.ptr
    output = attention(q, q, q, backend="torch:cuda")
    assert isinstance(output, cupy.ndarray)
    cupy.testing.assert_allclose(output, attention(q, q, q), atol=2e-3)


# ---- gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "value_size"), [(8, 8), (64, 40), (128, 128), (192, 128), (256, 40)]
)
def test_vectors_of_other_sizes(size, value_size):
    arrays = randn(1, 4, 70, size), randn(1, 2, 90, size), randn(1, 2, 90, value_size)
    agree("fused", *arrays)
    gradients_agree("fused", *arrays, logsumexp=False)


def test_gradients_have_the_same_bits_twice_and_nothing_waits():
    q, k, v, along = (cupy.asarray(randn(2, 4, 300, 64)) for _ in range(4))
    partial = attention_partial(q, k, v, is_causal=True)

    def run():
        return attention_backward(q, k, v, partial, along, is_causal=True, kernel="fused")

    once = run()
    with cupyx.allow_synchronize(False):
        twice = run()
    for one, other in zip(once[:3], twice[:3], strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(one), cupy.asnumpy(other))


def test_memory_stays_below_that_of_the_scores():
    q, k, v, along = (cupy.asarray(randn(1, 64, 8192, 64)) for _ in range(4))
    few, pool = [x[:, :, :64] for x in (q, k, v, along)], cupy.get_default_memory_pool()

    def run(q, k, v, along):
        partial = attention_partial(q, k, v, kernel="fused")
        yield partial
        yield attention_backward(q, k, v, partial, along, kernel="fused")

    list(run(*few))
    scores, calls = 64 * 8192 * 8192, run(q, k, v, along)
    for most in (scores * 4 / 8, scores * 2 / 2):
        pool.free_all_blocks()
        before = pool.total_bytes()
        next(calls)
        assert pool.total_bytes() - before < most
