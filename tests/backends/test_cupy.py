"""CuPy's backend where there is no GPU: what it says of that, and which arrays it imports."""

import types

import cupy
import ml_dtypes
import numpy as np
import pytest
from cupy_host import stand_in
from optional import torch

from polyattn import attention
from polyattn._base import arrays
from polyattn._dispatch.errors import BackendUnavailableError
from polyattn_cupy import backend, softmax_cuda

NO_DRIVER = pytest.mark.skipif(cupy.cuda.is_available(), reason="there is a GPU here")
X = np.ones((1, 2, 3, 8), "float32")


def test_neither_the_spec_nor_the_backend_imports_another_library(run_python):
    run_python("""
import sys
import polyattn_cupy, polyattn
polyattn.explain((2, 3), (4, 3), (4, 3), backend="numpy")
assert not {"cupy", "cupy_backends"} & set(sys.modules)
import polyattn_cupy.backend
assert not {"torch", "jax", "cupy_backends.cuda.libs.cublas"} & set(sys.modules)
""")


@NO_DRIVER
def test_without_a_driver_the_reason_is_told_and_a_list_goes_on():
    with pytest.raises(BackendUnavailableError, match=r"CUDA finds no device.*NVIDIA GPU and its"):
        attention(X, X, X, backend="cupy")
    np.testing.assert_array_equal(attention(X, X, X, backend="cupy,numpy"), X)


def test_limiting_offsets_does_not_wait_for_the_device(monkeypatch):
    """array_api_compat's clip assigns by a mask, for which CuPy asks the device."""
    monkeypatch.setattr(arrays, "library_of", lambda array: types.SimpleNamespace(name="cupy"))
    limited = arrays.clip(types.SimpleNamespace(), np.arange(5), 1, 3)
    np.testing.assert_array_equal(limited, [1, 1, 2, 3, 3])


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


def test_a_record_goes_to_a_kernel_by_value():
    from cupy.cuda.function import CNumpyArray

    assert CNumpyArray(np.zeros((), softmax_cuda.ROWS)) is not None
