"""Selected keys, which the library reads where they lie.

A selection names keys, or blocks of keys, for each row or block of rows. Its call is one with as
many items as there are blocks of rows, whose keys are pages as long as a block of keys, in order. A
page may begin at any key: its number is that of its first row in memory.
"""

from __future__ import annotations

import math
from functools import reduce
from operator import and_
from typing import Any

import numpy as np

from polyattn.plugin import Operands, PointIndices, Problem, Span, selection_of
from polyattn_native.arrays import converted, offsets_of, readable
from polyattn_native.call import NativeCall

# Keys that few rows read by their numbers take as long as so many that a panel reads in order.
FEW_ROWS, TIMES = 16, 4
# The elements of a mask that are made at once.
AT_ONCE = 2**20
OPTIONS = frozenset({
    "backward", "batch_broadcast", "bias", "block_table", "causal", "grouped_heads", "logsumexp",
    "mask", "mask_expression", "mask_mod", "query_offset", "query_offset_array", "scale", "sinks",
    "softcap", "value_size", "window",
})  # fmt: skip


def selects(problem: Problem) -> bool:
    """Return whether a call takes less time by its selected keys than with a mask."""
    selection, _ = selection_of(problem.mask_spec)
    if selection is None or problem.is_symbolic:
        return False
    rows = selection.sizes[0] or problem.query_length
    times = 1 if rows * problem.group_size >= FEW_ROWS else TIMES
    return bool(times * selection.most_keys < problem.key_length)


def remark(problem: Problem) -> str | None:
    """Return how many keys a call of a selection reads."""
    if not selects(problem):
        return None
    many = min(selection_of(problem.mask_spec)[0].most_keys, problem.key_length)
    return f"it reads {many:,} of {problem.key_length:,} keys for a row where they lie"


def reasons_against(problem: Problem) -> list[str]:
    """Return why the call of a selection is left to another kernel."""
    if not selects(problem):
        return []
    selection, _ = selection_of(problem.mask_spec)
    names = sorted(problem.features - OPTIONS)
    reasons = [f"with selected keys it does not compute {', '.join(names)}"] if names else []
    if "bias" in problem.features:
        if "backward" in problem.features:
            reasons.append("with selected keys it does not compute the gradient of a bias")
        rows, size = selection.sizes
        if (rows or problem.query_length, size) != (1, 1):
            reasons.append("it computes a bias for keys that each row selects, not for blocks")
    if problem.page is not None and problem.page % selection.sizes[1]:
        reasons.append("it reads blocks in pages whose length is a multiple of theirs")
    if math.prod(problem.batch) * problem.key_heads * problem.key_length >= 2**31:
        reasons.append("it numbers selected keys of all items and heads up to 2**31")
    starts = selection.first_key, selection.first_row or 0
    if not all(isinstance(start, int) and start == 0 for start in starts):
        reasons.append("it does not support a part of a selection")
    return reasons


