"""The page of layers: its code does what the page says, and it names all that there is."""

from pathlib import Path

import pages
import pytest

from polyattn import nn

PAGE = Path(__file__).resolve().parents[2] / "docs" / "nn.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_prints_what_it_shows_its_model_trains_and_its_caches_are_cut():
    assert pages.surprises(PAGE) == []
    names = pages.run(PAGE)[-1].names
    after, _ = names["loss"](names["model"], names["jnp"].asarray([[3, 1, 4, 1, 5]]))
    assert after < names["before"]
    assert [cache.length for cache in names["shorter"]] == [3, 3]
    assert [cache.length for cache in names["newest"]] == [8, 8]


def test_every_public_name_is_on_the_page():
    # A block or a model names the parts that it is made of.
    parts = {"Embedding", "FeedForward", "LayerNorm", "Linear", "Module", "Stack", "load"}
    missing = [name for name in nn.__all__ if name not in TEXT and name not in parts]
    assert missing == []
