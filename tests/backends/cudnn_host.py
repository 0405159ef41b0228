"""cuDNN on the host: NVIDIA's frontend describes a graph, and NumPy computes it.

The frontend's rules for a graph are checked with its own code (`test_cupy_frontend.py`). Here a
graph has the numbers that its options mean: windows that exclude their left end, bands from either
corner, arrays by their addresses and strides.
"""

import ctypes
import threading
import types

import cudnn as frontend
import numpy as np
from cupy_host import Device, register, stand_in

from polyattn_cupy import arrays, cudnn_gradients, cudnn_kernel, graphs, loading, plans
from polyattn_cupy.cudnn_kernel import CupyCudnn

TYPES = {
    frontend.data_type.HALF: "float16",
    frontend.data_type.BFLOAT16: "bfloat16",
    frontend.data_type.FLOAT: "float32",
    frontend.data_type.INT32: "int32",
}


class Scores:
    """The graph that a score_mod gets, on arrays of NumPy."""

    def tensor_scalar(self, value, kind):
        return np.float32(value)

    def div(self, *, a, b):
        return a / b

    def mul(self, *, a, b):
        return a * b

    def tanh(self, *, input):
        return np.tanh(input)


class HostGraph(frontend.pygraph):
    """A graph of NVIDIA's frontend that the host computes."""

    refusal = None

    def validate(self):
        pass

    def build_operation_graph(self):
        pass

    def create_execution_plans(self, heuristics):
        pass

    def check_support(self):
        if self.refusal:
            raise frontend.cudnnGraphNotSupportedError(self.refusal)

    def build_plans(self):
        pass

    def get_workspace_size(self):
        return 96

    def execute(self, pointers, workspace, handle):
        assert (handle.thread, handle.device) == (threading.get_ident(), Device.current)
        handle.log.append(handle.stream)
        (node,) = self.nodes
        given = {name: _array(t, pointers) for name, t in node.inputs.items() if t is not None}
        results = {t.uid: t for t in self.get_outputs() if t is not None and not t.is_virtual}
        assert set(pointers) == set(results) | {t.uid for t in node.inputs.values() if t}
        compute = _gradients if "dO" in given else _attention
        for uid, result in compute(given, dict(node.params)).items():
            if uid in results:
                _array(results[uid], pointers)[...] = result


def _array(tensor, pointers):
    """Return the memory of a tensor, whose rows cuDNN reads by 16 bytes."""
    dtype = np.dtype(TYPES[tensor.data_type])
    address, strides = pointers[tensor.uid], [s * dtype.itemsize for s in tensor.stride]
    *outer, last = strides
    assert address % 16 == 0
    assert last == dtype.itemsize
    assert tensor.dim[-1] == 1 or all(stride % 16 == 0 and stride > 0 for stride in outer)
    span = sum((n - 1) * s for n, s in zip(tensor.dim, strides, strict=True)) + dtype.itemsize
    flat = np.frombuffer((ctypes.c_char * span).from_address(address), dtype)
    return np.lib.stride_tricks.as_strided(flat, tensor.dim, strides)


def _attention(given, options):
    """Compute what the frontend's `sdpa` means."""
    q, k, v = _with_all_heads(given)
    s = _scores(q, k, given.get("bias"), options)
    top = s.max(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        weights = np.exp(s - top)  # NaN in a row without keys
        total = weights.sum(-1, keepdims=True)
        output = _rounded(weights, q) @ v / total
        return {graphs.OUTPUT: output, graphs.LOGSUMEXP: top + np.log(total)}


def _gradients(given, options):
    """Compute what the frontend's `sdpa_backward` means."""
    groups = given["k"].shape[1]
    q, k, v = _with_all_heads(given)
    output, of_output = (given[name].astype("float32") for name in ("o", "dO"))
    assert np.isfinite(given["stats"]).all(), "cuDNN makes NaN of a logsumexp of -inf"
    for name, length in (("seq_len_q", q.shape[2]), ("seq_len_kv", k.shape[2])):
        assert np.all(given.get(name, length) == length)
    scale = np.float32(options["attn_scale"])
    p = np.exp(_scores(q, k, given.get("bias"), options) - given["stats"])
    delta = (of_output * output).sum(-1, keepdims=True)
    ds = _rounded(p * (of_output @ v.swapaxes(-1, -2) - delta), q)
    of_key = scale * ds.swapaxes(-1, -2) @ q.astype("float32")
    of_value = _rounded(p, q).swapaxes(-1, -2) @ of_output
    return {
        graphs.QUERY_GRADIENT: scale * ds @ k,
        graphs.KEY_GRADIENT: _of_groups(of_key, groups),
        graphs.VALUE_GRADIENT: _of_groups(of_value, groups),
    }


def _with_all_heads(given):
    """Return query, key and value, the latter two in float32 with the heads of the query."""
    q, k, v = (given[name] for name in "qkv")
    members = q.shape[1] // k.shape[1]
    return q, *(np.repeat(x.astype("float32"), members, axis=1) for x in (k, v))


def _scores(q, k, bias, options):
    """Return scores, −inf for keys outside the band."""
    s = q.astype("float32") @ k.swapaxes(-1, -2) * np.float32(options["attn_scale"])
    if "score_mod" in options:
        s = options["score_mod"](Scores(), s)
    if bias is not None:
        assert not (bias < arrays.UNSEEN).any(), "cuDNN has trouble at the ends of float32"
        s = s + bias
    i, j = np.indices(s.shape[-2:])
    if options.get("diagonal_alignment") == frontend.diagonal_alignment.BOTTOM_RIGHT:
        i = i + s.shape[-1] - s.shape[-2]
    s = np.where(j > i + options.get("diagonal_band_right_bound", 2**30), -np.inf, s)
    return np.where(j <= i - options.get("diagonal_band_left_bound", 2**30), -np.inf, s)


def _rounded(x, like):
    return x.astype(like.dtype).astype("float32")


def _of_groups(x, groups):
    return x.reshape(len(x), groups, -1, *x.shape[2:]).sum(2)


class Handle:
    """A handle of cuDNN, which belongs to one thread and one device."""

    def __init__(self):
        self.thread, self.device, self.stream = threading.get_ident(), Device.current, None
        self.log, self.backend_handle, self.destroyed = [], object(), False
        HANDLES.append(self)


HANDLES = []


def put_in_place(monkeypatch):
    """Let the kernel run on the host, as the backend `host`; return the frontend that it uses."""
    names = ("data_type", "diagonal_alignment", "heur_mode", "scalar_type")
    library = types.SimpleNamespace(
        **{name: getattr(frontend, name) for name in names},
        __version__="1.28.0",
        pygraph=HostGraph,
        backend_version=lambda: 91900,
        create_handle=Handle,
        set_stream=lambda *, handle, stream: setattr(handle, "stream", stream),
        destroy_handle=lambda handle: setattr(handle, "destroyed", True),
    )
    library.stream = 7
    here = stand_in(
        alloc=lambda size: types.SimpleNamespace(ptr=4096),
        get_current_stream=lambda: types.SimpleNamespace(ptr=library.stream),
    )
    for module in (arrays, cudnn_kernel, cudnn_gradients, plans):
        monkeypatch.setattr(module, "cupy", here)
    monkeypatch.setattr(loading, "library", lambda: library)
    monkeypatch.setattr(plans, "_local", plans._Local())
    monkeypatch.setattr(HostGraph, "refusal", None)
    HANDLES.clear()
    forget()
    register(monkeypatch, CupyCudnn())
    return library


def forget():
    for function in (loading.why_no_library, plans.why_unsupported, plans.compute_capability):
        function.cache_clear()
