"""Ranks that are the processes of a torch process group: gloo, nccl and others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from polyattn.parallel.communicator import Communicator


def group_of(over: Any) -> Any:
    """Return the process group of a group or mesh, or None if it is neither."""
    if isinstance(over, dist.ProcessGroup):
        return over
    if isinstance(over, DeviceMesh):
        if over.ndim != 1:
            raise ValueError(
                f"over is a mesh of {over.ndim} dimensions, {over.mesh_dim_names}: name one, as in"
                " over=mesh['cp']"
            )
        return over.get_group()
    return None


class TorchGroup(Communicator):
    """The processes of a torch process group."""

    def __init__(self, group: Any) -> None:
        self._group, self.size = group, dist.get_world_size(group)
        self.rank: int = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this process is not in the process group of over=")

    def _peer(self, by: int) -> int:
        return dist.get_global_rank(self._group, (self.rank + by) % self.size)

    def shift(self, arrays: Sequence[torch.Tensor], by: int = 1) -> Any:
        sent = [array.contiguous() for array in arrays]
        if by % self.size == 0:
            return [], sent, sent
        received = [torch.empty_like(array) for array in sent]
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, self._peer(by), self._group) for x in sent]
            + [dist.P2POp(dist.irecv, x, self._peer(-by), self._group) for x in received]
        )
        return works, sent, received  # what is sent must stay alive until it is

    def wait(self, handle: Any) -> Any:
        works, _, received = handle
        for work in works:
            work.wait()
        return received

    def gather(self, array: torch.Tensor, axis: int) -> torch.Tensor:
        array = array.contiguous()
        parts = [torch.empty_like(array) for _ in range(self.size)]
        dist.all_gather(parts, array, self._group)
        return torch.cat(parts, axis)

    def exchange(self, array: torch.Tensor, split: int, concat: int) -> torch.Tensor:
        sent = torch.stack(array.tensor_split(self.size, split))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return torch.cat(received.unbind(), concat)

    def gather_bytes(self, message: bytes, like: torch.Tensor) -> list[bytes]:
        # On the host if the group has a backend for it, so that no GPU is waited for.
        backends = dist.get_backend_config(self._group)
        device = "cpu" if "cpu:" in backends else backends.partition(":")[0]
        numbers = torch.tensor([list(message)], dtype=torch.uint8, device=device)
        return [bytes(row) for row in self.gather(numbers, 0).tolist()]
