"""The masks, biases and seeds that several dialects translate."""

from __future__ import annotations

import functools
import math
import numbers
import operator
from collections.abc import Callable
from typing import Any

from polyattn import scores
from polyattn._base.arguments import check_int
from polyattn._base.arrays import Array, accumulator_of, cast, facts_of, is_array, library_of
from polyattn._base.host import as_array, destination_of, is_host, is_sequence, is_unreadable
from polyattn._base.tracing import is_compiling, torch_is_imported


def shape_of(array: Any, name: str) -> tuple[Any, ...]:
    """Return the shape of an array, or of numbers of the host; a nested tensor has none."""
    if is_sequence(array):
        return tuple(as_array(name, array).shape)
    if getattr(array, "is_nested", False) or not hasattr(array, "shape"):
        facts_of(array, name)  # which refuses it
    return tuple(array.shape)


def check_axes(axes: str, /, *arrays: Any, **lengths: int) -> None:
    """Raise unless each array has the axes of its letters, and each letter one length.

    Axes are as in "q BLHD, qv? BLHE, slopes H|BH". A digit is its own length. None is an argument
    that is not given; one of vectors must be, unless a ? follows its name.
    """
    if not (torch_is_imported() and is_compiling()):  # which would trace through the cache
        try:
            return _agree(axes, *[x if x is None else x.shape for x in arrays], **lengths)
        except (AttributeError, RuntimeError, TypeError):  # numbers, nested or symbolic lengths
            pass
    shapes = []
    for one, x in zip(axes.split(", "), arrays, strict=True):
        name, letters = one.replace("?", "").split()
        if _is_vector(letters) and not (x is None and "?" in one):
            library_of(x, name)  # which refuses None and lists
        shapes.append(x if x is None else shape_of(x, name))
    _agree.__wrapped__(axes, *shapes, is_symbolic=True, **lengths)


def _is_vector(letters: str) -> bool:
    """Return whether the last of several axes is that of vectors, not of rows or keys."""
    return letters[-1] == "F" or (len(letters) > 2 and letters[-1] not in "LSTH")


@functools.lru_cache(4096)
def _agree(given: str, *shapes: Any, is_symbolic: bool = False, **lengths: int) -> None:
    known = {"1": 1, "2": 2, "3": 3, **lengths}
    for one, shape in zip(given.split(", "), shapes, strict=True):
        name, forms = one.replace("?", "").split()
        if shape is None:
            if "?" not in one and _is_vector(forms):
                raise TypeError  # which the caller explains
            continue
        axes, *others = reversed(forms.split("|"))
        axes = next((one for one in others if len(one) == len(shape)), axes)
        fits = len(shape) == len(axes)
        for axis, length in zip(axes, shape, strict=False):
            if isinstance(length, int):
                fits = fits and known.setdefault(axis, length) == length
            elif not is_symbolic:
                raise TypeError
        if not fits:
            letters = [axis for axis in dict.fromkeys(axes) if axis.isalpha() and axis in known]
            sizes = ", ".join(f"{axis} is {known[axis]}" for axis in letters)
            raise ValueError(
                f"{name} must have the shape ({', '.join(axes)})"
                f"{f', where {sizes}' if sizes else ''}; got {tuple(shape)}"
            )


def joined_axes(x: Array, start: int, stop: int) -> Array:
    """Return an array with neighbouring axes as one; of an empty array −1 would be ambiguous."""
    shape = x.shape
    joined = (*shape[:start], math.prod(shape[start:stop]), *shape[stop:])
    return library_of(x).xp.reshape(x, joined)


def integers(name: str, given: Any, like: Array) -> Any:
    """Return integers of the host or of the library of an array, placed beside it; or an int."""
    if given is None or isinstance(given, int):
        return given
    if isinstance(given, numbers.Integral):
        return int(given)
    array = given
    if type(given) is type(like):
        if given.dtype == library_of(like).xp.int32:  # as most are
            return given
    else:
        array = as_array(name, given)
        destination = destination_of(like) if is_host(array) else None
        array = array if destination is None else destination.put(name, array)
    facts, own = facts_of(array, name), library_of(like).name
    if "int" not in facts.dtype or facts.library != own:
        raise TypeError(
            f"{name} must hold integers, in an array of {own} or of the host; got {facts.dtype} of"
            f" {facts.library}"
        )
    xp = library_of(array).xp  # an index of 8 bits is one of bools to torch
    return cast(xp, array, xp.int32) if "8" in facts.dtype else array


