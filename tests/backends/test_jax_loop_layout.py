"""The layout of JAX's loops: which tiles each block of rows visits."""

import pytest

from polyattn import explain, masks
from polyattn_jax.loop_layout import ON_CPU, block_sizes, loops
from polyattn_jax.xla import Xla


def test_keys_that_no_row_sees_are_not_gone_over():
    whole = explain((1, 1, 8192, 8), (1, 1, 8192, 8), (1, 1, 8192, 8), library="jax").problem
    tile = 512**2

    def steps(problem):
        keys = [firsts for loop in loops(problem, tile) for firsts in loop.first_keys]
        return sum(first < 8192 for firsts in keys for first in firsts)

    rows, columns = block_sizes(whole, tile)
    assert steps(whole) == (8192 // rows) * (8192 // columns)
    assert steps(whole._replace(is_causal=True)) < 0.6 * steps(whole)
    window = whole._replace(is_causal=True, window=(256, 0))
    assert steps(window) <= 2 * (8192 // rows)


@pytest.mark.parametrize(("length", "keys"), [(1, 1), (1, 1000), (1000, 1), (37, 41), (512, 513)])
@pytest.mark.parametrize("tile", [64, 2**21])
def test_blocks_cover_each_row_once_and_every_key(length, keys, tile):
    shapes = (1, 2, length, 8), (1, 2, keys, 8), (1, 2, keys, 8)
    problem = explain(*shapes, library="jax").problem
    rows = []
    for loop in loops(problem, tile):
        for first in loop.first_rows:
            rows += range(first, first + loop.rows)
        assert loop.columns <= keys
        assert min(tiles[0] for tiles in loop.first_keys) + loop.steps * loop.columns >= keys
    assert rows == list(range(length))


@pytest.mark.parametrize(("length", "heads"), [(256, 24), (1024, 3), (2048, 12), (16384, 1)])
def test_a_power_of_two_is_cut_into_equal_blocks(length, heads):
    problem = explain(*[(1, heads, length, 64)] * 3, library="jax").problem
    for kind, tile in (("cpu", ON_CPU), ("cuda", Xla.tile)):
        problem = problem._replace(device=kind)
        assert all(length % size == 0 for size in block_sizes(problem, tile))
        assert len(loops(problem, tile)) == 1


@pytest.mark.parametrize(
    ("mask", "lengths"),  # of each block of rows, loop by loop
    [
        (lambda b, h, i, j: (i >= 896) | (j < 16), [[1] * 56, [64] * 8]),
        (lambda b, h, i, j: (i // 16 % 2 == 0) | (j < 16), [[64, 1] * 32]),
        (lambda b, h, i, j: i >= j, [[*range(1, 65)]]),
    ],
    ids=["a few wide rows", "rows that take turns", "causal rows"],
)
def test_few_wide_rows_alone_have_a_loop_of_their_own(mask, lengths):
    shape, mask = (1, 1, 1024, 8), masks.compile(mask, 1024, tile=16)
    problem = explain(shape, shape, shape, mask=mask, library="jax").problem
    found = loops(problem._replace(mask_spec=mask.spec(tables=True)), 256)
    steps = [[sum(key < 1024 for key in keys) for keys in loop.first_keys] for loop in found]
    assert steps == lengths
