"""Which masks the compiled kernel takes as ranges of keys for each row."""

import numpy as np
import pytest
from arrays import close, draw
from optional import torch

from polyattn import attention, attention_vjp, explain, masks, same_bits, scores
from polyattn.plugin import CachePadding
from polyattn_native import call

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 2, 9, 8))
IDS = np.array([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0] * 5 + [1] * 4])


@pytest.mark.parametrize(
    "mask",
    [
        masks.prefix(np.array([3, 7])),
        CachePadding(np.array([4, 9])),
        masks.segments(IDS),
        masks.causal() & (masks.window(4, None) & masks.padding(np.array([4, 9]))),
        masks.compile(masks.window(3, 0) & masks.prefix(6), 9, 9),
        masks.dense(RNG.random((9, 9)) < 0.5) & masks.causal(),
        # several ranges
        masks.causal() & (masks.window(2, 0) | masks.prefix(np.array([1, 2]))),
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
        ({"mask": masks.compile(lambda b, h, i, j: blocks(0, 0, i, j), 400)}, 0),
        ({"mask": masks.segments(OF_ITEM), "is_causal": True}, 0.75),
        ({"mask": masks.tree(np.arange(400) // 2 - 1) & ~masks.window(40, 0)}, 0.75),
        ({"mask": masks.tree(np.arange(40) - 1) | masks.prefix(np.array([3, 300]))}, 0.5),
    ],
    ids=["alike", "causal ids", "tree", "drafts"],
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


def test_a_temperature_after_a_bias_is_left_to_another_kernel():
    late = scores.alibi(2) >> scores.temperature(2.0)
    assert explain(X, X, X, score_mod=late).chosen.kernel != "native"


def test_ids_of_which_a_mask_is_made_are_seen_in_a_repeated_call():
    ids, lengths, x = np.zeros((2, 64), "i8"), np.zeros(2, "i8"), LONG[:, :, :64]
    mask = masks.segments(ids)
    ranges = masks.causal() & (masks.window(2, 0) | masks.prefix(lengths))
    for n, changed in enumerate((np.arange(64) // 9, np.arange(64) % 3, np.arange(64) // 5)):
        ids[:], lengths[:] = changed, (1 + n, 4 - n)
        equal_to_dense(x, x, {"mask": mask})
        equal_to_dense(x, x, {"mask": ranges})


def test_sorted_ids_of_any_size_are_ranges(monkeypatch):
    monkeypatch.setattr(call, "Made", None)
    limits = np.iinfo("uint64")
    keys = np.full((2, 9), limits.min, "uint64")
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
    assert len(made) == {"an array": 0, "a bias of another dtype": 8}.get(name, 2)


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_an_array_is_read_where_it_lies_also_if_others_lay_otherwise(name):
    numbers = RNG.standard_normal((9, 9))
    array = numbers > 0 if name == "mask" else numbers
    odd = np.ndarray((9, 9), array.dtype, bytes(1) + array.tobytes(), 1)
    swapped = array if name == "mask" else array.astype(">f8")
    for one in (array, array, array.T, array[::-1, ::-1], odd, swapped, array[:1], array):
        equal_to_dense(X, X, {name: one})


def test_items_that_no_stride_reaches_are_read(monkeypatch):
    """The numbers of where items begin live as long as the call that reads them."""
    query, key = draw((2, 3, 2, 16, 8), (2, 1, 2, 16, 8), dtype="float64")
    others, run = [], call.run

    def run_after_others(*arguments, **options):
        others.extend(np.full(6, 7) for _ in range(100))  # in memory that was given back
        return run(*arguments, **options)

    monkeypatch.setattr(call, "run", run_after_others)
    expected = attention(query, key, key, kernel="dense")
    for _ in range(4):
        output = attention(query, key, key, kernel="native")
        others.extend(np.full(6, 7) for _ in range(100))
        close(output, expected, 400)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (20, None)}], ids=str)
def test_documents_that_end_within_the_rows_of_a_vector(options):
    lengths = [17, 31, 16, 1, 50, 33]
    ids = np.repeat(np.arange(len(lengths)), lengths)
    query, key, value = (RNG.standard_normal((2, n, len(ids), 24)) for n in (4, 2, 2))
    ends = np.cumsum(lengths)[:-1]
    parts = zip(*[np.split(x, ends, axis=-2) for x in (query, key, value)], strict=True)
    with same_bits():
        output = attention(query, key, value, mask=masks.segments(ids), kernel="native", **options)
        each = [attention(*part, kernel="native", **options) for part in parts]
    np.testing.assert_array_equal(output, np.concatenate(each, axis=-2))
