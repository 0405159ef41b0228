"""The part of capabilities.md on what `attention` does with the arrays of each library."""

import importlib
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polyattn import attention, explain

PAGE = Path(__file__).with_name("capabilities.md")
#: Float32, (heads, tokens, size); in the table's code `x` is this array, or `x[0]` a table.
X = np.random.default_rng(0).standard_normal((2, 3, 4), dtype=np.float32)
NOT_TRIED = "*not tried*"


class Kind(NamedTuple):
    """A type of array: the module that it needs, and how it is made of `x`."""

    module: str
    made: str


KINDS = {
    # ---- NumPy and what is on the host ----
    "`numpy.ndarray`": Kind("numpy", "x"),
    "`numpy.ndarray` of int64": Kind("numpy", "x.astype(int)"),
    "`numpy.ndarray` of longdouble": Kind("numpy", "x.astype(numpy.longdouble)"),
    "`numpy.ndarray` of ml_dtypes' bfloat16": Kind("ml_dtypes", "x.astype(ml_dtypes.bfloat16)"),
    "`numpy.ndarray` of ml_dtypes' float8": Kind("ml_dtypes", "x.astype(ml_dtypes.float8_e4m3fn)"),
    "a subclass, such as `numpy.memmap`": Kind("numpy", "x.view(numpy.memmap)"),
    "`numpy.matrix`": Kind("numpy", "numpy.asmatrix(x[0])"),
    "`numpy.ma.MaskedArray`": Kind("numpy", "numpy.ma.masked_less(x, 0)"),
    "a list": Kind("numpy", "x.tolist()"),
    "`pandas.DataFrame`": Kind("pandas", "pandas.DataFrame(x[0])"),
    "`polars.DataFrame`": Kind("polars", "polars.DataFrame(x[0])"),
    "`xarray.DataArray`": Kind("xarray", "xarray.DataArray(x)"),
    "`scipy.sparse.csr_array`": Kind("scipy.sparse", "scipy.sparse.csr_array(x[0])"),
    # ---- torch ----
    "`torch.Tensor`": Kind("torch", "torch.asarray(x)"),
    "`torch.nn.Parameter`": Kind("torch", "torch.nn.Parameter(torch.asarray(x))"),
    "torch, on the device meta": Kind("torch", "torch.asarray(x).to('meta')"),
    "torch, nested": Kind("torch", "torch.nested.nested_tensor([torch.asarray(y) for y in x])"),
    "torch, sparse": Kind("torch", "torch.asarray(x).to_sparse()"),
    "torch, quantized": Kind(
        "torch", "torch.quantize_per_tensor(torch.asarray(x), 0.1, 0, torch.qint8)"
    ),
    "`torch.masked.MaskedTensor`": Kind(
        "torch.masked", "torch.masked.masked_tensor(torch.asarray(x), torch.asarray(x > 0))"
    ),
    "`torch.distributed.tensor.DTensor`": Kind(
        "torch.distributed.tensor", "torch.asarray(x).as_subclass(torch.distributed.tensor.DTensor)"
    ),
    # ---- other frameworks ----
    "`jax.Array`": Kind("jax.numpy", "jax.numpy.asarray(x)"),
    "`jax.experimental.sparse.BCOO`": Kind(
        "jax.experimental.sparse", "jax.experimental.sparse.BCOO.fromdense(x)"
    ),
    "`cupy.ndarray`": Kind("cupy", "cupy.asarray(x)"),
    "`mlx.core.array`": Kind("mlx.core", "mlx.core.array(x)"),
    "`tensorflow.Tensor`": Kind("tensorflow", "tensorflow.constant(x)"),
    "`tinygrad.Tensor`": Kind("tinygrad", "tinygrad.Tensor(x)"),
    # ---- libraries of the standard ----
    "`array_api_strict.Array`": Kind("array_api_strict", "array_api_strict.asarray(x)"),
    "`ndonnx.Array`": Kind("ndonnx", "ndonnx.asarray(x)"),
    "`dpnp.ndarray`": Kind("dpnp", "dpnp.asarray(x)"),
    "`sparse.COO`": Kind("sparse", "sparse.COO(x)"),
    # ---- chunks and files ----
    "`dask.array.Array`": Kind("dask.array", "dask.array.from_array(x)"),
    "`dask_array.Array`": Kind("dask_array", "dask_array.from_array(x)"),
    "`cubed.Array`": Kind("cubed.array_api", "cubed.array_api.asarray(x)"),
    "`blosc2.NDArray`": Kind("blosc2", "blosc2.asarray(x)"),
    "`zarr.Array`": Kind("zarr", "zarr.array(x)"),
    "`h5py.Dataset`": Kind(
        "h5py",
        "h5py.File('x', 'w', driver='core', backing_store=False).create_dataset('x', data=x)",
    ),
}

COMMON = "not an array of a library that follows the array API standard"
INTRODUCTION = """## What happens with my arrays

Arrays of a library that [follows the array API standard](https://data-apis.org/array-api/) run on
their own library: as `array-api` where polyattn has no backend for it. *Not tried* are libraries
that were not installed when the page was written, or had no device. … stands for "not an array of a
library that follows the array API standard".

Kernels are written for the standard's revision 2024.12. A library of an older one runs the calls
that it can; an error names its revision in the others.

A mask, lengths or a bias may be [NumPy arrays and Python
sequences](semantics.md#numbers-from-the-host) beside a query of any library.

"""


def outcome(kind: Kind) -> str | None:
    """Return what happens with a type of array, or None if there can be none here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(kind.module)
            package = kind.module.partition(".")[0]
            names = {"x": X, "numpy": np, package: importlib.import_module(package)}
            query = eval(kind.made, names)
        except (AttributeError, NameError, TypeError):
            raise  # a mistake in the table
        except Exception:  # it is not installed, or has no device
            return None
        try:
            return f"runs on `{ran_on(query)}`"
        except Exception as error:
            return f"`{type(error).__name__}`: {cell(str(error))}"


def ran_on(query: Any) -> str:
    """Return the backend that computes attention over an array."""
    assert type(attention(query, query, query)).__module__
    chosen = explain(query, query, query).chosen
    assert chosen is not None
    return chosen.backend


def cell(message: str) -> str:
    """Return the first line of a message, as text of a table, without what most have."""
    short = message.partition("\n")[0].replace(COMMON, "…")
    return re.sub(r"([*_|<])", r"\\\1", short)


def written() -> dict[str, str]:
    """Return the outcomes on the page, by type."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    table = text.partition(INTRODUCTION)[2].partition("|---|---|\n")[2]
    return dict(re.findall(r"^\| (.+?) \| (.+) \|$", table, flags=re.MULTILINE))


def section(outcomes: dict[str, str]) -> str:
    """Return the part of the page."""
    lines = ["| type of the query | what happens |", "|---|---|"]
    lines += [f"| {name} | {outcomes.get(name, NOT_TRIED)} |" for name in KINDS]
    return INTRODUCTION + "\n".join(lines) + "\n"


def outcomes() -> dict[str, str]:
    """Return what happens with each type; one that cannot be made here keeps what the page says."""
    found = {name: outcome(kind) for name, kind in KINDS.items()}
    return written() | {name: what for name, what in found.items() if what is not None}
