"""Strategies on threads: the cases of the conformance suite, and what a call may get wrong."""

import itertools
import re
import threading
from functools import partial

import numpy as np
import on_ranks
import pytest
from arrays import draw
from optional import jnp, torch

from polyattn import attention, attention_vjp, masks, parallel, scores
from polyattn.parallel.call import ParallelCall

SIZE = 4
#: A case for each feature, and the corners that differ between one device and many.
VALUES = (
    "plain, bfloat16", "mask function x score_mod", "window x offset array", "rank 2",
    "sinks x grouped heads", "similarity x score norm", "selected keys, dropout, bias, sinks",
)  # fmt: skip
GRADIENTS = "dropout x causal and sinks", "alibi value, float64", "sigmoid, float64"


def on_threads(function, name):
    """Run all strategies on one set of threads."""

    def check(ranks):
        for strategy, layout in on_ranks.BOTH:
            function(name, ranks, strategy, layout)

    parallel.run_threads(SIZE, check)


@pytest.mark.parametrize("name", VALUES)
def test_each_strategy_computes_what_one_device_does(name):
    on_threads(on_ranks.check_value, name)


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradients_of_each_strategy(name):
    on_threads(on_ranks.check_gradients, name)


def attended(ranks, whole, *, strategy, layout="contiguous", **options):
    """Return the output of all tokens, of one array that is query, key and value."""
    own = on_ranks.shares([whole] * 3, ranks, strategy, layout)
    output = parallel.attention(*own, over=ranks, strategy=strategy, layout=layout, **options)
    return on_ranks.joined(output, ranks, strategy, layout)


@pytest.mark.parametrize(
    ("strategy", "options", "pairs"),
    [
        ("ring", {"layout": "zigzag", "is_causal": True}, (9, 9, 9, 9)),  # 2n + 1
        ("ring", {"is_causal": True}, (1, 2, 3, 4)),
        ("ring", {"is_causal": True, "window": (8, None)}, (1, 2, 2, 2)),
        ("ring", {"window": (0, 0)}, (1, 1, 1, 1)),
        ("gather", {}, (4, 4, 4, 4)),
        ("heads", {}, (4, 4, 4, 4)),
        ("decode", {}, (1, 1, 1, 1)),
    ],
)
def test_a_strategy_computes_and_sends_what_explain_says(monkeypatch, strategy, options, pairs):
    query, key, value = draw((3, 4, 8, 4), (3, 4, 8, 4), (3, 4, 8, 6))
    said = parallel.explain(query, key, value, over=SIZE, strategy=strategy, **options).chosen
    called, partial, sent = [0] * SIZE, ParallelCall.partial, []

    def counted(call, arrays, block, **how):
        called[int(threading.current_thread().name)] += 1
        return partial(call, arrays, block, **how)

    def run(ranks):
        threading.current_thread().name = str(ranks.rank)
        parallel.attention(query, key, value, over=ranks, strategy=strategy, **options)
        sent.append(ranks.sent)

    monkeypatch.setattr(ParallelCall, "partial", counted)
    parallel.run_threads(SIZE, run)
    assert said.pairs == pairs
    assert strategy != "ring" or pairs == tuple(called)
    assert sent == [said.bytes_sent] * SIZE


@pytest.mark.parametrize(
    ("window", "offset"),
    [((1, 0), 0), ((None, 2), -3), ((2**40, None), 2**40), ((2**40, 2**31), -(2**40))],
    ids=str,
)
def test_chunks_that_see_one_another(window, offset):
    """Also for ranks of 32 bits, as JAX has them."""
    options = {"window": window, "query_offset": offset, "layout": "zigzag"}
    call = parallel.explain((6, 2), (4, 2), (4, 2), over=2, **options).call
    left, right = (2**50 if end is None else end for end in window)
    ahead = np.arange(8) - np.arange(12)[:, None] - offset
    seen = (-left <= ahead) & (ahead <= right)
    for rows, keys in itertools.product(range(4), repeat=2):
        block = seen[3 * rows : 3 * rows + 3, 2 * keys : 2 * keys + 2]
        assert call.is_full(rows, keys) == block.all()
        assert not block.any() or call.is_visible(rows, keys)
        assert call.is_visible(np.int32(rows), np.int32(keys)) == call.is_visible(rows, keys)


# ---- the choice ----


WIDE, LONG = (1, 8, 1024, 64), (1, 6, 2**20, 64)


@pytest.mark.parametrize(
    ("shape", "options", "strategy", "said"),
    [
        (WIDE, {}, "heads", "CHOSEN"),
        ((1, 6, 1024, 64), {}, "gather", "6 query heads are not a multiple of 4 ranks"),
        (LONG, {}, "ring", "all keys and values take 12.0 GiB on every rank"),
        (LONG, {"normalizer": scores.sparsemax()}, "gather", "scores.sparsemax() needs whole rows"),
    ],
)
def test_auto_takes_the_first_that_suits_and_says_why(shape, options, strategy, said):
    explained = parallel.explain(shape, shape, shape, over=4, **options)
    assert explained.chosen.strategy == strategy
    assert said in str(explained)
    assert parallel.explain(LONG, LONG, LONG, over=4, strategy="heads").chosen is None


