"""cuDNN on the host: NVIDIA's frontend describes a graph, and polyattn's formula computes it.

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

from polyattn import Partial, attention_backward, attention_partial
from polyattn_cupy import arrays, cudnn_gradients, cudnn_kernel, graphs, loading, plans
from polyattn_cupy.arrays import UNSEEN
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
    arrays, options = _call(given, options)
    partial = attention_partial(*arrays, **options)
    return {graphs.OUTPUT: partial.output, graphs.LOGSUMEXP: partial.logsumexp[..., None]}


def _gradients(given, options):
    """Compute what the frontend's `sdpa_backward` means."""
    arrays, options = _call(given, options)
    output, along = (given[name].astype("float32") for name in ("o", "dO"))
    assert np.isfinite(given["stats"]).all(), "cuDNN makes NaN of a logsumexp of -inf"
    for name, length in (("seq_len_q", output.shape[2]), ("seq_len_kv", arrays[1].shape[2])):
        assert np.all(given.get(name, length) == length)
    partial = Partial(output, given["stats"][..., 0])
    found = attention_backward(*arrays, partial, along, **options)
    names = graphs.QUERY_GRADIENT, graphs.KEY_GRADIENT, graphs.VALUE_GRADIENT
    return dict(zip(names, found[:3], strict=True))


def _call(given, options):
    """Return query, key and value in float32, and the options of polyattn's formula."""
    arrays = [given[name].astype("float32") for name in "qkv"]
    call = {"backend": "numpy", "kernel": "dense", "scale": options["attn_scale"]}
    if "score_mod" in options:
        call["score_mod"] = lambda s, *_: options["score_mod"](Scores(), s)
    if "bias" in given:
        assert not (given["bias"] < UNSEEN).any(), "cuDNN has trouble at the ends of float32"
        call["bias"] = given["bias"]
    i, j = np.indices((arrays[0].shape[2], arrays[1].shape[2]))
    if options.get("diagonal_alignment") == frontend.diagonal_alignment.BOTTOM_RIGHT:
        i = i + j.shape[1] - j.shape[0]
    left = options.get("diagonal_band_left_bound", 2**30)
    right = options.get("diagonal_band_right_bound", 2**30)
    seen = (i - left < j) & (j <= i + right)
    if options.get("use_padding_mask"):
        assert (given["seq_len_q"] == len(j)).all()
        assert (given["seq_len_kv"] > 0).all()
        seen = seen & (j < given["seq_len_kv"])
    return arrays, call | {"mask": seen}


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
    monkeypatch.setattr(plans, "_of_thread", threading.local())
    monkeypatch.setattr(HostGraph, "refusal", None)
    HANDLES.clear()
    forget()
    register(monkeypatch, CupyCudnn())
    return library


def forget():
    for function in (loading.why_no_library, plans.why_unsupported, plans.compute_capability):
        function.cache_clear()
