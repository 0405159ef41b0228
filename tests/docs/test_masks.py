"""The page of masks: its pictures are drawn, and its arithmetic is attention's."""

import importlib
import math
import re
from pathlib import Path

import matplotlib
import numpy as np
import pages
import pytest

from polyattn import attention, masks

matplotlib.use("Agg")
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "masks.md").read_text(encoding="utf-8")


def visible(batch, heads, rows, keys, **options):
    """Which keys take part: attention over values that are the rows of an identity."""
    query, key = np.zeros((batch, heads, rows, 1)), np.zeros((batch, heads, keys, 1))
    value = np.broadcast_to(np.eye(keys), (batch, heads, keys, keys))
    return attention(query, key, value, **options) > 0


def by_arithmetic(shape, formula, names):
    """The same by a formula in Python, a score at a time; rows stand where they are counted."""
    code = compile(formula, "masks.md", "eval")
    seen = np.empty(shape, bool)
    for b, h, i, j in np.ndindex(*shape):
        seen[b, h, i, j] = eval(code, names | {"b": b, "h": h, "i": i, "p": i, "j": j})
    return seen


# ---- the gallery ----

DRAWN = re.findall(r"^!\[[^]]+\]\(([^)]+)\)\n\n```python\n.*?```\n\n(.*?)\n\n", PAGE, re.S | re.M)


@pytest.fixture(scope="module")
def gallery():
    """The names after each block that draws a picture."""
    ran = pages.run(DOCS / "masks.md")
    return {done.block.picture: done.names for done in ran if done.block.picture}


@pytest.mark.slow
def test_each_code_block_of_the_gallery_draws_its_picture(gallery, drawn_by, tmp_path):
    (tmp_path / "images").mkdir()
    plots = {f"images/{file.name}" for file in (DOCS / "images").glob("plot-*.png")}
    assert drawn_by(importlib.import_module("masks"), tmp_path, 2000) == {*gallery, *plots}
    assert len(plots) == (DOCS / "plot.md").read_text(encoding="utf-8").count("](images/") == 4
    assert len(gallery) == len(DRAWN) >= 17
    assert all((DOCS / picture).exists() for picture in gallery)


def test_the_arithmetic_beside_a_picture_is_what_attention_computes(gallery):
    for picture, text in DRAWN:
        names, text = gallery[picture], " ".join(text.split())
        formula = re.search(r"sees key `j` where `(.*?)`", text) or re.match(r"`(.*?)`", text)
        is_long = any(word in repr(names["mask"]) for word in ("256", "rule", "neighborhood"))
        length = 256 if is_long else 64
        shape = (2 if "padding" in picture else 1, 1, length, length)
        seen, told = visible(*shape, mask=names["mask"]), by_arithmetic(shape, formula[1], names)
        np.testing.assert_array_equal(seen, told, picture)


# ---- the tables ----

B, H, L, S, W, C = 2, 2, 6, 9, 4, 4
RNG = np.random.default_rng(0)
SEEN = RNG.random((L, S)) < 0.6
PADDED = np.arange(S) >= np.array([[9], [5]])
LETTERS = {
    "masks": masks,
    "np": np,
    "inf": math.inf,
    **{"B": B, "H": H, "L": L, "S": S, "W": W, "C": C, "P": S - L, "left": 3, "right": 1},
    "offset": 2,
    "seen": SEEN,
    "added": np.where(SEEN, RNG.normal(size=(L, S)), -np.inf),
    "hidden": ~SEEN,
    "hidden3": RNG.random((B * H, L, S)) < 0.4,
    "padded": PADDED,
    "ones": (~PADDED).astype(int),
    "finite": np.where(PADDED[:, None, None], np.finfo("float32").min, np.zeros((B, 1, L, S))),
    "lengths": np.array([9, 7]),
    "rows": np.array([6, 4]),
    "cu": np.array([0, 2, 5, 6]),
    "cu_k": np.array([0, 4, 7, 9]),
    "ids": np.array([0, 0, 1, 1, 1, 2]),
    "key_ids": np.array([0, 0, 0, 0, 1, 1, 1, 2, 2]),
    "position_ids": np.array([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0]]),
}
LETTERS["document"] = lambda cu, i: next(n for n in range(3) if cu[n] <= i < cu[n + 1])
LETTERS["packed"] = lambda b, i: sum(LETTERS["position_ids"][b, : i + 1] == 0)

ROWS = re.findall(r"^\| (.*?) \| `(.*)` \| `(.*)` \|$", PAGE, flags=re.MULTILINE)


def keys_of(row):
    """S of a row of the tables: L where queries and keys are one sequence."""
    same = "position_ids" in row[0] or ("cu_seqlens" in row[0] and "cu_k" not in row[1])
    return L if same else S


def test_what_to_write_means_what_the_other_library_computes():
    assert len(ROWS) == len(re.findall(r"^\|", PAGE.partition("## From other")[2], re.M)) - 2 * 4
    for row in ROWS:
        name, ours, formula = row
        shape = (B, H, L, keys_of(row))
        seen = visible(*shape, **eval(f"dict({ours})", LETTERS))
        np.testing.assert_array_equal(seen, by_arithmetic(shape, formula, LETTERS), name)
