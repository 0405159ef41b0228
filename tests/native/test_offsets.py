"""Numbers of where batch items begin live as long as the call that reads them."""

import numpy as np
import pytest

from polyattn import attention, masks

native = pytest.importorskip("polyattn_native.call")

RNG = np.random.default_rng(0)
QUERY, KEY = RNG.standard_normal((2, 3, 2, 16, 8)), RNG.standard_normal((2, 1, 2, 16, 8))


@pytest.mark.parametrize(
    "options",
    [{}, {"mask": masks.segments(RNG.integers(0, 2, (2, 1, 16)))}],
    ids=["a call that runs again", "a mask that is made"],
)
def test_items_that_no_stride_reaches_are_read(options, monkeypatch):
    others, run = [], native.run

    def run_after_others(*arguments, **options):
        others.extend(np.full(6, 7) for _ in range(100))  # in memory that was given back
        return run(*arguments, **options)

    monkeypatch.setattr(native, "run", run_after_others)
    expected = attention(QUERY, KEY, KEY, kernel="dense", **options)
    for _ in range(4):
        output = attention(QUERY, KEY, KEY, kernel="native", **options)
        others.extend(np.full(6, 7) for _ in range(100))
        np.testing.assert_allclose(output, expected, rtol=0, atol=1e-13)
