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
from typing import Any, NamedTuple

import numpy as np

import polyattn
from polyattn.bench import timing
from polyattn.bench.machine import versions

Array = Any
Call = Callable[[], Any]


class Case(NamedTuple):
    """A shape, its dtype and whether it is causal."""

    heads: int
    groups: int
    length: int
    size: int
    is_causal: bool
    dtype: str = "bfloat16"

    @property
    def operations(self) -> float:
        """Multiplications and additions of both products over the visible keys."""
        whole = 4.0 * self.heads * self.length**2 * self.size
        return whole / 2 if self.is_causal else whole

    @property
    def text(self) -> str:
        """The case as text."""
        heads = f"{self.heads} on {self.groups}" if self.heads != self.groups else f"{self.heads}"
        band = "causal" if self.is_causal else "full"
        return f"(1, {heads}, {self.length}, {self.length}, {self.size}) {self.dtype} {band}"


class Contender(NamedTuple):
    """A bare engine, or polyattn on the same arrays, and how to wait for a result."""

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

    yield Contender(ENGINE, lambda: sdpa(*tensors, is_causal=causal, enable_gqa=grouped), wait)
    yield Contender(OURS, lambda: polyattn.attention(*tensors, is_causal=causal), wait)


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
    yield Contender(ENGINE, lambda: bare(*arrays), jax.block_until_ready)
    yield Contender(OURS, lambda: ours(*arrays), jax.block_until_ready)


def cupy_wait(_: Any) -> None:
    """Wait for the current stream."""
    import cupy

    cupy.cuda.get_current_stream().synchronize()


def cupy_contenders(case: Case, device: str) -> Iterator[Contender]:
    """Yield cuDNN's plan replayed into one output, and polyattn."""
    import cupy

    from polyattn_cupy import graphs, plans, problem_graphs

    arrays = [cupy.asarray(x).astype(case.dtype) for x in arrays_of(case)]
    call = polyattn.explain(*arrays, is_causal=case.is_causal)
    graph = problem_graphs.graph_of(call.problem, *(x.strides for x in arrays))
    output = cupy.empty(arrays[0].shape, arrays[0].dtype)
    names = (graphs.QUERY, graphs.KEY, graphs.VALUE, graphs.OUTPUT)
    pointers = {n: x.data.ptr for n, x in zip(names, (*arrays, output), strict=True)}

    def bare() -> Array:
        plans.run(graph, pointers)
        return output

    yield Contender(ENGINE, bare, cupy_wait)
    yield Contender(OURS, lambda: polyattn.attention(*arrays, is_causal=case.is_causal), cupy_wait)


def textbook_contenders(case: Case) -> Iterator[Contender]:
    """Yield the formula in plain CuPy, polyattn, and its kernel `fused`."""
    import cupy

    arrays = [cupy.asarray(x).astype(case.dtype) for x in arrays_of(case)]

    def textbook() -> Array:
        query, key, value = arrays
        scores = query @ key.swapaxes(-1, -2) / np.sqrt(case.size)
        weights = cupy.exp(scores - scores.max(axis=-1, keepdims=True))
        return (weights @ value) / weights.sum(axis=-1, keepdims=True)

    yield Contender("textbook", textbook, cupy_wait)
    yield Contender(OURS, lambda: polyattn.attention(*arrays), cupy_wait)
    yield Contender("fused", lambda: polyattn.attention(*arrays, kernel="fused"), cupy_wait)


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


def measure(
    contenders: list[Contender], rounds: int, window: float
) -> dict[str, tuple[float, float]]:
    """Return the median seconds per call, and the median ratio of the engine's time to it.

    The engine is the first of the contenders.
    """
    by_name = {contender.name: contender for contender in contenders}
    counts = {}
    for name, contender in by_name.items():
        contender.wait(contender.call())  # to warm up
        counts[name] = max(1, round(window / seconds_of(contender, 1)))
    *_, times = timing.rounds(by_name, lambda name: seconds_of(by_name[name], counts[name]), rounds)
    ratios = timing.ratios(times, contenders[0].name)
    return {
        name: (statistics.median(seconds), 1 / ratios[name].median)
        for name, seconds in times.items()
    }


def seconds_of(contender: Contender, calls: int, *, host: bool = False) -> float:
    """Return seconds per call of a burst of calls, or until the last one returns."""
    contender.wait(contender.call())
    start = time.perf_counter()
    for _ in range(calls):
        last = contender.call()
    returned = time.perf_counter()
    contender.wait(last)
    return ((returned if host else time.perf_counter()) - start) / calls


def host_times(contenders: list[Contender], rounds: int, calls: int = 50) -> dict[str, float]:
    """Return the median seconds until a call returns, for a problem too small to wait for."""
    by_name = {contender.name: contender for contender in contenders}
    *_, times = timing.rounds(
        by_name, lambda name: seconds_of(by_name[name], calls, host=True), rounds
    )
    return {name: statistics.median(seconds) for name, seconds in times.items()}


# ---- printing ----------------------------------------------------------------------------------


def tables(device: str, rounds: int, window: float) -> Iterator[str]:
    """Yield the lines of the tables, in Markdown, as they are measured."""
    cases, tiny = (ON_CPU, ON_CPU[0]) if device == "cpu" else (CASES, TINY)
    available = list(libraries(device))
    yield "| (B, H, L, S, D) | library | engine, TFLOP/s | polyattn, TFLOP/s | of the engine |"
    yield "|---|---|---|---|---|"
    for case in cases:
        for library in available:
            times = measure(list(CONTENDERS[library](case, device)), rounds, window)
            rates = [case.operations / times[name][0] / 1e12 for name in (ENGINE, OURS)]
            share = f"{100 * times[OURS][1]:.1f} %"
            yield f"| {case.text} | {library} | {rates[0]:.3g} | {rates[1]:.3g} | {share} |"
    yield ""
    yield "| host time of a call, µs | engine | polyattn | added |"
    yield "|---|---|---|---|"
    for library in available:
        host = host_times(list(CONTENDERS[library](tiny, device)), rounds)
        engine, ours = (host[name] * 1e6 for name in (ENGINE, OURS))
        yield f"| {library}, {tiny.text} | {engine:.1f} | {ours:.1f} | {ours - engine:.1f} |"
    if "cupy" in available:
        yield ""
        yield "| CuPy, " + HALF.text + " | TFLOP/s | times the textbook's rate |"
        yield "|---|---|---|"
        times = measure(list(textbook_contenders(HALF)), rounds, window)
        for name, (seconds, ratio) in times.items():
            yield f"| {name} | {HALF.operations / seconds / 1e12:.3g} | {ratio:.1f} |"


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
