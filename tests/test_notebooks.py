"""What a notebook shows at the end of a cell."""

import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from optional import jax, jnp, torch

import polyattn
from polyattn import explain, masks

SHAPE = (2, 8, 16, 4)


class Cells(HTMLParser):
    """The cells of the tables in HTML, row by row."""

    def __init__(self, text):
        super().__init__()
        self.rows = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.rows:
            self.rows[-1][-1] += data


def picture(value):
    """The elements of the picture of an expression, by tag."""
    html = value._repr_html_()
    svg = html[html.index("<svg") :]
    assert len(svg) < 100_000
    return list(ElementTree.fromstring(svg))[1:]


def test_explanation():
    explained = explain(SHAPE, SHAPE, SHAPE, is_causal=True, backend="numpy")
    kernel = explained.chosen.kernel
    assert repr(explained).startswith(f"<Explanation: numpy {kernel} runs;")
    assert len(repr(explained)) < 120
    rows = Cells(explained._repr_html_()).rows
    assert ["numpy", kernel, "CHOSEN"] in [row[:3] for row in rows]
    assert len(rows) == 1 + len(explained.candidates)
    nothing = explain(SHAPE, SHAPE, SHAPE, backend="numpy", kernel="no such")
    assert "nothing runs" in repr(nothing)


def test_backends():
    listed = polyattn.list_backends()
    assert "numpy" in repr(listed)
    assert "\n" not in repr(listed)
    names = [row[0] for row in Cells(listed._repr_html_()).rows[1:]]
    assert [name for name in names if name] == [x.name for x in listed]  # faults have no name


@pytest.mark.parametrize("to", [np.asarray, torch.asarray])
def test_a_mask_is_a_picture(to):
    ids = to(np.repeat(np.arange(4), 4))
    runs = picture(masks.segments(ids) & masks.causal())
    dark = [run for run in runs if run.get("fill") not in ("#ffffff", "#fbe3bd")]
    width = 192 / 16
    area = sum(float(run.get("width")) for run in dark) / width
    assert area == 4 * (1 + 2 + 3 + 4)  # four triangles


def test_the_picture_of_a_long_mask_is_small():
    assert len(picture(masks.compile(masks.window(100, 0), 2048))) < 200


def test_what_cannot_be_drawn_is_its_code():
    def fails(b, h, i, j):
        raise RuntimeError

    assert masks.rule(fails)._repr_html_() == (
        "<div><code>masks.rule(test_what_cannot_be_drawn_is_its_code.&lt;locals&gt;.fails)"
        "</code></div>"
    )
    jax.jit(lambda n: print(masks.prefix(n)._repr_html_()) or n)(jnp.asarray([3]))


def test_no_matplotlib_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "<svg" in masks.causal()._repr_html_()
