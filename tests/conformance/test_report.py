"""`polyattn check`: the table, the exit code, and what it charges a failure to."""

import json
import re
import subprocess
import sys
from typing import ClassVar

import numpy as np
import pytest

from polyattn import UnsupportedError
from polyattn._core.call.features import DTYPES, FEATURES
from polyattn._dispatch import registry
from polyattn._kernels.dense_kernel import Dense
from polyattn.cli import main
from polyattn.conformance import CASES, KernelVariant, Target
from polyattn.conformance.cases.topics import TOPICS
from polyattn.conformance.checks import promises
from polyattn.conformance.checks.gradients import check_gradients
from polyattn.conformance.report import report, run
from polyattn.plugin import Backend

QUICK = ["check", "numpy", "--kernel", "dense", "--quick"]


def test_a_table_a_row_a_feature_and_a_column_a_kernel(capsys):
    assert main(QUICK) == 0
    out, err = capsys.readouterr()
    rows = dict(re.findall(r"^  (\w[\w ]*?)  +(\S+)$", out, flags=re.MULTILINE))
    corners = [topic for topic in TOPICS if topic != "formula"]
    assert {*FEATURES, *DTYPES, *corners, "plain", "deterministic"} <= rows.keys()
    assert all(0 < float(rows[feature]) < 10 for feature in FEATURES)
    assert "no failures" in out
    assert err == ""  # a progress bar is for terminals


