"""The overhead of `polyattn.attention` over the bare call that it makes, on very small arrays.

Both run in turns in one process; differences and ratios are of medians. The bare calls are five
lines of NumPy, torch's `scaled_dot_product_attention` and a session of ONNX Runtime; the compiled
kernel has a line of its own where it is installed. A second table has the steps of a call, a third
one the whole time of calls with options, a fourth one calls of NumPy with options over the five
lines with the same option, in processor time, and a fifth one small calls of programs with tensors.
The last line is the first call of a process.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from cases import Case
from engines import Call, installed, kernels, machine, on_onnxruntime, textbook

import polyattn
from polyattn import masks, scores
from polyattn._api.run import plan_of
from polyattn._base.arrays import library_of
from polyattn._core.call.checks import examine
from polyattn._core.call.describe import describe
from polyattn._core.call.key import call_key
from polyattn._core.call.operands import Operands
from polyattn._dispatch.cache import cached_call
from polyattn._dispatch.request import parse_kernel, request
from polyattn._dispatch.select import select
from polyattn.bench import timing

SHAPE = (1, 1, 16, 16)
TINY = Case(1, 1, 1, 16, 16, 16)


def steps(arrays: list[Any]) -> dict[str, Call]:
    """Return the steps of a repeated call and of a first one."""
    polyattn.attention(*arrays)
    requested, (call, _) = request(None), describe(*arrays)
    key, problem, xp = call_key(arrays, {}), examine(call), library_of(arrays[0]).xp
    assert key is not None
    (known,) = cached_call(key, requested, False)
    kernel, (backend, _, chosen, *_), *_ = known.plan
    plain = Operands(*arrays)
    return {
        "whole call": lambda: polyattn.attention(*arrays),
        "key": lambda: call_key(arrays, {}),
        "request, look up": lambda: cached_call(key, request(None), False),
        "backend": lambda: known.run(plain),
        "of which kernel": lambda: kernel(chosen, plain, backend),
        "first: describe": lambda: describe(*arrays),
        "first: examine": lambda: examine(call),
        "first: select": lambda: select(call, problem, requested, parse_kernel(None), xp),
    }


def described(arrays: list[Any]) -> dict[str, Call]:
    """Return calls with options, and one with gradients."""
    attention, bias = polyattn.attention, arrays[0][0, 0]
    mask = masks.window(4, 0) | masks.prefix(2)
    own = copy.copy(plan_of(describe(*arrays)[0], arrays[0], None, "dense").kernel)
    four = {"bias": bias, "mask": mask, "softcap": 5.0, "score_mod": scores.alibi(1)}
    return {
        "plain": lambda: attention(*arrays),
        "is_causal": lambda: attention(*arrays, is_causal=True),
        "mask, an array": lambda: attention(*arrays, mask=bias > 0),
        "mask, an expression": lambda: attention(*arrays, mask=mask),
        "dropout": lambda: attention(*arrays, dropout=(0.1, 3)),
        "mask, bias, softcap, score_mod": lambda: attention(*arrays, **four),
        "kernel, an object": lambda: attention(*arrays, kernel=own),
        "attention_vjp and its gradients": lambda: polyattn.attention_vjp(*arrays)[1](arrays[0]),
    }


def options_and_arrays(query: Any) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return options of calls on NumPy, and what the five lines get for each."""
    length = query.shape[-2]
    row, key = np.arange(length)[:, None], np.arange(length)
    near, few = (key <= row) & (key >= row - 4), masks.window(4, 0) | masks.prefix(2)
    bias, far = query[0, 0], np.abs(key - row).astype(query.dtype)
    return {
        "plain": ({}, {}),
        "is_causal": ({"is_causal": True}, {"mask": key <= row}),
        "window": ({"window": (4, 0)}, {"mask": near}),
        "key_lengths, a number": ({"key_lengths": 11}, {"mask": key < 11}),
        "key_lengths, an array": ({"key_lengths": np.array([11])}, {"mask": key < 11}),
        "mask, an array": ({"mask": bias > 0}, {"mask": bias > 0}),
        "mask, an expression": ({"mask": few}, {"mask": near | (key < 2)}),
        "bias": ({"bias": bias}, {"bias": bias}),
        "softcap": ({"softcap": 5.0}, {"softcap": 5.0}),
        "ALiBi": ({"score_mod": scores.alibi(1)}, {"bias": -far / 256}),
    }


def print_options(arrays: list[Any], turns: timing.Turns) -> None:
    """Print each option's processor time over that of the five lines with it."""
    print(f"\n{'over the five lines':35}{'µs':>8}{'ratio':>8}")
    turns = turns._replace(window=turns.window / 4, clock=time.thread_time)
    for name, (options, given) in options_and_arrays(arrays[0]).items():
        for kernel, which in kernels(arrays, options).items():
            ours = partial(polyattn.attention, *arrays, **options, **which)
            times = timing.alternate({"bare": partial(textbook, *arrays, **given), "": ours}, turns)
            ratio = timing.ratios(times, "bare")[""].median
            print(f"{name:24}{kernel:11}{statistics.median(times['']) * 1e6:8.1f}{ratio:8.2f}")


