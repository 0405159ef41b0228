"""Choices of a kernel on CUDA and MPS, without them: `torch_choices.txt` has each.

Run this file to write the table anew, and read what changes.
"""

import pathlib

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from polyattn import explain, masks, scores
from polyattn_torch import device_info, flex, route, sdpa
from polyattn_torch.device_info import DeviceInfo

TABLE = pathlib.Path(__file__).with_name("torch_choices.txt")
#: One release and one GPU, so that the table is the same on every machine.
KINDS = {
    "cuda": DeviceInfo("cuda", (2, 13), (9, 20, 0), (9, 0)),
    "mps": DeviceInfo("mps", (2, 13)),
}
SHAPE = {"batch": 2, "heads": 8, "groups": 8, "rows": 64, "keys": 64, "size": 64, "values": 64}
HALF = {"dtype": torch.bfloat16}
DECODE, LONG = {"rows": 1}, {"rows": 2**14, "keys": 2**14}
OFFSETS = np.array([3, 7])


def by_index(b, h, i, j):
    return (i + j) % 3 != 0


#: What differs from a plain call in float32, in its arrays and in its options.
CALLS = {
    "plain": ({}, {}),
    "bfloat16": (HALF, {}),
    "float16": ({"dtype": torch.float16}, {}),
    "float64": ({"dtype": torch.float64}, {}),
    "causal": ({}, {"is_causal": True}),
    "causal, bfloat16": (HALF, {"is_causal": True}),
    "causal, more keys": ({"keys": 90}, {"is_causal": True}),
    "causal, more keys, bfloat16": ({"keys": 90, **HALF}, {"is_causal": True}),
    "grouped": ({"groups": 2}, {}),
    "grouped, causal, bfloat16": ({"groups": 2, **HALF}, {"is_causal": True}),
    "decode": (DECODE, {"is_causal": True}),
    "decode, grouped, bfloat16": ({"groups": 2, **DECODE, **HALF}, {"is_causal": True}),
    "window": ({}, {"window": (9, 0)}),
    "window, bfloat16": (HALF, {"window": (9, 0)}),
    "window, long": (LONG, {"window": (9, 0)}),
    "window, long, bfloat16": ({**LONG, **HALF}, {"window": (9, 0)}),
    "scale": ({}, {"scale": 0.5}),
    "scale below 0": ({}, {"scale": -0.5}),
    "softcap": (HALF, {"softcap": 30.0}),
    "value size": ({"values": 32}, {}),
    "head size 256, bfloat16": ({"size": 256, "values": 256, **HALF}, {"is_causal": True}),
    "head size 257": ({"size": 257, "values": 257}, {}),
    "no keys": ({"keys": 0}, {}),
    "gradient": ({"grad": True}, {"is_causal": True}),
    "gradient, bfloat16": ({"grad": True, **HALF}, {"is_causal": True}),
    "gradient, mask": ({"grad": True, **HALF}, {"mask": "mask"}),
    "mask": ({}, {"mask": "mask"}),
    "mask, bfloat16": (HALF, {"mask": "mask"}),
    "mask of 65 keys": ({"keys": 65}, {"mask": "mask"}),
    "bias": ({}, {"bias": "bias"}),
    "bias of float32, bfloat16": (HALF, {"bias": "bias"}),
    "sinks": ({}, {"sinks": "sinks"}),
    "offset": ({}, {"is_causal": True, "query_offset": 3}),
    "offsets of the host": ({}, {"is_causal": True, "query_offset": OFFSETS}),
    "lengths of the host": ({}, {"mask": masks.padding([5, 64])}),
    "packed, long": ({**LONG, **HALF}, {"mask": masks.segments(np.arange(2**14) // 512)}),
    "a function": ({}, {"mask": by_index}),
    "a function, long": ({**LONG, **HALF}, {"mask": by_index}),
    "ALiBi": (HALF, {"score_mod": scores.alibi(8)}),
    "dropout": (HALF, {"dropout": (0.1, 3)}),
    "sigmoid": ({}, {"normalizer": scores.sigmoid()}),
}


@pytest.fixture(autouse=True)
def devices(monkeypatch):
    _pretend(monkeypatch)


def _pretend(patch):
    def describe(device):
        return KINDS.get(device.partition(":")[0]) or device_info.describe_device(device)

    for module in (sdpa, route):
        patch.setattr(module, "describe_device", describe)
    patch.setattr(route, "_cached_route", route._route)
    patch.setattr(flex, "HAS_TRITON", True)
    patch.setattr(sdpa, "report_engine", lambda *_: None)  # torch logs that it has no CUDA


def arrays_of(kind, changes):
    """Return query, key and value without numbers, and what makes others."""
    size = SHAPE | changes
    dtype = size.get("dtype", torch.float32)

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device=kind)

    batch, heads, groups, rows, keys = (
        size[name] for name in ("batch", "heads", "groups", "rows", "keys")
    )
    made = {
        "mask": lambda: empty(rows, keys, dtype=torch.bool),
        "bias": lambda: empty(rows, keys, dtype=torch.float32),
        "sinks": lambda: empty(heads),
    }
    query = empty(batch, heads, rows, size["size"]).requires_grad_(size.get("grad", False))
    key, value = (empty(batch, groups, keys, size[name]) for name in ("size", "values"))
    return (query, key, value), made


def call_of(kind, name):
    changes, options = CALLS[name]
    arrays, made = arrays_of(kind, changes)
    return arrays, {key: made[x]() if isinstance(x, str) else x for key, x in options.items()}


def choice(kind, name):
    """Return the kernel that `explain` chooses, how torch is told, and why others are refused."""
    arrays, options = call_of(kind, name)
    explanation = explain(*arrays, **options)
    chosen = explanation.chosen
    said = [chosen.kernel]
    if chosen.kernel == "sdpa":
        way = route.route_of(explanation.problem)
        said += [f"by {way.engine.name}"] if way.engine else []
        said += sorted(item.value for item in way.workarounds)
    said += [
        f"{one.kernel} refused: {', '.join(one.reasons)}"
        for one in explanation.candidates
        if one.status == "refused" and one.kernel in ("sdpa", "flex")
    ]
    said += [
        f"sdpa only on request: {one.on_request}"
        for one in explanation.candidates
        if one.kernel == "sdpa" and one.on_request
    ]
    return "; ".join(said)


def table():
    with FakeTensorMode():
        return "".join(
            f"{name}\n" + "".join(f"    {kind:5} {choice(kind, name)}\n" for kind in KINDS)
            for name in CALLS
        )


def test_choices_are_those_of_the_table():
    assert table() == TABLE.read_text()


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        _pretend(patch)
        TABLE.write_text(table())