def check_rate(rate: float) -> None:
    """Raise unless a rate of dropout is one."""
    if not (isinstance(rate, (int, float, numbers.Real)) and 0 <= rate < 1):
        raise ValueError(f"dropout_p must be at least 0 and below 1; got {rate!r}")


def dropout_of(query: Array, rate: float) -> tuple[float, Any] | None:
    """Return the dropout of `attention`, with a seed from the generator of the library."""
    check_rate(rate)
    return None if rate == 0 else (rate, _seed(query, rate))


def _seed(query: Array, rate: float) -> Any:
    """Return a seed from a generator with a state, which also a compiled program draws anew."""
    library = library_of(query, "query")
    if library.name == "torch":
        return library.xp.randint(2**62, (), device=query.device)
    if library.name == "numpy":
        return int(library.xp.random.randint(2**62, dtype="int64"))
    raise NotImplementedError(
        f"dropout_p={rate!r} needs the random generator of torch or NumPy, and query is of"
        f" {library.name}: call polyattn.attention with dropout=({rate!r}, seed)"
    )


def scaled(query: Array | None, scale: Any) -> tuple[Any, Any]:
    """Return query and scale: an array without axes, which may be traced, multiplies the query."""
    if scale is None or query is None or not is_array(scale) or tuple(scale.shape):
        return query, scale
    if is_host(scale):
        return query, scale if is_unreadable(scale) else scale.item()
    facts, xp = facts_of(query, "query"), library_of(query).xp
    product = cast(xp, query, getattr(xp, accumulator_of(facts.dtype))) * scale
    return cast(xp, product, query.dtype), 1.0


def both(*masks: Array | None) -> Array | None:
    """Return the keys that all of the masks that are given show."""
    present = [mask for mask in masks if mask is not None]
    return functools.reduce(operator.and_, present) if present else None


def pair(names: str, one: Array | None, other: Array | None) -> tuple[Array, Array] | None:
    """Return two arrays of which neither is given without the other."""
    if (one is None) != (other is None):
        raise ValueError(f"give both {names}, or neither")
    return None if one is None else (one, other)


def mask_or_bias(mask: Array | None, rank: int) -> dict[str, Array]:
    """Return an argument that is a mask or a bias by its dtype, with all axes of the scores."""
    if mask is None:
        return {}
    name = "mask" if facts_of(mask, "attn_mask").dtype == "bool" else "bias"
    return {name: with_all_axes(mask, rank, "attn_mask")}


def with_all_axes(mask: Array | None, rank: int, name: str) -> Array | None:
    """Return a mask or bias of three or more axes with all axes of the scores."""
    if mask is None:
        return None
    shape = facts_of(mask, name).shape
    extra = max(0, len(shape) - rank)
    if len(shape) < 3 or len(shape) == rank or any(length != 1 for length in shape[:extra]):
        return mask
    return library_of(mask).xp.reshape(mask, (*(1,) * (rank - len(shape)), *shape[extra:]))


def bounds(window: Any) -> tuple[int | None, int | None] | None:
    """Return a window whose ends are −1 (or None) for no bound; None if it bounds nothing."""
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window_size must be a pair of integers (left, right); got {window!r}")
    if tuple(window) == (-1, -1):
        return None
    ends = (n if n is None else check_int("an end of window_size", n) for n in window)
    left, right = (None if n is None or n < 0 else n for n in ends)
    return None if left is None and right is None else (left, right)


def alibi(slopes: Array, offset: int | Array) -> Any:
    """Return the score rule of ALiBi, whose slopes may be of each batch item too, (B, H)."""
    if len(facts_of(slopes, "alibi_slopes").shape) == 1:
        return scores.alibi(slopes)

    def distance(b: Array, i: Array, j: Array) -> Array:
        return i + (offset if isinstance(offset, int) else offset[b]) - j

    return lowered(slopes, lambda b, i: b, distance)


def lowered(
    slopes: Array, item: Callable[..., Array], distance: Callable[..., Array]
) -> Callable[..., Array]:
    """Return the rule that subtracts a slope, of (H,) or (B, H), times the distance of a key."""
    xp, is_per_head = library_of(slopes).xp, len(slopes.shape) == 1

    def rule(score: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
        slope = slopes[h] if is_per_head else slopes[item(b, i), h]
        far = cast(xp, xp.abs(distance(b, i, j)), score.dtype)
        return score - cast(xp, slope, score.dtype) * far

    return rule
