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
    """A shape, its dtype and whether it is causal; with `rows`, a step of decoding."""

    heads: int
    groups: int
    length: int
    size: int
    is_causal: bool
    dtype: str = "bfloat16"
    items: int = 1
    rows: int | None = None

    @property
    def operations(self) -> float:
        """Multiplications and additions of both products over the visible keys."""
        whole = 4.0 * self.heads * self.length**2 * self.size
        return whole / 2 if self.is_causal else whole

    @property
    def bytes(self) -> float:
        """Bytes of the keys and values, of 16 bits, each read once."""
        return 2 * 2.0 * self.items * self.groups * self.length * self.size

    @property
    def text(self) -> str:
        """The case as text."""
        heads = f"{self.heads} on {self.groups}" if self.heads != self.groups else f"{self.heads}"
        band = "causal" if self.is_causal else "full"
        rows = self.rows or self.length
        return f"({self.items}, {heads}, {rows}, {self.length}, {self.size}) {self.dtype} {band}"


class Contender(NamedTuple):
    """A bare engine, or polyattn on the same arrays, and how to wait for a result."""

    name: str
    call: Call
    wait: Callable[[Any], Any]


CASES = tuple(Case(64, 8, n, 128, c) for n in (4096, 8192, 16384) for c in (True, False))
HALF = Case(32, 32, 4096, 128, False, "float16")
TINY = Case(8, 8, 128, 64, True)
STEPS = tuple(Case(32, 8, n, 128, False, items=b, rows=1) for b, n in ((1, 8192), (32, 8192)))
ON_CPU = (Case(4, 2, 128, 64, True), Case(4, 2, 128, 64, False))
STEPS_ON_CPU = (Case(4, 2, 128, 64, False, items=2, rows=1),)
ENGINE, OURS = "engine", "polyattn"


def arrays_of(case: Case) -> list[Array]:
    """Return query, key and value of random numbers, in float32."""
    rng = np.random.default_rng(0)
    rows = ((case.heads, case.rows or case.length), *((case.groups, case.length),) * 2)
    shapes = [(case.items, *lead, case.size) for lead in rows]
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


# ---- the contenders ----------------------------------------------------------------------------


def torch_contenders(case: Case, device: str) -> Iterator[Contender]:
    """Yield torch's own function, and polyattn on its tensors."""
    import torch

    dtype = getattr(torch, case.dtype)
    tensors = [torch.from_numpy(x).to(device, dtype) for x in arrays_of(case)]
    yield from torch_contenders_of(tensors, case, device)


def torch_contenders_of(tensors: list[Array], case: Case, device: str) -> Iterator[Contender]:
    """Yield the contenders on some tensors."""
    import torch

    sdpa = torch.nn.functional.scaled_dot_product_attention
    grouped, causal = case.heads != case.groups, case.is_causal

    def wait(_: Any) -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    yield Contender(ENGINE, lambda: sdpa(*tensors, is_causal=causal, enable_gqa=grouped), wait)
    yield Contender(OURS, lambda: polyattn.attention(*tensors, is_causal=causal), wait)


def jax_functions(case: Case, device: str) -> tuple[list[Array], Any, Any]:
    """Return the arrays, and attention by cuDNN through `jax.nn`, or XLA on a CPU, and by us."""
    import jax

    place = jax.local_devices(backend="cpu" if device == "cpu" else "gpu")[0]
    arrays = [jax.device_put(x, place).astype(case.dtype) for x in arrays_of(case)]
    engine = "xla" if device == "cpu" else "cudnn"

    def bare(*arrays: Array) -> Array:
        turned = (x.swapaxes(1, 2) for x in arrays)
        output = jax.nn.dot_product_attention(
            *turned, is_causal=case.is_causal, implementation=engine
        )
        return output.swapaxes(1, 2)

    return arrays, bare, lambda *arrays: polyattn.attention(*arrays, is_causal=case.is_causal)


def jax_contenders(case: Case, device: str) -> Iterator[Contender]:
    """Yield cuDNN by `jax.nn` under jit, or XLA on a CPU, and polyattn under jit."""
    import jax

    arrays, bare, ours = jax_functions(case, device)
    for name, function in ((ENGINE, jax.jit(bare)), (OURS, jax.jit(ours))):
        yield Contender(name, lambda f=function: f(*arrays), jax.block_until_ready)


def torch_gradients(case: Case, device: str) -> Iterator[Contender]:
    """Yield the forward and backward pass by torch's own function, then those by polyattn."""
    import torch

    dtype = getattr(torch, case.dtype)
    tensors = [torch.from_numpy(x).to(device, dtype).requires_grad_() for x in arrays_of(case)]
    along = torch.ones_like(tensors[0])
    for contender in torch_contenders_of(tensors, case, device):

        def both(call: Call = contender.call) -> Any:
            return torch.autograd.grad(call(), tensors, along)

        yield contender._replace(call=both)


def jax_gradients(case: Case, device: str) -> Iterator[Contender]:
    """Yield the gradients of `jax.nn` under jit, and of polyattn."""
    import jax

    arrays, bare, ours = jax_functions(case, device)
    for name, function in ((ENGINE, bare), (OURS, ours)):

        def total(*arrays: Array, function: Any = function) -> Array:
            return function(*arrays).astype("float32").sum()

        gradient = jax.jit(jax.grad(total, (0, 1, 2)))
        yield Contender(name, lambda f=gradient: f(*arrays), jax.block_until_ready)


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
GRADIENTS = {"torch": torch_gradients, "jax": jax_gradients}


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
    on_cpu = device == "cpu"
    cases, tiny, steps = (ON_CPU, ON_CPU[0], STEPS_ON_CPU) if on_cpu else (CASES, TINY, STEPS)
    available = list(libraries(device))
    yield from table(
        "TFLOP/s", cases, {n: CONTENDERS[n] for n in available}, device, rounds, window
    )
    yield "\nForward and backward together, as 3.5 times the operations of forward:\n"
    known = {name: GRADIENTS[name] for name in available if name in GRADIENTS}
    yield from table("TFLOP/s", cases[2:4] or cases, known, device, rounds, window)
    yield "\nA step of decoding, by the bytes of keys and values:\n"
    yield from table("TB/s", steps, {n: CONTENDERS[n] for n in available}, device, rounds, window)
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


def table(
    unit: str, cases: tuple[Case, ...], contenders: dict[str, Any], device: str, rounds: int,
    window: float,
) -> Iterator[str]:  # fmt: skip
    """Yield a table of the engines' rates and ours, in operations, or in bytes of keys."""
    yield f"| (B, H, L, S, D) | library | engine, {unit} | polyattn, {unit} | of the engine |"
    yield "|---|---|---|---|---|"
    for case in cases:
        for library, make in contenders.items():
            times = measure(list(make(case, device)), rounds, window)
            passes = 3.5 if make in GRADIENTS.values() else 1
            amount = case.bytes if case.rows else passes * case.operations
            rates = [amount / times[name][0] / 1e12 for name in (ENGINE, OURS)]
            share = f"{100 * times[OURS][1]:.1f} %"
            yield f"| {case.text} | {library} | {rates[0]:.3g} | {rates[1]:.3g} | {share} |"


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
