"""Kernel that torch.onnx.export writes as one node, the standard's operator Attention.

torch's exporter makes this node of some calls of scaled_dot_product_attention itself. It has no
softcap, window or number of keys, and ONNX Runtime refuses some of the masks that it passes on.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

from polyattn.plugin import Array, Backend, Operands, Problem
from polyattn_onnx.operator import FIRST, LAST, Operator

__all__ = ["OnnxNode", "exported_opset"]


class OnnxNode(Operator):
    """A node of the model that ``torch.onnx.export(dynamo=True)`` is making."""

    name = "onnx"

    def opset(self, problem: Problem) -> int:
        """Return the opset of the export, or the newest that is known."""
        return min(exported_opset() or 0, LAST)

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why there can be no node, and what the operator cannot say."""
        opset = exported_opset() if torch.compiler.is_compiling() else None
        if opset is None:
            return ["it is for torch.onnx.export(dynamo=True) only"]
        if opset < FIRST:
            return [f"its operator needs torch.onnx.export(opset_version={FIRST}) or more"]
        return super().reasons_against(problem)

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        """Return the output of the node, which torch itself cannot compute."""
        node, inputs = self.node(problem, operands, backend.xp)
        query = inputs[0]
        output = torch.onnx.ops.symbolic(
            "Attention", node.arguments(inputs), node.attributes(), dtype=query.dtype,
            shape=(*query.shape[:-1], problem.value_size), version=node.opset,
        )  # fmt: skip
        return self.output(problem, operands, output.to(query.device), backend.xp), None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def exported_opset() -> int | None:
    """Return the opset that torch.onnx.export was asked for; 0 if for none, None outside of it.

    Traced code can learn it from the arguments of that function only: torch keeps it nowhere else,
    and writes a node of any version into a model of any opset.
    """
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
