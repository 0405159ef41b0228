"""Devices of torch that are not here, as their descriptions, and problems on them."""

import torch

from polyattn import explain
from polyattn_torch.device_info import DeviceInfo

CPU = DeviceInfo("cpu", (2, 13))
HOPPER = DeviceInfo("cuda", (2, 12), (9, 20, 0), (9, 0))
AMPERE = DeviceInfo("cuda", (2, 12), (9, 20, 0), (8, 0))
BLACKWELL = DeviceInfo("cuda", (2, 12), (9, 20, 0), (10, 0))
MPS = DeviceInfo("mps", (2, 13))
OLD_MPS = DeviceInfo("mps", (2, 12))
ABSENT = DeviceInfo("cuda", (2, 13))


def problem(query=(2, 4, 64, 16), key=None, value=None, *, dtype="bfloat16", facts=None, **options):
    """Return the problem of a call, of shapes or arrays, with some facts of it replaced."""
    key = key or query
    shapes = {name: tuple(x.shape) for name, x in options.items() if isinstance(x, torch.Tensor)}
    decided = explain(
        query, key, value or key, dtype=dtype, library="torch", device="cuda:0", **options | shapes
    )
    return decided.problem._replace(**facts or {})
