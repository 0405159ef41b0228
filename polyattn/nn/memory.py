"""Decide which of the caches that share arrays may write to them."""

from __future__ import annotations

import sys
from typing import Any

from polyattn._base.arrays import Array, library_of
from polyattn._base.tracing import is_compiling, torch_transforms


class Buffer:
    """Arrays that a cache allocated, and how far the caches that share them have written."""

    def __init__(self, key: Array, value: Array, filled: int) -> None:
        self.key, self.value = key, value
        self.ends = {filled}  # empty while a cache writes

    def claim(self, cache: Any, at: int) -> bool:
        """Return whether the cache may write from `at` on; only one cache may."""
        if self.key is not cache.key or self.value is not cache.value:
            return False  # a cache derived from this one, with other arrays
        try:
            self.ends.remove(at)  # atomic, so that only one thread succeeds
        except KeyError:
            return self._claim_taken_back(at)
        return True

    def _claim_taken_back(self, at: int) -> bool:
        """Return whether all after `at` was written by caches that are gone, and claim it."""
        try:
            end = self.ends.pop()  # until the next `add` no other thread may write
        except KeyError:
            return False
        # Held by this and by the cache that claims, and by none else. A view of NumPy's holds too.
        is_alone = self._references() <= _REFERENCES + 1
        if at < end and is_alone and not (_has_views(self.key) or _has_views(self.value)):
            return True
        self.ends.add(end)
        return False

    def _references(self) -> int:
        """Return how many references there are to the array that has more of them."""
        return max(sys.getrefcount(self.key), sys.getrefcount(self.value))

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copy and pickle as None: whether the new arrays share memory is unknown."""
        return type(None), ()


# Of arrays that a buffer holds and no cache; some versions of Python count the argument, some not.
_REFERENCES = Buffer(object(), object(), 0)._references()


def _has_views(memory: Array) -> bool:
    """Return whether tensors that Python may not know share the memory of a tensor, or may."""
    if library_of(memory).name != "torch":
        return False
    torch: Any = sys.modules["torch"]
    uses: Any = getattr(torch._C, "_storage_Use_Count", lambda storage: 3)
    # By this tensor, and by the storage that is asked for.
    return type(memory) is not torch.Tensor or uses(memory.untyped_storage()._cdata) > 2


def is_writable(new: list[Array], memory: list[Array]) -> bool:
    """Return whether rows can be written without breaking a trace or a graph of gradients."""
    library = library_of(memory[0])
    if library.name != "torch":
        return library.name in ("numpy", "cupy")
    if is_compiling() or torch_transforms():
        return False
    # Memory made in inference mode cannot be written to outside of it.
    outside = any(array.is_inference() for array in memory) and not new[0].is_inference()
    return not (outside or any(array.requires_grad for array in (*new, *memory)))
