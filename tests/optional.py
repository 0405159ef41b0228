"""Run the tests with any of the libraries: what needs an absent one is skipped by its name.

A module that needs a library as a whole imports it as usual. One that needs it in some tests only
takes it from here: `from optional import jnp, torch`.
"""

import os
import re
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pkgutil import resolve_name

import pytest
from _pytest.doctest import MultipleDoctestFailures

LIBRARIES = {
    "array_api_strict", "autograd", "cupy", "dask", "distributed", "flax", "h5py",
    "jax", "keras", "matplotlib", "mlx", "mpi4py", "ndonnx", "onnx", "onnxruntime", "onnxscript",
    "safetensors", "spox", "tokenizers", "torch", "transformers", "xarray", "zarr",
}  # fmt: skip
ALIASES = (
    {
        "F": "torch.nn.functional",
        "TorchBackend": "polyattn_torch.backend:TorchBackend",
        "da": "dask.array",
        "flex": "torch.nn.attention.flex_attention",
        "jnp": "jax.numpy",
        "make_fx": "torch.fx.experimental.proxy_tensor:make_fx",
        "turn_halves": "transformers.models.llama.modeling_llama:apply_rotary_pos_emb",
        "turn_neighbours": "transformers.models.gptj.modeling_gptj:apply_rotary_pos_emb",
    }
    | {name: f"far_device:{name}" for name in ("DEVICE", "KIND", "far", "near", "reading")}
    | {
        name: f"torch.nn.attention.bias:{name}"
        for name in ("causal_lower_right", "causal_upper_left")
    }
)

HIDDEN = os.environ.get("POLYATTN_TEST_WITHOUT", "").split(",")


class Hiding(PathFinder):
    """The path without the hidden libraries."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        is_hidden = fullname.partition(".")[0] in HIDDEN
        return None if is_hidden else super().find_spec(fullname, path, target)


sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]


class Absent:
    """A library that is not installed, or a part of it: false, and a test that calls it skips."""

    def __init__(self, path):
        self.path, self.__name__ = path, path.rpartition(".")[2]

    def __getattr__(self, attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Absent(f"{self.path}.{attribute}")

    def __call__(self, *arguments, **options):
        pytest.skip(f"{self.path.partition('.')[0]} is not installed", allow_module_level=True)

    def __iter__(self):
        self()

    def __instancecheck__(self, x):
        return False

    def __mro_entries__(self, bases):
        return ()

    def __bool__(self):
        return False

    def __repr__(self):  # as in the name of a test, which all workers must give alike
        return self.path


def __getattr__(name):
    if name not in LIBRARIES | ALIASES.keys():
        raise AttributeError(name)
    try:
        return resolve_name(ALIASES.get(name, name))
    except ModuleNotFoundError as error:
        if library := lacking(error):
            return Absent(library)
        raise


def is_absent(name):
    return name in LIBRARIES and find_spec(name) is None


def lacking(error):
    """Return the absent library that an error is about, or None."""
    if isinstance(error, MultipleDoctestFailures):
        error = getattr(error.failures[0], "exc_info", (None, None))[1]
    for one in (error, getattr(error, "__cause__", None)):
        if isinstance(one, ModuleNotFoundError):
            names = [(one.name or "").partition(".")[0]]
        elif isinstance(one, AssertionError):  # about another thing
            names = []
        else:
            names = re.findall(r"(\w+)(?:, \w+)* (?:is|are) not installed", str(one))
        for name in filter(is_absent, names):
            return name
    return None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    excinfo = getattr(report, "call", None) and report.call.excinfo
    if name := excinfo and lacking(excinfo.value):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {name} is not installed")
        for module, one in list(sys.modules.items()):  # pytest leaves it there, half executed
            if getattr(one, "__file__", None) == str(collector.path):
                del sys.modules[module]
    return report


def pytest_runtest_setup(item):
    names = [name for mark in item.iter_markers("needs") for name in mark.args]
    for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
        if isinstance(value, Absent):
            value()
        if isinstance(value, str):
            names.append(value.partition(":")[0])
    for name in filter(is_absent, names):
        pytest.skip(f"{name} is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    return (yield from _skipped())


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    return (yield from _skipped())


def _skipped():
    try:
        return (yield)
    except Exception as error:
        if name := lacking(error):
            pytest.skip(f"{name} is not installed")
        raise
