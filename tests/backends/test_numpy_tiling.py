"""How NumPy's kernel cuts a call: each visible key in one tile, and little beside them."""

import numpy as np
import pytest

import polyattn
from polyattn._base.span import Span
from polyattn._core.tiles.band import column_span
from polyattn_numpy.tiled_kernel import NumpyTiled
from polyattn_numpy.tiling import tasks, tiles


def problem_of(length, keys, heads=(2, 2), batch=1, **options):
    key = (batch, heads[1], keys, 8)
    return polyattn.explain((batch, heads[0], length, 8), key, key, **options).problem


BANDS = [
    {},
    {"is_causal": True},
    {"is_causal": True, "query_offset": 0},
    {"is_causal": True, "query_offset": -40},
    {"window": (20, 0)},
    {"window": (70, 35)},
    {"window": (None, 10), "query_offset": 7},
    {"window": (0, 0)},
    {"window": (300, None)},
]
SIZES = [(1, 90), (64, 64), (150, 200), (200, 130)]


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(("length", "keys"), SIZES)
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


@pytest.mark.parametrize(
    ("window", "most"), [((256, 0), 1.6), ((1024, 0), 1.25), ((None, 0), 1.05)]
)
def test_the_work_of_a_band_grows_with_its_visible_keys(window, most):
    problem = problem_of(8192, 8192, window=window)
    area = sum(
        part.heads.length * part.rows.length * part.columns.length
        for task in tasks(problem, NumpyTiled.tile, 1)
        for part in tiles(problem, task, NumpyTiled.tile)
    )
    visible = sum(column_span(problem, Span(row, row + 1)).length for row in range(8192))
    assert area / 2 < most * visible


def test_the_longest_tasks_come_first():
    work = [task.columns.length for task in tasks(problem_of(4096, 4096, is_causal=True), 2**18, 2)]
    assert work == sorted(work, reverse=True)
    assert work[0] > work[-1]


def test_few_queries_of_many_keys_are_cut_by_keys():
    problem = problem_of(1, 40000, heads=(4, 2))
    assert {task.parts for task in tasks(problem, NumpyTiled.tile, 8)} == {5}
