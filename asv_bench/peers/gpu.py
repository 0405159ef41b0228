"""Attention on a GPU against the bare engine under it, as ratios of alternating runs.

Every library's engine is called directly and through polyattn, in turns, in one process. A rate is
4·B·H·L·S·D operations, half of it where causal, over the median time of a call. Host time is the
time until a call returns, while the GPU still works.

``make gpu`` writes the tables into a page; ``python asv_bench/peers/gpu.py`` prints them, with
``--device cpu`` and small shapes on a machine without a GPU, to check that everything runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from cases import Array, Case

import polyattn
from polyattn.bench import timing
from polyattn.bench.machine import versions

Call = Callable[[], Any]
HALF = "bfloat16"
ENGINE, OURS = "engine", "polyattn"


KINDS = "causal", "full"
CASES = [Case(1, 64, 8, n, n, 128, kind, HALF) for n in (4096, 8192, 16384) for kind in KINDS]
TINY = Case(1, 8, 8, 128, 128, 64, "causal", HALF)
STEPS = [Case(items, 32, 8, 1, 8192, 128, "full", HALF) for items in (1, 32)]
ON_CPU = [Case(1, 4, 2, 128, 128, 64, kind, HALF) for kind in KINDS]
STEPS_ON_CPU = [Case(2, 4, 2, 1, 128, 64, "full", HALF)]


def arrays_of(case: Case) -> list[Array]:
    """Return query, key and value in float32, from which each library makes its 16 bits."""
    return case._replace(dtype="float32").arguments()[0]


# ---- the contenders ----------------------------------------------------------------------------


class Pair(NamedTuple):
    """The bare engine, polyattn on the same arrays, and how to wait for a result."""

    calls: dict[str, Call]
    wait: Callable[[Any], Any]


def on_torch(case: Case, device: str, gradients: bool) -> Pair:
    """Return torch's own function, and polyattn on its tensors; or both with their gradients."""
    import torch

    dtype = getattr(torch, case.dtype)
    tensors = [torch.from_numpy(x).to(device, dtype) for x in arrays_of(case)]
    tensors = [x.requires_grad_() for x in tensors] if gradients else tensors
    sdpa = torch.nn.functional.scaled_dot_product_attention
    bare = partial(sdpa, enable_gqa=case.heads != case.groups)
    functions = {ENGINE: bare, OURS: polyattn.attention}
    calls = {name: partial(f, *tensors, is_causal=case.is_causal) for name, f in functions.items()}
    if gradients:
        along = torch.ones_like(tensors[0])
        calls = {
            name: lambda call=call: torch.autograd.grad(call(), tensors, along)
            for name, call in calls.items()
        }
    return Pair(calls, lambda _: device == "cpu" or torch.cuda.synchronize())


def on_jax(case: Case, device: str, gradients: bool) -> Pair:
    """Return cuDNN by `jax.nn` under `jit`, or XLA on a CPU, and polyattn under `jit`."""
    import jax

    place = jax.local_devices(backend="cpu" if device == "cpu" else "gpu")[0]
    arrays = [jax.device_put(x, place).astype(case.dtype) for x in arrays_of(case)]
    engine = "xla" if device == "cpu" else "cudnn"

    def bare(*arrays: Array) -> Array:
        turned = (x.swapaxes(1, 2) for x in arrays)
        attend = partial(jax.nn.dot_product_attention, implementation=engine)
        return attend(*turned, is_causal=case.is_causal).swapaxes(1, 2)

    def gradient(function: Callable[..., Array]) -> Any:
        return jax.grad(lambda *x: function(*x).astype("float32").sum(), (0, 1, 2))

    functions = {ENGINE: bare, OURS: partial(polyattn.attention, is_causal=case.is_causal)}
    calls = {
        name: partial(jax.jit(gradient(f) if gradients else f), *arrays)
        for name, f in functions.items()
    }
    return Pair(calls, jax.block_until_ready)


MAKERS = {"torch": on_torch, "jax": on_jax}


