"""How NumPy's kernel cuts a call by its band or its mask: each visible key once, little beside."""

import math
import tracemalloc

import numpy as np
import pytest
from arrays import draw

import polyattn_numpy.tiled_kernel as module
from polyattn import attention, attention_partial, attention_weights, explain, masks
from polyattn._base.span import Span
from polyattn._core.tiles.band import column_span
from polyattn_numpy.tile_visibility import TileVisibility
from polyattn_numpy.tiled_kernel import NumpyTiled
from polyattn_numpy.tiling import tasks, tiles


def problem_of(length, keys, heads=(2, 2), batch=1, **options):
    key = (batch, heads[1], keys, 8)
    return explain((batch, heads[0], length, 8), key, key, **options).problem


# ---- bands -------------------------------------------------------------------------------------

BANDS = [
    {},
    {"is_causal": True},
    {"is_causal": True, "query_offset": -40},
    {"window": (70, 35)},
    {"window": (None, 10), "query_offset": 7},
    {"window": (0, 0)},
]


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(("length", "keys"), [(150, 200), (200, 130)])
def test_tiles_hold_every_visible_key_once(length, keys, band):
    heads = (6, 2) if length > keys else (2, 2)
    problem = problem_of(length, keys, heads, batch=3, **band)
    visible = np.zeros((length, keys), bool)
    for row in range(length):
        visible[row, slice(*column_span(problem, Span(row, row + 1)))] = True
    for tile, threads in ((2**10, 1), (2**10, 4), (2**18, 2)):
        times = np.zeros((3, heads[1], length, keys), int)
        for task in tasks(problem, tile, threads):
            for part in tiles(problem, task, tile):
                spans = task.batch, part.heads, part.rows, part.columns
                inside = tuple(slice(*span) for span in spans)
                times[inside] += 1
                assert part.crosses_band or visible[inside[2:]].all()
                assert part.width > 0
        assert (times[..., visible] == 1).all()
        assert times.max(initial=0) <= 1


def test_the_work_of_a_band_grows_with_its_visible_keys():
    problem = problem_of(8192, 8192, window=(256, 0))
    area = sum(
        part.heads.length * part.rows.length * part.columns.length
        for task in tasks(problem, NumpyTiled.tile, 1)
        for part in tiles(problem, task, NumpyTiled.tile)
    )
    assert area < 2 * 1.6 * 257 * 8192


def test_the_longest_tasks_come_first_and_few_queries_are_cut_by_keys():
    work = [task.columns.length for task in tasks(problem_of(4096, 4096, is_causal=True), 2**18, 2)]
    assert work == sorted(work, reverse=True)
    assert work[0] > work[-1]
    decoding = problem_of(1, 40000, heads=(4, 2))
    assert {task.parts for task in tasks(decoding, NumpyTiled.tile, 8)} == {5}


# ---- masks -------------------------------------------------------------------------------------

ITEMS, HEADS, GROUPS, LENGTH, KEYS = 2, 4, 2, 300, 413
RNG = np.random.default_rng(3)
SEGMENTS = masks.segments(*(np.sort(RNG.integers(0, 4, (ITEMS, n))) for n in (LENGTH, KEYS)))
KEY_LENGTHS = np.array([413, 90])


def by_all_four(b, h, i, j):
    return (i + j + b + h) % 5 > 0


