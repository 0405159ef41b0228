"""Pages that the compiled kernel reads in place: the bits are those of contiguous keys."""

import numpy as np
import pytest
from optional import jax, jnp, torch

import polyattn
from polyattn import masks, scores
from polyattn.plugin import CachePadding
from polyattn_native import call
from polyattn_native.visible import visible

H, G, D, E = 6, 2, 20, 9


class Paged:
    """Items of different lengths, in pages and contiguous; what no item uses is NaN."""

    def __init__(self, page, rows, keys=560, dtype="float32"):
        self.rng = rng = np.random.default_rng(page)
        self.page, count = page, max(2, keys // page)
        last = page * count
        ends = {0, 1, page - 1, page, page + 1, 257, last - page, last - 1, last}
        self.lengths = np.array([n for n in sorted(ends) if n <= last])
        pages = rng.permutation(len(self.lengths) * count + 3)
        self.table = pages[: len(self.lengths) * count].reshape(-1, count)
        self.table[-1] = self.table[-2]  # the same pages, to another length
        self.table[-3, 1] = self.table[-3, 0]  # a page twice
        self.query = rng.standard_normal((len(self.table), H, rows, D)).astype(dtype)
        used = np.arange(last) < self.lengths[:, None]
        self.pools, self.whole = [], []
        for size in (D, E):
            pool = rng.standard_normal((len(pages), G, page, size)).astype(dtype)
            whole = pool[self.table].swapaxes(1, 2).reshape(len(self.table), G, last, size)
            places = self.table[:, :, None], np.arange(page)
            is_used = np.zeros((len(pages), page), bool)
            np.logical_or.at(is_used, places, used.reshape(-1, count, page))
            pool[~is_used[:, None, :, None] & np.ones_like(pool, bool)] = np.nan
            self.pools.append(pool)
            self.whole.append(np.where(used[:, None, :, None], whole, np.zeros((), dtype)))
        beyond = np.arange(count) * page >= self.lengths[:, None]
        self.table = np.where(beyond, np.array([-1, 2**40])[np.arange(count) % 2], self.table)

    def __call__(self, *pools, **options):
        given = {"kernel": "native", "block_table": self.table, "key_lengths": self.lengths}
        return polyattn.attention_partial(self.query, *(pools or self.pools), **given, **options)

    def expected(self, kernel="native", **options):
        options = {"kernel": kernel, "key_lengths": self.lengths} | options
        return polyattn.attention_partial(self.query, *self.whole, **options)


def same_bits(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    ("page", "rows", "dtype"),
    [
        (1, 70, "float32"),
        (16, 70, "float16"),
        (128, 1, "float64"),
    ],
)
def test_pages_have_the_bits_of_one_piece(page, rows, dtype):
    x = Paged(page, rows, dtype=dtype)
    for given in ({}, {"is_causal": True, "window": (130, None)}):
        same_bits(x(**given), x.expected(**given))
    if dtype == "float64":
        np.testing.assert_allclose(x()[0], x.expected("dense")[0], rtol=0, atol=1e-14)


@pytest.mark.usefixtures("isa")
def test_every_option_goes_by_the_index_of_a_key(monkeypatch):
    monkeypatch.setattr(call, "MADE", 2**10)  # masks are made for some rows at a time
    x = Paged(page=3, rows=140, keys=310)
    keys = x.table.shape[1] * x.page
    ids = np.sort(x.rng.integers(0, 4, (len(x.table), keys)))
    for given in (
        {"mask": x.rng.random((len(x.table), 1, 140, keys)) < 0.6},
        {"mask": masks.segments(ids[:, :140], ids), "score_mod": scores.alibi(H), "softcap": 3.0},
        {"mask": masks.segments(ids[:, 139::-1], ids), "sinks": np.ones(H, "float32")},
        {"mask": masks.dilated(3), "query_offset": 500, "scale": -0.3},
        {"bias": x.rng.standard_normal((1, H, 140, keys)).astype("float32")},
        {"dropout": (0.4, 7), "query_offset": x.lengths - 3, "is_causal": True},
    ):
        same_bits(x(**given), x.expected(**given))


@pytest.mark.usefixtures("isa")
def test_what_a_row_sees_reaches_it_only():
    x = Paged(16, rows=5)
    for pools in (x.pools, x.whole):
        pools[1].flags.writeable = True
    item, key = len(x.table) - 4, 35
    page, slot = x.table[item, key // 16], key % 16
    x.pools[1][page, :, slot] = x.whole[1][item, :, key] = np.inf
    hides = np.arange(x.whole[0].shape[-2]) % 5 > 0  # the rows of all items see it, or none
    for mask in (None, np.broadcast_to(hides, (5, len(hides)))):
        same_bits(x(mask=mask), x.expected(mask=mask))


def test_pools_have_any_strides():
    x = Paged(16, rows=3)
    same_bits(x(*[np.ascontiguousarray(p.T).T for p in x.pools]), x.expected())
    same_bits(x(*[p[::-1].copy()[::-1] for p in x.pools]), x.expected())


def test_lengths_end_the_work_beside_a_mask_that_is_made():
    x = polyattn.plugin.Operands.of_options(
        mask=(masks.dilated(2) | masks.dense(np.eye(3, 9) > 0)) & CachePadding(np.array([4, 7]))
    )
    found = polyattn.explain((2, 1, 3, 8), (2, 1, 9, 8), (2, 1, 9, 8), mask=x.mask)
    seen = visible(found.problem, x)
    assert seen.by_rows
    assert seen.array is None
    assert np.asarray(seen.stop).reshape(2, -1).max(axis=1).tolist() == [4, 7]


# ---- tensors ----


def as_tensors(x, dtype="float32"):
    return [torch.from_numpy(a).to(getattr(torch, dtype)) for a in (x.query, *x.pools, *x.whole)]


def test_tensors_in_pages_have_the_bits_of_one_piece(monkeypatch):
    x = Paged(3, rows=4)
    query, *arrays = as_tensors(x, "float16")
    given = {"key_lengths": torch.from_numpy(x.lengths), "is_causal": True, "kernel": "native"}
    expected = polyattn.attention_partial(query, *arrays[2:], **given)
    monkeypatch.setattr("polyattn._core.call.pages.gathered", None)
    given["block_table"] = torch.from_numpy(x.table)
    same_bits(polyattn.attention_partial(query, *arrays[:2], **given), expected)


@pytest.mark.parametrize(
    "is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
def test_gradients_of_pools_are_those_of_copies(is_compiled):
    x = Paged(16, rows=4, keys=64)
    given = {"key_lengths": torch.from_numpy(x.lengths), "is_causal": True}
    given["block_table"] = torch.from_numpy(x.table)

    def loss(*tensors, kernel="native"):
        return polyattn.attention(*tensors, kernel=kernel, **given).square().sum()

    torch.compiler.reset()
    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if is_compiled else loss
    tensors = [one.requires_grad_() for one in as_tensors(x)[:3]]
    found = torch.autograd.grad(run(*tensors), tensors)
    expected = torch.autograd.grad(loss(*tensors, kernel="dense"), tensors)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_a_page_that_is_not_there_is_an_error():
    x = Paged(16, rows=1)
    table = torch.from_numpy(x.table)
    table[-1, 0] = wrong = len(x.pools[0])
    given = {"key_lengths": torch.from_numpy(x.lengths), "kernel": "native"}
    with pytest.raises(IndexError, match=f"block_table names page {wrong} of a pool of {wrong} "):
        polyattn.attention(*as_tensors(x)[:3], block_table=table, **given)


# ---- programs of JAX ----


def in_jax(x):
    """Return query and pools, and table and lengths."""
    table = jnp.asarray(np.clip(x.table, -1, 2**30))
    return list(map(jnp.asarray, (x.query, *x.pools))), [table, jnp.asarray(x.lengths)]


def on_jax(kernel="native", **options):
    def call(query, key, value, table, lengths):
        given = {"block_table": table, "key_lengths": lengths, "kernel": kernel}
        return polyattn.attention(query, key, value, **given, **options)

    return call


def test_a_program_reads_pages_where_they_lie():
    x, options = Paged(16, rows=5), {"score_mod": scores.alibi(H), "sinks": jnp.arange(6.0)}
    arrays, of_items = in_jax(x)
    compiled = jax.jit(on_jax(**options)).lower(*arrays, *of_items).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < arrays[1].nbytes / 2
    found = compiled(*arrays, *of_items)
    np.testing.assert_array_equal(found, on_jax(**options)(*arrays, *of_items))
    whole = map(jnp.asarray, x.whole)
    given = {"key_lengths": of_items[1], "kernel": "native"} | options
    np.testing.assert_array_equal(found, polyattn.attention(arrays[0], *whole, **given))


def test_a_program_reads_slots_of_all_heads_where_they_lie():
    x = Paged(16, rows=90)
    (query, *pools), of_items = in_jax(x)
    wanted = on_jax()(query, *pools, *of_items)
    turned = [jnp.swapaxes(a, -2, -3) for a in (query, *pools)]
    compiled = jax.jit(on_jax(layout="...LHD")).lower(*turned, *of_items).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pools[0].nbytes
    np.testing.assert_array_equal(jnp.swapaxes(compiled(*turned, *of_items), -2, -3), wanted)


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ((0, None, None, 0, 0), {"is_causal": True}),
        ((0, None, None, 0, 0), {"dropout": (0.4, 7)}),
    ],
    ids=str,
)
def test_pages_under_vmap(axes, options):
    x = Paged(16, rows=2, keys=64)
    arrays, (table, lengths) = in_jax(x)
    one = [*map(jnp.nan_to_num, arrays), jnp.clip(table, 0, len(arrays[1]) - 1), lengths]
    given = [
        a if axis is None else jnp.stack([a, jnp.roll(a, 1, 0), a[::-1]], axis)
        for axis, a in zip(axes, one, strict=True)
    ]
    mapped = jax.jit(jax.vmap(on_jax(**options), axes))
    of_items = [
        [a if axis is None else a[i] for axis, a in zip(axes, given, strict=True)] for i in range(3)
    ]
    expected = [on_jax("dense", **options)(*map(np.asarray, item)) for item in of_items]
    np.testing.assert_allclose(mapped(*given), np.stack(expected), atol=1e-5)
    is_called = "@polyattn_attend" in mapped.lower(*given).as_text()
    assert is_called == ("dropout" not in options)  # which counts the items of a call


def test_an_item_of_a_page_that_is_not_there_is_nan_on_jax():
    x = Paged(16, rows=1)
    arrays, (table, lengths) = in_jax(x)
    clean = list(map(jnp.nan_to_num, arrays))
    for wrong in (-1, len(arrays[1]), 2**30):
        found = jax.jit(on_jax())(*clean, table.at[-1, 0].set(wrong), lengths)
        assert jnp.isnan(found).all((1, 2, 3)).tolist() == [False] * (len(table) - 1) + [True]
