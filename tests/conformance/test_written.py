"""Written cases: their bits, and readers in Python and JavaScript that draw our line."""

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pages
import pytest
from optional import torch

from polyattn.cli import main
from polyattn.conformance import CASES, deviation, written
from polyattn.conformance.cases.gradient_cases import GRADIENT_CASES
from polyattn.conformance.reference.gradients import cotangent, gradient_yardsticks
from polyattn.conformance.reference.tolerance import logsumexp_yardstick, output_yardstick

ROOT = Path(__file__).parents[2]
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples/cases"
NODE = shutil.which("node")


def example(name):
    """Return a module of the examples."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


reader, attention = example("check_cases"), example("attention")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that the command has written."""
    made = tmp_path_factory.mktemp("written") / "cases"
    assert main(["check", "--write-cases", str(made)]) == 0
    return made


@pytest.fixture(scope="module")
def cases(folder):
    """The cases that the reader finds there, by name."""
    return {case["name"]: case for case in reader.read_cases(folder)}


def yardsticks(name):
    """Return our case of a name, and the yardsticks of its results."""
    case = (CASES | GRADIENT_CASES)[name]
    yards = {"output": output_yardstick(case), "logsumexp": logsumexp_yardstick(case)}
    if name in GRADIENT_CASES:
        yards |= {f"gradient of {n}": yard for n, yard in gradient_yardsticks(case).items()}
    return case, yards


def test_a_set_of_all_topics_and_dtypes_is_small(folder, cases):
    assert len(cases) > 250
    assert sum(file.stat().st_size for file in folder.iterdir()) < 20e6
    assert {case["topic"] for case in cases.values()} >= {
        *("formula", "rows without a visible key", "NaN and infinity", "caches and pages"),
        *("extreme values", "lengths", "nothing to compute", "order of the steps"),
    }
    assert {case["dtype"] for case in cases.values()} == {
        *("float16", "bfloat16", "float32", "float64")
    }
    assert sum("cotangent" in case for case in cases.values()) > 90


def test_what_is_read_has_the_bits_of_our_own(cases):
    for name, read in cases.items():
        case, yards = yardsticks(name)
        arrays, options = case.arguments()
        ours = dict(zip(("query", "key", "value"), arrays, strict=True)) | options
        assert read["arguments"].keys() == ours.keys()
        for x, y in zip(read["arguments"].values(), ours.values(), strict=True):
            if isinstance(y, np.ndarray):
                assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), name
            else:
                assert x == (list(y) if isinstance(y, tuple) else y), name
        if "cotangent" in read:
            assert np.array_equal(read["cotangent"], cotangent(case))
        assert read["results"].keys() == yards.keys()
        for what, yard in yards.items():
            result = read["results"][what]
            exact = result["exact"].astype(yard.exact.dtype) + result.get("rest", 0)
            wanted = yard.exact if case.dtype == "float64" else yard.exact.astype(np.float64)
            assert np.array_equal(exact, wanted, equal_nan=True), f"{name}: {what}"
            assert np.array_equal(result["limit"], yard.allowed.astype(np.float64))
            # The limit is what its numbers say, of the unit that is written beside it.
            lowest, highest = (2 * result["textbook"] + x for x in result["floor"] or (0, 0))
            tiny = np.finfo(np.float64).tiny
            assert np.all(result["limit"] <= result["unit"] * highest * (1 + 1e-12) + tiny)
            assert np.all(result["limit"] >= result["unit"] * lowest * (1 - 1e-12) * np.isfinite(
                result["exact"]) - tiny)  # fmt: skip


@pytest.mark.parametrize("name", ["plain", "plain, float64", "mask hides some rows", "LHD"])
def test_a_reader_draws_the_line_where_the_suite_does(cases, name):
    for what, yard in yardsticks(name)[1].items():
        expected = cases[name]["results"][what] | {"dtype": "float64"}
        off = np.zeros(yard.exact.shape)
        off[np.unravel_index(np.argmax(yard.allowed), off.shape)] = np.max(yard.allowed)
        for times, is_right in ((0, True), (0.5, True), (1.5, False)):
            result = (yard.exact + times * off).astype(np.float64)
            assert (reader.fault(result, expected) is None) == is_right, (name, what, times)
            assert (deviation(result, yard, "").fault is None) == is_right, (name, what, times)


