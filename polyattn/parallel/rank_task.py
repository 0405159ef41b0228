"""The work of one rank for a call, as a function of arrays only, which autograd needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from polyattn._api.partial import Partial
from polyattn._base.arrays import Array, cast, facts_of, is_array, library_of, quiet
from polyattn._base.tracing import without_autocast
from polyattn._core.call.gradients import Gradients
from polyattn._core.call.parts import arrays_in
from polyattn._core.expressions.expression import joined, split
from polyattn.parallel.call import ParallelCall
from polyattn.parallel.communicator import Communicator
from polyattn.parallel.strategy import Strategy


@contextmanager
def _shielded(array: Array) -> Iterator[None]:
    """Shield what ranks compute from the warnings of NumPy and the autocast of torch."""
    facts = facts_of(array)
    kind = facts.device.partition(":")[0] if facts.library == "torch" else None
    with quiet(facts.library), without_autocast(kind):
        yield


class RankTask(NamedTuple):
    """A strategy, the ranks, and the call."""

    strategy: Strategy
    ranks: Communicator
    call: ParallelCall

    def arrays(self) -> list[Array]:
        """Return all arrays of the options."""
        return split(tuple(self.call.options.values()), is_array)[1]

    def with_arrays(self, arrays: Any) -> RankTask:
        """Return the task with these arrays in its options."""
        skeleton, _ = split(tuple(self.call.options.values()), is_array)
        options = dict(zip(self.call.options, joined(skeleton, arrays), strict=True))
        return self._replace(call=replace(self.call, options=options))

    def without_arrays(self) -> RankTask:
        """Return the task with facts in place of arrays, which `with_arrays` replaces."""
        return self.with_arrays(map(facts_of, self.arrays()))

    def forward(self, *arrays: Array, for_gradient: bool = True) -> tuple[Array, Partial]:
        """Return the output in the dtype of the query, and what the gradient needs."""
        call = replace(self.call, for_gradient=for_gradient)
        with _shielded(arrays[0]):
            output, saved = self.strategy.forward(call, self.ranks, *arrays)
        return cast(library_of(output).xp, output, arrays[0].dtype), saved

    def backward(self, arrays: Any, saved: Partial, gradient: Array) -> Gradients:
        """Return the gradients, as `attention_backward`."""
        with _shielded(arrays[0]):
            dq, dk, dv, shares = self.strategy.backward(
                self.call, self.ranks, arrays, saved, gradient
            )
        return self.call.finished(dq, dk, dv, arrays, shares)

    def of_arrays(self, gradients: Gradients) -> list[Array | None]:
        """Return the gradient of each of `arrays`, None for one that has none."""
        of_each: list[Array | None] = []
        for name, given in self.call.options.items():
            count, parts = len(arrays_in(given)), arrays_in(getattr(gradients, name, None))
            of_each += parts if len(parts) == count else [None] * count
        return of_each
