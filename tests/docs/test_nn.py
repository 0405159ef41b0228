"""The page of layers: its code does what the page says."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pages
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "nn.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_prints_what_it_shows_and_its_model_trains():
    assert pages.surprises(PAGE) == []
    names = pages.run(PAGE)[-1].names
    after, _ = names["loss"](names["model"], names["jnp"].asarray([[3, 1, 4, 1, 5]]))
    assert after < names["before"]


@pytest.mark.slow
def test_layers_of_flax_and_equinox_take_the_functions_of_the_page():
    jax = pytest.importorskip("jax")
    pytest.importorskip("flax")
    names = {"jax": jax, "__name__": "page"}
    text = TEXT.partition("## In layers of")[2]
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
    x = np.random.default_rng(4).normal(size=(6, 32)).astype("f4")
    maps = [np.random.default_rng(n).normal(0, 0.2, (32, 32)).astype("f4") for n in range(4)]
    fields = ("query_proj", "key_proj", "value_proj", "output_proj")
    layer = SimpleNamespace(num_heads=4)  # the parts of Equinox' layer
    for field, weight in zip(fields, maps, strict=True):
        setattr(layer, field, lambda x, weight=weight: weight @ x)
    heads = [(x @ weight.T).reshape(1, 6, 4, 8) for weight in maps[:3]]
    expected = jax.nn.dot_product_attention(*heads, is_causal=True)[0].reshape(6, 32) @ maps[3].T
    x = jax.numpy.asarray(x)
    assert jax.numpy.allclose(names["attend"](layer, x, x, x, is_causal=True), expected, atol=1e-4)
