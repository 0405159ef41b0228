"""Short calls of NumPy's kernel, whose scores are one tile: when, and the same in any batch."""

import numpy as np
import pytest

import polyattn
import polyattn_numpy.tiled_kernel as module
from polyattn import attention_partial, explain, masks

ITEMS, HEADS, GROUPS, LENGTH = 5, 6, 3, 120
LENGTHS = np.array([120, 7, 64, 1, 99])
OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window": (9, 3)},
    "padding": {"mask": masks.padding(LENGTHS)},
    "padding and causal": {"mask": masks.padding(LENGTHS), "is_causal": True},
    "padding on both sides": {"mask": ~masks.prefix(3) & masks.padding(LENGTHS + 3)},
    "array with holes": {"mask": np.random.default_rng(3).random((ITEMS, 1, 1, LENGTH)) > 0.3},
    "array by head": {"mask": np.random.default_rng(4).random((1, HEADS, LENGTH, LENGTH)) > 0.3},
}


def randn(heads, seed):
    return np.random.default_rng(seed).standard_normal((ITEMS, heads, LENGTH, 16), dtype=np.float32)


@pytest.fixture
def qkv():
    return randn(HEADS, 0), randn(GROUPS, 1), randn(GROUPS, 2)


@pytest.fixture
def written(monkeypatch):
    """Return the list of tasks, and whether each was written at once."""
    found, genuine = [], module.write_at_once

    def watched(call, output, logsumexp, task, scratch):
        found.append((task, genuine(call, output, logsumexp, task, scratch)))
        return found[-1][1]

    monkeypatch.setattr(module, "write_at_once", watched)
    return found


def run(qkv, **options):
    return attention_partial(*qkv, kernel="tiled", **options)


def of_item(options, item):
    """Return the options of a call with one item of the batch."""
    mask, one = options.get("mask"), slice(item, item + 1)
    if isinstance(mask, np.ndarray) and mask.shape[0] == ITEMS:
        return options | {"mask": mask[one]}
    if isinstance(mask, masks.Mask):
        return options | {"mask": mask.map(lambda name, x: x[one])}
    return options


def bits(result):
    return [np.ascontiguousarray(x).tobytes() for x in result]


def assert_like_dense(found, qkv, **options):
    expected = attention_partial(*qkv, kernel="dense", **options)
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_item_has_the_same_bits_alone_and_on_any_threads(name, qkv, written):
    options = OPTIONS[name]
    found = run(qkv, **options)
    assert written
    assert all(done for _, done in written)
    for item in range(ITEMS):
        alone = run([x[item : item + 1] for x in qkv], **of_item(options, item))
        assert bits(alone) == bits(x[item : item + 1] for x in found)
    with polyattn.use_threads(3):
        assert bits(run(qkv, **options)) == bits(found)


@pytest.mark.parametrize(
    "view",
    [lambda x: x.astype(">f4"), lambda x: np.repeat(x, 2, axis=-1)[..., ::2]],
    ids=["byte order", "strided"],
)
def test_arrays_that_blas_does_not_read_are_left_to_the_other_passes(view, qkv, written):
    found = run([view(x) for x in qkv], is_causal=True)
    assert_like_dense(found, qkv, is_causal=True)
    assert not written


def test_keys_that_an_item_does_not_see_are_left_out(qkv, written):
    _, key, value = qkv
    for item, length in enumerate(LENGTHS):
        key[item, :, length:] = value[item, :, length:] = np.nan
    found = run(qkv, **OPTIONS["padding"])
    assert [done for _, done in written] == [True] * ITEMS
    assert_like_dense(found, qkv, **OPTIONS["padding"])


def test_a_head_of_large_scores_or_without_a_key_is_left_to_the_other_passes(qkv, written):
    qkv[0][1, 3] *= 1e4
    options = {"mask": np.arange(ITEMS)[:, None, None, None] != 2}  # item 2 sees nothing
    found = run(qkv, **options)
    left = {(task.batch.start, task.heads.start) for task, done in written if not done}
    assert {(1, 1), (2, 0)} <= left
    assert_like_dense(found, qkv, **options)
    assert not found.output[2].any()
    qkv[0][1, 3] /= 1e4
    calm = run(qkv, **options)
    assert bits(x[[0, 3, 4]] for x in found) == bits(x[[0, 3, 4]] for x in calm)


def test_fewer_keys_than_values_are_wide_divide_the_weights(written):
    query, key = randn(HEADS, 0)[:, :, :24], randn(GROUPS, 1)[:, :, :30]
    value = np.random.default_rng(2).standard_normal((*key.shape[:-1], 40), dtype=np.float32)
    query[1, 3] *= 1e4
    found = run((query, key, value), is_causal=True)
    assert {done for _, done in written} == {True, False}
    assert_like_dense(found, (query, key, value), is_causal=True)


@pytest.mark.parametrize(
    ("length", "options", "kernel"),
    [
        (16, {"is_causal": True}, "tiled"),
        (16, {"mask": masks.padding(np.ones(2, int))}, "tiled"),
        (16, {"is_causal": True, "bias": (16, 16)}, "dense"),
        (8, {"is_causal": True}, "dense"),
    ],
)
def test_short_masked_calls_are_computed_at_once(length, options, kernel):
    shape = (2, 4, length, 8)
    assert explain(shape, shape, shape, **options).chosen.kernel == kernel
