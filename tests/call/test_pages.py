"""Paged keys equal contiguous ones, whatever the slots hold that no item uses."""

import re

import numpy as np
import pytest
from arrays import close, draw
from optional import array_api_strict, da, jax, jnp, torch

from polyattn import (
    UnsupportedError,
    attention,
    attention_jvp,
    attention_partial,
    attention_vjp,
    attention_weights,
    explain,
    parallel,
    scores,
)
from polyattn._core.call import layout
from polyattn._core.call.operands import Operands
from polyattn._core.call.pages import gathered
from polyattn_numpy.tiled_kernel import NumpyTiled

H, G, L, D, E, PAGE, PAGES = 4, 2, 3, 8, 6, 4, 9
# Two items share page 3, one of them twice; lengths are at the edges of a page; −1 and numbers
# beyond the pool are not read.
TABLE = np.array([[3, 7, 3], [5, 3, 99], [1, -1, -1], [8, -7, 0], [0, 4, 2], [6, 0, 1]])
LENGTHS = np.array([11, 5, 4, 3, 8, 0])
CALL = {"block_table": TABLE, "key_lengths": LENGTHS}
QUERY, *POOLS = draw(
    (len(TABLE), H, L, D), (PAGES, G, PAGE, D), (PAGES, G, PAGE, E), dtype="float64"
)
OPTIONS = [{}, {"is_causal": True}, {"window": (4, 0), "softcap": 2.0}]


def named(options):
    return " and ".join(options) or "nothing"


