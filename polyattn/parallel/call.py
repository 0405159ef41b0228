"""One call over many ranks: the whole problem, checked as one call of `attention` would be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from polyattn._api.attention import attention
from polyattn._api.gradients import as_given, attention_backward, unrounded_partial
from polyattn._api.names import check_names
from polyattn._api.partial import Partial, attention_partial
from polyattn._base.arrays import Array, as_facts, cast, library_of
from polyattn._base.autocast import autocast
from polyattn._base.slices import Slice, split
from polyattn._core.call.checks import examine
from polyattn._core.call.describe import describe
from polyattn._core.call.facts import Call
from polyattn._core.call.gradients import Gradients
from polyattn._core.call.options import AUTOCAST, option_of
from polyattn._core.call.parts import arrays_in, options_of, options_of_part
from polyattn._core.call.problem import Problem
from polyattn._core.expressions.expression import Expression
from polyattn._core.expressions.parts import Part
from polyattn._core.expressions.replacements import ScaleRule
from polyattn._core.tiles.band import band
from polyattn.parallel.token_layout import check_layout, chunks_of, slots

#: The gradients of options, as lists of arrays: one for the option, or one for each it carries.
OptionGradients = dict[str, list[Any]]


@dataclass(frozen=True)
class ParallelCall:
    """A call over many ranks, as each of them knows it."""

    problem: Problem  # the whole call
    size: int  # the number of ranks
    layout: str
    shares_rows: bool  # whether each rank holds its part of the query; otherwise all hold all
    options: dict[str, Any]  # of `attention`, for the whole sequence
    selection: dict[str, Any]  # the backend and the kernel of the caller, if there are some
    bytes_per_number: int  # of query, key and value
    has_scale_rule: bool  # whether a rule gives the scale, which then has no gradient
    #: Whether a gradient follows, which needs outputs that were never rounded to 16 bits.
    for_gradient: bool = False

    @property
    def chunks(self) -> int:
        """The number of chunks of the sequence."""
        return self.size * slots(self.layout)

    @property
    def row_length(self) -> int:
        """The number of rows of a chunk."""
        length = self.problem.query_length
        return length // self.chunks if self.shares_rows else length

    @property
    def key_length(self) -> int:
        """The number of keys of a chunk."""
        return self.problem.key_length // self.chunks

    def owned(self, rank: Any) -> tuple[Any, ...]:
        """Return the chunks that a rank holds."""
        return chunks_of(rank, self.size, self.layout)

    def split(self, *arrays: Array) -> list[tuple[Array, ...]]:
        """Return the chunks that a rank holds of each array, in its order."""
        return list(zip(*[split(array, slots(self.layout)) for array in arrays], strict=True))

    @cached_property
    def _ends(self) -> tuple[int | None, int | None]:
        """The least and the most that a key is ahead of a row that sees it; None for no bound."""
        return (None, None) if self.problem.query_offset is None else band(self.problem)

    def is_visible(self, rows: Any, keys: Any) -> Any:
        """Return whether a chunk of rows may see a chunk of keys, by causality and window."""
        low, high = self._ends
        ahead = keys * self.key_length - rows * self.row_length  # the first key, of the first row
        after = True if low is None else ahead + self.key_length > low
        before = True if high is None else ahead - self.row_length < high
        return after & before

    def is_full(self, rows: Any, keys: Any) -> bool:
        """Return whether causality and window surely hide no key of a chunk from its rows."""
        known = isinstance(rows, int) and isinstance(keys, int)
        if self.problem.band is None or self.problem.query_offset is None or not known:
            return self.problem.band is None
        low, high = self._ends
        ahead = keys * self.key_length - rows * self.row_length
        return (low is None or ahead - self.row_length + 1 >= low) and (
            high is None or ahead + self.key_length - 1 <= high
        )

    @property
    def visible_pairs(self) -> int:
        """The number of pairs of chunks of which a row may see a key."""
        chunks = range(self.chunks)
        if not self.shares_rows:
            return self.chunks
        return sum(bool(self.is_visible(rows, keys)) for rows in chunks for keys in chunks)

    def seen_by(self, rows: Any) -> tuple[int, int]:
        """Return the first chunk of keys that a chunk of rows may see, and how many they are."""
        if not isinstance(rows, int):  # traced: one program for all rows
            return 0, self.chunks
        seen = [keys for keys in range(self.chunks) if self.is_visible(rows, keys)] or [0]
        return seen[0], seen[-1] + 1 - seen[0]

    def block(self, rows: Any = None, keys: Any = None, heads: Any = None, count: int = 1) -> Part:
        """Return a part: a chunk of rows, chunks of keys, and (start, length) of heads."""
        problem = self.problem

        def chunks(first: Any, length: int, count: int, whole: int) -> Slice:
            return Slice(0, whole) if first is None else Slice(first * length, count * length)

        return Part(
            problem.batch,
            tuple([Slice(0, length) for length in problem.batch]),
            Slice(*(heads or (0, problem.heads))),
            chunks(rows, self.row_length, 1, problem.query_length),
            chunks(keys, self.key_length, count, problem.key_length),
            self.options["query_offset"],
        )

    def _options(self, block: Part, *, sinks: bool, full: bool) -> dict[str, Any]:
        """Return the options of the call of a block."""
        left_out = {"is_causal", "window"} if full else set()
        left_out |= set() if sinks else {"sinks"}
        given = {name: value for name, value in self.options.items() if name not in left_out}
        return options_of_part(given, block)

    def partial(
        self, arrays: Any, block: Part, *, sinks: bool = False, full: bool = False
    ) -> Partial:
        """Return attention over a block, the output in the dtype of sums."""
        options = self._options(block, sinks=sinks, full=full) | self.selection
        if self.problem.normalizer is not None:
            return Partial(attention(*arrays, **options), None)
        attend = unrounded_partial if self.for_gradient else attention_partial
        output, logsumexp = attend(*arrays, **options)
        # Rounded to 16 bits at each merge, parts would lose digits.
        return Partial(cast(library_of(output).xp, output, logsumexp.dtype), logsumexp)

    def gradients(
        self,
        arrays: Any,
        partial: Partial,
        gradient: Array,
        block: Part,
        *,
        sinks: bool = False,
        full: bool = False,
    ) -> tuple[Array, Array, Array, OptionGradients]:
        """Return the gradients of a block's query, key and value, and of the options."""
        options = self._options(block, sinks=sinks, full=full)
        query, key, value = arrays
        gradients = attention_backward(
            query, key, value, partial, gradient, into=Gradients(), **options, **self.selection
        )
        shares = self._shares(gradients, options, block)
        return gradients.query, gradients.key, gradients.value, shares

    def _shares(self, gradients: Gradients, given: dict[str, Any], block: Part) -> OptionGradients:
        """Return the gradients of the whole options from those of the options of a block."""
        shares: OptionGradients = {}
        for name, of in gradients._asdict().items():
            if of is None or name not in given or (name == "scale" and self.has_scale_rule):
                continue  # also query, key and value
            whole: Any = self.options[name]
            if isinstance(of, Expression):
                shares[name] = [
                    block.padded(x, one, axes)
                    for x, (axes, one) in zip(arrays_in(of), whole.arrays(), strict=True)
                ]
            else:
                axes = option_of(name).axes
                shares[name] = [of if axes is None else block.padded(of, whole, axes)]
        return shares

    def finished(
        self, query: Array, key: Array, value: Array, given: Any, shares: OptionGradients
    ) -> Gradients:
        """Return the gradients as the caller gets them, in the dtypes of the arguments."""
        own: dict[str, Any] = {
            name: arrays if isinstance(self.options[name], Expression) else arrays[0]
            for name, arrays in shares.items()
        }
        arguments = dict(zip(("query", "key", "value"), given, strict=True)) | self.options
        return as_given(Gradients(query, key, value, **own), arguments)


