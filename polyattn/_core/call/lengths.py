"""Variable-length keys: `key_lengths` of a ragged batch, whose shorter items are padded.

The lengths become a mask and an offset, which every kernel computes.

Numbers of the host are checked here, where they can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyattn._base.arguments import got
from polyattn._base.arrays import Array, ArrayFacts, as_index, index_range, length_of, library_of
from polyattn._base.host import as_array, is_host, is_unreadable
from polyattn._core.call.facts import axes_of
from polyattn._core.expressions.masks import Mask, as_mask
from polyattn._core.expressions.patterns import CachePadding, Padding
from polyattn._core.expressions.replacements import LongSequence
from polyattn._core.expressions.scores import Score

_LENGTH_OF_EACH = (
    "scale=scores.long_sequence() is one number for all items, and key_lengths as an array (as of a"
    " PagedCache, or in a traced function) has one for each: give an integer as key_lengths, or in"
    " place of the scale multiply the query of an item by its length ** -0.5"
)


def lengths_to_mask(
    values: dict[str, Any],
    given: Mapping[str, Any],
    arrays: tuple[Array, Array],
    layout: str,
    shares: tuple[int, int],
) -> None:
    """Turn lengths of keys into a mask, and into the offset where positions may matter.

    With a block table they stay as well: kernels read the slots of a page up to them.
    """
    query, key = arrays
    lengths, mask, table = (values.get(n) for n in ("key_lengths", "mask", "block_table"))
    values.pop("key_lengths", None)
    if lengths is None:
        raise TypeError("block_table needs key_lengths=, the number of keys of each item")
    if len(query.shape) < 2 or len(key.shape) < (2 if table is None else 4):
        return  # `examine` refuses the call
    _check_numbers(given, key, table, layout, shares[1])
    if isinstance(values.get("scale"), LongSequence):
        if not isinstance(lengths, int):
            raise ValueError(_LENGTH_OF_EACH)
        values["scale"] = LongSequence(lengths)
    lengths = _as_integers(lengths)
    is_newest = "query_offset" not in values
    padding = (CachePadding if is_newest else Padding)(lengths)
    values["mask"] = padding if mask is None else as_mask(mask) & padding
    by_position = "is_causal" in values or "window" in values or isinstance(mask, Mask)
    if is_newest and (by_position or isinstance(values.get("score_mod"), Score)):
        axis = -3 if layout == "...LHD" and len(query.shape) > 2 else -2
        rows = length_of(query, axis) * shares[0]
        values["query_offset"] = lengths if isinstance(lengths, ArrayFacts) else lengths - rows
    if table is not None:
        values["block_table"] = _as_integers(table)
        values["key_lengths"] = _as_array(lengths, table)


def _as_integers(given: Any) -> Any:
    """Return an array in the library's dtype of indices, in which a difference has a sign."""
    if isinstance(given, (int, ArrayFacts)):
        return given
    return as_index(library_of(given).xp, given)


def _as_array(lengths: Any, table: Array) -> Any:
    if not isinstance(lengths, int):
        return lengths
    if isinstance(table, ArrayFacts):
        return table._replace(shape=())
    xp = library_of(table).xp
    return xp.reshape(index_range(xp, 0, 1, table) + lengths, ())


def _check_numbers(
    given: Mapping[str, Any], key: Array, table: Array | None, layout: str, ranks: int
) -> None:
    """Raise if lengths or page numbers that the host holds are out of range."""
    lengths = as_array("key_lengths", given["key_lengths"])
    numbers = [lengths] if isinstance(lengths, int) else []
    if is_host(lengths) and not is_unreadable(lengths):
        numbers = lengths.reshape(-1).tolist()  # of few items, in less time than two ends of them
    if not numbers:
        return
    _, _, length, _ = axes_of(key.shape, layout)
    count = ranks if table is None else table.shape[-1]
    most = length * count if isinstance(length, int) and isinstance(count, int) else None
    if any(number < 0 or (most is not None and number > most) for number in numbers):
        raise ValueError(
            f"key_lengths must be from 0 to S = {most}, the number of keys in the arrays;"
            f" {got(given['key_lengths'])}"
        )
    if table is not None:
        _check_pages(as_array("block_table", given["block_table"]), lengths, key.shape[0], length)


def _check_pages(table: Any, lengths: Any, pages: int, page: int) -> None:
    """Raise if a table that the host holds names a page that the pool does not have."""
    if not is_host(table) or is_unreadable(table):
        return
    if not table.size or 0 <= table.min() <= table.max() < pages:
        return  # all of it, which takes less time to check
    xp = library_of(table).xp
    used = xp.arange(table.shape[-1]) * page < xp.asarray(lengths)[..., None]
    wrong = used & ((table < 0) | (table >= pages))
    if wrong.any():
        raise ValueError(
            f"block_table must name pages from 0 to {pages - 1} for the keys within key_lengths;"
            f" got {xp.broadcast_to(table, wrong.shape)[wrong][0]}"
        )
