"""The picture of a mask: which keys the rows see, and which tiles are empty, mixed and full.

What must hold true: the tiles are what the mask itself answers, so that one that can say little is
drawn mixed; of long sequences the tiles alone are drawn, and nothing as large as the scores is
made; lightness alone tells the colours apart; nothing is shown or saved.
"""

from __future__ import annotations

import importlib
import math
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from polyattn.arrays import (
    Array,
    ArrayFacts,
    broadcast_shapes,
    facts_of,
    index_range,
    is_array,
    library_of,
)
from polyattn.call.describe import Operands, describe
from polyattn.call.problem import Problem, examine
from polyattn.expressions.indices import PointIndices
from polyattn.expressions.masks import (
    And,
    Compiled,
    Dense,
    Mask,
    Not,
    Or,
    Padding,
    Prefix,
    Segments,
)
from polyattn.extras import require_matplotlib
from polyattn.tiles.coverage import TileGrid

__all__ = ["draw_mask"]

# Beyond so many scores each has less than a pixel.
MOST_CELLS = 2**20
MOST_LINES = 64
LENGTH = 64
# The last two of Okabe and Ito's colours; a hidden key of a mixed tile has the light one of it.
EMPTY, HIDDEN, SEEN, FULL = range(4)
COLOURS = ("#ffffff", "#fbe3bd", "#e69f00", "#0072b2")
LINES, FRAME = "#c9cdd4", "#6b7280"


