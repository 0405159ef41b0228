"""Stand-ins for cuDNN: NVIDIA's frontend describes a graph, and the host computes it.

What they take is what the frontend was told, by its rules: windows that exclude their left end,
bands from either corner, bits of 16-byte rows at the addresses that it is given.
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
    """What a score_mod is given as its graph."""

    def tensor_scalar(self, value, kind):
        assert kind == frontend.scalar_type.RUNTIME_PARAM
        return np.float32(value)

    def div(self, *, a, b):
        return a / b

    def mul(self, *, a, b):
        return a * b

    def tanh(self, *, input):
        return np.tanh(input)


class HostGraph(frontend.pygraph):
    """A graph that the host computes: NVIDIA's until it comes to cuDNN itself."""

    steps = ("validate", "build_operation_graph", "create_execution_plans", "check_support")
    refusal = None

    def __init__(self, **options):
        super().__init__(**options)
        self.done = []

    def validate(self):
        self.done.append("validate")

    def build_operation_graph(self):
        self.done.append("build_operation_graph")

    def create_execution_plans(self, heuristics):
        assert heuristics == [frontend.heur_mode.A, frontend.heur_mode.FALLBACK]
        self.done.append("create_execution_plans")

    def check_support(self):
        if self.refusal:
            raise frontend.cudnnGraphNotSupportedError(self.refusal)
        self.done.append("check_support")

    def build_plans(self):
        self.done.append("build_plans")

    def get_workspace_size(self):
        return 96

    def execute(self, pointers, workspace, handle):
        assert self.done == [*self.steps, "build_plans"]
        assert workspace == 4096
        assert (handle.thread, handle.device) == (threading.get_ident(), Device.current)
        handle.log.append(handle.stream)
        (node,) = self.nodes
        arrays = {name: _array(t, pointers) for name, t in node.inputs.items() if t is not None}
        results = {t.uid: t for t in self.get_outputs() if t is not None and not t.is_virtual}
        assert set(pointers) == set(results) | {t.uid for t in node.inputs.values() if t}
        compute = _gradients if "dO" in arrays else _attention
        for uid, result in compute(arrays, dict(node.params)).items():
            if uid in results:
                _array(results.pop(uid), pointers)[...] = result
        assert not results


