"""A paged cache holds for each item what was appended to it, whoever shares its pages."""

import copy
import pickle
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from polyattn import attention, nn
from polyattn._dispatch.transfer import convert_like
from polyattn.integrations.jax import register
from polyattn.nn.page_plan import to_device

RNG = np.random.default_rng(3)
G, D, E, PAGE = 2, 4, 3, 4


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
@pytest.mark.parametrize("library", ["numpy", "torch", "strict"], indirect=True)
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


@pytest.mark.parametrize("name", ["jax", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_compiled_step_is_compiled_once_gives_the_same_and_loses_what_has_no_room(name):
    register()
    compiled, append = [], nn.PagedCache.append

    def traced(cache, key, value, counts):
        compiled.append(key)
        return append(cache, key, value, counts=counts)

    if name == "jax":
        to, step = jnp.asarray, jax.jit(traced)
    else:
        to, step = torch.tensor, torch.compile(append, fullgraph=True, backend="eager")
    twin = Twin(to, capacity=16, pages=14).append(3, counts=[3, 0, 2]).fork([0, 0, 2])
    for counts in ([1, 1, 1], [2, 0, 2], [2, 2, 0], [0, 2, 1]):
        twin = twin.append(2, to(counts), step)
        twin.check()
    full, lengths = twin, [tokens.shape[1] for tokens in twin.tokens]
    for _ in range(8):
        full = full.append(2, to([2, 2, 2]), step)
    twin._with(full.cache.truncate(lengths), twin.tokens).check()
    assert len(compiled) == (name == "jax")


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


def test_only_cuda_goes_on_before_numbers_are_copied(monkeypatch):
    goes_on = []
    with FakeTensorMode():
        likes = [torch.empty(2, dtype=torch.int64, device=name) for name in ("cuda", "mps")]
    monkeypatch.setattr(
        torch.Tensor, "to", lambda *given, non_blocking: goes_on.append(non_blocking)
    )
    for like in likes:
        to_device(np.arange(2), like)
    assert goes_on == [True, False]
