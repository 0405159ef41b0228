"""Functions of NATTEN against sums over windows, token by token."""

import itertools

import numpy as np
import pytest
from optional import jax, torch
from scipy.special import log_softmax, logsumexp

from polyattn import masks
from polyattn.conformance.reference.expressions import _neighbors
from polyattn.dialects import natten

RNG = np.random.default_rng(0)
CALLS = {1: natten.na1d, 2: natten.na2d, 3: natten.na3d}


def normal(*shape):
    return RNG.standard_normal(shape)


def by_windows(q, k, v, mask, scale, more=None):
    """Return output and logsumexp of arrays (B, ..., H, D), from each token's own keys."""
    grid, heads = q.shape[1:-2], q.shape[-2]
    k, v = (np.repeat(x, heads // x.shape[-2], axis=-2) for x in (k, v))
    out, lse = np.empty((*q.shape[:-1], v.shape[-1])), np.empty(q.shape[:-1])
    for b, h, row in itertools.product(range(len(q)), range(heads), np.ndindex(*grid)):
        flat = int(np.ravel_multi_index(row, grid))
        keys, values = (
            x[b, ..., h, :].reshape(-1, x.shape[-1])[_neighbors(mask, flat)] for x in (k, v)
        )
        if more is not None:
            group = h * more[0].shape[-2] // heads
            keys, values = (
                np.concatenate([x, y[b, :, group]])
                for x, y in zip((keys, values), more, strict=True)
            )
        s = keys @ q[(b, *row, h)] * scale
        out[(b, *row, h)], lse[(b, *row, h)] = np.exp(log_softmax(s)) @ values, logsumexp(s)
    return out, lse


@pytest.mark.parametrize(
    ("grid", "given"),
    [
        ((10,), {"kernel_size": 3}),
        ((10,), {"kernel_size": 4, "stride": 2, "is_causal": True}),
        ((5, 6), {"kernel_size": (3, 2), "dilation": (1, 3)}),
        ((5, 6), {"kernel_size": 3, "is_causal": (True, False)}),
        ((3, 4, 4), {"kernel_size": (2, 3, 1), "stride": (1, 2, 1), "is_causal": None}),
    ],
    ids=str,
)
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_attention_within_windows(grid, given, library):
    to = {"numpy": np.asarray, "torch": torch.asarray, "jax": lambda x: jax.numpy.asarray(x)}[
        library
    ]
    q, k, v = normal(2, *grid, 4, 8), normal(2, *grid, 2, 8), normal(2, *grid, 2, 5)
    more = normal(2, 3, 2, 8), normal(2, 3, 2, 5)
    mask = masks.neighborhood(grid, **given | {"is_causal": given.get("is_causal") or False})
    call, atol = CALLS[len(grid)], 2e-6 if library == "jax" else 1e-12
    arrays = [to(x.astype("float32") if library == "jax" else x) for x in (q, k, v)]
    expected, _ = by_windows(q, k, v, mask, 8**-0.5)
    np.testing.assert_allclose(call(*arrays, **given), expected, atol=atol)
    expected = by_windows(q, k, v, mask, 0.3, more)
    further = [to(x.astype(str(np.asarray(arrays[0]).dtype))) for x in more]
    names = ("additional_keys", "additional_values")
    lists = {name: [*one] if isinstance(one, tuple) else one for name, one in given.items()}
    found = call(
        *arrays,
        **lists,
        scale=0.3,
        return_lse=True,
        backend="cutlass-fna",
        **dict(zip(names, further, strict=True)),
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=atol)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: natten.na1d(x, x, x, 7), ValueError, "at most the length"),
        (
            lambda x: natten.na2d(x, x, x, 3),
            ValueError,
            r"query must have the shape \(B, X, Y, H, D\)",
        ),
        (
            lambda x: natten.na1d(x, x, x, 3, q_tile=4),
            TypeError,
            "unexpected keyword argument 'q_tile'",
        ),
        (lambda x: natten.na1d(x, x, x, 3, additional_keys=x), ValueError, "give both"),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call(np.ones((1, 6, 2, 4)))
