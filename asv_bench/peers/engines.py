"""The engines that compute a case: polyattn's kernels, and the functions of other libraries.

Each function returns a `Call`, which takes nothing and returns the output when it is computed. It
imports its library, so `installed` leaves out those that are absent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from cases import Array, Case, Options

import polyattn
from polyattn.bench.machine import processor, versions

Call = Callable[[], Any]
REFERENCE = "torch"
EAGER = "eager"
NATIVE = "native"
# With more scores, functions that hold all scores at once or are many times slower are left out.
MOST_SCORES = 2.5e8
JAX = {"polyattn jax": 2, "jax": 1}  # under `jit`, and the axis of the rows of a head


def installed(makers: dict[str, Callable[[], Call]]) -> dict[str, Call]:
    """Return the calls whose libraries are installed."""
    calls = {}
    for name, make in makers.items():
        with contextlib.suppress(ImportError):
            calls[name] = make()
    return calls


# ---- polyattn ----------------------------------------------------------------------------------


def kernels(arrays: list[Array], options: Options) -> dict[str, Options]:
    """Return options for the compiled kernel, if it is installed, and for NumPy's own kernel."""
    candidates = polyattn.explain(*arrays, backend="numpy", **options).candidates
    able = [one.kernel for one in candidates if one.status in ("chosen", "next")]
    own = next(name for name in able if name != NATIVE)
    names = {NATIVE: NATIVE} if NATIVE in able else {}
    names["numpy"] = own
    return {name: {"backend": "numpy", "kernel": kernel} for name, kernel in names.items()}


def compiled() -> str:
    """Return the instruction set of the compiled kernel, or nothing if there is no such kernel."""
    shape = (1, 1)
    candidates = polyattn.explain(shape, shape, shape, backend="numpy").candidates
    if all(one.kernel != NATIVE or one.status == "unavailable" for one in candidates):
        return ""
    from polyattn_native.library import VARIABLE, instruction_sets, library

    return os.environ.get(VARIABLE) or instruction_sets(library())[0]


def machine(threads: int) -> str:
    """Describe the processor and the libraries that the times are measured on."""
    native = f"polyattn-native {compiled()}" if compiled() else "without polyattn-native"
    return f"{processor()}, {threads} threads each; {versions()}; {native}"


def ours(case: Case) -> dict[str, Call]:
    """Return calls of the compiled kernel, if it is installed, and of NumPy's own kernel."""
    arrays, options = case.arguments()
    return {
        name: partial(polyattn.attention, *arrays, **options, **kernel)
        for name, kernel in kernels(arrays, options).items()
    }


def gradients(arrays: list[Array], along: Array, passes: str, **options: Any) -> Call:
    """Return both passes, or the backward pass from a result that is there."""
    forward = partial(polyattn.attention_partial, *arrays, **options)
    backward = partial(polyattn.attention_backward, *arrays, **options)
    if passes == "backward":
        return partial(backward, forward(), along)
    return lambda: backward(forward(), along)


# ---- the formula and torch ---------------------------------------------------------------------


def textbook(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array = None,
    bias: Array = None,
    softcap: float | None = None,
) -> Array:
    """Compute softmax(query·keyᵀ/√D)·value in plain NumPy."""
    if (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = (np.repeat(x, groups, axis=1) for x in (key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(np.float32(query.shape[-1]))
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    if bias is not None:
        scores += bias
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return scores @ value / scores.sum(axis=-1, keepdims=True)


def on_torch(case: Case, threads: int) -> Call:
    """Return a call of torch's fused attention."""
    import torch

    torch.set_num_threads(threads)
    arrays, options = case.arguments()
    bias = options.get("bias")
    added = case.mask(options) if bias is None and not case.is_causal else bias
    dtype = getattr(torch, case.dtype)
    return partial(
        torch.nn.functional.scaled_dot_product_attention,
        *(torch.from_numpy(array.astype("float64")).to(dtype) for array in arrays),
        attn_mask=None if added is None else torch.from_numpy(added),
        is_causal=case.is_causal,
        enable_gqa=case.heads != case.groups,
    )


def gradients_of_torch(case: Case, along: Array, threads: int, passes: str) -> Call:
    """Return both passes of torch's fused attention, or the backward pass; of a bias too."""
    import torch

    torch.set_num_threads(threads)
    arrays, options = case.arguments()
    given = [*arrays, options["bias"]] if "bias" in options else arrays
    inputs = [torch.from_numpy(x).requires_grad_() for x in given]
    attend = partial(
        torch.nn.functional.scaled_dot_product_attention, *inputs, is_causal=case.is_causal
    )
    found = partial(torch.autograd.grad, inputs=inputs, grad_outputs=[torch.from_numpy(along)])
    if passes == "backward":
        return partial(found, attend(), retain_graph=True)
    return lambda: found(attend())


def pairs_on_torch(by: str, case: Case, threads: int, passes: str) -> Call:
    """Return attention with a bias and a mask of keys, by torch's function or written out."""
    import torch

    torch.set_num_threads(threads)
    arrays, options = case.arguments()
    dtype, is_trained = getattr(torch, case.dtype), passes == "both"
    inputs = [torch.from_numpy(x.astype("float32")) for x in (*arrays, options["bias"])]
    inputs = [x.to(dtype).requires_grad_(is_trained) for x in inputs]
    hidden = torch.where(torch.from_numpy(options["mask"]), 0.0, -torch.inf).to(dtype)

    def attend(query: Any, key: Any, value: Any, bias: Any) -> Any:
        if by == REFERENCE:
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=bias + hidden
            )
        scores = torch.einsum("bhid,bhjd->bhij", query * case.size**-0.5, key) + bias + hidden
        return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), value)

    along = torch.ones_like(inputs[0])
    if not is_trained:
        return partial(attend, *inputs)
    return lambda: torch.autograd.grad(attend(*inputs), inputs, along)


