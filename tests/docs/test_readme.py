"""What the README shows is what happens, and what it points to is there."""

import re
from pathlib import Path

import numpy as np
import pages
import pytest

README = Path(__file__).resolve().parents[2] / "README.md"
TEXT = README.read_text(encoding="utf-8")


def squeezed(text):
    return " ".join(text.split())


def test_the_page_prints_what_it_shows_and_the_errors_are_the_ones_raised():
    assert pages.surprises(README) == []
    namespace = pages.run(README)[-1].names
    shown = r"^```text\n>>> (.*)\n((?:.+\n)+)```"
    ((call, message),) = re.findall(shown, TEXT, flags=re.MULTILINE)
    with pytest.raises((TypeError, ValueError)) as caught:
        eval(call, {**namespace, "np": np})
    assert squeezed(f"{caught.type.__name__}: {caught.value}") == squeezed(message)


def test_the_page_is_short_and_its_first_example_needs_numpy_only():
    assert len(TEXT.splitlines()) <= 130
    first = next(pages.blocks(README))
    assert len(first.code.splitlines()) <= 5
    assert re.findall(r"^(?:import|from) (\w+)", first.code, flags=re.M) == ["numpy", "polyattn"]


def test_every_make_target_it_names_exists():
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"`make (\w+)`|^\$ make (\w+)", TEXT, flags=re.MULTILINE)):
        assert re.search(rf"^{''.join(target)}:", makefile, flags=re.MULTILINE), target
