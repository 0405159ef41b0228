"""A paged cache holds for each item what was appended to it, whoever shares its pages."""

import copy
import functools
import pickle
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tiny_models import LIBRARIES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from polyattn import attention, nn
from polyattn._dispatch.transfer import convert_like
from polyattn.integrations.jax import register
from polyattn.nn.page_plan import Ledger, Table, plan_in_trace, to_device

RNG = np.random.default_rng(3)
G, D, E, PAGE = 2, 4, 3, 4


@pytest.fixture(params=["numpy", "torch", "strict"])
def library(request):
    """Libraries whose lengths the host reads, without JAX, which has compiled steps below."""
    return LIBRARIES[request.param]


class Twin:
    """A paged cache, and beside it the tokens of each item in plain lists."""

    def __init__(self, to, items=3, capacity=8, **options):
        self.to = to
        like = to(np.zeros(1, np.float32))
        options = {"page": PAGE, "value_size": E} | options
        self.cache = nn.PagedCache.init(G, D, capacity, items=items, like=like, **options)
        self.tokens = [np.zeros((G, 0, D + E), np.float32)] * items

    def _with(self, cache, tokens):
        twin = object.__new__(Twin)
        twin.to, twin.cache, twin.tokens = self.to, cache, tokens
        return twin

    def append(self, m, counts=None, step=None):
        new = RNG.standard_normal((len(self.tokens), G, m, D + E)).astype(np.float32)
        key, value = (self.to(np.ascontiguousarray(x)) for x in (new[..., :D], new[..., D:]))
        step = step or nn.PagedCache.append
        cache = step(self.cache, key, value, **({} if counts is None else {"counts": counts}))
        kept = [m] * len(new) if counts is None else np.asarray(counts).tolist()
        pairs = zip(self.tokens, new, kept, strict=True)
        return self._with(cache, [np.concatenate([a, b[:, :c]], axis=1) for a, b, c in pairs])

    def fork(self, items):
        return self._with(self.cache.fork(items), [self.tokens[item] for item in items])

    def truncate(self, lengths):
        pairs = zip(self.tokens, lengths, strict=True)
        return self._with(self.cache.truncate(lengths), [x[:, :n] for x, n in pairs])

    def check(self, back=np.asarray):
        """Raise if the pages of an item do not hold its tokens."""
        table, lengths = back(self.cache.block_table), back(self.cache.lengths)
        pools = back(self.cache.keys), back(self.cache.values)
        assert lengths.tolist() == [x.shape[1] for x in self.tokens]
        for pages, tokens in zip(table, self.tokens, strict=True):
            slots = [(pages[j // PAGE], j % PAGE) for j in range(tokens.shape[1])]
            assert all(page > 0 for page, _ in slots)
            for pool, part in zip(pools, (tokens[..., :D], tokens[..., D:]), strict=True):
                found = [pool[page, :, slot] for page, slot in slots]
                assert not slots or (np.stack(found, axis=1) == part).all()


@pytest.mark.parametrize("grows", [False, True])
def test_items_hold_what_was_appended_forked_and_truncated(library, grows):
    to, back = library
    sizes = {"capacity": 4, "pages": 1} if grows else {"capacity": 32, "pages": 40}
    start = Twin(to, **sizes).append(6, counts=np.uint64([6, 0, 3]))
    one, other = start.append(1), start.append(3, counts=[3, 3, 0])  # both follow one cache
    forked = start.fork([0, 0, 2, 0])  # page 2 of the first item is begun, and shared
    ahead = forked.append(1)
    again = forked.append(5, counts=[5, 0, 1, 5])
    back_to = ahead.truncate([4, 7, 0, 5]).append(2)
    for twin in (start, one, other, forked, ahead, again, back_to, again.append(9)):
        twin.check(back)


def test_random_histories_hold_what_they_should():
    rng = np.random.default_rng(1)
    twins = [Twin(np.array, pages=2)]
    for _ in range(150):
        twin, kind = twins[rng.integers(len(twins))], rng.integers(4)
        items = len(twin.tokens)
        if kind == 0:
            twin = twin.fork(rng.integers(0, items, 3).tolist())
        elif kind == 1:
            twin = twin.truncate(rng.integers(0, 12, items).tolist())
        else:
            twin = twin.append(5, counts=rng.integers(0, 6, items))
        twins.append(twin)
        if len(twins) > 5:  # their pages are free
            twins.pop(int(rng.integers(len(twins))))
        for each in twins:
            each.check()


def test_a_fork_takes_the_positions_of_its_items():
    cache = Twin(np.asarray).append(4, counts=[4, 1, 2]).append(2, counts=[2, 0, 1]).cache
    assert cache.options({})["query_offset"].tolist() == [4, 1, 2]
    assert cache.fork([2, 0]).options({})["query_offset"].tolist() == [2, 4]


@functools.cache
def plans(total, m):
    """Both ways to plan where m tokens go among pages of 4 slots, which jax.jit compiles once."""

    def traced(pages, lengths, counts):
        return tuple(plan_in_trace(Table(pages, lengths, PAGE, total), counts, m))

    def by_host(pages, lengths, counts):
        table = Table(pages, lengths, PAGE, total)
        return tuple(Ledger(table).place(table, counts, m))

    return by_host, jax.jit(traced)


def planned(pages, lengths, counts, total, m=3):
    """The plans of both ways, as lists."""
    for plan in plans(total, m):
        arrays = (np.asarray(x, np.int64) for x in (pages, lengths, counts))
        table, copied, places = plan(*arrays)
        pairs = {(int(old), int(new)) for old, new in zip(*copied, strict=True)} - {(0, 0)}
        yield np.asarray(table).tolist(), pairs, np.stack(places).tolist()


def test_a_trace_and_the_host_plan_the_same_and_what_the_example_says():
    rng = np.random.default_rng(2)
    for _ in range(50):
        own = rng.permutation(np.arange(1, 40))[:12].reshape(3, 4)
        table = np.take(own, rng.integers(0, 3, 3), axis=0)  # some items are forks
        lengths, counts = rng.integers(0, 9, 3), rng.integers(0, 6, 3)
        one, other = planned(table, lengths, counts, 40, m=6)
        assert one == other
    for table, copied, (pages, slots) in planned([[3, 5, 0]] * 2, [6, 5], [3, 3], 6):
        assert table == [[3, 5, 1], [3, 2, 0]]
        assert copied == {(5, 2)}
        assert (pages, slots) == ([[5, 5, 1], [2, 2, 2]], [[2, 3, 0], [1, 2, 3]])


def test_a_page_that_an_item_began_takes_its_next_token():
    table, one = Table(np.zeros((1, 2), np.int64), np.asarray([0]), PAGE, 3), np.asarray([1])
    ledger = Ledger(table)
    began = ledger.place(table, one, 1).table
    following = ledger.place(table._replace(pages=began, lengths=one), one, 1)
    assert following.table.tolist() == began.tolist()
    assert following.copied[0].size == 0


def test_pages_of_caches_that_are_gone_are_used_again():
    twin = Twin(np.array, items=2, capacity=8, pages=6).append(1)
    memory = twin.cache.key
    for _ in range(20):
        twin = twin.append(6)
        assert twin.cache.key is memory
        twin.check()
        twin = twin.truncate([1, 1])
    emptied = twin._with(twin.cache.free([True, False]), [twin.tokens[0][:, :0], twin.tokens[1]])
    emptied.append(2).check()


def compiled_by_jax(traced):
    register()

    @jax.jit
    def step(cache, key, value, counts):
        traced.append(key)
        return cache.append(key, value, counts=counts)

    return step


def compiled_by_torch(traced):
    return torch.compile(nn.PagedCache.append, fullgraph=True, backend="eager")


@pytest.mark.parametrize(
    ("to", "compiled"),
    [
        (jnp.asarray, compiled_by_jax),
        pytest.param(torch.tensor, compiled_by_torch, marks=pytest.mark.slow),
    ],
    ids=["jax", "torch"],
)
def test_a_compiled_step_is_compiled_once_and_gives_the_same(to, compiled):
    traced = []
    step = compiled(traced)
    twin = Twin(to, capacity=16, pages=14).append(3, counts=[3, 0, 2]).fork([0, 0, 2])
    for counts in ([1, 1, 1], [2, 0, 2], [2, 2, 0], [0, 2, 1]):
        twin = twin.append(2, to(counts), step)
        twin.check()
    assert len(traced) == (to is jnp.asarray)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [4, 8])  # the table has no column, or the pool no page
def test_a_compiled_step_of_jax_loses_what_has_no_room(capacity):
    twin = Twin(jnp.asarray, items=2, capacity=capacity, pages=2).append(4)
    table = np.asarray(twin.cache.block_table)
    full = twin.append(2, jnp.asarray([2, 2]), compiled_by_jax([])).cache.truncate([4, 4])
    twin._with(full, twin.tokens).check()
    assert (np.asarray(full.block_table) == table).all()


def test_a_step_reads_no_lengths_from_the_device_of_the_cache(monkeypatch):
    read = []

    def convert(array, like):
        read.append(array)
        return convert_like(array, like)

    monkeypatch.setattr("polyattn.nn.page_plan.convert_like", convert)
    twin = Twin(torch.tensor, capacity=2, pages=40).append(3)
    assert len(read) == 2  # the table and the lengths
    for counts in (None, [1, 0, 2], None):
        twin = twin.append(2, counts)
    assert len(read) == 2
    twin = twin.truncate([1, 2, 3]).append(1)
    assert len(read) == 4
    twin.check()


def test_a_copy_is_a_value_of_its_own():
    twin = Twin(np.array).append(3)
    for change in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        copied = twin._with(change(twin.cache), twin.tokens)
        for each in (twin.append(2), copied.append(2), twin, copied):
            each.check()


def test_a_window_keeps_its_pages_only():
    twin, pages = Twin(np.array, items=1, capacity=64, pages=6), set()
    for _ in range(40):
        twin = twin._with(twin.cache.slide(5), twin.tokens).append(1)
        query = RNG.standard_normal((1, 2 * G, 1, D)).astype(np.float32)
        options = twin.cache.options({"window": (5, 0)})
        found = attention(query, twin.cache.keys, twin.cache.values, **options)[0]
        key, value = twin.tokens[0][..., :D], twin.tokens[0][..., D:]
        np.testing.assert_allclose(found, attention(query[0], key, value, window=(5, 0)), atol=2e-6)
        pages.add(twin.cache.key.shape[0])
    assert pages == {1 + 6}


MHA = nn.MultiHeadAttention.init(8, 2, like=np.zeros(1))
OF_BATCH = {"like": np.zeros(1), "batch": (2, 3)}


def counted(counts):
    return lambda cache, x: cache.append(x, x[..., :E], counts=counts)


REFUSED = {
    "shape": (lambda c, x: c.append(x[:1], x), "key must have the shape (3, 2, 'n', 4)"),
    "dtype": (lambda c, x: c.append(x.astype(float), x), "key must be float32 of numpy"),
    "item": (lambda c, x: c.fork([3]), "items must be integers from 0 to 2"),
    "length": (lambda c, x: c.truncate(-1), "lengths must be integers from 0; got -1"),
    "torch": (lambda c, x: c.truncate(torch.asarray([1.5, 1, 1])), "lengths must be integers fr"),
    "lengths": (lambda c, x: c.truncate([[1], [2]]), "one for each of the 3 items"),
    "few counts": (counted([1, 1]), "counts must be a number for each of the 3 items; got"),
    "one count": (counted(1), "counts must be a number for each of the 3 items; got"),
    "count": (counted([3, 0, 0]), "counts must be integers from 0 to 2; got"),
    "numbers": (lambda c, x: c.free([0, 2, 1]), "True or False for each of the 3 items"),
    "batch": (lambda c, x: MHA.cache(4, kind=nn.PagedCache, **OF_BATCH), "batch=(B,); got (2, 3)"),
    "no batch": (
        lambda c, x: MHA(np.zeros((3, 2, 8)), cache=MHA.cache(4, like=np.zeros(1))),
        "make the cache with batch=(3,)",
    ),
    "a name": (
        lambda c, x: nn.Transformer.init(5, 8, 2, 1, like=x, is_causal=True).caches(
            4, kind="paged"
        ),
        "kind must be a class of caches, such as nn.PagedCache; got 'paged'",
    ),
    "counts of a KVCache": (
        lambda c, x: MHA(np.zeros((1, 2, 8)), cache=MHA.cache(4, like=x), counts=[1]),
        "counts needs a PagedCache, which has a length for each item; got a KVCache",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name):
    act, said = REFUSED[name]
    with pytest.raises((TypeError, ValueError)) as error:
        act(Twin(np.array).append(2).cache, np.zeros((3, G, 2, D), np.float32))
    assert said in str(error.value)


@pytest.mark.parametrize("pool", ["key", "value"])
def test_a_pool_put_in_place_of_one_is_not_written_to(pool):
    cache, x = Twin(np.array).append(2).cache, np.ones((3, G, 2, D), np.float32)
    mine = getattr(cache, pool).copy()
    held = mine.copy()
    replace(cache, **{pool: mine}).append(x, x[..., :E])
    np.testing.assert_array_equal(mine, held)


def test_all_items_may_end():
    cache = Twin(np.array).append(2).cache.fork([])
    assert cache.lengths.shape == (0,)
    token = np.zeros((0, G, 1, D), np.float32)
    assert cache.append(token, token[..., :E]).lengths.shape == (0,)


@pytest.mark.parametrize(("device", "goes_on"), [("cuda", True), ("mps", False)])
def test_mps_copies_numbers_before_they_are_gone(device, goes_on):
    copies = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._to_copy.default:
                copies.append(bool(kwargs.get("non_blocking")))
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(allow_non_fake_inputs=True), Copies():
        like = torch.empty(2, dtype=torch.int64, device=device)
        assert to_device(np.arange(2), like).device.type == device
    assert copies == [goes_on]