def draw_mask(
    mask: Mask,
    query_length: int | None = None,
    key_length: int | None = None,
    *,
    query_offset: int | None = None,
    tile: int | None = None,
    batch: tuple[int, ...] | None = None,
    item: int = 0,
    head: int = 0,
    like: Array | None = None,
    axes: Any = None,
) -> Any:
    """Draw which keys the rows see, and which tiles are empty, mixed and full.

    Parameters
    ----------
    mask : Mask
        What to draw.
    query_length, key_length : int, optional
        L and S: by default those that arrays and tables in the mask are for, or one as the other,
        or 64.
    query_offset : int, optional
        The position of the first row among the keys, by default the table's, or S − L.
    tile : int, optional
        How many rows and keys a tile has: by default as in the table, or an eighth of the longer
        side, and 128 at most.
    batch : tuple of int, optional
        The batch axes, by default those of the mask's arrays.
    item, head : int
        Which batch item, counted flat, and which query head to draw.
    like : Array, optional
        An array of the library and device where a function in the mask works, as of
        `polyattn.masks.compile`.
    axes : matplotlib.axes.Axes, optional
        Where to draw, by default in a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        What was drawn on.

    Raises
    ------
    ImportError
        If there is no matplotlib.
    ValueError
        If the mask is not for such a call.

    Examples
    --------
    >>> from polyattn import masks
    >>> mask = masks.causal() & masks.window(16, 0) | masks.prefix(4)
    >>> axes = mask.plot(64)
    >>> axes.get_xlabel(), axes.get_ylabel()
    ('key j', 'query i')
    """
    numpy, pyplot = importlib.import_module("numpy"), require_matplotlib("pyplot")
    for name, number in (("L", query_length), ("S", key_length), ("tile", tile)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1; got {number!r}")
    call = _call(mask, query_length, key_length, query_offset, batch, item, head)
    size = tile or _tile_size(mask, call)
    drawn = _Drawn(mask, call, like, numpy)
    if axes is None:
        _, axes = pyplot.subplots(figsize=(4.6, 5.5), layout="compressed")
    kinds = drawn.tiles(size)
    whole = call.lengths[0] * call.lengths[1] <= MOST_CELLS
    _paint(axes, drawn.cells(kinds, size) if whole else kinds, 1 if whole else size, call.lengths)
    _rule_off(axes, kinds.shape, size)
    _label(axes, mask, call, size, numpy.bincount(kinds.ravel(), minlength=4), whole)
    return axes


# ---- which call to draw ------------------------------------------------------------------------


class _Call(NamedTuple):
    """The call that a mask is drawn for, and which item and head of it."""

    lengths: tuple[int, int]
    query_offset: int
    batch: tuple[int, ...]
    heads: int
    item: int
    head: int


class _Told(NamedTuple):
    """What an array or table in a mask tells of the calls that it is for."""

    query_length: int | None = None
    key_length: int | None = None
    query_offset: int | None = None
    batch: tuple[int, ...] = ()
    items: int = 1
    heads: int = 1


def _call(
    mask: Mask,
    query_length: int | None,
    key_length: int | None,
    query_offset: int | None,
    batch: tuple[int, ...] | None,
    item: int,
    head: int,
) -> _Call:
    told = [_told(part) for part in _parts(mask)]
    rows = query_length or _first(one.query_length for one in told)
    keys = key_length or _first(one.key_length for one in told)
    lengths = rows or keys or LENGTH, keys or rows or LENGTH
    if query_offset is None:
        query_offset = _first(one.query_offset for one in told)
    offset = lengths[1] - lengths[0] if query_offset is None else query_offset
    if batch is None:
        batch = broadcast_shapes((), *[one.batch for one in told])
        if batch is None:
            raise ValueError(f"the batch axes of {mask!r} are not told by its arrays: pass batch=")
        items = max([item + 1, *[one.items for one in told]])
        batch = batch or ((items,) if items > 1 else ())
    heads = max([head + 1, *[one.heads for one in told]])
    if not 0 <= item < math.prod(batch) or head < 0:
        raise ValueError(f"there is no item {item} and head {head} of batch {batch}")
    return _Call(lengths, offset, batch, heads, item, head)


def _first(found: Iterator[int | None]) -> int | None:
    return next((number for number in found if number is not None), None)


def _parts(mask: Mask) -> Iterator[Mask]:
    if isinstance(mask, (And, Or)):
        for part in mask.parts:
            yield from _parts(part)
    elif isinstance(mask, Not):
        yield from _parts(mask.mask)
    else:
        yield mask
        if isinstance(mask, Compiled):
            yield from _parts(mask.mask)


def _told(part: Mask) -> _Told:
    match part:
        case Compiled():
            lengths = part.query_length, part.key_length, part.query_offset
            return _Told(*lengths, items=part.shape[0], heads=part.shape[1])
        case Segments(query_ids, key_ids):
            keys = query_ids if key_ids is None else key_ids
            leads = tuple(query_ids.shape[:-1]), tuple(keys.shape[:-1])
            return _Told(query_ids.shape[-1], keys.shape[-1], batch=_common(*leads))
        case Dense(array):
            heads, *ends = (1, 1, 1, *array.shape)[-3:]
            rows, keys = (None if length == 1 else length for length in ends)
            return _Told(rows, keys, batch=tuple(array.shape[:-3]), heads=heads)
        case Prefix(lengths):
            return _Told(batch=_shape(lengths))
        case Padding(key_lengths, query_lengths):
            return _Told(batch=_common(_shape(key_lengths), _shape(query_lengths)))
    return _Told()


def _common(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return what shapes broadcast to, or one of those that do not, for a check to refuse."""
    return broadcast_shapes(*shapes) or max(shapes, key=len)


def _shape(numbers: Any) -> tuple[int, ...]:
    return tuple(numbers.shape) if is_array(numbers) else ()


def _tile_size(mask: Mask, call: _Call) -> int:
    tables = (part.size for part in _parts(mask) if isinstance(part, Compiled))
    eighth = 2 ** max(1, math.ceil(math.log2(max(call.lengths))) - 3)
    return next(tables, min(128, eighth))


# ---- what is there -----------------------------------------------------------------------------


class _Drawn:
    """A mask in a call, asked in its own library; what it says, in NumPy's arrays."""

    def __init__(self, mask: Mask, call: _Call, like: Array | None, numpy: Any) -> None:
        self._mask, self._call, self._numpy = mask, call, numpy
        carried = (thing for _, thing in mask.carried() if is_array(thing))
        self._like = next(carried, None) if like is None else like
        self._xp: Any = importlib.import_module("array_api_compat.numpy")
        self._library = "numpy"
        if self._like is not None:
            self._xp, self._library = library_of(self._like).xp, library_of(self._like).name

    def _problem(self) -> tuple[Problem, Operands]:
        """Return a call with this mask, checked as attention checks it."""
        call = self._call
        device = "" if self._like is None else facts_of(self._like).device
        query, key = (
            ArrayFacts(self._library, "float32", device, (*call.batch, call.heads, length, 1))
            for length in call.lengths
        )

        def facts(given: Any, name: str) -> ArrayFacts:
            return given if isinstance(given, ArrayFacts) else facts_of(given, name)

        described, operands = describe(
            query, key, key, mask=self._mask, query_offset=call.query_offset, facts=facts
        )
        return examine(described), operands

    def tiles(self, size: int) -> Any:
        """Return which tiles are empty, mixed and full, shape (tiles down, tiles across)."""
        problem, operands = self._problem()
        grid = TileGrid(problem, operands, self._xp, (size, size), self._like)
        some, every = (self._one(answer) for answer in grid.of(self._mask))
        numpy = self._numpy
        return numpy.where(every, FULL, numpy.where(some, SEEN, EMPTY))

    def cells(self, kinds: Any, size: int) -> Any:
        """Return the same of each score, shape (L, S), the hidden ones of mixed tiles apart."""
        call, xp = self._call, self._xp
        b, h = (self._range(n, n + 1, 1, 1) for n in (call.item, call.head))
        i, j = self._range(0, call.lengths[0], -1, 1), self._range(0, call.lengths[1], 1, -1)
        at = PointIndices(b, h, i, j, offset=call.query_offset, batch=call.batch)
        seen = self._host(xp.broadcast_to(self._mask.seen(at), call.lengths))
        for axis, length in enumerate(call.lengths):
            kinds = kinds.repeat(size, axis=axis).take(range(length), axis=axis)
        return self._numpy.where((kinds == SEEN) & ~seen, HIDDEN, kinds)

    def _range(self, first: int, stop: int, *shape: int) -> Array:
        return self._xp.reshape(index_range(self._xp, first, stop, self._like), shape)

    def _one(self, answer: Array) -> Any:
        """Return the answer for the item and head to draw."""
        lead = (*self._call.batch, self._call.heads)
        whole = self._numpy.broadcast_to(self._host(answer), (*lead, *answer.shape[-2:]))
        whole = whole.reshape(-1, self._call.heads, *whole.shape[-2:])
        return whole[self._call.item, self._call.head]

    def _host(self, array: Array) -> Any:
        # Lists come from every device; a library without them is one that NumPy can read.
        return self._numpy.asarray(array.tolist() if hasattr(array, "tolist") else array)


# ---- how it looks ------------------------------------------------------------------------------


def _paint(axes: Any, kinds: Any, size: int, lengths: tuple[int, int]) -> None:
    colours = require_matplotlib("colors")
    down, across = kinds.shape
    axes.imshow(
        kinds,
        cmap=colours.ListedColormap(COLOURS),
        vmin=0,
        vmax=len(COLOURS) - 1,
        extent=(-0.5, across * size - 0.5, down * size - 0.5, -0.5),
        aspect="equal" if 1 / 3 <= lengths[0] / lengths[1] <= 3 else "auto",
        interpolation="antialiased",
        interpolation_stage="rgba",
    )
    # The last tiles may have fewer rows and keys than the others.
    axes.set(xlim=(-0.5, lengths[1] - 0.5), ylim=(lengths[0] - 0.5, -0.5))


def _rule_off(axes: Any, tiles: tuple[int, int], size: int) -> None:
    """Draw the edges of the tiles, if there are not too many."""
    ticker = require_matplotlib("ticker")
    for axis, number in ((axes.yaxis, tiles[0]), (axes.xaxis, tiles[1])):
        axis.set_major_locator(ticker.MaxNLocator(6, integer=True, steps=[1, 2, 4, 5, 8, 10]))
        if number <= MOST_LINES:
            edges = [n * size - 0.5 for n in range(1, number)]
            axis.set_minor_locator(ticker.FixedLocator(edges))
    axes.grid(which="minor", color=LINES, linewidth=0.6)
    axes.tick_params(which="minor", length=0)
    axes.tick_params(which="major", color=FRAME)
    axes.spines[:].set_color(FRAME)


def _label(
    axes: Any, mask: Mask, call: _Call, size: int, counts: tuple[int, ...], whole: bool
) -> None:
    patches = require_matplotlib("patches")
    axes.set(xlabel="key j", ylabel="query i")
    short = mask.map(lambda name, thing: facts_of(thing) if is_array(thing) else thing)
    lines = textwrap.wrap(repr(short), 46, max_lines=2, placeholder=" …", break_long_words=False)
    axes.set_title("\n".join(lines), family="monospace", fontsize="medium")
    names = [(FULL, "full"), (SEEN, "mixed"), (EMPTY, "empty")]
    said = {kind: f"{name}: {counts[kind]:,}" for kind, name in names}
    if whole:
        said[HIDDEN] = "hidden in mixed"
    key = [patches.Patch(facecolor=COLOURS[k], edgecolor=FRAME, label=said[k]) for k in said]
    which = f"item {call.item}, head {call.head}: " if call.batch or call.heads > 1 else ""
    total = sum(counts)
    axes.legend(
        handles=key,
        title=f"{which}{_share(total - counts[EMPTY], total)} of {total:,} tiles of"
        f" {size} × {size} visited",
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=2,
        frameon=False,
    )


def _share(part: int, total: int) -> str:
    """Return a share in percent, with no rounding to all or to nothing."""
    percent = 100 * part / total
    if 0 < percent < 1:
        return "below 1%"
    return "over 99%" if 99 < percent < 100 else f"{percent:.0f}%"
