"""What CuPy's fused kernel asks of cuBLAS and of its CUDA source, on stand-ins."""

import types

import numpy as np
import pytest
from cublas_host import compiled, put_in_place
from cupy_checks import agree, gradients_agree

from polyattn import attention, explain
from polyattn_cupy import fused_kernel, products, score_blocks, softmax_cuda
from polyattn_cupy.fused_kernel import Fused

RNG = np.random.default_rng(0)


@pytest.fixture
def on_host(monkeypatch):
    """Let the kernel run on the host, as the backend `host`; return what cuBLAS was asked."""
    return put_in_place(monkeypatch)


def randn(*shape):
    return RNG.standard_normal(shape).astype("float32")


def test_the_record_is_the_struct():
    library, _ = compiled()
    assert softmax_cuda.ROWS.itemsize == library.size_of_rows()


def test_keys_of_a_group_are_read_once_and_where_they_are(on_host, monkeypatch):
    monkeypatch.setattr(score_blocks.cupy, "ascontiguousarray", None)
    q, k, v = randn(2, 8, 5, 16), randn(2, 2, 11, 24)[..., 3:19], randn(2, 2, 33, 6)[:, :, ::3]
    agree("fused", q, k, v)
    assert on_host.calls == [(11, 20, 16, 4), (6, 20, 11, 4)]


def test_the_products_of_the_gradients_of_a_block(on_host):
    gradients_agree("fused", randn(2, 4, 9, 5), randn(2, 2, 21, 5), randn(2, 2, 21, 6))
    # m, n, k, matrices: cuBLAS has columns where rows are here.
    assert on_host.calls == [
        (21, 18, 5, 4),  # scores
        (21, 18, 6, 4),  # gradients of the weights
        (6, 21, 18, 4),  # of the values
        (5, 21, 18, 4),  # of the keys
        (5, 18, 21, 4),  # of the queries
    ]


def test_a_band_skips_keys(on_host):
    arrays = [randn(1, 2, 1024, 8) for _ in range(3)]
    agree("fused", *arrays, is_causal=True)
    assert on_host.calls[::2] == [(512, 512, 8, 2), (1024, 512, 8, 2)]
    on_host.calls.clear()
    agree("fused", *arrays, window=(10, 10))
    assert [call[0] for call in on_host.calls[::2]] == [522, 522]
    on_host.calls.clear()
    gradients_agree("fused", *arrays, is_causal=True)
    assert [call[0] for call in on_host.calls[::5]] == [512, 1024]


@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("tile", [1, 7, 64, 1000, 4000, 10**6])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (2, 3)}])
def test_blocks_cover_each_row_once_within_the_tile(options, tile, members):
    shapes = (3, 2 * members, 13, 8), (3, 2, 40, 8), (3, 2, 40, 8)
    problem = explain(*shapes, library="numpy", device="cpu", **options).problem
    seen = np.zeros((6, 13 * members), int)
    for block in score_blocks.blocks(problem, tile):
        seen[slice(*block.pairs), slice(*block.rows)] += 1
        assert block.pairs.length * block.rows.length * block.columns.length <= max(
            tile, block.columns.length
        )
        heads = {row // 13 for row in range(*block.rows)}
        assert len(heads) == 1 or block.rows.length % 13 == 0
    assert (seen == 1).all()


def test_memory_is_for_one_block(on_host, monkeypatch):
    sizes = []
    genuine = fused_kernel.cupy.empty
    monkeypatch.setattr(
        fused_kernel.cupy,
        "empty",
        lambda shape, dtype: sizes.append(shape) or genuine(shape, dtype),
    )
    monkeypatch.setattr(Fused, "tile", 400)
    q, k, v = (randn(2, 4, n, size) for n, size in ((32, 5), (50, 5), (50, 6)))
    gradients_agree("fused", q, k, v, logsumexp=False)
    flat = [size for size in sizes if isinstance(size, int)]
    assert len(flat) == 2
    assert sum(flat) <= 2 * 56 * 4
    assert len(on_host.calls) > 5


def test_the_handle_is_left_as_it_was(on_host):
    on_host.mode = 3
    attention(randn(2, 3), randn(4, 3), randn(4, 3), backend="host")
    assert on_host.mode == 3

    def fail(*args):
        raise RuntimeError("cuBLAS")

    on_host.gemmStridedBatchedEx = fail
    with pytest.raises(RuntimeError, match="cuBLAS"):
        attention(randn(2, 3), randn(4, 3), randn(4, 3), backend="host", kernel="fused")
    assert on_host.mode == 3


def test_without_cublas_it_says_so(monkeypatch):
    def missing():
        raise ImportError("Failure finding libcublas.so.13\nand more")

    monkeypatch.setattr(products, "_cublas", missing)
    problem = explain((2, 3), (4, 3), (4, 3), library="numpy", device="cpu").problem
    assert Fused().reasons_against(problem) == [
        "cuBLAS cannot be loaded: Failure finding libcublas.so.13"
    ]


# ---- NVIDIA's own compiler ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100"])
def test_nvrtc_compiles_every_kernel(architecture):
    from cupy.cuda.compiler import _NVRTCProgram

    names = tuple(compiled()[1])
    program = _NVRTCProgram(
        softmax_cuda.SOURCE, "softmax.cu", name_expressions=names, method="cubin"
    )
    binary, mangled = program.compile((*softmax_cuda.OPTIONS, f"-arch={architecture}"))
    assert binary[:4] == b"\x7fELF"
    assert set(mangled) == set(names)


def test_launch_gives_cupy_what_the_source_takes(monkeypatch):
    launched = []

    class RawModule:
        def __init__(self, code, options, name_expressions):
            assert code == softmax_cuda.SOURCE
            assert options == softmax_cuda.OPTIONS
            self.names = name_expressions

        def get_function(self, name):
            assert name in self.names
            return lambda grid, block, args: launched.append((name, grid, block, args))

    runtime = types.SimpleNamespace(getDevice=lambda: 7)
    here = types.SimpleNamespace(RawModule=RawModule, cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(softmax_cuda, "cupy", here)
    record = np.zeros((), softmax_cuda.ROWS)
    for keys in (1, 64, 1000, 4096, 10**6):
        record["keys"] = keys
        softmax_cuda.launch(record, 6, softmax_cuda.name_of("bfloat16", "float64"))
        name, grid, (threads,), args = launched.pop()
        assert name == "softmax<bfloat16, float, double>"
        assert grid == (6,)
        assert args[0] is record
        assert 32 <= threads <= softmax_cuda.MOST_THREADS
        assert threads & (threads - 1) == 0
    softmax_cuda._kernel.cache_clear()
