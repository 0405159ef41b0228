"""CuPy without a GPU: what its fused kernel asks of cuBLAS, and what the backend says."""

import cupy
import ml_dtypes
import numpy as np
import pytest
from cublas_host import compiled, put_in_place
from cupy_checks import agree, gradients_agree
from cupy_host import stand_in
from optional import torch

from polyattn import attention, explain
from polyattn._dispatch.errors import BackendUnavailableError
from polyattn_cupy import backend, fused_kernel, products, score_blocks, softmax_cuda
from polyattn_cupy.fused_kernel import Fused

RNG = np.random.default_rng(0)


@pytest.fixture
def cublas(monkeypatch):
    """Let the kernel run on the host, as the backend `host`; return what cuBLAS was asked."""
    return put_in_place(monkeypatch)


def randn(*shape):
    return RNG.standard_normal(shape).astype("float32")


def test_keys_of_a_group_are_read_once_and_in_place(cublas, monkeypatch):
    monkeypatch.setattr(score_blocks.cupy, "ascontiguousarray", None)
    q, k, v = randn(2, 8, 5, 16), randn(2, 2, 11, 24)[..., 3:19], randn(2, 2, 33, 6)[:, :, ::3]
    agree("fused", q, k, v)
    assert cublas.calls == [(11, 20, 16, 4), (6, 20, 11, 4)]


def test_the_products_of_the_gradients_of_a_block(cublas):
    gradients_agree("fused", randn(2, 4, 9, 5), randn(2, 2, 21, 5), randn(2, 2, 21, 6))
    # m, n, k, matrices: cuBLAS has columns where rows are here.
    assert cublas.calls == [
        (21, 18, 5, 4),  # scores
        (21, 18, 6, 4),  # gradients of the weights
        (6, 21, 18, 4),  # of the values
        (5, 21, 18, 4),  # of the keys
        (5, 18, 21, 4),  # of the queries
    ]


@pytest.mark.parametrize(
    ("options", "keys"),  # of each block of rows
    [({"is_causal": True}, [512, 1024]), ({"window": (10, 10)}, [522, 522])],
)
def test_a_band_skips_keys(options, keys, cublas):
    attention(*(randn(1, 2, 1024, 8) for _ in range(3)), backend="host", kernel="fused", **options)
    assert [call[0] for call in cublas.calls[::2]] == keys


@pytest.mark.parametrize("members", [1, 4])
def test_blocks_cover_each_row_once_within_the_tile(members):
    tile = 64
    shapes = (3, 2 * members, 13, 8), (3, 2, 40, 8), (3, 2, 40, 8)
    problem = explain(*shapes, library="numpy", device="cpu", is_causal=True).problem
    seen = np.zeros((6, 13 * members), int)
    for block in score_blocks.blocks(problem, tile):
        seen[slice(*block.pairs), slice(*block.rows)] += 1
        most = max(tile, block.columns.length)
        assert block.pairs.length * block.rows.length * block.columns.length <= most
        heads = {row // 13 for row in range(*block.rows)}
        assert len(heads) == 1 or block.rows.length % 13 == 0
    assert (seen == 1).all()


def test_memory_is_for_one_block(cublas, monkeypatch):
    sizes, genuine = [], fused_kernel.cupy.empty

    def watched(shape, dtype):
        sizes.append(shape)
        return genuine(shape, dtype)

    monkeypatch.setattr(fused_kernel.cupy, "empty", watched)
    monkeypatch.setattr(Fused, "tile", 400)
    q, k, v = (randn(2, 4, n, size) for n, size in ((32, 5), (50, 5), (50, 6)))
    gradients_agree("fused", q, k, v, logsumexp=False)
    flat = [size for size in sizes if isinstance(size, int)]
    assert len(flat) == 2
    assert sum(flat) <= 2 * 56 * 4
    assert len(cublas.calls) > 5


def test_an_absent_cublas_is_a_reason(monkeypatch):
    def missing():
        raise ImportError("Failure finding libcublas.so.13\nand more")

    monkeypatch.setattr(products, "_cublas", missing)
    problem = explain((2, 3), (4, 3), (4, 3), library="numpy", device="cpu").problem
    assert Fused().reasons_against(problem) == [
        "cuBLAS cannot be loaded: Failure finding libcublas.so.13"
    ]


@pytest.mark.slow
def test_nvrtc_compiles_every_kernel():
    from cupy.cuda.compiler import _NVRTCProgram

    names, source = tuple(compiled()[1]), softmax_cuda.SOURCE
    program = _NVRTCProgram(source, "softmax.cu", name_expressions=names, method="cubin")
    binary, mangled = program.compile((*softmax_cuda.OPTIONS, "-arch=sm_90a"))
    assert binary[:4] == b"\x7fELF"
    assert set(mangled) == set(names)


@pytest.mark.skipif(cupy.cuda.is_available(), reason="there is a GPU here")
def test_without_a_driver_the_reason_is_told_and_a_list_goes_on():
    x = np.ones((1, 2, 3, 8), "float32")
    with pytest.raises(BackendUnavailableError, match=r"CUDA finds no device.*NVIDIA GPU and its"):
        attention(x, x, x, backend="cupy")
    np.testing.assert_array_equal(attention(x, x, x, backend="cupy,numpy"), x)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.tensor([1.0, 2]), np.array([1, 2], "float32")),
        (torch.tensor([1.0, 2], dtype=torch.bfloat16), np.array([1, 2], ml_dtypes.bfloat16)),
        (torch.tensor([True, False]), np.array([True, False])),
    ],
    ids=["float32", "bfloat16", "bool"],
)
def test_tensors_of_the_host_keep_their_dtype(given, expected):
    found = backend._as_numpy(given)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_cupy_has_the_names_that_the_tests_on_the_host_replace():
    here = stand_in()
    assert set(vars(here)) <= set(dir(cupy))
    assert set(vars(here.cuda)) <= set(dir(cupy.cuda))
    assert hasattr(cupy.cuda.device, "get_cublas_handle")
    assert hasattr(cupy.cuda.runtime, "getDevice")
