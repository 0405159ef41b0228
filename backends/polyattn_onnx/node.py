"""Build a model of one node, ONNX's operator Attention, for export and for ONNX Runtime."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper

__all__ = ["Node", "model_of"]


class Node(NamedTuple):
    """The static facts of a node.

    Attributes
    ----------
    opset : int
        The version of the operator: 23, 24 or 25.
    dtype : str
        That of query, key, value and output.
    heads, key_heads, head_size, value_size : int
        H, G, D and E.
    is_causal : bool
        Whether row i sees no key after i + offset, which is 0, or the number of keys − L with
        `counted`.
    window : tuple of (int, int)
        How many keys a row sees before and after its position; −1 for no bound.
    scale, softcap : float
        The factor of q·k, more than 0, and the bound of the scores, 0 for none.
    mask : str or None
        The dtype of the input ``attn_mask``, if there is one.
    counted : bool
        Whether there is an input ``nonpad_kv_seqlen``, the number of keys of each batch item.
    """

    opset: int
    dtype: str
    heads: int
    key_heads: int
    head_size: int
    value_size: int
    is_causal: bool
    window: tuple[int, int]
    scale: float
    softcap: float
    mask: str | None
    counted: bool


def model_of(node: Node) -> onnx.ModelProto:
    """Return the model; its inputs are those that the node has, in the operator's order.

    Parameters
    ----------
    node : Node
        The facts of its node.

    Returns
    -------
    onnx.ModelProto
        The batch, L and S are symbolic in it.
    """
    inputs: dict[str, tuple[str, list[str | int]]] = {
        "query": (node.dtype, ["B", node.heads, "L", node.head_size]),
        "key": (node.dtype, ["B", node.key_heads, "S", node.head_size]),
        "value": (node.dtype, ["B", node.key_heads, "S", node.value_size]),
    }
    if node.mask is not None:
        inputs["mask"] = node.mask, ["B or 1", "H or 1", "L", "S"]
    if node.counted:
        inputs["keys"] = "int64", ["B"]
    attributes: dict[str, Any] = {"is_causal": int(node.is_causal), "scale": node.scale}
    attributes |= {"softcap": node.softcap} if node.softcap else {}
    for name, size in zip(("left_window_size", "right_window_size"), node.window, strict=True):
        attributes |= {name: size} if size >= 0 else {}
    mask = "mask" if node.mask else ""
    given = ["query", "key", "value", mask, "", "", "keys" if node.counted else ""]
    while not given[-1]:
        given.pop()
    graph = helper.make_graph(
        [helper.make_node("Attention", given, ["output"], name="attention", **attributes)],
        "attention",
        [_info(name, *facts) for name, facts in inputs.items()],
        [_info("output", node.dtype, ["B", node.heads, "L", node.value_size])],
    )
    opset = helper.make_opsetid("", node.opset)
    return helper.make_model_gen_version(graph, opset_imports=[opset], producer_name="polyattn")


def _info(name: str, dtype: str, shape: list[str | int]) -> onnx.ValueInfoProto:
    number = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_tensor_value_info(name, number, shape)
