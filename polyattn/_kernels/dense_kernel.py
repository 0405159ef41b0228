"""The formula over all rows and keys at once."""

from __future__ import annotations

from polyattn._base.arrays import Array
from polyattn._core.call.features import FEATURES
from polyattn._core.call.gradients import Gradients
from polyattn._core.call.operands import Cotangents, Operands, Residuals, Tangents
from polyattn._core.call.problem import Problem
from polyattn._core.tiles.grouped_heads import ungrouped
from polyattn._kernels.backward import gradients
from polyattn._kernels.dense import attention, reasons_against_lengths
from polyattn._kernels.jvp import pushforward
from polyattn.plugin import Backend, Kernel


class Dense(Kernel):
    """The formula over all rows and keys at once, with memory for L × S scores."""

    name = "dense"
    features = frozenset(FEATURES)

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return what cannot be computed of lengths that are unknown."""
        return reasons_against_lengths(problem)

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
        """Return the gradients."""
        return gradients(problem, operands, residuals, cotangents, backend, *_whole(problem))

    def jvp(
        self, problem: Problem, operands: Operands, residuals: Residuals, tangents: Tangents,
        backend: Backend,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Return the tangents of output and logsumexp."""
        return pushforward(problem, operands, residuals, tangents, backend, *_whole(problem))


def _whole(problem: Problem) -> tuple[int, int]:
    return max(1, problem.query_length), max(1, problem.key_length)
