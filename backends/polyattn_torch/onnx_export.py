"""Whether torch.onnx.export is tracing the call, and for which opset."""

from __future__ import annotations

import sys
from types import FrameType

import torch

from polyattn.plugin.internal import constant_when_traced


def exported_opset() -> int | None:
    """Return the opset that torch.onnx.export was asked for; 0 if for none, None outside of it."""
    return _asked_for() if torch.compiler.is_compiling() else None


@constant_when_traced
def _asked_for() -> int | None:
    # Traced code can learn the opset from the arguments of that function only: torch keeps it
    # nowhere else, and would write a node of any version into a model of any opset.
    # Not asked for before it is imported, as it is in an export: that takes long.
    if "torch.onnx" not in sys.modules or not torch.onnx.is_in_onnx_export():
        return None
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not torch.onnx.export.__code__:
        frame = frame.f_back
    if frame is None:
        return 0
    given = frame.f_locals
    return int(given["opset_version"] or 0) if given["dynamo"] else None
