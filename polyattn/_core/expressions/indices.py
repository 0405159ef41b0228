"""The indices that a mask or score expression is evaluated at.

`ScoreIndices` is the interface that expressions use. `PointIndices` holds single
indices, as a function in FlexAttention's form gets them; `polyattn._core.tiles.indices` has the
indices of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from polyattn._base.arguments import got
from polyattn._base.arrays import (
    Array,
    ArrayFacts,
    accumulator_of,
    as_count,
    as_index,
    broadcast_shapes,
    cast,
    clip,
    facts_of,
    is_array,
    is_one_of,
    library_of,
)

# Beyond any length, and far enough from the end of int32 to be added to a length.
INDEX_LIMIT = 2**30


def saturating_sum(offset: Any, shift: int, xp: Any, dtype: Any, limit: int = INDEX_LIMIT) -> Any:
    """Return offset + shift, limited to ±limit, although neither may fit in `dtype`.

    An offset given as an array may hold any number of its dtype, and a window is a Python
    integer of any size. Only their sum determines which keys are seen.
    """
    if isinstance(offset, int):
        return max(-limit, min(offset + shift, limit))
    if "uint" in str(offset.dtype) and xp.iinfo(dtype).bits == 64:
        offset = as_count(xp, offset)  # torch supports few operations on unsigned integers
    info = xp.iinfo(offset.dtype)
    low, high = -limit - shift, limit - shift
    if high <= info.min:
        return limit
    if low >= info.max:
        return -limit
    offset = cast(xp, clip(xp, offset, max(low, int(info.min)), min(high, int(info.max))), dtype)
    # In two steps: the shift itself may be just out of range where the sum is not.
    half = shift // 2
    return offset + half + (shift - half)


def reduced(offset: Any, modulus: int, xp: Any, dtype: Any) -> tuple[Any, int]:
    """Return an offset and a modulus in `dtype` that leave key − row − offset its multiples."""
    if not isinstance(offset, int):
        offset, modulus = cast(xp, offset, dtype), min(modulus, int(xp.iinfo(dtype).max))
    shift = offset % modulus
    if modulus <= INDEX_LIMIT:
        return shift, modulus
    # A key and a row are less than 2**30 apart: the nearest multiple is the only one, if any.
    if isinstance(shift, int):
        shift = shift - modulus if shift > modulus // 2 else shift
        return max(-INDEX_LIMIT, min(shift, INDEX_LIMIT)), min(modulus, 2 * INDEX_LIMIT - 1)
    shift = xp.where(shift > modulus // 2, shift - modulus, shift)
    return clip(xp, shift, -INDEX_LIMIT, INDEX_LIMIT), min(modulus, 2 * INDEX_LIMIT - 1)


def check_shape_of_scores(name: str, shape: tuple[int, ...], scores: tuple[int, ...]) -> None:
    """Raise unless a mask or bias broadcasts to the scores, in one way only."""
    given = "bias" if name == "bias" else "mask"
    if 2 < len(shape) < len(scores) and any(length != 1 for length in shape[:-2]):
        raise ValueError(
            f"{name} {shape} has {len(shape)} axes for scores {scores}, so its first could be batch"
            f" or heads: write {given}[:, None] for a {given} per batch item, {given}[None] for one"
            " per head"
        )
    if len(shape) > len(scores) or broadcast_shapes(shape, scores) != scores:
        letters = "L, S" if len(scores) == 2 else "..., H, L, S"
        hint = ""
        if len(scores) > 3 and shape == (scores[0], scores[-1]):
            hint = f": write {given}[:, None, None, :] for the keys of each batch item"
        raise ValueError(
            f"{name} {shape} does not broadcast to the scores ({letters}) = {scores}{hint}"
        )


class ScoreDims(NamedTuple):
    """The lengths of a call, which an expression checks itself against."""

    batch: tuple[int, ...]  # broadcast
    heads: int
    query_length: int
    key_length: int
    query_offset: int | None  # None if an array gives it

    @property
    def items(self) -> int:
        """The number of batch items."""
        return math.prod(self.batch)

    @property
    def scores(self) -> tuple[int, ...]:
        """The shape of the scores."""
        return (*self.batch, self.heads, self.query_length, self.key_length)

    def check_per_item(self, name: str, facts: ArrayFacts | int | None) -> None:
        """Raise unless an array holds an integer for each batch item."""
        if isinstance(facts, ArrayFacts):
            _check_integers(name, facts)
            self.check_batch(name, facts.shape, facts.shape, "(...,)")

    def check_per_token(self, name: str, facts: ArrayFacts, letter: str, length: int) -> None:
        """Raise unless an array holds an integer for each token of each batch item."""
        _check_integers(name, facts)
        if not facts.shape or not is_one_of(facts.shape[-1], length, None):
            many = name.replace("_", " ").split()[-1]  # "ids" or "positions"
            raise ValueError(f"{name} must have {letter} = {length} {many}; got {facts.shape}")
        self.check_batch(name, facts.shape[:-1], facts.shape, f"(..., {letter})")

    def check_batch(
        self, name: str, lead: tuple[int, ...], shape: tuple[int, ...], letters: str
    ) -> None:
        """Raise unless leading axes broadcast to the batch axes."""
        if len(lead) > len(self.batch) or broadcast_shapes(lead, self.batch) != self.batch:
            raise ValueError(
                f"{name} of shape {letters} must broadcast to the batch axes {self.batch}; got"
                f" {shape}"
            )


def _check_integers(name: str, facts: ArrayFacts) -> None:
    if "int" not in facts.dtype:
        raise TypeError(f"{name} must hold integers; got {facts}")


class ScoreIndices(Protocol):
    """Some batch items, heads, rows and keys, as index arrays that broadcast with one another.

    `PointIndices` documents it. `differentiate` is the backend's `pullback`, where there is one.
    """

    xp: Any
    differentiate: Callable[..., Array] | None

    @property
    def batch(self) -> Array: ...
    @property
    def head(self) -> Array: ...
    @property
    def row(self) -> Array: ...
    @property
    def column(self) -> Array: ...
    def position(self, shift: int = 0) -> Array: ...
    def relative_position(self, modulus: int | None = None) -> Array: ...
    def per_item(self, numbers: int | Array) -> Any: ...
    def per_head(self, numbers: Array) -> Array: ...
    def per_row(self, numbers: Array) -> Array: ...
    def per_key(self, numbers: Array) -> Array: ...
    def of_scores(self, array: Array) -> Array: ...
    def looked_up(self, table: Array, *indices: Any) -> Array: ...
    def is_listed(
        self, lists: Array, places: tuple[Any, ...], number: Array, size: int
    ) -> Array: ...
    def by_rule(self, rule: Callable[..., Array]) -> Array: ...
    def by_score_mod(self, rule: Callable[..., Array], scores: Array) -> Array: ...


def found_in_lists(at: ScoreIndices, lists: Array, places: tuple[Any, ...], number: Array) -> Array:
    """Return whether a number is in the ascending list at each place, in log2(K) steps."""
    many = lists.shape[-1]
    below = number * 0  # how many of the list are less
    for step in [2**n for n in reversed(range(many.bit_length()))]:
        last = clip(at.xp, below + (step - 1), 0, many - 1)
        is_less = (below + step <= many) & (at.looked_up(lists, *places, last) < number)
        below = at.xp.where(is_less, below + step, below)
    found = at.looked_up(lists, *places, clip(at.xp, below, 0, many - 1))
    return (below < many) & (found == number)


def call_mask(
    rule: Callable[..., Array], at: ScoreIndices, check: Callable[[str, Array], ArrayFacts]
) -> Array:
    """Call a mask function (b, h, i, j); `check` returns the facts of what it returns."""
    seen = rule(at.batch, at.head, at.row, at.column)
    if isinstance(seen, bool):
        return at.xp.full_like(at.column, seen, dtype=at.xp.bool)
    facts = check("the mask function", seen)
    if facts.dtype != "bool":
        raise TypeError(
            "the mask function must return a bool array, True where a key takes part; it"
            f" returned dtype {facts.dtype}"
        )
    return seen


def call_score_mod(
    rule: Callable[..., Array],
    at: ScoreIndices,
    scores: Array,
    check: Callable[[str, Array], ArrayFacts],
) -> tuple[Array, ArrayFacts]:
    """Call a score function; `check` returns the facts of what it returns."""
    result = rule(scores, at.batch, at.head, at.row, at.column)
    facts = check("score_mod", result)
    if facts.dtype == "bool" or "complex" in facts.dtype:
        raise TypeError(f"score_mod must return real numbers; it returned dtype {facts.dtype}")
    return result, facts


def facts_of_result(name: str, result: Array) -> ArrayFacts:
    """Return the facts of what a function returns, or raise."""
    if not is_array(result):
        raise TypeError(f"{name} must return an array; {got(result)}")
    return facts_of(result, f"the result of {name}")


class PointIndices:
    """Single indices, as a function in FlexAttention's form gets them.

    They are index arrays, or scalars, that broadcast with one another. The offset is the position
    of the first row, or an array of one for each flat batch item. `batch` are the axes that b
    counts through, by default those that an array has.
    """

    differentiate: Callable[..., Array] | None = None

    def __init__(
        self,
        b: Array,
        h: Array,
        i: Array,
        j: Array,
        *,
        offset: int | Array = 0,
        batch: tuple[int, ...] | None = None,
    ) -> None:
        self.batch, self.head, self.row, self.column = b, h, i, j
        self._offset, self._batch = offset, batch
        self.xp = library_of(j, "the indices").xp

    def position(self, shift: int = 0) -> Array:
        """Return the positions of the rows among the keys, plus `shift`."""
        offset = self._offset
        if not isinstance(offset, int):
            offset = offset[self.batch]
        by = saturating_sum(offset, shift, self.xp, self.column.dtype)
        return self.row if isinstance(by, int) and by == 0 else self.row + by

    def relative_position(self, modulus: int | None = None) -> Array:
        """Return key minus position, or only its remainder by `modulus`."""
        if modulus is None:
            return self.column - self.position()
        offset = self._offset if isinstance(self._offset, int) else self._offset[self.batch]
        shift, modulus = reduced(offset, modulus, self.xp, self.column.dtype)
        return (self.column - self.row - shift) % modulus

    def per_item(self, numbers: Any) -> Any:
        """Return the number of each batch item, from one for all or an array (...,)."""
        if isinstance(numbers, int):
            return min(numbers, INDEX_LIMIT)
        return as_count(self.xp, self._of_item(numbers, ()))

    def per_head(self, numbers: Array) -> Array:
        """Return the number of each query head, from an array (H,)."""
        return numbers[self.head]

    def per_row(self, numbers: Array) -> Array:
        """Return the number of each query row, from an array (..., L)."""
        return self._of_token(numbers, self.row)

    def per_key(self, numbers: Array) -> Array:
        """Return the number of each key, from an array (..., S)."""
        return self._of_token(numbers, self.column)

    def _of_token(self, numbers: Array, index: Array) -> Array:
        return as_index(self.xp, self._of_item(numbers, (index,)))

    def _of_item(self, array: Array, rest: tuple[Array, ...]) -> Array:
        """Index an array whose leading axes are the batch's."""
        own = tuple(array.shape[len(array.shape) - len(rest) :])
        lead = tuple(array.shape[: len(array.shape) - len(rest)])
        if math.prod(lead) == 1:
            flat = self.xp.reshape(array, own)
            return flat[rest] if rest else flat
        if self._batch is not None:
            array = self.xp.broadcast_to(array, (*self._batch, *own))
        return self.xp.reshape(array, (-1, *own))[(self.batch, *rest)]

    def of_scores(self, array: Array) -> Array:
        """Return the entries of an array that broadcasts to (..., H, L, S)."""
        shape = (1,) * (3 - len(array.shape)) + tuple(array.shape)
        indices = (self.head, self.row, self.column)
        rest = tuple([i for i, n in zip(indices, shape[-3:], strict=True) if n != 1])
        own = tuple([n for n in shape[-3:] if n != 1])
        return self._of_item(self.xp.reshape(array, (*shape[:-3], *own)), rest)

    def looked_up(self, table: Array, *indices: Any) -> Array:
        """Return the entries of a table at arrays of indices, one for each axis."""
        return table[indices]

    def is_listed(self, lists: Array, places: tuple[Any, ...], number: Array, size: int) -> Array:
        """Return whether the block of `size` of a number is in a list, by a search.

        `lists` has ascending lists along its last axis, and `places` the indices of the others.
        """
        return found_in_lists(self, lists, places, number // size)

    def by_rule(self, rule: Callable[..., Array]) -> Array:
        """Call a mask function (b, h, i, j)."""
        return call_mask(rule, self, facts_of_result)

    def by_score_mod(self, rule: Callable[..., Array], scores: Array) -> Array:
        """Call a score function (score, b, h, i, j)."""
        changed, facts = call_score_mod(rule, self, scores, facts_of_result)
        own = facts_of(scores).dtype
        # FlexAttention's scores have more bits than their dtype says, and it takes these two only.
        exact = accumulator_of(own)
        if facts.dtype in (own, exact):
            return changed
        return cast(self.xp, changed, getattr(self.xp, exact))
