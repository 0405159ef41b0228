"""Draw a mask: which keys the rows see, and which tiles are empty, mixed and full.

Requirements: a tile is drawn as the mask itself classifies it, so it is mixed if the mask cannot
tell; for long sequences only the tiles are drawn, and no array as large as the scores is made; the
colours differ in lightness; nothing is shown or saved.
"""

from __future__ import annotations

import importlib
import math
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from polyattn._base.arguments import check_int, check_shape
from polyattn._base.arrays import (
    Array,
    ArrayFacts,
    as_facts,
    broadcast_shapes,
    facts_of,
    index_range,
    is_array,
    library_of,
    numpy_namespace,
)
from polyattn._base.extras import require_matplotlib
from polyattn._base.host import destination_of, is_host
from polyattn._core.call.checks import examine
from polyattn._core.call.describe import describe
from polyattn._core.expressions.indices import PointIndices
from polyattn._core.expressions.masks import Joined, Mask, Not, as_mask
from polyattn._core.expressions.neighborhood import Neighborhood
from polyattn._core.expressions.parts import axes_of_last
from polyattn._core.expressions.tree import Tree
from polyattn._core.tiles.compiled import Compiled
from polyattn._core.tiles.coverage import TileGrid

FIGURE = {"figsize": (4.6, 5.5), "layout": "compressed"}
# With more scores, each would be smaller than a pixel.
MAX_CELLS = 2**20
MAX_LINES = 64
MOST_DIGITS = 10  # of the number of tiles along a side
DEFAULT_LENGTH = 64
# The last two are Okabe and Ito's; a hidden key in a mixed tile has a lighter shade of the third.
EMPTY, HIDDEN, SEEN, FULL = range(4)
COLOURS = ("#ffffff", "#fbe3bd", "#e69f00", "#0072b2")
LINES, FRAME = "#c9cdd4", "#6b7280"


def mask(
    mask: Mask | Array | Callable[..., Array],
    query_length: int | None = None,
    key_length: int | None = None,
    *,
    axes: Any = None,
    **options: Any,
) -> Any:
    """Draw which keys a mask shows to the rows, and which tiles are empty, mixed and full.

    Parameters
    ----------
    mask : Mask, Array of bool or function
        As ``mask=`` of `polyattn.attention`.
    query_length, key_length : int, optional
        L and S; by default the lengths of arrays and tables in the mask, or else 64.
    axes : matplotlib.axes.Axes, optional
        The axes to draw in, by default in a new figure.
    **options : Any
        ``query_offset``, the position of the first row among the keys, S − L by default; ``tile``,
        the number of rows and keys of a tile, by default an eighth of the longer side and at most
        128, or more where a side has over 1024 of these; ``batch``, the batch axes; ``item`` and
        ``head``, the batch item, counted flat, and the query head to draw, both 0 by default;
        ``like``, as for `polyattn.masks.compile`. A table in the mask determines the defaults.

    Returns
    -------
    matplotlib.figure.Figure
        The figure of the axes.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    TypeError, ValueError
        If `mask` is not a mask, or does not fit such a call.

    Examples
    --------
    >>> from polyattn import masks, plot
    >>> figure = plot.mask(masks.causal() & masks.window(16, 0), 64)
    >>> figure.axes[0].get_title()
    'masks.causal() & masks.window(16, 0)'
    """
    require_matplotlib("figure")
    expression = as_mask(mask)
    call, size, kinds, cells = evaluate(expression, query_length, key_length, **options)
    if axes is None:
        axes = require_matplotlib("figure").Figure(**FIGURE).add_subplot()
    _paint(axes, *((kinds, size) if cells is None else (cells, 1)), call.lengths)
    _draw_grid(axes, kinds.shape, size)
    counts = importlib.import_module("numpy").bincount(kinds.ravel(), minlength=4)
    _label(axes, expression, call, size, counts)
    return axes.figure


def evaluate(
    mask: Mask,
    query_length: int | None = None,
    key_length: int | None = None,
    *,
    tile: int | None = None,
    like: Array | None = None,
    **options: Any,
) -> tuple[_MaskCall, int, Any, Any]:
    """Return the call to draw, the size of its tiles, and the kinds of tiles and of scores.

    The kinds of scores are None if there are more than `MAX_CELLS`.
    """
    call = _call(mask, query_length, key_length, **options)
    size = _tile_size(mask, call) if tile is None else check_int("tile", tile, least=1)
    carried = [thing for _, thing in mask.carried() if is_array(thing)]
    # An array on another device is preferred to one of the host, and `like` to both.
    like = next(iter(sorted(carried, key=is_host)), None) if like is None else like
    destination = None if like is None else destination_of(like)
    mask = mask if destination is None else mask.placed(destination)
    kinds = _tiles(mask, call, size, like)
    few = call.lengths[0] * call.lengths[1] <= MAX_CELLS
    return call, size, kinds, _cells(mask, call, size, like, kinds) if few else None


