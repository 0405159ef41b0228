"""Attention on a CPU against its peers, as ratios of alternating runs in one process.

A shared machine's milliseconds are worth little, and ratios of what ran side by side a great deal.
Each round gives every contender a window of calls, in turn and then in reverse, after a rest in
which threads that spin for more work give up, and a warm-up; a ratio is the median over the rounds
of one window's time to torch's of the same round. Every contender may use the same number of
threads, and the largest error of each against float64 stands beside its time.

``make bench-cpu`` prints the tables and draws the plot.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import polyattn
from polyattn.bench import timing
from polyattn.bench.machine import processor, versions

Contender = Callable[[], Any]
Array = Any
REFERENCE = "torch"


class Case(NamedTuple):
    """A shape (B, H, G, L, S, D) and what is asked of it."""

    batch: int
    heads: int
    groups: int
    length: int
    keys: int
    size: int
    kind: str = "full"

    @property
    def shape(self) -> str:
        """The shape, as a table has it."""
        heads = f"{self.heads}" if self.heads == self.groups else f"{self.heads} on {self.groups}"
        return f"({self.batch}, {heads}, {self.length}, {self.keys}, {self.size})"

    @property
    def visible(self) -> float:
        """How many scores are visible."""
        whole = self.batch * self.heads * self.length * self.keys
        if self.kind == "causal":
            return whole / 2
        return self.batch * self.heads * self.length * 257 if self.kind == "window" else whole


def both(*shape: int) -> list[Case]:
    """Return the case in full and causal."""
    batch, heads, length, size = shape
    return [Case(batch, heads, heads, length, length, size, kind) for kind in ("full", "causal")]


CASES = (
    *both(1, 12, 128, 64),
    *both(1, 12, 256, 64),
    *both(1, 12, 512, 64),
    *both(4, 8, 1024, 64),
    *both(1, 12, 2048, 64),
    *both(1, 8, 4096, 128),
    *both(1, 1, 16384, 64),
    Case(8, 32, 8, 1, 4096, 128),
    Case(1, 12, 12, 2048, 2048, 64, "mask"),
    Case(1, 12, 12, 2048, 2048, 64, "bias"),
    Case(1, 8, 8, 8192, 8192, 64, "window"),
)
QUICK = (*both(1, 4, 256, 64), Case(1, 8, 2, 1, 512, 64), Case(1, 4, 4, 256, 256, 64, "window"))
PLOTTED = (128, 256, 512, 1024, 2048, 4096, 8192)
# Above so many scores, those that hold all of them or are many times slower sit out.
MOST_SCORES = 2.5e8


def arrays_of(case: Case) -> tuple[list[Array], dict[str, Any]]:
    """Return query, key and value, and the options of a case for `polyattn.attention`."""
    rng = np.random.default_rng(0)
    shapes = [(case.batch, case.heads, case.length, case.size)]
    shapes += [(case.batch, case.groups, case.keys, case.size)] * 2
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    square = (case.length, case.keys)
    options: dict[str, dict[str, Any]] = {
        "full": {},
        "causal": {"is_causal": True},
        "window": {"window": (256, 0)},
        "mask": {"mask": rng.random(square) > 0.5} if case.kind == "mask" else {},
        "bias": {"bias": rng.standard_normal(square, dtype=np.float32)}
        if case.kind == "bias"
        else {},
    }
    return arrays, options[case.kind]


# ---- the contenders ----------------------------------------------------------------------------


def textbook(
    query: Array, key: Array, value: Array, *, visible: Array = None, bias: Array = None
) -> Array:
    """Compute softmax(query·keyᵀ/√D)·value as anyone writes it."""
    groups = query.shape[1] // key.shape[1]
    key, value = (np.repeat(x, groups, axis=1) if groups > 1 else x for x in (key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(np.float32(query.shape[-1]))
    if bias is not None:
        scores += bias
    if visible is not None:
        scores = np.where(visible, scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return scores @ value / scores.sum(axis=-1, keepdims=True)


def visible_of(case: Case, options: dict[str, Any]) -> Array | None:
    """Return the mask of a case as an array, or None."""
    rows, keys = np.arange(case.length)[:, None], np.arange(case.keys)
    if case.kind == "causal":
        return keys <= rows
    if case.kind == "window":
        return (keys <= rows) & (keys >= rows - 256)
    return options.get("mask")


def contenders(case: Case, threads: int) -> Iterator[tuple[str, Contender]]:
    """Yield those that are here and can do the case, by name, torch first."""
    arrays, options = arrays_of(case)
    seen = visible_of(case, options) if case.kind in ("window", "mask") else None
    small = case.batch * case.heads * case.length * case.keys <= MOST_SCORES
    torch = _torch(arrays, case, options, seen, threads)
    if torch is not None:
        yield REFERENCE, torch
    yield "polyattn", lambda: polyattn.attention(*arrays, backend="numpy", **options)
    if small:
        bias = options.get("bias")
        mask = visible_of(case, options)
        yield "textbook", lambda: textbook(*arrays, visible=mask, bias=bias)
        peers = (("polyattn jax", _our_jax), ("jax", _jax), ("onnxruntime", _onnxruntime))
        for name, make in peers if case.kind in ("full", "causal") else ():
            peer = make(arrays, case, threads)
            if peer is not None:
                yield name, peer


def _torch(
    arrays: list[Array], case: Case, options: dict[str, Any], seen: Array, threads: int
) -> Contender | None:
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(threads)
    tensors = [torch.from_numpy(array) for array in arrays]
    bias = options.get("bias", seen)
    mask = None if bias is None else torch.from_numpy(bias)
    causal, grouped = case.kind == "causal", case.heads != case.groups
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return lambda: sdpa(*tensors, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


def _jax(arrays: list[Array], case: Case, threads: int) -> Contender | None:
    try:
        import jax
    except ImportError:
        return None
    on_cpu = jax.devices("cpu")[0]
    turned = [jax.device_put(array.swapaxes(1, 2), on_cpu) for array in arrays]
    attend = jax.nn.dot_product_attention
    compiled = jax.jit(lambda q, k, v: attend(q, k, v, is_causal=case.kind == "causal"))
    return lambda: compiled(*turned).block_until_ready().swapaxes(1, 2)


def _our_jax(arrays: list[Array], case: Case, threads: int) -> Contender | None:
    try:
        import jax
    except ImportError:
        return None
    on_cpu = jax.devices("cpu")[0]
    placed = [jax.device_put(array, on_cpu) for array in arrays]
    causal = case.kind == "causal"
    compiled = jax.jit(lambda q, k, v: polyattn.attention(q, k, v, is_causal=causal))
    return lambda: compiled(*placed).block_until_ready()


def _onnxruntime(arrays: list[Array], case: Case, threads: int) -> Contender | None:
    try:
        import onnxruntime
        from onnx import TensorProto, helper
    except ImportError:
        return None
    if case.heads != case.groups:
        return None
    names = ["query", "key", "value"]
    node = helper.make_node("Attention", names, ["output"], is_causal=int(case.kind == "causal"))
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape)
        for name, array in zip(names, arrays, strict=True)
    ]
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "attention", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )
    feed = dict(zip(names, arrays, strict=True))
    return lambda: session.run(None, feed)[0]


# ---- measuring ---------------------------------------------------------------------------------


class Timing(NamedTuple):
    """Seconds a call, its ratio to torch with the quartiles of that, and the largest error."""

    seconds: float
    ratio: float | None
    low: float | None
    high: float | None
    error: float


def exact_rows(case: Case) -> tuple[Array, Array]:
    """Return some rows of the last head, and their attention in float64."""
    arrays, options = arrays_of(case)
    query, key, value = (array[-1:, -1:].astype(np.float64) for array in arrays)
    rows = np.unique(np.linspace(0, case.length - 1, 64).astype(int))
    visible, bias = visible_of(case, options), options.get("bias")
    visible = None if visible is None else visible[rows]
    bias = None if bias is None else bias[rows].astype(np.float64)
    return rows, textbook(query[:, :, rows], key, value, visible=visible, bias=bias)


def measure(case: Case, threads: int, rounds: int, window: float) -> dict[str, Timing]:
    """Time the contenders of a case side by side."""
    running = dict(contenders(case, threads))
    rows, exact = exact_rows(case)
    errors = {}
    for name, contender in running.items():
        found = np.asarray(contender())[-1:, -1:][:, :, rows]
        errors[name] = float(np.abs(found - exact).max())
    seconds: dict[str, list[float]] = {name: [] for name in running}
    order = list(running)
    for _ in range(rounds):
        order.reverse()
        for name in order:
            seconds[name].append(_one_window(running[name], window))
    timings = {}
    for name, own in seconds.items():
        ratios = [a / b for a, b in zip(own, seconds.get(REFERENCE, []), strict=False)]
        spread = timing.spread_of(ratios) if ratios else (None, None, None)
        timings[name] = Timing(statistics.median(own), *spread, errors[name])
    return timings


def _one_window(call: Contender, window: float) -> float:
    if window:
        time.sleep(timing.REST)
    return timing.window(call, window)


def rates(window: float) -> dict[str, float]:
    """Return what the floor is made of, on one thread: GFLOP/s of both products, ns of exp."""
    from polyattn_numpy import threads
    from polyattn_numpy.scratch import fast_exp2

    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((512, 64), dtype=np.float32) for _ in range(2))
    scores = query @ key.T
    weights, product = np.empty_like(scores), np.empty_like(query)
    exp = np.exp2 if fast_exp2(np.dtype("float32")) else np.exp
    flops = 2 * scores.size * 64

    def best(work: Callable[[], object]) -> float:
        return min(threads.blas.held(lambda: _one_window(work, window)) for _ in "123")

    by_keys = best(lambda: np.matmul(query, key.T, weights))
    by_values = best(lambda: np.matmul(scores, key, product))
    scores /= 8
    exponential = best(lambda: exp(scores, weights))
    found = {
        "query·key GFLOP/s": flops / by_keys / 1e9,
        "weights·value GFLOP/s": flops / by_values / 1e9,
        f"{exp.__name__} ns": exponential / scores.size * 1e9,
    }
    return found | _torch_rates(query, key, scores, window)


def _torch_rates(query: Array, key: Array, scores: Array, window: float) -> dict[str, float]:
    """Return the same products' rates in torch, on one thread, if it is here."""
    try:
        import torch
    except ImportError:
        return {}
    torch.set_num_threads(1)
    q, k, s = map(torch.from_numpy, (query, key, scores))
    weights, product = torch.empty_like(s), torch.empty_like(q)
    flops = 2 * scores.size * query.shape[-1]
    by_keys = min(_one_window(lambda: torch.mm(q, k.T, out=weights), window) for _ in "123")
    by_values = min(_one_window(lambda: torch.mm(s, k, out=product), window) for _ in "123")
    return {
        "torch's query·key": flops / by_keys / 1e9,
        "torch's weights·value": flops / by_values / 1e9,
    }


