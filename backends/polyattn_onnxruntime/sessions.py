"""Sessions of ONNX Runtime, each kept for all calls with the same static facts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import onnxruntime

from polyattn_onnx.model import model_of
from polyattn_onnx.node import Node

#: The execution provider of each kind of device.
PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "dml": "DmlExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
}


def devices() -> list[str]:
    """Return the kinds of device that this build of ONNX Runtime has a provider for."""
    available = onnxruntime.get_available_providers()
    return [kind for kind, name in PROVIDERS.items() if name in available]


@lru_cache(maxsize=64)
def session_of(node: Node, device: str, threads: int) -> tuple[Any, tuple[str, ...]]:
    """Return the session that runs a node of any lengths, and the names of its inputs in order.

    It is made if no recent call had the same facts, which takes some milliseconds. Its threads do
    not spin when a run is over.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors only, which are raised too
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(
        model_of(node).SerializeToString(), options, providers=[PROVIDERS[device]]
    )
    return session, tuple([one.name for one in session.get_inputs()])