MASKS = {
    "segments & causal": SEGMENTS & masks.causal(),
    "not a window": ~masks.window(50, 50),
    "compiled": masks.compile(
        lambda b, h, i, j: (i // 64 + j // 64 + h) % 2 == 0, LENGTH, KEYS, heads=HEADS
    ),
    "rule in a value": masks.prefix(80) & masks.rule(by_all_four) | masks.window(20, 0),
    "array by head": RNG.random((1, HEADS, LENGTH, KEYS)) > 0.5,
}


@pytest.fixture
def qkv():
    shapes = (HEADS, LENGTH), (GROUPS, KEYS), (GROUPS, KEYS)
    return draw(*((ITEMS, heads, length, 16) for heads, length in shapes))


@pytest.fixture
def small_tiles(monkeypatch):
    """Let even short calls have many tiles."""
    monkeypatch.setattr(NumpyTiled, "tile", 2**14)


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


def bits(result):
    return [np.ascontiguousarray(x).tobytes() for x in result]


def visible_in(mask):
    """Return what a mask shows, shape (ITEMS, HEADS, LENGTH, KEYS)."""
    queries = np.zeros((ITEMS, HEADS, LENGTH, 1), np.float32)
    keys = np.zeros((ITEMS, HEADS, KEYS, 1), np.float32)
    return attention_weights(queries, keys, mask=mask) > 0


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.usefixtures("small_tiles")
def test_tiles_of_a_mask_hold_every_visible_key_once_and_hide_the_others(qkv, looks, name):
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
    found = times.swapaxes(2, 3).reshape(ITEMS, HEADS, LENGTH, KEYS)
    np.testing.assert_array_equal(found, visible_in(MASKS[name]))


@pytest.mark.usefixtures("small_tiles")
def test_a_band_at_an_offset_by_item_is_cut_by_a_table(qkv, looks):
    offsets = np.array([-100, 100], np.int8)
    options = {"is_causal": True, "window": (1000, 0), "kernel": "tiled"}
    found = attention_partial(*qkv, query_offset=offsets, **options)
    assert all(call.table is not None for call, *_ in looks)
    wide = attention_partial(*qkv, query_offset=offsets.astype(np.int64), **options)
    assert bits(found) == bits(wide)


@pytest.mark.parametrize(
    ("mask", "most"),  # of all scores
    [
        (masks.segments(np.repeat(np.arange(16), 256)) & masks.causal(), 1.55 / 32),
        (masks.window(512, 0) | masks.prefix(16), 1.4 / 8),
        (np.kron(np.eye(4, dtype=bool), np.ones((1024, 1024), bool)), 1 / 4),
    ],
    ids=["segments, causal", "streaming", "array"],
)
def test_the_work_grows_with_the_visible_tiles(mask, most, looks):
    (x,) = draw((1, 2, 4096, 8))
    attention(x, x, x, mask=mask)
    area = sum(
        task.batch.length * tile.heads.length * tile.rows.length * tile.columns.length
        for _, task, tile, _ in looks
    )
    assert area <= most * 2 * 4096**2


@pytest.mark.usefixtures("small_tiles")
def test_hidden_keys_change_no_bit_and_those_of_empty_tiles_are_never_met(passes):
    for lengths, kinds in (([384, 384], {"fast"}), ([333, 480], {"fast", "poison_safe"})):
        query, key, value = draw((2, 2, 512, 16), (2, 2, 512, 16), (2, 2, 512, 16))
        options = {"mask": masks.padding(np.array(lengths)), "kernel": "tiled"}
        expected = attention_partial(query, key, value, **options)
        for item, (length, poison) in enumerate(zip(lengths, (math.nan, -math.inf), strict=True)):
            key[item, :, length:], value[item, 1, length] = poison, poison
        passes.clear()
        assert bits(attention_partial(query, key, value, **options)) == bits(expected)
        assert set(passes) == kinds


@pytest.mark.usefixtures("small_tiles")
def test_rows_that_see_nothing_are_zero_in_a_fast_pass(qkv, passes):
    mask = masks.padding(KEY_LENGTHS, np.array([200, 0])) & SEGMENTS
    found = attention_partial(*qkv, mask=mask, kernel="tiled")
    empty = ~visible_in(mask).any(axis=-1)
    assert set(passes) == {"fast"}
    assert 0 < empty[0].sum() < empty[0].size
    assert (found.output[empty] == 0).all()
    assert (found.logsumexp[empty] == -math.inf).all()
    assert np.isfinite(found.logsumexp[~empty]).all()


def test_the_tasks_with_most_visible_tiles_come_first(monkeypatch):
    begun = []
    monkeypatch.setattr(module.thread_pool, "each", lambda _, items, *more: begun.extend(items))
    (x,) = draw((1, 1, 4096, 8))
    attention(x, x, x, mask=masks.segments(np.repeat(np.arange(3), (512, 3072, 512))))
    assert [task.rows.start for task in begun][:6] == [512, 1024, 1536, 2048, 2560, 3072]
    assert sorted(task.rows.start for task in begun[6:]) == [0, 3584]


def test_long_sequences_need_memory_for_a_few_tiles():
    (x,), mask = draw((1, 1, 6144, 16)), masks.segments(np.arange(6144) // 2048)
    tracemalloc.start()
    try:
        output = attention(x, x, x, mask=mask, window=(512, 0))
        # The scores have 144 MiB.
        assert tracemalloc.get_traced_memory()[1] - output.nbytes < 24e6
    finally:
        tracemalloc.stop()
