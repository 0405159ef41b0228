"""What a mask is asked of a block of rows and keys, and what it answers, without looking at each.

A block gives bounds, in Python's numbers or in arrays of them; an answer may only be vague, never
wrong: "some" where none is seen costs time, "none" where one is seen costs the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from polyattn.arrays import Array

if TYPE_CHECKING:
    from polyattn.expressions.masks import Compiled

__all__ = ["UNKNOWN", "Block", "Coverage", "logical_not"]


class Coverage(NamedTuple):
    """What is known of a block: bools, or arrays of them with the axes (..., H, rows, keys).

    Attributes
    ----------
    any_visible : bool or Array
        Whether a key of it may be seen by a row of it. Where this is False, none is.
    all_visible : bool or Array
        Whether every row of it surely sees all its keys.
    """

    any_visible: Any
    all_visible: Any


UNKNOWN = Coverage(True, False)


class Block(Protocol):
    """Some rows and keys, or many such blocks at once: then the bounds are arrays.

    Attributes
    ----------
    rows, columns : tuple
        The first, and the one after the last.
    reads : bool
        Whether it may be asked what arrays hold.
    """

    @property
    def rows(self) -> tuple[Any, Any]: ...
    @property
    def columns(self) -> tuple[Any, Any]: ...
    @property
    def reads(self) -> bool: ...
    @property
    def positioned(self) -> bool:
        """Whether it is known where the rows stand among the keys."""

    def first(self, shift: int = 0) -> Any:
        """Return the position of the first row.

        Parameters
        ----------
        shift : int
            What is added to it.
        """

    def last(self, shift: int = 0) -> Any:
        """Return the position of the last row.

        Parameters
        ----------
        shift : int
            What is added to it.
        """

    def per_item(self, numbers: int | Array) -> Any:
        """Return what is given for each batch item.

        Parameters
        ----------
        numbers : int or Array
            A number for all, or an array of the batch axes.
        """

    def per_row(self, numbers: Array) -> tuple[Array, Array]:
        """Return the least and the greatest of what is given for each query row.

        Parameters
        ----------
        numbers : Array
            Shape (..., L).
        """

    def per_key(self, numbers: Array) -> tuple[Array, Array]:
        """Return the least and the greatest of what is given for each key.

        Parameters
        ----------
        numbers : Array
            Shape (..., S).
        """

    def any_and_all(self, seen: Array) -> tuple[Array, Array]:
        """Return whether any and whether all of a mask array holds.

        Parameters
        ----------
        seen : Array of bool
            It broadcasts to the scores, (..., H, L, S).
        """

    def table(self, compiled: Compiled) -> Coverage:
        """Return what a table says.

        Parameters
        ----------
        compiled : Compiled
            The mask that has it.
        """


def logical_not(flags: Any) -> Any:
    """Return the opposite of a bool, or of an array of them."""
    return not flags if isinstance(flags, bool) else ~flags
