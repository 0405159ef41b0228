"""Masks as values: what each shows, what it says of tiles, how they compose, print and compare."""

from functools import cache

import array_api_compat.numpy as xp
import numpy as np
import pytest
from arrays import EVERYWHERE, MASKS_OF_NUMBERS, STRICT, tiles_of, visited_tiles
from optional import reading, torch

from polyattn import attention, explain, masks
from polyattn._core.call.checks import examine
from polyattn._core.call.describe import describe
from polyattn._core.expressions.masks import And, Mask, Or
from polyattn.conformance.reference.expressions import CallRows, plainly
from polyattn.plugin import TileGrid, combined_mask

B, H, L, S, D = 2, 3, 21, 26, 4
RNG = np.random.default_rng(5)
QUERY, KEY, VALUE = (RNG.normal(size=(B, H, n, D)) for n in (L, S, S))
LENGTHS, ROWS = np.array([9, 26]), np.array([21, 7])
QUERY_IDS, KEY_IDS = np.sort(RNG.integers(0, 5, (B, L))), RNG.integers(0, 5, (B, S))
ARRAY = RNG.random((H, L, S)) < 0.4
#: Shuffled, some twice, some absent.
QUERY_PLACES, KEY_PLACES = RNG.integers(-1, 18, (B, L)), RNG.integers(-2, 18, (B, S))
#: In any order, some twice, some absent and some beyond the keys.
SELECTED, TABLE = RNG.integers(-1, S + 2, (B, H, L, 5)), RNG.integers(-1, 7, (B, H, 6, 3))
PARENTS = np.maximum(np.arange(L) - RNG.integers(1, 5, (B, L)), -1)


