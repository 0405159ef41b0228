"""The README's code runs, and what it shows is what is printed."""

import re
from pathlib import Path

import numpy as np
import pytest

import polyattn

README = Path(__file__).resolve().parents[1] / "README.md"
TEXT = README.read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)


def squeezed(text):
    return " ".join(text.split())


@pytest.fixture(scope="module")
def namespace():
    """Run all Python blocks in order, as a reader would."""
    names = {}
    for block in blocks("python"):
        exec(compile(block, str(README), "exec"), names)
    return names


def test_the_explanation_shown_is_the_one_printed(namespace):
    q, k, v = (namespace[name] for name in "qkv")
    shown = blocks("text")[0]
    assert squeezed(shown) == squeezed(str(polyattn.explain(q, k, v, is_causal=True, softcap=30.0)))


def test_the_errors_shown_are_the_ones_raised(namespace):
    shown = blocks("text")[1]
    calls = re.findall(r"^>>> (.*)\n(\w+): ((?:.+\n)+)", shown, flags=re.MULTILINE)
    assert len(calls) == 2
    for call, kind, message in calls:
        with pytest.raises((TypeError, ValueError)) as caught:
            eval(call, {**namespace, "np": np})
        assert type(caught.value).__name__ == kind
        assert squeezed(str(caught.value)) == squeezed(message)


def test_every_file_it_points_to_is_there():
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        if not target.startswith("http"):
            assert (README.parent / target).exists(), target


def test_every_make_target_it_names_exists():
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"`make (\w+)`|^\$ make (\w+)", TEXT, flags=re.MULTILINE)):
        assert re.search(rf"^{''.join(target)}:", makefile, flags=re.MULTILINE), target
