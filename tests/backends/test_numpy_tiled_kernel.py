"""NumPy's kernels: the same bits on any threads and in any batch, kinds of pass, conversions."""

import math

import ml_dtypes
import numpy as np
import pytest
from arrays import close, draw, formula

import polyattn
import polyattn_numpy.tiled_kernel as module
from polyattn import attention, attention_partial, explain, masks, scores
from polyattn._core.expressions.replacements import Distance
from polyattn._core.tiles.indices import Indices
from polyattn_numpy.tile_scores import convert
from polyattn_numpy.tiled_kernel import NumpyTiled

RNG = np.random.default_rng(3)
ITEMS, HEADS, GROUPS = 2, 4, 2
LENGTH, KEYS = 300, 413  # so many that tiles of `small_tiles` follow a table
SHORT = 128  # so few that the scores of a head are one tile
ROW_IDS, KEY_IDS = (np.sort(RNG.integers(0, 4, (ITEMS, n))) for n in (LENGTH, KEYS))
LENGTHS = np.array([120, 7])
IN_STRIPES = np.kron(RNG.random((1, HEADS, 5, 7)) > 0.5, np.ones((64, 64), bool))


#: Calls whose scores are one tile, calls that follow a table of their mask, and all others.
AT_ONCE = {
    "short, causal": {"is_causal": True},
    "short, padding on both sides": {"mask": ~masks.prefix(3) & masks.padding(LENGTHS + 3)},
    "short, array with holes": {"mask": RNG.random((ITEMS, 1, 1, SHORT)) > 0.3},
}
BY_TABLE = {
    "segments & causal": {"mask": masks.segments(ROW_IDS, KEY_IDS) & masks.causal()},
    "array by head": {"mask": IN_STRIPES[..., :LENGTH, :KEYS]},
}
OTHERS = {
    "mask function": {"mask": lambda b, h, i, j: (i + j + h) % 3 != 0},
    "rules": {
        **{"sinks": np.linspace(-1, 1, HEADS, dtype=np.float32), "softcap": 2.0},
        **{"bias": np.linspace(-2, 2, KEYS, dtype=np.float32), "score_mod": scores.alibi(HEADS)},
    },
}


def qkv(length=LENGTH, keys=KEYS, seed=0):
    shapes = (
        (ITEMS, heads, n, 16) for heads, n in ((HEADS, length), (GROUPS, keys), (GROUPS, keys))
    )
    return draw(*shapes, seed=seed)


@pytest.fixture
def at_once(monkeypatch):
    """Return the list of tasks that are tried at once, and whether each was written so."""
    found, genuine = [], module.write_at_once

    def watched(call, output, logsumexp, task, scratch):
        found.append((task, genuine(call, output, logsumexp, task, scratch)))
        return found[-1][1]

    monkeypatch.setattr(module, "write_at_once", watched)
    return found


def bits(arrays):
    return [np.ascontiguousarray(x).tobytes() for x in arrays]


def of_item(options, item):
    """Return the options of a call with one item of the batch."""

    def own(name, x):
        by_item = not callable(x) and x.ndim and x.shape[0] == ITEMS
        return x[item : item + 1] if by_item else x

    mask = options.get("mask")
    if isinstance(mask, masks.Mask):
        return options | {"mask": mask.map(own)}
    return options if mask is None else options | {"mask": own("", mask)}


@pytest.mark.parametrize("name", [*AT_ONCE, *BY_TABLE, *OTHERS])
def test_threads_and_other_items_change_no_bit(name, at_once, monkeypatch):
    options = (AT_ONCE | BY_TABLE | OTHERS)[name]
    arrays = qkv(SHORT, SHORT) if name in AT_ONCE else qkv()
    monkeypatch.setattr(NumpyTiled, "tile", NumpyTiled.tile if name in AT_ONCE else 2**14)
    arrays[0][1] *= 1 if name in AT_ONCE else 60  # the second item with maxima

    def run(arrays, options):
        return attention_partial(*arrays, kernel="tiled", **options)

    together = run(arrays, options)
    for count in (1, 5):
        with polyattn.use_threads(count):
            assert bits(run(arrays, options)) == bits(together)
    for item in range(ITEMS):
        alone = run([x[item : item + 1] for x in arrays], of_item(options, item))
        assert bits(alone) == bits(x[item : item + 1] for x in together)
    assert bool(at_once) == (name in AT_ONCE)
    assert all(done for _, done in at_once)