def test_json(capsys):
    assert main([*QUICK[:-1], "--case", "causal", "--case", "bias", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (backend,) = found["backends"]
    (kernel,) = backend["kernels"]
    assert (backend["name"], kernel["name"], found["failed"]) == ("numpy", "dense", 0)
    causal = kernel["rows"]["causal"]
    assert (causal["agreed"], causal["worst"]) == (1, "causal")
    assert 0 < causal["share"] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("numpy --kernel desne", "numpy has no kernel 'desne'; it has small, tiled, dense"),
        ("numpy --repro /no/such/folder/x.py", "in an existing folder; got /no"),
        ("auto", "one backend is checked at a time"),
        ("array-api --library nothing", "there is no module 'nothing'"),
        ("array-api --library json", "'json' makes no arrays"),
        ("numpy --callable torch:matmul", "--callable takes the place of a backend"),
        ("numpy --list --repro x.py", "leave out --callable, --subject, --json and --repro"),
        ("--write-cases x --repro x.py", "writes one set of cases; leave out the other options"),
        ("numpy --write-cases x", "leave out the backend"),
        ("numpy --same-bits", "give a function"),
        ("numpy --case causl", "--case: there is no case 'causl'; did you mean 'causal'?"),
        ("--callable math:prod --case dropout", "--case: no function of others has these"),
    ],
)
def test_wrong_arguments_are_refused_before_any_work(arguments, message, capsys):
    assert main(["check", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    for name in [m for m in sys.modules if m.startswith("polyattn.conformance")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("polyattn.conformance", raising=False)
    monkeypatch.setitem(sys.modules, "mpmath", None)
    assert main(["check", "numpy"]) == 2
    assert 'pip install "polyattn[testing]"' in capsys.readouterr().err


# ---- what a failure is charged to ----


class Deaf(Dense):
    """Hears nothing of softcap, and adds a logsumexp of its own."""

    name = "deaf"

    def __init__(self, logsumexp=0.0):
        self.logsumexp = logsumexp

    def __call__(self, problem, operands, backend):
        if not self.logsumexp:
            problem = problem._replace(softcap=None)
        output, logsumexp = super().__call__(problem, operands, backend)
        return output, None if logsumexp is None else logsumexp + self.logsumexp


def reported(kernel, cases):
    variant = KernelVariant(kernel)
    section = report.Section(Target("numpy"), (variant,))
    cases = [CASES.get(case, case) for case in cases]
    found = run.run([run.CheckStep(section, variant, case) for case in cases])
    return found, lambda row: section.cell(row, variant)


class Faint(Deaf):
    """Ends without a bias."""

    name = "faint"

    def __call__(self, problem, operands, backend):
        if "bias" not in problem.features:
            raise RuntimeError("it is too much")
        return super().__call__(problem, operands, backend)


def test_a_failure_is_charged_to_the_feature_that_fails_alone():
    found, cell = reported(Deaf(), ["bias x softcap", "softcap", "bias", "plain"])
    assert found.failed == 2
    assert len(cell("softcap").failures) == 2
    assert not cell("bias").failures
    assert (cell("bias").agreed, cell("bias").elsewhere) == (1, 1)
    assert len(cell("float32").failures) == 2
    first = found.sections[0].failures[0]
    assert (first.kernel, first.charged) == ("deaf", "softcap")
    assert first.text.startswith("softcap: output")  # the simplest first
    assert first.text.endswith("as if softcap is ignored")
    assert "FAIL deaf: softcap: output" in str(found)

    _, cell = reported(Deaf(), ["bias x softcap", "bias", "plain"])
    assert len(cell("softcap").failures) == len(cell("bias").failures) == 1  # of both together


def test_an_error_is_a_failure_with_its_text_and_the_first_result_names_its_meaning():
    found, _ = reported(Faint(), ["softcap", "bias x softcap", "bias"])
    raised, other = (failure.text for failure in found.sections[0].failures)
    assert "softcap: output: raised RuntimeError('it is too much') at " in raised
    assert "test_report.py:" in raised
    assert other.endswith("as if softcap is ignored")


def test_a_logsumexp_that_is_wrong_is_charged_to_nothing_else():
    found, cell = reported(Deaf(logsumexp=1.0), ["plain", "bias", "softcap"])
    assert found.failed == 3
    assert len(cell("logsumexp").failures) == 3
    assert not any(cell(row).failures for row in ("plain", "bias", "softcap"))


def test_each_call_without_gradients_is_a_failure():
    class Detached(Dense):
        name = "detached"
        differentiates: ClassVar = {}

        def __call__(self, problem, operands, backend):
            return super().__call__(problem, operands, backend)[0].detach(), None

    variant = KernelVariant(Detached())
    section = report.Section(Target("torch"), (variant,))
    run.run([run.CheckStep(section, variant, "gradients", few=True)])
    assert len(section.failures) == len(section.cell("gradients", variant).failures) > 1
    assert "does not require a gradient" in section.failures[0].text


def test_a_refusal_that_explain_does_not_tell_is_a_failure():
    class Late(Dense):
        def __call__(self, problem, operands, backend):
            raise UnsupportedError("not now")

    with pytest.raises(AssertionError, match="plain: explain says that it runs, and the call is"):
        check_gradients(Target("torch"), KernelVariant(Late()), CASES["plain"])


def test_an_interrupt_leaves_what_there_was(monkeypatch, capsys):
    genuine = run.checks.check_case
    done = []

    def check_case(target, variant, case):
        if len(done) == 30:
            raise KeyboardInterrupt
        done.append(case)
        return genuine(target, variant, case)

    monkeypatch.setattr(run.checks, "check_case", check_case)
    assert main(QUICK) == 130
    out, err = capsys.readouterr()
    assert "no failures" not in out
    assert "interrupted: nothing failed in 30 of " in out
    assert "interrupted after 30 of " in err


DIES = """
import os, signal
from polyattn.conformance.report import run
from polyattn.cli import main
run.checks.check_case = lambda *given: os.kill(os.getpid(), signal.SIGFPE)
main(["check", "numpy", "--kernel", "dense", "--case", "causal"])
"""


def test_a_kernel_that_ends_the_process_leaves_the_name_of_the_case():
    died = subprocess.run([sys.executable, "-c", DIES], capture_output=True, text=True, timeout=120)
    assert died.returncode != 0
    assert re.search(r"in numpy, dense: causal\b", died.stderr)


class Rounding(Backend):
    """A library without float64, which does not say so."""

    kernels = (Dense(),)

    def __init__(self):
        super().__init__(np)

    def place(self, array, device):
        array = np.asarray(array)
        return array.astype(np.float32) if array.dtype == np.float64 else array


def test_a_dtype_that_is_declared_and_lost_fails(monkeypatch):
    monkeypatch.setattr(registry, "loaded", lambda name: Rounding())
    section = run.steps([Target("numpy")], {}, ["dense"])[0].section
    run._do(section, None, "arrays keep the declared dtypes", few=False)
    (failure,) = section.failures
    assert "float64 becomes float32" in str(failure)


def test_checks_in_a_new_interpreter_run_no_module_of_the_current_folder(tmp_path, monkeypatch):
    for name in ("numpy", "random", "polyattn_numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the folder')")
    monkeypatch.chdir(tmp_path)
    promises.check_import_hygiene("numpy")


def test_texts_of_plugins_are_printable(monkeypatch, capsys):
    section = run.steps([Target("numpy")], {}, ["dense"])[0].section
    section.plugin["the kernel <i>"] = "not checked: it runs on <b>\x1b[31m"
    section.failures.append(report.Failure("dense", "plain", "<u>\x1b[31m"))
    monkeypatch.setattr(run, "run", lambda *steps: report.Report([section], 1, 1))
    assert main(QUICK) == 1
    out = capsys.readouterr().out
    assert "<b>?[31m" in out
    assert "<u>?[31m" in out