def add_shares(one: OptionGradients, other: OptionGradients) -> OptionGradients:
    """Return the sums of two parts' gradients of options."""
    added = dict(one)
    for name, arrays in other.items():
        if name in added:
            arrays = [a + b for a, b in zip(added[name], arrays, strict=True)]
        added[name] = arrays
    return added


def described(
    function: str,
    arrays: dict[str, Any],
    options: dict[str, Any],
    *,
    size: int,
    layout: str,
    shares_rows: bool,
) -> ParallelCall:
    """Check a call as a whole, without a look at the other ranks, and describe it.

    The arrays may be facts. The errors are those of one call over the whole sequence.
    """
    check_layout(layout)
    check_names(function, options, without=("layout", "block_table"))
    selection: dict[str, Any] = {
        name: options.pop(name) for name in ("backend", "kernel") if name in options
    }
    shares = (size if shares_rows else 1, size)
    call, operands = describe(*arrays.values(), **options, facts=as_facts, shares=shares)
    call = _of_whole(call._replace(**autocast(call._asdict(), AUTOCAST)), size, layout, shares_rows)
    problem = examine(call)
    return ParallelCall(
        problem=problem,
        size=size,
        layout=layout,
        shares_rows=shares_rows,
        options=options_of(problem, operands),
        selection=selection,
        bytes_per_number={"float64": 8, "float32": 4}.get(problem.dtype, 2),
        has_scale_rule=isinstance(call.scale, ScaleRule),
    )


def _of_whole(call: Call, size: int, layout: str, shares_rows: bool) -> Call:
    """Return the facts of the call over all ranks, from those of one rank's call."""
    lengths: dict[str, Any] = {}
    for name, facts in call.operands():
        if len(facts.shape) < 2 or (name == "query" and not shares_rows):
            continue
        *before, length, last = facts.shape
        if length % slots(layout):
            raise ValueError(
                f'{name} has {length} tokens on this rank; layout="zigzag" needs two chunks of one'
                " length"
            )
        lengths[name] = facts._replace(shape=(*before, length * size, last))
    return call._replace(**lengths)