class SelectedCall:
    """A call of selected keys, as calls of the library for one head or key head each."""

    is_made = True  # it is not kept to run again

    def __init__(self, problem: Problem, x: Operands, threads: int, *, products: int = 2) -> None:
        if x.block_table is None:  # pages that were gathered for a derivative
            problem = problem._replace(page=None)
        self.problem, self.threads, self.products = problem, threads, products
        self.accumulator = np.dtype(problem.accumulator)
        self.items = math.prod(problem.batch)
        selection, rest = selection_of(x.mask)
        others = [one for one in (rest, problem.band) if one is not None]
        self.rest = reduce(and_, others) if others else None
        self.offset: Any = problem.query_offset
        if self.offset is None:
            self.offset = np.broadcast_to(offsets_of(problem, x), self.items)
        rows, self.size = selection.sizes
        self.rows = min(rows or problem.query_length, problem.query_length)
        lists = np.asarray(selection.lists)
        self.lists = lists.reshape((1,) * (3 - lists.ndim) + lists.shape)
        # Whether each head has a list of its own, or the heads of a key head share it.
        self.by_head = self.lists.shape[-3] > 1 or self._depends_on_heads()
        self.lead = problem.heads if self.by_head else problem.key_heads
        self.has_gradients = products > 2
        self.x, self.starts = _in_rows(problem, x, is_whole=self.has_gradients)
        self.between_heads: Any = _between_heads(self.x)
        self.arrays: list[tuple[str, Any]] = []

    def _depends_on_heads(self) -> bool:
        if self.rest is None or self.problem.heads == 1:
            return False
        zero = np.asarray(0)
        return np.ndim(self._seen(zero, np.arange(self.problem.heads), zero, zero)) > 0

    def _seen(self, item: Any, head: Any, row: Any, key: Any) -> Any:
        """Return which keys the other masks show at some indices."""
        batch = self.problem.batch
        at = PointIndices(item, head, row, key, offset=self.offset, batch=batch)
        return self.rest.seen(at)  # type: ignore[union-attr]

    def array(self, name: str, array: Any) -> None:
        """Add an array with the axes (..., head, row, column)."""
        self.arrays.append((name, array))

    def rows_of(self, name: str, array: Any) -> None:
        """Add an array with a number for each row."""
        self.arrays.append((name, array[..., None]))

    def gradient_of(self, name: str, shape: tuple[int, ...]) -> Any:
        """Add and return the gradient of query, key or value."""
        gradient = np.zeros(shape, self.accumulator)
        self.arrays.append((f"{name}_gradient", gradient))
        return gradient

    def run(self, function: Any) -> None:
        """Run a function of the library on all heads and rows."""
        length = self.problem.query_length
        whole = length // self.rows * self.rows
        for span in (Span(0, whole), Span(whole, length)):
            listed: Any = None
            # A head after the other: its keys stay in the caches. One call for all where rows are
            # few, and for gradients, of which those of one head are one task.
            at_once = self.lead if self.has_gradients or self._is_short() else 1
            for lead in Span(0, self.lead).split(at_once):
                if span.length:
                    if self.by_head or listed is None:
                        listed = self._listed(lead if self.by_head else Span(0, 1), span)
                    self._call(lead, span, *listed).run(function)

    def _is_short(self) -> bool:
        has_heads = self.x.sinks is not None or self.x.bias is not None
        rows = self.items * self.problem.query_length
        return rows <= FEW_ROWS and not has_heads and self.between_heads is not None

    def _listed(self, heads: Span, span: Span) -> tuple[Any, Any, Any]:
        """Return the blocks of keys that blocks of rows see, how many keys they have, and a mask.

        These are (items, heads, n, K), ascending and then 0, and (items, heads, n); the mask is
        None where no key of them is hidden.
        """
        size, keys = self.size, self.problem.key_length
        rows = min(self.rows, span.length)
        count = span.length // rows
        lists = self.lists if self.lists.shape[-3] == 1 else self.lists[..., slice(*heads), :, :]
        if lists.shape[-2] > 1:
            first = span.start // self.rows
            lists = lists[..., first : first + count, :]
        lists = np.broadcast_to(lists, (*self.problem.batch, heads.length, *lists.shape[-2:]))
        lists = lists.reshape(-1, heads.length, count, lists.shape[-1])
        item, head = np.arange(self.items)[:, None, None, None], np.arange(*heads)[:, None, None]
        shown = (lists >= 0) & (lists * size < keys)
        shown[..., 1:] &= lists[..., 1:] != lists[..., :-1]
        if self.x.block_table is not None:
            lengths = np.broadcast_to(np.asarray(self.x.key_lengths), self.problem.batch)
            shown &= lists * size < lengths.reshape(-1, 1, 1, 1)
        each = rows == size == 1
        if self.rest is not None and each:
            row = np.arange(*span)[:, None]
            shown &= self._seen(item, head, row, np.clip(lists, 0, keys - 1))
        number = shown.sum(axis=-1)
        lists = np.sort(np.where(shown, lists, keys), axis=-1)[..., : max(1, number.max(initial=0))]
        last = np.take_along_axis(lists, np.maximum(number - 1, 0)[..., None], axis=-1)[..., 0]
        cut = np.where(number > 0, np.maximum((last + 1) * size - keys, 0), 0)
        counts = (number * size - cut).astype(np.int32)
        blocks = np.where(lists == keys, 0, lists)
        if self.rest is None or each:
            return blocks, counts, None
        mask = np.empty((*blocks.shape[:3], rows, blocks.shape[-1] * size), bool)
        for some in Span(0, count).split(max(1, AT_ONCE // max(1, mask[:, :, 0].size))):
            key = blocks[:, :, slice(*some), :, None] * size + np.arange(size)
            key = np.minimum(key.reshape(*key.shape[:3], 1, -1), keys - 1)
            row = np.arange(some.start * rows, some.stop * rows).reshape(-1, rows, 1) + span.start
            mask[:, :, slice(*some)] = self._seen(item[..., None], head[..., None], row, key)
        return (
            blocks,
            counts,
            mask.reshape(*self.problem.batch, *mask.shape[1:3], 1, *mask.shape[3:]),
        )

    def _call(self, lead: Span, span: Span, blocks: Any, counts: Any, mask: Any) -> NativeCall:
        """Return the call of some heads, or key heads, and rows: each of them is an item."""
        problem, x, rows = self.problem, self.x, min(self.rows, span.length)
        count, group = span.length // rows, problem.heads // self.lead
        batch = (*problem.batch, lead.length, count)
        part = problem._replace(
            batch=batch, heads=group, key_heads=1, query_length=rows,
            key_length=blocks.shape[-1] * self.size, page=self.size, is_causal=False,
            window=(None, None), query_offset=0, mask_spec=None, features=frozenset(),
        )  # fmt: skip
        of_keys = self.lead // problem.key_heads
        table, first = self._table(blocks, counts), lead.start // of_keys
        if lead.length > 1:
            before = np.arange(lead.length, dtype=np.int32) // of_keys * self.between_heads
            table = table + before[:, None, None]
        table = table.reshape(*batch, -1)

        def pages(array: Any) -> Any:
            return _pages(array[..., first, :, :], self.size, table)

        def folded(array: Any) -> Any:
            *others, _, _, size = array.shape
            part = array.reshape(*others, self.lead, group, *array.shape[-2:])
            part = part[..., slice(*lead), :, slice(*span), :]
            return part.reshape(*part.shape[:-2], count, rows, size).swapaxes(-4, -3)

        heads = Span(lead.start * group, lead.stop * group)
        given = x._replace(
            query=folded(x.query), key=pages(x.key), value=pages(x.value), mask=mask,
            bias=None if x.bias is None else self._bias(heads, span, blocks[:, 0]),
            sinks=None if x.sinks is None else x.sinks[slice(*heads)],
            block_table=table, key_lengths=None,
        )  # fmt: skip
        call = NativeCall(part, given, self.threads, products=self.products)
        counts = np.array(np.broadcast_to(counts, (self.items, *batch[-2:])), order="C")
        call.add_range("stop", counts.reshape(-1, 1, 1, 1))
        call.keep.append(counts)
        call.call.together, call.call.adds = count * of_keys, 1
        for name, array in self.arrays:
            is_pool = name in ("key_gradient", "value_gradient")
            call.array(name, pages(array) if is_pool else folded(array))
        return call

    def _table(self, blocks: Any, counts: Any) -> Any:
        """Return the first row in memory of each block, int32."""
        first, page, x = blocks * self.size, self.problem.page, self.x
        if page is None:
            return (first + self.starts[:, None, None, None]).astype(np.int32)
        table = np.asarray(x.block_table)
        table = np.broadcast_to(table, (*self.problem.batch, table.shape[-1]))
        item = np.arange(self.items)[:, None, None, None]
        pages = table.reshape(self.items, -1)[item, first // page]
        used = np.arange(blocks.shape[-1]) * self.size < counts[..., None]
        wrong = used & ((pages < 0) | (pages >= len(x.key)))
        if wrong.any():
            raise IndexError(
                f"block_table names page {pages[wrong][0]} of a pool of {len(x.key)} pages"
            )
        pages = np.where(used, pages, 0)
        return (pages * self.starts + first % page).astype(np.int32)

    def _bias(self, heads: Span, span: Span, keys: Any) -> Any:
        """Return the bias of selected keys (items, row, K), (..., 1, row, head, 1, key)."""
        item = np.arange(self.items)[:, None, None, None]
        row, head = np.arange(*span)[:, None], np.arange(*heads)[:, None, None]
        at = PointIndices(item, head, row, keys[:, None], batch=self.problem.batch)
        bias = converted(at.of_scores(self.x.bias), self.accumulator)
        bias = np.broadcast_to(bias, (self.items, heads.length, *keys.shape[1:]))
        bias = bias.reshape(*self.problem.batch, 1, *bias.shape[1:])
        return bias.swapaxes(-3, -2)[..., None, :]


def _pages(array: Any, size: int, table: Any) -> Any:
    """Return pages of `size` rows, one from each row of memory on, (..., 1, size, element)."""
    first = array[(0,) * (array.ndim - 2)]
    row, column = first.strides
    shape = (max(2, int(table.max(initial=0)) + 1), 1, size, first.shape[-1])
    return np.lib.stride_tricks.as_strided(first, shape, (row, 0, row, column))


def _between_heads(x: Operands) -> int | None:
    """Return the rows of memory from one key head to the next; None if not whole, or not alike."""
    if x.key.shape[-3] == 1:
        return 0
    step, row = x.key.strides[-3:-1]
    is_common = x.value.strides[-3] * row == x.value.strides[-2] * step
    return step // row if is_common and not step % row else None


def _in_rows(problem: Problem, x: Operands, *, is_whole: bool) -> tuple[Operands, Any]:
    """Return operands whose keys and values begin whole rows apart, as many for both.

    The result has besides the first row in memory of each item, or the rows between two pages. If
    they are to be whole, they are contiguous and have all batch axes.
    """
    query, key, value = (readable(one) for one in x[:3])
    starts = [_starts(problem, one) for one in (key, value)]
    is_common = starts[0] is not None and np.array_equal(*starts)
    if is_whole or not is_common:
        batch = problem.batch if problem.page is None else key.shape[:1]
        key, value = (
            np.ascontiguousarray(np.broadcast_to(one, (*batch, *one.shape[-3:])))
            for one in (key, value)
        )
        starts = [_starts(problem, key)]
    return x._replace(query=query, key=key, value=value), starts[0]


def _starts(problem: Problem, array: Any) -> Any:
    """Return how many rows before that of an item begin in memory; None if they are not whole."""
    row = array.strides[-2]
    steps = [
        0 if n == 1 else step for n, step in zip(array.shape, array.strides[:-3], strict=False)
    ]
    if row <= 0 or any(step < 0 or step % row for step in steps):
        return None
    if sum(n * step for n, step in zip(array.shape, steps, strict=False)) // row >= 2**31:
        return None  # the table is of int32
    if problem.page is not None:
        return np.asarray(steps[0] // row)
    starts = np.zeros((), np.int64)
    for n, step in zip(problem.batch, [0] * (len(problem.batch) - len(steps)) + steps, strict=True):
        starts = np.add.outer(starts, np.arange(n) * (step // row))
    return starts.reshape(-1)
