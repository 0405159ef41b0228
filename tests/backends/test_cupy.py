"""CuPy's backend where there is no GPU: what it says of that, and how arrays would come and go."""

import sys
import types

import cupy
import ml_dtypes
import numpy as np
import pytest
from cupy_host import HostArray, at_home, stand_in
from optional import torch

from polyattn import attention
from polyattn._base import arrays as base
from polyattn._dispatch.errors import BackendUnavailableError
from polyattn_cupy import SPEC, arrays, backend, loading, softmax_cuda
from polyattn_cupy.backend import CupyBackend

NO_DRIVER = pytest.mark.skipif(cupy.cuda.is_available(), reason="there is a GPU here")
X = np.ones((1, 2, 3, 8), "float32")


def test_finding_it_imports_no_cupy(run_python):
    run_python("""
import sys
import polyattn_cupy, polyattn
polyattn.explain((2, 3), (4, 3), (4, 3), backend="numpy")
assert polyattn_cupy.SPEC.name == "cupy"
assert not {"cupy", "cudnn", "cupy_backends"} & set(sys.modules)
""")


def test_loading_it_imports_no_other_framework(run_python):
    run_python("""
import sys
import polyattn_cupy.backend
assert "cupy" in sys.modules
assert not {"torch", "jax", "cudnn", "cupy_backends.cuda.libs.cublas"} & set(sys.modules)
""")


@NO_DRIVER
def test_without_a_driver_it_says_so():
    with pytest.raises(BackendUnavailableError, match=r"CUDA finds no device.*driver"):
        attention(X, X, X, backend="cupy")
    with pytest.raises(RuntimeError, match="needs an NVIDIA GPU and its driver"):
        SPEC.load()


@NO_DRIVER
def test_without_a_driver_a_list_goes_on():
    np.testing.assert_array_equal(attention(X, X, X, backend="cupy,numpy"), X)


def test_limiting_offsets_does_not_wait_for_the_device(monkeypatch):
    """array_api_compat's clip assigns by a mask, for which CuPy asks the device."""
    monkeypatch.setattr(base, "library_of", lambda array: types.SimpleNamespace(name="cupy"))
    limited = base.clip(types.SimpleNamespace(), np.arange(5), 1, 3)
    np.testing.assert_array_equal(limited, [1, 1, 2, 3, 3])


# ---- with devices that are the host's ----------------------------------------------------------


class Device:
    """Devices by number; arrays are made on the current one."""

    current = 0

    def __init__(self, number=None):
        self.id = Device.current if number is None else number

    def __enter__(self):
        self.before, Device.current = Device.current, self.id

    def __exit__(self, *error):
        Device.current = self.before

    def synchronize(self):
        waited.append(self.id)


waited = []


class CudaArray(HostArray):
    """An array that knows where it was made."""

    @property
    def device(self):
        return Device(self.at)

    def copy(self):
        return _made(np.array(self))


def _made(array):
    array = array.view(CudaArray)
    array.at = Device.current
    return array


class Error(Exception):
    pass


@pytest.fixture
def here(monkeypatch):
    """Let CuPy be of the host, with two devices."""
    properties = {"name": b"GPU", "totalGlobalMem": 2**30, "major": 9, "minor": 0}
    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: 2,
        getDeviceProperties=lambda number: {**properties, "minor": number},
        runtimeGetVersion=lambda: 13020,
        CUDARuntimeError=Error,
    )
    here = types.SimpleNamespace(
        ndarray=CudaArray,
        asarray=lambda array: _made(np.array(array)),
        from_dlpack=lambda array: _made(np.from_dlpack(array.of)),
        asnumpy=np.asarray,
        empty=lambda shape, dtype: _made(np.full(shape, 7, dtype)),
        where=np.where,
        exp=np.exp,
        matmul=np.matmul,
        inf=np.inf,
        cuda=types.SimpleNamespace(runtime=runtime, Device=Device),
    )
    monkeypatch.setattr(backend, "cupy", here)
    monkeypatch.setattr(arrays, "cupy", here)
    waited.clear()
    return here


class Foreign:
    """An array of another library on a device."""

    def __init__(self, array, kind, number):
        self.of, self.place = array, (kind, number)

    def __dlpack_device__(self):
        return self.place


@pytest.mark.usefixtures("here")
def test_devices_and_hardware(monkeypatch):
    cuda = CupyBackend()
    assert cuda.devices() == ["cuda:0", "cuda:1"]
    assert cuda.hardware("cuda:1") == {
        "name": "GPU", "memory": 2**30, "compute_capability": "9.1"
    }  # fmt: skip
    monkeypatch.setattr(loading, "versions", lambda: {"cudnn": "9.19.0"})
    assert cuda.engines() == {"cuda": "13.2", "cudnn": "9.19.0"}
    cuda.synchronize("cuda:1")
    cuda.synchronize()
    assert waited == [1, 0]


def test_no_device_is_no_backend(here):
    here.cuda.runtime.getDeviceCount = lambda: 0
    with pytest.raises(RuntimeError, match="CUDA finds no device"):
        CupyBackend()


@pytest.mark.usefixtures("here")
def test_arrays_of_its_own_stay_or_move():
    cuda = CupyBackend()
    mine = _made(np.arange(3.0))
    assert cuda.place(mine, None) is mine
    assert cuda.place(mine, "cuda:0") is mine
    moved = cuda.place(mine, "cuda:1")
    assert (moved.device.id, list(moved)) == (1, [0, 1, 2])
    assert cuda.place(moved, None) is moved
    assert Device.current == 0


