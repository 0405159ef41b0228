"""Functions of NATTEN beside `attention` with the keys of each token's window."""

import numpy as np
import pytest
from arrays import to_numpy
from pairs import TO, normal, ours

from polyattn import masks
from polyattn.conformance.reference.expressions import _neighbors
from polyattn.dialects import natten

CALLS = {1: natten.na1d, 2: natten.na2d, 3: natten.na3d}


@pytest.mark.parametrize(
    ("grid", "given", "library"),
    [
        ((10,), {"kernel_size": 3}, "numpy"),
        ((10,), {"kernel_size": 4, "stride": 2, "is_causal": True}, "numpy"),
        ((5, 6), {"kernel_size": (3, 2), "dilation": (1, 3)}, "torch"),
        ((3, 4, 4), {"kernel_size": (2, 3, 1), "stride": (1, 2, 1), "is_causal": None}, "numpy"),
    ],
    ids=str,
)
def test_attention_within_windows(grid, given, library):
    q, k, v = (normal(2, *grid, *x) for x in ((4, 8), (2, 8), (2, 5)))
    more = [normal(2, 3, 2, n) for n in (8, 5)]
    mask = masks.neighborhood(grid, **given | {"is_causal": given.get("is_causal") or False})
    size = np.prod(grid)
    seen = np.ones((size, size + 3), bool)
    for row in range(size):
        seen[row, :size] = np.isin(np.arange(size), _neighbors(mask, row))
    flat = [x.reshape(2, size, *x.shape[-2:]) for x in (q, k, v)]
    call, to = CALLS[len(grid)], TO[library]
    found = call(*map(to, (q, k, v)), **given)
    expected = ours(*flat, mask=seen[:, :size])[0]
    np.testing.assert_allclose(to_numpy(found).reshape(expected.shape), expected, atol=1e-12)
    lists = {name: [*one] if isinstance(one, tuple) else one for name, one in given.items()}
    output, lse = call(
        *map(to, (q, k, v)), **lists, scale=0.3, return_lse=True, backend="cutlass-fna",
        additional_keys=to(more[0]), additional_values=to(more[1]),
    )  # fmt: skip
    flat[1:] = (np.concatenate(pair, 1) for pair in zip(flat[1:], more, strict=True))
    expected, total = ours(*flat, mask=seen, scale=0.3)
    np.testing.assert_allclose(to_numpy(output).reshape(expected.shape), expected, atol=1e-12)
    total = total.swapaxes(1, 2)
    np.testing.assert_allclose(to_numpy(lse).reshape(total.shape), total, atol=1e-12)
