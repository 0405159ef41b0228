"""What the core knows of an array: its library, dtype and device.

The only module that imports array-api-compat. Nothing here reads an array's values, and no array
library is imported on behalf of an array that does not come from it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import array_api_compat

__all__ = [
    "Array",
    "ArrayFacts",
    "Library",
    "broadcast_shapes",
    "cast",
    "constant_when_traced",
    "facts_of",
    "index_range",
    "is_array",
    "is_compiling",
    "library_of",
    "quiet",
    "torch_transforms",
]

Array = Any
_F = TypeVar("_F", bound=Callable[..., Any])


def constant_when_traced(function: _F) -> _F:
    """Let torch.compile run `function` while it traces, and keep its result as a constant.

    It may take and return only what never changes for one program: names, classes, dtypes.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_compiling() -> bool:
    """Whether torch.compile is tracing the caller."""
    torch = _torch()
    return torch is not None and bool(torch.compiler.is_compiling())


def _torch() -> Any:
    # Not from sys.modules: another thread may be in the midst of importing it, and torch.compile
    # cannot trace a table that grows. A tensor that was seen says that it is whole.
    return _modules.get("torch")


def torch_transforms() -> frozenset[str]:
    """Return which of ``vmap``, ``grad`` and ``jvp`` of torch.func are at work on the caller.

    Where torch keeps this elsewhere, none are seen: then a kernel without a rule for them fails by
    torch's own message.
    """
    torch = _torch()
    if torch is None or torch.compiler.is_compiling():
        return frozenset()
    functorch = getattr(torch._C, "_functorch", None)
    stack = getattr(functorch, "get_interpreter_stack", lambda: None)()
    found = {interpreter.key().name.lower() for interpreter in stack or ()}
    if getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0:
        found.add("jvp")
    return frozenset(found)


class Library(NamedTuple):
    """An array library, as far as the class of an array tells.

    Attributes
    ----------
    name : str
        Its short name.
    xp : module
        Its standard namespace.
    traced : bool
        Whether arrays of this class have no values yet, or only lazily, or not in their own memory.
    strided : Any
        What the layout of an ordinary array is, where a library has others; or None.
    """

    name: str
    xp: Any
    traced: bool = False
    strided: Any = None


class ArrayFacts(NamedTuple):
    """What can be said of an array without reading it."""

    library: str
    dtype: str
    device: str
    shape: tuple[int, ...]
    requires_grad: bool = False
    traced: bool = False

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


# A class decides its library, so each is asked once. Filled, never emptied: a lost race only
# repeats the work.
_libraries: dict[type, Library] = {}
_tensors: dict[type, Library] = {}
_modules: dict[str, Any] = {}
_dtype_names: dict[str, dict[Any, str]] = {}

_SHORT_NAMES = {"jax.numpy": "jax", "dask.array": "dask"}

# Classes that look like arrays, and mean something else than the numbers that they hold.
_REFUSED = {
    ("numpy", "matrix"): "is a numpy.matrix, whose * and shapes are not an array's; pass"
    " numpy.asarray({0})",
    ("numpy", "MaskedArray"): "is a masked array, whose mask would be lost; pass {0}.data, and say"
    " with mask= which keys take part",
    ("torch", "MaskedTensor"): "is a masked tensor, whose mask would be lost; pass"
    " {0}.get_data(), and say with mask= which keys take part",
    ("torch", "CausalBias"): "is torch's CausalBias, which is no array: pass is_causal=True, and"
    " query_offset=0 for causal_upper_left",
    ("torch", "BlockMask"): "is torch's BlockMask, which is no array: pass the function that it was"
    " made of, its .mask_mod, in mask=",
}


def library_of(array: Array, name: str = "array") -> Library:
    """Return the library of `array`; `name` is what an error calls it."""
    cls = type(array)
    known = _libraries.get(cls)
    if known is None:
        why = _why_refused(cls)
        if why is not None:
            raise TypeError(f"{name} {why.format(name)}")
        known = _tensors[cls] if _is_tensor(cls) else _learn(array, name)
        _libraries[cls] = known
    return known


@constant_when_traced
def _why_refused(cls: type) -> str | None:
    keys = [(c.__module__.partition(".")[0], c.__name__) for c in cls.__mro__]
    return next((_REFUSED[key] for key in keys if key in _REFUSED), None)


