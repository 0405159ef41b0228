"""Call time against the share of visible tiles, as ratios of alternating runs.

Hidden tiles should cost nothing: the time of a call over that of causal attention should equal the
ratio of their visible tiles. Each round calls attention once with every mask, and the ratios are of
the times of the same round.

The kernel that a call chooses is also compared with the others that are installed: the exit status
is 1 where it takes `MOST` times the time of another, in turns.

``make bench-masks`` prints the table and draws the plot.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import script
from engines import kernels

import polyattn
from polyattn import masks

REFERENCE = "causal"
HEADS, SIZE, LENGTH = 8, 64, 8192
TILE = 128  # rows and keys of the tiles that are counted
MOST = 1.5  # how many times the time of another kernel the chosen one may take


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
        REFERENCE: masks.causal(),
        "full": None,
        "window(256, 0)": masks.window(256, 0),
        "window(1024, 0)": masks.window(1024, 0),
        "window(4096, 0)": masks.window(4096, 0),
        "window | prefix": masks.window(256, 0) | masks.prefix(16),
        "documents": equal,
        "documents & causal": equal & masks.causal(),
        "uneven documents": uneven,
        "uneven documents & causal": uneven & masks.causal(),
        "shuffled documents": masks.segments(np.random.default_rng(2).permutation(ids)),
        "dilated window": masks.window(1024, 0) & masks.dilated(4),
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


def badly_chosen(
    calls: dict[str, dict[str, script.Call]],
    seconds: dict[tuple[str, str], float],
    options: script.Options,
) -> list[str]:
    """Return a line for each mask whose chosen kernel, its first, takes too long beside another.

    `seconds` are by mask and kernel, of calls that may not have been in turns: where they are too
    long, both kernels are timed again.
    """
    lines = []
    for name, by_kernel in calls.items():
        chosen, *others = by_kernel
        for other in others:
            if seconds[name, chosen] < MOST * seconds[name, other]:
                continue
            both = {kernel: by_kernel[kernel] for kernel in (other, chosen)}
            ratio = script.compare(both, options)[1].ratio.median
            if ratio >= MOST:
                lines.append(f"{name}: {chosen} is chosen and takes {ratio:.2f} of {other}'s time")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; draw the plot and write the times if asked."""
    parser = script.parser(__doc__ or "", 7, "quick", "plot", "json", "cpu-time", window=0.0)
    options = script.read(parser, arguments)
    length = 1024 if options.quick else LENGTH
    found = cases(length)
    shares = {name: share(mask, length) for name, mask in found.items()}
    rng = np.random.default_rng(0)
    shape = (1, HEADS, length, SIZE)
    arrays = [rng.standard_normal(shape, dtype=np.float32) for _ in range(3)]
    with script.measuring(options, shares=shares) as show:
        print(f"{HEADS} heads of {SIZE}, {length} tokens; times over {REFERENCE}'s")
        calls = {
            name: {
                kernel: partial(polyattn.attention, *arrays, mask=mask, **given)
                for kernel, given in kernels(arrays, {"mask": mask}).items()
            }
            for name, mask in found.items()
        }
        seconds: dict[tuple[str, str], float] = {}
        for kernel in calls[REFERENCE]:  # NumPy's own comes last, and is drawn
            able = {name: one[kernel] for name, one in calls.items() if kernel in one}
            results = script.compare(able, options)
            show(kernel, results, lambda one: f"  {shares[one.name]:.1%} of the tiles visible")
            seconds |= {(one.name, kernel): one.seconds for one in results}
        slow = [] if options.quick else badly_chosen(calls, seconds, options)
        print(*slow, sep="\n", file=sys.stderr)
    if options.plot:
        drawn = {one.name: one.seconds for one in results}
        draw(shares, drawn, options.plot, script.machine(options.threads))
    return 1 if slow else 0


#: The look of each kind of mask, by how its name begins: Okabe and Ito's colours, and a marker.
LOOKS = {
    "full": ("#000000", "s"),
    REFERENCE: ("#000000", "^"),
    "window(": ("#0072B2", "o"),
    "window |": ("#0072B2", "p"),
    "documents": ("#D55E00", "D"),
    "uneven": ("#009E73", "v"),
    "shuffled": ("#009E73", "X"),
    "dilated": ("#0072B2", "X"),
    "padding": ("#CC79A7", "P"),
    "compiled": ("#E69F00", "X"),
    "bool": ("#56B4E9", "*"),
}


def draw(shares: dict[str, float], seconds: dict[str, float], file: Path, where: str) -> None:
    """Draw time against the share of visible tiles, both logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 4.5), layout="constrained")
    figure.suptitle(where, fontsize=9)
    axis, whole = figure.subplots(), seconds["full"]
    ends = [min(shares.values()) * 0.8, 1.0]
    line = {"color": "grey", "linestyle": ":", "label": "full × share of tiles"}
    axis.loglog(ends, [end * whole for end in ends], **line)
    for name, visible in shares.items():
        kind = next(kind for kind in LOOKS if name.startswith(kind))
        colour, marker = LOOKS[kind]
        is_hollow = kind == "window |" or (name != REFERENCE and "causal" in name)
        face = "white" if is_hollow else colour
        style = {"markersize": 8, "linestyle": "", "color": colour, "markerfacecolor": face}
        label = name if kind != "window(" else "windows" if "(256" in name else None
        axis.loglog(visible, seconds[name], marker=marker, label=label, **style)
    across, up = (0.03, 0.1, 0.3, 1.0), (0.1, 0.2, 0.5, 1, 2, 5)
    axis.set_xticks(across, [f"{tick:.0%}" for tick in across])
    axis.set_yticks(up, [f"{tick:g}" for tick in up])
    axis.minorticks_off()
    axis.set(
        xlabel=f"tiles of {TILE} × {TILE} with a visible key",
        ylabel="seconds",
        title=f"{HEADS} heads of {SIZE}, {LENGTH} tokens, float32",
    )
    axis.grid(alpha=0.3)
    figure.legend(fontsize=9, loc="outside right upper")
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
