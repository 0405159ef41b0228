"""Recognize what ``over=`` names: a communicator, a mesh axis, a process group, MPI."""

from __future__ import annotations

import sys
from typing import Any

from polyattn.parallel.communicator import Communicator


def communicator_of(over: Any) -> Communicator:
    """Return the communicator that ``over=`` means."""
    if isinstance(over, Communicator):
        return over
    if isinstance(over, str):
        from polyattn.parallel.jax_axis import JaxAxis

        return JaxAxis(over)
    torch, mpi = sys.modules.get("torch.distributed"), sys.modules.get("mpi4py.MPI")
    if torch is not None and torch.is_available():
        from polyattn.parallel.torch_group import TorchGroup, group_of

        group = group_of(over)
        if group is not None:
            return TorchGroup(group)
    if mpi is not None and isinstance(over, mpi.Comm):
        from polyattn.parallel.mpi import MPIRanks

        return MPIRanks(over)
    raise TypeError(
        "over must be the name of a mesh axis inside jax.shard_map, a process group or a DeviceMesh"
        " with one dimension of torch, a communicator of mpi4py, or a"
        f" polyattn.parallel.Communicator; got a {type(over).__name__}"
    )
