"""The table of options: it holds all that `attention` takes, and nothing drops one in silence."""

import inspect
import runpy

import numpy as np
import pytest

from polyattn import attention, masks
from polyattn import scores as rules
from polyattn._api.attention import AttentionOptions
from polyattn._api.names import BESIDE
from polyattn._base.span import Span
from polyattn._core.call import checks as examining
from polyattn._core.call import describe as describing
from polyattn._core.call.features import DERIVATIVES, FEATURES, NOT_IN_DERIVATIVES, Feature
from polyattn._core.call.options import OPTIONS, Option
from polyattn._core.call.parts import options_of, options_of_part
from polyattn._core.expressions.parts import Part
from polyattn._kernels import dense
from polyattn._kernels.dense_kernel import Dense

X = np.random.default_rng(0).standard_normal((2, 4, 4, 8), dtype=np.float32)
SEEN = np.tril(np.ones((4, 4), bool))
#: A value of each option, beside which it needs nothing but `NEEDED`.
VALUES = {
    "mask": [SEEN, masks.prefix(2), lambda b, h, i, j: i >= j],
    "bias": [X[..., :4]],
    "is_causal": [True],
    "window": [(1, 0)],
    "query_offset": [1, np.arange(2)],
    "key_lengths": [2, np.array([3, 0])],
    "block_table": [np.array([[1], [0]])],
    "scale": [0.5, rules.by_norm()],
    "softcap": [2.0],
    "score_mod": [rules.alibi(4), lambda s, b, h, i, j: s + j],
    "sinks": [X[0, :, 0, 0]],
    "dropout": [(0.5, 3), (0.5, np.asarray(3), (1, 0, 2, 0))],
    "similarity": [rules.cosine()],
    "normalizer": [rules.sparsemax()],
}
NEEDED = {"query_offset": {"is_causal": True}, "block_table": {"key_lengths": np.array([3, 0])}}
EACH = [(name, value) for name, values in VALUES.items() for value in values]


def test_the_table_has_the_options_of_the_signature():
    typed = [name for name in AttentionOptions.__annotations__ if name not in BESIDE]
    assert typed == list(OPTIONS) == list(VALUES)
    parameters = inspect.signature(attention).parameters
    assert {n: parameters[n].default for n in OPTIONS} == {n: o.default for n, o in OPTIONS.items()}


@pytest.mark.parametrize(("name", "value"), EACH)
def test_each_option_needs_a_feature_and_a_kernel_gets_it(name, value):
    more = NEEDED.get(name, {})
    call, operands = describing.describe(X, X, X, **{name: value}, **more)
    beside = {"is_causal": "causal", "key_lengths": "mask_expression"}
    assert examining.examine(call).features - {beside[other] for other in more}
    again = options_of(examining.examine(call), operands)
    names = {name, *more} | ({"mask"} if {"key_lengths"} & {name, *more} else set())
    assert again.keys() - {"scale", "window", "query_offset"} <= names
    found, _ = describing.describe(X, X, X, **again)
    problems = [examining.examine(one) for one in (call, found)]
    if name == "block_table":  # whose lengths hide keys, and stay beside the mask that they became
        problems = [problem._replace(mask_spec=None) for problem in problems]
    assert problems[0] == problems[1]


PART = Part((2,), (Span(1, 2),), Span(0, 4), Span(2, 4), Span(1, 3))


def test_dropout_at_a_rate_of_0_and_a_start_of_numpy_make_no_other_plan():
    plain, never, numbers, array = (
        describing.describe(X, X, X, **options)
        for options in (
            {},
            {"dropout": (0.0, 3, (1, 0, 2, 0))},
            {"dropout": (0.5, 3, (1, 0, 2, 0))},
            {"dropout": (0.5, 3, np.array([1, 0, 2, 0]))},
        )
    )
    assert (never[0], numbers[0]) == (plain[0], array[0])
    assert (never[1].seed, array[1].dropout_start) == (None, None)


def test_a_key_of_jax_is_no_seed_of_dropout():
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match=r"pass jax\.random\.bits\(key\)"):
        attention(X, X, X, dropout=(0.1, jax.random.key(0)))


def test_a_part_refuses_what_the_table_does_not_describe(monkeypatch):
    with pytest.raises(TypeError, match="no option 'temperature'"):
        options_of_part({"temperature": 2.0}, PART)
    monkeypatch.setitem(OPTIONS, "temperature", Option("temperature"))
    assert options_of_part({"temperature": 2.0}, PART) == {"temperature": 2.0}
    with pytest.raises(TypeError, match="temperature cannot be cut: the table of options"):
        options_of_part({"temperature": X}, PART)


def test_a_new_feature_is_computed_only_once_a_kernel_names_it(monkeypatch):
    monkeypatch.setitem(FEATURES, "temperature", Feature("temperature=", lambda c, p: False))
    computed = runpy.run_path(dense.__file__)["COMPUTED"]  # as at an import after the new row
    # The formula gets gathered keys.
    known = FEATURES.keys() - {"temperature", "block_table", *DERIVATIVES}
    assert computed == dense.COMPUTED == known
    for differentiated in Dense.differentiates.values():
        assert differentiated == known - NOT_IN_DERIVATIVES


WRONG = (True, 1, 0.5, "text", lambda *indices: 0, rules.alibi(2), masks.causal())


@pytest.mark.parametrize("name", [name for name, row in OPTIONS.items() if row.axes is not None])
def test_an_array_option_refuses_other_kinds(name):
    row, may_be_number = OPTIONS[name], name in ("query_offset", "key_lengths")
    x = np.ones((1, 2, 3, 4), np.float32)
    for value in WRONG:
        is_taken = row.kind and (isinstance(value, row.kind) or inspect.isfunction(value))
        if not is_taken and not (may_be_number and type(value) is int):
            match = f"{name} (is of type|must be)|goes in score_mod=, not in {name}="
            with pytest.raises(TypeError, match=match):
                attention(x, x, x, **{name: value})
