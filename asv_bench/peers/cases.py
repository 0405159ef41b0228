"""The attention calls that the scripts compare: a shape and a kind, and who can compute it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from script import Call

import polyattn

Array = Any
REFERENCE = "torch"
NATIVE = "native"
# With more scores, contenders that hold all scores at once or are many times slower are left out.
MOST_SCORES = 2.5e8
JAX = {"polyattn jax": 2, "jax": 1}  # under `jit`, and the axis of the rows of a head


class Case(NamedTuple):
    """A shape (B, H, G, L, S, D), the kind of call, and the dtype."""

    batch: int
    heads: int
    groups: int
    length: int
    keys: int
    size: int
    kind: str = "full"
    dtype: str = "float32"

    @property
    def shape(self) -> str:
        """The shape as text."""
        heads = f"{self.heads}" if self.heads == self.groups else f"{self.heads} on {self.groups}"
        return f"({self.batch}, {heads}, {self.length}, {self.keys}, {self.size})"

    @property
    def title(self) -> str:
        """The shape, the kind and another dtype than float32 as text."""
        return f"{self.shape} {self.kind}" + f" {self.dtype}" * (self.dtype != "float32")

    @property
    def is_causal(self) -> bool:
        """Whether each row sees the keys up to its own."""
        return self.kind == "causal"

    @property
    def scores(self) -> int:
        """The number of scores."""
        return self.batch * self.heads * self.length * self.keys

    @property
    def visible(self) -> float:
        """The number of visible scores."""
        rows = self.batch * self.heads * self.length
        seen = {"causal": self.keys / 2, "window": 257, "padding": self.key_lengths.mean()}
        return float(rows * seen.get(self.kind, self.keys))

    def arguments(self) -> tuple[list[Array], dict[str, Any]]:
        """Return query, key and value, and the options for `polyattn.attention`."""
        rng = np.random.default_rng(0)
        shapes = [(self.batch, self.heads, self.length, self.size)]
        shapes += [(self.batch, self.groups, self.keys, self.size)] * 2
        dtype = self._numpy_dtype()
        arrays = [rng.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in shapes]
        square = (self.length, self.keys)
        match self.kind:
            case "causal":
                return arrays, {"is_causal": True}
            case "window":
                return arrays, {"window": (256, 0)}
            case "softcap":
                return arrays, {"softcap": 30.0}
            case "softcap, window":
                return arrays, {"softcap": 30.0, "window": (255, 0)}
            case "documents":
                return arrays, {"mask": polyattn.masks.segments(np.arange(self.keys) // 256)}
            case "low scores":  # all but one far below the largest
                arrays[0][:], arrays[1][:], arrays[1][:, :, 0] = 1.0, -100 / self.size**0.5, 0.0
                return arrays, {}
            case "padding":
                return arrays, {"mask": polyattn.masks.padding(self.key_lengths)}
            case "mask":
                return arrays, {"mask": rng.random(square) > 0.5}
            case "bias":
                return arrays, {"bias": rng.standard_normal(square, dtype=np.float32)}
            case "alibi":
                return arrays, {"score_mod": polyattn.scores.alibi(self.heads)}
            case "half the keys":
                lengths = np.linspace(self.keys / 8, self.keys * 7 / 8, self.batch)
                return arrays, {"key_lengths": lengths.astype(int)}
            case "pages of 128" | "pages of 16":
                return self._in_pages(arrays, int(self.kind.removeprefix("pages of ")))
            case "sinks":
                return arrays, {"sinks": rng.standard_normal(self.heads, dtype=np.float32)}
        return arrays, {}

    def _in_pages(self, arrays: list[Array], page: int) -> tuple[list[Array], dict[str, Any]]:
        """Return the keys and values in pages in random order, and their table."""
        query, *whole = arrays
        table = np.random.default_rng(1).permutation(self.batch * self.keys // page)
        pools = []
        for array in whole:
            cut = array.reshape(self.batch, self.groups, -1, page, self.size).swapaxes(1, 2)
            pools.append(np.empty((len(table), *cut.shape[2:]), array.dtype))
            pools[-1][table] = cut.reshape(pools[-1].shape)
        options = {"block_table": table.reshape(self.batch, -1), "key_lengths": self.keys}
        return [query, *pools], options

    def _numpy_dtype(self) -> Any:
        if self.dtype != "bfloat16":
            return self.dtype
        import ml_dtypes

        return ml_dtypes.bfloat16

    @property
    def key_lengths(self) -> Array:
        """The number of keys of each item of a padded batch, from an eighth of all on."""
        rng = np.random.default_rng(1)
        return rng.integers(self.keys // 8, self.keys, self.batch, endpoint=True)

    def mask(self, options: dict[str, Any]) -> Array | None:
        """Return which keys each row sees, as an array, or None for all."""
        rows, keys = np.arange(self.length)[:, None], np.arange(self.keys)
        if self.kind == "padding":
            return keys < self.key_lengths[:, None, None, None]
        if self.kind == "causal":
            return keys <= rows
        if self.kind == "window":
            return (keys <= rows) & (keys >= rows - 256)
        return options.get("mask")


def both(batch: int, heads: int, length: int, size: int) -> list[Case]:
    """Return a full and a causal case."""
    return [Case(batch, heads, heads, length, length, size, kind) for kind in ("full", "causal")]


# ---- the contenders ----------------------------------------------------------------------------


def textbook(
    query: Array, key: Array, value: Array, *, mask: Array = None, bias: Array = None
) -> Array:
    """Compute softmax(query·keyᵀ/√D)·value in plain NumPy."""
    if (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = (np.repeat(x, groups, axis=1) for x in (key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(np.float32(query.shape[-1]))
    if bias is not None:
        scores += bias
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return scores @ value / scores.sum(axis=-1, keepdims=True)


def kernels(arrays: list[Array], options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return options for the compiled kernel, if it is installed, and for NumPy's own kernel."""
    found = polyattn.explain(*arrays, backend="numpy", **options).candidates
    able = [one.kernel for one in found if one.status in ("chosen", "next")]
    own = next(name for name in able if name != NATIVE)
    names = {NATIVE: NATIVE} if NATIVE in able else {}
    chosen = {**names, "numpy": own}
    return {name: {"backend": "numpy", "kernel": kernel} for name, kernel in chosen.items()}


