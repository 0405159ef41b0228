"""The page of layers: its code does what the page says, and it names all that there is."""

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pages
import pytest

from polyattn import nn
from polyattn.nn.load import decoders, encoders
from polyattn.nn.load.models import FAMILIES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "nn.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_prints_what_it_shows_and_its_model_trains():
    assert pages.surprises(PAGE) == []
    names = pages.run(PAGE)[-1].names
    after, _ = names["loss"](names["model"], names["jnp"].asarray([[3, 1, 4, 1, 5]]))
    assert after < names["before"]


def test_every_public_name_is_on_the_page():
    # A block or a model names the parts that it is made of.
    parts = {"Embedding", "FeedForward", "LayerNorm", "Linear", "Module", "Stack", "load"}
    missing = [name for name in nn.__all__ if name not in TEXT and name not in parts]
    assert missing == []


#: The page's words for what a family changes of Llama's decoder or BERT's encoder.
WORDS = {
    "query_bias": "biases of queries", "joined": "joined maps", "window": "windows",
    "norms": "norms in a block|norms after the parts", "norm_offset": "stored minus 1",
    "head_norms": "norms of queries and keys", "turns": "without rotary positions",
    "local_theta": "another base of rotary positions", "partial_rotary": "rotation of a part",
    "gemma": "softcaps", "offset": "positions that begin", "relative": "a relative bias",
}  # fmt: skip
#: What only the names of weights and settings show: the same model.
NAMES = {
    *("title", "defaults", "refused", "activation", "output_bias", "inner_bias"),
    *("blocks", "maps", "parts", "settings", "segments"),
}


def families():
    """Return the text of each family's row by its model_type."""
    rows = re.findall(r"^\| [^|`]+ \| (`[^|]+`) \| ?([^|]*)\|$", TEXT, re.MULTILINE)
    return {name: text for names, text in rows for name in re.findall(r"`(\w[\w-]*)`", names)}


def test_the_table_of_families_has_all_of_them():
    assert FAMILIES.keys() - families().keys() == set()


@pytest.mark.parametrize(("rows", "base"), [(decoders.ROWS, "llama"), (encoders.ROWS, "bert")])
def test_the_table_of_families_says_what_each_adds(rows, base):
    plain, texts = rows[base], families()
    # The names of norms are others in some encoders, which have the same norms.
    same = NAMES | {"norms"} if base == "bert" else NAMES
    for name, row in rows.items():
        changed = [f.name for f in fields(row) if getattr(row, f.name) != getattr(plain, f.name)]
        # A family without biases of queries has less than Llama may have.
        told = {field for field in changed if field not in same and getattr(row, field)}
        shown = {field for field, words in WORDS.items() if re.search(words, texts[name])}
        assert told == shown, name


@pytest.mark.slow
def test_layers_of_flax_and_equinox_take_the_adapters_of_the_page():
    jax = pytest.importorskip("jax")
    code = re.findall(r"```python\n(.*?)```", TEXT.partition("## In layers of Flax")[2], re.DOTALL)
    names = {"jax": jax}
    for block in code:
        exec(block, names)
    rng = np.random.default_rng(0)
    tokens, seen = rng.normal(size=(6, 32)).astype("f4"), np.tril(np.ones((6, 6), "f4"))
    maps = [rng.normal(size=(32, 32)).astype("f4") for _ in range(4)]
    heads = [jax.numpy.asarray((tokens @ weight.T).reshape(6, 4, 8)) for weight in maps[:3]]
    expected = jax.nn.dot_product_attention(*(x[None] for x in heads), mask=seen[None, None] > 0)
    # As flax.linen's and flax.nnx's layers call it, with masks of float32.
    others = {"dropout_rng": None, "broadcast_dropout": False, "deterministic": True, "dtype": None}
    others |= {"dropout_rate": 0.0, "precision": None, "module": None}
    found = names["attention_fn"](*(x[None] for x in heads), mask=seen[None, None], **others)
    assert jax.numpy.allclose(found, expected, atol=1e-5)
    with pytest.raises(ValueError, match="make the layer with dropout_rate=0"):
        names["attention_fn"](*heads, **others | {"deterministic": False, "dropout_rate": 0.1})
    fields = ("query_proj", "key_proj", "value_proj", "output_proj")
    layer = SimpleNamespace(num_heads=4)  # the parts of Equinox' layer
    for field, weight in zip(fields, maps, strict=True):
        setattr(layer, field, lambda x, weight=weight: weight @ x)
    tokens = jax.numpy.asarray(tokens)
    found = names["attend"](layer, tokens, tokens, tokens, is_causal=True)
    assert jax.numpy.allclose(found, expected[0].reshape(6, 32) @ maps[3].T, atol=1e-4)
