"""The library, dtype, device and shape of an array, and helpers for every library.

Only this module imports array-api-compat. Nothing here reads an array's values, or imports an array
library before one of its arrays is seen.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import array_api_compat

from polyattn._base.refused import CONVERSIONS, REFUSED
from polyattn._base.tracing import (
    comparable_length,
    constant_when_traced,
    is_compiling,
    shape_text,
    torch_is_imported,
)

Array = Any
Chunks = tuple[tuple[int, ...], ...]


class Library(NamedTuple):
    """The library of a class of arrays."""

    name: str  # the short name
    xp: Any  # the array API namespace, with what polyattn adds to it
    traced: bool = False  # whether these arrays are traced, lazy, or wrappers without own memory
    strided: Any = None  # the layout of an ordinary array, if the library has several


class ArrayFacts(NamedTuple):
    """The static facts of an array, known without reading its values."""

    library: str
    dtype: str
    device: str
    shape: tuple[int, ...]
    requires_grad: bool = False
    traced: bool = False
    chunks: Chunks | None = None  # the lengths of its chunks along each axis, if it is cut

    def __str__(self) -> str:
        return f"{shape_text(self.shape)} {self.dtype}"


# Modules that know the arrays of a library: imported when the first is seen. Each has a `LIBRARY`.
_INTEGRATED = {
    ("mlx", "array"): "polyattn.integrations.mlx",
    ("ndonnx", "Array"): "polyattn.integrations.ndonnx",
}

# Caches by class, which decides the library. Never emptied: a lost race only repeats the work.
_libraries: dict[type, Library] = {}
_dtype_names: dict[str, dict[Any, str]] = {}
#: The library of tensors of torch, by whether their class has its own dispatch.
_tensors: dict[bool, Library] = {}

_SHORT_NAMES = {"jax.numpy": "jax", "dask.array": "dask", "mlx.core": "mlx"}
LONG_NAMES = {short: long for long, short in _SHORT_NAMES.items()}


def library_of(array: Array, name: str = "array") -> Library:
    """Return the library of `array`; errors refer to the array as `name`."""
    cls = type(array)
    compiles = is_compiling()
    if compiles and (dispatches := _tensor_dispatches(cls)) is not None:
        return _tensors[dispatches]
    library = _libraries.get(cls)
    if library is None:
        reason = _reason_against(cls)
        if reason is not None:
            raise TypeError(f"{name} {reason.format(_argument(name))}")
        dispatches = _tensor_dispatches(cls)
        library = _standard_library(array, name) if dispatches is None else _tensors[dispatches]
        if not compiles:  # a program would repeat the change in each run
            _libraries[cls] = library
    return library


def _argument(name: str) -> str:
    """Return the argument in a name such as ``masks.padding: key_lengths``."""
    return name.rpartition(": ")[2]


def check_library(name: str, value: Any) -> None:
    """Raise for what looks like an array of no library that attention takes."""
    is_new = not _is_known(type(value)) and is_array(value)
    if is_new and not (isinstance(value, ArrayFacts) or is_compiling()):
        library_of(value, name)


@constant_when_traced
def _is_known(cls: type) -> bool:
    return cls in _libraries


def is_namespace(library: str) -> bool:
    """Return whether a library of this name can have arrays; imports it."""
    try:
        module = importlib.import_module(LONG_NAMES.get(library, library))
    except (ImportError, ValueError):  # an empty name is a ValueError
        return False
    return hasattr(module, "matmul") and hasattr(module, "asarray")


@constant_when_traced
def _reason_against(cls: type) -> str | None:
    if cls.__module__.startswith("dask.array._array_expr"):
        return REFUSED["dask", "ArrayExpr"]
    return next((REFUSED[key] for key in _names(cls) if key in REFUSED), None)


def _names(cls: type) -> list[tuple[str, str]]:
    return [(c.__module__.partition(".")[0], c.__name__) for c in cls.__mro__]


@constant_when_traced
def _tensor_dispatches(cls: type) -> bool | None:
    """Return whether a class of tensors has its own dispatch; None for other classes."""
    # Decided by the class, and stored in a dict that the traced code has not read before, so that
    # even the first call of a program may be traced by torch.compile. It sees no later change of
    # the dict, so that it must be complete.
    if not any(c.__module__ == "torch" and c.__name__ == "Tensor" for c in cls.__mro__):
        return None
    xp = importlib.import_module("array_api_compat.torch")
    torch_is_imported()
    torch = sys.modules["torch"]
    # A tensor of a class with its own dispatch, such as FakeTensor, may hold no data.
    if not _tensors:
        _tensors.update({own: Library("torch", xp, own, torch.strided) for own in (False, True)})
    tensor_class: Any = cls
    return tensor_class.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def numpy_namespace() -> Any:
    """Return NumPy itself, which has what polyattn calls of the standard since 2.1.

    To import the namespace of array-api-compat imports all of NumPy, such as f2py: that takes as
    long as importing the rest of polyattn.
    """
    numpy = importlib.import_module("numpy")
    is_whole = hasattr(numpy, "cumulative_sum")
    return numpy if is_whole else importlib.import_module("array_api_compat.numpy")


def _standard_library(array: Array, name: str) -> Library:
    classes = type(array).__mro__
    for key in _names(type(array)):
        if key in _INTEGRATED:
            known: Library = importlib.import_module(_INTEGRATED[key]).LIBRARY
            return known
    try:
        of_numpy = array_api_compat.is_numpy_array(array)
        xp = numpy_namespace() if of_numpy else array_api_compat.array_namespace(array)
    except TypeError:
        root, kind = _names(type(array))[0]
        whole = kind if root == "builtins" else f"{root}.{kind}"
        hint = CONVERSIONS.get(root, "convert it first, for example by numpy.asarray({0})")
        raise TypeError(
            f"{name} is of type {whole}, not an array of a library that follows the array API"
            f" standard; {hint.format(_argument(name))}"
        ) from None
    library = xp.__name__.removeprefix("array_api_compat.")
    library = _SHORT_NAMES.get(library, library)
    traced = any(c.__name__ == "Tracer" and c.__module__.startswith("jax") for c in classes)
    return Library(library, xp, traced or library == "dask")


def facts_of(array: Array, name: str = "array") -> ArrayFacts:
    """Return the facts of `array`; errors refer to the array as `name`."""
    library = library_of(array, name)
    if library.strided is not None and array.is_nested:
        raise TypeError(
            f"{name} is a nested tensor: put its parts after one another along the length, and pass"
            " mask=masks.segments(ids), with the number of the part of each token"
        )
    if library.strided is not None and (array.layout is not library.strided or array.is_quantized):
        ordinary = "dequantize" if array.is_quantized else "to_dense"
        raise TypeError(
            f"{name} is a sparse, quantized or otherwise special tensor; attention takes"
            f" ordinary ones, such as {name}.{ordinary}()"
        )
    return ArrayFacts(
        library.name,
        _dtype_name(library.name, array.dtype),
        _device_name(library, array),
        _known_lengths(library, array.shape),
        bool(getattr(array, "requires_grad", False)),
        library.traced,
        array.chunks if library.name == "dask" else None,
    )


def as_facts(array: Array | ArrayFacts, name: str = "array") -> ArrayFacts:
    """Return the facts of an array, or facts that are given in its place."""
    return array if isinstance(array, ArrayFacts) else facts_of(array, name)


def _known_lengths(library: Library, shape: tuple[Any, ...]) -> tuple[int, ...]:
    """Return a shape with None for each length that a program leaves open.

    All that is decided by lengths would compare the symbol with a number: JAX refuses that, and
    torch keeps the answer for the length of its example, or has none.
    """
    if library.traced:  # dask's unknown length is the float NaN
        return tuple([n if isinstance(n, (int, float)) else None for n in shape])  # type: ignore[misc]
    if library.strided is not None and is_compiling():
        return tuple([comparable_length(n) for n in shape])  # type: ignore[misc]
    return tuple(shape)


@constant_when_traced
def _dtype_name(library: str, dtype: Any) -> str:
    # One dict per library: dtypes of two libraries may have equal hashes, but cannot be compared.
    names = _dtype_names.setdefault(library, {})
    name = names.get(dtype)
    if name is None:
        name = names[dtype] = getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]
    return name


def _device_name(library: Library, array: Array) -> str:
    if library.name == "jax":
        # JAX chooses the device of an array unless the array was committed to one.
        return _jax_device_name(array.device) if not library.traced and array.committed else ""
    if library.name == "cupy":
        return f"cuda:{array.device.id}"
    if library.name == "ndonnx":  # whose only device is an object without a name
        return "graph"
    return str(getattr(array, "device", ""))


def _jax_device_name(device: Any) -> str:
    platform = getattr(device, "platform", None)
    if platform is None:  # a sharding over several devices
        return ""
    # JAX's platform "gpu" is CUDA or ROCm; the text of the device, "cuda:0", says which.
    return str(device) if platform == "gpu" else f"{platform}:{device.id}"


def is_array(thing: Any) -> bool:
    """Return whether this is an array of any library, or an `ArrayFacts`."""
    # Only the type of a number that torch.compile keeps as a symbol can be inspected.
    if thing is None or isinstance(thing, (bool, int, float)):
        return False
    return hasattr(thing, "shape") and hasattr(thing, "dtype")


def sum_to(xp: Any, array: Array, shape: tuple[int, ...]) -> Array:
    """Sum an array over the axes along which one of this shape was broadcast to it."""
    extra = len(array.shape) - len(shape)
    if extra:
        array = xp.sum(array, axis=tuple(range(extra)))
    axes = tuple(n for n, size in enumerate(shape) if size == 1 and array.shape[n] != 1)
    return xp.sum(array, axis=axes, keepdims=True) if axes else array


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape that these shapes broadcast to, or None if they do not.

    An unknown length, None, is taken to be that of the others, if it is not theirs to be 1.
    """
    rank = max(len(shape) for shape in shapes)
    common = [1] * rank
    for shape in shapes:
        for axis, length in enumerate(shape, start=rank - len(shape)):
            if common[axis] == 1 or (common[axis] is None and length != 1):
                common[axis] = length
            elif not is_one_of(length, 1, None, common[axis]):
                return None
    return tuple(common)