def _array(tensor, pointers):
    """The memory of a tensor, as cuDNN has it read."""
    dtype = np.dtype(TYPES[tensor.data_type])
    address, strides = pointers[tensor.uid], [s * dtype.itemsize for s in tensor.stride]
    *outer, last = strides
    assert address % 16 == 0
    assert last == dtype.itemsize
    if tensor.dim[-1] != 1:
        assert all(stride % 16 == 0 and stride > 0 for stride in outer)
    span = sum((n - 1) * s for n, s in zip(tensor.dim, strides, strict=True)) + dtype.itemsize
    memory = np.frombuffer((ctypes.c_char * span).from_address(address), np.uint8)
    flat = memory[: span // dtype.itemsize * dtype.itemsize].view(dtype)
    return np.lib.stride_tricks.as_strided(flat, tensor.dim, strides)


def _attention(given, options):
    """What sdpa of the frontend means."""
    assert isinstance(options.pop("generate_stats"), bool)
    q, k, v = _wide(given)
    s = _scores(q, k, given.pop("bias", None), options)
    assert not given
    top = s.max(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        weights = np.exp(s - top)  # NaN in a row without keys
        total = weights.sum(-1, keepdims=True)
        output = _rounded(weights, q) @ v / total
        return {graphs.OUTPUT: output, graphs.LOGSUMEXP: top + np.log(total)}


def _gradients(given, options):
    """What sdpa_backward of the frontend means."""
    assert options.pop("use_deterministic_algorithm") is True
    groups = given["k"].shape[1]
    q, k, v = _wide(given)
    output, of_output, stats = (given.pop(name) for name in ("o", "dO", "stats"))
    assert output.dtype == of_output.dtype == q.dtype
    assert np.isfinite(stats).all(), "cuDNN makes NaN of a logsumexp of -inf"
    bias = given.pop("bias", None)
    if options.pop("use_padding_mask", False):
        for name, length in (("seq_len_q", q.shape[2]), ("seq_len_kv", k.shape[2])):
            lengths = given.pop(name)
            assert lengths.dtype == np.int32
            assert lengths.shape == (len(q), 1, 1, 1)
            assert (lengths == length).all()
    else:
        assert bias is None or k.shape[2] % 128 == 0, "cuDNN makes NaN of the last tile's rest"
    assert not given
    scale = np.float32(options["attn_scale"])
    assert max(q.shape[-1], v.shape[-1]) <= 256
    assert (q.shape[2], k.shape[2]) != (1, 1)
    p = np.exp(_scores(q, k, bias, options) - stats)
    of_output, output = of_output.astype("float32"), output.astype("float32")
    delta = (of_output * output).sum(-1, keepdims=True)
    ds = p * (of_output @ v.swapaxes(-1, -2) - delta)
    wide = q.astype("float32")
    of_key = scale * _rounded(ds, q).swapaxes(-1, -2) @ wide
    of_value = _rounded(p, q).swapaxes(-1, -2) @ of_output
    return {
        graphs.QUERY_GRADIENT: scale * _rounded(ds, q) @ k,
        graphs.KEY_GRADIENT: _of_groups(of_key, groups),
        graphs.VALUE_GRADIENT: _of_groups(of_value, groups),
    }


def _wide(given):
    """Take query, key and value, the latter in float32 and with the heads of the query."""
    q, k, v = (given.pop(name) for name in "qkv")
    assert all(size % 8 == 0 for size in (q.shape[-1], v.shape[-1]))
    members = q.shape[1] // k.shape[1]
    return q, *(np.repeat(x.astype("float32"), members, axis=1) for x in (k, v))


def _scores(q, k, bias, options):
    """Scores, −inf for keys outside the band."""
    scale = options.pop("attn_scale")
    s = q.astype("float32") @ k.swapaxes(-1, -2) * np.float32(scale)
    if "score_mod" in options:
        assert len(options) == 1
        assert bias is None
        s = options.pop("score_mod")(Scores(), s)
    if bias is not None:
        assert bias.dtype == np.float32
        assert not (bias < arrays.UNSEEN).any(), "cuDNN has trouble at the ends of float32"
        s = s + bias
    i, j = np.indices(s.shape[-2:])
    corner = options.pop("diagonal_alignment", None)
    if corner == frontend.diagonal_alignment.BOTTOM_RIGHT:
        assert bias is None, "cuDNN refuses a bias beside this alignment"
        i = i + s.shape[-1] - s.shape[-2]
    s = np.where(j > i + options.pop("diagonal_band_right_bound", 2**30), -np.inf, s)
    s = np.where(j <= i - options.pop("diagonal_band_left_bound", 2**30), -np.inf, s)
    assert not options
    return s


def _rounded(x, like):
    return x.astype(like.dtype).astype("float32")


def _of_groups(x, groups):
    return x.reshape(len(x), groups, -1, *x.shape[2:]).sum(2)


class Handle:
    """A handle of cuDNN."""

    def __init__(self):
        self.thread, self.device, self.stream = threading.get_ident(), Device.current, None
        self.switches, self.log, self.backend_handle = 0, [], object()
        self.destroyed = False
        HANDLES.append(self)


HANDLES = []


def set_stream(*, handle, stream):
    assert handle.thread == threading.get_ident()
    handle.stream, handle.switches = stream, handle.switches + 1


def put_in_place(monkeypatch):
    """Let the kernel run on the host, as the backend `host`; return the frontend it sees."""
    names = ("data_type", "diagonal_alignment", "heur_mode", "scalar_type")
    library = types.SimpleNamespace(
        **{name: getattr(frontend, name) for name in names},
        __version__="1.28.0",
        pygraph=HostGraph,
        backend_version=lambda: 91900,
        create_handle=Handle,
        set_stream=set_stream,
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
