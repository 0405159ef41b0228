"""The cases, of which every feature has one; those that run: all, the essential ones, or few."""

import pytest

from polyattn._core.call.features import DTYPES
from polyattn._kernels.dense_kernel import Dense
from polyattn.cli import main
from polyattn.conformance import CASES, ESSENTIAL, KernelVariant, Target
from polyattn.conformance.cases.topics import TOPICS
from polyattn.conformance.checks.gradients import DERIVATIVES
from polyattn.conformance.selection import LEFT_OUT, REFUSED, RUNS, chosen, states
from polyattn.plugin import FEATURES

NUMPY = Target("numpy")


def test_every_feature_and_every_dtype_has_a_case():
    needed = set().union(*(case.features for case in CASES.values()))
    assert needed | {"logsumexp", *DERIVATIVES} == set(FEATURES)
    assert set().union(*(case.features for case in ESSENTIAL.values())) == needed
    for cases in (CASES, ESSENTIAL):
        assert {case.dtype for case in cases.values()} == set(DTYPES)


@pytest.mark.parametrize("name", DERIVATIVES)
def test_every_feature_has_a_case_of_each_derivative(name):
    cases = DERIVATIVES[name].cases.values()
    needed = set().union(*(case.features for case in cases))
    # A derivative gets gathered keys.
    assert needed | {"logsumexp", "block_table", *DERIVATIVES} == set(FEATURES)
    assert {case.dtype for case in cases} == set(DTYPES)
    in_float64 = set().union(*(case.features for case in cases if case.dtype == "float64"))
    assert {"normalizer", "score_expression", "score_norm", "similarity", "softcap"} <= in_float64


class Compiled(Dense):
    name, compiles = "compiled", True

    def reasons_against(self, problem):
        return ["it knows no sinks"] if "sinks" in problem.features else []


def test_jax_of_32_bits_has_no_case_with_wider_integers():
    jax = pytest.importorskip("jax")
    wide = {name: CASES[name] for name in ("offset array and window beyond int32", "plain")}
    for has_wide, names in ((False, {"plain"}), (True, set(wide))):
        with jax.enable_x64(has_wide):
            target = Target("jax")
            applicable = chosen(target, target.variants(["dense"])[0], cases=wide)
        assert {case.name for case in applicable} == names


def test_few_cases_cover_each_feature_dtype_and_topic():
    few = chosen(NUMPY, KernelVariant(Dense()), few=True)
    assert len(few) < 20
    assert {case.topic for case in few} == set(TOPICS)
    assert {case.dtype for case in few} == set(DTYPES)
    features = set().union(*(case.features for case in few))
    assert features == set(FEATURES) - {"block_table", "logsumexp", *DERIVATIVES}
    assert any(not case.features for case in few)


def test_a_kernel_that_compiles_runs_few_cases_and_is_asked_for_all():
    found = states(NUMPY, KernelVariant(Compiled()), ESSENTIAL)
    assert {case.name for case, state in found.items() if state == REFUSED} >= {"sinks", "many"}
    assert list(found.values()).count(LEFT_OUT) > 50
    assert list(found.values()).count(RUNS) < 30
    assert RUNS not in {state for case, state in found.items() if "sinks" in case.features}


def test_the_list_has_a_row_for_each_case_and_a_column_for_each_kernel(capsys):
    kernels = ["--kernel", "dense", "--kernel", "small"]
    assert main(["check", "numpy", "--list", "--essential", *kernels]) == 0
    title, head, *rows, _ = capsys.readouterr().out.splitlines()
    assert title == f"numpy: {len(ESSENTIAL)} cases"
    assert head.split() == ["case", "essential", "small", "dense", "about"]
    assert len(rows) == len(ESSENTIAL)
    assert rows[0].split() == ["plain", "essential", "runs", "runs", "plain"]
    assert sum("refused" in row for row in rows) > 20
