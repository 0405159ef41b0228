"""Masks as intervals of keys: they are the dense mask, and none where they would be many."""

import numpy as np
import pytest

from polyattn import masks
from polyattn._core.expressions.indices import PointIndices
from polyattn._core.expressions.masks import as_mask

IDS = np.array([[0, 0, 1, 1, 1, 2, 2, 0, 0, 3]])
DOCUMENTS = masks.causal() & (masks.segments(np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 2])))
SHARED_PREFIX = DOCUMENTS | masks.causal() & masks.prefix(2)


def seen_by(mask, batch, heads, lengths, offset):
    """The dense mask, (items, heads, L, S)."""
    items = int(np.prod(batch))
    b, h = np.arange(items).reshape(-1, 1, 1, 1), np.arange(heads).reshape(-1, 1, 1)
    i, j = np.arange(lengths[0]).reshape(-1, 1), np.arange(lengths[1]).reshape(1, -1)
    seen = np.asarray(mask.seen(PointIndices(b, h, i, j, offset=offset, batch=batch)))
    return np.broadcast_to(seen, (items, heads, *lengths))


def check(mask, batch=(1,), heads=1, lengths=(10, 10), offset=None, most=8, **options):
    """Compare the intervals of a mask with the dense mask, and return how many a row has."""
    mask, given = as_mask(mask), lengths[1] - lengths[0] if offset is None else offset
    expected = seen_by(
        mask, batch, heads, lengths, np.reshape(given, -1) if np.ndim(given) else given
    )
    found = mask.intervals(lengths, offset, batch=batch, heads=heads, most=most, **options)
    if found is None:
        return None
    first, stop = found
    keys = np.arange(lengths[1])[:, None]
    seen = ((first[..., None, :] <= keys) & (keys < stop[..., None, :])).any(-1)
    np.testing.assert_array_equal(np.broadcast_to(seen, expected.shape), expected, str(mask))
    is_one = first < stop
    assert (first[..., 1:] > stop[..., :-1])[is_one[..., 1:]].all(), "in order, and apart"
    assert first.shape[-1] == max(1, is_one.sum(-1).max(initial=0)) <= most
    check_forms(found, expected)
    return first.shape[-1]


def check_forms(found, seen):
    """Compare the tiles, and the band and documents if there are any, with the dense mask."""
    rows, keys = lengths = seen.shape[-2:]
    (i, j), size = np.ogrid[:rows, :keys], (3, 4)
    some, every = (np.broadcast_to(x, (*seen.shape[:2], *x.shape[2:])) for x in found.tiles(
        lengths, size))  # fmt: skip
    for down, across in np.ndindex(some.shape[2:]):
        part = seen[..., 3 * down :, 4 * across :][..., :3, :4]
        np.testing.assert_array_equal(some[..., down, across], part.any((-2, -1)))
        np.testing.assert_array_equal(every[..., down, across], part.all((-2, -1)))
    if (band := found.band()) is not None:
        low, high, start, stop = band
        ours = (start <= j) & (j < stop) & (low is None or j >= i + low)
        np.testing.assert_array_equal((ours & (high is None or j <= i + high)) ^ seen, False)
    if (documents := found.documents(rows)) is not None:
        np.testing.assert_array_equal(seen_by_documents(*documents, lengths) ^ seen, False)


def seen_by_documents(of_rows, of_keys, is_causal, lengths):
    """What a function of packed sequences shows, by its cu_seqlens."""
    assert of_rows.dtype == of_keys.dtype == np.int32
    assert (of_rows[0], of_keys[0], of_rows[-1]) == (0, 0, lengths[0])
    i, j = np.arange(lengths[0]), np.arange(lengths[1])
    one, other = (np.searchsorted(cu[1:], x, "right") for cu, x in ((of_rows, i), (of_keys, j)))
    rows_after = of_rows[1:][one] - i - 1
    keys_after = np.append(of_keys[1:], 0)[other] - j - 1
    seen = one[:, None] == other
    return seen & (keys_after >= rows_after[:, None]) if is_causal else seen


