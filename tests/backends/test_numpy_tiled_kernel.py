"""NumPy's tiled kernel: the same bits on any threads and in any batch, and its kinds of pass."""

import math

import numpy as np
import pytest

import polyattn
from polyattn import attention, attention_partial, explain, scores
from polyattn._core.expressions.replacements import Distance
from polyattn._dispatch import registry
from polyattn_numpy.tiled_kernel import NumpyTiled

KERNEL = "tiled"
OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window": (100, 30)},
    "bias": {"bias": np.linspace(-2, 2, 700, dtype=np.float32)},
    "mask": {"mask": np.random.default_rng(5).random((700, 700)) > 0.4},
    "mask function": {"mask": lambda b, h, i, j: (i + j + h) % 3 != 0},
    "score_mod": {"score_mod": lambda s, b, h, i, j: s - 0.01 * abs(i - j) + 0.1 * h},
    "sinks": {"sinks": np.linspace(-1, 1, 8, dtype=np.float32)},
    "softcap": {"softcap": 2.0},
}


def randn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.fixture
def qkv():
    return randn(2, 8, 700, 32), randn(2, 4, 700, 32, seed=1), randn(2, 4, 700, 32, seed=2)


def bits(result):
    return [np.ascontiguousarray(x).tobytes() for x in result]


@pytest.mark.parametrize("option", OPTIONS)
def test_threads_and_other_items_change_no_bit(qkv, option):
    options = {"kernel": KERNEL, **OPTIONS[option]}
    found = [attention_partial(*qkv, **options)]
    for count in (1, 2, 5):
        with polyattn.use_threads(count):
            found.append(attention_partial(*qkv, **options))
    assert len({tuple(bits(one)) for one in found}) == 1
    alone = attention_partial(*(x[1:] for x in qkv), **options)
    assert bits(alone) == bits(x[1:] for x in found[0])


@pytest.mark.parametrize("dtype", [">f4", "<f8", ">f2"])
def test_any_byte_order_and_stride(dtype, qkv):
    q, k, v = (x.astype(dtype) for x in qkv)
    want = attention(*(x.astype(x.dtype.newbyteorder("=")) for x in (q, k, v)))
    got = attention(q, np.asfortranarray(k), v[..., ::-1][..., ::-1])
    np.testing.assert_allclose(np.asarray(got, "f8"), np.asarray(want, "f8"), atol=1e-3)


def test_the_kernel_stands_in_place_of_the_cores():
    shape = (1, 2, 64, 8)
    names = [c.kernel for c in explain(shape, shape, shape, backend="numpy").candidates]
    assert names == ["small", "tiled", "dense"]
    assert isinstance(registry.kernels_of(registry.loaded("numpy"))[1], NumpyTiled)


@pytest.mark.parametrize(("length", "kernel"), [(16, "small"), (40, "tiled")])
@pytest.mark.parametrize("batch", [1, 1000])
def test_an_item_has_one_kernel_in_any_batch(batch, length, kernel):
    shape = (batch, 4, length, 8)
    assert explain(shape, shape, shape).chosen.kernel == kernel


# ---- three kinds of pass -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "options", "kinds"),
    [
        (1, {"is_causal": True}, {"fast"}),
        (1, {"mask": np.arange(700)[:, None] > 350 + 0 * np.arange(700)}, {"fast"}),
        (100, {}, {"fast", "stable"}),
    ],
    ids=["small scores", "rows without keys", "large scores"],
)
def test_a_maximum_is_looked_for_only_where_scores_are_large(factor, options, kinds, qkv, passes):
    q, k, v = qkv
    out = attention(q * factor, k, v, **options)
    assert set(passes) == kinds
    if "mask" in options:
        assert (out[:, :, :351] == 0).all()


def test_hidden_nan_is_left_out_in_a_poison_safe_pass(qkv, passes):
    q, k, v = qkv
    want = attention(q, k, v, is_causal=True)
    k, v = k.copy(), v.copy()
    k[0, 1, -1], v[1, 2, -1] = math.nan, math.inf
    passes.clear()
    got = attention(q, k, v, is_causal=True)
    assert set(passes) == {"fast", "poison_safe", "stable"}  # the last row sees them
    assert bits([got[:, :, :-1]]) == bits([want[:, :, :-1]])
    assert np.isnan(got[0, 2:4, -1]).all()


@pytest.mark.parametrize(("dtype", "size"), [("float32", 128), ("float64", 64), ("float16", 64)])
def test_a_hidden_value_changes_no_bit_of_a_whole_tile(dtype, size, passes):
    q, k, v = (randn(1, 2, 512, size, seed=seed).astype(dtype) for seed in range(3))
    want = attention(q, k, v, is_causal=True)
    v[0, 0, 300], v[0, 1, 511] = math.nan, -math.inf
    got = attention(q, k, v, is_causal=True)
    assert "poison_safe" in passes
    assert bits([got[:, 0, :300], got[:, 1, :511]]) == bits([want[:, 0, :300], want[:, 1, :511]])
    assert not np.isfinite(got[:, 0, 300:]).any()


def test_a_row_with_large_scores_changes_no_bit_of_another(qkv):
    q, k, v = qkv
    want = attention(q, k, v, is_causal=True)
    q = q.copy()
    q[0, 3, 300] *= 1000
    got = attention(q, k, v, is_causal=True)
    others = np.ones(got.shape[:-1], bool)
    others[0, 3, 300] = False
    assert bits([got[others]]) == bits([want[others]])
    assert not np.array_equal(got[~others], want[~others])


def test_values_near_the_end_of_the_range(qkv, passes):
    q, k, v = qkv
    v = v / np.abs(v).max() * np.float32(1e35)
    got = attention(q * 4, k, v)
    assert set(passes) == {"fast", "stable"}
    np.testing.assert_allclose(got / 1e35, attention(q * 4, k, v / 1e35), atol=1e-5)


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
        found = attention(query, key, key, similarity=scores.distance(), kernel=KERNEL)
        tiles_computed = len(count)
        expected = attention(query, key, key, similarity=scores.distance(), kernel="dense")
    assert tiles_computed == 1
    np.testing.assert_allclose(found, expected, rtol=1e-5)
