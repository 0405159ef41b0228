"""CuPy's fused kernel without a GPU: all of it runs, on stand-ins that read the same memory.

The CUDA source is compiled for the host, its threads are threads, and cuBLAS is a loop over raw
addresses that takes m, n, k, strides and types as cuBLAS does.
"""

import ctypes
import itertools
import shutil
import subprocess
import types

import ml_dtypes
import numpy as np
import pytest
from test_cupy_host import cases, register, stand_in

from polyattn import attention, attention_partial, explain
from polyattn.conformance.cases.catalogue import CASES
from polyattn.conformance.checks import cases as checks
from polyattn.conformance.checks import promises
from polyattn.conformance.checks.target import KernelVariant, Target
from polyattn.dispatch import registry
from polyattn_cupy import fused, products, rows, shapes
from polyattn_cupy.fused import Fused

DTYPES = ("float16", "bfloat16", "float32", "float64")
RNG = np.random.default_rng(0)

# ---- the CUDA source on the host ---------------------------------------------------------------

SHIM = r"""
#include <barrier>
#include <bit>
#include <cmath>
#include <memory>
#include <thread>
#include <vector>
using std::exp, std::tanh, std::log;
#define __global__
#define __device__
#define __shared__ static
struct Index { unsigned int x; };
thread_local Index threadIdx;
static Index blockIdx, blockDim;
static std::unique_ptr<std::barrier<>> meeting;
static void __syncthreads() { if (blockDim.x > 1) meeting->arrive_and_wait(); }
static unsigned int __float_as_uint(float x) { return std::bit_cast<unsigned int>(x); }
static float __uint_as_float(unsigned int x) { return std::bit_cast<float>(x); }
"""

RUN = r"""
template <class Weight, class Real, class Bias>
void run(const Rows *x, unsigned int blocks, unsigned int threads)
{
    blockDim.x = threads;
    meeting = std::make_unique<std::barrier<>>(threads);
    auto one = [&](unsigned int thread) {
        threadIdx.x = thread;
        for (unsigned int block = 0; block < blocks; block++) {
            if (thread == 0) blockIdx.x = block;
            __syncthreads();
            softmax<Weight, Real, Bias>(*x);
            __syncthreads();
        }
    };
    std::vector<std::thread> others;
    for (unsigned int thread = 1; thread < threads; thread++) others.emplace_back(one, thread);
    one(0);
    for (auto &other : others) other.join();
}
extern "C" unsigned long size_of_rows() { return sizeof(Rows); }
"""


@pytest.fixture(scope="session")
def host(tmp_path_factory):
    """Return the CUDA source as a library of the host; without a compiler this is an error."""
    compiler = shutil.which("g++")
    assert compiler, "the tests of the CUDA source need g++"
    pairs = list(itertools.product(DTYPES, DTYPES))
    entries = "".join(
        f'extern "C" void {weight}_{bias}(const Rows *x, unsigned b, unsigned t)'
        f"{{ {rows.name_of(weight, bias).replace('softmax', 'run')}(x, b, t); }}\n"
        for weight, bias in pairs
    )
    folder = tmp_path_factory.mktemp("softmax")
    source, library = folder / "softmax.cpp", folder / "softmax.so"
    source.write_text(SHIM + rows.SOURCE + RUN + entries)
    subprocess.run(
        [
            *(compiler, "-std=c++20", "-O0", "-shared", "-fPIC", "-pthread", "-w"),
            *("-fno-strict-aliasing", f"-DMOST_THREADS={rows.MOST_THREADS}"),
            *("-o", library, source),
        ],
        check=True,
        timeout=300,
    )
    return ctypes.CDLL(str(library))


def test_the_record_is_the_struct(host):
    assert rows.ROWS.itemsize == host.size_of_rows()


# ---- CuPy and cuBLAS on the host ---------------------------------------------------------------


class Cublas:
    """gemmStridedBatchedEx as CuPy binds it, on the memory of the host."""

    def __init__(self):
        self.names = {0: "float32", 1: "float64", 2: "float16", 14: "bfloat16"}
        self.mode, self.calls, self.threads = 0, [], 1

    def getMathMode(self, handle):  # noqa: N802
        return self.mode

    def setMathMode(self, handle, mode):  # noqa: N802
        self.mode = mode

    def gemmStridedBatchedEx(  # noqa: N802
        self, handle, transa, transb, m, n, k, alpha, a, a_type, lda, a_step, b, b_type, ldb,
        b_step, beta, c, c_type, ldc, c_step, batch, compute, algorithm,
    ):  # fmt: skip
        assert (handle, algorithm) == ("handle", -1)
        assert self.mode & 16, "sums in 16 bits, or TF32, are not forbidden"
        assert a_type == b_type
        assert compute == (70 if c_type == 1 else 68)
        real = self.names[c_type] if c_type == 1 else "float32"
        scalar = ctypes.c_double if c_type == 1 else ctypes.c_float
        alpha, beta = (scalar.from_address(address).value for address in (alpha, beta))
        assert beta == 0
        a_shape, b_shape = (k, m) if transa else (m, k), (n, k) if transb else (k, n)
        for ld, (height, _) in ((lda, a_shape), (ldb, b_shape), (ldc, (m, n))):
            assert ld >= max(1, height), "cuBLAS refuses such a leading dimension"
        self.calls.append((m, n, k, batch))
        for i in range(batch):
            x = self._matrix(a, a_type, a_shape, lda, i * a_step)
            y = self._matrix(b, b_type, b_shape, ldb, i * b_step)
            out = self._matrix(c, c_type, (m, n), ldc, i * c_step)
            x, y = (x.T if transa else x), (y.T if transb else y)
            out[...] = alpha * (x.astype(real) @ y.astype(real))

    def _matrix(self, address, kind, shape, ld, offset):
        """Column by column, as cuBLAS has them."""
        dtype = np.dtype(self.names[kind])
        height, width = shape
        count = (width - 1) * ld + height
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(
            address + offset * dtype.itemsize
        )
        flat = np.frombuffer(memory, dtype)
        step = dtype.itemsize
        return np.lib.stride_tricks.as_strided(flat, shape, (step, ld * step))


