"""Expressions over a part of the scores: what they show and say of tiles there."""

import dataclasses
import pickle
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from arrays import MASKS_OF_NUMBERS
from optional import jax, jnp

from polyattn import masks, scores
from polyattn._base.arrays import is_array
from polyattn._base.slices import Slice
from polyattn._core.expressions.expression import Expression
from polyattn._core.expressions.indices import PointIndices
from polyattn._core.expressions.masks import Mask
from polyattn._core.expressions.parts import Part
from polyattn._core.expressions.scores import Score
from polyattn.plugin import Span, TileQuery

BATCH, H, L, S, OFFSET = (2, 3), 4, 21, 26, 3
RNG, OTHER = np.random.default_rng(5), np.random.default_rng(6)
WHOLE = Part(BATCH, (Slice(0, 2), Slice(0, 3)), *(Slice(0, n) for n in (H, L, S)), OFFSET)
PARTS = [
    WHOLE._replace(items=(Slice(1, 1), Slice(0, 3)), rows=Slice(8, 8), columns=Slice(4, 16)),
    Part(BATCH, (Slice(0, 2), Slice(1, 2)), Slice(2, 1), Slice(5, 16), Slice(7, 19), OFFSET),
    WHOLE,
]
PLACES = ["middle", "corner", "whole"]
IDS = np.sort(RNG.integers(0, 4, (2, 1, S)), axis=-1)
ARRAY = RNG.random((2, 1, 1, L, S)) < 0.4