STEP, CACHE = (1, 4, 1, 8), (1, 2, 16, 8)


@pytest.mark.parametrize(
    ("query", "key", "options", "kernel"),
    [
        ((1000, 4, 16, 8), (1000, 4, 16, 8), {}, "small"),
        ((1, 4, 40, 8), (1, 4, 40, 8), {}, "tiled"),
        ((1000, 4, 40, 8), (1000, 4, 40, 8), {}, "tiled"),
        ((2, 4, 16, 8), (2, 4, 16, 8), {"is_causal": True, "bias": (16, 16)}, "small"),
        ((2, 4, 40, 8), (2, 4, 40, 8), {"mask": masks.padding(np.ones(2, int))}, "tiled"),
        ((2, 4, 16, 8), (2, 4, 16, 8), {"dropout": (0.1, 1)}, "dense"),
        (STEP, CACHE, {"is_causal": True}, "small"),
        (STEP, CACHE, {"dtype": "float16"}, "dense"),
    ],
)
def test_the_shape_of_an_item_decides_the_kernel(query, key, options, kernel):
    assert explain(query, key, key, **options).chosen.kernel == kernel


# ---- scores of one tile ------------------------------------------------------------------------


def test_arrays_that_blas_does_not_read_are_left_to_the_other_passes(at_once):
    arrays = qkv(SHORT, SHORT)
    found = attention(*(x.astype(">f4") for x in arrays), is_causal=True, kernel="tiled")
    close(found.astype("float32"), attention(*arrays, is_causal=True, kernel="dense"))
    assert not at_once


def test_keys_that_an_item_does_not_see_are_left_out(at_once):
    arrays, options = qkv(SHORT, SHORT), {"mask": masks.padding(LENGTHS)}
    expected = attention_partial(*arrays, kernel="dense", **options)
    arrays[1][1, :, 7:] = arrays[2][1, :, 7:] = np.nan
    close(attention_partial(*arrays, kernel="tiled", **options), expected)
    assert [done for _, done in at_once] == [True] * ITEMS


def test_a_head_of_large_scores_or_without_a_key_is_left_to_the_other_passes(at_once):
    query, key, value = qkv(SHORT, SHORT)
    value = np.tile(value, 8)  # wider than its keys are many, so that the weights are divided
    options = {"mask": np.arange(ITEMS)[:, None, None, None] != 1}  # item 1 sees nothing
    calm = attention(query, key, value, kernel="tiled", **options)
    query[0, 3] *= 1e4
    found = attention(query, key, value, kernel="tiled", **options)
    left = {(task.batch.start, task.heads.start) for task, done in at_once if not done}
    assert {(0, 1), (1, 0)} <= left
    close(found, attention(query, key, value, kernel="dense", **options), roundings=400)
    assert not found[1].any()
    assert bits([found[0, :2]]) == bits([calm[0, :2]])


# ---- three kinds of pass -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_hidden_value_changes_no_bit_of_a_whole_tile(dtype, passes):
    query, key, value = draw(*[(1, 2, 512, 64)] * 3, dtype=dtype)
    expected = attention(query, key, value, is_causal=True)
    key[0, 0, 300], value[0, 0, 300], value[0, 1, 511] = math.nan, math.nan, -math.inf
    passes.clear()
    found = attention(query, key, value, is_causal=True)
    assert set(passes) == {"fast", "poison_safe", "stable"}  # the last rows see them
    for head, end in ((0, 300), (1, 511)):
        assert bits([found[:, head, :end]]) == bits([expected[:, head, :end]])
    assert not np.isfinite(found[:, 0, 300:]).any()


