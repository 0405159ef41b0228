"""The words of the page on functions of other libraries, and those of the README."""

import re
from pathlib import Path

import peers

from polyattn.conformance.functions.check import AGREES, DIFFERS, NO_ARGUMENT, RAISES, Finding
from polyattn.conformance.functions.report import Row

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
TOP_LEFT = Finding(DIFFERS, interpretation="rows count from the first key (query_offset=0)")
MEAN = Finding(DIFFERS, interpretation="a row without keys is the mean of the values")


WORDS = [
    (TOP_LEFT, "top left"),
    (Finding(DIFFERS, interpretation="of no known meaning"), "wrong"),
    (Finding(RAISES, error="ValueError: x"), "raises"),
    (Finding(RAISES, error="the process ended: SIGABRT"), "crashes"),
    (Finding(AGREES), "agrees"),
]


def test_a_finding_has_a_word_that_the_page_explains():
    assert [peers.word(finding) for finding, _ in WORDS] == [word for _, word in WORDS]
    assert {word for _, word in WORDS} <= {*peers.MEANS, "agrees"}
    counts = {"raises": 5, "agrees": 1, "leaks": 1, "mean": 2}
    assert peers.cell(counts) == "**mean**, **leaks**, raises"  # what differs first
    assert (peers.cell({}), peers.cell({"agrees": 3})) == ("–", "agrees")


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


def test_the_readme_says_of_others_what_was_measured():
    """The first column is ours, which the suite tests."""
    for name, area in MEASURED.items():
        (row,) = re.findall(rf"^\| {re.escape(name)} \| (.*)$", README, re.MULTILINE)
        for peer, cell in zip(PEERS, row.split(" | ")[1:], strict=False):  # no xFormers
            counts = peers.data()[peer]["found"].get(area)
            if counts:  # FlexAttention has no argument for causal
                most = max(SAID, key=lambda word: counts.get(word, 0))
                assert cell == (SAID[most] if most in counts else "0"), (name, peer)
