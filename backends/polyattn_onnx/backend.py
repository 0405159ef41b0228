"""The backend of ndonnx's arrays, which are nodes of a graph, and its kernel."""

from __future__ import annotations

import warnings

import ndonnx
import numpy as np
import spox
import spox.opset.ai.onnx.v21 as op
import spox.opset.ai.onnx.v24 as op24

from polyattn._base.arrays import length_of, library_of
from polyattn.plugin import Array, Backend, Kernel, Operands, Problem, Residuals, Tangents, native
from polyattn_onnx.model import model_of
from polyattn_onnx.operator import Operator

#: The opset of a call that names none: the newest whose attributes ONNX Runtime knows all.
DEFAULT = 24


class NdonnxNode(Operator):
    """One node, of the standard's operator Attention."""

    name = "native"

    def opset(self, problem: Problem) -> int:
        """Return the opset that the backend was named with, as in ``onnx:25``."""
        return int(problem.device.partition(":")[2] or DEFAULT)

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        node, inputs = self.node(problem, operands, backend.xp)
        with warnings.catch_warnings():  # of the shapes that the node leaves open
            warnings.simplefilter("ignore")
            made = spox.inline(model_of(node))(*[array.unwrap_spox() for array in inputs])
        output = ndonnx.asarray(made["output"])
        return self.output(problem, operands, output, backend.xp), None


class OnnxBackend(Backend):
    """Graphs of ONNX; a device is the opset whose operator Attention may be used."""

    kernels = (NdonnxNode(),)
    computes = False

    def __init__(self) -> None:
        super().__init__(library_of(ndonnx.asarray(0)).xp)

    def devices(self) -> list[str]:
        """Return the device of all arrays, and the opsets."""
        return ["graph", "opset:23", "opset:24", "opset:25"]

    def place(self, array: Array, device: str | None) -> Array:
        """Return an array as one of ndonnx, whose numbers are constants of the graph."""
        if isinstance(array, ndonnx.Array):
            return array
        return ndonnx.asarray(native(np.asarray(array)))

    def run(
        self, kernel: Kernel, problem: Problem, operands: Operands
    ) -> tuple[Array, Array | None]:
        """Run a kernel, and state the lengths of the output that the graph has lost."""
        return self._with_lengths(problem, *super().run(kernel, problem, operands))

    def run_jvp(
        self, kernel: Kernel, problem: Problem, operands: Operands, residuals: Residuals,
        tangents: Tangents,
    ) -> tuple[Array, Array | None]:  # fmt: skip
        """Run the directional derivative of a kernel, and state the same lengths."""
        found = super().run_jvp(kernel, problem, operands, residuals, tangents)
        return self._with_lengths(problem, *found)

    def _with_lengths(
        self, problem: Problem, output: Array, logsumexp: Array | None
    ) -> tuple[Array, Array | None]:
        lengths = (problem.heads, problem.query_length or 0, problem.value_size)
        if None in (output.shape[-3], output.shape[-1]):
            output = self.reshape_last(output, 3, lengths)
        return output, logsumexp

    def reshape_last(self, array: Array, number: int, lengths: tuple[int, ...]) -> Array:
        """Return an array with other last axes; 0 stands for the length that an axis has."""
        whole = np.asarray([0] * (array.ndim - number) + list(lengths), np.int64)
        return ndonnx.asarray(op.reshape(array.unwrap_spox(), op.const(whole)))

    def rows(self, table: Array, ids: Array) -> Array:
        numbers = ndonnx.astype(ids, ndonnx.int64)  # all that the operator takes, with int32
        return ndonnx.asarray(op.gather(table.unwrap_spox(), numbers.unwrap_spox()))

    def with_rows(self, memory: Array, rows: Array, at: Array) -> Array:
        """Return a cache's memory with new rows, by the operator TensorScatter."""
        items = ndonnx.arange(length_of(memory, 0), dtype=ndonnx.int64)
        arrays = (memory, rows, items * 0 + at)
        return ndonnx.asarray(op24.tensor_scatter(*[array.unwrap_spox() for array in arrays]))

    def fetch(self, array: Array) -> Array:
        """Return the values of an array that is a constant of the graph."""
        if not isinstance(array, ndonnx.Array):
            return array
        try:
            return array.unwrap_numpy()
        except ValueError:
            raise ValueError(
                "an array of the graph has values only when a runtime computes them:"
                " polyattn.export.onnx writes the graph as a model"
            ) from None