def libraries(device: str) -> Iterator[str]:
    """Yield the libraries that can use the device."""
    known = {info.name: info for info in polyattn.list_backends()}
    for name in MAKERS:
        kinds = {found.partition(":")[0] for found in known[name].devices}
        if known[name].available and device in kinds:
            yield name


# ---- measuring ---------------------------------------------------------------------------------


def seconds_of(call: Call, wait: Callable[[Any], Any], calls: int, *, host: bool = False) -> float:
    """Return seconds per call of a burst of calls, or until the last one returns."""
    wait(call())
    start = time.perf_counter()
    for _ in range(calls):
        last = call()
    returned = time.perf_counter()
    wait(last)
    return ((returned if host else time.perf_counter()) - start) / calls


def measure(pair: Pair, rounds: int, window: float) -> dict[str, tuple[float, float]]:
    """Return the median seconds per call, and the median ratio of the engine's time to it."""
    calls, wait = pair
    counts = {}
    for name, call in calls.items():
        wait(call())  # to warm up
        counts[name] = max(1, round(window / seconds_of(call, wait, 1)))
    *_, times = timing.rounds(
        calls, lambda name: seconds_of(calls[name], wait, counts[name]), rounds
    )
    ratios = timing.ratios(times, ENGINE)
    return {
        name: (statistics.median(seconds), 1 / ratios[name].median)
        for name, seconds in times.items()
    }


def host_times(pair: Pair, rounds: int, count: int = 50) -> dict[str, float]:
    """Return the median seconds until a call returns, for a problem too small to wait for."""
    calls, wait = pair
    *_, times = timing.rounds(
        calls, lambda name: seconds_of(calls[name], wait, count, host=True), rounds
    )
    return {name: statistics.median(seconds) for name, seconds in times.items()}


# ---- printing ----------------------------------------------------------------------------------


def tables(device: str, rounds: int, window: float) -> Iterator[str]:
    """Yield the lines of the tables, in Markdown, as they are measured."""
    on_cpu = device == "cpu"
    cases, tiny, steps = (ON_CPU, ON_CPU[0], STEPS_ON_CPU) if on_cpu else (CASES, TINY, STEPS)
    available = list(libraries(device))

    def table(unit: str, cases: list[Case], *, gradients: bool = False) -> Iterator[str]:
        """Yield a table of the engines' rates and ours, in operations, or in bytes of keys."""
        yield f"| (B, H, L, S, D) | library | engine, {unit} | polyattn, {unit} | of the engine |"
        yield "|---|---|---|---|---|"
        for case in cases:
            for library in available:
                times = measure(MAKERS[library](case, device, gradients), rounds, window)
                amount = (3.5 if gradients else 1) * 4 * case.visible * case.size
                if case.length == 1:  # bytes of 16 bits, each read once
                    amount = 4 * case.batch * case.groups * case.keys * case.size
                rates = [amount / times[name][0] / 1e12 for name in (ENGINE, OURS)]
                share = f"{100 * times[OURS][1]:.1f} %"
                yield f"| {case.title} | {library} | {rates[0]:.3g} | {rates[1]:.3g} | {share} |"

    yield from table("TFLOP/s", cases)
    yield "\nForward and backward together, as 3.5 times the operations of forward:\n"
    yield from table("TFLOP/s", cases[2:4] or cases, gradients=True)
    yield "\nA step of decoding, by the bytes of keys and values:\n"
    yield from table("TB/s", steps)
    yield "\n| host time of a call, µs | engine | polyattn | added |"
    yield "|---|---|---|---|"
    for library in available:
        host = host_times(MAKERS[library](tiny, device, False), rounds)
        engine, ours = (host[name] * 1e6 for name in (ENGINE, OURS))
        yield f"| {library}, {tiny.title} | {engine:.1f} | {ours:.1f} | {ours - engine:.1f} |"


def main(arguments: list[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="gpu.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=21, help="alternating rounds (default: 21)")
    parser.add_argument("--window", type=float, default=0.02, help="seconds a round (0.02)")
    options = parser.parse_args(arguments)
    print(versions())
    lines = 0
    for line in tables(options.device, options.rounds, options.window):
        lines += line.startswith("| (")
        print(line, flush=True)
    return 0 if lines > 1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
