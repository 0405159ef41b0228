"""Build a model of one node, ONNX's operator Attention, for export and for ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from polyattn_onnx.operator import Node


def model_of(node: Node) -> onnx.ModelProto:
    """Return the model of symbolic lengths; its inputs are the node's, in the operator's order."""
    inputs: dict[str, tuple[str, list[str | int]]] = {
        "query": (node.dtype, ["B", node.heads, "L", node.head_size]),
        "key": (node.dtype, ["B", node.key_heads, "S", node.head_size]),
        "value": (node.dtype, ["B", node.key_heads, "S", node.value_size]),
    }
    if node.mask is not None:
        inputs["mask"] = node.mask, ["B or 1", "H or 1", "L", "S"]
    if node.counted:
        inputs["keys"] = "int64", ["B"]
    given = [name or "" for name in node.arguments(list(inputs))]
    graph = helper.make_graph(
        [helper.make_node("Attention", given, ["output"], name="attention", **node.attributes())],
        "attention",
        [_info(name, *facts) for name, facts in inputs.items()],
        [_info("output", node.dtype, ["B", node.heads, "L", node.value_size])],
    )
    opset = helper.make_opsetid("", node.opset)
    return helper.make_model_gen_version(graph, opset_imports=[opset], producer_name="polyattn")


def _info(name: str, dtype: str, shape: list[str | int]) -> onnx.ValueInfoProto:
    number = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_tensor_value_info(name, number, shape)
