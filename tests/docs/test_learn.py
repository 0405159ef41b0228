"""The worked examples: their pictures are drawn, and what they say holds.

The numbers that they print, `test_pages` compares to the letter.
"""

import re
import runpy
import sys
from pathlib import Path

import draw
import pages
import pytest

from polyattn import use_threads

LEARN = Path(__file__).resolve().parents[2] / "docs" / "learn"
PAGES = sorted(file.name for file in LEARN.glob("*.md"))


# ---- the pages ----


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
    page, command = LEARN / "heads.md", "python docs/pages.py docs/learn/heads.md"
    assert command in (LEARN.parent / "index.md").read_text("utf-8")
    monkeypatch.setattr(sys, "argv", ["pages.py", str(page)])
    runpy.run_path(str(LEARN.parent / "pages.py"), run_name="__main__")
    shown = "".join(block.shown or "" for block in pages.blocks(page))
    assert capsys.readouterr().out == shown


# ---- what the pages say, beside what they print ----


def test_the_textbook_formula_holds_all_scores_and_attention_does_not():
    names = draw.names_of("cost.md")
    arrays = names["inputs"](2048, 64)
    with use_threads(1):
        textbook, ours = (names["mebibytes"](names[f], arrays) for f in ("textbook", "attention"))
    assert textbook > 2048**2 * 4 / 2**20 > 4 * ours


def test_the_table_of_measurements_has_the_slopes_that_the_page_counts():
    table = draw.measured()
    assert [tuple(row[:2]) for row in table] == draw.SIZES
    for n, _, *_, held, ours, _ in table:
        assert held > n**2 * 4 / 2**20 > 1.5 * ours or n < 2048
    before, after = (table[table[:, 1] == 64][i] for i in (1, 3))
    times = after[2:5] / before[2:5]
    assert all(40 < time < 90 for time in times[:2])
    assert 5 < times[2] < 12
