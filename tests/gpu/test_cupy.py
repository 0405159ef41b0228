"""CuPy on a GPU: its kernels agree with the formula, wait for nothing, and mind streams."""

import cupy
import cupyx
import ml_dtypes
import numpy as np
import pytest

from polyattn import attention, attention_partial, explain
from polyattn.conformance.suite import BackendSuite
from polyattn_cupy import graphs, loading, plans, products

if not cupy.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

RNG = np.random.default_rng(0)
HAS_CUDNN = loading.why_no_library() is None
KERNELS = ["fused", *(["cudnn"] if HAS_CUDNN else [])]
HALVES = ["float16", "bfloat16"]


class TestCupy(BackendSuite):
    backend = "cupy"


class TestCupyOnNumpy(BackendSuite):
    backend = "cupy"
    library = "numpy"
    thorough = False


def randn(*shape, dtype="float16"):
    return RNG.standard_normal(shape).astype(np.float32).astype(dtype)


def agree(kernel, *arrays, **options):
    """Hold a kernel against the formula in NumPy, and return what it gave."""
    there = {k: cupy.asarray(x) if isinstance(x, np.ndarray) else x for k, x in options.items()}
    mine = attention_partial(*map(cupy.asarray, arrays), kernel=kernel, **there)
    wide = [x.astype("float64") for x in arrays]
    formula = attention_partial(*wide, kernel="dense", **options)
    eps = float(ml_dtypes.finfo(arrays[0].dtype).eps)
    for one, other, unit in zip(mine, formula, (eps, max(eps / 64, 1e-6)), strict=True):
        one = cupy.asnumpy(one).astype("float64")
        np.testing.assert_allclose(one, other, rtol=4 * unit, atol=4 * unit)
    return mine


def test_what_is_measured_has_cudnn():
    assert HAS_CUDNN, loading.why_no_library()
    assert products.why_no_cublas() is None


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("length", "keys", "groups", "options"),
    [
        (256, 256, 8, {}),
        (256, 256, 2, {"is_causal": True}),
        (100, 333, 2, {"is_causal": True}),
        (100, 333, 2, {"is_causal": True, "query_offset": 0}),
        (333, 100, 2, {"is_causal": True, "query_offset": 0}),
        (333, 100, 2, {"is_causal": True}),
        (200, 333, 2, {"window": (17, 5)}),
        (200, 200, 8, {"window": (64, None)}),
        (200, 200, 8, {"window": (None, 3)}),
        (1, 777, 2, {"is_causal": True}),
        (1, 1, 2, {}),
        (64, 192, 2, {"is_causal": True, "query_offset": 7}),
        (100, 192, 2, {"softcap": 5.0, "scale": 1.0}),
    ],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_both_kernels_at_larger_sizes(kernel, length, keys, groups, options, dtype):
    q = randn(2, 8, length, 64, dtype=dtype)
    k, v = randn(2, groups, keys, 64, dtype=dtype), randn(2, groups, keys, 64, dtype=dtype)
    agree(kernel, q, k, v, **options)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [8, 64, 128, 256])
