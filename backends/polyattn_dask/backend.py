"""The backend of dask arrays, and its kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import array_api_compat.dask.array as xp
import dask.array as da
import numpy as np

from polyattn._base.arrays import library_of
from polyattn.plugin import (
    Array,
    Backend,
    Cotangents,
    Gradients,
    Kernel,
    Operands,
    Problem,
    Residuals,
)
from polyattn_dask import SPEC
from polyattn_dask.backward import gradients
from polyattn_dask.chunk_weights import weights
from polyattn_dask.estimate import estimate
from polyattn_dask.forward import attend


class Chunked(Kernel):
    """Attention by the chunks of the caller, computed by the library of the chunks."""

    name = "chunked"
    features = frozenset({
        "batch_broadcast", "bias", "causal", "dropout", "grouped_heads", "logsumexp", "mask",
        "mask_expression", "mask_mod", "normalizer", "query_offset", "query_offset_array", "scale",
        "score_expression", "score_mod", "score_norm", "similarity", "sinks", "softcap",
        "value_size", "window",
    })  # fmt: skip
    # The kernels of the parts differentiate, and refuse what they do not.
    differentiates: ClassVar = {"backward": features}
    counts_far = frozenset({"causal", "window"})

    def reasons_against(self, problem: Problem) -> list[str]:
        if problem.dropout_start is None:
            return ["dropout's start must be numbers, not an array"]
        return []

    def remark(self, problem: Problem) -> str | None:
        """Return how much of the scores is computed, and in how many tasks."""
        return estimate(problem)

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        return attend(problem, operands)

    def backward(
        self, problem: Problem, operands: Operands, residuals: Residuals, cotangents: Cotangents,
        backend: Backend,
    ) -> Gradients:  # fmt: skip
        return gradients(problem, operands, residuals, cotangents)


class DaskBackend(Backend):
    """Dask arrays, wherever their chunks are."""

    kernels = (Chunked(),)

    def __init__(self) -> None:
        super().__init__(xp)

    def run_weights(
        self, kernel: Kernel, problem: Problem, operands: Operands, logsumexp: Array | None
    ) -> tuple[Array, Array | None]:
        """Compute weights by chunks where it can."""
        if 0 in problem.scores or problem.dropout_start is None:
            return super().run_weights(kernel, problem, operands, logsumexp)
        return weights(problem, operands, logsumexp, kernel)

    def place(self, array: Array, device: str | None) -> Array:
        """Return an array as a dask array, in chunks of dask's choice."""
        if isinstance(array, da.Array):
            return array
        if library_of(array).name not in SPEC.accepts:
            array = np.asarray(array)
        return da.from_array(array, asarray=False)

    def fetch(self, array: Array) -> Any:
        return array.compute() if isinstance(array, da.Array) else array

    def compile(self, function: Callable[..., Array]) -> Callable[..., Array]:
        """Return the function with its result computed, which a call only makes a graph of."""
        return lambda *arrays: function(*arrays).persist()
