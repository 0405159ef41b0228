"""Attention on a CPU against its peers, as ratios of alternating runs in one process.

Ratios are of time over torch's. Every contender may use the same number of threads. The largest
error against float64 is printed beside each time.

``make bench-cpu`` prints the tables and draws the plot.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import script
from cases import REFERENCE, Array, Case, both, contenders, textbook
from script import Row

from polyattn.bench import timing
from polyattn.bench.picture import COLOURS, MARKERS

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


def measure(case: Case, options: script.Options) -> list[Row]:
    """Time the contenders of a case side by side."""
    rows, exact = exact_rows(case)

    def error(result: Array, exact: Array) -> float:
        return float(np.abs(np.asarray(result)[-1:, -1:][:, :, rows] - exact).max())

    return script.compare(dict(contenders(case, options.threads)), options, error, exact)


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


# ---- the floor ---------------------------------------------------------------------------------


@cache
def rates(window: float, side: int = 512) -> dict[str, float]:
    """Return the rates that bound the time on one thread: of both products, and ns per exp.

    They are those of tiles of so many rows and keys, several in a call of NumPy.
    """
    from polyattn_numpy import thread_pool
    from polyattn_numpy.scratch import fast_exp2

    rng = np.random.default_rng(0)
    tiles = max(1, 12 * 128**2 // side**2)
    query, key = (rng.standard_normal((tiles, side, 64), dtype=np.float32) for _ in range(2))
    scores = query @ key.mT
    weights, product = np.empty_like(scores), np.empty_like(query)
    exp = np.exp2 if fast_exp2(np.dtype("float32")) else np.exp
    gflop = 2 * scores.size * 64 / 1e9

    def fastest(work: Callable[[], object]) -> float:
        return min(thread_pool.blas.held(lambda: script.window(work, window)) for _ in range(3))

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
    parser = script.parser(__doc__, 9, "quick", "plot", "json", "cases", "threads")
    parser.add_argument(
        "--window", type=float, default=0.1, help="seconds of calls in a round (default: 0.1)"
    )
    options = script.read(parser, arguments)
    short, ran = options.window / 4, True
    limits = rates(short) | xla_rates(short)
    python = platform.python_version()
    with script.measuring(options, f"float32; Python {python}", rates=limits) as show:
        print("floor: " + ", ".join(f"{name} {rate:.3g}" for name, rate in limits.items()))
        for case in script.chosen(options, CASES, QUICK):
            rows, floor = measure(case, options), floor_of(case, short, options.threads)
            print(f"\n{case.title}: the floor is {floor * 1e3:.3g} ms")
            show(case.title, rows, "  ", about={"floor": floor})
            ran &= {"numpy", REFERENCE} <= {row.name for row in rows}
        if options.plot and not options.quick:
            options.rounds = max(3, options.rounds // 3)
            cases = [case for length in PLOTTED for case in both(1, 8, length, 64)]
            draw(options, [(case, measure(case, options)) for case in cases])
            print(f"\ndrawn: {options.plot}")
    return 0 if ran else 1


def draw(options: script.Options, plotted: list[tuple[Case, list[Row]]]) -> None:
    """Draw time against length for each contender, with the floor."""
    figure, axes = script.subplots(2, (11, 4.6), script.machine(options.threads))
    for axis, kind in zip(axes, ("full", "causal"), strict=True):
        own = [(case, rows) for case, rows in plotted if case.kind == kind]
        points: dict[str, list[tuple[int, float]]] = {}
        for case, rows in own:
            for row in rows:
                points.setdefault(row.name, []).append((case.length, row.seconds * 1e3))
        looks = zip(COLOURS, MARKERS, strict=False)  # more than there are contenders
        for (name, found), (colour, marker) in zip(points.items(), looks, strict=False):
            style = {"color": colour, "marker": marker, "markersize": 5, "label": name}
            axis.loglog(*zip(*found, strict=True), **style)
        floors = [
            (c.length, floor_of(c, options.window / 4, options.threads) * 1e3) for c, _ in own
        ]
        axis.loglog(*zip(*floors, strict=True), color="grey", linestyle=":", label="floor")
        axis.set(title=f"{kind}, 8 heads of 64, float32", xlabel="length")
        axis.set_xticks([c.length for c, _ in own], [str(c.length) for c, _ in own], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("milliseconds")
    axes[1].legend()
    figure.savefig(options.plot, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
