"""The worked examples: their pictures are drawn, and a command runs them."""

import re
import runpy
import sys
from pathlib import Path

import draw
import pages
import pytest

LEARN = Path(__file__).resolve().parents[2] / "docs" / "learn"
PAGES = sorted(file.name for file in LEARN.glob("*.md"))


@pytest.mark.slow
def test_a_script_draws_the_pictures_of_the_pages(drawn_by, tmp_path):
    assert drawn_by(draw, tmp_path, 4000) == set(draw.PICTURES)
    shown = {
        (name, page)
        for page in PAGES
        for name in re.findall(r"\]\(\.\./images/(.*?)\)", (LEARN / page).read_text("utf-8"))
    }
    assert shown == {(name, page) for name, (page, _) in draw.PICTURES.items()}
    assert all((LEARN.parent / "images" / name).exists() for name in draw.PICTURES)


def test_a_command_runs_a_page_and_prints_what_it_shows(monkeypatch, capsys):
    page = LEARN / "heads.md"
    monkeypatch.setattr(sys, "argv", ["pages.py", str(page)])
    runpy.run_path(str(LEARN.parent / "pages.py"), run_name="__main__")
    shown = "".join(block.shown or "" for block in pages.blocks(page))
    assert capsys.readouterr().out == shown
