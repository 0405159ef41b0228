"""The conversion of 16-bit floats in the NumPy backend."""

import ml_dtypes
import numpy as np
import pytest

from polyattn_numpy.tile_scores import convert

ALL = np.arange(2**16, dtype=np.uint16).view(np.float16)
FINITE = ALL[np.isfinite(ALL)]


@pytest.mark.parametrize(
    "block",
    [
        FINITE, ALL, FINITE[:0], FINITE[::2], FINITE[:600].reshape(20, 30).T,
        ALL.astype(">f2"), ALL.view(ml_dtypes.bfloat16), FINITE.astype(np.float64),
    ],
    ids=["finite", "all", "empty", "strided", "transposed", "bytes", "bfloat16", "float64"],
)  # fmt: skip
def test_each_number_is_as_numpy_converts_it(block):
    out = np.full(block.shape, 7, np.float32)
    convert(block, out)
    want = block.astype(np.float32)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(np.signbit(out), np.signbit(want))
