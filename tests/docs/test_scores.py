"""The page of scores: its arithmetic is what attention computes."""

import importlib
import math
import re
from pathlib import Path

import matplotlib
import numpy as np
import pages
import pytest
from optional import torch
from transformers.models.t5.modeling_t5 import T5Attention

from polyattn import attention, scores

matplotlib.use("Agg")
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "scores.md").read_text(encoding="utf-8")
# Far enough apart for T5's buckets to differ by direction.
H, L, S, D = 8, 12, 26, 16
RNG = np.random.default_rng(3)
QUERY, KEY = RNG.normal(size=(H, L, D)), RNG.normal(size=(H, S, D))
PYTHON = {
    name: getattr(np, name) for name in ("sqrt", "tanh", "exp", "sum", "abs", "log", "maximum")
}
PYTHON |= {"np": np, "scores": scores, "norm": np.linalg.norm, "inf": math.inf}


def weights(key=KEY, **options):
    """The weights of attention: its output over values that are the rows of an identity."""
    value = np.broadcast_to(np.eye(key.shape[-2]), (H, key.shape[-2], key.shape[-2]))
    return attention(QUERY, key, value, **options)


def softmax(s):
    exponentials = np.exp(s - s.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def by_arithmetic(formula, s, names):
    """Scores or weights by a formula in Python, one at a time."""
    code, found = compile(formula, "scores.md", "eval"), np.empty(s.shape)
    for h, i, j in np.ndindex(*s.shape):
        here = {"h": h, "i": i, "j": j, "s": s[h, i, j], "q": QUERY[h, i], "k": KEY[h, j]}
        here["row"] = s[h, i]
        found[h, i, j] = eval(code, names | here)
    return found


def bucket(away, bidirectional=True):
    """T5's, by transformers."""
    asked = torch.as_tensor([away])
    return int(T5Attention._relative_position_bucket(asked, bidirectional, 32, 128)[0])


def threshold(row):
    """What sparsemax takes from a row, by bisection."""
    low, high = row.min() - 1, row.max()
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(row - middle, 0).sum() > 1 else (low, middle)
    return low


# ---- the sections ----

SECTIONS = re.findall(r"^### (\w+)\n\n```python\n(.*?)```\n\n`([^`]+)`", PAGE, re.S | re.M)
FUNCTIONS = PYTHON | {"bucket": bucket, "threshold": threshold, "max": max, "D": D, "S": L}


@pytest.fixture(scope="module")
def names():
    """What each section makes."""
    found = {}
    for block, _, space, _ in pages.run(DOCS / "scores.md"):
        made = set(re.findall(r"^(score_mod|similarity|scale|normalizer) = ", block.code, re.M))
        section = next((title for title, code, _ in SECTIONS if code == block.code), "first")
        found[section] = space | {"options": {name: space[name] for name in made}}
    return found


def test_the_arithmetic_of_a_section_is_what_attention_computes(names):
    key = KEY[:, :L]
    product = QUERY @ np.swapaxes(key, -1, -2)
    for title, _, formula in SECTIONS:
        options = names[title]["options"]
        s = product if "scale" in options else product / math.sqrt(D)
        expected = by_arithmetic(" ".join(formula.split()), s, names[title] | FUNCTIONS)
        if "normalizer" not in options:
            expected = softmax(expected)
        found = weights(key, **options)
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12, err_msg=title)


@pytest.mark.slow
def test_a_script_draws_the_pictures_of_the_page(drawn_by, tmp_path):
    drawing = importlib.import_module("scores")
    (tmp_path / "images").mkdir()
    shown = set(re.findall(r"^!\[[^]]+\]\(([^)]+)\)", PAGE, re.M))
    assert shown == set(drawing.PICTURES) == drawn_by(drawing, tmp_path, 4000)


# ---- the table ----

ROWS = re.findall(r"^\| (.*?) \| `(.*)` \| `(.*)` \|$", PAGE.partition("## From other")[2], re.M)
LETTERS = PYTHON | {"H": H, "L": L, "S": S, "D": D, "c": 1.5, "t": 2.5, "tau": 0.2}
LETTERS |= {
    "slopes": RNG.random(H),
    "bias": RNG.normal(size=(H, L, S)),
    "table": RNG.normal(size=(32, H)),
    "weight": RNG.normal(size=D),
    "t5": bucket,
    "t5_causal": lambda away: bucket(away, bidirectional=False),
}


def test_what_to_write_means_what_the_other_library_computes():
    assert len(ROWS) == len(re.findall(r"^\|", PAGE.partition("## From other")[2], re.M)) - 2
    s = QUERY @ np.swapaxes(KEY, -1, -2) / math.sqrt(D)
    for name, formula, ours in ROWS:
        expected = softmax(by_arithmetic(formula, s, LETTERS))
        found = weights(**eval(f"dict({ours})", LETTERS))
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12, err_msg=name)
