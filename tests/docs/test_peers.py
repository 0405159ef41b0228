"""The pages of other functions: they are of the data, and their lines print what they show."""

import os
import re
import subprocess
import sys

import pages
import peers
import pytest

from polyattn.conformance.functions.subjects import SUBJECTS

FOUND = peers.loaded()
#: Those whose libraries are imported in a second or two.
QUICK = ("onnx.reference", "torch.sdpa", "onnxruntime.attention")


def installed(name):
    """Return the version of a subject's library that is installed, or None."""
    try:
        return next(iter(SUBJECTS[name].versions.values())).partition("+")[0]
    except ImportError:
        return None


@pytest.mark.parametrize("name", peers.pages())
def test_a_page_is_made_of_the_data(name):
    written = (peers.DOCS / name).read_text(encoding="utf-8")
    assert written == peers.pages()[name], "run python docs/peers.py"


def test_no_page_is_left_of_a_subject_that_is_gone():
    written = {f"peers/{page.name}" for page in (peers.DOCS / "peers").glob("*.md")}
    assert written == peers.pages().keys() - {"peers.md"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FOUND]
)
def test_the_lines_of_a_page_print_what_they_show(name):
    newest = FOUND[name][0]
    if installed(name) != peers.version_of(newest):
        pytest.skip(f"{name} {peers.version_of(newest)} is not installed")
    page = peers.DOCS / "peers" / f"{re.sub('[._]', '-', name)}.md"
    command = [sys.executable, "-W", "ignore", peers.DOCS / "pages.py", page]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | SUBJECTS[name].environment,
    )
    shown = [block.shown for block in pages.blocks(page) if block.shown is not None]
    assert ran.stdout == "".join(shown)
    assert shown


@pytest.mark.parametrize("name", FOUND)
def test_what_a_cell_says_has_lines_that_repeat_it(name):
    """Each outcome of the front table, but for wrong numbers beside another meaning."""
    newest = FOUND[name][0]
    shown = {line["outcome"] for line in newest["lines"]}
    for area in peers.AREAS:
        here = {line["outcome"] for line in newest["lines"] if line["area"] == area}
        for what in set(peers.differing(newest, area)) - shown:
            assert what == "wrong", (area, what)
            assert here - {"agrees", "raises"}, area


def test_enough_was_measured_here_and_each_in_less_than_five_minutes():
    assert len(FOUND) >= 16
    assert sum("sizes" in newest["areas"] for newest, *_ in FOUND.values()) >= 15
    assert all(data["seconds"] < 300 for versions in FOUND.values() for data in versions)
    assert sum(len(versions) > 1 for versions in FOUND.values()) >= 7


def test_sizes_that_an_older_version_was_not_tried_with_are_no_change():
    assert any(not peers.is_swept(older) for _, *olds in FOUND.values() for older in olds)
    assert "sizes" not in peers.history(FOUND)


@pytest.mark.parametrize(
    ("printed", "meaning"),
    [
        (None, "crashes"),
        ("[1. 2.]\n", "agrees"),
        ("[nan nan]\n", "wrong"),
        ("ValueError\n", "raises"),
        ("False\n", "wrong"),
    ],
)
def test_what_lines_print_has_a_meaning(printed, meaning):
    assert peers.meaning_of(printed, {"[1. 2.]": "agrees"}) == meaning


def test_lines_that_end_their_process_are_known_and_the_next_ones_run():
    blocks = ["print(1)", "import os\nos.abort()", "print(x)"]
    assert peers.printed_by("x = 3", blocks) == ["1\n", None, "3\n"]