#: Masks, and how many intervals a row has at most.
MASKS = {
    "streaming": (masks.causal() & (masks.window(2, 0) | masks.prefix(1)), 2),
    "Longformer": (masks.window(1, 1) | masks.global_tokens(0, 6), 3),
    "dilated in a window": (masks.dilated(2) & masks.window(4, 0), 3),
    "ids that are not sorted": (masks.segments(IDS), 2),
    "documents with a shared prefix": (SHARED_PREFIX, 2),
    "all but a band": (~masks.window(1, 1), 2),
    "a rolling cache": (masks.positions(np.arange(10) + 4, np.roll(np.arange(4, 14), 3)), 2),
    "unsigned": (masks.prefix(np.array([2**40], np.uint64)) & masks.causal(), 1),
    "a far window": (masks.window(2**70, 2**70), 1),
    "selected": (
        masks.selected(np.array([[7, 0, 1, -1, 8, 1, 12], [0, 3, 4, 5, 9, -1, -1]])[IDS[0] % 2]),
        3,
    ),
    "blocks": (masks.blocks([[0, -1, -1], [2, 0, 9], [1, 2, 2]], (4, 3)), 2),
    "compiled": (masks.compile(masks.causal() & masks.prefix(3), 10), 1),
}
#: Masks that only their elements tell.
ELEMENTS = {
    "array": (masks.dense(np.tri(10, 10, dtype=bool)), 1),
    "function": (masks.rule(lambda b, h, i, j: (i // 5 == j // 5) | (j == 0)), 2),
    "tree": (masks.tree(np.array([-1, 0, 0, 1, 1, 2, 2, 3, 3, 4])), 3),
    "far positions": (masks.positions(np.arange(10) + 2**62, np.arange(10) + 2**62), 1),
}


@pytest.mark.parametrize("name", MASKS | ELEMENTS)
def test_intervals_are_the_dense_mask(name):
    mask, count = (MASKS | ELEMENTS)[name]
    assert check(mask) == check(mask, most=count) == count
    assert check(mask, evaluates=False) == (None if name in ELEMENTS else count)
    if count > 1:
        assert check(mask, most=count - 1) is None


#: Masks of 6 rows; their band, and their documents as ends of rows, ends of keys and causal.
FORMS = {
    "causal": (masks.causal(), 9, (None, 3, 0, 9), ([0, 6], [0, 9], True)),

    "window": (masks.window(2, 1), 6, (-2, 1, 0, 6), None),
    "window of some keys": (masks.window(2, 1) & masks.prefix(4), 6, (-2, 1, 0, 4), None),
    "after": (~masks.causal() & ~masks.prefix(3), 8, (3, None, 3, 8), None),
    "padding": (masks.padding(5), 9, (None, None, 0, 5), ([0, 6], [0, 5], False)),
    "rows of padding": (masks.padding(5, 4), 6, None, ([0, 4, 6], [0, 5, 5], False)),
    "documents": (
        masks.segments(np.arange(6) // 4, np.arange(9) // 5), 9, None,
        ([0, 4, 6], [0, 5, 9], False),
    ),
    "causal documents": (
        masks.segments(np.arange(6) // 4) & masks.causal(), 6, None, ([0, 4, 6], [0, 4, 6], True)
    ),
    "documents in turn": (masks.segments(np.arange(6) % 2), 6, None, None),
    "documents backwards": (masks.segments(np.arange(6) // 4, 1 - np.arange(6) // 4), 6, None,
                            None),
    "a gap": (masks.segments(np.arange(6) // 4, np.array([0, 7, 1])), 3, None, None),

    "nothing": (masks.prefix(0), 6, None, ([0, 6], [0, 0], False)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_intervals_say_what_engines_take(name):
    mask, keys, band, documents = FORMS[name]
    found = mask.intervals((6, keys))
    assert found.band() == band
    given = found.documents(6)
    assert documents == (given and (given[0].tolist(), given[1].tolist(), given[2]))


def test_many_intervals_are_few_where_the_other_masks_show_keys():
    assert check(masks.segments(np.arange(40) % 2), lengths=(40, 40)) is None
    assert check(masks.dilated(2) | masks.causal(), lengths=(40, 40)) is None
    assert check(masks.dilated(2) & masks.window(4, 0), lengths=(300, 300)) == 3


@pytest.mark.parametrize("offset", [0, -3, 4, 2**40, np.array([0, 3])], ids=str)
def test_rows_count_from_an_offset_and_arrays_follow_items(offset):
    lengths = masks.prefix(np.array([3, 9])) | masks.window(1, 0)
    check(lengths & masks.segments(np.repeat(IDS, 2, 0)), (2,), 3, offset=offset)
    check(lengths & masks.global_tokens(3), (2,), 3, offset=offset)


@pytest.mark.parametrize("offset", [-(2**62), 2**63 - 1, np.array([2**62, -(2**62)])], ids=str)
def test_rows_may_be_far_from_the_keys(offset):
    for mask in (masks.window(3, 2**62 - 2), masks.window(2**63 - 1, 0), masks.dilated(3)):
        assert check(mask & ~masks.prefix(0), (2,), offset=offset)


def test_more_batch_axes_are_counted_flat():
    lengths = np.array([[3], [7]])
    assert check(masks.padding(lengths) & masks.causal(), (2, 3), 2) == 1
    assert masks.padding(lengths).intervals((4, 8), batch=(2, 3)).stop.shape == (6, 1, 1, 1)


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        (masks.segments(IDS), {"lengths": (9, 10)}, "query_ids must have L = 9 ids"),
        (masks.prefix(np.array([1, 2, 3])), {"batch": (2,)}, r"batch axes \(2,\)"),
        (masks.compile(masks.causal(), 8), {}, "compiled for L, S"),
        (masks.causal(), {"lengths": (4, -1)}, "at least 0; got -1"),
        (masks.causal(), {"most": 0}, "at least 1; got 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(mask, options, message):
    with pytest.raises(ValueError, match=message):
        mask.intervals(**{"lengths": (10, 10), **options})


def test_rows_of_a_large_mask_are_evaluated_in_turns(monkeypatch):
    monkeypatch.setattr("polyattn._core.expressions.intervals.AT_ONCE", 25)
    assert check(masks.rule(lambda b, h, i, j: (i >= j) & (j != 1)), heads=2) == 2


def composed(rng, depth, items, rows, keys):
    """Draw a composition of masks of every kind."""
    if depth and rng.random() < 0.75:
        one, other = (composed(rng, depth - 1, items, rows, keys) for _ in range(2))
        return (one & other, one | other, ~one)[rng.integers(3)]
    number = int(rng.integers(keys + 2))
    positions = np.roll(np.arange(keys), rng.integers(keys)) + rng.integers(3)
    return (
        lambda: masks.window(number, None),
        lambda: masks.window(number, int(rng.integers(4))),
        lambda: masks.prefix(rng.integers(0, keys + 2, items)),
        lambda: masks.padding(number, rng.integers(0, rows + 2, items)),
        lambda: masks.segments(rng.integers(0, 3, (items, rows)), rng.integers(0, 3, keys)),
        lambda: masks.dilated(int(rng.integers(1, 5))),
        lambda: masks.global_tokens(number, keys),
        lambda: masks.positions(
            rng.integers(0, keys, (items, rows)), positions, masks.window(3, 1)
        ),
        lambda: masks.dense(rng.random((rows, keys)) < 0.8),
        lambda: masks.tree(np.arange(rows) // 2 - 1),
    )[rng.integers(10)]()


def test_intervals_of_random_compositions():
    for seed in range(150):
        rng = np.random.default_rng(seed)
        items, heads, rows, keys = (int(n) for n in rng.integers(1, (4, 3, 12, 18)))
        offset = (None, 0, -2, rng.integers(-3, keys, items))[rng.integers(4)]
        mask = composed(rng, int(rng.integers(4)), items, rows, keys)
        assert check(mask, (items,), heads, (rows, keys), offset, most=32) is not None
