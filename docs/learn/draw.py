"""Draw the pictures of these pages, from the results of the code on the pages."""

import argparse
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from threadpoolctl import threadpool_limits

from polyattn import attention_weights, use_threads

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages import run
from pictures import BLUE, GREEN, GREY, ORANGE, RED, bare
from pictures import save as save_picture

matplotlib.use("Agg")
FOLDER = Path(__file__).parent
save = functools.partial(save_picture, dpi=100)
Names = dict[str, Any]


def names_of(page: str) -> Names:
    """Return the names that the code of a page defines."""
    return run(FOLDER / page)[-1].names


# ---- query, key and value ----------------------------------------------------------------------


def cells(axes: Axes, numbers: np.ndarray, digits: int, top: float | None = None) -> None:
    """Draw a small matrix as a map with its numbers in it; NaN is left white."""
    top = numbers.max() if top is None else top
    axes.imshow(numbers, cmap="cividis", vmin=0, vmax=top)
    for (i, j), number in np.ndenumerate(numbers):
        if not np.isnan(number):
            colour = "black" if number >= top / 2 else "white"
            axes.text(j, i, f"{number:.{digits}f}", ha="center", va="center", color=colour)
    axes.tick_params(length=0)


def steps(names: Names) -> Figure:
    """Draw the steps from the vectors of a sentence to scores, weights and output."""
    x, said = names["sweet"], names["said_of_milk"]
    tokens, features = ["cat", "milk", "it", "sweet"], ["hungry", "sweet"]
    parts = [
        ("Q Kᵀ / √4", x @ x.T / 2, tokens, 0),
        ("weights: softmax of each row", attention_weights(x, x), tokens, 3),
        ("V", x[:, 1:3], features, 0),
        ("output: weights · V", said[:, 1:3], features, 3),
    ]
    widths = {"width_ratios": [4, 4, 2, 2]}
    figure, row = pyplot.subplots(1, 4, figsize=(11, 3.4), layout="constrained", gridspec_kw=widths)
    for axes, (title, numbers, columns, digits) in zip(row, parts, strict=True):
        cells(axes, numbers, digits)
        axes.set_title(title, fontsize=11)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(4), tokens)
    row[0].set(ylabel="query", xlabel="key")
    row[1].set(xlabel="key")
    return figure


def turned(names: Names) -> Figure:
    """Draw where "it" points before and after, in both sentences."""
    figure, row = pyplot.subplots(1, 2, figsize=(9, 4.2), layout="constrained", sharey=True)
    sentences = [
        ("… because it was sweet", names["said_of_milk"], 0.05),
        ("… because it was hungry", names["said_of_cat"], -0.15),
    ]
    for axes, (title, said, lift) in zip(row, sentences, strict=True):
        arrows = [
            ("cat, and it before", (2, 2), BLUE, "--", (0.08, 0.02), "left"),
            ("milk", (1, 3), GREY, ":", (-0.08, 0.08), "right"),
            ("it, after", tuple(said[2, 1:3]), RED, "-", (0.1, lift), "left"),
        ]
        for text, (across, up), colour, line, (right, above), side in arrows:
            style = {"arrowstyle": "-|>", "color": colour, "lw": 2.5, "linestyle": line}
            style |= {"shrinkA": 0, "shrinkB": 0, "mutation_scale": 16}
            axes.annotate("", (across, up), (0, 0), arrowprops=style)
            axes.text(across + right, up + above, text, color=colour, ha=side, fontsize=11)
        axes.set(title=title, xlim=(0, 3.6), ylim=(0, 3.5), aspect="equal", xlabel="hungry")
        axes.set(xticks=range(4), yticks=range(4))
        bare(axes)
    row[0].set(ylabel="sweet")
    return figure


# ---- why divide --------------------------------------------------------------------------------


