"""Figures, extras, kernels and folders in sentences agree with the tables and the code."""

import re
import tomllib
from pathlib import Path

import design
import pytest

from polyattn._dispatch import registry

ROOT = Path(__file__).resolve().parents[2]
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


def text_of(page):
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def ratio(row):
    """Return the figure of a row of the page on performance."""
    return re.search(rf"^\| [^|]*{row}.*?\*\*([\d.]+)\*\*", PERFORMANCE, re.MULTILINE)[1]


def ratios(lengths):
    """Return the figures of NumPy over torch, full and causal, at these lengths."""
    table = PERFORMANCE.partition("## NumPy on a CPU")[2].partition("## ")[0]
    rows = re.findall(r"\| \(\d+, \d+, (\d+), \1, \d+\) \| (?:full|causal) \| \*\*([\d.]+)", table)
    found = [float(figure) for length, figure in rows if lengths[0] <= int(length) <= lengths[1]]
    assert len(found) >= 4
    return min(found), max(found)


def between(lengths, digits):
    return " to ".join(f"{end:.{digits}f}" for end in ratios(lengths))


PACKED, PADDED = ratio("the sentences packed"), ratio("on the padded batch")
STEPS = re.findall(r"first time: \w+ \| ([\d.]+) \| ([\d.]+)", PERFORMANCE)
FIRST = [sum(map(float, column)) for column in zip(*STEPS, strict=True)]
SAID = [
    ("README.md", f"| an encoder on NumPy over `transformers` on torch | {PACKED} |"),
    ("README.md", f"512 to 16384 tokens | {between((512, 16384), 1)} |"),
    ("docs/how-to/service.md", f"packing takes {PACKED} of the time"),
    ("docs/how-to/service.md", f"on NumPy takes {PADDED} times as long"),
    ("examples/minilm/README.md", f"NumPy takes {PACKED} of the time"),
    ("examples/minilm/README.md", f"NumPy takes {PADDED} times as long"),
    ("docs/devices.md", f"{between((128, 256), 2)} times as fast"),
    ("docs/devices.md", f"tokens, {between((32, 64), 2)} at 32 and 64"),
    ("docs/design.md", f"takes {between((512, 16384), 1)} times as long"),
    ("docs/design.md", "{:.0f} to {:.0f} µs more".format(*[round(n, -1) for n in FIRST])),
]


@pytest.mark.parametrize(("page", "words"), SAID)
def test_sentences_have_the_figures_of_the_tables(page, words):
    assert words in text_of(page)


def test_the_start_names_every_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    start = text_of("docs/start.md")
    extras = project["optional-dependencies"]
    assert [x for x in extras if f'".[{x}]"' not in start and f"`{x}`" not in start] == []


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "dask", "mlx", "onnx", "onnxruntime"])
def test_the_page_on_devices_names_every_kernel(name):
    assert registry.load(name) is None
    page = text_of("docs/devices.md")
    for kernel in registry.loaded(name).kernels:
        assert f"| `{kernel.name}` |" in page, kernel.name


def test_the_page_on_the_design_has_the_folders_of_now():
    """Mend by: python docs/design.py."""
    assert design.PAGE.read_text(encoding="utf-8") == design.page()
    assert design.page().count("/` | ") > 10
