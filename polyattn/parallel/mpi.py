"""Ranks that are the processes of an MPI communicator, by mpi4py: for NumPy and CuPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from polyattn._base.arrays import Array, library_of
from polyattn._base.slices import split as parts_of
from polyattn.parallel.communicator import Communicator


class MPIRanks(Communicator):
    """The processes of an MPI communicator."""

    def __init__(self, comm: Any) -> None:
        self._comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()

    def shift(self, arrays: Sequence[Array], by: int = 1) -> Any:
        sent = [_contiguous(array) for array in arrays]
        _synchronize(sent)
        received = [library_of(array).xp.empty_like(array) for array in sent]
        target, source = ((self.rank + sign * by) % self.size for sign in (1, -1))
        requests = [self._comm.Irecv(_buffer(x), source, n) for n, x in enumerate(received)]
        requests += [self._comm.Isend(_buffer(x), target, n) for n, x in enumerate(sent)]
        return requests, sent, received  # what is sent must stay alive until it is

    def wait(self, handle: Any) -> Any:
        requests, _, received = handle
        MPI.Request.Waitall(requests)
        return received

    def gather(self, array: Array, axis: int) -> Array:
        sent = _contiguous(array)
        _synchronize([sent])
        xp = library_of(array).xp
        received = xp.concat([xp.empty_like(sent)[None, ...]] * self.size)
        self._comm.Allgather(_buffer(sent), _buffer(received))
        return xp.concat([received[n, ...] for n in range(self.size)], axis=axis)

    def exchange(self, array: Array, split: int, concat: int) -> Array:
        xp = library_of(array).xp
        sent = xp.stack(parts_of(array, self.size, split))
        _synchronize([sent])
        received = xp.empty_like(sent)
        self._comm.Alltoall(_buffer(sent), _buffer(received))
        return xp.concat([received[n, ...] for n in range(self.size)], axis=concat)

    def gather_bytes(self, message: bytes, like: Array) -> list[bytes]:
        messages: list[bytes] = self._comm.allgather(message)
        return messages


def _contiguous(array: Array) -> Array:
    """Return an array as it is if it is contiguous, and otherwise a contiguous copy."""
    return array if array.flags.c_contiguous else array.copy()


def _buffer(array: Array) -> Any:
    # As bytes, since MPI lacks floats of 16 bits.
    return [array.reshape(-1).view("uint8"), MPI.BYTE]


def _synchronize(arrays: Sequence[Array]) -> None:
    """Wait for the GPU's work on arrays: MPI reads them without a stream."""
    if library_of(arrays[0]).name == "cupy":
        import cupy

        cupy.cuda.get_current_stream().synchronize()