# ---- the call to draw --------------------------------------------------------------------------


class _MaskCall(NamedTuple):
    """The call that a mask is drawn for, and the item and head to draw."""

    lengths: tuple[int, int]
    query_offset: int
    batch: tuple[int, ...]
    heads: int
    item: int
    head: int


def _call(
    mask: Mask,
    query_length: int | None,
    key_length: int | None,
    *,
    query_offset: int | None = None,
    batch: tuple[int, ...] | None = None,
    item: int = 0,
    head: int = 0,
) -> _MaskCall:
    """Return the call of these options, with what the mask determines in place of others."""
    item, head = check_int("item", item), check_int("head", head)
    known, batches = _known(mask)
    rows = _first(query_length, known.get("L"))
    rows = None if rows is None else check_int("L", rows, least=1)
    keys = check_int("S", _first(key_length, known.get("S"), rows, DEFAULT_LENGTH), least=1)
    rows = _first(rows, keys)
    offset = _first(query_offset, known.get("offset"), keys - rows)
    common = broadcast_shapes((), *batches) if batch is None else check_shape(batch)
    if common is None:
        raise ValueError(f"the arrays of {mask!r} do not determine batch axes: pass batch=")
    items = max(item + 1, known.get("items", 1))
    if batch is None and not common and items > 1:
        common = (items,)
    if not 0 <= item < math.prod(common) or head < 0:
        raise ValueError(f"item {item} or head {head} is out of range for batch {common}")
    heads = max(head + 1, known.get("H", 1))
    return _MaskCall((rows, keys), check_int("query_offset", offset), common, heads, item, head)


def _first(*numbers: int | None) -> Any:
    return next((number for number in numbers if number is not None), None)


def _known(mask: Mask) -> tuple[dict[str, int], list[tuple[int, ...]]]:
    """Return what arrays and tables in a mask determine of a call, and their batch axes."""
    known: dict[str, int] = {}
    batches: list[tuple[int, ...]] = []
    for part in _parts(mask):
        if isinstance(part, Compiled):
            table = {"L": part.query_length, "S": part.key_length, "offset": part.query_offset}
            known = table | {"items": part.shape[0], "H": part.shape[1]} | known
        if isinstance(part, Neighborhood):
            known.setdefault("S", math.prod(part.shape))
        if isinstance(part, Tree):
            known.setdefault("L", part.ancestors.shape[-1])
        for name, axes in (part.axes or {}).items():
            array = getattr(part, name)
            shape = tuple(array.shape) if is_array(array) else ()
            follows = list(zip(axes_of_last(axes, len(shape), len(shape)), shape, strict=True))
            batches.append(tuple(n for axis, n in follows if isinstance(axis, int)))
            for axis, n in follows:
                # A mask array may have 1 in place of a length.
                if isinstance(axis, str) and (n > 1 or "H" not in axes):
                    known.setdefault(axis, n)
    return known, batches


def _parts(mask: Mask) -> Iterator[Mask]:
    """Yield the masks that others join, and the tables around them."""
    if not isinstance(mask, (Joined, Not)):
        yield mask
    inner = mask.parts if isinstance(mask, Joined) else ()
    for part in (mask.mask,) if isinstance(mask, (Not, Compiled)) else inner:
        yield from _parts(part)


def _tile_size(mask: Mask, call: _MaskCall) -> int:
    tables = (part.size for part in _parts(mask) if isinstance(part, Compiled))
    digits = math.ceil(math.log2(max(call.lengths)))
    return next(tables, 2 ** max(1, min(7, digits - 3), digits - MOST_DIGITS))


# ---- the values of the mask --------------------------------------------------------------------