def variance(names: Names) -> Figure:
    """Draw the spread of products of vectors."""
    figure, (spread, grown) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    sizes, products = names["sizes"], names["products"]
    bins = np.linspace(-30, 30, 121)
    for d, colour, style in ((4, GREEN, ":"), (16, ORANGE, "--"), (64, BLUE, "-")):
        label = f"d = {d}"
        options = {"histtype": "step", "density": True, "linewidth": 1.8}
        spread.hist(products[d], bins, color=colour, linestyle=style, label=label, **options)
    spread.set(title="products of random vectors", xlabel="q·k", ylabel="density")
    deviations = np.array([products[d].std() for d in sizes])
    grown.plot(sizes, np.sqrt(sizes), ":", color=GREY, label="√d")
    grown.plot(sizes, deviations, "o", color=BLUE, label="q·k, measured")
    divided = deviations / np.sqrt(sizes)
    grown.plot(sizes, divided, "s--", color=ORANGE, label="q·k / √d, measured")
    powers(grown, sizes, base_y=2)
    grown.set(title="their standard deviation", xlabel="d", yticks=[1, 2, 4, 8, 16, 32])
    for axes in (spread, grown):
        bare(axes)
        axes.legend(frameon=False)
    return figure


def vanishing(names: Names) -> Figure:
    """Draw softmax as its scores grow."""
    figure, row = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    styles = {"not divided": ("o-", RED), "divided by √d": ("s--", BLUE)}
    kinds = [("largest of 8 weights", names["sure"]), ("steepest slope", names["slope"])]
    for axes, (title, found) in zip(row, kinds, strict=True):
        for label, (style, colour) in styles.items():
            axes.plot(names["sizes"], found[label], style, color=colour, label=label)
        powers(axes, names["sizes"])
        axes.set(title=title, xlabel="d", ylim=(0, 1.05 if axes is row[0] else 0.26))
        bare(axes)
        axes.legend(frameon=False, loc="center right")
    return figure


STYLES = {
    "the default": ("o-", GREY),
    "temperature(2)": ("v-", "black"),
    "by_norm()": ("s-", BLUE),
    "by_norm(√S)": ("D--", BLUE),
    "cosine, scale 10": ("^-.", ORANGE),
    "long_sequence()": ("P:", RED),
}


def rules(names: Names) -> Figure:
    """Draw each rule for one row, for larger queries and for more keys."""
    figure, (one, grown, longer) = pyplot.subplots(1, 3, figsize=(13, 4.4), layout="constrained")
    query, key = names["query"][:1], names["key"][:64]
    for name, rule in names["rules"](64).items():
        style, colour = STYLES[name]
        weights = np.sort(attention_weights(query, key, **rule)[0])[::-1][:16]
        options = {"color": colour, "label": name, "markersize": 5, "alpha": 0.9}
        one.plot(np.arange(1, 17), weights, style, **options)
        grown.plot(names["factors"], names["grown"][name], style, **options)
        longer.plot(names["lengths"], 100 * names["longer"][name], style, **options)
    one.set(title="the 16 largest weights of one row of 64", xlabel="key, by its weight", ylim=0)
    grown.set(title="keys in use, of 64", xlabel="norm of the queries, over √d", ylim=(0, 67))
    longer.set(title="keys in use, per cent", xlabel="number of keys", ylim=(0, 105))
    powers(grown, names["factors"])
    powers(longer, names["lengths"])
    for axes in (one, grown, longer):
        bare(axes)
    handles, labels = one.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=6, loc="outside lower center")
    return figure


# ---- heads and masks ---------------------------------------------------------------------------


def heads(names: Names) -> Figure:
    """Draw the weights of two heads beside those of one."""
    figure, row = pyplot.subplots(1, 3, figsize=(9.5, 3.4), layout="constrained")
    whole = attention_weights(names["query"], names["key"])
    titles = ["first head: columns 0, 1", "second head: columns 2, 3", "one head: all columns"]
    for axes, title, weights in zip(row, titles, [*names["maps"], whole], strict=True):
        cells(axes, weights, 2, top=1)
        axes.set(title=title, xlabel="key")
        axes.set_xticks(range(3), ["token 0", "token 1", "token 2"])
        axes.set_yticks(range(3), ["token 0", "token 1", "token 2"])
    row[0].set(ylabel="query")
    return figure


def masked(names: Names) -> Figure:
    """Draw the weights of a few words under masks."""
    figure, row = pyplot.subplots(1, 4, figsize=(13, 3.8), layout="constrained", sharey=True)
    for axes, (title, weights) in zip(row, names["maps"].items(), strict=True):
        cells(axes, np.where(weights == 0, np.nan, weights), 2, top=1)
        axes.set(title=title, xlabel="key")
        axes.set_xticks(range(5), names["words"])
        axes.set_yticks(range(5), names["words"])
    row[0].set(ylabel="query")
    return figure