def test_the_reader_finds_the_example_right(folder):
    command = [sys.executable, str(EXAMPLES / "check_cases.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES, check=False)
    assert done.stdout.endswith(" cases: 0 wrong, 0 left out\n"), done.stdout + done.stderr
    assert done.returncode == 0


MISTAKES = {
    "causal rows count from the first key": ("seen &= j <= position", "seen &= j <= at[-1]"),
    "a window is one key too long": ("position - left", "position - left - 1"),
    "the sink has no part": ("+ np.exp(sink - highest)", ""),
    "another key head": ("h // per_key", "h % k.shape[-3]"),
    "the gradient of the softcap": ("1 - tanh * tanh", "1 + 0 * tanh"),
    "the gradient of the logsumexp's mean": ("(products - mean)", "products"),
    "the gradient of a sink": ("-np.exp(sink - lse)", "np.exp(sink - lse)"),
    "a scale off by 1e-6": ("len(q), 1) ** -0.5", "len(q), 1) ** -0.500001"),
}


@pytest.mark.parametrize(("right", "wrong"), MISTAKES.values(), ids=MISTAKES)
def test_the_reader_finds_a_mistake(cases, right, wrong):
    source = (EXAMPLES / "attention.py").read_text(encoding="utf-8")
    assert source.count(right) >= 1
    broken = {}
    exec(source.replace(right, wrong), broken)
    faults = (reader.check(x, broken["attention"], broken["gradients"]) for x in cases.values())
    assert any(faults)


def javascript(folder, file=EXAMPLES / "attention.mjs"):
    command = [NODE, str(EXAMPLES / "check_cases.mjs"), str(folder), str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


node = pytest.mark.skipif(NODE is None, reason="needs node")


@node
def test_the_reader_in_javascript_finds_the_example_right(folder):
    done = javascript(folder)
    assert "cases: 0 wrong, " in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


JAVASCRIPT_MISTAKES = {
    "offset int": ("j > position)", "j > i)"),
    "softcap": ("softcap * Math.tanh(score / softcap)", "score"),
    "sinks": (" + Math.exp(sink - highest)", ""),
    "grouped heads": ("Math.floor(h / (H / G))", "h % G"),
    "plain": ("Math.sqrt(Math.max(D, 1))", "Math.sqrt(Math.max(D, 1)) + 1e-6"),
    "pages, a page + 1": ("Math.floor(j / pageLength))", "0)"),
}


@node
@pytest.mark.parametrize("case", JAVASCRIPT_MISTAKES)
def test_the_reader_in_javascript_finds_a_mistake(folder, tmp_path, case):
    right, wrong = JAVASCRIPT_MISTAKES[case]
    source = (EXAMPLES / "attention.mjs").read_text(encoding="utf-8")
    assert right in source
    (tmp_path / "broken.mjs").write_text(source.replace(right, wrong), encoding="utf-8")
    done = javascript(folder, tmp_path / "broken.mjs")
    assert f"\n{case}: output: element" in f"\n{done.stdout}"
    assert done.returncode == 1


def test_workloads_of_flashinfer_trace_have_our_results(folder, tmp_path):
    count = example("flashinfer_trace").write(reader.read_cases(folder), tmp_path)
    found = []
    for file in tmp_path.glob("definitions/gqa_paged/*.json"):
        definition = json.loads(file.read_text(encoding="utf-8"))
        made = {}
        exec(definition["reference"], made)
        constant = {n: x["value"] for n, x in definition["axes"].items() if "value" in x}
        lines = tmp_path / f"workloads/gqa_paged/{definition['name']}.jsonl"
        for line in lines.read_text(encoding="utf-8").splitlines():
            workload = json.loads(line)["workload"]
            given, tensors = {}, {}
            for name, x in workload["inputs"].items():
                given[name] = x.get("value")
                if x["type"] == "safetensors":
                    tensors = reader.read_tensors(tmp_path / x["path"])
                    given[name] = torch.from_numpy(tensors[x["tensor_key"]].copy())
                    axes = definition["inputs"][name]["shape"]
                    lengths = [(constant | workload["axes"])[axis] for axis in axes]
                    assert lengths == list(given[name].shape)
            uuid = workload["uuid"]
            for result, name in zip(made["run"](**given), ("output", "lse"), strict=True):
                exact = tensors[f"{uuid}/{name}"]
                assert np.allclose(result.numpy(), exact, 1e-5, 1e-5, equal_nan=True), uuid
            found.append(uuid)
    assert len(found) == count > 40
    assert {"pages, a page - 1", "cache, no key", "pages, new rows"} <= set(found)


REFUSED = {
    "a file": ([], "taken", "needs a new or empty folder; {} exists"),
    "a folder that is not empty": ([], ".", "needs a new or empty folder; {} exists"),
    "no parent": ([], "no/such", "needs a folder in an existing one"),
    "a backend": (["numpy"], "cases", "leave out the backend"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_nothing_can_be_written_is_refused(tmp_path, capsys, name):
    backend, place, said = REFUSED[name]
    (tmp_path / "taken").write_text("", encoding="utf-8")
    assert main(["check", *backend, "--write-cases", str(tmp_path / place)]) == 2
    assert said.format(tmp_path / place) in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("name", ["plain", "causal", "E != D", "L > S", "1 x 700", "129 x 127"])
def test_the_limit_of_twenty_lines_is_near_ours(name):
    copied = pages.run(DOCS / "how-to" / "check-kernels.md")[-1].names["exact_and_limits"]
    case = replace(CASES[name], rows=None)
    arrays, seen = case.arguments()[0], np.ones((case.L, case.S), bool)
    if "is_causal" in dict(case.options):
        seen = np.tri(*seen.shape, case.S - case.L, dtype=bool)
    exact, limits = copied(*arrays, cotangent(case), seen=seen)
    yards = [output_yardstick(case), *gradient_yardsticks(case).values()]
    for result, limit, yard in zip(exact, limits, yards, strict=True):
        assert np.allclose(result, yard.exact.astype(np.float64), 1e-9, 1e-12)
        assert 1 / 4 < np.median(limit / yard.allowed.astype(np.float64)) < 4
    times = limits[0] / yards[0].unit  # the same unit, up to a factor for all
    assert np.ptp(times) < 1e-9 * np.max(times)


def test_a_file_of_tensors_is_one_of_safetensors():
    from safetensors.numpy import load

    tensors = {
        "a": np.arange(6, dtype="float16").reshape(2, 3).T,
        "b": np.array(True),
        "c": np.zeros((0, 2), "int64"),
    }
    read = load(written.safetensors(tensors | {"d": np.ones(3, "int32")}))
    assert all(np.array_equal(read[name], x) for name, x in tensors.items())
