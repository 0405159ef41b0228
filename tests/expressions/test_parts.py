"""Expressions over a part of the scores: what they show and say of tiles there."""

import dataclasses
import pickle
from types import SimpleNamespace

import array_api_compat.numpy as xp
import numpy as np
import pytest

from polyattn import attention_weights, masks, scores
from polyattn._core.expressions.expression import Expression
from polyattn._core.expressions.indices import PointIndices
from polyattn._core.expressions.parts import Part
from polyattn.plugin import Slice, Span, TileQuery

BATCH, H, L, S, OFFSET = (2, 3), 4, 21, 26, 3
RNG = np.random.default_rng(5)
WHOLE = Part(BATCH, (Slice(0, 2), Slice(0, 3)), *(Slice(0, n) for n in (H, L, S)), OFFSET)
PARTS = [
    WHOLE._replace(items=(Slice(1, 1), Slice(0, 3)), rows=Slice(8, 8), columns=Slice(4, 16)),
    Part(BATCH, (Slice(0, 2), Slice(1, 2)), Slice(2, 1), Slice(5, 16), Slice(7, 19), OFFSET),
    WHOLE,
]
IDS = np.sort(RNG.integers(0, 4, (2, 1, S)), axis=-1)
ARRAY = RNG.random((2, 1, 1, L, S)) < 0.4


def rule(b, h, i, j):
    return (i // 4 + j // 4 + b + h) % 3 > 0


MASKS = {
    "window": masks.window(4, 2),
    "dilated": masks.dilated(3),
    "global tokens": masks.global_tokens(0, 9, 17),
    "prefix": masks.prefix(9),
    "prefix per item": masks.prefix(np.array([[3, 12, 26]], np.uint8)),
    "padding": masks.padding(11, np.array([3, 12, 21], np.int16)),
    "segments": masks.segments(IDS[..., :L], IDS),
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


def cut_before(expression, part):
    """The expression over a part, given arrays that are cut already."""
    return expression.apart().map_arrays(lambda axes, x: part.array(x, axes)).part(part)


def indices(shape, first=(0, 0, 0), flat=None):
    items = np.arange(np.prod(shape[:-3])) if flat is None else np.asarray(flat)
    b = items.reshape(-1, 1, 1, 1)
    h, i, j = (np.arange(n) + at for n, at in zip(shape[-3:], first, strict=True))
    return b, h[:, None, None], i[:, None], j


def both_ways(part):
    """The indices of a part, counted from its own first ones and from those of the whole."""
    own = tuple(span.length for span in part.items)
    shape = (*own, part.heads.length, part.rows.length, part.columns.length)
    inside = PointIndices(*indices(shape), offset=OFFSET + part.away, batch=own)
    first = (part.heads.start, part.rows.start, part.columns.start)
    outside = PointIndices(*indices(shape, first, part.flat_items), offset=OFFSET, batch=BATCH)
    return inside, outside


@pytest.mark.parametrize("part", PARTS, ids=["middle", "corner", "whole"])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_shows_in_a_part_what_it_shows_there(name, part):
    mask = pickle.loads(pickle.dumps(over(MASKS[name], part)))
    inside, outside = both_ways(part)
    shape = (len(part.flat_items), *(s.length for s in part[2:]))
    found, expected = mask.seen(inside), MASKS[name].seen(outside)
    np.testing.assert_array_equal(np.broadcast_to(found, shape), np.broadcast_to(expected, shape))


@pytest.mark.parametrize("name", [n for n in MASKS if "rule" not in n])
def test_a_mask_knows_as_much_of_the_tiles_of_a_part(name):
    part, mask = PARTS[0], over(MASKS[name], PARTS[0])
    offset = SimpleNamespace(query_offset=OFFSET, batch=part.batch)
    inside = SimpleNamespace(query_offset=OFFSET + part.away, batch=part.batch)
    empty = 0
    for rows in part.rows.split(4):
        for columns in part.columns.split(4):
            own = Span(rows.start - 8, rows.stop - 8), Span(columns.start - 4, columns.stop - 4)
            found = TileQuery(inside, None, xp, *own, reads=True).of(mask)
            whole = TileQuery(offset, None, xp, rows, columns, reads=True).of(MASKS[name])
            assert found.any_visible <= whole.any_visible
            assert found.all_visible >= whole.all_visible
            empty += not found.any_visible
    assert empty or name in ("dilated", "prefix per item", "dense", "composed", "compiled")


def test_a_table_that_begins_elsewhere_is_left_out():
    part = PARTS[1]
    assert not hasattr(over(MASKS["compiled"], part), "size")
    assert over(MASKS["compiled"], PARTS[0]).size == 4


@pytest.mark.parametrize("part", PARTS, ids=["middle", "corner", "whole"])
@pytest.mark.parametrize("name", SCORES)
def test_a_score_is_changed_in_a_part_as_it_is_there(name, part):
    inside, outside = both_ways(part)
    given = RNG.normal(size=(len(part.flat_items), *(s.length for s in part[2:])))
    inside.per_head = outside.per_head = None
    for at, span in ((inside, Span(0, part.heads.length)), (outside, part.heads)):
        at.per_head = lambda numbers, span=span: numbers[slice(*span)][:, None, None]
    found = over(SCORES[name], part).apply(given, inside)
    np.testing.assert_allclose(found, SCORES[name].apply(given, outside), rtol=1e-12)


def test_every_array_of_an_expression_has_axes():
    def fields(cls):
        for one in cls.__subclasses__():
            if dataclasses.is_dataclass(one):
                yield from (f.name for f in dataclasses.fields(one) if f.type == "Any")
            yield from fields(one)

    for field in set(fields(Expression)):
        assert axes_of_array(field, 1, 2)


def test_a_slope_for_each_head_is_that_of_the_number_of_heads():
    x = RNG.normal(size=(6, 5, 4))
    part = scores.alibi(6).part(Part((), (), Span(0, 6), Span(0, 5), Span(0, 5)))
    for heads in (slice(0, 6), slice(2, 5)):
        own = dataclasses.replace(part, slopes=part.slopes[heads])
        expected = attention_weights(x, x, score_mod=scores.alibi(6))[heads]
        found = attention_weights(x[heads], x[heads], score_mod=own)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    with pytest.raises(ValueError, match="6 slopes for 3"):
        attention_weights(x[:3], x[:3], score_mod=part)
