"""The backend of ONNX Runtime, and its kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import array_api_compat.numpy as xp
import numpy as np
import onnxruntime

from polyattn.plugin import Array, Backend, Operands, Problem, native, thread_count
from polyattn_onnx.model import model_of
from polyattn_onnx.operator import Node, Operator

#: The execution provider of each kind of device.
PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "dml": "DmlExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "webgpu": "WebGpuExecutionProvider",
}


@lru_cache(maxsize=64)
def session_of(node: Node, device: str, threads: int) -> tuple[Any, tuple[str, ...]]:
    """Return the session that runs a node of any lengths, and the names of its inputs in order."""
    # It takes some milliseconds to make. Its threads do not spin when a run is over. A node that
    # the provider does not run is an error: it would run on the CPU, and not say so.
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # errors are raised
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if device != "cpu":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    model, provider = model_of(node).SerializeToString(), PROVIDERS[device]
    try:
        session = onnxruntime.InferenceSession(
            model, options, providers=[provider], enable_fallback=False
        )
    except Exception as error:  # each kind of failure has a class of its own
        if device == "cpu":
            raise
        raise NotImplementedError(
            f"{provider} of ONNX Runtime {onnxruntime.__version__} does not run the node"
            f" Attention-{node.opset} of {node.dtype}: backend='onnxruntime' runs it on the CPU"
        ) from error
    return session, tuple([one.name for one in session.get_inputs()])


class Session(Operator):
    """One node, of the standard's operator Attention, as ONNX Runtime computes it."""

    name = "node"

    def opset(self, problem: Problem) -> int:
        """Return the opset whose attributes ONNX Runtime knows all."""
        return 24

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return what the operator cannot compute, and whether the provider runs none."""
        reasons = super().reasons_against(problem)
        if problem.device_kind != "cpu" and not reasons:
            refusal = _refusal(problem.device_kind, problem.accumulator, self.opset(problem))
            reasons += [] if refusal is None else [refusal]
        return reasons

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        node, inputs = self.node(problem, operands, backend.xp)
        session, names = session_of(node, problem.device_kind, thread_count())
        (output,) = session.run(None, dict(zip(names, map(native, inputs), strict=True)))
        return self.output(problem, operands, output, backend.xp), None


@lru_cache
def _refusal(device: str, dtype: str, opset: int) -> str | None:
    """Return why the provider of a device does not run the plainest node."""
    plain = Node(opset, dtype, 2, 2, 8, 8, False, (-1, -1), 1.0, 0.0, None, False)
    try:
        session_of(plain, device, 1)
    except NotImplementedError as error:
        return str(error)
    return None


class OnnxruntimeBackend(Backend):
    """Arrays of NumPy, which ONNX Runtime copies to its devices and back."""

    kernels = (Session(),)

    def __init__(self) -> None:
        super().__init__(xp)

    def devices(self) -> list[str]:
        available = onnxruntime.get_available_providers()
        return [kind for kind, name in PROVIDERS.items() if name in available]

    def engines(self) -> dict[str, str]:
        return {"onnxruntime": onnxruntime.__version__}

    def place(self, array: Array, device: str | None) -> Any:
        return array if isinstance(array, np.ndarray) else np.asarray(super().place(array, device))
