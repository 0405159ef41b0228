"""The backend of ONNX Runtime, and its kernel."""

from __future__ import annotations

from typing import Any

import array_api_compat.numpy as xp
import numpy as np
import onnxruntime

from polyattn.plugin import Array, Backend, Operands, Problem, native, thread_count
from polyattn_onnx.operator import Operator
from polyattn_onnxruntime.sessions import devices, session_of


class Node(Operator):
    """One node, of the standard's operator Attention, as ONNX Runtime computes it."""

    name = "node"
    # Newer versions of the operator have attributes that ONNX Runtime refuses.
    newest = 24

    def opset(self, problem: Problem) -> int:
        """Return the opset that ONNX Runtime knows whole."""
        return self.newest

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output of a session."""
        node, inputs = self.node(problem, operands, backend.xp)
        session, names = session_of(node, problem.device_kind, thread_count())
        (output,) = session.run(None, dict(zip(names, map(native, inputs), strict=True)))
        return self.output(problem, operands, output, backend.xp), None


class OnnxruntimeBackend(Backend):
    """Arrays of NumPy, which ONNX Runtime copies to its devices and back."""

    kernels = (Node(),)

    def __init__(self) -> None:
        super().__init__(xp)

    def devices(self) -> list[str]:
        """Return the devices of the providers in this build."""
        return devices()

    def engines(self) -> dict[str, str]:
        """Return the version of ONNX Runtime."""
        return {"onnxruntime": onnxruntime.__version__}

    def place(self, array: Array, device: str | None) -> Any:
        """Return an array as a NumPy array, without a copy where possible."""
        return array if isinstance(array, np.ndarray) else np.asarray(super().place(array, device))
