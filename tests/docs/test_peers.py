"""The page on functions of other libraries, and what the README says of them, are of the data."""

from pathlib import Path

import peers
import pytest

from polyattn.conformance.functions.check import AGREES, DIFFERS, NO_ARGUMENT, RAISES, Finding
from polyattn.conformance.functions.report import Row

README = Path(__file__).resolve().parents[2] / "README.md"
TOP_LEFT = Finding(DIFFERS, interpretation="rows count from the first key (query_offset=0)")
MEAN = Finding(DIFFERS, interpretation="a row without keys is the mean of the values")


def test_the_page_is_made_of_the_data():
    """Mend by: python docs/peers.py."""
    assert peers.PAGE.read_text(encoding="utf-8") == peers.page()


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({}, "–"),
        ({"agrees": 3}, "agrees"),
        ({"raises": 5, "agrees": 1, "leaks": 1, "mean": 2}, "**mean**, **leaks**, raises"),
    ],
)
def test_a_cell_lists_what_differs_most_frequent_first(counts, said):
    assert peers.cell(counts) == said


@pytest.mark.parametrize(
    ("finding", "word"),
    [
        (TOP_LEFT, "top left"),
        (Finding(DIFFERS, interpretation="of no known meaning"), "wrong"),
        (Finding(RAISES, error="ValueError: x"), "raises"),
        (Finding(RAISES, error="the process ended: SIGABRT"), "crashes"),
        (Finding(AGREES), "agrees"),
    ],
)
def test_a_finding_has_a_word_that_the_page_explains(finding, word):
    assert peers.word(finding) == word
    assert word in (*peers.MEANS, "agrees")


def test_cases_are_counted_by_area():
    wrong, absent = Finding(DIFFERS), Finding(NO_ARGUMENT)
    rows = [
        Row("feature", "mask", {"mask array": Finding(AGREES), "mask hides some rows": MEAN}),
        Row("feature", "window", {"window": TOP_LEFT, "window, one side": absent}),
        Row("parts", "sizes", {"D = 1, float32": wrong}),
        Row("parts", "gradients", {"mask hides some rows": wrong, "D = 1, float32": wrong}),
        Row("parts", "logsumexp", {"mask hides some rows": wrong}),
    ]
    assert peers.counted(rows) == {
        "masks": {"agrees": 1, "mean": 1},
        "causal, L ≠ S": {"top left": 1},
        "gradients": {"mean": 1},  # it is of a wrong output
        "sizes": {"wrong": 2},
    }


#: Rows of the README that are measured, with the columns of the data, and its words.
MEASURED = {
    "row with no visible key": "empty rows",
    "causal when `L != S`": "causal, L ≠ S",
    "NaN in a hidden key or value": "NaN hidden",
}
PEERS = "torch.sdpa", "torch.flex", "jax.nn", "keras.torch"
SAID = {"mean": "mean of the values", "top left": "top left", "leaks": "reaches the output"}


@pytest.mark.parametrize("name", MEASURED)
def test_the_readme_says_of_others_what_was_measured(name):
    """The first column is ours, which the suite tests."""
    lines = README.read_text(encoding="utf-8").splitlines()
    shown = next(x for x in lines if x.startswith(f"| {name} |")).split(" | ")[2:]
    for peer, cell in zip(PEERS, shown, strict=False):  # xFormers was not measured
        counts = peers.data()[peer]["found"].get(MEASURED[name])
        if counts:  # FlexAttention has no argument for causal
            most = max(SAID, key=lambda word: counts.get(word, 0))
            assert cell == (SAID[most] if most in counts else "0"), peer
