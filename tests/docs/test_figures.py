"""Figures in sentences agree with the tables and the code, and so do the folders of the design."""

import re
from collections import Counter
from pathlib import Path

import design
import draw
import peers

from polyattn.conformance import CASES
from polyattn.nn.load.models import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


def text_of(page):
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def ratio(row):
    """Return the figure of a row of the page on performance."""
    return re.search(rf"^\| [^|]*{row}.*?\*\*([\d.]+)\*\*", PERFORMANCE, re.MULTILINE)[1]


def plain(heading, column):
    """Return the number of tokens and the figures, full and causal, of rows with plain calls."""
    table = PERFORMANCE.partition(heading)[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+)(?:, [^|]*)? \| (.* \|)$", table, re.MULTILINE)
    cells = [(int(length), row.split("|")[column].strip("* ")) for length, row in rows]
    return [(length, cell.split(", ")) for length, cell in cells if cell]


def ratios(lengths, heading="## NumPy on a CPU\n", column=0):
    """Return the least and the largest figure of plain calls of these lengths, in float."""
    rows = plain(heading, column)
    found = [float(x) for n, cell in rows if lengths[0] <= n <= lengths[1] for x in cell]
    assert len(found) >= 4
    return min(found), max(found)


def between(lengths, digits, *table, **column):
    return " to ".join(f"{end:.{digits}f}" for end in ratios(lengths, *table, **column))


FIRST = re.search(r"first time: .* \| (\d+) \| (\d+) \|", PERFORMANCE).groups()
STEPS_OF = dict(re.findall(r"^\| (.+?) \| ([\d.]+) \| [\d.]+ \|$", PERFORMANCE, re.MULTILINE))
ADDED = [float(x) for x in re.findall(r"\| ([\d.]+) to [\d.]+ µs \|", PERFORMANCE)]
ADDED = sorted(round(x) for x in ADDED)


def speed(heading, column):
    """Return the cells of a row of the README: plain calls of some lengths, over torch's time."""
    section = PERFORMANCE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    padding = re.findall(r"padding \| (.*) \|$", section, re.MULTILINE)
    groups = {"short": [], "middle": [], "long": [], "padding": []}
    groups["padding"] = [row.split(" | ")[column].strip("*") for row in padding]
    for length, cells in plain(f"## {heading}\n", column):
        groups["short" if length < 128 else "middle" if length < 512 else "long"] += cells
    ends = [sorted({min(x, key=float), max(x, key=float)}, key=float) for x in groups.values()]
    return " | ".join(" to ".join(end) for end in ends)


PAIRS = re.findall(r"^\| .*, bfloat16 \| \*\*.*\*\*([\d.]+)\*\*", PERFORMANCE, re.MULTILINE)
PAIRS = sorted(float(figure) for figure in PAIRS)
SPEED = [
    f"AVX-512 | {speed('NumPy on a CPU', 0)} |",
    f"AVX2 only | {speed('The compiled kernel', 1)} |",
    f"AVX2 only | {speed('The compiled kernel', 0)} |",
    f"AVX-512 | {speed('NumPy on a CPU', 1)} |",
]


def one_of(peer):
    """Return how many essential cases of a peer there are for each that it computes otherwise."""
    areas = peers.data()[peer]["found"].items()
    counts = sum((Counter(area) for name, area in areas if name != "sizes"), Counter())
    differ = counts.total() - counts["agrees"] - counts["raises"]
    return ["three", "four", "five", "six"][round(counts.total() / differ) - 3]


LONG = [row for row in draw.measured() if row[0] >= 2048 and row[1] == 64]
TEXTBOOK = sorted(round(row[2] / row[3]) for row in LONG)
SAID = [
    ("docs/performance.md", f"up to {ratios((128, 256))[1]:.1f} times torch's time for 128 and"),
    ("docs/performance.md", f"and up to {'twice' * (round(ratios((32, 64))[1]) == 2)} for 32 and"),
    ("docs/performance.md", "a call takes {:.0f} to {:.0f} µs more".format(*ADDED)),
    (
        "docs/performance.md",
        f"takes {between((512, 2048), 1, column=4)} times torch's time from 512 tokens on, and "
        f"{between((32, 256), 1, column=4)} below. Its gradients take "
        f"{between((512, 8192), 1, 'attention.py gradients', 1)} times",
    ),
    (
        "docs/performance.md",
        f"in bfloat16, with gradients, takes {PAIRS[0]:.1f} to {PAIRS[-1]:.1f} times as long",
    ),
    (
        "docs/learn/cost.md",
        f"the textbook takes {['two', 'three'][TEXTBOOK[0] - 2]} to "
        f"{['two', 'three'][TEXTBOOK[-1] - 2]} times as long",
    ),
    ("docs/learn/cost.md", f"{LONG[-1][5] / 1024:.0f} GiB for 16,384 tokens"),
    (
        "docs/design.md",
        f"something else in one of {one_of('torch.sdpa')}, and `jax.nn`'s in one of"
        f" {one_of('jax.nn')}.",
    ),
    ("docs/design.md", f"take [{SPEED[3].split(' | ')[3]} times as long]"),
    ("docs/design.md", f"[{len(CASES) // 1000},000 cases]"),
    ("README.md", f"in {len(CASES) // 1000},000 cases"),
    ("README.md", f"BERT, GPT-2, Llama and {len(FAMILIES) - 3} more families"),
    ("README.md", f"on NumPy takes {STEPS_OF['whole call']} µs, "),
    ("README.md", f"{STEPS_OF['of which the kernel']} of them in the kernel."),
    ("README.md", "adds {:.0f} to {:.0f} µs.".format(*[round(float(n), -1) for n in FIRST])),
    ("README.md", f"a window of 128 takes {ratio('window.128, 0.')} times as long as causal"),
    *[("README.md", row) for row in SPEED],
    ("docs/devices.md", f"{between((128, 256), 2)} times as fast"),
    ("docs/devices.md", f"tokens, {between((32, 64), 2)} at 32 and 64"),
    ("docs/design.md", f"takes {between((512, 16384), 1)} times as long"),
]


def test_sentences_have_the_figures_of_the_tables():
    assert [said for said in SAID if said[1] not in text_of(said[0])] == []


def test_the_page_on_the_design_has_the_folders_of_now():
    """Mend by: python docs/design.py."""
    assert design.PAGE.read_text(encoding="utf-8") == design.page()
