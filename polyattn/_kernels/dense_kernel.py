"""The formula over all rows and keys at once."""

from __future__ import annotations

from typing import ClassVar

from polyattn._base.arrays import Array
from polyattn._core.call.gradients import Gradients
from polyattn._core.call.operands import Cotangents, Operands, Residuals, Tangents
from polyattn._core.call.problem import Problem
from polyattn._core.tiles.axes import ungrouped
from polyattn._kernels import backward, jvp
from polyattn._kernels.dense import COMPUTED, attention, reasons_against_lengths
from polyattn.plugin import Backend, Kernel


class Dense(Kernel):
    """The formula over all rows and keys at once, with memory for L × S scores."""

    name = "dense"
    features = COMPUTED
    differentiates: ClassVar = {"backward": backward.DIFFERENTIATED, "jvp": jvp.DIFFERENTIATED}

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why the call needs known lengths, if it does."""
        return reasons_against_lengths(problem)

    def block_sizes(self, problem: Problem) -> tuple[int, int]:
        """Return the rows and keys of a tile, here all of them."""
        return max(1, problem.query_length), max(1, problem.key_length)

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output, and the logsumexp if the problem asks for it."""
        if problem.is_symbolic:
            problem, operands = ungrouped(problem, operands, backend.xp)
        return attention(problem, operands, backend)

    def backward(
        self, problem: Problem, operands: Operands, residuals: Residuals, cotangents: Cotangents,
        backend: Backend,
    ) -> Gradients:  # fmt: skip
        """Return the gradients, with memory for one tile beside them."""
        sizes = self.block_sizes(problem)
        return backward.gradients(problem, operands, residuals, cotangents, backend, *sizes)

    def jvp(
        self, problem: Problem, operands: Operands, residuals: Residuals, tangents: Tangents,
        backend: Backend,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Return the tangents of output and logsumexp, with memory for one tile beside them."""
        sizes = self.block_sizes(problem)
        return jvp.pushforward(problem, operands, residuals, tangents, backend, *sizes)
