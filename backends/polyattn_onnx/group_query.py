"""Write a step of decoding as ONNX Runtime's own operator, GroupQueryAttention."""

from __future__ import annotations

import warnings
from typing import Any

import ndonnx
import numpy as np
import onnx
import spox
from onnx import TensorProto, helper, numpy_helper

from polyattn.plugin import Array, Backend, CachePadding, Kernel, Operands, Problem, one_batch_axis
from polyattn.plugin.internal import length_of

DOMAIN = "com.microsoft"


class GroupQuery(Kernel):
    """One node over the memory of a cache, which reads no key after the last one."""

    # The operator's past is the memory, which has the keys of the rows; its new keys are empty.

    name = "group_query"
    features = frozenset({
        "causal", "grouped_heads", "mask_expression", "query_offset", "query_offset_array", "scale",
        "sinks", "softcap", "window",
    })  # fmt: skip
    takes_empty = False

    def only_on_request(self, problem: Problem) -> str | None:
        """Return that few runtimes have the operator."""
        return f"its operator is of {DOMAIN}, which only ONNX Runtime has"

    def remark(self, problem: Problem) -> str | None:
        """Return what the call becomes."""
        return f"one node, GroupQueryAttention of {DOMAIN}"

    def reasons_against(self, problem: Problem) -> list[str]:
        """Return what the operator cannot compute."""
        padding, rows = problem.mask_spec, problem.query_length
        if not isinstance(padding, CachePadding):
            return ["it needs key_lengths=, without query_offset= or another mask beside it"]
        shared = getattr(padding.key_lengths, "shape", ()) == ()
        reasons = {
            "with several rows it needs is_causal=True": problem.is_causal or rows == 1,
            "with several rows it needs one length for all items": shared or rows == 1,
            "it supports float16 and float32 only": problem.dtype != "float64",
            "it needs a scale above 0": problem.scale > 0,
            "the head size must be a multiple of 8": problem.head_size % 8 == 0,
            "it supports at most one batch axis": len(problem.batch) < 2,
        }
        return [reason for reason, holds in reasons.items() if not holds]

    def __call__(
        self, problem: Problem, operands: Operands, backend: Backend
    ) -> tuple[Array, Array | None]:
        xp, dtype = backend.xp, problem.accumulator
        padding: Any = operands.mask
        arrays = [
            xp.astype(one_batch_axis(problem, x, xp), getattr(xp, dtype)) for x in operands[:3]
        ]
        items = xp.arange(length_of(arrays[0], 0), dtype=xp.int64) * 0
        arrays.append(items + padding.key_lengths)
        if operands.sinks is not None:
            arrays.append(xp.astype(operands.sinks, getattr(xp, dtype)))
        with warnings.catch_warnings():  # of the shapes that the node leaves open
            warnings.simplefilter("ignore")
            made = spox.inline(model_of(problem))(*[array.unwrap_spox() for array in arrays])
        output = xp.astype(ndonnx.asarray(made["output"]), operands.query.dtype)
        return (output if problem.batch else output[0, ...]), None


def model_of(problem: Problem) -> onnx.ModelProto:
    """Return the model of a call; its inputs are query, memory, lengths (B,) and sinks."""
    heads, groups, size = problem.heads, problem.key_heads, problem.head_size
    attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": groups}
    attributes |= {"scale": problem.scale, "softcap": problem.softcap or 0.0}
    if problem.window[0] is not None:  # which counts the row's own key too
        attributes["local_window_size"] = min(problem.window[0], 2**30) + 1
    inputs: dict[str, tuple[int, list[str | int]]] = {
        "query": (TensorProto.FLOAT, ["B", heads, "L", size]),
        "key": (TensorProto.FLOAT, ["B", groups, "S", size]),
        "value": (TensorProto.FLOAT, ["B", groups, "S", size]),
        "lengths": (TensorProto.INT64, ["B"]),
    }
    if "sinks" in problem.features:
        inputs["sinks"] = TensorProto.FLOAT, [heads]
    numbers = {
        **{"zero": np.int64(0), "one": np.int64(1), "none": np.float32(0)},
        **{"start": np.array([0, 0]), "stop": np.array([0, groups * size])},
        **{"axes": np.array([1, 2]), "flat": np.array([0, 0, -1])},
        "by_head": np.array([0, 0, heads, size]),
    }
    given = ["rows", "empty", "empty", "key", "value", "last", "most"]
    given += [*[""] * 4, "sinks"] if "sinks" in inputs else []
    make = helper.make_node
    nodes = [
        make("Transpose", ["query"], ["turned"], perm=[0, 2, 1, 3]),
        make("Reshape", ["turned", "flat"], ["rows"]),
        make("Slice", ["rows", "start", "stop", "axes"], ["empty"]),
        make("Max", ["lengths", "one"], ["known"]),
        make("Sub", ["known", "one"], ["newest"]),
        make("Cast", ["newest"], ["last"], to=TensorProto.INT32),
        make("ReduceMax", ["known"], ["longest"], keepdims=0),
        make("Cast", ["longest"], ["most"], to=TensorProto.INT32),
        make("GroupQueryAttention", given, ["attended"], domain=DOMAIN, **attributes),
        # An item without keys, which the operator refuses, is 0.
        make("Greater", ["lengths", "zero"], ["full"]),
        make("Unsqueeze", ["full", "axes"], ["is_full"]),
        make("Where", ["is_full", "attended", "none"], ["joined"]),
        make("Reshape", ["joined", "by_head"], ["split"]),
        make("Transpose", ["split"], ["output"], perm=[0, 2, 1, 3]),
    ]
    graph = helper.make_graph(
        nodes,
        "group_query",
        [helper.make_tensor_value_info(name, *facts) for name, facts in inputs.items()],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, inputs["query"][1])],
        [numpy_helper.from_array(np.asarray(x), name) for name, x in numbers.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)  # that of opset 21
