"""Draw the pictures of scores.md, from the results of the score expressions."""

import math
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from pictures import BLUE, GREEN, GREY, ORANGE, bare
from pictures import save as save_picture

from polyattn import attention_partial, attention_weights, scores

matplotlib.use("Agg")
FOLDER = Path(__file__).parent
save = partial(save_picture, dpi=100)
OUTLINED = (withStroke(linewidth=4, foreground="#1f2430"),)


def at_distance(value: scores.Score, head: int, away: np.ndarray, heads: int) -> np.ndarray:
    """Return the effect of a score expression on a score of 0, by the distance from row to key."""
    far = abs(away).max()
    s = np.zeros((1, heads, 1, len(away)))
    b, h = np.zeros((1, 1, 1, 1), int), np.arange(heads).reshape(1, -1, 1, 1)
    return value(s, b, h, np.full((1, 1), far), (away + far)[None, :])[0, head, 0]


def modifications() -> Figure:
    """Draw a bound on scores, and biases that depend on distance."""
    figure, (cap, slope, bucket) = pyplot.subplots(1, 3, figsize=(11, 3.5), layout="constrained")
    s = np.linspace(-90, 90, 181)
    zero = np.zeros_like(s, dtype=int)
    cap.plot(s, s, color=GREY, linestyle=":", label="s")
    for c, colour, line in ((30, BLUE, "-"), (10, ORANGE, "--")):
        label = f"softcap({c})"
        cap.plot(s, scores.softcap(c)(s, zero, zero, zero, zero), line, color=colour, label=label)
    cap.set(title="softcap", xlabel="score before", ylabel="score after", ylim=(-45, 45))
    cap.legend(frameon=False)
    away = np.arange(-64, 65)
    for head, line in ((0, "-"), (1, "--"), (2, "-."), (4, ":")):
        added = at_distance(scores.alibi(8), head, away, 8)
        slope.plot(away, added, line, color=BLUE, label=f"head {head}")
    slope.set(title="alibi(8)", xlabel="key, from the row's position", ylabel="added to the score")
    slope.legend(frameon=False, loc="lower center")
    away = np.arange(-160, 161)
    numbers = np.arange(32.0)[:, None]
    for both, colour, line in ((True, BLUE, "-"), (False, ORANGE, "--")):
        value = scores.relative_bias(numbers, bidirectional=both)
        label = f"bidirectional={both}"
        bucket.step(away, at_distance(value, 0, away, 1), line, color=colour, label=label)
    bucket.set(title="relative_bias", xlabel="key, from the row's position", ylabel="bucket")
    bucket.set(ylim=(-1, 42))
    bucket.legend(frameon=False, loc="upper right")
    return figure


def similarities() -> Figure:
    """Draw the similarity of one query and the keys of a plane."""
    figure, grid = pyplot.subplots(
        1, 5, figsize=(13, 3.5), layout="compressed", sharex=True, sharey=True
    )
    query, ticks = np.array([1.0, 0.5]), np.linspace(-2, 2, 161)
    keys = np.stack(np.meshgrid(ticks, ticks), -1).reshape(-1, 2)
    kinds = {
        "q·k": None,
        "cosine()": scores.cosine(),
        "distance()": scores.distance(),
        "distance(1)": scores.distance(1),
        "additive((1, 1))": scores.additive(np.ones(2)),
    }
    for axes, (name, kind) in zip(grid, kinds.items(), strict=True):
        plane = alike(query, keys, kind).reshape(len(ticks), len(ticks))
        drawn = axes.contourf(ticks, ticks, plane, levels=12, cmap="cividis")
        ends = math.ceil(plane.min()), math.floor(plane.max())
        figure.colorbar(drawn, ax=axes, orientation="horizontal", ticks=ends, aspect=12)
        axes.plot(0, 0, "o", color="w", markersize=4, path_effects=OUTLINED)
        line = {"arrowstyle": "->", "color": "w", "lw": 2, "path_effects": OUTLINED}
        axes.annotate("", query, (0, 0), arrowprops=line)
        axes.set(title=name, aspect="equal", xticks=(-2, 0, 2), yticks=(-2, 0, 2))
    grid[0].set(ylabel="key")
    return figure


def alike(query: np.ndarray, keys: np.ndarray, kind: scores.Similarity | None) -> np.ndarray:
    """Return the scores of one query: the logsumexp of each single key."""
    query, keys = np.broadcast_to(query, keys.shape)[:, None], keys[:, None]
    return attention_partial(query, keys, keys, scale=1.0, similarity=kind).logsumexp


def normalizers() -> Figure:
    """Draw the weights of one query by each normalizer."""
    figure, axes = pyplot.subplots(figsize=(8, 3.4), layout="constrained")
    s = np.array([1.2, 1.0, 0.8, 0.6, 0.4, 0.1, -0.1, -0.4, -0.7, -1.2])
    query, key = np.ones((1, 1)), s[:, None]
    bars = {
        "softmax": ({}, BLUE, ""),
        "sparsemax()": ({"normalizer": scores.sparsemax()}, ORANGE, "//"),
        "sigmoid(), bias −log S": (
            {"normalizer": scores.sigmoid(), "bias": np.full((1, 1), -math.log(len(s)))},
            GREEN,
            "..",
        ),
    }
    for n, (name, (options, colour, hatch)) in enumerate(bars.items()):
        row = attention_weights(query, key, scale=1.0, **options)[0]
        where = np.arange(len(s)) + 0.27 * (n - 1)
        label = f"{name}: sum {row.sum():.2f}, {np.count_nonzero(row)} of {len(s)} above 0"
        axes.bar(where, row, 0.25, color=colour, hatch=hatch, edgecolor="w", label=label)
    axes.set(xlabel="score of the key", ylabel="weight")
    axes.set_xticks(range(len(s)), [f"{x:g}".replace("-", "−") for x in s])
    bare(axes)
    axes.legend(frameon=False)
    return figure


PICTURES = {
    "images/score-modifications.png": modifications,
    "images/score-similarities.png": similarities,
    "images/score-normalizers.png": normalizers,
}


def main(folder: Path = FOLDER) -> None:
    """Draw the pictures."""
    for name, draw in PICTURES.items():
        figure = draw()
        save(figure, folder / name)
        pyplot.close(figure)


if __name__ == "__main__":
    main()
