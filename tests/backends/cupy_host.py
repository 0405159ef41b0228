"""CuPy's kernels without a GPU: their arrays are the host's.

A kernel hands addresses to a library and knows nothing of what is there, so the same addresses
serve a library that computes on the host: that of `cublas_host`.
"""

import importlib
import sys
import types

import array_api_compat.numpy
import numpy as np

from polyattn._base import arrays
from polyattn._dispatch import cache, entries, registry
from polyattn.plugin import CONTRACT_VERSION, Backend, BackendSpec


class HostArray(np.ndarray):
    """A NumPy array that tells its address as CuPy's do."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.__array_interface__["data"][0])


def as_host(array):
    return np.asarray(array).view(HostArray)


def full(shape, number, dtype):
    """Return aligned memory; without a number it is NaN, to show what nobody writes."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(size + 512, 0xFF, np.uint8)  # NaN of every dtype
    first = -memory.__array_interface__["data"][0] % 512
    array = as_host(memory[first : first + size].view(dtype).reshape(shape))
    if number is not None:
        array[...] = number
    return array


def stand_in():
    """Return what the kernels use of CuPy."""
    return types.SimpleNamespace(
        empty=lambda shape, dtype: full(shape, None, dtype),
        zeros=lambda shape, dtype: full(shape, 0, dtype),
        broadcast_to=lambda array, shape: as_host(np.broadcast_to(array, shape)),
        reshape=lambda array, shape: array.reshape(shape),
        ascontiguousarray=lambda array: as_host(np.ascontiguousarray(array)),
        where=where,
        copyto=np.copyto,
        sum=np.sum,
        cuda=types.SimpleNamespace(
            device=types.SimpleNamespace(get_cublas_handle=lambda: "handle")
        ),
    )


def where(condition, *arrays):
    """Choose, but not of bfloat16, of which CuPy's gives wrong numbers."""
    assert all(getattr(x, "dtype", None) != "bfloat16" for x in arrays)
    return as_host(np.where(condition, *arrays))


class HostBackend(Backend):
    """The kernels' backend."""

    def __init__(self):
        functions = dict(vars(array_api_compat.numpy))
        functions["arange"] = lambda *args, **options: as_host(np.arange(*args, **options))
        functions["where"] = where
        super().__init__(types.SimpleNamespace(**functions))

    def zeroed(self, array, keep):
        return importlib.import_module("polyattn_cupy.arrays").zeroed(array, keep)

    def devices(self):
        return ["cuda:0"]

    def place(self, array, device):
        return as_host(array)

    def fetch(self, array):
        return np.asarray(array)


class _Entry(entries.Entry):
    def load(self):
        return BackendSpec(
            "host", ("host",), "here:HostBackend", (), "", CONTRACT_VERSION, devices=("cuda",)
        )


def register(monkeypatch, kernel):
    """Make a kernel that of the backend `host` for the length of a test."""
    genuine = registry.entries
    monkeypatch.setattr(
        registry, "entries", lambda: [_Entry("host", "here:SPEC", "here"), *genuine()]
    )
    monkeypatch.setitem(sys.modules, "host", array_api_compat.numpy)
    monkeypatch.setitem(sys.modules, "here", types.SimpleNamespace(HostBackend=HostBackend))
    monkeypatch.setattr(HostBackend, "kernels", (kernel,))
    monkeypatch.setattr(registry, "_plugins", {})
    cache.forget()
    library = arrays.Library("host", array_api_compat.numpy)
    monkeypatch.setitem(arrays._libraries, HostArray, library)