def ours(case: Case) -> dict[str, Call]:
    """Return calls of the compiled kernel, if it is installed, and of NumPy's own kernel."""
    arrays, options = case.arguments()
    return {
        name: partial(polyattn.attention, *arrays, **options, **kernel)
        for name, kernel in kernels(arrays, options).items()
    }


def contenders(case: Case, threads: int) -> Iterator[tuple[str, Call]]:
    """Yield the installed contenders that support the case, torch first."""
    arrays, options = case.arguments()
    peers: dict[str, Callable[[], Call]] = {REFERENCE: lambda: on_torch(case, threads)}
    peers |= {name: partial(lambda call: call, call) for name, call in ours(case).items()}
    mask, bias = case.mask(options), options.get("bias")
    if case.scores <= MOST_SCORES:
        peers["textbook"] = lambda: partial(textbook, *arrays, mask=mask, bias=bias)
        if case.kind in ("full", "causal"):
            for name in JAX:
                peers[name] = partial(on_jax, name, arrays, case)
            if case.heads == case.groups:
                peers["onnxruntime"] = lambda: on_onnxruntime(arrays, case, threads)
    for name, make in peers.items():
        with contextlib.suppress(ImportError):
            yield name, make()


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


def on_jax(
    name: str, arrays: list[Array], case: Case, made: Callable[[Call], Call] = lambda attend: attend
) -> Call:
    """Return a call of `JAX` on the CPU under `jit`, or what is `made` of its function."""
    import jax

    axis = JAX[name]
    attend = jax.nn.dot_product_attention if name == "jax" else polyattn.attention
    compiled = jax.jit(made(partial(attend, is_causal=case.is_causal)))
    on_cpu = jax.devices("cpu")[0]
    placed = [jax.device_put(array.swapaxes(axis, 2), on_cpu) for array in arrays]

    def call() -> Any:
        found = jax.block_until_ready(compiled(*placed))
        return jax.tree.map(lambda array: array.swapaxes(axis, 2), found)

    return call


def on_onnxruntime(
    arrays: list[Array], case: Case, threads: int, operator: str = "Attention"
) -> Call:
    """Return a run of one of ONNX Runtime's operators: Attention or MultiHeadAttention.

    The latter takes arrays of (B, L, H·D).
    """
    from onnx import TensorProto, helper

    names = ["query", "key", "value"]
    if operator == "Attention":
        options: dict[str, Any] = {"is_causal": int(case.is_causal)}
    else:
        options = {"unidirectional": int(case.is_causal), "num_heads": case.heads}
        options["domain"] = "com.microsoft"
        shape = (case.batch, case.length, -1)
        arrays = [array.swapaxes(1, 2).reshape(shape) for array in arrays]
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


def on_openvino(arrays: list[Array], case: Case, threads: int) -> Call:
    """Return a run of OpenVINO's operator."""
    import openvino
    from openvino import opset13

    inputs = [opset13.parameter(array.shape, np.float32) for array in arrays]
    node = opset13.scaled_dot_product_attention(*inputs, causal=case.is_causal)
    model = openvino.Model([node], inputs)
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.compile_model(model, "CPU", settings).create_infer_request()
    feed = dict(enumerate(arrays))
    return lambda: request.infer(feed, share_inputs=True, share_outputs=True)[0]


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
