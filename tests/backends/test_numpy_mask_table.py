"""What NumPy's kernel leaves out by a mask's tiles: no visible key, and no bit of a result."""

import math
import tracemalloc

import numpy as np
import pytest

import polyattn
import polyattn_numpy.tiled_kernel as module
from polyattn import attention, attention_partial, attention_weights, masks
from polyattn_numpy.tile_visibility import TileVisibility
from polyattn_numpy.tiled_kernel import NumpyTiled

ITEMS, HEADS, GROUPS, LENGTH, KEYS = 2, 4, 2, 300, 413
RNG = np.random.default_rng(3)
ROW_IDS = np.sort(RNG.integers(0, 4, (ITEMS, LENGTH)))
KEY_IDS = np.sort(RNG.integers(0, 4, (ITEMS, KEYS)))
KEY_LENGTHS = np.array([413, 90])


def checkered(b, h, i, j):
    return (i // 64 + j // 64 + h) % 2 == 0


def by_all_four(b, h, i, j):
    return (i + j + b + h) % 5 > 0


SEGMENTS = masks.segments(ROW_IDS, KEY_IDS)
MASKS = {
    "segments": SEGMENTS,
    "segments & causal": SEGMENTS & masks.causal(),
    "prefix by item": masks.causal() | masks.prefix(np.array([3, 200])),
    "padding": masks.padding(KEY_LENGTHS, np.array([300, 17])),
    "not a window": ~masks.window(50, 50),
    "dilated": masks.window(100, 100) & masks.dilated(3),
    "global tokens": masks.window(30, 30) | masks.global_tokens(0, 5, 200),
    "compiled": masks.compile(checkered, LENGTH, KEYS, heads=HEADS),
    "rule in a value": masks.prefix(80) & masks.rule(by_all_four) | masks.window(20, 0),
    "array with a few holes": RNG.random((LENGTH, KEYS)) > 0.001,
    "random array": RNG.random((LENGTH, KEYS)) > 0.5,
    "array by item": (np.arange(KEYS) < KEY_LENGTHS[:, None])[:, None, None],
    "array by head": np.kron(RNG.random((1, HEADS, 5, 7)) > 0.5, np.ones((64, 64), bool))[
        ..., :LENGTH, :KEYS
    ],
}
#: Each mask, and a size of tiles of which even short arrays have many.
CUT = [(name, 2 ** (13 + n % 2)) for n, name in enumerate(MASKS)]


def randn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.fixture
def qkv():
    return (
        randn(ITEMS, HEADS, LENGTH, 16),
        randn(ITEMS, GROUPS, KEYS, 16, seed=1),
        randn(ITEMS, GROUPS, KEYS, 16, seed=2),
    )


@pytest.fixture(params=[2**14])
def small_tiles(request, monkeypatch):
    monkeypatch.setattr(NumpyTiled, "tile", request.param)


def bits(result):
    return [np.ascontiguousarray(x).tobytes() for x in result]


@pytest.fixture
def looks(monkeypatch):
    """Return the list of the calls, tasks and tiles that are gone through, with their masks."""
    found = []

    class Watched(TileVisibility):
        def masks(self, tile):
            masks = super().masks(tile)
            if masks is not None:
                found.append((self.call, self.task, tile, masks))
            return masks

    for file in ("tile_scores", "at_once"):
        monkeypatch.setattr(f"polyattn_numpy.{file}.TileVisibility", Watched)
    return found


def visible_in(mask):
    """Return what a mask shows, shape (ITEMS, HEADS, LENGTH, KEYS)."""
    queries = np.zeros((ITEMS, HEADS, LENGTH, 1), np.float32)
    keys = np.zeros((ITEMS, HEADS, KEYS, 1), np.float32)
    return attention_weights(queries, keys, mask=mask) > 0


# ---- the same result ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "small_tiles"), CUT, indirect=["small_tiles"])
@pytest.mark.usefixtures("small_tiles")
def test_tiles_hold_every_visible_key_once_and_hide_the_others(qkv, looks, name):
    attention(*qkv, mask=MASKS[name], kernel="tiled")
    times = np.zeros((ITEMS, GROUPS, LENGTH, HEADS // GROUPS, KEYS), int)
    # Each once, though rows that see nothing are looked at again.
    for (task, tile), hidden in {look[1:3]: look[3] for look in looks}.items():
        inside = np.s_[
            slice(*task.batch), slice(*tile.heads), slice(*tile.rows), :, slice(*tile.columns)
        ]
        seen = np.ones(times[inside].shape, bool)
        for where, some in hidden:
            seen[where] &= some
        times[inside] += seen
    got = times.swapaxes(2, 3).reshape(ITEMS, HEADS, LENGTH, KEYS)
    np.testing.assert_array_equal(got, visible_in(MASKS[name]))


# The function of "rule in a value" knows which item it is asked about.
@pytest.mark.parametrize(
    ("name", "small_tiles"),
    [row for row in CUT if row[0] != "rule in a value"],
    indirect=["small_tiles"],
)
@pytest.mark.usefixtures("small_tiles")
def test_an_item_whose_mask_differs_has_the_same_bits_alone(qkv, name):
    def own(name, thing):
        by_item = not callable(thing) and thing.ndim and thing.shape[0] == ITEMS
        return thing[item : item + 1] if by_item else thing

    qkv[0][1] *= 60  # the second item with maxima
    both = attention_partial(*qkv, mask=MASKS[name], kernel="tiled")
    for item in range(ITEMS):
        mask = MASKS[name]
        mask = mask.map(own) if isinstance(mask, masks.Mask) else own("", mask)
        alone = attention_partial(*(x[item : item + 1] for x in qkv), mask=mask, kernel="tiled")
        assert bits(alone) == bits(x[item : item + 1] for x in both)


@pytest.mark.parametrize("name", ["segments", "array by head", "random array"])
@pytest.mark.usefixtures("small_tiles")
def test_any_number_of_threads_gives_the_same_bits_by_a_table(qkv, name):
    found = []
    for count in (1, 2, 7):
        with polyattn.use_threads(count):
            found.append(bits(attention_partial(*qkv, mask=MASKS[name], kernel="tiled")))
    assert found[0] == found[1] == found[2]


@pytest.mark.usefixtures("small_tiles")
def test_a_band_at_an_offset_by_item_is_cut_by_a_table(qkv, looks):
    offsets = np.array([-100, 100], np.int8)
    options = {"is_causal": True, "window": (1000, 0), "query_offset": offsets}
    got = attention_partial(*qkv, kernel="tiled", **options)
    assert all(call.table is not None for call, *_ in looks)
    wide = {**options, "query_offset": offsets.astype(np.int64)}
    assert bits(got) == bits(attention_partial(*qkv, kernel="tiled", **wide))


# ---- the work ----------------------------------------------------------------------------------


WORK = {
    "segments, causal": (
        lambda: masks.segments(np.repeat(np.arange(16), 256)) & masks.causal(),
        1 / 32,
        1.55,
    ),
    "padding": (lambda: masks.padding(1024), 1 / 4, 1.0),
    "streaming": (lambda: masks.window(512, 0) | masks.prefix(16), 1 / 8, 1.4),
    "array": (lambda: np.kron(np.eye(4, dtype=bool), np.ones((1024, 1024), bool)), 1 / 4, 1.0),
}


@pytest.mark.parametrize("name", WORK)
def test_the_work_grows_with_the_visible_tiles(name, looks):
    make, share, most = WORK[name]
    x = randn(1, 2, 4096, 8)
    attention(x, x, x, mask=make())
    area = sum(
        task.batch.length * tile.heads.length * tile.rows.length * tile.columns.length
        for _, task, tile, _ in looks
    )
    assert area <= most * share * 2 * 4096**2


def test_only_mixed_tiles_are_asked_which_keys_they_show():
    asked = []

    def halves(b, h, i, j):
        asked.append((int(i.min()), int(i.max()), int(j.min()), int(j.max())))
        return (i // 1000) == (j // 1000)

    mask = masks.compile(halves, 2048)
    asked.clear()
    x = randn(1, 2, 2048, 8)
    attention(x, x, x, mask=mask)
    corner, *tiles = asked  # one key tells whether heads differ
    assert corner == (0, 0, 0, 0)
    assert tiles
    for first, last, start, end in tiles:  # an edge goes through each
        assert first // 1000 != last // 1000 or start // 1000 != end // 1000


def test_nan_in_empty_tiles_is_never_met(passes):
    x = randn(1, 2, 2048, 16)
    bad = x.copy()
    bad[:, :, 1024:] = math.nan
    mask = masks.prefix(1024) & masks.causal()
    want = attention(x, x, x, mask=mask)
    assert bits([attention(x, bad, bad, mask=mask)]) == bits([want])
    assert set(passes) == {"fast"}


@pytest.mark.parametrize("poison", [math.nan, -math.inf])
@pytest.mark.usefixtures("small_tiles")
def test_keys_hidden_in_mixed_tiles_change_no_bit(poison, passes):
    q, k, v = (randn(2, 2, 500, 16, seed=seed) for seed in range(3))
    mask = masks.padding(np.array([333, 480]))
    want = attention_partial(q, k, v, mask=mask, kernel="tiled")
    for item, length in enumerate((333, 480)):
        k[item, :, length:], v[item, 1, length] = poison, poison
    got = attention_partial(q, k, v, mask=mask, kernel="tiled")
    assert "poison_safe" in passes
    assert bits(got) == bits(want)


@pytest.mark.usefixtures("small_tiles")
def test_rows_that_see_nothing_are_zero_in_a_fast_pass(qkv, passes):
    mask = masks.padding(KEY_LENGTHS, np.array([200, 0])) & SEGMENTS
    got = attention_partial(*qkv, mask=mask, kernel="tiled")
    empty = ~visible_in(mask).any(axis=-1)
    assert set(passes) == {"fast"}
    assert 0 < empty[0].sum() < empty[0].size
    assert (got.output[empty] == 0).all()
    assert (got.logsumexp[empty] == -math.inf).all()
    assert np.isfinite(got.logsumexp[~empty]).all()


# ---- the tasks ---------------------------------------------------------------------------------


def test_the_tasks_with_most_visible_tiles_come_first(monkeypatch):
    begun = []
    monkeypatch.setattr(module.thread_pool, "each", lambda _, items, *more: begun.extend(items))
    x = randn(1, 1, 4096, 8)
    ids = np.repeat(np.arange(3), (512, 3072, 512))
    attention(x, x, x, mask=masks.segments(ids))
    assert [task.rows.start for task in begun][:6] == [512, 1024, 1536, 2048, 2560, 3072]
    assert sorted(task.rows.start for task in begun[6:]) == [0, 3584]


@pytest.mark.parametrize(("lengths", "items"), [(np.array([1200, 5, 9, 70]), 1), (70, 4)])
def test_items_share_a_task_only_if_their_masks_are_one(lengths, items, looks):
    x = randn(4, 1, 1200, 8)
    with polyattn.use_threads(1):
        attention(x, x, x, mask=masks.padding(lengths))
    assert {task.batch.length for _, task, *_ in looks} == {items}


@pytest.mark.parametrize(
    ("length", "options", "has_table"),
    [
        (700, {"mask": masks.prefix(9)}, True),
        (700, {"mask": np.tri(700, dtype=bool)}, True),
        (200, {"mask": masks.prefix(9)}, False),
        (700, {"mask": by_all_four, "is_causal": True}, False),
        (700, {"is_causal": True, "bias": np.ones((700, 1), np.float32)}, False),
    ],
)
def test_a_table_is_made_only_where_it_can_save_something(length, options, has_table, looks):
    x = randn(1, 4, length, 8)
    attention(x, x, x, kernel="tiled", **options)
    assert {call.table is not None for call, *_ in looks} == {has_table}


LONG = 8192


@pytest.mark.parametrize(
    "mask",
    [
        lambda: masks.segments(np.arange(LONG) // 4096) & masks.window(1024, 0),
        lambda: masks.compile(lambda b, h, i, j: (j <= i) & (j >= i - 1024), LONG),
    ],
    ids=["documents", "compiled"],
)
def test_long_sequences_need_memory_for_a_few_tiles(mask):
    x, mask = randn(1, 1, LONG, 16), mask()
    tracemalloc.start()
    try:
        out = attention(x, x, x, mask=mask)
        assert tracemalloc.get_traced_memory()[1] - out.nbytes < 32e6
    finally:
        tracemalloc.stop()