def checkered(b, h, i, j):
    return (i // 8 + j // 8) % 2 == b % 2


#: Masks by a function of the library's arrays.
MADE = {
    "causal": lambda to: masks.causal(),
    "window": lambda to: masks.window(4, 2),
    "boundless window": lambda to: masks.window(None, None),
    "prefix per item": lambda to: masks.prefix(to(LENGTHS)),
    "padding": lambda to: masks.padding(to(LENGTHS)),
    "padding of both": lambda to: masks.padding(11, to(ROWS)),
    "padding of rows": lambda to: masks.padding(query_lengths=to(ROWS)),
    "segments": lambda to: masks.segments(to(QUERY_IDS), to(KEY_IDS)),
    "dilated": lambda to: masks.dilated(3),
    "global tokens": lambda to: masks.global_tokens(0, 1, 2, 17),
    "dense": lambda to: masks.dense(to(ARRAY[None])),
    "dense of keys": lambda to: masks.dense(to(ARRAY[0, 0])),
    "rule": lambda to: masks.rule(checkered),
    "not causal": lambda to: ~masks.causal(),
    "and, or": lambda to: masks.causal() & masks.window(4, 0) | masks.prefix(3),
    "not or": lambda to: ~(masks.causal() | masks.padding(to(LENGTHS))),
    "with a function and an array": lambda to: (
        masks.dense(to(ARRAY[None])) & checkered | masks.global_tokens(4)
    ),
    "positions": lambda to: masks.positions(to(QUERY_PLACES), to(KEY_PLACES)),
    "positions of all items": lambda to: masks.positions(
        to(QUERY_PLACES[0].astype(np.int8)),
        to(KEY_PLACES[1].astype(np.int16)),
        ~masks.window(4, 2) & masks.dilated(3) | masks.prefix(2),
    ),
    "positions of a prefix per item": lambda to: masks.positions(
        to(QUERY_PLACES),
        to(KEY_PLACES),
        masks.window(3, None) & (masks.prefix(to(LENGTHS)) | masks.global_tokens(5, 17)),
    ),
    "selected": lambda to: masks.selected(to(SELECTED)),
    "selected of all heads": lambda to: (
        masks.causal() & ~masks.selected(to(SELECTED[:, :1].astype(np.int8)))
    ),
    "selected of none": lambda to: masks.selected(to(SELECTED[..., :0])),
    "blocks": lambda to: masks.blocks(to(TABLE), (4, 5)),
    "blocks of all heads": lambda to: masks.blocks(to(TABLE[0, 0]), (4, 3)) | masks.prefix(2),
    "tree": lambda to: masks.tree(to(PARENTS)),
    "tree of all items": lambda to: masks.tree(to(PARENTS[1])) & masks.window(9, None),
} | {name: lambda to, mask=mask: mask for name, mask in MASKS_OF_NUMBERS.items()}


@cache
def seen_by(name, offsets=(S - L, S - L)):
    """The keys that a mask shows, by the meaning that the conformance suite gives it."""
    rows = CallRows((B,), (H, L, S), np.array(offsets))
    return plainly(MADE[name](np.asarray), None, rows)[0]


def blocks_of(table, rows, keys):
    """Whether any, and whether all, of each tile is seen, by looking."""
    down, across = -(-L // rows), -(-S // keys)
    some, every = np.zeros((2, B, H, down, across), bool)
    for r, c in np.ndindex(down, across):
        block = table[..., r * rows : (r + 1) * rows, c * keys : (c + 1) * keys]
        some[..., r, c], every[..., r, c] = block.any((-2, -1)), block.all((-2, -1))
    return some, every


# ---- what is shown -----------------------------------------------------------------------------


# Each on one library; the suite has some of them on all.
@pytest.mark.parametrize(
    ("name", "library"), [(name, EVERYWHERE[n % 4]) for n, name in enumerate(MADE, 2)], ids=str
)
def test_a_mask_shows_what_it_says(name, library):
    expected = attention(QUERY, KEY, VALUE, mask=seen_by(name, (-4, 9)), kernel="dense")
    arrays = [library.to(x) for x in (QUERY, KEY, VALUE)]
    options = {"mask": MADE[name](library.to), "query_offset": library.to(np.array([-4, 9]))}
    for kernel in ("dense", tiles_of(400)):
        output = attention(*arrays, **options, kernel=kernel, backend="array-api")
        np.testing.assert_allclose(library.back(output), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MADE)
def test_a_mask_called_as_a_function_has_no_offset(name):
    seen = np.broadcast_to(MADE[name](np.asarray)(*np.ogrid[:B, :H, :L, :S]), (B, H, L, S))
    np.testing.assert_array_equal(seen, seen_by(name, (0, 0)))


#: Masks that know their tiles exactly.
EXACT = ("causal", "window", "padding", "padding of both", "global tokens", "not causal", "dense",
         "selected", "selected of none")  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_a_grid_never_calls_a_tile_empty_or_full_that_is_not(name):
    call, x = describe(QUERY, KEY, VALUE, mask=MADE[name](np.asarray))
    problem = examine(call)
    mask = combined_mask(problem, x)
    mask = masks.window(None, None) if mask is None else mask
    for rows, keys in ((4, 4), (5, 8), (L, S), (1, 1)):
        answer = TileGrid(problem, x, xp, (rows, keys), QUERY).of(mask)
        some, every = blocks_of(seen_by(name), rows, keys)
        found = [np.broadcast_to(one, some.shape) for one in answer]
        assert np.all(found[0] | ~some)
        assert np.all(every | ~found[1])
        if name in EXACT:
            np.testing.assert_array_equal(found, (some, every))


def test_empty_tiles_are_not_computed(monkeypatch):
    visited, x = visited_tiles(monkeypatch), RNG.normal(size=(1, 64, 4))
    ids = np.repeat(np.arange(4), 16)
    compiled = masks.compile(lambda b, h, i, j: i // 16 == j // 16, 64, tile=16)
    for mask in (masks.segments(ids), masks.dense(ids[:, None] == ids), compiled):
        visited.clear()
        attention(x, x, x, mask=mask, kernel=tiles_of(256), backend="array-api")
        assert [(r.start, c.start, masked) for r, c, masked in visited] == [
            (first, first, False) for first in range(0, 64, 16)
        ]


# ---- compiled ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "library"), [(name, EVERYWHERE[n % 4]) for n, name in enumerate(MADE)], ids=str
)
def test_a_compiled_mask_shows_the_same(name, library):
    arrays, mask = [library.to(x) for x in (QUERY, KEY, VALUE)], MADE[name](library.to)
    like = {"like": arrays[0]} if library is STRICT and not mask.carried() else {}
    with reading():  # which finds the tiles that it leaves empty
        mask = masks.compile(mask, L, S, batch=B, heads=H, tile=8, **like)
    expected = attention(QUERY, KEY, VALUE, mask=seen_by(name), kernel="dense")
    output = attention(*arrays, mask=mask, kernel=tiles_of(400), backend="array-api")
    np.testing.assert_allclose(library.back(output), expected, rtol=1e-12, atol=1e-12)


def test_a_compiled_mask_is_not_for_another_call():
    mask = masks.compile(checkered, L, S)
    with pytest.raises(ValueError, match=r"compiled for L, S, query_offset = \(21, 26, 5\)"):
        attention(QUERY, KEY[:, :, 1:], VALUE[:, :, 1:], mask=mask)
    with pytest.raises(ValueError, match=r"the call has \(21, 26, 0\)"):
        attention(QUERY, KEY, VALUE, mask=mask, query_offset=0)
    with pytest.raises(ValueError, match="3 batch items and 1 heads"):
        attention(QUERY, KEY, VALUE, mask=masks.compile(checkered, L, S, batch=3))


# ---- values ------------------------------------------------------------------------------------


def test_masks_compose_flat_by_precedence_and_with_arrays_and_functions_on_either_side():
    both = masks.causal() & masks.prefix(1) & masks.window(1, 1)
    assert isinstance(both, And)
    assert len(both.parts) == 3
    either = masks.causal() | masks.prefix(1) & masks.window(1, 1)
    assert isinstance(either, Or)
    assert isinstance(either.parts[1], And)
    assert repr((masks.causal() | masks.prefix(1)) & masks.window(1, 1)) == (
        "(masks.causal() | masks.prefix(1)) & masks.window(1, 1)"
    )
    assert ~~masks.causal() == masks.causal()
    array = np.ones((L, S), bool)
    for mask in (masks.causal() & array, array & masks.causal(), checkered & masks.causal()):
        assert isinstance(mask, Mask)
        assert len(mask.parts) == 2


# ---- where it goes -----------------------------------------------------------------------------


def test_what_an_option_says_goes_to_that_option():
    shape = (2, 4, 9, 8)

    def needs(mask, **options):
        return explain(shape, shape, shape, mask=mask, **options).problem

    assert needs(masks.causal()).features == {"causal"}
    both = needs(masks.causal() & masks.window(5, 3) & masks.window(None, 2), window=(4, None))
    assert both.features == {"causal", "window"}
    assert both.window == (4, 2)
    assert needs(masks.causal() & masks.dense(np.ones((9, 9), bool))).features == {"causal", "mask"}
    assert needs(masks.causal() & checkered).features == {"causal", "mask_mod"}
    assert needs(masks.causal() & masks.prefix(3)).features == {"causal", "mask_expression"}
    assert needs(masks.causal() | masks.prefix(3)).features == {"mask_expression"}
    assert needs(masks.causal() | checkered).features == {"mask_expression", "mask_mod"}


# ---- what does not fit the call ---------------------------------------------------------------

X = np.ones((2, 4, 6, 8))


@pytest.mark.parametrize(
    ("mask", "error", "words"),
    [
        (masks.padding(np.array([1, 2, 3])), ValueError, r"batch axes \(2,\); got \(3,\)"),
        (masks.segments(np.zeros(7, int)), ValueError, r"L = 6 ids; got \(7,\)"),
        (masks.positions(np.zeros(6, int), np.zeros(5, int)), ValueError, "S = 6 positions; got"),
        (masks.positions([0] * 6, [0] * 6, masks.prefix(np.ones(3, int))), ValueError, "lengths"),
        (masks.tree([[-1] * 6] * 3), ValueError, r"parents of shape \(\.\.\., L\).*got \(3, 6\)"),
        (masks.selected(np.zeros((4, 6, 2), int)), ValueError, "first could be batch or heads"),
        (masks.selected([3]), ValueError, r"to \(\.\.\., H, L, K\).*got \(K\)"),
        (masks.blocks([[0], [1]], 2), ValueError, r"H, ceil\(L / rows\), K\) = \(2, 4, 3, K\)"),
        (masks.dense(np.ones((2, 6, 6), bool)) | masks.causal(), ValueError, r"mask\[:, None\]"),
    ],
)
def test_a_mask_that_does_not_fit_the_call_is_refused(mask, error, words):
    with pytest.raises(error, match=words):
        attention(X, X, X, mask=mask)


def test_a_named_backend_takes_the_arrays_of_a_mask_along():
    with pytest.raises(TypeError, match=r"array of numpy and mask\.key_lengths one of torch"):
        attention(X, X, X, mask=masks.padding(torch.tensor([3, 4])))
    mask = masks.segments(np.array([0, 0, 1, 1, 1, 2])) & masks.padding(torch.tensor([3, 6]))
    seen = np.array([0, 0, 1, 1, 1, 2])[:, None] == np.array([0, 0, 1, 1, 1, 2])
    seen = seen & (np.arange(6) < np.array([3, 6]).reshape(2, 1, 1, 1))
    for backend in ("torch", "numpy"):
        output = attention(X, X, X, mask=mask, backend=backend)
        np.testing.assert_allclose(output, attention(X, X, X, mask=seen), atol=1e-12)