def test_the_sums_of_parts_of_the_keys_do_not_overflow_together():
    query, value = np.ones((1, 1, 1), np.float32), np.ones((1, 64, 1), np.float32)
    kernel = NumpyTiled()
    kernel.tile = 2**10  # so that a part has 32 keys
    output, logsumexp = attention_partial(query, 85 * value, value, kernel=kernel)
    np.testing.assert_allclose(output, 1, rtol=1e-6)
    np.testing.assert_allclose(logsumexp, 85 + math.log(64), rtol=1e-6)


def test_distances_that_underflow_are_computed_once(monkeypatch):
    # Without maxima exp(-distance) is 0 here, and a second pass would compute all distances again.
    count, between = [], Distance.between

    def counted(self, *arguments):
        count.append(1)
        return between(self, *arguments)

    query, key = 100 * np.random.default_rng(2).random((2, 1, 1, 256, 16), dtype=np.float32)
    with polyattn.use_threads(1):
        monkeypatch.setattr(Distance, "between", counted)
        found = attention(query, key, key, similarity=scores.distance(), kernel="tiled")
        tiles_computed = len(count)
        expected = attention(query, key, key, similarity=scores.distance(), kernel="dense")
    assert tiles_computed == 1
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# ---- the kernel small, and conversions ---------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", ">f4"])
def test_a_row_of_absent_keys_is_zero_and_the_output_keeps_its_byte_order(dtype):
    query = np.array([[[1.0, 0], [2, 0]]], dtype)
    key = np.array([[[-math.inf, 0], [-math.inf, 0]]], dtype)
    value = np.ones_like(key)
    output, logsumexp = attention_partial(query, key, value, kernel="small")
    assert output.dtype == dtype
    np.testing.assert_array_equal(output, 0 * value)
    np.testing.assert_array_equal(logsumexp, [[-math.inf] * 2])
    query[0, 1], key[0, 1] = [0, 1], [0, 3]  # NaN for the first key, so for the row
    assert np.isnan(attention(query, key, value, kernel="small")[0, 1]).all()


def test_positions_are_looked_at_in_the_first_call_only(monkeypatch):
    (query,) = draw((2, 4, 5, 8))
    options = {"mask": masks.window(2, 0) | masks.prefix(1), "score_mod": scores.alibi(4)}
    first = attention(query, query, query, **options)
    monkeypatch.setattr(Indices, "__init__", None)
    assert bits([attention(query, query, query, **options)]) == bits([first])


@pytest.mark.parametrize("shape", [(2, 4, 5, 5), (1, 4, 1, 5)], ids=["whole", "broadcast"])
def test_scores_that_a_function_returns_are_not_written_to(shape):
    (query,), (own,) = draw((2, 4, 5, 8)), draw(shape, seed=1)
    before = own.copy()
    found = attention(query, query, query, score_mod=lambda *_: own, kernel="small")
    close(found, formula(0 * query, query, query, bias=own)[0])
    assert bits([own]) == bits([before])


def test_a_hidden_nan_changes_no_bit_of_another_item():
    query, key, value = draw(*[(2, 2, 16, 8)] * 3)
    value[1, :, 15] = math.nan
    options = {"mask": np.arange(16) < 15, "kernel": "small"}
    together = attention_partial(query, key, value, **options)
    assert np.isfinite(together.output).all()
    alone = attention_partial(query[:1], key[:1], value[:1], **options)
    assert bits(alone) == bits(x[:1] for x in together)


ALL = np.arange(2**16, dtype=np.uint16).view(np.float16)
FINITE = ALL[np.isfinite(ALL)]


@pytest.mark.parametrize(
    "block",
    [
        ALL, FINITE[:0], FINITE[:600].reshape(20, 30).T,
        ALL.astype(">f2"), ALL.view(ml_dtypes.bfloat16), FINITE.astype(np.float64),
    ],
    ids=["all", "empty", "transposed", "bytes", "bfloat16", "float64"],
)  # fmt: skip
def test_each_number_is_as_numpy_converts_it(block):
    found = np.full(block.shape, 7, np.float32)
    convert(block, found)
    expected = block.astype(np.float32)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))
