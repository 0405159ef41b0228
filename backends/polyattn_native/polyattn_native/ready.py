"""Calls that run again with other arrays of the same kind."""

from __future__ import annotations

from typing import Any

from polyattn.plugin import Expression, Operands, progress
from polyattn_native.call import NativeCall, checked, run, threads_for
from polyattn_native.library import library

# The bytes of arrays that are compared with those of the latest call, which keeps a copy.
MOST_COMPARED = 2**16


class Ready:
    """A call that runs again with other arrays of the same kind."""

    def __init__(
        self, native: NativeCall, *, is_whole: bool, function: str = "attend_to", output: Any = None
    ) -> None:
        self.problem, self._native, self._address = native.problem, native, native.address
        self.is_whole = is_whole  # whether other operands than query, key and value say nothing
        self.output = output  # shape and strides of the tensor
        self._function = getattr(library(), f"polyattn_{function}")
        self._is_short = threads_for(self.problem, 2, most=2) == 1
        # All layers of a model have the same lengths, ids or slopes.
        self._latest: tuple[Any, NativeCall | None] = None, None
        self._repeats = True

    def run(self, kernel: Any, *pointers: int | None, x: Operands) -> bool:
        """Compute, with arrays by what the function takes: addresses, or pointers to these.

        Of a call that is not whole, the other operands are read from `x`. False if numbers are not
        aligned, or a mask or bias is made in parts: then nothing is computed.
        """
        address = self._address if self.is_whole else None
        if self._native.in_place:
            address = self._native.address_with(kernel.in_numpy(x))
        if address is None:
            native = self._again(kernel, x)
            if native.is_made:
                return False
            address = native.address
        if self._is_short:
            status = self._function(address, 1, *pointers, None)
            return status == 0 or checked(status) == 0
        threads = threads_for(self.problem, 2, kernel.threads())
        with progress() as show:
            return run(self._function, address, threads, *pointers, show=show) == 0

    def _again(self, kernel: Any, x: Operands) -> NativeCall:
        """Return the call with what operands say: the latest one if their arrays hold the same."""
        if not self._repeats:
            return self._native.again(kernel.in_numpy(x))
        contents, (latest, native) = self._contents(kernel, x), self._latest
        if native is None or contents is None or contents != latest:
            native = self._native.again(kernel.in_numpy(x))
            self._repeats = native.is_of_copies
            if contents is not None and self._repeats:
                native.x = native.distances = None
                self._latest = contents, native  # at once, since threads share it
        return native

    @staticmethod
    def _contents(kernel: Any, x: Operands) -> tuple[bytes, ...] | None:
        """Return what arrays beside query, key and value hold, or None if it is much."""
        given = (x.query_offset, x.key_lengths, x.block_table, x.sinks)
        # The problem has an offset that is a number.
        arrays: list[Any] = [one for one in given if not (one is None or isinstance(one, int))]
        for one in (x.mask, x.score_mod):
            if isinstance(one, Expression):
                if one.form is None:
                    return None
                arrays += one.form[1]
        if sum([one.nbytes for one in arrays]) > MOST_COMPARED:
            return None
        return tuple([kernel.bytes_of(one) for one in arrays])
