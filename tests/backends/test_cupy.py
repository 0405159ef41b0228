"""CuPy's backend where there is no GPU: what it says of that, and which arrays it imports."""

import cupy
import ml_dtypes
import numpy as np
import pytest
from cupy_host import stand_in
from optional import torch

from polyattn import attention
from polyattn._dispatch.errors import BackendUnavailableError
from polyattn_cupy import backend

NO_DRIVER = pytest.mark.skipif(cupy.cuda.is_available(), reason="there is a GPU here")
X = np.ones((1, 2, 3, 8), "float32")


@NO_DRIVER
def test_without_a_driver_the_reason_is_told_and_a_list_goes_on():
    with pytest.raises(BackendUnavailableError, match=r"CUDA finds no device.*NVIDIA GPU and its"):
        attention(X, X, X, backend="cupy")
    np.testing.assert_array_equal(attention(X, X, X, backend="cupy,numpy"), X)


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
