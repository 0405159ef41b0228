"""The page of layers: its code does what the page says, and it names all that there is."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pages
import pytest

from polyattn import nn
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


def test_the_table_of_families_has_all_of_them():
    rows = re.findall(
        r"^\| \w+ \| (`[^|]+`) \| .*\|$", TEXT.partition("| family |")[2], re.MULTILINE
    )
    assert set(re.findall(r"`([\w-]+)`", " ".join(rows))) == FAMILIES.keys()


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