@pytest.fixture
def on_host(host, monkeypatch):
    """Let the kernel run on the host, as the backend `host`; return what cuBLAS was asked."""
    cublas = Cublas()
    here = stand_in()
    monkeypatch.setattr(fused, "cupy", here)
    monkeypatch.setattr(shapes, "cupy", here)
    monkeypatch.setattr(products, "cupy", here)
    monkeypatch.setattr(products, "_cublas", lambda: cublas)

    def launch(record, blocks, weight, bias):
        assert record.flags.c_contiguous
        address = ctypes.c_void_p(record.__array_interface__["data"][0])
        getattr(host, f"{weight}_{bias}")(address, blocks, cublas.threads)

    monkeypatch.setattr(rows, "launch", launch)
    register(monkeypatch, Fused())
    return cublas


# ---- it computes what it says ------------------------------------------------------------------

RUNS = [pytest.param(*x.values, False, marks=x.marks) for x in cases(Fused.features, 8)]
RUNS += [pytest.param(*x.values, True, marks=x.marks) for x in cases(Fused.features, 10**6)]


@pytest.mark.parametrize(("name", "small_tiles"), RUNS)
def test_it_keeps_to_the_conformance_cases(name, small_tiles, on_host):
    case = CASES[name]
    target = Target("host", "numpy")
    outcome = checks.check_case(
        target, KernelVariant(registry.loaded("host").kernels[0], small_tiles), case
    )
    refused = 0 in (*case.score_shape, case.D, case.E) or dict(case.options).get("scale") == 0
    assert (outcome.output is None) == refused
    assert bool(on_host.calls) != refused


@pytest.mark.usefixtures("on_host")
def test_what_it_declares_is_needed_by_some_case():
    promises.check_declarations(
        Target("host", "numpy"), KernelVariant(registry.loaded("host").kernels[0]), CASES
    )


def randn(*shape, dtype="float32"):
    return RNG.standard_normal(shape).astype(dtype)


def both(*arrays, **options):
    """Return output and logsumexp of the kernel, and of the formula in NumPy."""
    mine = attention_partial(*arrays, backend="host", kernel="fused", **options)
    formula = attention_partial(*arrays, kernel="dense", **options)
    return mine, formula


def agree(mine, formula, dtype="float32"):
    eps = float(ml_dtypes.finfo(dtype).eps)
    for one, other in zip(mine, formula, strict=True):
        np.testing.assert_allclose(
            np.asarray(one, "float64"), np.asarray(other, "float64"), rtol=8 * eps, atol=8 * eps
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [2, 8])
def test_the_threads_of_a_block_share_a_row(threads, dtype, on_host):
    on_host.threads = threads
    q, k, v = randn(2, 4, 5, 8, dtype=dtype), randn(2, 2, 37, 8, dtype=dtype), randn(2, 2, 37, 6)
    mask = RNG.random((5, 37)) > 0.4
    mask[2] = False
    agree(
        *both(q, k, v.astype(dtype), mask=mask, window=(30, 1), sinks=randn(4), softcap=2.0),
        dtype=dtype,
    )


@pytest.mark.parametrize("threads", [1, 8])
def test_what_is_no_number_stays_in_its_row(threads, on_host):
    on_host.threads = threads
    q, k, v = randn(1, 1, 6, 4), randn(1, 1, 20, 4), randn(1, 1, 20, 4)
    q[0, 0, 1], q[0, 0, 3] = np.nan, np.inf
    mine, formula = both(q, k, v)
    agree(mine, formula)
    assert list(np.isnan(mine.output).any((0, 1, 3))) == [False, True, False, True, False, False]
    mine, formula = both(q, k, v, bias=np.where(RNG.random((6, 20)) > 0.5, 0, -np.inf))
    assert np.isnan(mine.logsumexp[0, 0, 1])
    bias = np.zeros((6, 20))
    bias[1] = bias[2] = -np.inf
    agree(*both(q, k, v, bias=bias))  # NaN that is masked everywhere is absent


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1), (2, 3), ()])
@pytest.mark.usefixtures("on_host")
def test_offsets_that_broadcast(shape):
    q, k, v = randn(2, 3, 2, 4, 8), randn(2, 3, 2, 9, 8), randn(2, 3, 2, 9, 8)
    offset = np.array(RNG.integers(-3, 9, shape))
    agree(*both(q, k, v, is_causal=True, query_offset=offset))