# ---- what a call may get wrong ----


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"strategy": "rings"}, ValueError, "strategy must be one of auto, heads, gather, ring"),
        ({"layout": "...LHD"}, ValueError, 'layout must be "contiguous" or "zigzag"; arrays have'),
        ({"layout": "zigzag"}, ValueError, "query has 3 tokens on this rank"),
        ({"strategy": "heads"}, NotImplementedError, "'heads' cannot compute .* H = 3 query heads"),
        ({"dropout": 0.1}, TypeError, "dropout must be a pair (rate, seed)"),
        ({"strategy": "ring", "normalizer": scores.sigmoid()}, NotImplementedError, "whole rows"),
        ({"windows": (1, 1)}, TypeError, "unexpected keyword argument 'windows'"),
        ({"mask": np.ones((3, 3), bool)}, ValueError, "mask"),
        ({"over": 4}, TypeError, "over must be the name of a mesh axis .* got a int"),
        ({"over": "ring"}, ValueError, "'ring' names a mesh axis that is absent here"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_sent(options, error, message):
    x = np.ones((3, 3, 4))

    def attend(ranks):
        try:
            parallel.attention(x, x, x, **{"over": ranks, **options})
        finally:
            assert ranks.sent == 0

    with pytest.raises(error, match=re.escape(message) if message.endswith(")") else message):
        parallel.run_threads(4, attend)


def test_an_error_in_one_rank_ends_the_others_with_a_message():
    x, ended = np.ones((4, 3, 4)), []

    def attend(ranks):
        try:
            if ranks.rank == 2:
                raise ZeroDivisionError("rank 2 went wrong")
            parallel.attention(x, x, x, over=ranks, strategy="ring")
        except RuntimeError as error:
            ended.append(str(error))
            raise

    with pytest.raises(ZeroDivisionError, match="rank 2 went wrong"):
        parallel.run_threads(4, attend)
    assert len(ended) == 3
    assert all("because rank 2 raised ZeroDivisionError" in message for message in ended)


def test_a_rank_that_does_not_come_is_waited_for_and_no_longer():
    x = np.ones((4, 3, 4))

    def attend(ranks):
        if ranks.rank:
            parallel.attention(x, x, x, over=ranks, strategy="gather")

    with pytest.raises(TimeoutError, match="all ranks must make the same calls"):
        parallel.run_threads(2, attend, timeout=0.1)


# ---- calls that differ ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([{}, {"query": np.ones((4, 6, 4))}], "query.shape is (4, 10, 4) on rank 0, (4, 6, 4) on "),
        ([{}] * 5 + [{"scale": 1}], "; scale is 0.5 on rank 0, 1 on rank 5"),
        (
            [{"layout": "zigzag", "query": np.ones((4, 7, 4))}, {}],
            "layout is 'zigzag' on rank 0, 'c",
        ),
        ([{}, {"query": np.ones((4, 10, 4), np.float32)}], "query.dtype is "),
        ([{}, {"strategy": "none"}], "strategy is 'gather'"),
        ([{}, {"is_causal": True}], "is_causal is not given"),
        ([{}, {"window": (3, np.int64(0))}], "window is not given"),
        ([{}, {"dropout": (0.5, 4)}], "dropout is (0.5, 3)"),
        ([{}, {"mask": masks.padding([3, 5])}], "mask is masks.prefix(3)"),
        ([{}, {"sinks": None}], "sinks is <(4,) "),
        ([{}, {"query_offset": np.asarray([1, 1])}], "query_offset is 1"),
        ([{}, {"score_mod": lambda s, b, h, i, j: s}], "score_mod is not given"),
        ([{}, {"windows": (3, 3)}], "windows is not given"),
    ],
)
def test_the_error_of_calls_that_differ_says_what_differs_on_which_ranks(options, message):
    x, errors = np.ones((4, 10, 4)), []
    call = {
        "query": x, "strategy": "gather", "layout": "contiguous", "scale": 0.5, "query_offset": 1,
        "dropout": (0.5, 3), "mask": masks.prefix(3), "sinks": np.ones(4),
    }  # fmt: skip

    def attend(ranks):
        with pytest.raises(ValueError, match="all ranks must make the same call; ") as caught:
            parallel.attention(key=x, value=x, over=ranks, **call | options[ranks.rank])
        errors.append(str(caught.value))
        assert ranks.sent == 0

    parallel.run_threads(len(options), attend)
    assert errors == errors[:1] * len(options)
    assert message in errors[0]
    assert f" on rank {len(options) - 1}" in errors[0]


