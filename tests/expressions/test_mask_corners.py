"""Masks and scores at their corners: what is wrong is refused, what is odd means what it says."""

import numpy as np
import pytest
from arrays import EVERYWHERE, tiles_of
from optional import jax, torch

from polyattn import attention, masks, scores
from polyattn._base.arrays import library_of
from polyattn._core.call.checks import examine
from polyattn._core.call.describe import describe
from polyattn.plugin import TileGrid

pytestmark = pytest.mark.with_native

B, H, L, S = 2, 4, 6, 6
X = np.random.default_rng(0).normal(size=(B, H, L, 8))
TO = {"numpy": np.asarray, "torch": torch.asarray, "jax": jax.numpy.asarray}


def run(x=X, **options):
    return attention(x, x, x, **options)


def later(b, h, i, j):
    return i >= j


# ---- refused ----


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: masks.window(-1, 0), ValueError, "at least 0"),
        (lambda: masks.window(10), TypeError, r"window must be a pair \(left, right\).*; got 10"),
        (lambda: masks.prefix(2.0), TypeError, "array of one for each batch item; got 2.0"),
        (lambda: masks.padding(), TypeError, "key_lengths, query_lengths, or both"),
        (lambda: masks.padding([3, "x"]), TypeError, "must hold numbers"),
        (lambda: masks.segments(None), TypeError, "query_ids must be an integer array"),
        (lambda: masks.positions(np.ones(6), [0]), TypeError, "query_positions must be an integer"),
        (
            lambda: masks.positions([0], [0], masks.causal() & ~(masks.prefix(1) | later)),
            TypeError,
            r"later\)\. Compose others with the result",
        ),
        (lambda: masks.tree([-1, 1]), ValueError, r"got 1 for the draft at \(1,\)"),
        (lambda: masks.selected([[0, -2]]), ValueError, "at least 0, or -1 for none; got -2"),
        (lambda: masks.selected(np.ones((2, 3))), TypeError, "indices must be an integer array"),
        (lambda: masks.selected(np.array(1)), ValueError, "an axis for the numbers of each row"),
        (lambda: masks.blocks([[0]], (1, 2, 3)), ValueError, r"rows and keys; got \(1, 2, 3\)"),
        (lambda: masks.edges([0, 2], [1, 1], 2), ValueError, "below query_length = 2; got 2"),
        (lambda: masks.edges([0], [1, 2], 2), ValueError, r"one shape \(edges,\); got \(1,\) and"),
        (lambda: masks.global_tokens(), ValueError, "positions"),
        (lambda: masks.global_tokens(1, 2**30), ValueError, r"from 0 to 2\*\*30 - 1; got \(1, 10"),
        (lambda: masks.dense(np.ones((6, 6))), TypeError, "bool array"),
        (lambda: masks.rule(lambda i, j: i > j), TypeError, "b, h, i, j"),
        (lambda: masks.compile(later, 0), ValueError, "at least 1"),
        (lambda: scores.softcap(0), ValueError, "above 0 in the range of float32; got 0"),
        (lambda: scores.temperature(2.0) and scores.alibi(2), TypeError, ">>"),
        (lambda: scores.relative_bias(np.zeros(4)), TypeError, r"\(4,\)"),
        (lambda: scores.relative_bias(np.zeros((2, 4))), ValueError, "at least 4 buckets"),
        (lambda: scores.softcap(2) >> scores.cosine(), TypeError, r"scores\.cosine\(\)"),
        (lambda: scores.additive(3.0), TypeError, r"\(D,\)"),
        (lambda: masks.causal() and masks.prefix(1), TypeError, "compose by & | ~"),
        (lambda: masks.rule(scores.softcap(1)), TypeError, r"got scores\.softcap\(1\.0\)"),
        (lambda: masks.padding(X[0] > 0), TypeError, r"mask=valid\[:, None, None, :\]"),
        (lambda: masks.compile(lambda b, h, i, j: i - j, 6), TypeError, "dtype int64"),
        (lambda: masks.compile(lambda b, h, i, j: i[:-1] >= j, 6), ValueError, r"\(1, 1, 6, 6\)"),
        (lambda: scores.relative_bias(np.ones((32, 4)), max_distance=200.7), TypeError, "200.7"),
        (lambda: scores.relative_bias(np.ones((32, 4)), bidirectional="no"), TypeError, "'no'"),
    ],
)
def test_invalid_values_are_refused_when_made(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"score_mod": masks.causal()}, r"masks\.causal\(\) goes in mask=, not in score_mod="),
        ({"mask": scores.softcap(1)}, r"goes in score_mod=, not in mask="),
        ({"window": masks.window(1, 0)}, r"got masks\.window\(1, 0\)"),
        ({"scale": scores.cosine()}, r"scores\.cosine\(\) goes in similarity=, not in scale="),
        ({"mask": masks.causal}, r"takes \(\)"),
        ({"mask": masks.causal() & np.ones((L, S))}, "goes in bias="),
        ({"mask": masks.dilated(2) | (lambda b, h, i, j: i - j)}, "dtype int64"),
    ],
)
def test_a_value_in_the_wrong_argument_is_refused(given, words):
    with pytest.raises(TypeError, match=words):
        run(**given)


