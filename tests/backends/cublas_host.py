"""Stand-ins with which CuPy's fused kernel runs on memory of the host.

The CUDA source is compiled for the host, its threads are threads, and cuBLAS is a loop over raw
addresses that takes m, n, k, strides and types as cuBLAS does.
"""

import ctypes
import functools
import itertools
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from cupy_host import register, stand_in

from polyattn_cupy import (
    arrays,
    fused_gradients,
    fused_kernel,
    products,
    score_blocks,
    softmax_cuda,
)
from polyattn_cupy.fused_kernel import Fused

DTYPES = ("float16", "bfloat16", "float32", "float64")

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
template <void (*kernel)(Rows)> void run(const Rows *x, unsigned int blocks, unsigned int threads)
{
    blockDim.x = threads;
    meeting = std::make_unique<std::barrier<>>(threads);
    auto one = [&](unsigned int thread) {
        threadIdx.x = thread;
        for (unsigned int block = 0; block < blocks; block++) {
            if (thread == 0) blockIdx.x = block;
            __syncthreads();
            kernel(*x);
            __syncthreads();
        }
    };
    std::vector<std::thread> others;
    for (unsigned int thread = 1; thread < threads; thread++) others.emplace_back(one, thread);
    one(0);
    for (auto &other : others) other.join();
}
"""


@functools.cache
def compiled():
    """Return the CUDA source as a library of the host, and the names of its kernels in order."""
    compiler = shutil.which("g++")
    assert compiler, "the tests of the CUDA source need g++"
    names = [softmax_cuda.name_of(*pair) for pair in itertools.product(DTYPES, DTYPES)]
    names += [softmax_cuda.gradient_name_of(dtype) for dtype in DTYPES]
    entries = "".join(
        f'extern "C" void kernel_{n}(const Rows *x, unsigned b, unsigned t)'
        f"{{ run<{name}>(x, b, t); }}\n"
        for n, name in enumerate(names)
    )
    with tempfile.TemporaryDirectory() as made:
        source, library = Path(made) / "softmax.cpp", Path(made) / "softmax.so"
        source.write_text(SHIM + softmax_cuda.SOURCE + RUN + entries)
        subprocess.run(
            [
                *(compiler, "-std=c++20", "-O0", "-shared", "-fPIC", "-pthread", "-w"),
                *("-fno-strict-aliasing", f"-DMOST_THREADS={softmax_cuda.MOST_THREADS}"),
                *("-o", library, source),
            ],
            check=True,
            timeout=300,
        )
        return ctypes.CDLL(str(library)), names


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
        assert beta in (0, 1)
        a_shape, b_shape = (k, m) if transa else (m, k), (n, k) if transb else (k, n)
        for ld, (height, _) in ((lda, a_shape), (ldb, b_shape), (ldc, (m, n))):
            assert ld >= max(1, height), "cuBLAS refuses such a leading dimension"
        self.calls.append((m, n, k, batch))
        for i in range(batch):
            x = self._matrix(a, a_type, a_shape, lda, i * a_step)
            y = self._matrix(b, b_type, b_shape, ldb, i * b_step)
            out = self._matrix(c, c_type, (m, n), ldc, i * c_step)
            x, y = (x.T if transa else x), (y.T if transb else y)
            found = alpha * (x.astype(real) @ y.astype(real))
            out[...] = found + out if beta else found

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


def put_in_place(monkeypatch):
    """Let the kernel run on the host, as the backend `host`; return what cuBLAS was asked."""
    library, names = compiled()
    cublas = Cublas()
    here = stand_in()
    for module in (score_blocks, fused_kernel, fused_gradients, products, arrays):
        monkeypatch.setattr(module, "cupy", here)
    monkeypatch.setattr(products, "_cublas", lambda: cublas)

    def launch(record, blocks, name):
        assert record.flags.c_contiguous
        address = ctypes.c_void_p(record.__array_interface__["data"][0])
        getattr(library, f"kernel_{names.index(name)}")(address, blocks, cublas.threads)

    monkeypatch.setattr(softmax_cuda, "launch", launch)
    register(monkeypatch, Fused())
    return cublas
