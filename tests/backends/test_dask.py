"""Dask's backend: what is in the graph, and what comes out of it."""

import re

import dask
import dask.array as da
import numpy as np
import pytest
from dask.core import flatten

import polyattn
from polyattn import (
    Gradients,
    attention,
    attention_backward,
    attention_partial,
    attention_vjp,
    attention_weights,
    explain,
    masks,
    scores,
)
from polyattn._base.threads import thread_count
from polyattn._dispatch import registry
from polyattn_dask.grid import spans_of
from polyattn_dask.layer import Layer
from polyattn_dask.sizes import count_groups, grouped

RNG = np.random.default_rng(0)
B, H, G, L, S, D, E = 2, 8, 4, 60, 70, 16, 5
Q, K, V = (RNG.normal(size=(B, h, n, d)) for h, n, d in ((H, L, D), (G, S, D), (G, S, E)))
OF_OUTPUT = RNG.normal(size=(B, H, L, E))
IDS = np.sort(RNG.integers(0, 4, (B, S)), axis=-1)
LONG = (1, 8, 204800, 64)


@pytest.fixture(autouse=True)
def _in_this_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


def cut(array, *chunks):
    return da.from_array(array, chunks=chunks)


def arrays():
    """Query, key and value, chunked differently: D in two, heads of the value in one."""
    return cut(Q, 1, 4, 13, 8), cut(K, 2, 2, 17, 16), cut(V, 1, 4, 20, 5)


