"""PyTorch: how its kernels are called, compile without a break, and mind its own modes."""

import contextlib
import types

import array_api_compat.torch
import numpy as np
import pytest
import torch
from arrays import close, draw, to_torch
from far_device import far, near, ran, reading
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import polyattn
from polyattn import attention, masks, scores
from polyattn._core.tiles.dropout import philox
from polyattn_torch.backend import TorchBackend

Q, K, V = draw((2, 4, 6, 8), (2, 2, 9, 8), (2, 2, 9, 5), to=to_torch)


def test_sdpa_keeps_a_float32_bias_of_16_bit_scores_exact():
    q, k, v = (x.bfloat16() for x in (Q, K, V))
    bias = 300 + V[0, 0, :, 0]  # bfloat16 would round it to multiples of 2
    found, expected = (attention(q, k, v, bias=bias, kernel=name) for name in ("sdpa", "dense"))
    close(found, expected, 3)


# ---- torch's own modes ----


def test_autocast_does_not_reach_a_kernel():
    """It casts tensors before the call, not arrays of NumPy that come to torch."""
    options = {"backend": "torch", "kernel": "tiled"}
    arrays = [x.numpy() for x in (Q, K, V)]
    expected = attention(*arrays, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attention(*arrays, **options)
    np.testing.assert_array_equal(output, expected, strict=True)


def test_shapes_without_data():
    q = torch.empty(2, 3, 4, 8, device="meta")
    for options in ({}, {"softcap": 1.0, "is_causal": True}, {"kernel": "tiled"}):
        assert attention(q, q, q, **options).shape == q.shape


@pytest.mark.parametrize("where", ["NumPy", "the CPU", "the device"])
def test_a_named_device_computes_and_the_result_goes_back(where):
    to = {"NumPy": torch.Tensor.numpy, "the CPU": torch.clone, "the device": far}[where]
    query, key, value = map(to, (Q, K, V))
    options = {"is_causal": True, "mask": masks.padding([5, 8]), "query_offset": [1, 3]}
    ran.clear()
    with reading() if where != "the device" else contextlib.nullcontext():
        output = attention(query, key, value, backend="torch:far", kernel="sdpa", **options)
    assert "bmm.out" in ran
    assert type(output) is type(query)
    assert str(getattr(output, "device", "")) == str(getattr(query, "device", ""))
    output = near(output) if where == "the device" else output
    close(output, attention(Q, K, V, kernel="dense", **options))


# ---- work ----


class Operations(TorchDispatchMode):
    """The names of the operations that torch runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_a_word_of_dropout_is_one_product():
    words = tuple(torch.arange(3) + n for n in range(4))
    with Operations() as found:
        philox(array_api_compat.torch, words, (1, 2))
    assert found.names.count("mul") == 2 * 10  # two in each round
    assert len(found.names) <= 12 * 10


def test_a_sigmoid_is_one_operation():
    with Operations() as found:
        attention(Q, K, V, normalizer=scores.sigmoid())
    assert found.names.count("sigmoid") == 1
    assert "exp" not in found.names


def test_lengths_need_no_range_but_that_of_the_keys():
    options = {"key_lengths": torch.tensor([3]), "kernel": "sdpa"}
    attention(Q, K, V, **options)  # to plan takes ranges too
    with Operations() as found:
        attention(Q, K, V, **options)
    assert found.names.count("arange") == 2  # one to fill with 0 what is beyond them


def test_blocks_of_rows_fit_the_caches_of_the_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    backend, query = TorchBackend(), torch.zeros(2, 600, 4)
    blocks = backend.row_blocks(query, query)
    assert sum(block.length for block in blocks) == 600
    assert {block.length * 2 * 600 <= backend.block for block in blocks} == {True}
    assert backend.block == 3 * 2**15
    assert len(backend.row_blocks(query.to("meta"), query.to("meta"))) == 1


traces = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")


@traces
def test_what_is_traced_holds_for_other_numbers():
    def call(*arrays):
        return [attention(*arrays, similarity=one) for one in (scores.cosine(), scores.distance())]

    arrays = draw(*[(1, 2, 5, 32)] * 3, to=to_torch)
    others = [arrays[0] + 1000, arrays[0] + 1000, arrays[2]]  # near to one another
    others[1][..., 2, :] = 0
    graph = make_fx(call, tracing_mode="real")(*arrays)
    for traced in (graph, torch.jit.trace(call, arrays, check_trace=False)):
        close(traced(*others), call(*others))


TRACED = {
    "causal": {"is_causal": True, "softcap": 2.0, "sinks": torch.ones(4)},
    "expression": {"mask": masks.causal() | masks.prefix(2)},
    "array": {"mask": torch.eye(6, 9, dtype=torch.bool)},
}


@traces
@pytest.mark.parametrize(
    ("kernel", "name"),
    [(None, "causal"), ("dense", "causal"), ("dense", "array"), ("tiled", "expression")],
)
def test_a_masked_call_is_traced_without_a_look_at_numbers(kernel, name):
    def call(*arrays):
        return attention(*arrays, kernel=kernel, **TRACED[name])

    others = Q + 1, K, V.clone()
    if kernel is not None:  # torch's own engine lets it through
        others[2][..., 5, :] = torch.inf  # no look at the example says that all is finite
    close(make_fx(call, tracing_mode="real")(Q, K, V)(*others), call(*others))
    if kernel != "tiled":  # whose tiles are of one length
        traced = torch.jit.trace(call, (Q, K, V), check_trace=False)
        close(traced(*others), call(*others))


@traces
def test_tiles_are_not_traced_for_lengths_that_may_change():
    with pytest.raises(polyattn.UnsupportedError, match="its tiles need lengths that are known"):
        torch.jit.trace(lambda q: attention(q, K, V, is_causal=True, kernel="tiled"), Q)


# ---- devices ----


def test_hardware_is_described_as_torch_knows_it(monkeypatch):
    backend = TorchBackend()
    assert backend.hardware("cpu") == backend.hardware("cuda:99") == {}
    properties = types.SimpleNamespace(name="H200", total_memory=2**37, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    known = {"name": "H200", "memory": 2**37, "compute_capability": "9.0"}
    assert backend.hardware("cuda:1") == known
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "compute_capability" not in backend.hardware("cuda:1")


@pytest.mark.parametrize(
    ("cuda", "hip", "number", "engines"),
    [
        ("13.0", None, lambda: 92001, {"cuda": "13.0", "cudnn": "9.20.1"}),
        (None, "6.4", lambda: 92001, {"rocm": "6.4"}),
        (None, None, lambda: 1 / 0, {}),
    ],
)
def test_engines_have_versions(monkeypatch, cuda, hip, number, engines):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.backends.cudnn, "version", number)
    assert TorchBackend().engines() == engines


class Foreign:
    """An array of another library, of which DLPack is all that is known."""

    def __init__(self, tensor):
        self.tensor, self.dtype = tensor, types.SimpleNamespace(name="float32")

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_arrays_of_other_libraries_are_placed_without_a_copy():
    backend, tensor = TorchBackend(), torch.ones(3, 4)
    for device in (None, "cpu"):
        assert backend.place(Foreign(tensor), device).data_ptr() == tensor.data_ptr()
        assert backend.place(tensor, device) is tensor
    array = np.ones((2, 3), np.float32)
    assert backend.place(array, "cpu").data_ptr() == array.ctypes.data
    assert backend.place(tensor, "meta").device.type == "meta"
