"""`explain`: the decision without the call, from arrays or only from shapes."""

import logging
import re

import numpy as np
import pytest
from arrays import draw
from optional import jax, jnp, torch

from polyattn import attention_vjp, explain, masks, scores
from polyattn._dispatch import cache

(X,) = draw((2, 4, 5, 8))
SHAPE = X.shape


def test_explain_from_shapes_agrees_with_arrays():
    tensor = torch.from_numpy(X)
    options = {"is_causal": True, "softcap": 3.0}
    assert (
        explain(SHAPE, SHAPE, SHAPE, library="torch", **options).candidates
        == explain(tensor, tensor, tensor, **options).candidates
    )
    options = {"mask": (5, 5), "bias": (1, 4, 5, 5), "sinks": (4,), "query_offset": (2,)}
    explanation = explain(SHAPE, SHAPE, SHAPE, **options, is_causal=True, dtype="bfloat16")
    assert explanation.problem.features == {"mask", "bias", "sinks", "query_offset_array", "causal"}
    assert explanation.chosen.kernel == "dense"


PAGED = {"key": (6, 4, 3, 8), "block_table": np.array([[0, 1], [4, 5]]), "key_lengths": [5, 6]}


@pytest.mark.parametrize(
    "options", [{"softcap": 3.0}, {"dropout": (0.5, 0)}, {"scale": scores.by_norm()}, PAGED]
)
def test_of_gradients_it_explains_the_call_that_attention_vjp_makes(options, caplog):
    options = {"key": SHAPE, "is_causal": True} | options
    query, key = (np.ones(shape, np.float32) for shape in (SHAPE, options.pop("key")))
    explanation = explain(query, key, key, gradients=True, **options)
    cache.forget()
    with caplog.at_level(logging.DEBUG, "polyattn"):
        output, pullback = attention_vjp(query, key, key, **options)
        pullback(output)
    needs = ", ".join(sorted(explanation.problem.features))
    assert f"needs {needs}: numpy {explanation.chosen.kernel}" in caplog.messages[-1]
    assert "backward" in needs


def test_explain_assumes_the_default_device_of_the_library():
    assert explain(SHAPE, SHAPE, SHAPE, library="torch").problem.device == "cpu"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"key": (2, 4, 5, 6)}, ValueError, "8 and 6"),
        ({"device": "cuda"}, ValueError, "'numpy' is not usable on 'cuda'"),
        ({"library": "nunpy"}, ValueError, "'nunpy' is not usable: it is not installed"),
        ({"library": "operator"}, ValueError, "is not usable: its arrays do not follow"),
        ({"library": np}, TypeError, "library must be a string"),
        ({"device": 0}, TypeError, "device must be a string"),
        *(
            ({"key": shape}, ValueError, "integers of at least 0")
            for shape in ((2, -4), (2.0, 4), ("a", 4), (True, None))
        ),
    ],
    ids=str,
)
def test_explain_refuses_what_is_no_call(options, error, message):
    with pytest.raises(error, match=message):
        explain(**{"query": SHAPE, "key": SHAPE, "value": SHAPE} | options)


def test_an_explanation_prints_as_a_table():
    text = str(explain(SHAPE, SHAPE, SHAPE, backend="torch:cuda,numpy", dropout=(0.1, 1)))
    lines = text.splitlines()
    assert lines[0].startswith("attention: query (2, 4, 5, 8), key")
    assert lines[1].split() == ["needs:", "dropout"]
    assert lines[2] == "selected by backend='torch:cuda,numpy'"
    assert [line.split()[0] for line in lines[3:]] == ["torch:cuda", *["numpy"] * 3]
    assert "CHOSEN" in lines[-1]


@pytest.mark.parametrize("given", ["mask", "score_mod", "rule"])
def test_an_explanation_notes_what_a_function_may_not_expect(given):
    def function(*at):
        return at[-1] <= at[-2] if given != "score_mod" else at[0]

    name = "mask" if given == "rule" else given
    options = {name: masks.rule(function) if given == "rule" else function}
    row = r"functions count rows from 0, .* row i is at the position i \+ 8 among"
    step = explain((2, 8, 1, 64), (2, 8, 9, 64), (2, 8, 9, 64), **options)
    assert "note:      functions count rows from 0" in str(step)
    assert re.search(row, step.as_dict()["notes"][0])
    assert not explain((8, 9, 64), (8, 9, 64), (8, 9, 64), **options).notes
    assert not explain((8, 1, 64), (8, 9, 64), (8, 9, 64), mask=masks.causal()).notes
    found = []

    def noted(x):
        found.append(explain(x, x, x, **options).notes)
        return x

    jax.vmap(noted)(jnp.ones((3, 2, 5, 8)))
    torch.func.vmap(noted)(torch.ones((3, 2, 5, 8)))
    notes = ("inside vmap, functions get b = 0 for every item: use batch axes instead",)
    assert found == [notes, notes]