# ---- cost --------------------------------------------------------------------------------------

COST, COMPUTED = "cost.md", ("textbook", "attention", "windowed")
SIZES = [(n, 64) for n in (512, 2048, 8192, 16_384)]
SIZES += [(2048, d) for d in (16, 256, 1024)]
ROUNDS = 15


def measure() -> None:
    """Measure the functions of the page, and print its table."""
    names = names_of(COST)
    with use_threads(1), threadpool_limits(1):
        for n, d in SIZES:
            arrays = names["inputs"](n, d)
            spent = [names["milliseconds"](names[name], arrays, ROUNDS) for name in COMPUTED]
            held = [names["mebibytes"](names[name], arrays) for name in COMPUTED]
            figures = [np.format_float_positional(x, 3, fractional=False) for x in spent + held]
            print("|", " | ".join([f"{n}", f"{d}", *(x.rstrip(".") for x in figures)]), "|")


def measured() -> np.ndarray:
    """Return the table of the page: n, d, milliseconds of three and mebibytes of three."""
    text = (FOLDER / COST).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d.*) \|$", text, flags=re.MULTILINE)
    return np.array([[float(number) for number in row.split(" | ")] for row in rows])


def cost(_: Names) -> Figure:
    """Draw time and memory against length, and time against size."""
    figure, (time, memory, size) = pyplot.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    table = measured()
    by_length, by_size = table[table[:, 1] == 64], table[table[:, 0] == 2048]
    by_size = by_size[np.argsort(by_size[:, 1])]
    styles = [("o-", RED, "textbook"), ("s-", BLUE, "attention"), ("^--", GREEN, "window of 257")]
    for column, (style, colour, label) in enumerate(styles):
        options = {"color": colour, "label": label}
        time.plot(by_length[:, 0], by_length[:, 2 + column], style, **options)
        memory.plot(by_length[:, 0], by_length[:, 5 + column], style, **options)
        size.plot(by_size[:, 1], by_size[:, 2 + column], style, **options)
    for axes, at, power, where, text in (
        (time, by_length[-3:, 0], 2, 2.2 * by_length[-3, 2], "n²"),
        (time, by_length[-3:, 0], 1, 0.45 * by_length[-3, 4], "n"),
        (size, by_size[-3:, 1], 1, 0.3 * by_size[-3, 4], "d"),
    ):
        line = where * (at / at[0]) ** power
        axes.plot(at, line, ":", color=GREY)
        axes.text(at[1], line[1] * 1.25, text, color=GREY, ha="right", fontsize=12)
    time.set(title="milliseconds, d = 64", xlabel="tokens n", yscale="log")
    memory.set(title="MiB, d = 64", xlabel="tokens n", yscale="log")
    size.set(title="milliseconds, n = 2048", xlabel="size d", yscale="log")
    for axes in (time, memory, size):
        powers(axes, by_size[:, 1] if axes is size else by_length[:, 0])
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        bare(axes)
    time.legend(frameon=False)
    return figure


# ---- shared parts ------------------------------------------------------------------------------


def powers(axes: Axes, ticks: Any, base_y: int | None = None) -> None:
    """Make the horizontal axis, or both, logarithmic with plain numbers as ticks."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    if base_y is not None:
        axes.set_yscale("log", base=base_y)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


PICTURES: dict[str, tuple[str, Callable[[Names], Figure]]] = {
    "learn-steps.png": ("query-key-value.md", steps),
    "learn-it.png": ("query-key-value.md", turned),
    "learn-variance.png": ("scale.md", variance),
    "learn-softmax.png": ("scale.md", vanishing),
    "learn-rules.png": ("scale.md", rules),
    "learn-heads.png": ("heads.md", heads),
    "learn-masks.png": ("masks.md", masked),
    "learn-cost.png": (COST, cost),
}


def main(folder: Path = FOLDER.parent / "images") -> None:
    """Draw the pictures."""
    for name, (page, draw) in PICTURES.items():
        figure = draw(names_of(page))
        save(figure, folder / name)
        pyplot.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="print the table of cost.md instead")
    if parser.parse_args().measure:
        measure()
    else:
        main()