@constant_when_traced
def _is_tensor(cls: type) -> bool:
    # By class alone, and into a table of its own that nothing has read before, so that the first
    # call of all may be one that torch.compile traces.
    if not any(c.__module__ == "torch" and c.__name__ == "Tensor" for c in cls.__mro__):
        return False
    xp = importlib.import_module("array_api_compat.torch")
    torch = _modules["torch"] = sys.modules["torch"]
    # A class that dispatches by itself, such as FakeTensor, has no numbers in memory of its own.
    own: Any = cls
    dispatches = own.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    _tensors[cls] = Library("torch", xp, dispatches, torch.strided)
    return True


def _learn(array: Array, name: str) -> Library:
    try:
        xp = array_api_compat.array_namespace(array)
    except TypeError:
        kind = type(array).__name__
        raise TypeError(
            f"{name} is a {kind}, not an array of a library that follows the array API standard;"
            " convert it first, for example by numpy.asarray"
        ) from None
    library = xp.__name__.removeprefix("array_api_compat.")
    library = _SHORT_NAMES.get(library, library)
    classes = type(array).__mro__
    traced = any(c.__name__ == "Tracer" and c.__module__.startswith("jax") for c in classes)
    return Library(library, xp, traced or library == "dask")


@constant_when_traced
def _dtype_name(library: str, dtype: Any) -> str:
    # By library: dtypes of two libraries may have one hash and must not be compared.
    known = _dtype_names.setdefault(library, {})
    name = known.get(dtype)
    if name is None:
        name = known[dtype] = getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]
    return name


def facts_of(array: Array, name: str = "array") -> ArrayFacts:
    """Return the facts of `array`; `name` is what an error calls it."""
    library = library_of(array, name)
    if library.strided is not None and (
        array.layout is not library.strided or array.is_nested or array.is_quantized
    ):
        raise TypeError(
            f"{name} is a sparse, nested, quantized or otherwise special tensor; attention takes"
            f" ordinary ones, as of {name}.to_dense()"
        )
    return ArrayFacts(
        library.name,
        _dtype_name(library.name, array.dtype),
        _device_name(library, array),
        tuple(array.shape),
        bool(getattr(array, "requires_grad", False)),
        library.traced,
    )


def _device_name(library: Library, array: Array) -> str:
    if library.name == "jax":
        # It places arrays itself, but for those that were put somewhere on purpose.
        return _jax_device_name(array.device) if not library.traced and array.committed else ""
    if library.name == "cupy":
        return f"cuda:{array.device.id}"
    return str(getattr(array, "device", ""))


def _jax_device_name(device: Any) -> str:
    platform = getattr(device, "platform", None)
    if platform is None:  # a sharding over several
        return ""
    # What JAX calls a "gpu" may be CUDA's or ROCm's, which its text tells: "cuda:0".
    return str(device) if platform == "gpu" else f"{platform}:{device.id}"


def is_array(thing: Any) -> bool:
    """Whether this is an array of some library, or the facts of one."""
    # Of a number that torch.compile keeps as a symbol nothing but its type can be asked.
    if isinstance(thing, (bool, int, float)):
        return False
    return hasattr(thing, "shape") and hasattr(thing, "dtype")


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape that these broadcast to, or None if they do not."""
    rank = max(len(shape) for shape in shapes)
    common = [1] * rank
    for shape in shapes:
        for axis, length in enumerate(shape, start=rank - len(shape)):
            if common[axis] == 1:
                common[axis] = length
            elif length not in (1, common[axis]):
                return None
    return tuple(common)


def cast(xp: Any, array: Array, dtype: Any) -> Array:
    """Return `array` in `dtype`, itself where it has it: the standard's astype always copies."""
    return array if array.dtype == dtype else xp.astype(array, dtype)


def index_range(xp: Any, start: int, stop: int, like: Array) -> Array:
    """Return the integers from `start` to `stop` (exclusive), on the device of `like`."""
    device = getattr(like, "device", None)
    if device is None or array_api_compat.is_jax_namespace(xp):
        return xp.arange(start, stop)
    return xp.arange(start, stop, device=device)


def numbers_like(xp: Any, numbers: Any, dtype: Any, like: Array) -> Array:
    """Return a sequence or NumPy array of numbers as an array, on the device of `like`."""
    device = getattr(like, "device", None)
    if device is None or array_api_compat.is_jax_namespace(xp):
        return xp.asarray(numbers, dtype=dtype)
    return xp.asarray(numbers, dtype=dtype, device=device)


def quiet(library: str) -> AbstractContextManager[Any]:
    """Keep NumPy, under whatever library, from reporting what the formula means to happen.

    exp underflows to 0 by design, and a masked key may hold anything.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None or library in ("torch", "jax", "cupy"):
        return contextlib.nullcontext()
    errstate: AbstractContextManager[Any] = numpy.errstate(all="ignore")
    return errstate
