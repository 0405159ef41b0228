"""Which masks the compiled kernel takes as ranges of keys for each row."""

import numpy as np
import pytest
from arrays import close, draw
from optional import torch

from polyattn import attention, attention_vjp, explain, masks, scores
from polyattn.plugin import CachePadding
from polyattn_native import call
from polyattn_native.visible import _NARROWED_BY, kind_of

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 2, 9, 8))
IDS = np.array([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0] * 5 + [1] * 4])


@pytest.mark.parametrize(
    "mask",
    [
        masks.prefix(np.array([3, 7])),
        masks.padding(np.array([4, 9]), np.array([9, 5])),
        CachePadding(np.array([4, 9])),
        masks.segments(IDS),
        masks.causal() & (masks.window(4, None) & masks.padding(np.array([4, 9]))),
        masks.compile(masks.window(3, 0) & masks.prefix(6), 9, 9),
        masks.dense(RNG.random((9, 9)) < 0.5) & masks.causal(),
        # several ranges
        masks.causal() & (masks.window(2, 0) | masks.prefix(np.array([1, 2]))),
        ~masks.window(1, 1),
        masks.segments(IDS[:, ::-1]),
        masks.positions(IDS, IDS),
        masks.window(1, 1) | masks.global_tokens(0, 4),
        masks.dense(RNG.random((9, 9)) < 0.5) & ~masks.window(1, 1),
    ],
    ids=repr,
)
def test_a_mask_of_ranges_and_an_array_is_not_made(mask, monkeypatch):
    monkeypatch.setattr(call, "Made", None)
    equal_to_dense(X, X, {"mask": mask})


def equal_to_dense(query, key, options):
    """Compare attention and its gradients with those of `dense`."""
    (expected, vjp), (output, pulled) = (
        attention_vjp(query, key, key, kernel=kernel, **options) for kernel in ("dense", "native")
    )
    close(output, expected, 400)
    close(pulled(expected)[:3], vjp(expected)[:3], 4000)


STREAMING = masks.causal() & (masks.window(60, 0) | masks.prefix(5))


@pytest.mark.parametrize(("lengths", "heads"), [((1, 700), 3), ((70, 70), 1), ((140, 600), 3)])
@pytest.mark.parametrize("options", [{}, {"bias": 0.0}, {"dropout": (0.3, 7)}], ids=str)
def test_blocks_between_ranges_are_left_out(lengths, heads, options, monkeypatch):
    monkeypatch.setattr(call, "Made", None)
    query, key = (
        RNG.standard_normal((2, n, rows, 8)) for n, rows in zip((3, 1), lengths, strict=True)
    )
    options = {"mask": STREAMING | masks.global_tokens(400), **options}
    if "bias" in options:  # shared by items: their gradients are added in turns
        options["bias"] = RNG.standard_normal((1, 3, *lengths))
    equal_to_dense(query, key.repeat(heads, 1), options)


def test_keys_between_ranges_are_not_read():
    key = RNG.standard_normal((1, 1, 2000, 8))
    key[..., 5:1000, :] = np.nan
    query = RNG.standard_normal((1, 1, 40, 8))
    output = attention(query, key, key, mask=STREAMING, kernel="native")
    np.testing.assert_allclose(output, attention(query, key, key, mask=STREAMING, kernel="dense"))
    assert np.isfinite(output).all()


def test_the_ranges_of_a_mask_without_arrays_are_kept(monkeypatch):
    mask = masks.causal() & (masks.window(3, 0) | masks.prefix(1))
    expected = attention(X, X, X, mask=mask, kernel="native")
    monkeypatch.setattr(masks.Mask, "intervals", None)
    np.testing.assert_array_equal(attention(X, X, X, mask=mask, kernel="native"), expected)


def test_a_window_beyond_what_is_added_to_offsets_narrows_the_ranges_too():
    for window in ((2**61, 0), (0, 2**62)):
        for mask in (masks.causal() | masks.prefix(2), np.tri(9, k=1) > 0):
            equal_to_dense(X, X, {"mask": mask, "window": window, "query_offset": np.array([0, 2])})