#: Options that meet edges of chunks, with NumPy arrays beside the dask arrays.
OPTIONS = {
    "positions": {"mask": masks.positions(IDS[:, :L], IDS - 1, masks.window(1, 0))},
    "functions of indices": {
        "mask": lambda b, h, i, j: (b + h + i + 2 * j) % 3 != 0,
        "score_mod": lambda s, b, h, i, j: s * (1 + 0.1 * h) + 0.01 * b * (i - j),
    },
    "rows without chunks": {
        "window": (3, 0),
        "query_offset": -20,
        "sinks": RNG.normal(size=H),
        "dropout": (0.3, 7),
    },
    "offsets": {
        "query_offset": np.array([0, 30]),
        "is_causal": True,
        "score_mod": scores.alibi(H),
    },
    "a table of tiles": {
        "mask": masks.compile(lambda b, h, i, j: i // 8 == j // 8, L, S, tile=4),
        "bias": RNG.normal(size=(1, H, 1, S)),
    },
    "whole rows": {"normalizer": scores.sparsemax(), "is_causal": True},
}


@pytest.mark.parametrize(
    ("name", "group"), [(name, ("64 MiB", "4 kiB")[n % 2]) for n, name in enumerate(OPTIONS)]
)
def test_chunks_give_what_one_call_in_memory_gives(name, group):
    options = OPTIONS[name]
    with dask.config.set({"polyattn.group-size": group}):
        output = attention(*arrays(), **options)
    assert output.chunks == ((1, 1), (4, 4), (13, 13, 13, 13, 8), (5,))
    np.testing.assert_allclose(output, attention(Q, K, V, **options), atol=1e-13)


def test_partials_in_16_bits_are_joined_in_32():
    q, k, v = (RNG.normal(size=(2, 512, 64)).astype(np.float16) for _ in range(3))
    exact = attention(*(x.astype(np.float64) for x in (q, k, v)))
    with dask.config.set({"polyattn.group-size": 1}):
        output = attention(*(cut(x, 2, 64, 64) for x in (q, k, v)))
    assert output.dtype == np.float16
    errors = [np.sqrt(np.mean((x - exact) ** 2)) for x in (output.compute(), attention(q, k, v))]
    assert errors[0] < 1.05 * errors[1]


def test_results_of_16_bits_have_the_dtypes_that_are_declared():
    q, k, v = (cut(RNG.normal(size=(2, 8, 4)).astype(np.float16), 1, 4, 4) for _ in range(3))
    partial = attention_partial(q, k, v)
    gradients = attention_backward(q, k, v, partial, q, into=Gradients())
    found = [*partial, gradients.query, gradients.key, attention_vjp(q, k, v)[1](q).key]
    assert [x.dtype for x in found] == [x.compute().dtype for x in found]
    assert [str(x.dtype) for x in found] == ["float16", *["float32"] * 3, "float16"]


def with_empty_chunks(array):
    """Return a dask array with an empty chunk at the start or the end of each axis, in turn."""
    return cut(array, *[(n, 0) if axis % 2 else (0, n) for axis, n in enumerate(array.shape)])


def assert_blocks(found, expected):
    """Check each block against the declared chunks, and the whole."""
    assert found.shape == expected.shape
    keys = list(flatten(found.__dask_keys__()))
    for key, block in zip(keys, dask.get(dict(found.dask), keys), strict=True):
        assert block.shape == tuple(n[at] for n, at in zip(found.chunks, key[1:], strict=True))
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("lengths", [(1, 1, 1, 1, 1), (2, 1, 1, 0, 3)], ids=str)
def test_empty_chunks_of_every_axis_of_every_array(lengths):
    batch, heads, groups, rows, keys = lengths
    query, key, value, bias, of_output, seen, sinks, slopes, offset, ids, key_ids = (
        RNG.normal(size=size)
        for size in (
            (batch, heads, rows, 2), (batch, groups, keys, 2), (batch, groups, keys, 1),
            (1, heads, 1, keys), (batch, heads, rows, 1), (batch, 1, rows, keys), (heads,),
            (heads,), (batch,), (rows,), (batch, keys),
        )
    )  # fmt: skip

    def options(place):
        tokens = [place(x.astype(int)) for x in (ids, key_ids)]
        return {
            "bias": place(bias),
            "mask": masks.segments(*tokens) | masks.dense(place(seen > 0)),
            "sinks": sinks,
            "is_causal": True,
            "query_offset": place(offset.astype(int)),
            "score_mod": scores.alibi(place(slopes)),
        }

    def results(place):
        arrays, more = [place(x) for x in (query, key, value)], options(place)
        output, pullback = attention_vjp(*arrays, **more)
        gradients = pullback(place(of_output), place(of_output[..., 0]))
        slopes = gradients.score_mod.carried()[0][1]
        looks = [{}, {"per_key": True}] + ([{"top": 1, "rows": [0]}] if rows else [])
        found = [attention_weights(*arrays[:2], **look, **more) for look in looks]
        found = [x if hasattr(x, "dtype") else x.weights for x in found]
        return [output, *gradients[:5], slopes, *found]

    for found, expected in zip(results(with_empty_chunks), results(lambda x: x), strict=True):
        assert_blocks(found, expected)


# ---- the graph ----


def test_only_pairs_of_chunks_that_a_row_sees_are_in_the_graph():
    x = da.zeros(LONG, chunks=(-1, -1, 4096, -1), dtype="float32")
    output = attention(x, x, x, window=(1023, 0))
    assert len(output.dask) - len(x.dask) == 50
    ids = np.repeat(np.arange(8), 64)
    y = da.zeros((512, 4), chunks=(64, 4))
    output = attention(y, y, y, mask=masks.segments(ids))
    needed = output.dask.cull([(output.name, 3, 0)])
    assert sum(key[0] == y.name for key in needed if isinstance(key, tuple)) == 1
    assert explain(y, y, y, mask=masks.segments(ids)).chosen.remark.startswith("at most 64 of 64")


def test_equal_calls_have_one_name():
    x = da.from_array(np.ones((2, 8, 4)), chunks=(1, 4, 4))
    same = [attention(x, x, x, mask=masks.window(2, 0) & masks.prefix(5)).name for _ in range(2)]
    other = attention(x, x, x, mask=masks.window(2, 0) & masks.prefix(6)).name
    assert same[0] == same[1] != other


def test_two_tasks_of_one_key_are_refused():
    layer = Layer("call", [])
    layer.add(("fold", 0), int)
    with pytest.raises(RuntimeError, match=r"have the key .*'fold', 0"):
        layer.add(("fold", 0), float)


def test_tasks_use_one_thread(monkeypatch):
    seen = []
    original = polyattn.attention_partial

    def spy(*arrays, **options):
        seen.append((thread_count(), options["backend"]))
        return original(*arrays, **options)

    monkeypatch.setattr(polyattn, "attention_partial", spy)
    monkeypatch.setenv("POLYATTN_BACKEND", "dask")
    x = da.from_array(np.ones((2, 8, 4)), chunks=(1, 4, 4))
    attention(x, x, x).compute()
    assert set(seen) == {(1, "auto")}


# ---- explain ----


def test_explain_shows_pairs_tasks_bytes_and_rechunks():
    shape = LONG[1:]
    found = explain(shape, shape, shape, library="dask", chunks=4096, window=(1023, 0)).chosen
    assert found.remark == ("99 of 2,500 pairs of chunks, 50 tasks of up to 56.25 MiB, no rechunk")
    whole = explain(shape, shape, shape, library="dask", chunks=shape, window=(1023, 0)).chosen
    assert whole.remark.endswith("; the tokens are one chunk: cut them, as in x.rechunk({-2: 512})")
    q, k, v = arrays()
    mask = cut(np.ones((L, S), bool), 10, S)
    remark = explain(q, k, v, mask=mask, logsumexp=True).chosen.remark
    assert remark.endswith("after a rechunk of query, key, value, mask")
    with dask.config.set({"polyattn.group-size": 1}):
        remark = explain(q, k, v, logsumexp=True).chosen.remark
        output, logsumexp = attention_partial(q, k, v)
    made = sum("attention-" in str(key) for key in {*output.dask, *logsumexp.dask})
    assert f", {made} tasks" in remark


BLOCKS = np.repeat(np.arange(8), 8)
COUNTED = {
    "a window": {"window": (9, 3), "query_offset": -20},
    "a compiled mask": {"mask": masks.compile(lambda b, h, i, j: (i // 8 - j // 8) % 3 == 0, 64)},
    "its tiles": {
        "mask": masks.compile(lambda b, h, i, j: (i // 8 + j // 8) % 8 < 3, 64, tile=8)
        & masks.causal()
    },
    "ids of dask": {"mask": masks.segments(cut(BLOCKS, 8)), "is_causal": True},
    "an array of dask": {"mask": cut(np.tri(64, dtype=bool), 8, 8)},
    "whole rows": {
        "mask": masks.compile(lambda b, h, i, j: j // 8 % 2 == 0, 64, tile=8),
        "normalizer": scores.sigmoid(),
    },
    # What follows depends on the contents of arrays of NumPy, which the graph reads.
    "ids": {"mask": masks.segments(BLOCKS)},
    "offsets": {"is_causal": True, "query_offset": np.asarray([-10])},
}


@pytest.mark.parametrize(
    ("name", "group"), [(name, ("64 MiB", "1 kiB")[n % 2]) for n, name in enumerate(COUNTED)]
)
def test_explain_counts_what_the_graph_reads(name, group):
    options = COUNTED[name]
    query, key = (da.from_array(RNG.normal(size=(1, 2, 64, 4)), chunks=(1, 2, 8, 4)) for _ in "qk")
    with dask.config.set({"polyattn.group-size": group}):
        remark = explain(query, key, key, **options).chosen.remark
        graph = attention(query, key, key + 0, **options).dask
    tasks = [k for k in graph.to_dict() if k[0].startswith("attention-")]
    read = graph.get_all_dependencies()
    pairs = sum(block[0] == key.name for task in tasks for block in read[task])
    said = re.match(r"(at most )?(\d+) of 64 pairs of chunks, (\d+) tasks", remark)
    most, counted, made = said[1], int(said[2]), int(said[3])
    if most:
        assert (counted, made) > (pairs, len(tasks))
    else:
        assert (counted, made) == (pairs, len(tasks))


def test_explain_asks_masks_about_a_bounded_number_of_pairs():
    shape, mask = (1, 2**19, 64), masks.window(5, 0) | masks.global_tokens(3)
    options = {"library": "dask", "chunks": 2**10, "mask": mask}
    remark = explain(shape, shape, shape, **options).chosen.remark
    assert remark.startswith("at most 262,144 of 262,144 pairs of chunks")
    remark = explain(shape, shape, shape, window=(9999, 0), **options).chosen.remark
    assert remark.startswith("1,032 of 262,144 pairs of chunks")


def test_groups_of_consecutive_chunks_are_counted_as_they_are_made():
    columns = spans_of(tuple(RNG.integers(1, 9, 40).tolist()))
    for keys, whole_rows in ((0, False), (1, False), (14, False), (40, False), (2000, True)):
        with dask.config.set({"polyattn.group-size": keys}):
            for start, stop in RNG.integers(0, 41, (40, 2)).tolist():
                given = columns, range(start, stop), 2, whole_rows
                groups = grouped(*given)
                lengths = [sum(columns[n].length for n in group) for group in groups]
                assert count_groups(*given) == (len(groups), max(lengths, default=0))


# ---- refusals ----


@pytest.mark.parametrize(
    ("chunks", "library", "match"),
    [
        (4, "numpy", "chunks are of arrays of dask"),
        ((4, 4), "dask", "got"),
        (0, "dask", "at least 1"),
    ],
)
def test_wrong_and_unknown_chunks_are_refused(chunks, library, match):
    shape = (2, 8, 4)
    with pytest.raises(ValueError, match=match):
        explain(shape, shape, shape, chunks=chunks, library=library)
    x = da.from_array(np.ones((4, 6, 8)), chunks=2)
    unknown = x[x[:, 0, 0] > 0]
    with pytest.raises(ValueError, match="compute_chunk_sizes"):
        attention(unknown, unknown, unknown)


def test_arrays_of_query_planning_are_refused():
    collection = pytest.importorskip("dask.array._array_expr._collection")  # of dask 2025.2
    planned = object.__new__(collection.Array)
    with pytest.raises(TypeError, match=r"array\.query-planning to False"):
        attention(planned, planned, planned)


# ---- gradients and weights ----


def test_gradients_of_all_arguments():
    options = {
        "bias": RNG.normal(size=(B, 1, 1, S)),
        "sinks": RNG.normal(size=H),
        "score_mod": scores.alibi(RNG.random(H)) >> scores.relative_bias(RNG.normal(size=(8, H))),
        "softcap": 3.0,
        "window": (20, 0),
        "query_offset": -20,  # the first chunk of rows sees no chunk of keys
    }
    of_logsumexp = RNG.normal(size=(B, H, L))
    partial = attention_partial(Q, K, V, **options)
    expected = attention_backward(
        Q, K, V, partial, OF_OUTPUT, logsumexp_gradient=of_logsumexp, **options
    )
    qkv = cut(Q, 2, 4, 20, 8), cut(K, 1, 2, 35, 16), cut(V, 2, 4, 20, 5)
    _, pullback = attention_vjp(*qkv, **options)
    found = pullback(OF_OUTPUT, cut(of_logsumexp, 1, 8, 60))
    assert found.key.chunks == ((2,), (2, 2), (35, 35), (16,))
    for name in ("query", "key", "value", "bias", "sinks", "softcap", "scale"):
        one, other = getattr(found, name), getattr(expected, name)
        np.testing.assert_allclose(one, other, atol=1e-12, err_msg=name)
    for (_, one), (_, other) in zip(
        found.score_mod.carried(), expected.score_mod.carried(), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-11)


@pytest.mark.parametrize(
    ("options", "group", "look"),
    [
        ("rows without chunks", "64 MiB", {"rows": slice(10, 30), "per_key": True}),
        ("offsets", 1, {"top": 4, "rows": [5, 6, 7, 40, 12], "heads": [1, 2, 7]}),
        ("whole rows", "64 MiB", {"top": 40, "rows": [3, 59], "heads": 2}),
    ],
    ids=lambda x: ", ".join(x) if isinstance(x, dict) else str(x),
)
def test_weights(options, group, look):
    options = OPTIONS[options]
    expected = attention_weights(Q, K, **look, **options)
    with dask.config.set({"polyattn.group-size": group}):
        found = attention_weights(*arrays()[:2], **look, **options)
    if "top" not in look:
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=1e-13)
        return
    np.testing.assert_allclose(found.weights, expected.weights, atol=1e-13)
    positive = expected.weights > 1e-9
    np.testing.assert_array_equal(found.keys.compute()[positive], expected.keys[positive])


def test_the_largest_weights_are_not_looked_for_in_empty_chunks():
    key = da.ones((4, 2), chunks=((1, 0, 3), 2))
    found = attention_weights(key, key, is_causal=True, rows=[0], top=2)
    np.testing.assert_array_equal(found.weights, [[1, 0]])


def test_weights_read_only_the_chunks_of_the_rows():
    x = da.zeros((4, 4096, 8), chunks=(4, 256, 8))
    found = attention_weights(x, x, window=(255, 0), rows=[4000], top=3)
    known = attention_partial(x, x, x, window=(255, 0)).logsumexp
    again = attention_weights(x, x, window=(255, 0), rows=[4000], top=3, logsumexp=known)
    assert len(found.weights.dask.cull(found.weights.__dask_keys__())) < 30
    np.testing.assert_allclose(found.weights, again.weights)


def test_a_benchmark_times_the_result_and_not_the_making_of_its_graph():
    assert registry.load("dask") is None
    compiled = registry.loaded("dask").compile(lambda x: 2 * x)
    done = compiled(cut(Q, 1, 8, 30, 16))
    assert len(done.dask) == done.npartitions  # nothing is left to do
    np.testing.assert_array_equal(done, 2 * Q)


def test_parts_of_chunks_count_on_from_the_start_of_dropout():
    x = da.from_array(np.random.default_rng(0).standard_normal((2, 8, 4)), chunks=(2, 4, 4))
    start = np.asarray([0, 1, 2, 3])
    expected = attention(*[x.compute()] * 3, dropout=(0.5, 1, (0, 1, 2, 3)))
    found = attention(x, x, x, dropout=(0.5, da.asarray(1), start), kernel="chunked")
    np.testing.assert_allclose(found, expected)
    # An array that is not computed yet is for the kernels that know no chunks.
    dropout = 0.5, 1, da.from_array(start)
    with pytest.raises(polyattn.UnsupportedError, match="dropout's start must be numbers"):
        attention(x, x, x, dropout=dropout, kernel="chunked")
    assert explain(x, x, x, dropout=dropout).chosen.kernel != "chunked"
