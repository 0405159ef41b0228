"""The overhead of `polyattn.attention` over the bare call that it makes, on very small arrays.

Both run in turns in one process; differences and ratios are of medians. The bare calls are five
lines of NumPy and torch's `scaled_dot_product_attention`. A second table has the steps of a call.
"""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from typing import Any

import numpy as np
import script
from cases import textbook

import polyattn
from polyattn._base.arrays import library_of
from polyattn._core.call.describe import describe
from polyattn._core.call.key import call_key
from polyattn._core.call.operands import Operands
from polyattn._core.call.problem import examine
from polyattn._dispatch.cache import cached_call
from polyattn._dispatch.request import request
from polyattn._dispatch.select import select

SHAPE = (1, 1, 16, 16)


def steps(arrays: list[Any]) -> dict[str, script.Call]:
    """Return the steps of a repeated call and of a first one."""
    polyattn.attention(*arrays)
    requested, (call, _) = request(None), describe(*arrays)
    key, problem, xp = call_key(arrays, {}), examine(call), library_of(arrays[0]).xp
    assert key is not None
    (known,) = cached_call(key, requested)
    kernel, (backend, _, chosen, _), _ = known.plan
    plain = Operands(*arrays)
    return {
        "whole call": lambda: polyattn.attention(*arrays),
        "key": lambda: call_key(arrays, {}),
        "request, look up": lambda: cached_call(key, request(None)),
        "backend": lambda: known.run(plain),
        "of which kernel": lambda: kernel(chosen, plain, backend),
        "first: describe": lambda: describe(*arrays),
        "first: examine": lambda: examine(call),
        "first: select": lambda: select(call, problem, requested, None, xp),
    }


def main() -> int:
    """Print a line for each installed library."""
    parser = script.parser(__doc__, 41, "quick", window=0.02, rest=0.0)
    options = script.read(parser)
    array = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    cases: dict[str, tuple[script.Call, list[Any]]] = {"numpy": (textbook, [array] * 3)}
    with contextlib.suppress(ImportError):
        import torch

        sdpa = torch.nn.functional.scaled_dot_product_attention
        cases["torch"] = (sdpa, [torch.from_numpy(array)] * 3)
    with script.measuring(options):
        print(f"{SHAPE}, times of a call")
        for name, (bare, arrays) in cases.items():
            calls = {
                "bare": partial(bare, *arrays),
                "polyattn": partial(polyattn.attention, *arrays),
            }
            print(f"{name:6}", script.added(script.compare(calls, options)))
        options.window /= 4
        tables = [script.compare(steps(arrays), options) for _, arrays in cases.values()]
    print("\nmicroseconds of the steps of a call" + "".join(f"{name:>8}" for name in cases))
    for step in zip(*tables, strict=True):
        print(f"{step[0].name:35}" + "".join(f"{row.seconds * 1e6:8.1f}" for row in step))
    return 0


if __name__ == "__main__":
    sys.exit(main())