def is_one_of(length: int | None, *lengths: int | None) -> bool:
    """Return whether a length is one of some, any of which torch.compile may hold as a symbol.

    It takes ``5 in (1, symbol)`` for False, whatever the symbol is (pytorch#153366).
    """
    for one in lengths:  # noqa: SIM110 -- which torch.compile traces
        if length == one:
            return True
    return False


def length_of(array: Array, axis: int) -> Any:
    """Return the length of an axis; an array without axes if the shape does not have it."""
    length = array.shape[axis]
    return array.dynamic_shape[axis] if length is None else length


def are_one_length(one: Any, other: Any) -> bool:
    """Return whether two lengths are equal, also where both are the same symbol of an export."""
    equal = one == other
    if isinstance(equal, bool):
        return equal
    shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return bool(shapes.statically_known_true(equal))


def clip(xp: Any, array: Array, low: Any, high: Any) -> Array:
    """Limit the numbers of an array."""
    # array_api_compat's function waits for CuPy's device, and fails for lengths of torch.compile.
    own = library_of(array).name in ("cupy", "torch")
    return array.clip(low, high) if own else xp.clip(array, low, high)


def cast(xp: Any, array: Array, dtype: Any) -> Array:
    """Return `array` in `dtype`, without the copy that the standard's astype always makes."""
    return array if array.dtype == dtype else xp.astype(array, dtype)