# ---- odd, and right ----

FAR = 10**30
HUGE = {
    "a window": (masks.window(FAR, FAR) & masks.dilated(2), masks.dilated(2)),
    "a prefix": (masks.prefix(FAR) & masks.dilated(2), masks.dilated(2)),
    "padding": (masks.padding(2**40, 2**31) & masks.dilated(2), masks.dilated(2)),
    "none of a prefix": (~masks.prefix(2**33), masks.prefix(0)),
    "a step": (masks.dilated(FAR), masks.window(0, 0)),
}


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["numpy", "jax"])
def test_a_number_beyond_all_lengths_means_no_bound(transform):
    @transform
    def shown(*indices):
        return [[mask(*indices) for mask in pair] for pair in HUGE.values()]

    for found, expected in shown(*np.ogrid[:B, :H, :L, :S]):
        np.testing.assert_array_equal(*np.broadcast_arrays(found, expected))


@pytest.mark.parametrize("name", [name for name in HUGE if name != "a step"])
def test_tiles_are_known_of_such_numbers_in_arrays_too(name):
    call, operands = describe(X, X, X)
    grid = TileGrid(examine(call), operands, library_of(X).xp, (2, 2), X)
    huge, plain = (grid.of(mask & masks.segments(np.arange(L) // 4)) for mask in HUGE[name])
    for pair in zip(huge, plain, strict=True):
        np.testing.assert_array_equal(*pair)


WAYS = [("numpy", "dense"), ("numpy", "tiled"), ("torch", None), ("torch", "tiled")]

# float64 has no odd number as large.
ODD = np.array([0, 0, 200, 2**16 - 1, 2**53, 2**53 + 1])
#: Ids of rows and of keys, whose dtypes differ or are unsigned.
IDS = {
    "uint16": [np.minimum(ODD, 2**16 - 1).astype("uint16")] * 2,
    "uint32": [np.minimum(ODD, 2**32 - 1).astype("uint32")] * 2,
    "uint64 and int64": [ODD.astype("uint64"), ODD],
    **{
        f"{beyond}": [
            np.array([7, 7, beyond, beyond + 1, 2**64 - 1, 2**64 - 2], "uint64"),
            np.array([7, 8, min(beyond, 2**63 - 1), 2**62 + 3, -1, -2]),
        ]
        for beyond in (2**62 + 1, 2**63 + 1)
    },
    "below 0": [np.array([-(2**62), 2**62, -1, -1, 0, 2**62])] * 2,
}


@pytest.mark.parametrize(("name", "kernel"), WAYS)
@pytest.mark.parametrize("ids", IDS)
def test_ids_are_equal_only_as_numbers(ids, name, kernel):
    rows, keys = IDS[ids]
    mask = masks.segments(TO[name](rows), TO[name](keys))
    expected = run(mask=rows.astype(object)[:, None] == keys.astype(object))
    for shown in (mask, mask & masks.window(99, 99)):
        found = run(TO[name](X), mask=shown, kernel=kernel)
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-12, atol=1e-12)


#: Lengths of two items of 300 keys, beyond which a narrow dtype cannot count.
LENGTHS = {"uint8": [100, 255], "int16": [-3, 2**15 - 1], "uint64": [2**63 + 1, 2**64 - 1]}


@pytest.mark.parametrize(("name", "kernel"), WAYS)
@pytest.mark.parametrize("dtype", LENGTHS)
def test_lengths_have_any_dtype_of_integers(dtype, name, kernel):
    x = np.random.default_rng(1).normal(size=(2, 1, 300, 8)).astype("float32")
    lengths = TO[name](np.array(LENGTHS[dtype], dtype))
    shown = np.arange(300) < np.array(LENGTHS[dtype], object)[:, None, None, None]
    found = run(TO[name](x), mask=masks.padding(lengths, lengths), kernel=kernel)
    expected = run(x, mask=(shown & np.swapaxes(shown, -1, -2)).astype(bool))
    np.testing.assert_allclose(np.asarray(found), expected, atol=1e-5)


@pytest.mark.parametrize("kernel", ["dense", "tiled"])
@pytest.mark.parametrize("step", [2**30 + 1, 2**31 + 3])
@pytest.mark.parametrize("offset", [2**30 - 1, 2**31 - 2, 2**40 + 3])
def test_wide_steps_meet_far_positions(offset, step, kernel):
    x = np.random.default_rng(1).normal(size=(1, 300, 8))
    expected = run(x, mask=(np.arange(300) - np.arange(300)[:, None] - offset) % step == 0)
    for own in (offset, np.array(offset)):
        found = run(x, mask=masks.dilated(step), query_offset=own, kernel=kernel)
        np.testing.assert_allclose(found, expected, atol=1e-12)


# Offset, window, and the keys that row i sees: from i + the first to i + the second.
FAR_CALLS = [
    (2**31 - 1, (2**40, 0), (-99, 99)),
    (2**31 - 2, (2**31, None), (-2, 99)),
    (-(2**31), (0, 2**40), (-99, 99)),
    (-(2**31), (None, 2**31), (-99, 0)),
    (-(2**62), (3, 2**62 - 2), (-99, -2)),
    (2**63 - 1, (2**63 - 1, 0), (0, 99)),
    (2**40, (2**20, 0), (99, 99)),
]


@pytest.mark.parametrize(
    ("name", "kernel", "offset", "window", "seen"),
    [
        *((*way, *call) for way in WAYS for call in FAR_CALLS),
        # JAX has no 64-bit integers here.
        *(("jax", "xla", *call) for call in FAR_CALLS[:1]),
    ],
)
def test_far_offsets_and_wide_windows_cancel_exactly(name, kernel, offset, window, seen):
    low, high = (np.arange(L)[:, None] + end for end in seen)
    own = "int64" if abs(offset) > 2**31 else "int32"
    x = [TO[name](X.astype("float32"))] * 3
    expected = run(X, mask=(np.arange(S) >= low) & (np.arange(S) <= high))
    for given in (offset, TO[name](np.full(B, offset, own))):
        for options in ({"window": window}, {"mask": masks.window(*window) & ~masks.prefix(0)}):
            found = attention(*x, query_offset=given, kernel=kernel, **options)
            np.testing.assert_allclose(np.asarray(found), expected, atol=1e-5)


def test_far_offsets_that_move_to_jax_are_right_or_refused():
    x, offset = X.astype("float32"), np.full(B, 2**40)
    near = {"query_offset": offset, "window": (2**20, 0)}
    np.testing.assert_allclose(run(x, **near, backend="jax"), run(x, **near), atol=1e-5)
    with pytest.raises(ValueError, match=r"JAX has integers beyond 32 bits, .* only after"):
        run(x, query_offset=offset, window=(2**40, 0), backend="jax")


@pytest.mark.slow
def test_dilation_counts_from_a_far_position_of_jax():
    far, x = 2**31 - 2, X.astype("float32")
    expected = run(mask=(np.arange(S) - np.arange(L)[:, None] - far) % 5 == 0)
    found = run(TO["jax"](x), query_offset=far, mask=masks.dilated(5))
    np.testing.assert_allclose(np.asarray(found), expected, atol=1e-5)


def test_a_mask_compiled_for_too_few_items_or_heads_is_refused():
    of_heads = masks.dense(np.arange(H).reshape(1, H, 1, 1) < np.arange(S))
    for mask in (masks.padding(np.array([2, 6])), of_heads):
        with pytest.raises(ValueError, match=r"called with batch=\(1,\), heads=1"):
            masks.compile(mask, L, tile=2)


def test_a_mask_is_compiled_for_batch_axes_of_any_number():
    x = np.stack([X, X[::-1], X])
    for lengths in (np.array([[1, 6], [3, 4], [5, 2]]), np.array([[1], [3], [6]])):
        mask = masks.padding(lengths)
        compiled = masks.compile(mask, L, batch=(3, 2), tile=2)
        found = run(x, mask=compiled, kernel=tiles_of(4 * H), backend="array-api")
        np.testing.assert_allclose(found, run(x, mask=mask), rtol=1e-12)
    with pytest.raises(ValueError, match=r"batch axes \(6,\)"):
        masks.compile(mask, L, batch=6)


@pytest.mark.parametrize(("rows", "keys", "kernel"), [(0, 5, "tiled"), (5, 0, "dense")])
@pytest.mark.parametrize("library", EVERYWHERE, ids=str)
def test_nothing_in_is_nothing_out(library, rows, keys, kernel):
    query, key = (library.to(np.ones((B, H, n, 8))) for n in (rows, keys))
    ids, key_ids = (library.to(np.zeros(n, int)) for n in (rows, keys))
    lengths = library.to(np.zeros(B, int))
    mask = masks.segments(ids, key_ids) & masks.causal() | masks.padding(lengths)
    mask = mask | masks.positions(ids, key_ids, masks.window(1, 1) | masks.prefix(lengths))
    mask = mask | masks.tree(ids - 1)
    mask = mask | masks.global_tokens(0) | masks.dense(library.to(np.ones((1, keys), bool)))
    options = {"mask": mask & masks.dilated(2), "kernel": kernel, "backend": "array-api"}
    output = attention(query, key, key, score_mod=scores.alibi(H), **options)
    assert output.shape == (B, H, rows, 8)
    assert not library.back(output).any()


def test_vectors_of_no_size_are_all_alike():
    x, value = np.ones((2, 3, 0)), np.arange(6.0).reshape(2, 3, 1)
    mean = np.broadcast_to(value.mean(-2, keepdims=True), value.shape)
    for kind in (scores.cosine(), scores.distance(), scores.additive(np.ones(0))):
        np.testing.assert_allclose(attention(x, x, value, similarity=kind), mean)
