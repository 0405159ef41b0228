"""A call as the compiled library takes it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from polyattn.plugin import CUT_BY_FORK, Operands, Problem, Quantized, Span, progress
from polyattn_native.arrays import (
    DATA,
    KNOWS_ADDRESSES,
    address_of,
    converted,
    describe,
    empty_beside,
    offsets_of,
    readable,
    readable_view,
)
from polyattn_native.distance_scores import ByDistance, Places, by_distance, scale_and_rest
from polyattn_native.library import DTYPES, CArray, CCall, library
from polyattn_native.visible import Made, Visible, ends_of_band, visible

# Features that the problem says all about.
PLAIN = frozenset({
    "batch_broadcast", "causal", "grouped_heads", "logsumexp", "query_offset", "scale", "softcap",
    "value_size", "window",
})  # fmt: skip
# Those of a call that reads no operands but arrays where they lie, if scores are without arrays.
IN_PLACE = PLAIN | {"bias", "mask", "score_expression"}
# The multiply-adds that a thread must have: fewer take less time than to wake it.
THREAD_WORK = 2**21
# The arrays with an axis of keys in place of one of rows.
OF_KEYS = frozenset(("key", "value", "key_steps", "value_steps", "key_gradient", "value_gradient"))
# The rows of a part are a multiple of this: those of a group, whose gradients are added up at once.
PART = 128
POINTER = ctypes.sizeof(ctypes.c_void_p)
# The bytes of a mask or bias that is made for some rows at a time.
MADE = 2**22

NO_MEMORY = "the compiled kernel found no memory for its tiles"


def threads_for(problem: Problem, products: int, most: int) -> int:
    """Return how many threads a call uses that has so many products of two arrays."""
    work = math.prod(problem.scores) * (problem.head_size + problem.value_size) * products // 2
    return 1 if work < 2 * THREAD_WORK else min(most, work // THREAD_WORK)


def call_of(problem: Problem, products: int, threads: int) -> CCall:
    """Return a call with all that the problem says, without arrays."""
    low, high = ends_of_band(problem)
    return CCall(
        items=math.prod(problem.batch),
        heads=problem.heads,
        key_heads=problem.key_heads,
        rows=problem.query_length,
        keys=problem.key_length,
        head_size=problem.head_size,
        value_size=problem.value_size,
        dtype=DTYPES.index(problem.dtype),
        threads=threads_for(problem, products, threads),
        scale=problem.scale,
        softcap=problem.softcap or 0,
        has_low=low is not None,
        has_high=high is not None,
        low=low or 0,
        high=high or 0,
        threshold=min(round(problem.dropout * 2**32), 2**32 - 1),
        keep=1 - problem.dropout,
        same_bits=problem.same_bits,
    )


def shape_of_bias_gradient(problem: Problem, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which the library gives the gradient of a bias, with all axes.

    It is that of the bias, but has all items and heads where rows or keys share a number.
    """
    shape = (1,) * (len(problem.scores) - len(shape)) + tuple(shape)
    is_whole = shape[-2:] == problem.scores[-2:]
    return shape if is_whole else (*problem.scores[:-2], *shape[-2:])