@pytest.mark.usefixtures("on_host")
def test_long_rows_of_float16_keep_their_digits():
    q = np.zeros((1, 1, 1, 8), "float16")
    k, v = np.zeros((1, 1, 120_000, 8), "float16"), np.full((1, 1, 120_000, 8), 1.5, "float16")
    # By less than one spacing of float16, where weights of two digits would be off by two.
    np.testing.assert_allclose(attention(q, k, v, backend="host"), 1.5, rtol=8e-4)


# ---- what the host asks for --------------------------------------------------------------------


def test_keys_of_a_group_are_read_once_and_where_they_are(on_host, monkeypatch):
    monkeypatch.setattr(fused.cupy, "ascontiguousarray", None)
    q, k, v = randn(2, 8, 5, 16), randn(2, 2, 11, 24)[..., 3:19], randn(2, 2, 33, 6)[:, :, ::3]
    agree(*both(q, k, v))
    assert on_host.calls == 1 * [(11, 20, 16, 4), (6, 20, 11, 4)]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[..., ::-1],
        lambda x: x[..., ::2],
        lambda x: x[:, :, ::-1],
        lambda x: x[:, ::-1],
        lambda x: x.swapaxes(-1, -2),
        lambda x: x.swapaxes(1, 2),
        lambda x: np.broadcast_to(x[:, :, :1], x.shape),
        lambda x: np.broadcast_to(x[:, :1], x.shape),
        lambda x: np.broadcast_to(x[:1], x.shape),
        lambda x: np.broadcast_to(x[..., :1], x.shape),
    ],
)
@pytest.mark.usefixtures("on_host")
def test_views_of_every_kind(view):
    q, k, v = (view(randn(2, 8, 8, 8)) for _ in range(3))
    agree(*both(q, k, v))
    agree(*both(q, k[:, :2], v[:, :2]))


def test_a_band_skips_keys(on_host):
    q, k, v = (randn(1, 2, 1024, 8) for _ in range(3))
    agree(*both(q, k, v, is_causal=True))
    first = [call for call in on_host.calls if call[2] == 8 and call[0] != 8]
    assert first == [(512, 512, 8, 2), (1024, 512, 8, 2)]
    on_host.calls.clear()
    agree(*both(q, k, v, window=(10, 10)))
    assert [call[0] for call in on_host.calls[::2]] == [522, 522]


@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("tile", [1, 7, 64, 1000, 4000, 10**6])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (2, 3)}])
def test_blocks_cover_each_row_once_within_the_tile(options, tile, members):
    shapes = (3, 2 * members, 13, 8), (3, 2, 40, 8), (3, 2, 40, 8)
    problem = explain(*shapes, library="numpy", device="cpu", **options).problem
    seen = np.zeros((6, 13 * members), int)
    for block in fused.blocks(problem, tile):
        seen[slice(*block.pairs), slice(*block.rows)] += 1
        assert block.pairs.length * block.rows.length * block.columns.length <= max(
            tile, block.columns.length
        )
        heads = {row // 13 for row in range(*block.rows)}
        assert len(heads) == 1 or block.rows.length % 13 == 0
    assert (seen == 1).all()


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

    names = tuple(rows.name_of(weight, bias) for weight in DTYPES for bias in DTYPES)
    program = _NVRTCProgram(rows.SOURCE, "softmax.cu", name_expressions=names, method="cubin")
    binary, mangled = program.compile((*rows.OPTIONS, f"-arch={architecture}"))
    assert binary[:4] == b"\x7fELF"
    assert set(mangled) == set(names)


def test_launch_gives_cupy_what_the_source_takes(monkeypatch):
    launched = []

    class RawModule:
        def __init__(self, code, options, name_expressions):
            assert code == rows.SOURCE
            assert options == rows.OPTIONS
            self.names = name_expressions

        def get_function(self, name):
            assert name in self.names
            return lambda grid, block, args: launched.append((name, grid, block, args))

    runtime = types.SimpleNamespace(getDevice=lambda: 7)
    here = types.SimpleNamespace(RawModule=RawModule, cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(rows, "cupy", here)
    record = np.zeros((), rows.ROWS)
    for keys in (1, 64, 1000, 4096, 10**6):
        record["keys"] = keys
        rows.launch(record, 6, "bfloat16", "float64")
        name, grid, (threads,), args = launched.pop()
        assert name == "softmax<bfloat16, float, double>"
        assert grid == (6,)
        assert args[0] is record
        assert 32 <= threads <= rows.MOST_THREADS
        assert threads & (threads - 1) == 0
    rows._kernel.cache_clear()