def test_gradients_that_differ_stop_all_ranks():
    x = np.ones((4, 10, 4))

    def attend(ranks):
        _, pullback = parallel.attention_vjp(x, x, x, over=ranks)
        with pytest.raises(ValueError, match=r"output_gradient.shape is \(4, 10, 4\) on rank 0, "):
            pullback(x[:, ranks.rank :])

    parallel.run_threads(2, attend)


def test_what_each_rank_may_choose_and_how_it_spells_a_number_are_no_difference():
    x = np.ones((4, 2, 4))
    calls = [
        {"kernel": "dense", "window": (1, 0), "mask": None, "dropout": (0.5, 3)},
        {"backend": "numpy", "window": [np.int64(1), 0], "dropout": [0.5, np.uint8(3)]},
    ]
    one, other = parallel.run_threads(
        2, lambda ranks: parallel.attention(x, x, x, over=ranks, **calls[ranks.rank])
    )
    assert one.shape == other.shape


@pytest.mark.parametrize("to", [np.asarray, torch.tensor, jnp.asarray])
def test_a_communicator_of_six_methods_gathers_bytes(to):
    def gathered(ranks):
        message = bytes([ranks.rank, 255, 0])
        return parallel.Communicator.gather_bytes(ranks, message, to([1.0]))

    assert parallel.run_threads(3, gathered)[1] == [bytes([rank, 255, 0]) for rank in range(3)]


# ---- numbers from the host ----

IDS, SEEN = [0, 0, 0, 1, 1, 1, 2, 2], np.random.default_rng(2).random((8, 8)) > 0.2
ON_HOST = {
    "masks": {
        "mask": (masks.padding([5, 8], np.asarray([8, 6])) & masks.prefix([7, 8]))
        | (masks.segments(np.asarray(IDS, np.int8)) & masks.dense(SEEN))
        | (masks.positions(IDS, IDS[::-1]) & masks.tree([-1, 0, 0, 1, -1, 3, 3, 6]))
    },
    "numbers": {
        "is_causal": True,
        "query_offset": [0, 1],
        "dropout": (0.2, np.int64(3), [1] * 4),
        "bias": np.linspace(0, 1, 64).reshape(8, 8),
        "sinks": np.ones(4, np.float32),
        "similarity": scores.additive(np.linspace(0, 1, 4)),
        "score_mod": scores.alibi([0.1, 0.2, 0.3, 0.4]) >> scores.relative_bias(np.ones((8, 4))),
    },
}


@pytest.mark.parametrize("options", ON_HOST.values(), ids=ON_HOST)
def test_numbers_from_the_host_go_where_the_query_is(options):
    (x,) = draw((2, 4, 8, 4), dtype="float64")
    expected, given = attention(x, x, x, **options), torch.from_numpy(x)
    for strategy in on_ranks.STRATEGIES:
        attend = partial(attended, whole=given, strategy=strategy, **options)
        found = parallel.run_threads(2, attend)
        np.testing.assert_allclose(found[1], expected, atol=1e-14)
        said = parallel.explain(given, given, given, over=1, strategy=strategy, **options)
        assert said.chosen.strategy == strategy


def test_numbers_from_the_host_have_gradients_beside_tensors():
    (x,) = draw((2, 4, 8, 4), dtype="float64")
    options = {"bias": np.zeros((8, 8)), "sinks": [0.5] * 4, "score_mod": scores.alibi([0.5] * 4)}
    expected = attention_vjp(x, x, x, **options)[1](x)

    def attend(ranks):
        own = parallel.shard(torch.from_numpy(x), over=ranks)
        return parallel.attention_vjp(own, own, own, over=ranks, **options)[1](own)

    one, other = parallel.run_threads(2, attend)
    for name in ("bias", "sinks"):
        found = getattr(one, name) + getattr(other, name)
        np.testing.assert_allclose(found, getattr(expected, name), atol=1e-14)
    slopes = [found.score_mod.slopes for found in (one, other)]
    np.testing.assert_allclose(sum(slopes), expected.score_mod.slopes, atol=1e-14)


# ---- layouts ----


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_layouts_are_undone_and_know_their_positions(layout):
    (x,) = draw((2, 24, 3))
    permuted = parallel.permute(x, 3, layout=layout)
    np.testing.assert_array_equal(parallel.unpermute(permuted, 3, layout=layout), x)

    def check(ranks):
        own = parallel.shard(x, over=ranks, layout=layout)
        at = parallel.positions(own, over=ranks, layout=layout)
        np.testing.assert_array_equal(own, x[:, at])
        np.testing.assert_array_equal(own, permuted[:, 8 * ranks.rank : 8 * ranks.rank + 8])

    parallel.run_threads(3, check)


def test_tokens_that_cannot_be_shared_are_refused():
    with pytest.raises(ValueError, match=r"10 tokens, which 2 ranks .* pad it to 12 tokens"):
        parallel.permute(np.ones((10, 3)), 2)
    for size, error in ((0, ValueError), (True, TypeError)):
        with pytest.raises(error, match="the number of ranks must be"):
            parallel.explain((8, 2), (8, 2), (8, 2), over=size)
