"""What a notebook shows at the end of a cell."""

from xml.etree import ElementTree

import numpy as np
import pytest
from optional import jax, jnp, torch

import polyattn
from polyattn import explain, masks

SHAPE = (2, 8, 16, 4)


def picture(value):
    """The elements of the picture of an expression, by tag."""
    html = value._repr_html_()
    svg = html[html.index("<svg") :]
    assert len(svg) < 100_000
    return list(ElementTree.fromstring(svg))[1:]


def test_a_table_is_one_line_that_says_to_print_it():
    explained = explain(SHAPE, SHAPE, SHAPE, is_causal=True, backend="numpy")
    assert repr(explained).startswith(f"<Explanation: numpy {explained.chosen.kernel} runs;")
    assert "nothing runs" in repr(explain(SHAPE, SHAPE, SHAPE, backend="numpy", kernel="no such"))
    listed = repr(polyattn.list_backends())
    assert "numpy" in listed
    assert "\n" not in listed


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
