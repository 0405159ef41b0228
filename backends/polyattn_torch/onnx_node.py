"""Kernel that torch.onnx.export writes as one node, the standard's operator Attention.

torch's exporter makes this node of some calls of scaled_dot_product_attention itself. It
leaves out softcap, window and key lengths, and ONNX Runtime refuses some of its masks.
"""

from __future__ import annotations

import torch

from polyattn.plugin import Array, Backend, Operands, Problem, may_have_empty_rows
from polyattn_onnx.operator import FIRST, LAST, Operator, reason_against_empty_rows
from polyattn_torch.onnx_export import exported_opset


class OnnxNode(Operator):
    """A node of the model that ``torch.onnx.export(dynamo=True)`` is making."""

    name = "onnx"

    def opset(self, problem: Problem) -> int:
        """Return the opset of the export, or the newest that is known."""
        return min(exported_opset() or 0, LAST)

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return why the export cannot write the node, and what the operator cannot compute."""
        if self.opset(problem) < FIRST:
            return [f"its operator needs torch.onnx.export(opset_version={FIRST}) or more"]
        return super().reasons_against(problem)

    def only_on_request(self, problem: Problem) -> str | None:
        """Leave to `sdpa` what torch's exporter makes the same node of: torch can run that."""
        is_plain = problem.features <= {"causal", "query_offset", "scale"} and problem.scale > 0
        from_first = not problem.is_causal or problem.query_offset == 0
        if is_plain and from_first and len(problem.batch) == 1 and problem.dtype == "float32":
            return "torch's exporter makes this node of scaled_dot_product_attention"
        return super().only_on_request(problem)

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


IN_EXPORT = OnnxNode()


def reason_in_export(problem: Problem) -> str | None:
    """Return why an export may not use `sdpa`, or None if it may."""
    opset = exported_opset()
    if opset is None:
        return None
    if opset >= FIRST:
        return reason_against_empty_rows(problem)
    if may_have_empty_rows(problem):
        return (
            "below opset 23 torch's exporter gives a row without keys the mean of the values, or"
            f" NaN: pass opset_version={LAST - 1}"
        )
    return None