@pytest.mark.parametrize(
    "mask",
    [
        masks.dilated(2) & ~masks.window(0, 0) | masks.dense(np.eye(9, dtype=bool)),
        masks.tree(np.arange(9) // 2 - 1) | masks.window(1, 0),
        masks.compile(lambda b, h, i, j: (i + j) % 3 > 0, 9),
        # two views
        masks.dilated(2) & masks.tree(np.arange(9) // 2 - 1),
        # two arrays, also beside ranges
        masks.dense(np.tri(9, dtype=bool)) & masks.dense(np.eye(9) == 0) & ~masks.window(2, 1),
    ],
    ids=repr,
)
def test_other_masks_are_made(mask, monkeypatch):
    monkeypatch.setattr(call, "Made", None)
    with pytest.raises(TypeError, match="not callable"):
        attention(X, X, X, mask=mask, kernel="native")


@pytest.mark.parametrize(
    "mask",
    [
        masks.dilated(3) & masks.window(4, 2),
        ~masks.dilated(3) | masks.window(1, 0),
        masks.dilated(2**70) | ~masks.window(2**70, 2),
        masks.dilated(4) & masks.prefix(np.array([5, 9])),
    ],
    ids=repr,
)
def test_a_mask_by_distance_is_a_view_of_one_row(mask, monkeypatch):
    monkeypatch.setattr(call, "Made", None)
    for rows, offset in (
        (1, {}),
        (7, {"query_offset": 3}),
        (9, {"query_offset": np.array([2, -5])}),
    ):
        equal_to_dense(X[:, :, -rows:], X, {"mask": mask, **offset})


class Later(masks.Mask):
    """A class of the caller's own, which moves the rows of what is within it."""

    __match_args__ = ("mask",)

    def __init__(self, mask):
        self.mask = mask

    def seen(self, at):
        return self.mask.seen(at) ^ (at.row % 2 == 0)


def test_a_class_of_the_callers_own_is_no_view():
    equal_to_dense(X, X, {"mask": Later(masks.dilated(2)) & masks.causal()})


def test_a_tree_of_all_keys_is_read_in_place(monkeypatch):
    monkeypatch.setattr(call, "Made", None)
    for parents in (np.arange(9) // 2 - 1, np.array([[-1] * 9, [*range(-1, 8)]])):
        equal_to_dense(X, X, {"mask": masks.tree(parents)})
        equal_to_dense(X, X, {"mask": masks.tree(parents) & masks.window(3, 0)})


(LONG,) = draw((2, 2, 400, 4), dtype="float64")
OF_ITEM = RNG.integers(0, 4, (2, 400))


def blocks(b, h, i, j):
    """Show blocks of 128 keys, others to each item and head."""
    return (i // 128 + j // 128 + b + h) % 3 == 0


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({"mask": masks.compile(blocks, 400, batch=2, heads=2)}, 1),
        ({"mask": masks.compile(lambda b, h, i, j: blocks(0, 0, i, j), 400)}, 0),
        ({"mask": masks.segments(OF_ITEM)}, 1),
        ({"mask": masks.segments(OF_ITEM), "is_causal": True}, 0.75),
        ({"mask": masks.tree(np.arange(400) // 2 - 1) & ~masks.window(40, 0)}, 0.75),
        ({"mask": masks.tree(np.arange(40) - 1) | masks.prefix(np.array([3, 300]))}, 0.5),
    ],
    ids=["by item", "alike", "ids", "causal ids", "tree", "drafts"],
)
def test_a_mask_is_made_in_its_mixed_tiles_only(options, share, monkeypatch):
    made, seen = [], call.Made._seen
    monkeypatch.setattr(
        call.Made, "_seen", lambda self, *span: made.append(span) or seen(self, *span)
    )
    rows = 40 if "prefix" in repr(options["mask"]) else 400
    attention(LONG[:, :, -rows:], LONG, LONG, kernel="native", **options)
    elements = sum(rows.length * keys.length for rows, keys in made if keys.length > 1)
    assert elements <= share * rows * 400
    equal_to_dense(LONG[:, :, -rows:], LONG, options)


def test_a_mask_that_is_a_function_is_left_to_tiles_that_threads_evaluate():
    for mask in (blocks, masks.rule(blocks), masks.rule(blocks) & masks.compile(blocks, 9)):
        found = explain(X, X, X, mask=mask, backend="numpy")
        assert found.chosen.kernel != "native"
        assert "masks.compile" in str(found)
    compiled = masks.compile(blocks, 9, heads=2, batch=2)
    assert explain(X, X, X, mask=compiled, backend="numpy").chosen.kernel == "native"


def cells(length, of_row=1):
    """Return a mask of runs of 16 keys, that differs between every `of_row` rows."""
    rows = np.arange(length)[:, None] // of_row
    return (np.arange(length) // 16 + rows) % 3 == 0


@pytest.mark.parametrize(
    "mask",
    [
        cells(400),
        np.arange(400)[:, None] < np.arange(400) % 37,
        np.broadcast_to((np.arange(400) > 300)[:, None], (400, 400)),
        cells(400, 64) & (np.arange(400) % 5 > 0),
    ],
    ids=["rows", "ends", "empty rows", "blocks"],
)
def test_cells_of_keys_that_a_panel_does_not_see_are_left_out(mask):
    for options in ({"is_causal": True}, {"dropout": (0.3, 7)}, {"bias": LONG[..., :1]}):
        equal_to_dense(LONG, LONG, {"mask": mask, **options})
    options = {"mask": mask, "softcap": 2.0}
    equal_to_dense(LONG, LONG, options)
    # The bits of a row do not depend on the rows beside it, and what is hidden may be NaN.
    whole = attention(LONG, LONG, LONG, kernel="native", **options)
    options["mask"] = mask[50:61]
    hidden = LONG.copy()
    hidden[..., ~mask[50:61].any(axis=0), :] = np.nan
    part = attention(LONG[:, :, 50:61], hidden, hidden, kernel="native", **options)
    np.testing.assert_array_equal(part, whole[:, :, 50:61])


def test_a_temperature_and_biases_by_distance_are_computed():
    steps = scores.temperature(2.0) >> scores.temperature(0.7) >> scores.alibi(2)
    expected = attention(X, X, X, score_mod=steps, kernel="dense")
    output = attention(X, X, X, score_mod=steps, kernel="native")
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-13)
    late = scores.alibi(2) >> scores.temperature(2.0)
    chosen = explain(X, X, X, score_mod=late).chosen
    assert chosen.kernel != "native"


def test_the_masks_that_narrow_ranges_are_named_as_their_functions():
    made = {
        "window": masks.window(1, 0),
        "prefix": masks.prefix(1),
        "padding": masks.padding([1]),
        "segments": masks.segments(np.zeros(2, int)),
    }
    assert {name: kind_of(mask) for name, mask in made.items()} == {n: n for n in _NARROWED_BY}


#: Numbers that differ from call to call; arrays that do are in `WITH_ARRAYS`.
CHANGING = {
    "a mask": lambda n: {"mask": LONG[:, :, :9, :1] * LONG[:, :, None, :9, 1] > n / 2},
    "dropout": lambda n: {"dropout": (0.3, n), "score_mod": scores.alibi(2), "mask": STREAMING},
    "offsets": lambda n: {"score_mod": scores.alibi(2), "query_offset": np.array([n, 1 - n])},
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_repeated_call_reads_its_arrays_and_is_not_built_anew(name, monkeypatch):
    built, build = [], call.NativeCall.__init__
    monkeypatch.setattr(
        call.NativeCall, "__init__", lambda *a, **k: built.append(a) or build(*a, **k)
    )
    for n in range(3):
        options = CHANGING[name](n)
        output = attention(X, X, X, kernel="native", **options)
        close(output, attention(X, X, X, kernel="dense", **options), 400)
    assert len(built) == 1


def test_ids_of_which_a_mask_is_made_are_seen_in_a_repeated_call():
    ids, lengths, x = np.zeros((2, 64), "i8"), np.zeros(2, "i8"), LONG[:, :, :64]
    mask = masks.segments(ids)
    ranges = masks.causal() & (masks.window(2, 0) | masks.prefix(lengths))
    for n, changed in enumerate((np.arange(64) // 9, np.arange(64) % 3, np.arange(64) // 5)):
        ids[:], lengths[:] = changed, (1 + n, 4 - n)
        equal_to_dense(x, x, {"mask": mask})
        equal_to_dense(x, x, {"mask": ranges})


@pytest.mark.parametrize("dtype", ["int8", "uint64"])
def test_sorted_ids_of_any_size_are_ranges(dtype, monkeypatch):
    monkeypatch.setattr(call, "Made", None)
    limits = np.iinfo(dtype)
    keys = np.full((2, 9), limits.min, dtype)
    keys[0, 4:], keys[1, 2:], keys[:, 7:] = 3, 5, limits.max
    rows = keys[:, [0, 3, 4, 8]]
    for query_ids, key_ids in ((rows, keys), (rows[0], keys), (rows, keys[1])):
        equal_to_dense(X[:, :, :4], X, {"mask": masks.segments(query_ids, key_ids)})


def test_ids_far_apart_are_ranges_of_each_of_many_items():
    x, ids = RNG.standard_normal((12, 1, 9, 4)), np.repeat([-(2**60), 0, 2**60], 3)
    equal_to_dense(x, x, {"mask": masks.segments(np.tile(ids, (12, 1)))})


LENGTHS = np.array([4, 9])
SLOPES = np.array([0.5, 0.25])
#: Options by their arrays, and other contents of these.
WITH_ARRAYS = {
    "causal segments": (lambda ids: {"mask": masks.causal() & masks.segments(ids)}, IDS, IDS[::-1]),
    "ids that are not sorted": (lambda ids: {"mask": masks.segments(ids)}, IDS, IDS[:, ::-1]),
    "lengths": (lambda n: {"key_lengths": n, "is_causal": True}, LENGTHS, LENGTHS - 1),
    "offset": (lambda n: {"query_offset": n, "is_causal": True}, LENGTHS, LENGTHS - 3),
    "slopes": (lambda slopes: {"score_mod": scores.alibi(slopes)}, SLOPES, SLOPES[::-1]),
    "sinks": (lambda sinks: {"sinks": sinks}, SLOPES, -SLOPES),
    "pages": (
        lambda table: {"block_table": table, "key_lengths": LENGTHS - 2},
        np.array([[0, 1, 0], [1, 0, 1]], np.int32),
        np.array([[1, 0, 1], [0, 1, 0]], np.int32),
    ),
    "an array": (
        lambda seen: {"mask": masks.dense(seen)},
        IDS[:, None, None] > 0,
        IDS[:, None, None] < 1,
    ),
    "a bias": (
        lambda bias: {"bias": bias},
        X[..., :1] @ X[..., :1].swapaxes(2, 3),
        X @ X.swapaxes(2, 3),
    ),
    "a bias of another dtype": (
        lambda bias: {"bias": bias},
        X[0, 0, :, :1].astype("float16"),
        X[0, 0, :, 1:2].astype("float16"),
    ),
}


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("name", WITH_ARRAYS)
def test_arrays_are_described_to_the_library_when_they_change(name, library, monkeypatch):
    convert = np.copy if library == "numpy" else lambda x: torch.from_numpy(x.copy())
    options, first, second = WITH_ARRAYS[name]
    key = X[..., :4, :] if name == "pages" else X
    made = []

    def again(native, x):
        made.append(x)
        return real(native, x)

    real = call.NativeCall.again
    monkeypatch.setattr(call.NativeCall, "again", again)
    array = convert(first)
    for n, contents in enumerate((first, first, first, second, second, first)):
        array[...] = convert(contents)  # in place, and in an equal array elsewhere
        for given in (array, convert(contents)):
            given_to = convert(X), convert(key), convert(key)
            output = attention(*given_to, kernel="native", **options(given))
            expected = attention(*given_to, kernel="dense", **options(given))
            close(output, expected, 400)
        if n == 1:
            made.clear()
    counts = {"an array": 0, "a bias": 0, "a bias of another dtype": 8}
    assert len(made) == counts.get(name, 2)


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_an_array_is_read_where_it_lies_also_if_others_lay_otherwise(name):
    numbers = RNG.standard_normal((9, 9))
    array = numbers > 0 if name == "mask" else numbers
    odd = np.ndarray((9, 9), array.dtype, bytes(1) + array.tobytes(), 1)
    swapped = array if name == "mask" else array.astype(">f8")
    for one in (array, array, array.T, array[::-1, ::-1], odd, swapped, array[:1], array):
        equal_to_dense(X, X, {name: one})


@pytest.mark.parametrize("mask", [None, masks.segments(np.arange(16) % 2)], ids=["none", "ids"])
def test_items_that_no_stride_reaches_are_read(mask, monkeypatch):
    """The numbers of where items begin live as long as the call that reads them."""
    query, key = draw((2, 3, 2, 16, 8), (2, 1, 2, 16, 8), dtype="float64")
    others, run = [], call.run

    def run_after_others(*arguments, **options):
        others.extend(np.full(6, 7) for _ in range(100))  # in memory that was given back
        return run(*arguments, **options)

    monkeypatch.setattr(call, "run", run_after_others)
    expected = attention(query, key, key, mask=mask, kernel="dense")
    for _ in range(4):
        output = attention(query, key, key, mask=mask, kernel="native")
        others.extend(np.full(6, 7) for _ in range(100))
        close(output, expected, 400)
