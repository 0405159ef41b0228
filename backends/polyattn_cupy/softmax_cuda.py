"""The CUDA kernels that turn scores into weights and gradients, compiled when first needed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import cupy
import numpy as np

SOURCE = Path(__file__).with_name("softmax.cu").read_text(encoding="utf-8")
MOST_THREADS = 512
OPTIONS = ("-std=c++17", f"-DMOST_THREADS={MOST_THREADS}")
# Ends of a band that hide nothing, and do not overflow when added to an index.
NO_LOW, NO_HIGH = -(2**62), 2**62

_POINTERS = (
    *("scores", "logsumexp", "slopes", "delta", "cap_slopes"),
    *("mask", "bias", "sinks", "offset"),
)
_STRIDES = ("item", "head", "row", "key")
_COUNTS = ("pitch", "pair", "row", "key", "rows", "keys", "length", "groups", "group_size")
# The struct `Rows` of the source. Fields that are not set are 0, and pointers null.
ROWS = np.dtype(
    [(name, "u8") for name in _POINTERS]
    + [(f"{array}_{axis}", "i8") for array in ("mask", "bias") for axis in _STRIDES]
    + [(name, "i8") for name in (*_COUNTS, "low", "high")]
    + [(name, "f8") for name in ("softcap", "weight_scale")]
)


_CPP = {"float32": "float", "float64": "double"}


def name_of(weight: str, bias: str) -> str:
    """Return the C++ name of the kernel for weights and a bias of these dtypes."""
    return f"softmax<{_CPP.get(weight, weight)}, {_real(weight)}, {_CPP.get(bias, bias)}>"


def gradient_name_of(weight: str) -> str:
    """Return the C++ name of the kernel for weights and gradients of this dtype."""
    return f"softmax_gradient<{_CPP.get(weight, weight)}, {_real(weight)}>"


def _real(weight: str) -> str:
    return "double" if weight == "float64" else "float"


def launch(rows: Any, blocks: int, name: str) -> None:
    """Queue a kernel on the current stream for a record of `ROWS`, one thread block a row."""
    # A weight must not be larger than a score.
    keys = int(rows["keys"])
    threads = min(MOST_THREADS, max(64, 1 << (keys - 1).bit_length() >> 3))
    kernel = _kernel(name, cupy.cuda.runtime.getDevice())
    kernel((blocks,), (threads,), (rows,))


@functools.cache
def _kernel(name: str, device: int) -> Any:
    # Each device needs a module of its own: functions of another device's are not found.
    module = cupy.RawModule(code=SOURCE, options=OPTIONS, name_expressions=(name,))
    return module.get_function(name)
