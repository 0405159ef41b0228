"""Masks as expressions: their interface, their composition, and arrays and functions as masks.

A mask has two methods. `seen` returns which keys take part, at some indices (`ScoreIndices`).
`coverage` returns whether any key of a block (`Block`) may take part, and whether all surely do.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, ClassVar

from polyattn._base.arguments import check_int
from polyattn._base.arrays import Array, ArrayFacts, is_array
from polyattn._base.host import destination_of
from polyattn._core.expressions.coverage import UNKNOWN, Block, Coverage, complement
from polyattn._core.expressions.expression import Expression
from polyattn._core.expressions.indices import (
    PointIndices,
    ScoreDims,
    ScoreIndices,
    check_shape_of_scores,
)
from polyattn._core.expressions.intervals import Intervals, Rows, TooManyError, rows_of


class Mask(Expression):
    """The keys that each row may see. Masks compose by ``&``, ``|`` and ``~``.

    `polyattn.masks` makes them and ``mask=`` takes them. Called as ``mask(b, h, i, j)`` it is a
    mask function in FlexAttention's form, the rows counted from the first key.
    """

    module: ClassVar[str] = "masks"
    positional: ClassVar[bool] = False
    # Otherwise NumPy arrays would apply & and | element by element.
    __array_ufunc__: ClassVar[None] = None

    def seen(self, at: ScoreIndices) -> Array:
        """Return which keys take part, as an array that broadcasts to the scores."""
        raise NotImplementedError

    def coverage(self, block: Block) -> Coverage:
        """Return whether any key of a block may be visible, and whether all surely are."""
        if not block.reads and any(is_array(getattr(self, name)) for name in self.__match_args__):
            return UNKNOWN
        if self.positional and not block.positioned:
            return UNKNOWN
        return self._coverage(block)

    def _coverage(self, block: Block) -> Coverage:
        return UNKNOWN

    @property
    def conditions(self) -> tuple[Mask, ...]:
        """The masks that must all show a key for this one to show it."""
        return (self,)

    @property
    def first_keys(self) -> Any:
        """The number of first keys that all rows of an item see; None if they see others."""
        return None

    @property
    def has_rule(self) -> bool:
        """Whether the coverage of some part is unknown because it is a function."""
        return any(mask.has_rule for mask in self.within())

    def plot(
        self, query_length: int | None = None, key_length: int | None = None, **options: Any
    ) -> Any:
        """Draw which keys the rows see, and which tiles are empty, full and mixed.

        Parameters
        ----------
        query_length, key_length : int, optional
            L and S; by default those of the mask's arrays, or 64.
        **options : Any
            As for `polyattn.plot.mask`: ``query_offset``, ``tile``, ``batch``,
            ``item``, ``head``, ``like``, ``axes``.

        Returns
        -------
        matplotlib.figure.Figure
            The figure, as from `polyattn.plot.mask`. A notebook shows it at the end of a cell.
        """
        draw = resolve_name("polyattn.plot.mask_picture:mask")  # a room above this one
        return draw(self, query_length, key_length, **options)

    def intervals(
        self,
        lengths: tuple[int, int],
        query_offset: Any = None,
        *,
        batch: tuple[int, ...] = (1,),
        heads: int = 1,
        most: int = 8,
        evaluates: bool = True,
    ) -> Intervals | None:
        """Return the keys that each row sees as intervals, for an engine that takes their ends.

        Lengths, windows, prefixes, ids, positions and their compositions give intervals without an
        array of all rows and keys. The arrays of the mask are read, on the host.

        Parameters
        ----------
        lengths : tuple of int
            L and S.
        query_offset : int or Array, optional
            The position of the first row among the keys, one for all or (...,); S − L by default.
        batch : tuple of int
            The batch axes.
        heads : int
            Number of query heads.
        most : int
            The most intervals that a row may have.
        evaluates : bool
            Whether a mask that is a function, a bool array or a tree is evaluated at all its
            rows and keys. Otherwise it has no intervals.

        Returns
        -------
        Intervals or None
            `first` and `stop`, int64 (items or 1, heads or 1, L or 1, n): the first key of each
            interval and the one after its last. Those of a row are in order and do not touch; a row
            with less than n ends with empty ones. None if a row has more than `most`. Its methods
            `band`, `documents` and `tiles` say what engines of other kinds take.

        Raises
        ------
        TypeError, ValueError
            If a number is wrong, or an array of the mask does not fit the lengths.

        Examples
        --------
        >>> from polyattn import masks
        >>> streaming = masks.causal() & (masks.window(1, 0) | masks.prefix(1))
        >>> first, stop = streaming.intervals((4, 4))
        >>> first[0, 0].tolist(), stop[0, 0].tolist()
        ([[0, 4], [0, 4], [0, 4], [0, 2]], [[1, 4], [2, 4], [3, 4], [1, 4]])
        """
        rows, keys = (check_int("intervals: lengths", number, least=0) for number in lengths)
        heads, most = (check_int("intervals: heads, most", n, least=1) for n in (heads, most))
        offset = keys - rows if query_offset is None else query_offset
        of_all = offset if isinstance(offset, int) else None
        self.spec().check(ScoreDims(batch, heads, rows, keys, of_all))
        # Parts of a mask may have more intervals than the whole.
        call = rows_of(batch, heads, (rows, keys), offset, max(4 * most, 64), evaluates)
        try:
            found = call.of_elements(self) if call.is_far else self._intervals(call, None)
        except TooManyError:
            return None
        return found if found.first.shape[-1] <= most else None

    def _intervals(self, rows: Rows, within: Intervals | None) -> Intervals:
        """Return the intervals; beyond `within`, where it is given, any keys may be left."""
        return rows.of_elements(self)

    def _repr_html_(self) -> str:
        return str(resolve_name("polyattn.plot.svg:as_html")(self))

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        destination = destination_of(j) if is_array(j) else None
        mask = self if destination is None else self.placed(destination)
        return mask.seen(PointIndices(b, h, i, j))

    def __and__(self, other: Any) -> Mask:
        return And.of(self, other)

    def __rand__(self, other: Any) -> Mask:
        return And.of(other, self)

    def __or__(self, other: Any) -> Mask:
        return Or.of(self, other)

    def __ror__(self, other: Any) -> Mask:
        return Or.of(other, self)

    def __invert__(self) -> Mask:
        return self.mask if isinstance(self, Not) else Not(self)

    def __bool__(self) -> bool:
        raise TypeError("masks compose by & | ~, which `and`, `or` and `not` are not")


class Comparison(Mask):
    """A mask whose rule only compares rows, keys and numbers: so their bounds tell its coverage."""

    def _coverage(self, block: Block) -> Coverage:
        coverage: Coverage = self.seen(block)  # type: ignore[arg-type]
        return coverage


def as_mask(thing: Any) -> Mask:
    """Return a mask; a function or a bool array becomes one."""
    if isinstance(thing, Mask):
        return thing
    if callable(thing) and not isinstance(thing, Expression):
        return RuleMask(thing)
    if is_array(thing):
        return DenseMask(thing)
    raise TypeError(
        "a mask composes with masks, functions (b, h, i, j) and bool arrays; got"
        f" a {type(thing).__name__}"
    )


@dataclass(frozen=True, eq=False, repr=False)
class Joined(Mask):
    """Masks joined by one operator."""

    sign: ClassVar[str]
    axes: ClassVar[dict[str, str]] = {}
    join: ClassVar[Callable[[Any, Any], Any]]
    parts: tuple[Mask, ...]  # two or more, of which none is joined by the same operator

    @classmethod
    def of(cls, *masks: Any) -> Mask:
        """Join masks, each a `Mask`, a function or a bool array."""
        parts: list[Mask] = []
        for mask in map(as_mask, masks):
            parts += mask.parts if isinstance(mask, cls) else (mask,)
        return cls(tuple(parts))

    def seen(self, at: ScoreIndices) -> Array:
        return self._reduced([part.seen(at) for part in self.parts])

    def coverage(self, block: Block) -> Coverage:
        coverage: Coverage = self._reduced([part.coverage(block) for part in self.parts])
        return coverage

    def _reduced(self, things: Iterable[Any]) -> Any:
        return functools.reduce(type(self).join, things)

    def __repr__(self) -> str:
        # & binds more tightly than |.
        parts = [f"({part!r})" if isinstance(part, Or) else repr(part) for part in self.parts]
        return f" {self.sign} ".join(parts)


class And(Joined):
    sign: ClassVar[str] = "&"
    join: ClassVar[Callable[[Any, Any], Any]] = operator.and_

    @property
    def conditions(self) -> tuple[Mask, ...]:
        return tuple([one for part in self.parts for one in part.conditions])

    def _intervals(self, rows: Rows, within: Intervals | None) -> Intervals:
        left: tuple[Mask, ...] = self.parts
        # A mask of many intervals may have few where the others show keys.
        while left:
            later = []
            for part in left:
                try:
                    found = part._intervals(rows, within)
                except TooManyError:
                    later.append(part)
                else:
                    within = found if within is None else rows.both(within, found)
            if len(later) == len(left):
                raise TooManyError
            left = tuple(later)
        assert within is not None
        return within


class Or(Joined):
    sign: ClassVar[str] = "|"
    join: ClassVar[Callable[[Any, Any], Any]] = operator.or_

    def _intervals(self, rows: Rows, within: Intervals | None) -> Intervals:
        return functools.reduce(rows.either, [x._intervals(rows, within) for x in self.parts])


@dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    axes: ClassVar[dict[str, str]] = {}
    mask: Mask

    def seen(self, at: ScoreIndices) -> Array:
        return complement(self.mask.seen(at))

    def coverage(self, block: Block) -> Coverage:
        coverage: Coverage = complement(self.mask.coverage(block))
        return coverage

    def _intervals(self, rows: Rows, within: Intervals | None) -> Intervals:
        return rows.complement(self.mask._intervals(rows._replace(most=rows.most + 1), within))

    def __repr__(self) -> str:
        return f"~({self.mask!r})" if isinstance(self.mask, Joined) else f"~{self.mask!r}"


@dataclass(frozen=True, eq=False, repr=False)
class DenseMask(Mask):
    name: ClassVar[str] = "dense"
    axes: ClassVar[dict[str, str]] = {"array": ".HLS"}
    array: Any

    def seen(self, at: ScoreIndices) -> Array:
        return at.of_scores(self.array)

    def _coverage(self, block: Block) -> Coverage:
        return Coverage(*block.any_and_all(self.array))

    def check(self, dims: ScoreDims) -> None:
        facts: ArrayFacts = self.array
        if facts.dtype != "bool":
            raise TypeError(
                f"masks.dense takes a bool array, True where a key takes part; got {facts}"
            )
        check_shape_of_scores("masks.dense:", facts.shape, dims.scores)


@dataclass(frozen=True, eq=False, repr=False)
class RuleMask(Mask):
    name: ClassVar[str] = "rule"
    axes: ClassVar[dict[str, str]] = {}
    has_rule = True
    function: Callable[..., Any]

    def seen(self, at: ScoreIndices) -> Array:
        return at.by_rule(self.function)
