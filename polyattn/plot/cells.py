"""Turn weights of attention into the cells of pictures: maps of heads, and their entropy."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Sequence, Sized
from typing import Any

from polyattn._api.weights import TopWeights, selected
from polyattn._base.arguments import check_int, got
from polyattn._base.arrays import Array, cast, is_array, library_of
from polyattn._dispatch.transfer import convert_like

MOST_CELLS = 512  # of a map along an axis; of more tokens a cell shows the largest weight


def maps_of(
    weights: Array | TopWeights, heads: int | slice | Sequence[int] | None, given: Any
) -> tuple[list[str], Any, tuple[int, int]]:
    """Return a title for each head to draw, its map of at most `MOST_CELLS` a side, and (L, S)."""
    numpy = importlib.import_module("numpy")
    array = weights.weights if isinstance(weights, TopWeights) else weights
    _check_rank(array, {2: "(L, S)", 3: "(H, L, S)"}, "weights")
    if len(array.shape) == 2:
        if heads is not None:
            raise ValueError(f"heads={heads!r} needs weights of shape (H, L, S); got (L, S)")
        chosen, titles = [0], [""]
    else:
        chosen = selected("heads", slice(None) if heads is None else heads, array.shape[0])
        titles = [f"head {head}" for head in chosen]
    heads_first = array if titles[0] else array[None, ...]
    maps = [_host(heads_first[head, ...], "weights") for head in chosen]
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


def layers_of(weights: Any) -> list[Any]:
    """Return the weights of each layer, shapes (H, L, S)."""
    if is_array(weights):
        _check_rank(weights, {4: "(layers, H, L, S)"}, "weights")
        layers = [weights[number, ...] for number in range(weights.shape[0])]
    elif isinstance(weights, Iterable):
        layers = list(weights)
    else:
        raise TypeError(f"weights must be an array, or one for each layer; {got(weights)}")
    if not layers:
        raise ValueError("weights must contain a layer; got an empty sequence")
    for number, layer in enumerate(layers):
        _check_rank(layer, {3: "(H, L, S)"}, f"weights[{number}]")
    heads = [layer.shape[0] for layer in layers]
    if len(set(heads)) != 1:
        raise ValueError(f"all layers must have the same number of heads; got {heads}")
    return [_host(layer, f"weights[{number}]") for number, layer in enumerate(layers)]


def _check_rank(weights: Any, shapes: dict[int, str], name: str) -> None:
    library_of(weights, name)
    shape = tuple(weights.shape)
    if len(shape) not in shapes:
        batch = (
            f": select an item of the batch, such as {name}[0]" if len(shape) > max(shapes) else ""
        )
        raise ValueError(
            f"{name} must have the shape {' or '.join(shapes.values())}; got {shape}{batch}"
        )
    if 0 in shape:
        raise ValueError(f"{name} must not be empty; got the shape {shape}")


def _host(weights: Array, name: str) -> Any:
    """Return weights as a NumPy array of float32, since NumPy lacks some dtypes."""
    numpy, xp = importlib.import_module("numpy"), library_of(weights).xp
    host = convert_like(cast(xp, weights, xp.float32), numpy.zeros(1))
    # `not >=` refuses NaN too.
    if not host.min() >= 0 or host.max() == math.inf:
        raise ValueError(
            f"{name} must be finite and at least 0; got {host.min()} to {host.max()}: pass the"
            " result of attention_weights, not scores"
        )
    return host


def mean_entropy(weights: Any, numpy: Any) -> Any:
    """Return the mean entropy of the rows of each head, NaN where no row sees a key."""
    total = weights.sum(-1, keepdims=True)
    shares = numpy.divide(weights, total, out=numpy.zeros_like(weights), where=total > 0)
    logarithms = numpy.log2(shares, out=numpy.zeros_like(shares), where=shares > 0)
    rows = -(shares * logarithms).sum(-1, dtype="float64")
    number = (total > 0).sum((-2, -1))
    return numpy.divide(
        rows.sum(-1), number, out=numpy.full(number.shape, math.nan), where=number > 0
    )