# ---- JAX, ONNX Runtime and OpenVINO -------------------------------------------------------------


def on_jax(
    name: str,
    arrays: list[Array],
    case: Case,
    made: Callable[[Any], Any] = lambda attend: attend,
    turns_back: bool = True,
    **options: Any,
) -> Call:
    """Return a call of `JAX` on the CPU under `jit`, or what is `made` of its function.

    Its output has the axes of `arrays`, unless it is left as it is.
    """
    import jax

    axis = JAX[name]
    attend = jax.nn.dot_product_attention if name == "jax" else polyattn.attention
    compiled = jax.jit(made(partial(attend, is_causal=case.is_causal, **options)))
    on_cpu = jax.devices("cpu")[0]
    placed = [jax.device_put(array.swapaxes(axis, 2), on_cpu) for array in arrays]

    def call() -> Any:
        output = jax.block_until_ready(compiled(*placed))
        if not turns_back:
            return output
        return jax.tree.map(lambda array: array.swapaxes(axis, 2), output)

    return call


def gradient_on_jax(attend: Any) -> Any:
    """Return the gradient of attention along a fourth array, for `on_jax`."""
    import jax

    def loss(query: Any, key: Any, value: Any, along: Any) -> Any:
        return (attend(query, key, value) * along).sum()

    return jax.grad(loss, (0, 1, 2))


def on_onnxruntime(case: Case, threads: int, operator: str = "Attention") -> Call:
    """Return a run of one of ONNX Runtime's operators: Attention or MultiHeadAttention.

    The latter takes arrays of (B, L, H·D).
    """
    from onnx import TensorProto, helper

    arrays, _ = case.arguments()
    names = ["query", "key", "value"]
    if operator == "Attention":
        options: Options = {"is_causal": int(case.is_causal)}
    else:
        options = {"unidirectional": int(case.is_causal), "num_heads": case.heads}
        options["domain"] = "com.microsoft"
        arrays = [array.swapaxes(1, 2).reshape(case.batch, case.length, -1) for array in arrays]
    node = helper.make_node(operator, names, ["output"], **options)
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape)
        for name, array in zip(names, arrays, strict=True)
    ]
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "attention", inputs, [output])
    sets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=sets, ir_version=10)
    return onnx_session(model, arrays, threads)


def onnx_session(model: Any, arrays: list[Array], threads: int) -> Call:
    """Return the run of a model of query, key and value in a session of ONNX Runtime."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )
    feed = dict(zip(("query", "key", "value"), arrays, strict=True))
    return lambda: session.run(None, feed)[0]


def on_openvino(case: Case, threads: int) -> Call:
    """Return a run of OpenVINO's operator."""
    import openvino
    from openvino import opset13

    arrays, _ = case.arguments()
    inputs = [opset13.parameter(array.shape, np.float32) for array in arrays]
    node = opset13.scaled_dot_product_attention(*inputs, causal=case.is_causal)
    model = openvino.Model([node], inputs)
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.compile_model(model, "CPU", settings).create_infer_request()
    feed = dict(enumerate(arrays))
    return lambda: request.infer(feed, share_inputs=True, share_outputs=True)[0]