def accumulator_of(dtype: str) -> str:
    """Return the dtype of scores, sums and logsumexp for arrays of this one."""
    return "float64" if dtype == "float64" else "float32"


def with_rank(array: Array, rank: int) -> Array:
    """Return an array with axes of length 1 before its own, so that it has at least `rank` axes.

    Arrays of one rank broadcast in every library; JAX can be told to refuse others.
    """
    missing = rank - len(array.shape)
    if missing <= 0:
        return array
    library = library_of(array)
    if library.name == "jax":  # where an index takes twice the time
        return library.xp.expand_dims(array, tuple(range(missing)))
    return array[(*[None] * missing, ...)]


def index_range(xp: Any, start: int, stop: Any, like: Array) -> Array:
    """Return the integers from `start` to `stop` (exclusive), on the device of `like`."""
    device = _on_device_of(xp, like)
    if device and is_compiling() and comparable_length(stop) is None:
        xp = sys.modules["torch"]  # array_api_compat's function compares the two
    return xp.arange(start, stop, **device)


def zeros(xp: Any, shape: tuple[int, ...], dtype: Any, like: Array) -> Array:
    """Return an array of zeros on the device of `like`."""
    return xp.zeros(shape, dtype=dtype, **_on_device_of(xp, like))


def as_index(xp: Any, numbers: Array) -> Array:
    """Return integers in the dtype of `index_range`, or in int64."""
    # A narrow dtype may not hold the positions that it is compared with, and torch computes little
    # in an unsigned one. On a GPU the range, which only tells its dtype, takes as long as a large
    # operation.
    if numbers.dtype == xp.int64:
        return numbers
    if library_of(numbers).name in ("numpy", "torch"):
        return cast(xp, numbers, xp.int64)
    return cast(xp, numbers, index_range(xp, 0, 1, numbers).dtype)


def as_count(xp: Any, numbers: Array) -> Array:
    """Return counts in the dtype of `as_index`; those that it cannot hold become its largest."""
    counts = as_index(xp, numbers)
    if counts is numbers or "uint" not in str(numbers.dtype):
        return counts
    return xp.where(counts < 0, xp.full_like(counts, int(xp.iinfo(counts.dtype).max)), counts)


def numbers_like(xp: Any, numbers: Any, dtype: Any, like: Array) -> Array:
    """Return a sequence or NumPy array of numbers as an array, on the device of `like`."""
    return xp.asarray(numbers, dtype=dtype, **_on_device_of(xp, like))


def _on_device_of(xp: Any, like: Array) -> dict[str, Any]:
    # NumPy has one device, which torch.compile does not know; jax.numpy places what it traces.
    device = None if xp.__name__.endswith("numpy") else getattr(like, "device", None)
    return {} if device is None else {"device": device}


def quiet(library: str) -> AbstractContextManager[Any]:
    """Silence NumPy's floating-point warnings, also where another library runs on NumPy.

    exp underflows to 0 by design, and a masked key may hold any number.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None or library in ("torch", "jax", "cupy"):
        return contextlib.nullcontext()
    errstate: AbstractContextManager[Any] = numpy.errstate(all="ignore")
    return errstate
