"""Turn weights of attention into the cells of maps of heads."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence, Sized
from typing import Any

from polyattn._api.weights import TopWeights, selected
from polyattn._base.arguments import check_int
from polyattn._base.arrays import Array, cast, library_of
from polyattn._dispatch.transfer import convert_like

MOST_CELLS = 512  # of a map along an axis; of more tokens a cell shows the largest weight


def maps_of(
    weights: Array | TopWeights, heads: int | slice | Sequence[int] | None, given: Any
) -> tuple[list[str], Any, tuple[int, int]]:
    """Return a title for each head to draw, its map of at most `MOST_CELLS` a side, and (L, S)."""
    numpy = importlib.import_module("numpy")
    array = weights.weights if isinstance(weights, TopWeights) else weights
    _check_shape(array)
    if len(array.shape) == 2:
        if heads is not None:
            raise ValueError(f"heads={heads!r} needs weights of shape (H, L, S); got (L, S)")
        chosen, titles = [0], [""]
    else:
        chosen = selected("heads", slice(None) if heads is None else heads, array.shape[0])
        titles = [f"head {head}" for head in chosen]
    heads_first = array if titles[0] else array[None, ...]
    maps = [_host(heads_first[head, ...]) for head in chosen]
    if not isinstance(weights, TopWeights):
        return titles, numpy.stack([_pooled(head, numpy) for head in maps]), maps[0].shape
    keys = numpy.asarray(convert_like(weights.keys, numpy.zeros(1))).reshape(-1, *array.shape[-2:])
    number = (
        len(given) if isinstance(given, Sized) else int(keys.max()) + 1 if given is None else given
    )
    if check_int("keys", number) <= keys.max():
        raise ValueError(f"weights name key {keys.max()}, so keys must be more; got {number}")
    shape = array.shape[-2], number
    steps = [math.ceil(size / MOST_CELLS) for size in shape]
    cells = [math.ceil(size / step) for size, step in zip(shape, steps, strict=True)]
    grid = numpy.zeros((len(maps), *cells))
    rows = numpy.arange(shape[0])[:, None] // steps[0]
    for map_, head, weight in zip(grid, chosen, maps, strict=True):
        numpy.maximum.at(map_, (rows, keys[head] // steps[1]), weight)
    return titles, grid, shape


def _pooled(weights: Any, numpy: Any) -> Any:
    """Return the largest weight of each block, so that no axis has more than `MOST_CELLS`."""
    for axis, size in enumerate(weights.shape):
        step = math.ceil(size / MOST_CELLS)
        if step > 1:
            weights = numpy.maximum.reduceat(weights, range(0, size, step), axis=axis)
    return weights


def _check_shape(weights: Any) -> None:
    library_of(weights, "weights")
    shape = tuple(weights.shape)
    if len(shape) not in (2, 3):
        batch = ": select an item of the batch, such as weights[0]" * (len(shape) > 3)
        raise ValueError(f"weights must have the shape (L, S) or (H, L, S); got {shape}{batch}")
    if 0 in shape:
        raise ValueError(f"weights must not be empty; got the shape {shape}")


def _host(weights: Array) -> Any:
    """Return weights as a NumPy array of float32, since NumPy lacks some dtypes."""
    numpy, xp = importlib.import_module("numpy"), library_of(weights).xp
    host = convert_like(cast(xp, weights, xp.float32), numpy.zeros(1))
    # `not >=` refuses NaN too.
    if not host.min() >= 0 or host.max() == math.inf:
        raise ValueError(
            f"weights must be finite and at least 0; got {host.min()} to {host.max()}: pass the"
            " result of attention_weights, not scores"
        )
    return host
