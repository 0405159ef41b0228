"""Train a small GPT on four comedies of Shakespeare, a letter at a time, and let it write.

Requirements: the reported loss is that of text that was never trained on; if something is missing,
one line says so, with the command that installs it.
"""

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

# Python searches the script's folder first; the package is in the folder above it.
EXAMPLES = str(Path(__file__).resolve().parents[1])
if EXAMPLES not in sys.path:
    sys.path.insert(0, EXAMPLES)

from train.learners import CONTEXT, LEARNERS, Learner  # noqa: E402
from train.text import Text, batches, read, windows  # noqa: E402
from train.writing import write  # noqa: E402

BATCH, RATE, LAST_RATE, WARMING = 12, 4e-3, 1e-4, 50  # windows, learning rates, steps
TARGET = 1.8
LOOKS = 8  # how often the held-out text is evaluated
NEEDS = {"torch": ("torch",), "jax": ("jax", "optax")}
BLUE, VERMILION = "#0072b2", "#d55e00"  # Okabe and Ito's


def main(argv: Sequence[str] | None = None) -> int:
    """Train and write; return 1 if the loss misses the target or something is not installed."""
    arguments = parse(argv)
    needs = (*NEEDS[arguments.library], "matplotlib", "tqdm")
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        print(f"{names} must be installed: pip install {' '.join(missing)}", file=sys.stderr)
        return 1
    text = read()
    learner = LEARNERS[arguments.library](len(text.letters))
    history = train(learner, text, arguments.steps, arguments.minutes, arguments.seed)
    draw(history, arguments.target, arguments.plot)
    steps, last = history.held_out[-1]
    reached = last <= arguments.target
    print(
        f"held-out loss {last:.3f} after {steps} steps: the target of {arguments.target:g}"
        f" {'is reached' if reached else 'is missed'}"
    )
    print(f"plot of the loss: {arguments.plot}\n\n{arguments.prompt}", end="")
    manner = arguments.temperature, arguments.seed
    for letter in write(learner, text, arguments.prompt, arguments.generate, *manner):
        print(letter, end="", flush=True)
    print()
    return 0 if reached else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="needs: pip install torch matplotlib tqdm; instead of torch, jax and optax for JAX",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--library", choices=sorted(LEARNERS), default="torch", help="the library to compute with")
    add("--steps", type=int, metavar="N", help="stop after this many steps, if time is left")
    add("--minutes", type=float, metavar="M", default=2.0, help="stop after this many minutes")
    add("--target", type=float, metavar="LOSS", default=TARGET, help="the held-out loss to reach")
    add("--plot", type=Path, metavar="FILE.png", default=Path("loss.png"), help="plot of the loss")
    add("--generate", type=int, metavar="N", default=600, help="how many letters to write")
    add("--prompt", metavar="TEXT", default="ROSALIND.\n", help="the text to continue")
    add("--temperature", type=float, metavar="T", default=0.7, help="0: the likeliest letter")
    add("--seed", type=int, metavar="N", default=0, help="seed of the batches and the writing")
    arguments = parser.parse_args(argv)
    for name, least in (("steps", 1), ("minutes", 0), ("generate", 0), ("temperature", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            parser.error(f"--{name} must be at least {least}; got {value}")
    try:
        read().encode(arguments.prompt)
    except ValueError as error:
        parser.error(f"--prompt {arguments.prompt!r}: {error}")
    if not arguments.prompt:
        parser.error("--prompt must have at least one letter")
    if not arguments.plot.parent.is_dir():
        parser.error(f"--plot {arguments.plot}: there is no folder {arguments.plot.parent}")
    return arguments


class History(NamedTuple):
    """Losses, each with the number of the steps before it."""

    training: list[tuple[int, float]]
    held_out: list[tuple[int, float]]


def train(
    learner: Learner, text: Text, steps: int | None, minutes: float, seed: int = 0
) -> History:
    """Train until the steps or the time are used up, and return the losses.

    The first loss of the held-out text is that before all steps, the last one that after them.
    """
    from tqdm import tqdm

    history = History([], [])
    judged, looks = windows(text.held_out, CONTEXT), 0
    training = batches(text.training, CONTEXT, BATCH, seed)
    form = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
    with tqdm(total=100, bar_format=form) as bar:
        for step, share in budget(steps, minutes):
            if share >= looks / LOOKS:
                looks += 1
                history.held_out.append((step, learner.loss(judged)))
            if share < 1:
                history.training.append((step, learner.step(next(training), rate(step, share))))
            shown = {"loss": history.training[-1][1], "held-out": history.held_out[-1][1]}
            losses = {name: f"{loss:.3f}" for name, loss in shown.items()}
            bar.set_postfix({"step": step} | losses, refresh=False)
            bar.update(100 * share - bar.n)
    return history


def budget(steps: int | None, minutes: float) -> Iterator[tuple[int, float]]:
    """Yield the number of steps and the used share of the budget, up to 1."""
    begun, step, share = time.monotonic(), 0, 0.0
    while share < 1:
        yield step, share
        step += 1
        share = (time.monotonic() - begun) / (60 * minutes) if minutes else 1.0
        share = min(1.0, max(share, step / steps if steps else 0.0))
    yield step, share


def rate(step: int, share: float) -> float:
    """Return the learning rate: a linear warm-up, then a cosine decay."""
    down = LAST_RATE + (RATE - LAST_RATE) * (1 + math.cos(math.pi * share)) / 2
    return down * min(1.0, (step + 1) / WARMING)


def draw(history: History, target: float, file: Path) -> None:
    """Save a plot of the losses."""
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context("default"):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="loss, nats per letter")
        axes.plot(*zip(*history.training, strict=True), color=BLUE, linewidth=0.6, label="training")
        axes.plot(
            *zip(*history.held_out, strict=True), "o-", color=VERMILION, label="held-out text"
        )
        axes.axhline(target, color="#6b7280", linestyle=":", label=f"target, {target:g}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.savefig(file, dpi=100)


if __name__ == "__main__":
    sys.exit(main())