FIRST_CALL = """
import time
import numpy as np, {library} as library
arrays = [library.ones((1, 12, 64, 64), dtype=library.float32)] * 3
if "{library}" == "torch": library.nn.functional.scaled_dot_product_attention(*arrays)
start = time.process_time()
import polyattn
polyattn.attention(*arrays)
print(time.process_time() - start)
"""


def first_call(library: str, rounds: int) -> float:
    """Return the processor time of the import and the first call of a process, in seconds."""
    command = [sys.executable, "-c", FIRST_CALL.format(library=library)]
    runs = [subprocess.run(command, capture_output=True, check=True) for _ in range(rounds)]
    return statistics.median(float(run.stdout) for run in runs)


def added(calls: dict[str, Call], turns: timing.Turns) -> str:
    """Return what `polyattn` adds to the `bare` call, in microseconds, with quartiles."""
    times = timing.alternate(calls, turns)
    bare, ours = (statistics.median(times[name]) * 1e6 for name in ("bare", "polyattn"))
    pairs = zip(times["polyattn"], times["bare"], strict=True)
    median, low, high = (second * 1e6 for second in timing.spread_of([a - b for a, b in pairs]))
    ratio = timing.ratios(times, "bare")["polyattn"].median
    return (
        f"bare {bare:.1f} µs, polyattn {ours:.1f} µs,"
        f" added {median:.1f} ({low:.1f} to {high:.1f}) µs, ratio {ratio:.2f}"
    )


def print_programs(turns: timing.Turns) -> None:
    """Print the times of small calls of programs with tensors, over the same written with torch."""
    import small
    import torch

    print(f"\n{'over torch':48}{'torch µs':>10}{'µs':>8}{'ratio':>8}")
    with torch.no_grad():
        rows = small.pairs()
    for row, (bare, ours) in rows.items():
        with torch.set_grad_enabled("gradient" in row):
            times = timing.alternate({"torch": bare, "polyattn": ours}, turns)
        medians = [statistics.median(times[name]) * 1e6 for name in ("torch", "polyattn")]
        ratio = timing.ratios(times, "torch")["polyattn"].median
        print(f"{row:48}{medians[0]:10.1f}{medians[1]:8.1f}{ratio:8.2f}", flush=True)


def main() -> int:
    """Print a line for each installed library."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=41, help="alternating rounds (41)")
    parser.add_argument("--quick", action="store_true", help="one round: no measurement")
    options = parser.parse_args()
    turns = timing.Turns(options.rounds, window=0.02, rest=0.0)
    turns = turns._replace(rounds=1, window=1e-9) if options.quick else turns
    array = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    cases: dict[str, tuple[Callable[..., Any], list[Any]]] = {"numpy": (textbook, [array] * 3)}
    with contextlib.suppress(ImportError):
        import torch

        sdpa = torch.nn.functional.scaled_dot_product_attention
        cases["torch"] = (sdpa, [torch.from_numpy(array)] * 3)
    print(f"{machine(threads := len(os.sched_getaffinity(0)))}; {turns.rounds} rounds", flush=True)
    with polyattn.use_threads(threads):
        print(f"{SHAPE}, times of a call")
        for name, (bare, arrays) in cases.items():
            own = kernels(arrays, {}) if name == "numpy" else {name: {}}
            for kernel, which in own.items():
                ours = partial(polyattn.attention, *arrays, **which)
                print(
                    f"{kernel:11}", added({"bare": partial(bare, *arrays), "polyattn": ours}, turns)
                )
        for name, bare in installed({"onnxruntime": lambda: on_onnxruntime(TINY, 1)}).items():
            ours = partial(polyattn.attention, *TINY.arguments()[0], backend=name)
            print(f"{name:11}", added({"bare": bare, "polyattn": ours}, turns))
        turns = turns._replace(window=turns.window / 4)
        for title, made in {"the steps of a call": steps, "calls with options": described}.items():
            print(f"\n{'microseconds of ' + title:35}" + "".join(f"{name:>8}" for name in cases))
            tables = [timing.alternate(made(arrays), turns) for _, arrays in cases.values()]
            for step in tables[0]:
                medians = [statistics.median(times[step]) * 1e6 for times in tables]
                print(f"{step:35}" + "".join(f"{one:8.1f}" for one in medians))
        print_options([array] * 3, turns)
        if "torch" in cases:
            print_programs(turns)
    for name in cases:
        print(f"first call, {name}: {first_call(name, min(turns.rounds, 9)) * 1e3:.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