def used():
    """Return which slots of the pools an item uses."""
    found = np.zeros((PAGES, PAGE), bool)
    for pages, length in zip(TABLE, LENGTHS, strict=True):
        for j in range(length):
            found[pages[j // PAGE], j % PAGE] = True
    return found


POISONED = tuple(np.where(used()[:, None, :, None], pool, np.nan) for pool in POOLS)


def whole(pool, item):
    """Return the contiguous keys of an item, (G, its length, size)."""
    slots = [pool[TABLE[item, j // PAGE], :, j % PAGE] for j in range(LENGTHS[item])]
    return np.stack(slots, axis=1) if slots else np.zeros((G, 0, pool.shape[-1]))


def one_by_one(**options):
    items = range(len(TABLE))
    return np.stack([attention(QUERY[b], *(whole(x, b) for x in POOLS), **options) for b in items])


def paged(to=np.array, pools=POISONED, **options):
    arrays = map(to, (QUERY, *pools))
    return attention(*arrays, **CALL, **options)


@pytest.mark.parametrize("to", [np.array, torch.tensor, array_api_strict.asarray])
@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_pages_equal_contiguous_keys(to, options):
    close(paged(to, **options), one_by_one(**options))


def tiled(tile):
    kernel = NumpyTiled()
    kernel.tile = tile
    return kernel


@pytest.mark.parametrize(
    "options",
    [*OPTIONS, {"score_mod": scores.alibi(H)}, {"sinks": np.arange(4.0)}, {"dropout": (0.5, 1)}],
    ids=named,
)
def test_numpy_reads_pages_in_place(options):
    expected = paged(pools=POOLS, kernel="dense", **options)
    for tile, pools in ((8, POISONED), (64, POOLS)):
        close(paged(pools=pools, kernel=tiled(tile), **options), expected, 400)


def test_an_item_ends_in_the_page_in_which_a_later_tile_begins():
    pool, query = draw((34, 8, 64, 2), (2, 8, 1, 2), dtype="float64")
    # Both items share tiles of 368 keys: the second begins in the page of the keys 320 to 383.
    call = {"block_table": np.arange(34).reshape(2, 17), "key_lengths": np.array([350, 1088])}
    found = attention(query, pool, pool, kernel="tiled", **call)
    expected = attention(query, pool, pool, kernel="dense", **call)
    close(found, expected, 400)


def test_each_item_has_the_same_bits_alone():
    found = paged(kernel=tiled(64))
    for b in range(len(TABLE)):
        call = {"block_table": TABLE[b : b + 1], "key_lengths": LENGTHS[b : b + 1]}
        alone = attention(QUERY[b : b + 1], *POISONED, kernel=tiled(64), **call)
        assert np.array_equal(alone[0], found[b])


@pytest.mark.parametrize("to", [np.array, torch.tensor, jnp.asarray])
def test_gradients_are_those_of_the_pool(to):
    """A page that two items share gets the sum of both, and an unused slot 0."""

    def gradients(*arrays):
        output, pullback = attention_vjp(*arrays, **CALL, is_causal=True)
        return pullback(output * 0 + 1)[1:3]

    traced = jax.jit(gradients) if to is jnp.asarray else gradients
    found = traced(*map(to, (QUERY, *POISONED)))
    expected = [np.zeros_like(pool) for pool in POOLS]
    for b in range(len(TABLE)):
        own = QUERY[b], whole(POOLS[0], b), whole(POOLS[1], b)
        output, pullback = attention_vjp(*own, is_causal=True)
        gradients = pullback(np.ones_like(output))
        for j in range(LENGTHS[b]):
            at = TABLE[b, j // PAGE], slice(None), j % PAGE
            expected[0][at] += gradients.key[:, j]
            expected[1][at] += gradients.value[:, j]
    close(found, expected, 400)


@pytest.mark.parametrize(
    ("sizes", "to"),
    [((D, 0), np.array), ((D, 0), torch.tensor), ((0, E), np.array), ((0, 0), np.array)],
)
def test_gradients_of_pools_whose_vectors_have_no_numbers(sizes, to):
    pools = [to(np.ones((PAGES, G, PAGE, size), np.float32)) for size in sizes]
    query = to(np.ones((len(TABLE), H, L, sizes[0]), np.float32))
    output, pullback = attention_vjp(query, *pools, **CALL)
    found = pullback(output * 0 + 1)[:3]
    assert [tuple(x.shape) for x in found] == [tuple(x.shape) for x in (query, *pools)]
    assert (np.asarray(found[2])[used().any(1)] != 0).any() == (sizes[1] > 0)


def test_the_siblings_take_pages():
    output, logsumexp = attention_partial(QUERY, *POISONED, **CALL)
    close(output, one_by_one())
    assert np.isneginf(logsumexp[5]).all()
    weights = attention_weights(QUERY, POISONED[0], **CALL)
    assert weights.shape == (6, H, L, 3 * PAGE)
    assert not weights[1, ..., 5:].any()
    _, tangent = attention_jvp((QUERY, *POISONED), (None, None, POISONED[1]), **CALL)
    close(tangent, one_by_one(), 400)


def refused(error, message, arrays=(QUERY, *POOLS), **changes):
    with pytest.raises(error, match=re.escape(message)):
        attention(*arrays, **CALL | changes)


def test_what_is_refused():
    refused(TypeError, "block_table needs key_lengths=", key_lengths=None)
    refused(TypeError, "block_table must be an integer array", block_table=TABLE.astype(float))
    refused(ValueError, "key_lengths must be from 0 to S = 12", key_lengths=13)
    message = "block_table must name pages from 0 to 8 for the keys within key_lengths; got -1"
    refused(ValueError, message, key_lengths=LENGTHS + 1)
    flat = (QUERY, POOLS[0][0], POOLS[1][0])
    message = "with block_table, key and value are at least one page (pages, G, page, D); query"
    refused(ValueError, message, flat)
    refused(ValueError, message, (QUERY, POOLS[0][:0], POOLS[1][:0]), key_lengths=0)
    fewer = (QUERY, POOLS[0], POOLS[1][:8])
    refused(ValueError, "key and value must have one number of pages;", fewer)
    shorter = (QUERY, POOLS[0], POOLS[1][:, :, :2])
    refused(ValueError, "key and value must have one length S; got 12 and 6", shorter)
    chunked = tuple(map(da.from_array, (QUERY, *POOLS)))
    refused(UnsupportedError, "it does not compute block_table", chunked)
    with pytest.raises(TypeError, match="unexpected keyword argument 'block_table'"):
        parallel.run_threads(
            1, lambda ranks: parallel.attention(QUERY, *POOLS, over=ranks, block_table=TABLE)
        )


def test_kernels_that_get_copies_are_named():
    found = str(explain(*map(torch.tensor, (QUERY, *POOLS)), **CALL))
    assert "it gets gathered, contiguous copies of the pages" in found
    assert not explain(QUERY, *POOLS, kernel="tiled", **CALL).chosen.remark


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({}, 3),
        ({"is_causal": True, "window": (1, 0)}, 2),
        ({"window": (1, 0), "query_offset": LENGTHS - L}, 3),
        ({"window": (1, 0), "dropout": (0.5, 1)}, 3),
        ({"bias": np.ones((1, 64 * PAGE))}, 64),
    ],
    ids=["nothing", "window", "offset", "dropout", "bias"],
)
def test_copies_are_of_the_columns_that_rows_may_see(options, columns, monkeypatch):
    """An item begins in its window, so a cache that slides costs its window, not all its tokens."""
    shapes, copy = [], layout.in_one_piece
    monkeypatch.setattr(
        layout, "in_one_piece", lambda x: shapes.append(tuple(x.block_table.shape)) or copy(x)
    )
    table = np.concatenate([TABLE, np.full((len(TABLE), 61), -1)], axis=1)
    arrays = [torch.tensor(x) for x in (QUERY, *POISONED)]
    found = attention(*arrays, block_table=table, key_lengths=torch.tensor(LENGTHS), **options)
    assert shapes == [(len(TABLE), columns)]
    call = CALL | {"block_table": table} | options
    expected = attention(QUERY, *POISONED, kernel="tiled", **call)
    close(found, expected, 400)


@pytest.mark.parametrize(
    ("items", "lengths"),
    [((), 9), ((2, 2), [[9], [5]]), ((2, 2), [9, 5])],
    ids=str,
)
def test_lengths_and_tables_of_other_axes_are_cut(items, lengths):
    table = np.tile(np.arange(8), (*items, 1))
    lengths = lengths if lengths == 9 else np.array(lengths)
    (query,) = draw((*items, H, 1, D), dtype="float64")
    call = {"block_table": table, "key_lengths": lengths, "window": (3, 0)}
    expected = attention(query, *POOLS, kernel=tiled(64), **call)
    arrays = [torch.tensor(x) for x in (query, *POOLS)]
    close(attention(*arrays, **call), expected, 400)


@pytest.mark.needs("torch")
def test_a_length_beyond_the_table_hides_nothing():
    table = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    pools = [torch.from_numpy(pool) for pool in POOLS]
    query, lengths = torch.ones(2, H, 3, D, dtype=torch.float64), torch.tensor([20, 3])
    whole = [pool[table].movedim(1, 2).reshape(2, G, 16, pool.shape[-1]) for pool in pools]
    found = attention(query, *pools, block_table=table, key_lengths=lengths, window=(2, 0))
    wanted = attention(query, *whole, key_lengths=lengths, window=(2, 0))
    close(found, wanted)


def test_unused_slots_are_copied_as_0():
    """Kernels get copies of the pages, and not every kernel leaves out what is hidden."""
    x = Operands.of_options(**CALL)
    found = gathered(np.full_like(POOLS[0], np.nan), x)
    used = np.arange(found.shape[-2]) < LENGTHS[:, None]
    np.testing.assert_array_equal(np.isnan(found).all((1, 3)), used)
    assert (found[~np.isnan(found)] == 0).all()
