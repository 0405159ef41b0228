"""Call time against the share of visible tiles, as ratios of alternating runs.

Hidden tiles should cost nothing: the time of a call over that of causal attention should equal the
ratio of their visible tiles. Each round calls attention once with every mask, and the ratios are of
the times of the same round.

``make bench-masks`` prints the table and draws the plot.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import script

import polyattn
from polyattn import masks
from polyattn.bench import timing

REFERENCE = "causal"
HEADS, SIZE, LENGTH = 8, 64, 8192
TILE = 128  # rows and keys of the tiles that are counted


def documents(length: int, mean: int, *, spread: bool) -> np.ndarray:
    """Return the ids of documents packed into a sequence; `spread` varies their lengths."""
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
    table = masks.compile(mask, length, tile=TILE).any_visible
    return sum(table) / len(table)


class Timing(NamedTuple):
    """The share of visible tiles, seconds per call, and the ratio to causal with its quartiles."""

    share: float
    seconds: float
    ratio: float
    low: float
    high: float


def measure(cases: dict[str, Any], length: int, rounds: int) -> dict[str, Timing]:
    """Time the masks side by side."""
    rng = np.random.default_rng(0)
    shape = (1, HEADS, length, SIZE)
    arrays = [rng.standard_normal(shape, dtype=np.float32) for _ in range(3)]

    def seconds(name: str) -> float:
        call = partial(polyattn.attention, *arrays, mask=cases[name], backend="numpy")
        return timing.window(call, 0.0)  # one call

    next(timing.rounds(cases, seconds, 1))  # to warm up
    *_, times = timing.rounds(cases, seconds, rounds)
    return {
        name: Timing(share(cases[name], length), statistics.median(times[name]), *ratio)
        for name, ratio in timing.ratios(times, REFERENCE).items()
    }


def main() -> int:
    """Print the table; draw the plot and write the times if asked."""
    parser = script.parser(__doc__, 7)
    script.add_files(parser.add_argument)
    options = parser.parse_args()
    length, rounds = (1024, 1) if options.quick else (LENGTH, options.rounds)
    threads = script.all_threads()
    with polyattn.use_threads(threads):
        timings = measure(cases(length), length, rounds)
    print(script.machine(threads))
    print(f"{HEADS} heads of {SIZE}, {length} tokens; times over {REFERENCE}'s\n")
    print(f"{'mask':28} {'visible tiles':>14} {'ms':>9} {'ratio':>7}  quartiles")
    for name, timed in timings.items():
        print(
            f"{name:28} {timed.share:14.1%} {timed.seconds * 1e3:9.1f} {timed.ratio:7.3f}"
            f"  {timed.low:.3f}-{timed.high:.3f}"
        )
    if options.json:
        script.write_json(options.json, {name: x._asdict() for name, x in timings.items()})
    if options.plot:
        draw(timings, options.plot, script.machine(threads))
    return 0


def draw(timings: dict[str, Timing], file: Path, where: str) -> None:
    """Draw time against the share of visible tiles, both logarithmic."""
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
    figure, axis = script.subplots(1, (7.5, 5), where)
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
    for name, timed in timings.items():
        kind = next(kind for kind in kinds if name.startswith(kind))
        colour, marker = kinds[kind]
        hollow = "causal" in name and name != REFERENCE
        label = "windows" if kind == "window(" else name
        axis.loglog(
            timed.share,
            timed.seconds,
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
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
