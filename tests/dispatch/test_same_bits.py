"""The block of `same_bits`: the kernels that run in it, and what caches keep apart."""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest
from optional import jax, torch

from polyattn import (
    UnsupportedError,
    attention,
    attention_partial,
    explain,
    merge,
    parallel,
    same_bits,
    scores,
)
from polyattn._base.same_bits import _context
from polyattn._dispatch import cache, registry
from polyattn.plugin.dense import Dense

X = np.ones((2, 4, 5, 8), np.float32)


class Keeping(Dense):
    """The formula, which says that it keeps bits; it records whether it was asked to."""

    name = "keeping"
    promises = Dense.promises | {"cut_invariant"}
    features = Dense.features - {"softcap"}

    def __init__(self):
        self.asked = []

    def only_on_request(self, problem):
        return "others are faster"

    def __call__(self, problem, operands, backend):
        self.asked.append(problem.same_bits)
        return super().__call__(problem, operands, backend)


@pytest.fixture(autouse=True)
def keeping(monkeypatch):
    """The last kernel of each backend, which declares the promise."""
    kernel = Keeping()
    monkeypatch.setattr(registry, "_ARRAY_API_KERNELS", (*registry._ARRAY_API_KERNELS, kernel))
    cache.forget()
    yield kernel
    cache.forget()


def run_of(library):
    """Return a function that calls attention on tensors of a library, compiled."""
    if library == "torch":
        function = torch.compile(lambda q: attention(q, q, q), backend="eager", fullgraph=True)
        return lambda: function(torch.from_numpy(X))
    if library == "jax":
        function = jax.jit(lambda q: attention(q, q, q))
        return lambda: function(X)
    return lambda: attention(X, X, X)


@pytest.mark.parametrize("library", ["numpy", "jax", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_call_inside_and_one_outside_are_two(keeping, library):
    """For equal calls that were planned, and for programs."""
    run = run_of(library)
    with same_bits():  # the first block of a process clears JAX's programs
        pass
    for turn in range(2):
        run()
        assert keeping.asked == []
        with same_bits():
            run()
            run()
        # A program of JAX calls the kernel where it is traced.
        assert set(keeping.asked) == {True} or (library == "jax" and turn == 1)
        keeping.asked.clear()


def test_explain_says_that_only_kernels_with_the_promise_run():
    with same_bits():
        inside = explain(X, X, X)
        named = explain(X, X, X, backend="numpy", kernel="dense")
    assert named.source == "backend='numpy', in same_bits(), kernel='dense'"
    assert (inside.chosen.kernel, named.chosen) == ("keeping", None)
    refused = {c.kernel: c.text for c in inside.candidates if c.status == "refused"}
    reason = "it does not promise the same bits for each cut of a sequence (cut_invariant)"
    assert refused == dict.fromkeys(("small", "tiled", "dense"), reason)
    note = "a row has the same bits for each cut of its sequence"
    assert inside.chosen.text == note
    assert note not in str(explain(X, X, X, kernel="keeping"))
    with same_bits(), pytest.raises(UnsupportedError, match=r"drop the options .* outside of the"):
        attention(X, X, X, score_mod=scores.softcap(3.0))


def test_a_call_without_scores_runs_on_any_kernel():
    empty, sinks = X[:, :, :0], np.arange(4, dtype=np.float32)
    for query, key in ((empty, X), (X, empty)):
        with same_bits():
            found = attention_partial(query, key, key, sinks=sinks)
        assert not found.output.any()
        assert (found.logsumexp == sinks[:, None]).all()


def test_a_block_holds_in_its_thread_only():
    with same_bits(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: explain(X, X, X).chosen.kernel).result() == "small"


@pytest.mark.needs("jax")
def test_a_program_that_another_task_traces_meanwhile_keeps_bits_too(keeping):
    compiled = run_of("jax")

    async def tasks():
        entered, traced = asyncio.Event(), asyncio.Event()

        async def within():
            with same_bits():
                entered.set()
                await traced.wait()
                compiled()

        async def beside():
            await entered.wait()
            compiled()
            attention(X, X, X)  # not of JAX
            traced.set()

        await asyncio.gather(within(), beside())

    asyncio.run(tasks())
    assert keeping.asked == [True]


@pytest.mark.needs("jax")
@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["in this thread", "in another"])
def test_generators_leave_their_blocks_in_any_order(keeping, is_elsewhere):
    def entered():
        with same_bits():
            yield

    def traced():
        keeping.asked.clear()
        run_of("jax")()
        return keeping.asked

    first, second = entered(), entered()
    next(first)
    next(second)
    if is_elsewhere:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(first.close).result()
    else:
        first.close()
    assert traced() == [True]
    second.close()
    assert traced() == []
    assert not _context.is_open_anywhere


def test_a_block_does_not_wait_while_another_thread_imports_jax(keeping, monkeypatch):
    module = ModuleType("jax")
    module.__spec__ = ModuleSpec("jax", None)
    module.__spec__._initializing = True
    monkeypatch.setitem(sys.modules, "jax", module)
    with same_bits():
        attention(X, X, X)
    assert keeping.asked == [True]


def test_merges_of_parts_of_the_keys_are_refused():
    with same_bits():
        one = attention_partial(X, X, X, kernel="keeping")
        assert merge(one).output is one.output
        with pytest.raises(UnsupportedError, match="depend on the parts"):
            merge(one, one)


def test_ranks_keep_bits_where_each_has_the_keys_of_its_rows(keeping):
    def attend(strategy):
        def of_rank(ranks):
            own = parallel.shard(X[:, :, :4], over=ranks)
            return parallel.attention(own, own, own, over=ranks, strategy=strategy)

        return parallel.run_threads(2, of_rank)

    with same_bits():
        for strategy in "gather", "heads":
            attend(strategy)
        for strategy in "ring", "decode":
            with pytest.raises(NotImplementedError, match=r"same_bits\(\) needs whole rows"):
                attend(strategy)
    assert keeping.asked == [True] * 4
