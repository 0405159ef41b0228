"""The page of layers: its code runs, and prints what it shows."""

import re
from pathlib import Path

import pytest

from polyattn import nn

PAGE = Path(__file__).resolve().parents[1] / "docs" / "nn.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def names():
    """Run all the page's code in order, as a reader would."""
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_the_code_of_the_page_runs_and_trains(names):
    after, _ = names["loss"](names["model"], names["jnp"].asarray([[3, 1, 4, 1, 5]]))
    assert after < names["before"]
    assert [cache.length for cache in names["shorter"]] == [3, 3]
    assert [cache.length for cache in names["newest"]] == [8, 8]


def test_what_is_printed_is_what_the_page_shows(names):
    (shown,) = re.findall(r"^```text\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)
    assert repr(names["layer"]) == shown.strip()


def test_every_public_name_is_on_the_page():
    # A block or a model names the parts that it is made of.
    parts = {"Embedding", "FeedForward", "LayerNorm", "Linear", "Module", "Stack", "load"}
    missing = [name for name in nn.__all__ if name not in TEXT and name not in parts]
    assert missing == []