HOST_ARRAYS = {
    "NumPy": np.array([1.0, 2]),
    "a scalar": np.float32(1)[()],
    "another byte order": np.array([1, 2], ">f4"),
    "read-only": np.broadcast_to(np.float32(1), 2),
    "bfloat16": np.array([1, 2], ml_dtypes.bfloat16),
    "torch": torch.tensor([1.0, 2]),
    "torch, bfloat16": torch.tensor([1.0, 2], dtype=torch.bfloat16),
    "torch, half": torch.tensor([1.0, 2], dtype=torch.float16),
    "torch, bool": torch.tensor([True, False]),
}


@pytest.mark.parametrize("name", HOST_ARRAYS)
@pytest.mark.usefixtures("here")
def test_arrays_of_the_host_are_copied(name):
    given = HOST_ARRAYS[name]
    placed = CupyBackend().place(given, "cuda:1")
    assert type(placed) is CudaArray
    assert placed.device.id == 1
    assert placed.dtype.name == str(given.dtype).removeprefix("torch.").replace(">f4", "float32")
    assert placed.dtype.isnative
    np.testing.assert_array_equal(
        placed.astype(float), [float(x) for x in np.ravel(given.tolist())]
    )


@pytest.mark.usefixtures("here")
def test_arrays_on_a_device_are_shared():
    cuda, memory = CupyBackend(), np.arange(3.0)
    for kind in (2, 13):
        for device in (None, "cuda:1"):
            placed = cuda.place(Foreign(memory, kind, 1), device)
            assert np.shares_memory(placed, memory)
            assert placed.device.id == 1
    moved = cuda.place(Foreign(memory, 2, 1), "cuda:0")
    assert (moved.device.id, np.shares_memory(moved, memory)) == (0, False)
    np.testing.assert_array_equal(moved, memory)


@pytest.mark.usefixtures("here")
def test_a_kernel_runs_on_the_device_of_the_query():
    cuda = CupyBackend()
    query = cuda.place(X, "cuda:1")
    operands = types.SimpleNamespace(query=query)
    here = lambda *given: (Device.current, given[-1])  # noqa: E731
    here.poison_safe = True
    kernel = types.SimpleNamespace(jvp=here, backward=here, weights=here)
    problem = types.SimpleNamespace(library="cupy")
    for run, given in (
        (cuda.run, (here, problem, operands)),
        (cuda.run_jvp, (kernel, problem, operands, None, None)),
        (cuda.run_backward, (kernel, problem, operands, None, None)),
        (cuda.run_weights, (kernel, problem, operands, None)),
    ):
        assert run(*given) == (1, cuda)
        assert Device.current == 0


@pytest.mark.usefixtures("here")
def test_primitives():
    cuda = CupyBackend()
    scores = np.array([[1.0, 2, -np.inf], [-np.inf] * 3])
    before = scores.copy()
    weights, maximum, total = cuda.softmax(scores)
    np.testing.assert_array_equal(scores, before)
    np.testing.assert_allclose(weights, [[np.exp(-1), 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(maximum, [[2], [-np.inf]])
    np.testing.assert_allclose(total, [[np.exp(-1) + 1], [0]])
    np.testing.assert_array_equal(cuda.matmul(np.eye(3), X[0]), X[0])
    assert not cuda.is_eager(at_home(X))
    problem = types.SimpleNamespace(
        scores=(2, 5, 9), value_size=4, accumulator="float32", features={"logsumexp"}
    )
    blocks = [(np.full((2, n, 4), n), np.full((2, n), -n)) for n in (2, 3)]
    output, logsumexp = cuda.stack_rows(problem, at_home(X), blocks)
    assert [row[0] for row in output[1]] == [2, 2, 3, 3, 3]
    assert list(logsumexp[0]) == [-2, -2, -3, -3, -3]
    problem.features = set()
    assert cuda.stack_rows(problem, at_home(X), [(b, None) for b, _ in blocks])[1] is None


def test_what_is_not_here_is_not_among_the_engines(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    monkeypatch.setattr(loading, "library", loading.library.__wrapped__)
    assert loading.versions() == {}


def test_cupy_has_what_its_stand_ins_have():
    here = stand_in(alloc=None, get_current_stream=None)
    for name in vars(here):
        assert hasattr(cupy, name), name
    for name, value in vars(here.cuda).items():
        there = getattr(cupy.cuda, name)
        for inner in vars(value) if isinstance(value, types.SimpleNamespace) else ():
            assert hasattr(there, inner), f"{name}.{inner}"
    for name in ("getDeviceProperties", "runtimeGetVersion", "getDeviceCount", "CUDARuntimeError"):
        assert hasattr(cupy.cuda.runtime, name)
    assert hasattr(cupy.cuda.Device, "compute_capability")
    for name, code in (("16F", 2), ("16BF", 14), ("32F", 0), ("64F", 1)):
        assert getattr(cupy.cuda.runtime, f"CUDA_R_{name}") == code


def test_a_record_goes_to_a_kernel_by_value():
    from cupy.cuda.function import CNumpyArray

    assert CNumpyArray(np.zeros((), softmax_cuda.ROWS)) is not None
    assert np.zeros((), softmax_cuda.ROWS).size == 1
