"""Plot rates against length, with the roofline of each device.

A line is named by its backend and its kernels, with a star where several backends run the same.
Lines differ in marker and in colour, also for readers with a colour vision deficiency. Labels do
not overlap. pyplot does not keep the figure.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from polyattn._base.extras import require_matplotlib
from polyattn.bench.peaks import roof
from polyattn.bench.results import BenchResults, Timing
from polyattn.bench.table import rate_unit

DPI = 130
# Okabe and Ito's colours without black, which the roofs have; yellow, faint on white, is last.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442")
MARKERS = "osD^vPX*"
ROOFS = ("--", ":", "-.", (0, (1, 3)))


def draw(results: BenchResults) -> Any:
    """Return a matplotlib figure: a line for each backend, and a band between its quartiles."""
    figures = require_matplotlib("figure")
    figure = figures.Figure(figsize=(7.4, 5.6), layout="constrained")
    axes = figure.add_subplot()
    unit, scale = rate_unit(results)
    timed = [row for row in results.rows if row.seconds is not None]
    lengths = sorted({row.length for row in timed})
    for number, (device, peak) in enumerate(results.roofs.items()):
        rates = [roof(peak, results.workload, length) / scale for length in lengths]
        look = {"color": "0.25", "linestyle": ROOFS[number % len(ROOFS)], "linewidth": 1.2}
        if len(lengths) == 1:  # a line of one point would be invisible
            axes.axhline(rates[0], label=f"roof of {device}", **look)
        else:
            axes.plot(lengths, rates, label=f"roof of {device}", **look)
    for number, name in enumerate(dict.fromkeys(row.backend for row in timed)):
        own = [row for row in timed if row.backend == name]
        colour = COLOURS[number % len(COLOURS)]
        _line(axes, results, own, scale, color=colour, marker=MARKERS[number % len(MARKERS)])
    if timed:  # logarithmic axes need data
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        _ticks(axes, lengths)
        same = "; *: the same kernel, called by several backends"
        figure.legend(
            loc="outside lower center", ncols=_columns(axes), frameon=False, fontsize="small",
            title="bands: quartiles" + same * any(map(results.same_kernel, timed)),
            title_fontsize="small",
        )  # fmt: skip
    axes.set_xlabel("keys" if results.workload.decode else "length")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.25, which="both")
    axes.set_title("\n".join(_title(results)), fontsize="small", loc="left")
    return figure


def _line(
    axes: Any, results: BenchResults, rows: Sequence[Timing], scale: float, **look: Any
) -> None:
    lengths = [row.length for row in rows]

    def rates(seconds: Iterable[float | None]) -> list[float]:
        return [
            results.workload.flops(length) / (second or 1) / scale
            for length, second in zip(lengths, seconds, strict=True)
        ]

    middle = rates(row.seconds for row in rows)
    axes.plot(lengths, middle, label=_label(results, rows), markersize=5, linewidth=1.6, **look)
    low, high = rates(row.high for row in rows), rates(row.low for row in rows)
    axes.fill_between(lengths, low, high, color=look["color"], alpha=0.18, linewidth=0)


def _label(results: BenchResults, rows: Sequence[Timing]) -> str:
    return f"{rows[0].title} {', '.join(dict.fromkeys(map(results.marked_kernel, rows)))}"


def _columns(axes: Any) -> int:
    """Return how many columns the legend has room for."""
    longest = max(map(len, axes.get_legend_handles_labels()[1]))
    return max(1, min(4, 90 // (longest + 8)))


def _ticks(axes: Any, lengths: Sequence[int]) -> None:
    """Label the measured lengths, as many as fit, and round rates."""
    ticker = require_matplotlib("ticker")
    shown, last = [], 0.0
    for length in lengths:
        if length >= 1.35 * last:
            shown.append(length)
            last = length
    axes.xaxis.set_major_locator(ticker.FixedLocator(shown))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda length, _: f"{length:.0f}"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    plain = ticker.FuncFormatter(lambda rate, _: f"{rate:g}")
    axes.yaxis.set_major_formatter(plain)
    low, high = axes.get_ylim()
    narrow = high / low < 300  # powers of ten would be too few
    axes.yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 5) if narrow else (5,)))
    axes.yaxis.set_minor_formatter(plain if narrow else ticker.NullFormatter())


def _title(results: BenchResults) -> list[str]:
    machine = results.machine
    where = [machine.processor, f"{machine.cores} cores", *machine.devices.values()]
    libraries = [f"{name} {version}" for name, version in machine.libraries.items()]
    said = (f"polyattn.attention: {results.workload}", "; ".join(where), ", ".join(libraries))
    return [line for text in said for line in textwrap.wrap(text, 92)]
