"""Attention on a CPU against its peers, as ratios of alternating runs in one process.

Each round gives every contender a window of calls; a ratio is the median over the rounds of one
window's time over torch's in the same round. Every contender may use the same number of threads.
The largest error against float64 is printed beside each time.

``make bench-cpu`` prints the tables and draws the plot.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import script

import polyattn
from polyattn.bench import timing

Contender = Callable[[], Any]
Array = Any
REFERENCE = "torch"
# With more scores, contenders that hold all scores at once or are many times slower are left out.
MOST_SCORES = 2.5e8


class Case(NamedTuple):
    """A shape (B, H, G, L, S, D) and the kind of call."""

    batch: int
    heads: int
    groups: int
    length: int
    keys: int
    size: int
    kind: str = "full"

    @property
    def shape(self) -> str:
        """The shape as text."""
        heads = f"{self.heads}" if self.heads == self.groups else f"{self.heads} on {self.groups}"
        return f"({self.batch}, {heads}, {self.length}, {self.keys}, {self.size})"

    @property
    def visible(self) -> float:
        """The number of visible scores."""
        rows = self.batch * self.heads * self.length
        seen = {"causal": self.keys / 2, "window": 257, "padding": self.key_lengths.mean()}
        return float(rows * seen.get(self.kind, self.keys))

    def arguments(self) -> tuple[list[Array], dict[str, Any]]:
        """Return query, key and value, and the options for `polyattn.attention`."""
        rng = np.random.default_rng(0)
        shapes = [(self.batch, self.heads, self.length, self.size)]
        shapes += [(self.batch, self.groups, self.keys, self.size)] * 2
        arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
        square = (self.length, self.keys)
        match self.kind:
            case "causal":
                return arrays, {"is_causal": True}
            case "window":
                return arrays, {"window": (256, 0)}
            case "padding":
                return arrays, {"mask": polyattn.masks.padding(self.key_lengths)}
            case "mask":
                return arrays, {"mask": rng.random(square) > 0.5}
            case "bias":
                return arrays, {"bias": rng.standard_normal(square, dtype=np.float32)}
            case "alibi":
                return arrays, {"score_mod": polyattn.scores.alibi(self.heads)}
            case "sinks":
                return arrays, {"sinks": rng.standard_normal(self.heads, dtype=np.float32)}
        return arrays, {}

    @property
    def key_lengths(self) -> Array:
        """The number of keys of each item of a padded batch, from an eighth of all on."""
        rng = np.random.default_rng(1)
        return rng.integers(self.keys // 8, self.keys, self.batch, endpoint=True)

    def mask(self, options: dict[str, Any]) -> Array | None:
        """Return which keys each row sees, as an array, or None for all."""
        rows, keys = np.arange(self.length)[:, None], np.arange(self.keys)
        if self.kind == "padding":
            return keys < self.key_lengths[:, None, None, None]
        if self.kind == "causal":
            return keys <= rows
        if self.kind == "window":
            return (keys <= rows) & (keys >= rows - 256)
        return options.get("mask")


def both(batch: int, heads: int, length: int, size: int) -> list[Case]:
    """Return a full and a causal case."""
    return [Case(batch, heads, heads, length, length, size, kind) for kind in ("full", "causal")]


CASES = (
    *both(1, 12, 32, 64),
    *both(1, 12, 64, 64),
    Case(32, 12, 12, 32, 32, 64, "padding"),
    *both(1, 12, 128, 64),
    Case(32, 12, 12, 128, 128, 64, "padding"),
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


# ---- the contenders ----------------------------------------------------------------------------


def textbook(
    query: Array, key: Array, value: Array, *, mask: Array = None, bias: Array = None
) -> Array:
    """Compute softmax(query·keyᵀ/√D)·value in plain NumPy."""
    groups = query.shape[1] // key.shape[1]
    key, value = (np.repeat(x, groups, axis=1) if groups > 1 else x for x in (key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(np.float32(query.shape[-1]))
    if bias is not None:
        scores += bias
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return scores @ value / scores.sum(axis=-1, keepdims=True)


def contenders(case: Case, threads: int) -> Iterator[tuple[str, Contender]]:
    """Yield the installed contenders that support the case, torch first."""
    arrays, options = case.arguments()
    mask, bias = case.mask(options), options.get("bias")
    peers = {REFERENCE: lambda: _torch(arrays, case, mask, bias, threads)}
    peers["polyattn"] = lambda: lambda: polyattn.attention(*arrays, backend="numpy", **options)
    if case.batch * case.heads * case.length * case.keys <= MOST_SCORES:
        peers["textbook"] = lambda: lambda: textbook(*arrays, mask=mask, bias=bias)
        if case.kind in ("full", "causal"):
            peers["polyattn jax"] = lambda: _jax(arrays, case, polyattn.attention, 2)
            peers["jax"] = lambda: _jax(arrays, case, None, 1)
            peers["onnxruntime"] = lambda: _onnxruntime(arrays, case, threads)
    for name, make in peers.items():
        try:
            call = make()
        except ImportError:
            continue
        if call is not None:
            yield name, call


def _torch(arrays: list[Array], case: Case, mask: Array, bias: Array, threads: int) -> Contender:
    import torch

    torch.set_num_threads(threads)
    tensors = [torch.from_numpy(array) for array in arrays]
    causal, grouped = case.kind == "causal", case.heads != case.groups
    added = mask if bias is None and not causal else bias
    mask = None if added is None else torch.from_numpy(added)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return lambda: sdpa(*tensors, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


def _jax(arrays: list[Array], case: Case, attend: Any, head_axis: int) -> Contender:
    """Return an attention function under jit, by default that of `jax.nn`."""
    import jax

    attend = attend or jax.nn.dot_product_attention
    placed = to_jax(arrays, head_axis)
    compiled = jax.jit(lambda q, k, v: attend(q, k, v, is_causal=case.kind == "causal"))
    return lambda: compiled(*placed).block_until_ready().swapaxes(head_axis, 2)


def to_jax(arrays: list[Array], head_axis: int) -> list[Array]:
    """Return arrays of JAX on the CPU with heads in the place that a function wants."""
    import jax

    on_cpu = jax.devices("cpu")[0]
    return [jax.device_put(array.swapaxes(head_axis, 2), on_cpu) for array in arrays]


def _onnxruntime(arrays: list[Array], case: Case, threads: int) -> Contender | None:
    import onnxruntime
    from onnx import TensorProto, helper

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
    """Seconds per call, its ratio to torch with quartiles, and the largest error."""

    seconds: float
    ratio: float | None
    low: float | None
    high: float | None
    error: float


def exact_rows(case: Case) -> tuple[Array, Array]:
    """Return the indices of some rows of the last head, and their attention in float64."""
    arrays, options = case.arguments()
    query, key, value = (array[-1:, -1:].astype(np.float64) for array in arrays)
    rows = np.unique(np.linspace(0, case.length - 1, 64).astype(int))
    mask, bias = (
        None if x is None else x[-1:] if x.ndim == 4 else x[rows]
        for x in (case.mask(options), options.get("bias"))
    )  # fmt: skip
    return rows, textbook(query[:, :, rows], key, value, mask=mask, bias=bias)


def measure(case: Case, threads: int, rounds: int, window: float) -> dict[str, Timing]:
    """Time the contenders of a case side by side."""
    calls = dict(contenders(case, threads))
    rows, exact = exact_rows(case)
    errors = {
        name: float(np.abs(np.asarray(call())[-1:, -1:][:, :, rows] - exact).max())
        for name, call in calls.items()
    }
    *_, times = timing.rounds(calls, lambda name: one_window(calls[name], window), rounds)
    ratios = timing.ratios(times, REFERENCE) if REFERENCE in times else {}
    return {
        name: Timing(
            statistics.median(times[name]), *ratios.get(name, (None, None, None)), errors[name]
        )
        for name in calls
    }


def one_window(call: Contender, window: float) -> float:
    """Return seconds per call over a window, after a rest."""
    if window:
        time.sleep(timing.REST)
    return timing.window(call, window)


@cache
def rates(window: float, side: int = 512) -> dict[str, float]:
    """Return the rates that bound the time on one thread: of both products, and ns per exp.

    They are those of tiles of so many rows and keys, several in a call of NumPy.
    """
    from polyattn_numpy import threads
    from polyattn_numpy.scratch import fast_exp2

    rng = np.random.default_rng(0)
    tiles = max(1, 12 * 128**2 // side**2)
    query, key = (rng.standard_normal((tiles, side, 64), dtype=np.float32) for _ in range(2))
    scores = query @ key.mT
    weights, product = np.empty_like(scores), np.empty_like(query)
    exp = np.exp2 if fast_exp2(np.dtype("float32")) else np.exp
    gflop = 2 * scores.size * 64 / 1e9

    def fastest(work: Callable[[], object]) -> float:
        return min(threads.blas.held(lambda: one_window(work, window)) for _ in range(3))

    limits = {
        "query·key GFLOP/s": gflop / fastest(lambda: np.matmul(query, key.mT, weights)),
        "weights·value GFLOP/s": gflop / fastest(lambda: np.matmul(scores, key, product)),
    }
    scores /= 8
    limits[f"{exp.__name__} ns"] = fastest(lambda: exp(scores, weights)) / scores.size * 1e9
    try:
        import torch
    except ImportError:
        return limits
    torch.set_num_threads(1)
    q, k, s, w, p = map(torch.from_numpy, (query, key, scores, weights, product))
    return limits | {
        "torch's query·key": gflop / fastest(lambda: torch.matmul(q, k.mT, out=w)),
        "torch's weights·value": gflop / fastest(lambda: torch.matmul(s, k, out=p)),
    }


def xla_rates(window: float) -> dict[str, float]:
    """Return the rates of XLA's products for a tile of 12 heads; none without JAX.

    They are per second of processor time, of all threads: XLA takes no number of threads.
    """
    try:
        import jax
    except ImportError:
        return {}
    on_cpu = jax.devices("cpu")[0]
    arrays = (np.ones((12, *shape), "float32") for shape in ((256, 64), (64, 256), (256, 256)))
    query, key, weights = (jax.device_put(array, on_cpu) for array in arrays)
    product = jax.jit(jax.numpy.matmul)

    def rate(a: Array, b: Array) -> float:
        def call() -> Any:
            return product(a, b).block_until_ready()

        seconds = (timing.window(call, window, clock=time.process_time) for _ in range(3))
        return 2 * 12 * 256 * 256 * 64 / 1e9 / min(seconds)

    return {"XLA's query·key": rate(query, key), "XLA's weights·value": rate(weights, query)}


def floor_of(case: Case, window: float, threads: int) -> float:
    """Return the seconds that only the two products and the exponential take."""
    by_keys, by_values, exponential, *_ = rates(window, min(512, case.keys)).values()
    flops = 2 * case.size
    per_score = flops / by_keys + flops / by_values + exponential
    return case.visible * per_score * 1e-9 / threads


# ---- printing ----------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Print the tables and draw the plot."""
    parser = script.parser(__doc__, 9)
    script.add_files(parser.add_argument)
    parser.add_argument("--cases", default="", metavar="TEXT", help="run only cases with this text")
    parser.add_argument("--threads", type=int, default=0, help="of each contender (default: all)")
    parser.add_argument(
        "--window", type=float, default=0.1, help="seconds of calls in a round (default: 0.1)"
    )
    options = parser.parse_args(arguments)
    threads = options.threads or script.all_threads()
    rounds, window = (1, 0.0) if options.quick else (options.rounds, options.window)
    print(f"{script.machine(threads)}; Python {platform.python_version()}; {rounds} rounds")
    short = window / 4
    limits = rates(short) | xla_rates(short)
    print("floor: " + ", ".join(f"{name} {rate:.3g}" for name, rate in limits.items()), flush=True)
    results = []
    with polyattn.use_threads(threads):
        for case in QUICK if options.quick else CASES:
            if options.cases not in f"{case.shape} {case.kind}":
                continue
            timings = measure(case, threads, rounds, window)
            results.append((case, timings, floor_of(case, short, threads)))
            print("\n".join(lines_of(*results[-1])), flush=True)
        if options.plot and not options.quick:
            plotted = [
                (case, measure(case, threads, max(3, rounds // 3), window))
                for length in PLOTTED
                for case in both(1, 8, length, 64)
            ]
            draw(options.plot, plotted, short, threads)
            print(f"\ndrawn: {options.plot}")
    if options.json:
        cases = [
            {"case": case._asdict(), "floor": floor}
            | {"timings": {name: t._asdict() for name, t in timings.items()}}
            for case, timings, floor in results
        ]
        script.write_json(
            options.json, {"machine": script.machine(threads), "rates": limits, "cases": cases}
        )
    ran = all({"polyattn", REFERENCE} <= set(timings) for _, timings, _ in results)
    return 0 if ran else 1


def lines_of(case: Case, timings: dict[str, Timing], floor: float) -> Iterator[str]:
    """Yield the lines of a case: time, ratio to torch with quartiles, and error."""
    yield f"\n{case.shape} {case.kind}: the floor is {floor * 1e3:.3g} ms"
    for name, timed in timings.items():
        ratio = ""
        if timed.ratio is not None:
            ratio = f"{timed.ratio:6.2f} ({timed.low:.2f} to {timed.high:.2f})"
        yield f"  {name:12} {timed.seconds * 1e3:10.3f} ms {ratio:24} error {timed.error:.1e}"


def draw(
    file: Path, plotted: list[tuple[Case, dict[str, Timing]]], window: float, threads: int
) -> None:
    """Draw time against length for each contender, with the floor."""
    figure, axes = script.subplots(2, (11, 4.6), script.machine(threads))
    for axis, kind in zip(axes, ("full", "causal"), strict=True):
        own = [(case, timings) for case, timings in plotted if case.kind == kind]
        for name in dict.fromkeys(name for _, timings in own for name in timings):
            points = [(c.length, t[name].seconds * 1e3) for c, t in own if name in t]
            axis.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        floors = [(c.length, floor_of(c, window, threads) * 1e3) for c, _ in own]
        axis.loglog(*zip(*floors, strict=True), color="grey", linestyle=":", label="floor")
        axis.set(title=f"{kind}, 8 heads of 64, float32", xlabel="length")
        axis.set_xticks([c.length for c, _ in own], [str(c.length) for c, _ in own], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("milliseconds")
    axes[1].legend()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