def rule(b, h, i, j):
    return (i // 4 + j // 4 + b + h) % 3 > 0


MASKS = MASKS_OF_NUMBERS | {
    "window": masks.window(4, 2),
    "dilated": masks.dilated(3),
    "global tokens": masks.global_tokens(0, 9, 17),
    "neighborhood": masks.neighborhood((13, 2), (2, 1), dilation=(3, 1), stride=(2, 1)),
    "prefix per item": masks.prefix(np.array([[3, 12, 26]], np.uint8)),
    "padding": masks.padding(11, np.array([3, 12, 21], np.int16)),
    "segments": masks.segments(IDS[..., :L], IDS),
    "positions": masks.positions(
        IDS[..., :L] * 4,
        np.arange(-2, S - 2)[::-1],
        ~masks.window(4, 2) & masks.prefix(np.array([[3], [12]])) | masks.global_tokens(0, 9),
    ),
    "tree": masks.tree(np.maximum(np.arange(-1, L - 1) - RNG.integers(0, 6, (2, 1, L)), -1)),
    "selected": masks.selected(OTHER.integers(-1, S, (2, 1, H, L, 4)).astype(np.int8)),
    "selected for all rows": masks.selected([[21, 3]]),
    "blocks": masks.blocks(OTHER.integers(-1, 9, (2, 1, 1, 5, 2)), (5, 3)),
    "dense": masks.dense(ARRAY) | masks.dense(ARRAY[0, 0, 0]),
    "rule": masks.rule(rule),
    "composed": ~masks.causal() & masks.dense(ARRAY[0, 0, 0, 0]) | masks.global_tokens(4),
    "compiled": masks.compile(rule, L, S, query_offset=OFFSET, batch=BATCH, heads=H, tile=4),
}
SCORES = {
    "alibi": scores.alibi(H),
    "alibi of slopes": scores.alibi(np.arange(4.0)) >> scores.temperature(2.0),
    "alibi of 6 heads": scores.alibi(6),
    "relative bias": scores.relative_bias(RNG.normal(size=(8, H))) >> scores.softcap(3.0),
    "function": scores.function(lambda s, b, h, i, j: s * h + b * i - j),
}


#: An expression over a part, given arrays that are cut already, and given whole ones.
WAYS = {
    "cut before": lambda expression, part: (
        expression.with_array_per_axis().map_arrays(lambda axes, x: part.array(x, axes)).part(part)
    ),
    "cut here": lambda expression, part: expression.part(part),
}


def indices(shape, first=(0, 0, 0), flat=None, lib=np):
    items = lib.arange(np.prod(shape[:-3])) if flat is None else lib.asarray(flat)
    b = items.reshape(-1, 1, 1, 1)
    h, i, j = (lib.arange(n) + at for n, at in zip(shape[-3:], first, strict=True))
    return b, h[:, None, None], i[:, None], j


def inside(part, lib=np):
    """The indices of a part, counted from its own first ones."""
    own = tuple(span.length for span in part.items)
    offset = part.counted(lib.full(BATCH, OFFSET), -part.offset_shift).reshape(-1)
    return PointIndices(
        *indices((*own, *(s.length for s in part[2:5])), lib=lib), offset=offset, batch=own
    )


def outside(part):
    """The indices of a part, counted from the first ones of the whole."""
    shape = (*(s.length for s in part.items), *(s.length for s in part[2:5]))
    return PointIndices(
        *indices(shape, part.first[1:], part.flat_items), offset=OFFSET, batch=BATCH
    )


def shape_of(part):
    return len(part.flat_items), *(s.length for s in part[2:5])


@pytest.mark.parametrize("part", PARTS, ids=PLACES)
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_shows_in_a_part_what_it_shows_there(name, part):
    expected = np.broadcast_to(MASKS[name].seen(outside(part)), shape_of(part))
    for over in WAYS.values():
        mask = pickle.loads(pickle.dumps(over(MASKS[name], part)))
        found = np.broadcast_to(mask.seen(inside(part)), shape_of(part))
        np.testing.assert_array_equal(found, expected)


def coverage(part, mask, offset, first=(0, 0)):
    """What a mask says of the tiles of a part, 4 by 4, which begins at these rows and keys."""
    problem = SimpleNamespace(query_offset=offset, batch=tuple(s.length for s in part.items))
    tiles = [
        mask.coverage(TileQuery(problem, problem, np, rows, columns, reads=True))
        for rows in Span(first[0], first[0] + part.rows.length).split(4)
        for columns in Span(first[1], first[1] + part.columns.length).split(4)
    ]
    any_visible = [np.any(tile.any_visible) for tile in tiles]
    return np.array(any_visible), np.array([np.all(tile.all_visible) for tile in tiles])


def shown_somewhere(part, mask):
    """Whether any row sees a key of each tile of a part."""
    seen = np.broadcast_to(mask.seen(outside(part)), shape_of(part)).any((0, 1))
    return seen.reshape(part.rows.length // 4, 4, -1, 4).any((1, 3))


@pytest.mark.parametrize("name", [n for n in MASKS if "rule" not in n])
def test_a_mask_knows_as_much_of_the_tiles_of_a_part(name):
    part, mask = PARTS[0], MASKS[name]
    of_all = part._replace(items=WHOLE.items)
    whole = coverage(of_all, mask, OFFSET, part.first[2:])
    any_visible, all_visible = coverage(part, mask.part(part), OFFSET + part.offset_shift)
    assert np.all(any_visible <= whole[0])
    assert np.all(all_visible >= whole[1])
    knows_tiles = type(mask)._coverage is not Mask._coverage
    assert not np.all(whole[0]) or not knows_tiles or np.all(shown_somewhere(of_all, mask))


def test_a_table_that_begins_elsewhere_is_left_out():
    part = PARTS[1]
    assert not hasattr(MASKS["compiled"].part(part), "size")
    assert MASKS["compiled"].part(PARTS[0]).size == 4


@pytest.mark.parametrize("part", PARTS, ids=PLACES)
@pytest.mark.parametrize("name", SCORES)
def test_a_score_is_changed_in_a_part_as_it_is_there(name, part):
    given = RNG.normal(size=shape_of(part))
    expected = SCORES[name].apply(given, outside(part))
    for over in WAYS.values():
        found = over(SCORES[name], part).apply(given, inside(part))
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_parts_may_begin_at_traced_places():
    part, given = PARTS[1], RNG.normal(size=shape_of(PARTS[1]))
    seen = [MASKS[name] for name in ("window", "tree", "composed", "selected for all rows")]

    def of_jax(expression):
        return expression.map(lambda _, x: jnp.asarray(x) if is_array(x) else x)

    @jax.jit
    def traced(starts):
        spans = (Slice(n, s.length) for n, s in zip(starts, part[2:5], strict=True))
        there = Part(part.batch, part.items, *spans, part.offset)
        at = inside(there, jnp)
        changed = [of_jax(x).part(there).apply(jnp.asarray(given), at) for x in SCORES.values()]
        return [of_jax(mask).part(there).seen(at) for mask in seen], changed

    shown, changed = traced(part.first[1:])
    for found, mask in zip(shown, seen, strict=True):
        pair = np.broadcast_arrays(found, mask.seen(outside(part)))
        np.testing.assert_array_equal(*pair, err_msg=str(mask))
    for found, score in zip(changed, SCORES.values(), strict=True):
        expected = score.apply(given, outside(part))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", PARTS, ids=PLACES)
@pytest.mark.parametrize("axes", [".HLS", ".S", "-H"])
def test_the_gradient_of_a_part_is_padded_with_zeros(axes, part):
    shape = {".HLS": (*BATCH, H, 1, S), ".S": (*BATCH, S), "-H": (7, H)}[axes]
    whole = RNG.normal(size=shape)
    entries = part.array(whole, axes)
    weights = RNG.normal(size=entries.shape)
    padded = part.padded(weights, whole, axes)
    assert padded.shape == whole.shape
    np.testing.assert_allclose((padded * whole).sum(), (weights * entries).sum())


def classes(cls=Expression):
    """The expressions that a call may hold."""
    for one in cls.__subclasses__():
        if dataclasses.is_dataclass(one) and one.__module__.startswith("polyattn."):
            yield one
        yield from classes(one)


def within(value):
    """The classes of an expression and of those in it."""
    yield type(value)
    for field in (getattr(value, name) for name in value.__match_args__):
        for one in field if isinstance(field, tuple) else (field,):
            if isinstance(one, Expression):
                yield from within(one)


def test_each_mask_and_score_is_tested_here():
    tested = {cls for one in (*MASKS.values(), *SCORES.values()) for cls in within(one)}
    rest = {cls.__name__ for cls in classes() if issubclass(cls, Mask | Score)}
    # The base of two, and the padding of a memory, whose part is padding.
    others = {"Joined", "CachePadding"}
    assert rest - {cls.__name__ for cls in tested} <= others


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Unknown(Mask):
    name = "every_third"
    step: int = 3


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Undeclared(Mask):
    name = "chosen"
    axes: ClassVar = {}
    keys: Any


def test_an_expression_that_does_not_say_is_refused_by_name():
    with pytest.raises(TypeError, match=r"masks.every_third cannot be cut .* does not give `axes`"):
        (masks.causal() & ~Unknown()).part(WHOLE)
    for change in (lambda x: x.part(WHOLE), lambda x: x.arrays()):
        with pytest.raises(
            TypeError, match=r"masks.chosen cannot be cut .* not give the axes of `keys`"
        ):
            change(masks.causal() | Undeclared(np.ones(S, bool)))
