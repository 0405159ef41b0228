"""Biases of xformers by the names and fields of their classes, against their documentation.

xformers needs a GPU to be of use, so the classes here are written from its documentation.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from optional import torch

from polyattn.dialects.xformers import BIASES, memory_efficient_attention

RNG = np.random.default_rng(0)
H, D, E = 3, 8, 4


def normal(*shape):
    return RNG.standard_normal(shape)


def bias_of(name, **fields):
    return type(name, (SimpleNamespace,), {})(**fields)


def plain(q, k, v, bias, scale=None):
    """Return (B, L, H, E) by the equivalent code of the documentation, and 0 for empty rows."""
    s = np.einsum("blhd,bshd->bhls", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s + bias
    weights = np.exp(s - np.maximum(s.max(-1, keepdims=True), -1e30))
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bhls,bshd->blhd", weights / np.where(total == 0, 1, total), v)


def band(rows, keys, causal=False, shift=0, left=None, right=None):
    """Return 0 where a key is seen and −inf elsewhere."""
    away = np.arange(keys) - (np.arange(rows) + shift)[:, None]
    seen = np.ones((rows, keys), bool)
    seen &= (away <= 0) if causal else True
    seen &= (away >= -left) if left is not None else True
    seen &= (away <= right) if right is not None else True
    return np.where(seen, 0, -math.inf)


ADDED = normal(2, H, 5, 7)
WHOLE = {
    "LowerTriangularMask": ({}, {"causal": True}),
    "LowerTriangularMaskWithTensorBias": ({"_bias": ADDED}, {"causal": True}),
    "LowerTriangularFromBottomRightMask": ({}, {"causal": True, "shift": 2}),
    "LowerTriangularFromBottomRightLocalAttentionMask": (
        {"_window_size": 2}, {"causal": True, "shift": 2, "left": 1},
    ),
    "LocalAttentionFromBottomRightMask": (
        {"window_left": 2, "window_right": 1}, {"shift": 2, "left": 2, "right": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("name", WHOLE)
def test_a_bias_of_the_whole_matrix(name, library):
    fields, meaning = WHOLE[name]
    q, k, v = normal(2, 5, H, D), normal(2, 7, H, D), normal(2, 7, H, E)
    expected = plain(q, k, v, band(5, 7, **meaning) + fields.get("_bias", 0), 0.3)
    to = torch.asarray if library == "torch" else np.asarray
    fields = {k: to(x) if isinstance(x, np.ndarray) else x for k, x in fields.items()}
    found = memory_efficient_attention(*map(to, (q, k, v)), bias_of(name, **fields), 0.0, 0.3)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_a_class_derived_from_a_known_one_and_a_newer_field():
    q, k, v = normal(2, 5, H, D), normal(2, 7, H, D), normal(2, 7, H, E)
    derived = type("Mine", (type(bias_of("LowerTriangularFromBottomRightMask")),), {})()
    expected = plain(q, k, v, band(5, 7, causal=True, shift=2))
    np.testing.assert_allclose(memory_efficient_attention(q, k, v, derived), expected, atol=1e-12)
    newer = bias_of("LowerTriangularMaskWithTensorBias", _subtensor=ADDED)
    expected = plain(q, k, v, band(5, 7, causal=True) + ADDED)
    np.testing.assert_allclose(memory_efficient_attention(q, k, v, newer), expected, atol=1e-12)


def test_arrays_of_three_and_five_axes_and_a_bias_to_add():
    q, k, v = normal(2, 5, 6, D), normal(2, 7, 6, D), normal(2, 7, 6, E)
    bias = normal(2, 6, 5, 7)
    expected = plain(q, k, v, bias)
    found = memory_efficient_attention(q, k, v, bias, op=object())
    np.testing.assert_allclose(found, expected, atol=1e-12)
    grouped = [x.reshape(*x.shape[:2], 2, 3, -1) for x in (q, k, v)]
    found = memory_efficient_attention(*grouped, bias.reshape(2, 2, 3, 5, 7))
    np.testing.assert_allclose(found, expected.reshape(2, 5, 2, 3, E), atol=1e-12)
    alone = [x[:, :, 0] for x in (q, k, v)]
    found = memory_efficient_attention(*alone, bias[:, 0], output_dtype=np.float32)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected_of_one(alone, bias[:, :1]), atol=1e-6)
    with pytest.raises(ValueError, match=r"shape \(B, L, H, D\).*got \(5, 8\)"):
        memory_efficient_attention(q[0, :, 0], k[0, :, 0], v[0, :, 0])


def expected_of_one(arrays, bias):
    return plain(*(x[:, :, None] for x in arrays), bias)[:, :, 0]


ROWS, LENGTHS = [2, 1, 3], [4, 3, 5]
TABLE = np.array([[4, 1, 7], [0, 6, -1], [2, 5, 3]])


def starts(lengths):
    return [0, *np.cumsum(lengths).tolist()]


def block_bias(name):
    """Return a bias of blocks, and the places of the keys of each sequence."""
    rows = SimpleNamespace(seqstart_py=starts(ROWS))
    fields = {"q_seqinfo": rows}
    if name.startswith("Paged"):
        first = [1, 0, 1] if "Gappy" in name else [0, 0, 0]
        seqstart = [*first, -1] if "Gappy" in name else [0, 6, 12, 18]
        ends = [a + n for a, n in zip(first, LENGTHS, strict=True)]
        keys = SimpleNamespace(seqstart_py=seqstart, seqlen_py=ends, padding=6)
        fields |= {"block_tables": TABLE, "page_size": 2}
        flat = (TABLE[:, :, None] * 2 + np.arange(2)).reshape(3, 6)
        places = [flat[n, a : a + m] for n, (a, m) in enumerate(zip(first, LENGTHS, strict=True))]
    elif "Gappy" in name or "Padded" in name:
        first = [0, 6, 10, 16] if "Gappy" in name else [0, 6, 12, 18]
        keys = SimpleNamespace(seqstart_py=first, seqlen_py=LENGTHS, padding=6)
        places = [np.arange(a, a + n) for a, n in zip(first, LENGTHS, strict=False)]
    else:
        keys = SimpleNamespace(seqstart_py=starts(LENGTHS))
        places = [np.arange(a, a + n) for a, n in zip(keys.seqstart_py, LENGTHS, strict=False)]
    fields["k_seqinfo"] = keys
    if "CausalLocal" in name:
        fields["_window_size"] = 2
    elif "Local" in name:
        fields |= {"window_left": 1, "window_right": 1}
    return bias_of(name, **fields), places


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("name", [name for name in BIASES if "Block" in name])
def test_a_bias_of_blocks(name, library):
    bias, places = block_bias(name)
    total = 18 if hasattr(bias.k_seqinfo, "seqlen_py") else sum(LENGTHS)
    q, k, v = normal(1, sum(ROWS), H, D), normal(1, total, H, D), normal(1, total, H, E)
    if hasattr(bias, "block_tables"):
        bias.block_tables = (torch.asarray if library == "torch" else np.asarray)(TABLE)
    to = torch.asarray if library == "torch" else np.asarray
    found = memory_efficient_attention(*map(to, (q, k, v)), bias)
    from_first = name in ("BlockDiagonalCausalMask", "BlockDiagonalCausalLocalAttentionMask")
    for n, (row, keys) in enumerate(zip(starts(ROWS), places, strict=False)):
        rows = slice(row, row + ROWS[n])
        shift = 0 if from_first else len(keys) - ROWS[n]
        near = {"left": 1} if "CausalLocal" in name else {}
        near = {"left": 1, "right": 1} if "Local" in name and not near else near
        mask = band(ROWS[n], len(keys), "Causal" in name, shift, **near)
        expected = plain(q[:, rows], k[:, keys], v[:, keys], mask)
        np.testing.assert_allclose(found[:, rows], expected, atol=1e-12)


def test_what_no_bias_means_is_refused():
    x = normal(2, 5, H, D)
    with pytest.raises(NotImplementedError, match="class Other, which is not one of xformers'"):
        memory_efficient_attention(x, x, x, bias_of("Other"))
    bias, _ = block_bias("BlockDiagonalMask")
    with pytest.raises(ValueError, match=r"is for a batch of one.*\(2, 5, 3, 8\)"):
        memory_efficient_attention(x, x, x, bias)


def test_dropout_has_a_seed_of_the_generator():
    x = torch.randn(1, 12, H, D)
    bias = bias_of(
        "BlockDiagonalMask", q_seqinfo=SimpleNamespace(seqstart_py=[0, 4, 12]),
        k_seqinfo=SimpleNamespace(seqstart_py=[0, 4, 12]),
    )  # fmt: skip
    for given in (None, bias):
        torch.manual_seed(1)
        first, other = (memory_efficient_attention(x, x, x, given, 0.5) for _ in range(2))
        torch.manual_seed(1)
        assert torch.equal(memory_efficient_attention(x, x, x, given, 0.5), first)
        assert not torch.equal(first, other)