def test_sizes_of_vectors(kernel, size):
    agree(kernel, randn(1, 4, 70, size), randn(1, 2, 90, size), randn(1, 2, 90, 40))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_that_see_nothing(kernel, dtype):
    q = randn(2, 4, 130, 64, dtype=dtype)
    k, v = randn(2, 2, 192, 64, dtype=dtype), randn(2, 2, 192, 64, dtype=dtype)
    mask = RNG.random((2, 1, 130, 192)) > 0.5
    mask[1, 0, 3], mask[0, 0, 64:128] = False, False
    bias = np.zeros((4, 130, 192), "float32")
    bias[2, 1], bias[3, 5, :100] = -np.inf, -np.inf
    for options in ({"mask": mask}, {"bias": bias}, {"mask": mask, "bias": bias}):
        output, logsumexp = agree(kernel, q, k, v, **options)
        dead = cupy.isneginf(logsumexp)
        assert bool(dead.any())
        assert not bool(output.astype(cupy.float32)[dead].any())
    agree(kernel, q, k, v, is_causal=True, query_offset=-50)
    agree(
        kernel, q[:, :, :64], k[:, :, :64], v[:, :, :64], mask=mask[:, :, :64, :64], is_causal=True
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_score_is_so_low_that_a_masked_key_is_seen(kernel, dtype):
    q, k = np.ones((1, 1, 64, 8), dtype), np.zeros((1, 1, 256, 8), dtype)
    k[..., :128, 0] = -60_000
    mask = np.arange(256) < 128
    agree(kernel, q, k, randn(1, 1, 256, 8, dtype=dtype), mask=mask, scale=8.0)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.swapaxes(1, 2),
        lambda x: x[..., 1:65],
        lambda x: x[..., ::-1],
        lambda x: x[:, :, ::-1],
        lambda x: x[:, :, 1::2],
        lambda x: cupy.broadcast_to(x[:, :, :1], x.shape)[..., :64],
        lambda x: x.reshape(2, 8, -1)[..., : 64 * 75].reshape(2, 8, 64, 75)[..., :64],
    ],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_views_that_are_not_aligned(kernel, view):
    arrays = [view(cupy.asarray(randn(2, 8, 64, 80))) for _ in range(3)]
    arrays = [x[..., : x.shape[-1] // 8 * 8] for x in arrays]
    got = attention(*arrays, kernel=kernel)
    expected = attention(*(cupy.ascontiguousarray(x) for x in arrays), kernel="dense")
    np.testing.assert_allclose(cupy.asnumpy(got), cupy.asnumpy(expected), atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("kernel", ["fused", "tiled", "dense"])
@pytest.mark.parametrize("length", [0, 3])
def test_zero_keys_and_zero_queries(kernel, length):
    q, none = cupy.ones((1, 2, length, 8)), cupy.ones((1, 2, 0, 8))
    if kernel == "fused":
        assert explain(q, none, none).chosen.kernel != "fused"
        return
    output, logsumexp = attention_partial(q, none, none, kernel=kernel)
    assert output.shape == (1, 2, length, 8)
    assert not bool(output.any())
    assert bool(cupy.isneginf(logsumexp).all())


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_waits_for_the_device(kernel):
    q, k, v = (cupy.asarray(randn(1, 4, 64, 64)) for _ in range(3))
    mask = cupy.asarray(RNG.random((64, 64)) > 0.5)
    options = [{}, {"is_causal": True}, {"mask": mask}, {"window": (3, 3)}]
    for each in options:  # what is compiled is compiled
        attention_partial(q, k, v, kernel=kernel, **each)
    with cupyx.allow_synchronize(False):
        for each in options:
            attention_partial(q, k, v, kernel=kernel, **each)


@pytest.mark.skipif(not HAS_CUDNN, reason="no cuDNN")
def test_a_plan_is_built_once(monkeypatch):
    built = []
    genuine = graphs.build
    monkeypatch.setattr(
        graphs, "build", lambda graph, **where: built.append(graph) or genuine(graph, **where)
    )
    for _ in range(3):
        agree("cudnn", randn(1, 2, 59, 64), randn(1, 2, 61, 64), randn(1, 2, 61, 64))
    assert len(built) == 1


@pytest.mark.skipif(not HAS_CUDNN, reason="no cuDNN")
def test_the_way_past_execute_is_found():
    agree("cudnn", *(randn(1, 2, 59, 64) for _ in range(3)))
    engine = plans._engine()
    plan = engine.plans[next(reversed(engine.plans))]
    assert plan._direct() is not None
    assert explain(*(cupy.ones((1, 2, 59, 64), "float16"),) * 3).chosen.kernel == "cudnn"


@pytest.mark.parametrize("kernel", KERNELS)
def test_it_runs_on_the_callers_stream(kernel):
    """Were it to run on another, it would read the arrays before they are written."""
    arrays = [randn(1, 4, 512, 64) for _ in range(3)]
    expected = agree(kernel, *arrays).output
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
            output = attention(*late, kernel=kernel)
        stream.synchronize()
        np.testing.assert_array_equal(cupy.asnumpy(output), cupy.asnumpy(expected))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_fused_products_are_exact(dtype):
    """TF32 would be off by 1e-3."""
    agree("fused", *(randn(1, 2, 300, 128, dtype=dtype) for _ in range(3)))


def test_long_rows_of_float16_keep_their_digits():
    q = np.zeros((1, 1, 4, 8), "float16")
    k, v = np.zeros((1, 1, 120_000, 8), "float16"), np.full((1, 1, 120_000, 8), 1.5, "float16")
    output = attention(*map(cupy.asarray, (q, k, v)), kernel="fused")
    np.testing.assert_allclose(cupy.asnumpy(output), 1.5, rtol=8e-4)


@pytest.mark.parametrize("kernel", KERNELS)
def test_memory_stays_below_that_of_the_scores(kernel):
    q, k, v = (cupy.asarray(randn(1, 16, 8192, 64)) for _ in range(3))
    attention(q[:, :, :64], k, v, kernel=kernel)
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    attention(q, k, v, kernel=kernel)
    assert pool.total_bytes() - before < 16 * 8192 * 8192 * 4 / 8


def test_arrays_of_torch_come_without_a_copy():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    from polyattn.dispatch import registry

    tensor = torch.randn(2, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    assert registry.load("cupy") is None
    assert registry.loaded("cupy").place(tensor, "cuda:0").data.ptr == tensor.data_ptr()
    output = attention(tensor, tensor, tensor, backend="cupy")
    assert output.device == tensor.device
    torch.testing.assert_close(output, attention(tensor, tensor, tensor), atol=2e-2, rtol=2e-2)
