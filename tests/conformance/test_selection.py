"""The cases that run: all, the essential ones, or few that cover the others; and their list."""

import pytest

from polyattn._core.call.features import DTYPES
from polyattn._kernels.dense_kernel import Dense
from polyattn.cli import main
from polyattn.conformance import CASES, ESSENTIAL, KernelVariant, Target
from polyattn.conformance.cases.topics import TOPICS
from polyattn.conformance.checks.gradients import DERIVATIVES
from polyattn.conformance.selection import LEFT_OUT, REFUSED, RUNS, chosen, states, why_few
from polyattn.plugin import FEATURES

NUMPY = Target("numpy")


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


WHY_FEW = [
    ("numpy", "tiled", "case", True, ""),
    ("numpy", "tiled, small tiles", "backward", True, "a derivative in small tiles"),
    ("numpy", "dense", "case", True, "one of the core's"),
    ("array-api", "tiled", "case", True, "one tile holds all scores"),
    ("array-api", "dense", "case", False, ""),
    ("array-api", "dense", "backward", False, "the library is slow"),
]


def test_few_cases_have_a_reason():
    for backend, kernel, test, thorough, why in WHY_FEW:
        target = Target(backend)
        (variant,) = (v for v in target.kernels if str(v) == kernel)
        said = why_few(target, variant, test, thorough=thorough)
        assert why in said
        assert bool(why) == bool(said)


def test_the_list_has_a_row_for_each_case_and_a_column_for_each_kernel(capsys):
    kernels = ["--kernel", "dense", "--kernel", "small"]
    assert main(["check", "numpy", "--list", "--essential", *kernels]) == 0
    title, head, *rows, _ = capsys.readouterr().out.splitlines()
    assert title == f"numpy: {len(ESSENTIAL)} cases"
    assert head.split() == ["case", "essential", "small", "dense", "about"]
    assert len(rows) == len(ESSENTIAL)
    assert rows[0].split() == ["plain", "essential", "runs", "runs", "plain"]
    assert sum("refused" in row for row in rows) > 20
