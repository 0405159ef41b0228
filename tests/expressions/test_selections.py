"""Masks that name keys: they are sets, made of arrays of any library, of edges, and traced."""

import warnings

import numpy as np
import pytest
from arrays import NUMPY, STRICT, TORCH
from optional import jax, torch

from polyattn import attention, masks
from polyattn._core.expressions.selections import selection_of

RNG = np.random.default_rng(3)
L, S = 6, 9
X, KEY = RNG.normal(size=(2, 4, L, 8)), RNG.normal(size=(2, 4, S, 8))
KEYS = np.array([[3, 0, -1, 3], [8, 8, 8, 8], [-1, -1, -1, -1], [5, 4, 3, 2], [0, 1, 7, -1],
                 [6, 6, 0, 1]])  # fmt: skip
SEEN = np.stack([np.isin(np.arange(S), row) for row in KEYS])
EXPECTED = attention(X, KEY, KEY, mask=SEEN, kernel="dense")


def test_a_selection_is_a_set_in_any_order():
    keys = KEYS.copy()
    mask = masks.selected(keys)
    keys[:] = 0  # of which it has kept a copy
    assert mask == masks.selected(KEYS[:, ::-1])
    np.testing.assert_allclose(attention(X, KEY, KEY, mask=mask), EXPECTED, atol=1e-12)


@pytest.mark.parametrize("kernel", ["dense", "gathered"])
@pytest.mark.parametrize("library", [NUMPY, TORCH], ids=str)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_numbers_beyond_the_keys_name_none(library, dtype, kernel):
    """Also where the product of number and size is beyond the dtype."""
    numbers = np.array([[2**30, 2**31 - 1, np.iinfo(dtype).max // 2 + 1]], dtype)
    for mask in (masks.selected, lambda table: masks.blocks(table, (2**40, 4))):
        given = [library.to(x) for x in (X, KEY, KEY)]
        found = attention(*given, mask=mask(library.to(numbers)), kernel=kernel)
        assert not library.back(found).any()


@pytest.mark.parametrize(("items", "keys"), [(0, 5), (2, 0)])
def test_lists_of_no_scores(items, keys):
    """Also where an engine of torch takes empty arrays."""
    x, key = torch.zeros(items, 1, 3, 4), torch.zeros(items, 1, keys, 4)
    for mask in (masks.selected, lambda table: masks.blocks(table, (1, 2))):
        output = attention(x, key, key, mask=mask(np.zeros((items, 1, 3, 2), int)))
        assert torch.equal(output, torch.zeros_like(x))


@pytest.mark.parametrize("library", [NUMPY, TORCH, STRICT], ids=str)
def test_edges_in_any_order_are_the_keys_of_rows(library):
    rows, keys = np.nonzero(SEEN)
    order = RNG.permutation(np.r_[np.arange(rows.size), 0, 3])  # two of them twice
    mask = masks.edges(library.to(rows[order]), library.to(keys[order]), L)
    output = attention(*map(library.to, (X, KEY, KEY)), mask=mask, kernel="dense")
    np.testing.assert_allclose(library.back(output), EXPECTED, atol=1e-12)
    assert not attention(X, KEY, KEY, mask=masks.edges([], [], L)).any()


@pytest.mark.slow
def test_edges_of_jax_with_64_bits_are_written_to_lists_of_64_bits():
    wide = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64  # since JAX 0.8
    with wide(True), warnings.catch_warnings(), jax.numpy_dtype_promotion("strict"):
        warnings.simplefilter("error")  # JAX warns of numbers that it writes to a narrower array
        ids = jax.numpy.asarray([0, 2, 2]), jax.numpy.asarray([1, 0, 2])
        assert str(masks.edges(*ids, 3).lists.dtype) == "int64"


def test_edges_that_are_traced_are_refused_by_name():
    with pytest.raises(TypeError, match=r"rows is traced.*give masks.selected"):
        jax.jit(lambda rows: masks.edges(rows, rows, L).indices)(np.arange(3))


def under_jit(mask_of):
    run = jax.jit(lambda x, k, keys: attention(x, k, k, mask=mask_of(keys)))
    return np.asarray(run(*(one.astype("float32") for one in (X, KEY)), KEYS))


def under_vmap(mask_of):
    run = torch.func.vmap(lambda x, k, keys: attention(x, k, k, mask=mask_of(keys)))
    return run(*map(torch.from_numpy, (X, KEY, np.stack([KEYS, KEYS])))).numpy()


@pytest.mark.parametrize(
    ("way", "mask_of"),
    [(under_jit, masks.selected), (under_vmap, lambda keys: masks.blocks(keys, 1))],
)
def test_traced_numbers(way, mask_of):
    np.testing.assert_allclose(way(mask_of), EXPECTED, atol=1e-5)


def test_the_selection_of_a_mask_is_its_smallest_one():
    small, large = masks.blocks([[1]], (9, 2)), masks.selected(KEYS)
    other = masks.causal()
    assert selection_of(other & large & small) == (small, other & large)
    assert selection_of(small) == (small, None)
    for mask in (other, ~small, small | other, None, SEEN):
        assert selection_of(mask)[0] is None
