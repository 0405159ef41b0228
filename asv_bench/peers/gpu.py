"""Attention on a GPU against the bare engine under it, as ratios of alternating runs.

Every library's engine is called by itself and through polyattn, in turn, in one process. A rate is
that of the products, 4·B·H·L·S·D operations and half of it where causal, over the median time of a
call; host time is what a call takes to come back while the GPU still works.

``make gpu`` writes the tables into a page; ``python asv_bench/peers/gpu.py`` prints them, with
``--device cpu`` on a machine without a GPU and with shapes for that, to see that all of it runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import polyattn
from polyattn.bench.machine import versions

Array = Any
Call = Callable[[], Any]


class Case(NamedTuple):
    """A shape and what is asked of it."""

    heads: int
    groups: int
    length: int
    size: int
    is_causal: bool
    dtype: str = "bfloat16"

    @property
    def operations(self) -> float:
        """Multiplications and additions of both products, over the keys that are seen."""
        whole = 4.0 * self.heads * self.length**2 * self.size
        return whole / 2 if self.is_causal else whole

    @property
    def text(self) -> str:
        """The case, as a table has it."""
        heads = f"{self.heads} on {self.groups}" if self.heads != self.groups else f"{self.heads}"
        band = "causal" if self.is_causal else "full"
        return f"(1, {heads}, {self.length}, {self.length}, {self.size}) {self.dtype} {band}"


class Contender(NamedTuple):
    """Who computes: a bare engine, or polyattn on the same arrays, and how to wait for it."""

    library: str
    name: str
    call: Call
    wait: Callable[[Any], Any]


CASES = tuple(Case(64, 8, n, 128, c) for n in (4096, 8192, 16384) for c in (True, False))
HALF = Case(32, 32, 4096, 128, False, "float16")
TINY = Case(8, 8, 128, 64, True)
ON_CPU = (Case(4, 2, 128, 64, True), Case(4, 2, 128, 64, False))
ENGINE, OURS = "engine", "polyattn"


def arrays_of(case: Case) -> list[Array]:
    """Return query, key and value of random numbers, in float32."""
    rng = np.random.default_rng(0)
    heads = (case.heads, case.groups, case.groups)
    shapes = [(1, count, case.length, case.size) for count in heads]
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


# ---- the contenders ----------------------------------------------------------------------------


def torch_contenders(case: Case, device: str) -> Iterator[Contender]:
    """Yield torch's own function, and polyattn on its tensors."""
    import torch

    dtype = getattr(torch, case.dtype)
    tensors = [torch.from_numpy(x).to(device, dtype) for x in arrays_of(case)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    grouped, causal = case.heads != case.groups, case.is_causal

    def wait(_: Any) -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    yield Contender(
        "torch", ENGINE, lambda: sdpa(*tensors, is_causal=causal, enable_gqa=grouped), wait
    )
    yield Contender("torch", OURS, lambda: polyattn.attention(*tensors, is_causal=causal), wait)


def jax_contenders(case: Case, device: str) -> Iterator[Contender]:
    """Yield cuDNN by `jax.nn` under jit, or XLA on a CPU, and polyattn under jit."""
    import jax

    place = jax.local_devices(backend="cpu" if device == "cpu" else "gpu")[0]
    arrays = [jax.device_put(x, place).astype(case.dtype) for x in arrays_of(case)]
    engine = "xla" if device == "cpu" else "cudnn"

    @jax.jit
    def bare(*arrays: Array) -> Array:
        turned = (x.swapaxes(1, 2) for x in arrays)
        output = jax.nn.dot_product_attention(
            *turned, is_causal=case.is_causal, implementation=engine
        )
        return output.swapaxes(1, 2)

    ours = jax.jit(lambda *arrays: polyattn.attention(*arrays, is_causal=case.is_causal))
    yield Contender("jax", ENGINE, lambda: bare(*arrays), jax.block_until_ready)
    yield Contender("jax", OURS, lambda: ours(*arrays), jax.block_until_ready)


def cupy_contenders(case: Case, device: str) -> Iterator[Contender]:
    """Yield cuDNN's plan replayed into one output, and polyattn."""
    import cupy

    from polyattn_cupy import cudnn, plans

    arrays = [cupy.asarray(x).astype(case.dtype) for x in arrays_of(case)]
    call = polyattn.explain(*arrays, is_causal=case.is_causal)
    graph = cudnn._graph(call.problem, *(x.strides for x in arrays))
    output = cupy.empty(arrays[0].shape, arrays[0].dtype)
    names = (plans.QUERY, plans.KEY, plans.VALUE, plans.OUTPUT)
    pointers = {n: x.data.ptr for n, x in zip(names, (*arrays, output), strict=True)}

    def wait(_: Any) -> None:
        cupy.cuda.get_current_stream().synchronize()

    def bare() -> Array:
        plans.run(graph, pointers)
        return output

    yield Contender("cupy", ENGINE, bare, wait)
    yield Contender(
        "cupy", OURS, lambda: polyattn.attention(*arrays, is_causal=case.is_causal), wait
    )


def textbook_contenders(case: Case) -> Iterator[Contender]:
    """Yield the formula as anyone writes it in CuPy, polyattn, and its kernel `fused`."""
    import cupy

    arrays = [cupy.asarray(x).astype(case.dtype) for x in arrays_of(case)]

    def wait(_: Any) -> None:
        cupy.cuda.get_current_stream().synchronize()

    def textbook() -> Array:
        query, key, value = arrays
        scores = query @ key.swapaxes(-1, -2) / np.sqrt(case.size)
        weights = cupy.exp(scores - scores.max(axis=-1, keepdims=True))
        return (weights @ value) / weights.sum(axis=-1, keepdims=True)

    yield Contender("cupy", "textbook", textbook, wait)
    yield Contender("cupy", OURS, lambda: polyattn.attention(*arrays), wait)
    yield Contender("cupy", "fused", lambda: polyattn.attention(*arrays, kernel="fused"), wait)


CONTENDERS = {"cupy": cupy_contenders, "torch": torch_contenders, "jax": jax_contenders}


def libraries(device: str) -> Iterator[str]:
    """Yield the libraries that can use the device."""
    for name in CONTENDERS:
        if name == "cupy" and device == "cpu":
            continue
        info = {info.name: info for info in polyattn.list_backends()}[name]
        if info.available and any(d.partition(":")[0] == device for d in info.devices):
            yield name


# ---- measuring ---------------------------------------------------------------------------------


class Timing(NamedTuple):
    """Seconds a call, and the median of the ratios of the engine's rounds to its own."""

    seconds: float
    of_engine: float


def measure(contenders: list[Contender], rounds: int, window: float) -> dict[str, Timing]:
    """Time them side by side, each round in turn and then in reverse; the first is the engine."""
    seconds: dict[str, list[float]] = {c.name: [] for c in contenders}
    order = list(contenders)
    counts = {c.name: _count(c, window) for c in contenders}
    for _ in range(rounds):
        order.reverse()
        for contender in order:
            seconds[contender.name].append(_window(contender, counts[contender.name]))
    first = seconds[contenders[0].name]
    return {
        name: Timing(
            statistics.median(own),
            statistics.median(a / b for a, b in zip(first, own, strict=True)),
        )
        for name, own in seconds.items()
    }


def _count(contender: Contender, window: float) -> int:
    """Return how many calls fill a window, after two that warm up."""
    contender.wait(contender.call())
    once = _window(contender, 1)
    return max(1, round(window / once))


def _window(contender: Contender, calls: int) -> float:
    contender.wait(None if contender.library != "jax" else contender.call())
    start = time.perf_counter()
    for _ in range(calls):
        last = contender.call()
    contender.wait(last)
    return (time.perf_counter() - start) / calls


def host_times(contenders: list[Contender], rounds: int, calls: int = 50) -> dict[str, float]:
    """Return the median seconds in which a call comes back, of a problem too small to wait for."""
    found: dict[str, list[float]] = {c.name: [] for c in contenders}
    for _ in range(rounds):
        for contender in contenders:
            contender.wait(contender.call())
            start = time.perf_counter()
            for _ in range(calls):
                last = contender.call()
            found[contender.name].append((time.perf_counter() - start) / calls)
            contender.wait(last)
    return {name: statistics.median(own) for name, own in found.items()}


# ---- showing -----------------------------------------------------------------------------------


def tables(device: str, rounds: int, window: float) -> Iterator[str]:
    """Yield the lines of the tables, in Markdown, as they are measured."""
    cases, tiny = (ON_CPU, ON_CPU[0]) if device == "cpu" else (CASES, TINY)
    here = list(libraries(device))
    yield "| (B, H, L, S, D) | library | engine, TFLOP/s | polyattn, TFLOP/s | of the engine |"
    yield "|---|---|---|---|---|"
    for case in cases:
        for library in here:
            found = measure(list(CONTENDERS[library](case, device)), rounds, window)
            rates = [case.operations / found[name].seconds / 1e12 for name in (ENGINE, OURS)]
            share = f"{100 * found[OURS].of_engine:.1f} %"
            yield f"| {case.text} | {library} | {rates[0]:.3g} | {rates[1]:.3g} | {share} |"
    yield ""
    yield "| host time of a call, µs | engine | polyattn | added |"
    yield "|---|---|---|---|"
    for library in here:
        times = host_times(list(CONTENDERS[library](tiny, device)), rounds)
        engine, ours = (times[name] * 1e6 for name in (ENGINE, OURS))
        yield f"| {library}, {tiny.text} | {engine:.1f} | {ours:.1f} | {ours - engine:.1f} |"
    if "cupy" in here:
        yield ""
        yield "| CuPy, " + HALF.text + " | TFLOP/s | times the textbook's rate |"
        yield "|---|---|---|"
        for name, timing in measure(list(textbook_contenders(HALF)), rounds, window).items():
            rate = HALF.operations / timing.seconds / 1e12
            yield f"| {name} | {rate:.3g} | {timing.of_engine:.1f} |"


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