def floor_of(case: Case, found: dict[str, float], threads: int) -> float:
    """Return the seconds that the two products and the exponential alone take."""
    products, exponential = list(found.values())[:2], list(found.values())[2]
    flops = 2 * case.size
    per_score = sum(flops / rate for rate in products) + exponential
    return case.visible * per_score * 1e-9 / threads


# ---- showing -----------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Print the tables and draw the plot."""
    parser = argparse.ArgumentParser(prog="make bench-cpu", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="small shapes once: a check, no measure"
    )
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases with this in them")
    parser.add_argument("--rounds", type=int, default=9, help="alternating rounds (default: 9)")
    parser.add_argument("--threads", type=int, default=0, help="of every contender (default: all)")
    parser.add_argument("--plot", type=Path, default=None, help="a PNG file to draw")
    parser.add_argument("--json", type=Path, default=None, help="a file for the figures")
    options = parser.parse_args(arguments)
    threads = options.threads or len(os.sched_getaffinity(0))
    rounds, window = (1, 0.0) if options.quick else (options.rounds, 0.1)
    print(f"{platform.processor() or platform.machine()}: {processor()}; {threads} threads each")
    print(f"Python {platform.python_version()}, {versions()}; float32; {rounds} rounds")
    found = rates(window / 4)
    print("floor: " + ", ".join(f"{name} {rate:.3g}" for name, rate in found.items()), flush=True)
    results = []
    with polyattn.use_threads(threads):
        for case in QUICK if options.quick else CASES:
            if options.cases not in f"{case.shape} {case.kind}":
                continue
            timings = measure(case, threads, rounds, window)
            results.append((case, timings, floor_of(case, found, threads)))
            print("\n".join(lines_of(*results[-1])), flush=True)
        if options.plot and not options.quick:
            print("\nfor the plot:")
            lines = [
                (case, measure(case, threads, max(3, rounds // 3), window))
                for length in PLOTTED
                for case in both(1, 8, length, 64)
            ]
            draw(options.plot, lines, found, threads)
            print(f"drawn: {options.plot}")
    if options.json:
        options.json.write_text(
            json.dumps(
                {
                    "processor": processor(), "threads": threads, "versions": versions(),
                    "rates": found,
                    "cases": [
                        {"case": case._asdict(), "floor": floor}
                        | {"timings": {name: t._asdict() for name, t in timings.items()}}
                        for case, timings, floor in results
                    ],
                },
                indent=1,
            )
        )  # fmt: skip
    ran = all({"polyattn", REFERENCE} <= set(timings) for _, timings, _ in results)
    return 0 if ran else 1


def lines_of(case: Case, timings: dict[str, Timing], floor: float) -> Iterator[str]:
    """Yield the lines of a case: time, ratio to torch with its quartiles, error, floor."""
    yield f"\n{case.shape} {case.kind}: the floor is {floor * 1e3:.3g} ms"
    for name, found in timings.items():
        ratio = ""
        if found.ratio is not None:
            ratio = f"{found.ratio:6.2f} ({found.low:.2f} to {found.high:.2f})"
        yield f"  {name:12} {found.seconds * 1e3:10.3f} ms {ratio:24} error {found.error:.1e}"


def draw(file: Path, lines: list[tuple[Case, dict[str, Timing]]], found: Any, threads: int) -> None:
    """Draw time against length for each contender, with the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    for axis, kind in zip(axes, ("full", "causal"), strict=True):
        own = [(case, timings) for case, timings in lines if case.kind == kind]
        names = dict.fromkeys(name for _, timings in own for name in timings)
        for name in names:
            points = [(c.length, t[name].seconds * 1e3) for c, t in own if name in t]
            axis.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        floors = [(c.length, floor_of(c, found, threads) * 1e3) for c, _ in own]
        axis.loglog(*zip(*floors, strict=True), color="grey", linestyle=":", label="floor")
        axis.set(title=f"{kind}, 8 heads of 64, float32", xlabel="length")
        axis.set_xticks([c.length for c, _ in own], [str(c.length) for c, _ in own], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("milliseconds")
    axes[1].legend()
    figure.suptitle(f"{processor()}, {threads} threads; {versions()}", fontsize=9)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
