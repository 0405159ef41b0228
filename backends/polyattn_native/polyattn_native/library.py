"""The compiled library, and its structures as `src/interface.h` declares them."""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DTYPES = ("float32", "float64", "float16", "bfloat16")
#: Of the interface, and of what programs of torch.compile know of results, such as their strides.
VERSION = 9
#: Names a lower instruction set than the processor's best.
VARIABLE = "POLYATTN_NATIVE_ISA"


class CArray(ctypes.Structure):
    """An array with the axes (item, head, row, column); strides count elements."""

    _fields_ = (
        ("data", c_void_p),
        ("offsets", c_void_p),
        ("item", c_int64),
        ("head", c_int64),
        ("row", c_int64),
        ("column", c_int64),
    )


class CCall(ctypes.Structure):
    """A call."""

    _fields_ = (
        *((n, c_int64) for n in ("items", "heads", "key_heads", "rows", "keys")),
        *((n, c_int64) for n in ("head_size", "value_size")),
        ("dtype", c_int32),
        ("threads", c_int32),
        *((n, CArray) for n in ("query", "key", "value", "output", "logsumexp")),
        ("table", CArray),
        ("page", c_int64),
        ("key_steps", CArray),
        ("value_steps", CArray),
        ("step_keys", c_int64),
        ("scale", c_double),
        ("softcap", c_double),
        ("has_low", c_int32),
        ("has_high", c_int32),
        ("low", c_int64),
        ("high", c_int64),
        ("positions", c_void_p),
        ("first", CArray),
        ("stop", CArray),
        ("ranges", c_int64),
        ("mask", CArray),
        *((n, CArray) for n in ("by_distance", "bias")),
        ("sinks", c_void_p),
        ("seed", c_void_p),
        ("threshold", c_uint32),
        ("keep", c_double),
        *((n, CArray) for n in ("output_gradient", "logsumexp_gradient")),
        *((n, CArray) for n in ("query_gradient", "key_gradient", "value_gradient")),
        *((n, CArray) for n in ("delta", "softcap_gradient")),
        *((n, CArray) for n in ("by_distance_gradient", "bias_gradient")),
        ("is_part", c_int32),
        ("adds", c_int32),
        ("same_bits", c_int32),
        ("together", c_int64),
    )


def check_platform(byteorder: str = sys.byteorder) -> None:
    """Raise unless the processor is little-endian, and polyattn is of the same release."""
    if byteorder != "little":
        raise ImportError(
            f"polyattn-native needs a little-endian processor; this one is {byteorder}-endian:"
            " uninstall polyattn-native"
        )
    try:
        names = ("polyattn", "polyattn-native")
        versions = {name: version(name) for name in names}
    except PackageNotFoundError:  # run from a folder on the path
        return
    releases = {name: tuple(map(int, x.split(".")[:2])) for name, x in versions.items()}
    older = min(names, key=releases.__getitem__)
    newer = max(names, key=releases.__getitem__)
    if releases[older] != releases[newer]:
        said = " and ".join(f"{name} {versions[name]}" for name in names)
        release = ".".join(map(str, releases[newer]))
        raise ImportError(
            f"{said} are of two releases: pip install --upgrade --pre '{older}=={release}.*'"
        )


check_platform()


@cache
def library() -> ctypes.CDLL:
    """Return the library that was built with this package."""
    name = {"win32": "polyattn_native.dll", "darwin": "libpolyattn_native.dylib"}
    found = load(Path(__file__).parent / name.get(sys.platform, "libpolyattn_native.so"))
    wanted = os.environ.get(VARIABLE)
    if wanted:
        use(found, wanted)
    return found


def instruction_sets(library: ctypes.CDLL) -> tuple[str, ...]:
    """Return the instruction sets of this processor that the library knows, best first."""
    names: bytes = library.polyattn_instruction_sets()
    return tuple(names.decode().split())


def use(library: ctypes.CDLL, instruction_set: str) -> None:
    """Use an instruction set from now on, or raise."""
    if not library.polyattn_use(instruction_set.encode()):
        known = ", ".join(instruction_sets(library))
        raise ValueError(f"{VARIABLE} may be {known} on this processor; got {instruction_set!r}")


def load(path: Path) -> ctypes.CDLL:
    """Return the library with the types of its functions, or raise if it is of another version."""
    library = ctypes.CDLL(str(path))
    library.polyattn_version.restype = library.polyattn_call_size.restype = c_int64
    if (library.polyattn_version(), library.polyattn_call_size()) != (
        VERSION,
        ctypes.sizeof(CCall),
    ):
        raise ImportError(f"{path} belongs to another release of polyattn-native: install it again")
    call, state = POINTER(CCall), POINTER(c_void_p)
    for name in ("attend", "differentiate"):
        getattr(library, f"polyattn_{name}").argtypes = (call, state)
    for name in ("attend_at", "attend_to"):
        getattr(library, f"polyattn_{name}").argtypes = (call, c_int64, *(c_void_p,) * 5, state)
    library.polyattn_multiply.argtypes = (c_void_p, c_int64, *(c_void_p,) * 4, state)
    library.polyattn_share.argtypes = library.polyattn_cancel.argtypes = (state,)
    library.polyattn_share.restype = c_double
    library.polyattn_cancel.restype = None
    library.polyattn_instruction_sets.restype = c_char_p
    library.polyattn_use.argtypes = (c_char_p,)
    return library