def _tiles(mask: Mask, call: _MaskCall, size: int, like: Array | None) -> Any:
    """Return which tiles are empty, mixed and full, shape (tiles down, tiles across)."""
    numpy, xp = importlib.import_module("numpy"), _namespace(like)
    library, device = (
        ("numpy", "") if like is None else (library_of(like).name, facts_of(like).device)
    )
    query, key = (
        ArrayFacts(library, "float32", device, (*call.batch, call.heads, length, 1))
        for length in call.lengths
    )
    described, operands = describe(
        query, key, key, mask=mask, query_offset=call.query_offset, facts=as_facts
    )
    grid = TileGrid(examine(described), operands, xp, (size, size), like)

    def selected(flags: Array) -> Any:
        """Return the flags of the item and head to draw."""
        lead = (*call.batch, call.heads)
        whole = numpy.broadcast_to(_host(flags), (*lead, *flags.shape[-2:]))
        return whole.reshape(-1, call.heads, *whole.shape[-2:])[call.item, call.head]

    any_visible, all_visible = map(selected, grid.of(mask))
    return numpy.where(all_visible, FULL, numpy.where(any_visible, SEEN, EMPTY))


def _cells(mask: Mask, call: _MaskCall, size: int, like: Array | None, kinds: Any) -> Any:
    """Return the kind of each score, shape (L, S): that of its tile, or HIDDEN."""
    xp, (rows, keys) = _namespace(like), call.lengths

    def indices(first: int, stop: int, *shape: int) -> Array:
        return xp.reshape(index_range(xp, first, stop, like), shape)

    b, h = (indices(n, n + 1, 1, 1) for n in (call.item, call.head))
    i, j = indices(0, rows, -1, 1), indices(0, keys, 1, -1)
    at = PointIndices(b, h, i, j, offset=call.query_offset, batch=call.batch)
    seen = _host(xp.broadcast_to(mask.seen(at), call.lengths))
    for axis, length in enumerate(call.lengths):
        kinds = kinds.repeat(size, axis=axis).take(range(length), axis=axis)
    return importlib.import_module("numpy").where((kinds == SEEN) & ~seen, HIDDEN, kinds)


def _namespace(like: Array | None) -> Any:
    if like is None:
        return numpy_namespace()
    return library_of(like).xp


def _host(array: Array) -> Any:
    # tolist() works on every device; NumPy can read the arrays of a library without it.
    numpy = importlib.import_module("numpy")
    return numpy.asarray(array.tolist() if hasattr(array, "tolist") else array)


# ---- drawing -----------------------------------------------------------------------------------


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
    # Cut off the rows and keys that the last tiles lack.
    axes.set(xlim=(-0.5, lengths[1] - 0.5), ylim=(lengths[0] - 0.5, -0.5))


def _draw_grid(axes: Any, tiles: tuple[int, int], size: int) -> None:
    """Draw the edges of the tiles, unless there are too many."""
    ticker = require_matplotlib("ticker")
    for axis, number in ((axes.yaxis, tiles[0]), (axes.xaxis, tiles[1])):
        axis.set_major_locator(ticker.MaxNLocator(6, integer=True, steps=[1, 2, 4, 5, 8, 10]))
        if number <= MAX_LINES:
            edges = [n * size - 0.5 for n in range(1, number)]
            axis.set_minor_locator(ticker.FixedLocator(edges))
    axes.grid(which="minor", color=LINES, linewidth=0.6)
    axes.tick_params(which="minor", length=0)
    axes.tick_params(which="major", color=FRAME)
    axes.spines[:].set_color(FRAME)


def _label(axes: Any, mask: Mask, call: _MaskCall, size: int, counts: tuple[int, ...]) -> None:
    patches = require_matplotlib("patches")
    axes.set(xlabel="key j", ylabel="query i")
    short = mask.map(lambda name, thing: facts_of(thing) if is_array(thing) else thing)
    lines = textwrap.wrap(repr(short), 46, max_lines=2, placeholder=" …", break_long_words=False)
    axes.set_title("\n".join(lines), family="monospace", fontsize="medium")
    names = [(FULL, "full"), (SEEN, "mixed"), (EMPTY, "empty")]
    labels = {kind: f"{name}: {counts[kind]:,}" for kind, name in names}
    if call.lengths[0] * call.lengths[1] <= MAX_CELLS:
        labels[HIDDEN] = "hidden in mixed"
    handles = [
        patches.Patch(facecolor=COLOURS[kind], edgecolor=FRAME, label=label)
        for kind, label in labels.items()
    ]
    which = f"item {call.item}, head {call.head}: " if call.batch or call.heads > 1 else ""
    total = sum(counts)
    axes.legend(
        handles=handles,
        title=f"{which}{_share(total - counts[EMPTY], total)} of {total:,} tiles of"
        f" {size} × {size} visited",
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=2,
        frameon=False,
    )


def _share(part: int, total: int) -> str:
    """Return a share in percent, rounded to 0% or 100% only if that is exact."""
    percent = 100 * part / total
    if 0 < percent < 1:
        return "below 1%"
    return "over 99%" if 99 < percent < 100 else f"{percent:.0f}%"
