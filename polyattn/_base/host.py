"""Numbers on the host: Python sequences, and NumPy arrays beside arrays of another library.

Lengths, ids, offsets and small tables often come from the host. `Destination` places them where
the query is; larger arrays the caller places, because a copy to a device at each call is slow.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

from polyattn._base.arguments import got
from polyattn._base.arrays import (
    Array,
    ArrayFacts,
    accumulator_of,
    check_library,
    facts_of,
    is_array,
    library_of,
    numbers_like,
)
from polyattn._base.tracing import (
    is_compiling,
    is_of_numpy,
    outside_inference,
    torch_is_imported,
)

#: Arrays of floats and bools with more entries are not placed.
MOST_PLACED = 2**16
# dask reads NumPy's arrays while it makes a graph, to leave out chunks that no row sees.
_ON_HOST = ("numpy", "dask")


def is_sequence(thing: Any) -> bool:
    """Return whether this is a Python sequence, such as could hold numbers."""
    return isinstance(thing, (list, tuple, range)) and not is_array(thing)


def is_host(thing: Any) -> bool:
    """Return whether this is an array or a number of NumPy."""
    return is_of_numpy(type(thing))


def is_unreadable(thing: Any) -> bool:
    """Return whether this is an array of NumPy that torch.compile traces, which has no dtype."""
    return is_host(thing) and torch_is_imported() and is_compiling()


def native(array: Any) -> Any:
    """Return an array of NumPy in the byte order of the machine, any other as it is.

    Not all functions of NumPy take another order, and no other library does.
    """
    if isinstance(array, int) or is_unreadable(array):  # torch.compile may hold a number as symbol
        return array
    dtype: Any = getattr(array, "dtype", None)
    return array if getattr(dtype, "isnative", True) else array.astype(dtype.newbyteorder("="))


def memory_of(array: Any) -> Any:
    """Return the bytes of a NumPy array, which a bytearray compares with at the speed of memory."""
    import numpy

    return numpy.ascontiguousarray(array).view("uint8")


def as_array(name: str, value: Any) -> Any:
    """Return a sequence of numbers as a NumPy array, and anything else as `native` does.

    What looks like an array and is none that attention takes, such as a masked array, is refused.
    """
    if not is_sequence(value):
        check_library(name, value)
        return native(value)
    import numpy

    if not _holds_numbers(value):
        raise TypeError(f"{name} must hold numbers, or be an array; {got(value)}")
    try:
        return numpy.asarray(value) if len(value) else numpy.asarray(value, dtype="int64")
    except (OverflowError, ValueError):
        raise ValueError(
            f"{name} must hold rows of one length and numbers of 64 bits; {got(value)}"
        ) from None


def _holds_numbers(value: Any) -> bool:
    if is_sequence(value):
        return isinstance(value, range) or all(_holds_numbers(one) for one in value)
    return isinstance(value, numbers.Real) or is_host(value)


def check_held(name: str, array: Any, dtype: str, why: str = "") -> None:
    """Raise unless a dtype holds the integers of a NumPy array."""
    import numpy

    if not array.size or numpy.can_cast(array.dtype, dtype):
        return
    limits = numpy.iinfo(dtype)
    for number in (int(array.min()), int(array.max())):
        if not limits.min <= number <= limits.max:
            raise ValueError(f"{name} holds {number}, which {dtype} cannot{why}")


class Destination(NamedTuple):
    """Where the query is, and the dtypes that numbers of the host get there."""

    library: str
    device: str
    real: str  # float64 beside a float64 query, otherwise float32
    like: Array  # the query, or its facts where only these are known

    @property
    def key(self) -> tuple[str, str, str]:
        """What decides the arrays that `put` makes, beside the numbers."""
        return self.library, self.device, self.real

    def put(self, name: str, array: Array) -> Array:
        """Return a NumPy array placed beside the query, or as it is if it is large.

        Integers get the library's default dtype for integers.
        """
        if is_compiling():  # torch.compile traces tensors better than NumPy's arrays
            array = library_of(self.like).xp.asarray(array)
        facts = facts_of(array, name)
        kind = next((kind for kind in ("bool", "int", "float") if kind in facts.dtype), None)
        if kind is None or (kind != "int" and math.prod(facts.shape) > MOST_PLACED):
            return array
        dtype = "bool" if kind == "bool" else self.real
        if isinstance(self.like, ArrayFacts):
            dtype = "int64" if kind == "int" else dtype
            return ArrayFacts(self.library, dtype, self.device, facts.shape)
        xp = library_of(self.like).xp
        if kind == "int":
            dtype = f"int{xp.iinfo(xp.asarray(0).dtype).bits}"
        if is_compiling():
            return numbers_like(xp, array, getattr(xp, dtype), self.like)
        array = self._on_host(name, array, dtype)
        with outside_inference():
            return numbers_like(xp, array, getattr(xp, dtype), self.like)

    def _on_host(self, name: str, array: Any, dtype: str) -> Any:
        """Return a NumPy array in its new dtype, contiguous and writable, as torch wants it."""
        import numpy

        if dtype.startswith("int"):
            why = f": that is the dtype of integers in {self.library} at the moment"
            check_held(name, array, dtype, why)
        with numpy.errstate(over="ignore"):  # float64's finfo.min in a bias becomes −inf
            return numpy.require(array, dtype, ["C", "W"])


def destination_of(query: Array) -> Destination | None:
    """Return where numbers of the host go beside this array; None if they stay as they are."""
    if isinstance(query, ArrayFacts):
        facts = query
    else:
        if library_of(query, "query").name in _ON_HOST:
            return None
        facts = facts_of(query, "query")
    if facts.library in _ON_HOST:
        return None
    return Destination(facts.library, facts.device, accumulator_of(facts.dtype), query)