class NativeCall:
    """A call, and the arrays that must live as long as it."""

    def __init__(self, problem: Problem, x: Operands, threads: int, *, products: int = 2) -> None:
        self.problem = problem
        self.x: Any = x
        self.accumulator = np.dtype(problem.accumulator)
        self.keep: list[Any] = []
        self.offsets: list[Any] = []
        self.sizes: dict[str, int] = {}  # of the numbers of each array
        self.in_place: dict[str, Any] = {}  # layouts of a mask and bias
        self.call = call_of(problem, products, threads)
        self.array("query", readable(x.query))
        for name in ("key", "value"):
            self._add_keys(name, getattr(x, name))
        # What the expressions of the problem say, kept if they say it without arrays.
        self.seen: Visible | None = None
        self.distances: ByDistance | None = None
        self.places: Places | None = None
        self.bare = CCall.from_buffer_copy(self.call)
        self._add_options(x)

    def again(self, x: Operands) -> NativeCall:
        """Return the call with what other operands say, beside query, key and value."""
        other = object.__new__(NativeCall)
        other.__dict__.update(self.__dict__)
        other.call = CCall.from_buffer_copy(self.bare)
        other.keep, other.offsets = [], []
        other._add_options(x)
        return other

    def address_with(self, x: Operands) -> Any:
        """Return the address of the call with other arrays in the places of its mask and bias.

        None if they are laid out otherwise; their axes are those of the problem.
        """
        call = CCall.from_buffer_copy(self.call)
        start = ctypes.addressof(call)
        for name, (place, strides, dtype) in self.in_place.items():
            array = getattr(x, name)
            if array.strides != strides or array.dtype != dtype or not array.flags.aligned:
                return None
            ctypes.memmove(start + place, id(array) + DATA, POINTER)
        return ctypes.byref(call)

    def _read_in_place(self) -> dict[str, Any]:
        """Return where a mask and a bias are named that are read in place, and their layouts."""
        given = {"mask": self.x.mask, "bias": self.x.bias}
        arrays = {name: array for name, array in given.items() if array is not None}
        if "bias" in arrays and not any(one is arrays["bias"] for one in self.keep):
            return {}  # a copy in another dtype
        return {n: (getattr(CCall, n).offset, x.strides, x.dtype) for n, x in arrays.items()}

    def forget(self) -> bool:
        """Drop what the problem does not say, and return whether it says all of expressions."""
        problem, (masks, scores) = self.problem, (False, False)
        if problem.query_offset is not None:
            specs = problem.mask_spec, problem.score_spec
            masks, scores = (spec is None or not spec.carried() for spec in specs)
        is_in_place = KNOWS_ADDRESSES and scores and problem.features <= IN_PLACE
        self.in_place = self._read_in_place() if is_in_place else {}
        self.keep, self.x = [], None
        self.bare.output, self.bare.logsumexp = self.call.output, self.call.logsumexp
        if not masks or problem.mask is not None:
            self.seen = None
        if self.distances is not None and problem.query_offset is not None:
            self.places = self.distances.places
        if not scores:
            self.distances = None
        return masks and scores

    def _add_options(self, x: Operands) -> None:
        """Add all but query, key and value."""
        self.x = x
        if x.block_table is not None:
            self._add_pages(x)
        self.call.scale, rest = scale_and_rest(self.problem, x.score_mod)
        self._add_positions()
        self._add_dropout()
        if x.sinks is not None:
            self.call.sinks = self.by_head(x.sinks)
        self._add_masks()
        self.made_bias: Any = None
        if rest:
            if self.distances is None:
                self.distances = by_distance(self.problem, x, rest, self.places)
            self._add_distances("by_distance", self.distances)
        if x.bias is not None:
            self._add_bias(x.bias)

    @property
    def is_made(self) -> bool:
        """Whether a mask or bias is made for some rows at a time."""
        return self.makes_mask or self.made_bias is not None

    @property
    def is_of_copies(self) -> bool:
        """Whether it reads no memory of the caller but query, key and value, and has no seed."""
        seen = self.seen
        is_array = seen is None or seen.array is not None
        return not is_array and self.problem.features.isdisjoint(("bias", "dropout"))

    @property
    def address(self) -> Any:
        """The call as an argument of the library."""
        return ctypes.byref(self.call)

    def array(self, name: str, array: Any) -> None:
        """Add an array with the axes (..., head, row, column)."""
        is_pool = self.x.block_table is not None and name in OF_KEYS
        batch = array.shape[:1] if is_pool else self.problem.batch
        describe(getattr(self.call, name), array, batch, self.offsets)
        self.keep.append(array)
        self.sizes[name] = array.itemsize

    def _add_keys(self, name: str, given: Any) -> None:
        if isinstance(given, Quantized):
            steps = np.asarray(given.steps, self.accumulator)
            if name == "key":
                self.call.step_keys = given.shape[-2] // steps.shape[-2]
            self.array(f"{name}_steps", readable(steps))
            given = given.codes
        self.array(name, readable(given))

    def gradient_of(self, name: str, shape: tuple[int, ...]) -> Any:
        """Add and return memory for the gradient of query, key or value."""
        gradient = empty_beside(getattr(self.x, name), shape, self.accumulator)
        self.array(f"{name}_gradient", gradient)
        return gradient

    def rows_of(self, name: str, array: Any) -> None:
        """Add an array with a number for each row."""
        self.array(name, readable_view(array)[..., None])

    def by_head(self, numbers: Any) -> int:
        """Return the address of a number for each head."""
        numbers = np.array(converted(numbers, self.accumulator), order="C")
        self.keep.append(numbers)
        address: int = numbers.ctypes.data
        return address

    def _add_pages(self, x: Operands) -> None:
        pages, page = x.key.shape[0], x.key.shape[-2]
        table, lengths = np.asarray(x.block_table), np.asarray(x.key_lengths)
        if table.size and not 0 <= table.min() <= table.max() < pages:
            used = np.arange(table.shape[-1]) * page < lengths[..., None]
            wrong = used & ((table < 0) | (table >= pages))
            if wrong.any():
                number = np.broadcast_to(table, wrong.shape)[wrong][0]
                raise IndexError(f"block_table names page {number} of a pool of {pages} pages")
        self.array("table", np.array(table, np.int32, order="C")[..., None, None, :])
        self.call.page = page

    def _add_positions(self) -> None:
        call = self.call
        if self.problem.query_offset is None and (call.has_low or call.has_high):
            positions = offsets_of(self.problem, self.x)
            self.keep.append(positions)
            call.positions = address_of(positions)

    def _add_dropout(self) -> None:
        problem, x, call = self.problem, self.x, self.call
        if not problem.dropout:
            return
        seed = int(np.asarray(x.seed)) % 2**64
        start = problem.dropout_start
        numbers = np.asarray(x.dropout_start).tolist() if start is None else start
        words = seed % 2**32, seed >> 32, *[number % 2**32 for number in numbers]
        self.seed = (ctypes.c_uint32 * 6)(*words)
        call.seed = ctypes.addressof(self.seed)

    def _add_masks(self) -> None:
        seen = self.seen = visible(self.problem, self.x) if self.seen is None else self.seen
        for name, numbers in (("first", seen.first), ("stop", seen.stop)):
            if numbers is not None:
                self.add_range(name, numbers)
                self.call.ranges = numbers.shape[3]
        self.makes_mask = seen.by_rows
        if seen.array is not None:
            self.array("mask", np.asarray(seen.array).view(np.uint8))

    def add_range(self, name: str, numbers: Any) -> None:
        """Add an end of ranges, as `Visible` has it."""
        to, size = getattr(self.call, name), numbers.itemsize
        to.data = address_of(numbers)
        to.item, to.head, to.row, to.column = [
            0 if n == 1 else stride // size
            for n, stride in zip(numbers.shape, numbers.strides, strict=True)
        ]
        self.sizes[name] = size

    def _add_bias(self, bias: Any) -> None:
        if bias.dtype == self.accumulator or bias.nbytes <= MADE:
            self.array("bias", readable_view(converted(bias, self.accumulator)))
        else:
            self.made_bias = np.atleast_2d(bias)

    def bias_gradient(self) -> Any:
        """Add and return zeros to which the gradient of ``bias=`` is added."""
        shape = shape_of_bias_gradient(self.problem, self.x.bias.shape)
        gradient = np.zeros(shape, self.accumulator)
        self.array("bias_gradient", gradient)
        return gradient

    def distance_gradient(self) -> ByDistance:
        """Add and return zeros to which the gradients of numbers by distance are added."""
        assert self.distances is not None
        gradient = self.distances.zeros()
        self._add_distances("by_distance_gradient", gradient)
        return gradient

    def _add_distances(self, name: str, by: ByDistance) -> None:
        to = getattr(self.call, name)
        to.data, to.offsets = address_of(by.numbers), address_of(by.places.starts)
        to.head, to.row, to.column = by.numbers.shape[-1], -1, 1
        self.keep += [by.numbers, by.places.starts]
        self.sizes[name] = by.numbers.itemsize

    # ---- running ----

    def run(self, function: Any) -> None:
        """Run a function of the library on all rows."""
        rows = self.problem.query_length
        with progress() as show:
            done = 0
            for part in self._parts():

                def share(of_part: float, done: int = done, size: int = part.rows) -> None:
                    show((done + of_part * size) / rows)

                run(function, ctypes.byref(part), show=share)
                done += part.rows

    def _parts(self) -> Iterator[CCall]:
        """Yield the call, or parts of its rows with the mask and bias that are made for them."""
        if not self.is_made:
            yield self.call
            return
        self.made_mask = Made(self.problem, self.x) if self.makes_mask else None
        size = 1 if self.made_mask is None else self.made_mask.bytes_per_row
        if self.made_bias is not None:
            size = max(
                size, self.made_bias.size // self.made_bias.shape[-2] * self.accumulator.itemsize
            )
        self.call.is_part = 1
        for rows in Span(0, self.problem.query_length).split(
            max(PART, MADE // size // PART * PART)
        ):
            part = self._part(rows)
            yield part
            self.call.adds = 1

    def _part(self, rows: Span) -> CCall:
        self.of_part: list[Any] = []  # what must live as long as the part
        part = CCall.from_buffer_copy(self.call)
        part.rows = rows.length
        for name, size in self.sizes.items():
            if name not in OF_KEYS:
                _move(getattr(part, name), size, rows.start)
        part.low, part.high = self.call.low + rows.start, self.call.high + rows.start
        if part.seed:
            seed = type(self.seed)(*self.seed)
            seed[4] += rows.start  # and 2**32 begins at 0 again
            part.seed = ctypes.addressof(seed)
            self.of_part.append(seed)
        if self.made_mask is not None:
            mask = self.made_mask.array_of(rows).view(np.uint8)
            describe(part.mask, mask, self.problem.batch, self.of_part)
            self.of_part.append(mask)
        if self.made_bias is not None:
            bias = self.made_bias
            if bias.shape[-2] != 1:
                bias = bias[..., rows.start : rows.stop, :]
            bias = converted(bias, self.accumulator)
            describe(part.bias, bias, self.problem.batch, self.of_part)
            self.of_part.append(bias)
        return part


def run(function: Any, *arguments: Any, show: Callable[[float], None]) -> int:
    """Call a function of the library until its work is done, and return its status."""
    state = ctypes.c_void_p()
    at = ctypes.byref(state)
    try:
        try:
            while (status := function(*arguments, at)) == 1:
                show(library().polyattn_share(at))  # Python handles an interrupt here
        finally:
            library().polyattn_cancel(at)
    finally:
        # Again: an interrupt may have come before the first. Threads must not write any more when
        # the arrays go. Once the call is done, this does nothing.
        library().polyattn_cancel(at)
    return checked(status)


def checked(status: int) -> int:
    """Return the status of a call; raise if it failed."""
    if status < 0:
        raise RuntimeError(CUT_BY_FORK) if status == -2 else MemoryError(NO_MEMORY)
    return status


def _move(array: CArray, size: int, rows: int) -> None:
    if array.data:
        array.data += rows * array.row * size
