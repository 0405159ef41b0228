"""Time against how much a mask leaves to see, as ratios of alternating runs in one process.

What a mask hides should cost nothing: a call's time should be to that of causal attention as the
tiles that have a visible key are to causal's. Each round calls every mask's attention once, in turn
and then in reverse, and a ratio is the median over the rounds of one call's time to causal's of the
same round.

``make bench-masks`` prints the table and draws the plot.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import polyattn
from polyattn import masks
from polyattn.bench.machine import processor, versions

REFERENCE = "causal"
HEADS, SIZE, LENGTH = 8, 64, 8192
# Rows and keys of the tiles that are counted.
TILE = 128


# ---- the masks ---------------------------------------------------------------------------------


def documents(length: int, mean: int, *, spread: bool) -> np.ndarray:
    """Return the ids of documents packed into a sequence: of one length, or of 1 to twice that."""
    lengths = np.full(-(-length // mean), mean)
    if spread:
        lengths = np.random.default_rng(1).integers(1, 2 * mean, 4 * len(lengths))
    return np.repeat(np.arange(len(lengths)), lengths)[:length]


def checkered(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Show every other block of 256 rows and keys."""
    return (i // 256 + j // 256) % 2 == 0


def cases(length: int = LENGTH) -> dict[str, Any]:
    """Return the masks by name."""
    equal = masks.segments(documents(length, length // 16, spread=False))
    ids = documents(length, length // 16, spread=True)
    uneven = masks.segments(ids)
    return {
        "full": None,
        REFERENCE: masks.causal(),
        "window(256, 0)": masks.window(256, 0),
        "window(1024, 0)": masks.window(1024, 0),
        "window(4096, 0)": masks.window(4096, 0),
        "window | prefix": masks.window(256, 0) | masks.prefix(16),
        "documents": equal,
        "documents & causal": equal & masks.causal(),
        "uneven documents": uneven,
        "uneven documents & causal": uneven & masks.causal(),
        "padding": masks.padding(length // 4),
        "compiled rule": masks.compile(checkered, length),
        "bool array": ids[:, None] == ids,
    }


def share(mask: Any, length: int) -> float:
    """Return the share of the tiles that have a visible key."""
    if mask is None:
        return 1.0
    table = masks.compile(mask, length, tile=TILE).some
    return sum(table) / len(table)


# ---- measuring ---------------------------------------------------------------------------------


class Timing(NamedTuple):
    """The share of visible tiles, seconds a call, and the ratio to causal with its quartiles."""

    share: float
    seconds: float
    ratio: float
    low: float
    high: float


def measure(
    given: dict[str, Any], length: int, rounds: int, heads: int = HEADS
) -> dict[str, Timing]:
    """Time the masks side by side."""
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.standard_normal((1, heads, length, SIZE), dtype=np.float32) for _ in range(3)
    )

    def call(mask: Any) -> Callable[[], Any]:
        return lambda: polyattn.attention(query, key, value, mask=mask, backend="numpy")

    running = {name: call(mask) for name, mask in given.items()}
    seconds: dict[str, list[float]] = {name: [] for name in running}
    order = list(running)
    for warm in (True, *[False] * rounds):
        order.reverse()
        for name in order:
            start = time.perf_counter()
            running[name]()
            if not warm:
                seconds[name].append(time.perf_counter() - start)
    timings = {}
    for name, own in seconds.items():
        ratios = sorted(a / b for a, b in zip(own, seconds[REFERENCE], strict=True))
        last = len(ratios) - 1
        timings[name] = Timing(
            share(given[name], length),
            statistics.median(own),
            statistics.median(ratios),
            ratios[round(last / 4)],
            ratios[round(3 * last / 4)],
        )
    return timings


def main() -> int:
    """Print the table; draw the plot and write the figures if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round of 1024 tokens")
    parser.add_argument("--rounds", type=int, default=7, help="rounds to measure (default: 7)")
    parser.add_argument("--plot", type=Path, help="draw time against visible tiles there")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    length, rounds = (1024, 1) if options.quick else (LENGTH, options.rounds)
    threads = len(os.sched_getaffinity(0))
    with polyattn.use_threads(threads):
        timings = measure(cases(length), length, rounds)
    print(f"{processor()}, {threads} threads; {versions()}")
    print(f"{HEADS} heads of {SIZE}, {length} tokens, float32; times over {REFERENCE}'s\n")
    print(f"{'mask':28} {'visible tiles':>14} {'ms':>9} {'ratio':>7}  quartiles")
    for name, timing in timings.items():
        print(
            f"{name:28} {timing.share:14.1%} {timing.seconds * 1e3:9.1f} {timing.ratio:7.3f}"
            f"  {timing.low:.3f}-{timing.high:.3f}"
        )
    if options.json:
        figures = {name: timing._asdict() for name, timing in timings.items()}
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    if options.plot:
        draw(timings, options.plot, f"{processor()}, {threads} threads; {versions()}")
    return 0


# ---- the plot ----------------------------------------------------------------------------------


def draw(timings: dict[str, Timing], file: Path, where: str) -> None:
    """Draw time against the share of visible tiles, both logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Okabe and Ito's colours, each with a marker of its own.
    kinds = {
        "full": ("#000000", "s"),
        REFERENCE: ("#000000", "^"),
        "window(": ("#0072B2", "o"),
        "window |": ("#0072B2", "p"),
        "documents": ("#D55E00", "D"),
        "uneven": ("#009E73", "v"),
        "padding": ("#CC79A7", "P"),
        "compiled": ("#E69F00", "X"),
        "bool": ("#56B4E9", "*"),
    }
    figure, axis = pyplot.subplots(figsize=(7.5, 5), layout="constrained")
    whole = timings["full"].seconds
    ends = (min(timing.share for timing in timings.values()) * 0.8, 1.0)
    axis.loglog(
        ends,
        [end * whole for end in ends],
        color="grey",
        linestyle=":",
        label="full × share of tiles",
    )
    named: set[str] = set()
    for name, timing in timings.items():
        kind = next(kind for kind in kinds if name.startswith(kind))
        colour, marker = kinds[kind]
        hollow = "causal" in name and name != REFERENCE
        label = "windows" if kind == "window(" else name
        axis.loglog(
            timing.share,
            timing.seconds,
            marker=marker,
            markersize=8,
            linestyle="",
            color=colour,
            markerfacecolor="white" if hollow or kind == "window |" else colour,
            label=None if label in named else label,
        )
        named.add(label)
    shares, seconds = (0.03, 0.1, 0.3, 1.0), (0.1, 0.2, 0.5, 1, 2, 5)
    axis.set_xticks(shares, [f"{tick:.0%}" for tick in shares])
    axis.set_yticks(seconds, [f"{tick:g}" for tick in seconds])
    axis.minorticks_off()
    axis.set(
        xlabel=f"tiles of {TILE} × {TILE} with a visible key",
        ylabel="seconds",
        title=f"{HEADS} heads of {SIZE}, {LENGTH} tokens, float32",
    )
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9)
    figure.suptitle(where, fontsize=9)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
