"""Kernel for XLA to compile: a loop over tiles of the scores, which needs memory for one of them.

Gradients are computed by tiles too, again from the scores. All of it can be traced by `jit`,
`vmap`, `grad` and the other transforms; a call outside of them is compiled once for each problem,
for all scales, softcaps, lengths and, where the scores fit a tile, offsets.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import jax

from polyattn.plugin import (
    Array,
    Backend,
    Cotangents,
    Gradients,
    Kernel,
    Operands,
    Problem,
    Residuals,
    Tangents,
    undeclared,
)
from polyattn_jax.array_operands import (
    Skeletons,
    explicit,
    prepared,
    without_expressions,
    without_numbers,
)
from polyattn_jax.differentiate import (
    DIFFERENTIATED,
    attend_backward,
    attend_differentiably,
    attend_jvp,
)
from polyattn_jax.loop_layout import most_scores


class Xla(Kernel):
    """A loop over tiles of the scores, compiled by XLA."""

    name = "xla"
    # Without normalizers and norms of scores, which need a whole row at once.
    features = frozenset({
        "batch_broadcast", "bias", "causal", "dropout", "grouped_heads", "logsumexp", "mask",
        "mask_expression", "mask_mod", "query_offset", "query_offset_array", "scale",
        "score_expression", "score_mod", "similarity", "sinks", "softcap", "value_size", "window",
    })  # fmt: skip
    # Gradients are the transposed tangents, so that one list has both.
    differentiates: ClassVar = dict.fromkeys(("backward", "jvp"), DIFFERENTIATED)
    # On an accelerator, which waits for the host between tiles; see `most_scores` for a CPU.
    tile = 2**25

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why the loops of a problem cannot be laid out."""
        if not all(isinstance(length, int) for length in problem.scores):
            return ["it lays out tiles by lengths, and these are symbolic"]
        # What is traced may be differentiated, by the rule of this kernel.
        missing = undeclared(self, problem.features | {"jvp"}) if problem.traced else None
        return [] if missing is None else [missing]

    def only_on_request(self, problem: Problem) -> str | None:
        """Ask for jax.jit where a function masks or scores: it may change between calls."""
        rules = problem.features & {"mask_mod", "score_mod"}
        if rules and not problem.traced:
            return "outside of jax.jit it would compile each call with a function again"
        return None

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        output, logsumexp = run(attend_differentiably, problem, self.tile, operands)
        return output, logsumexp if "logsumexp" in problem.features else None

    def backward(
        self, problem: Problem, operands: Operands, residuals: Residuals, cotangents: Cotangents,
        backend: Backend,
    ) -> Gradients:  # fmt: skip
        """Return the gradients, with memory for a few tiles beside them."""
        return run(attend_backward, problem, self.tile, operands, residuals, cotangents)  # type: ignore[no-any-return]

    def jvp(
        self, problem: Problem, operands: Operands, residuals: Residuals, tangents: Tangents,
        backend: Backend,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Return the tangents of output and logsumexp, with memory for a few tiles."""
        return run(attend_jvp, problem, self.tile, operands, residuals, tangents)  # type: ignore[no-any-return]


def run(function: Any, problem: Problem, tile: int, x: Operands, *records: Any) -> Any:
    """Run a function of arrays, compiled once for each problem unless it has functions."""
    tile = most_scores(problem, tile)
    problem, x = prepared(problem, x, tile)
    if problem.features & {"mask_mod", "score_mod"}:
        x = explicit(problem, x, tile)
        skeletons, x = without_expressions(x)
        return function(problem, tile, x, skeletons, *records)
    problem, numbers = without_numbers(problem)
    skeletons, x = without_expressions(x)
    return compiled(function, problem, tile, skeletons, numbers, x, *records)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def compiled(
    function: Any, problem: Problem, tile: int, skeletons: Skeletons, numbers: dict[str, Array],
    x: Operands, *records: Any,
) -> Any:  # fmt: skip
    """Run a function of arrays, compiled once for each problem without its numbers."""
    given: Any = problem._replace
    return function(given(**numbers), tile, x, skeletons, *records)
