"""The suite itself: what breaks a promise fails it, and nothing else does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from broken_plugin import DROPPING, IDLE, OTHERS

from polyattn._kernels.dense_kernel import Dense
from polyattn.conformance import CASES, KernelVariant, Target
from polyattn.conformance.checks.cases import cases_for, check_case, takes
from polyattn.conformance.checks.gradients import DERIVATIVES
from polyattn.plugin import FEATURES

# Each runs the suite, in a process of its own.
pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
BROKEN = """
from polyattn.conformance.suite import BackendSuite

class TestBroken(BackendSuite):
    backend = "broken"
    thorough = False
    xfails = {xfails}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the broken plugin as an installed distribution."""
    folder = tmp_path_factory.mktemp("installed")
    info = folder / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[polyattn.backends]\nbroken = broken_plugin:SPEC\n")
    plugin = (TESTS / "broken_plugin.py").read_text(encoding="utf-8")
    (folder / "broken_plugin.py").write_text(plugin, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def python(installed, tmp_path_factory):
    """Run Python where that plugin is installed, outside of this project."""
    folder = tmp_path_factory.mktemp("project")

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=folder,
            env={"PYTHONPATH": str(installed), "PATH": "", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )

    run.folder = folder
    return run


PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", "-rfXE")


@pytest.fixture(scope="module")
def failures(python, request):
    """The tests that fail in a suite that is subclassed, by kernel: of those that are asked for."""
    kernels = {"dense", "tiled"}
    for item in request.session.items:
        if "failures" in item.fixturenames and hasattr(item, "callspec"):
            chosen = item.callspec.params
            kernels.add(f"drops_{chosen['feature']}" if "feature" in chosen else chosen["kernel"])
    (python.folder / "test_broken.py").write_text(BROKEN.format(xfails={}), encoding="utf-8")
    out = python(*PYTEST, "-k", " or ".join(kernels), "test_broken.py").stdout
    found = {}
    for line in out.splitlines():
        name = re.match(
            r"FAILED test_broken.py::TestBroken::(\w+)(?:\[([\w, ]+?)(?:-(.*?))?\])?( - |$)", line
        )
        if name:
            found.setdefault(name[2] or "", set()).add((name[1], name[3]))
    assert " failed" in out, out
    return found


@pytest.mark.parametrize("feature", FEATURES)
def test_a_kernel_that_drops_a_feature_fails_the_cases_of_it(feature, failures):
    tests = failures[f"drops_{feature}"]
    assert not failures.keys() & {"dense", "tiled", "tiled, small tiles"}
    if feature in DERIVATIVES:
        assert {test for test, _ in tests} == {f"test_{feature}"}
        return
    cases = {case for test, case in tests if test == "test_case"}
    assert cases
    if feature != "logsumexp":  # which is asked of every case
        assert all(feature in CASES[case].features for case in cases)


#: The test that a kernel fails, and the topic of one of its cases.
BREAKING = {
    "noisy": ("test_deterministic", None),
    "batchy": ("test_batch_invariant", None),
    "uncut": ("test_cut_invariant", None),
    "wide_pages": ("test_pages_in_any_order", None),
    "leaky": ("test_case", "NaN and infinity"),
    "scribbling": ("test_case", "formula"),
    "widening": ("test_case", "formula"),
    "foreign": ("test_case", "formula"),
    "raising": ("test_case", "formula"),
    "aliasing": ("test_case", "extreme values"),
    "reusing": ("test_first_call_from_eight_threads", None),
    "read_only": ("test_case", "formula"),
    "offset_of_the_first_item": ("test_case", "formula"),
    "deaf_to_score_mod": ("test_case", "rows without a visible key"),
    "blind_to_infinity": ("test_case", "NaN and infinity"),
    "blind_to_nan_keys": ("test_case", "NaN and infinity"),
    "coarse": ("test_case", "extreme values"),
}


@pytest.mark.parametrize("kernel", BREAKING)
def test_a_kernel_that_breaks_another_promise_fails_the_test_of_it(kernel, failures):
    test, topic = BREAKING[kernel]
    failed = [case for name, case in failures[kernel] if name == test]
    assert failed
    assert topic is None or topic in {CASES[case].topic for case in failed}


#: The tests that a kernel fails which declares what it never does.
IDLING = {
    "refusing": {"test_every_declared_feature_is_exercised", "test_deterministic"},
    "no_logsumexp": {"test_every_declared_feature_is_exercised", "test_pages_in_any_order"},
    "no_backward": {"test_every_declared_feature_is_exercised"},
}


@pytest.mark.parametrize("kernel", IDLING)
def test_a_kernel_fails_that_declares_what_it_never_does(kernel, failures):
    assert {name for name, _ in failures[kernel]} == IDLING[kernel]


def test_there_is_a_test_for_every_saboteur():
    assert {kernel.name.removeprefix("drops_") for kernel in DROPPING} == set(FEATURES)
    assert BREAKING.keys() == {kernel.name for kernel in OTHERS}
    assert IDLING.keys() == {kernel.name for kernel in IDLE}


def test_an_expected_failure_is_strict_and_names_a_test(python):
    xfails = {
        "test_case[drops_softcap-softcap]": "it drops it",
        "test_case[drops_softcap-plain]": "it is said to fail, and does not",
        "test_case[drops_softcap-sotfcap]": "it is misspelt",
    }
    (python.folder / "test_expected.py").write_text(BROKEN.format(xfails=xfails), encoding="utf-8")
    done = python(
        *PYTEST, "test_expected.py", "-k", "drops_softcap-softcap or drops_softcap-plain or xfails"
    )
    assert "test_case[drops_softcap-plain]" in done.stdout
    assert "sotfcap" in done.stdout
    assert re.search(r"2 failed.* 1 xfailed|xfails: no such test", done.stdout), done.stdout
    assert (
        "FAILED test_expected.py::TestBroken::test_case[drops_softcap-softcap]" not in done.stdout
    )


def test_a_suite_without_a_backend_is_told_how_to_be_one(python):
    code = (
        "from polyattn.conformance.suite import BackendSuite as Suite\nclass TestOdd(Suite): ...\n"
    )
    (python.folder / "test_odd.py").write_text(code, encoding="utf-8")
    done = python(*PYTEST, "test_odd.py")
    assert done.returncode not in (0, 5)
    assert 'TestOdd must name a backend, such as backend = "numpy"' in done.stdout + done.stderr


WITHOUT_CODE = (
    *("-p", "polyattn.conformance.options", "--pyargs", "polyattn.conformance"),
    "--polyattn-backend",
)


def test_the_suite_needs_no_code_but_a_backend_that_is_there(python):
    done = python(*PYTEST, *WITHOUT_CODE, "numpy", "-k", "tiled-plain")
    assert re.search(r"\d passed", done.stdout), done.stdout
    assert done.returncode == 0
    done = python(*PYTEST, *WITHOUT_CODE, "nonesuch")
    assert done.returncode not in (0, 5)
    assert "no plugin provides the backend 'nonesuch'" in done.stdout + done.stderr


class Narrow(Dense):
    """Takes 16 bits and nothing else."""

    def reasons_against(self, problem):
        return [] if problem.dtype == "float16" else ["it has no registers for that"]


def test_a_kernel_of_one_dtype_is_given_every_case_in_it():
    target, narrow = Target("numpy"), KernelVariant(Narrow())
    taken = [case for case in cases_for(target, narrow, CASES) if takes(target, narrow, case)]
    needed = set().union(*(case.features for case in taken))
    assert {case.dtype for case in taken} == {"float16"}
    assert needed == set(FEATURES) - {"logsumexp", *DERIVATIVES}
    names = {case.name for case in taken}
    float32 = {case.name for case in CASES.values() if case.dtype == "float32"}
    only = {name for name in CASES if CASES[name].dtype == "float16" and "float16" not in name}
    assert names == only | {f"{name}, float16" for name in float32}
    for case in taken:
        if case.name not in CASES and case.topic == "formula" and "score_mod" in case.features:
            check_case(target, narrow, case)
