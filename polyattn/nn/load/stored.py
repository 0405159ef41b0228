"""Describe modules by the names of their weights, and load these once all of them are checked.

A loader builds the module with a `Stored` in place of each parameter, which names the stored arrays
and computes the parameter from them. `fill` compares the names and shapes with the weights, then
loads them.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

from polyattn._base.arguments import few, short
from polyattn._base.arrays import Array, cast, facts_of, library_of
from polyattn._dispatch.transfer import convert_like
from polyattn.nn.layers import LayerNorm, Linear, RMSNorm
from polyattn.nn.module import Module

M = TypeVar("M", bound=Module)
Shape = tuple[int, ...]
# Others, such as those of 8 bits, are quantized and mean nothing without their scales.
DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, eq=False)
class Stored:
    """Stand for a parameter of a shape: ``make(xp, *arrays)`` computes it from the sources."""

    shape: Shape
    sources: Mapping[str, Shape]  # names and shapes of the stored arrays
    make: Callable[..., Array] = field(default=lambda xp, array: array)
    dtype: Any = None  # is_array looks for a dtype


def fill(
    module: M,
    weights: Mapping[str, Array],
    *,
    like: Array,
    origin: str,
    source: str = "weights",
    advice: Mapping[str, str] | None = None,
) -> M:
    """Return a module with arrays in place of `Stored`."""
    # Errors name the module `origin` and the weights `source`, with `advice` for a missing one.
    facts = facts_of(like, "like")
    if facts.dtype not in DTYPES:
        raise ValueError(f"like must have a floating dtype; got {like.dtype}")
    xp = library_of(like).xp
    wanted: dict[str, Stored] = module.parameters()
    expected = {name: shape for x in wanted.values() for name, shape in x.sources.items()}
    wrong = _misfits(expected, weights, advice or {})
    unknown = [name for name in weights if name not in expected]
    if wrong or unknown:
        more = (f"{short(name)}: unknown, {facts_of(weights[name])}" for name in unknown)
        listed = few(chain(wrong, more), len(wrong) + len(unknown), "\n  ")
        raise ValueError(f"{source} do not fit {origin}:\n  {listed}")

    def read(stored: Stored) -> Array:
        arrays = []
        for name in stored.sources:
            array = weights[name]
            array = convert_like(array.detach() if hasattr(array, "detach") else array, like)
            arrays.append(cast(xp, array, like.dtype))
        # A copy: training must not change the model that the weights came from.
        return xp.asarray(stored.make(xp, *arrays), copy=True)

    return module.with_parameters({name: read(stored) for name, stored in wanted.items()})


def _misfits(
    expected: Mapping[str, Shape], weights: Mapping[str, Array], advice: Mapping[str, str]
) -> list[str]:
    """Return a line for each array that is missing, or has another shape or dtype."""
    wrong = []
    for name, shape in expected.items():
        if name not in weights:
            more = f"; {advice[name]}" if name in advice else ""
            wrong.append(f"{name}: missing, expected {shape}{more}")
            continue
        actual = facts_of(weights[name], name)
        if actual.shape != shape:
            wrong.append(f"{name}: expected {shape}, got {actual.shape}")
        elif actual.dtype not in DTYPES:
            wrong.append(f"{name}: expected {', '.join(DTYPES)}, got {actual.dtype}")
    return wrong


# ---- parts of modules --------------------------------------------------------------------------


def vector(name: str, *shape: int) -> Stored:
    """Return a parameter that equals a stored array."""
    return Stored(shape, {name: shape})


def reshaped(name: str, stored: Shape, shape: Shape) -> Stored:
    """Return a parameter that is a stored array in another shape."""
    return Stored(shape, {name: stored}, lambda xp, array: xp.reshape(array, shape))


def linear(name: str, inputs: int, outputs: int, bias: bool = True) -> Linear:
    """Return the linear map of a torch.nn.Linear, which stores (outputs, inputs)."""
    return joined_linear([name], inputs, [outputs], bias)


def joined_linear(names: list[str], inputs: int, outputs: list[int], bias: bool = True) -> Linear:
    """Return one linear map for several torch.nn.Linear, with their outputs concatenated."""
    shapes = {f"{name}.weight": (width, inputs) for name, width in zip(names, outputs, strict=True)}
    weight = Stored((inputs, sum(outputs)), shapes, transposed)
    if not bias:
        return Linear(weight)
    lengths = {f"{name}.bias": (width,) for name, width in zip(names, outputs, strict=True)}
    return Linear(weight, Stored((sum(outputs),), lengths, _concatenated))


def part_linear(name: str, inputs: int, outputs: list[int], bias: bool = True) -> list[Linear]:
    """Return several linear maps that one torch.nn.Linear stores, by their numbers of outputs."""
    width, start, maps = sum(outputs), 0, []
    for part in outputs:
        rows = slice(start, start + part)
        stored = {f"{name}.weight": (width, inputs)}
        weight = Stored((inputs, part), stored, partial(_transposed_rows, rows))
        offset = Stored((part,), {f"{name}.bias": (width,)}, partial(some_rows, rows))
        maps.append(Linear(weight, offset if bias else None))
        start += part
    return maps


def some_rows(rows: slice, xp: Any, array: Array) -> Array:
    """Return some rows of a stored array."""
    return array[rows]


def _transposed_rows(rows: slice, xp: Any, array: Array) -> Array:
    return xp.matrix_transpose(array[rows, :])


def transposed(xp: Any, *arrays: Array) -> Array:
    """Return the weight of a map from the weights that torch stores, (outputs, inputs) each."""
    return xp.matrix_transpose(_concatenated(xp, *arrays))


def _concatenated(xp: Any, *arrays: Array) -> Array:
    return arrays[0] if len(arrays) == 1 else xp.concat(arrays, axis=0)


def layer_norm(name: str, size: int, epsilon: float, bias: bool = True) -> LayerNorm:
    """Return the norm of a torch.nn.LayerNorm."""
    offset = vector(f"{name}.bias", size) if bias else None
    return LayerNorm(vector(f"{name}.weight", size), offset, epsilon)


def rms_norm(name: str, size: int, epsilon: float, offset: float = 0.0) -> RMSNorm:
    """Return a norm that stores a weight only."""
    return RMSNorm(vector(f"{name}.weight", size), epsilon, offset)


# ---- names -------------------------------------------------------------------------------------


def renamed(weights: Mapping[str, Array], name_of: Callable[[str], str | None]) -> dict[str, Array]:
    """Return the arrays by new names, without those whose new name is None."""
    arrays: dict[str, Array] = {}
    sources: dict[str, str] = {}
    for name, array in weights.items():
        if not isinstance(name, str):
            raise ValueError(f"weights are arrays by name; got the name {reprlib.repr(name)}")
        new = name_of(name)
        if new is None:
            continue
        if new in arrays:
            one, other = short(sources[new]), short(name)
            raise ValueError(f"{one} and {other} are one weight, {short(new)}: leave one out")
        library_of(array, short(name))
        arrays[new], sources[new] = array, name
    return arrays


def without_prefix(weights: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """Return the arrays whose names have a prefix, by their names without it."""
    arrays = renamed(
        weights, lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None
    )
    if not arrays:
        raise ValueError(f"no weight has a name that begins with {prefix!r}; {_examples(weights)}")
    return arrays


def block_names(
    weights: Mapping[str, Array], source: str, prefix: str, count: int, setting: str
) -> list[str]:
    """Return the names of a model's blocks, if the weights have as many as a setting says."""
    rests = (name.removeprefix(prefix) for name in weights if name.startswith(prefix))
    blocks = len({number for number, dot, _ in (rest.partition(".") for rest in rests) if dot})
    if count > blocks:
        raise ValueError(
            f"config: {setting} is {count}, and {source} have {blocks} blocks, whose names begin"
            f" with {prefix}0. and so on; {_examples(weights)}"
        )
    return [f"{prefix}{number}" for number in range(count)]


def _examples(weights: Mapping[str, Array]) -> str:
    return f"the first names are {', '.join(map(short, islice(weights, 3))) or 'none'}"
