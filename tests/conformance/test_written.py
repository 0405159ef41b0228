"""Written cases: their bits, and the reader on the page, which draws our line."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pages
import pytest

from polyattn import attention
from polyattn.cli import main
from polyattn.conformance import CASES, deviation, written
from polyattn.conformance.cases.gradient_cases import GRADIENT_CASES
from polyattn.conformance.reference.gradients import cotangent, gradient_yardsticks
from polyattn.conformance.reference.tolerance import logsumexp_yardstick, output_yardstick

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "check-kernels.md"
FEW = (
    *("plain", "plain, float64", "plain, bfloat16", "LHD", "offset int"),
    *("mask hides some rows", "causal, L > S", "pages, new rows", "nan seen far away"),
)


def on_the_page(name):
    """Return a function that a block of the page defines."""
    names = {}
    (code,) = [x.code for x in pages.blocks(PAGE) if f"def {name}(" in x.code]
    exec(code, names)
    return names[name]


fault, read_cases, wrong = map(on_the_page, ("fault", "read_cases", "wrong"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of few cases that the command has written."""
    made = tmp_path_factory.mktemp("written") / "cases"
    few = [(CASES | GRADIENT_CASES)[name] for name in FEW]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(written, "cases_to_write", lambda: few)
        assert main(["check", "--write-cases", str(made)]) == 0
    return made


@pytest.fixture(scope="module")
def cases(folder):
    """The cases that the reader finds there, by name."""
    return {case["name"]: case for case in read_cases(folder)}


def yardsticks(name):
    """Return our case of a name, and the yardsticks of its results."""
    case = (CASES | GRADIENT_CASES)[name]
    yards = {"output": output_yardstick(case), "logsumexp": logsumexp_yardstick(case)}
    if name in GRADIENT_CASES:
        yards |= {f"gradient of {n}": yard for n, yard in gradient_yardsticks(case).items()}
    return case, yards


@pytest.mark.parametrize("name", FEW)
def test_what_is_read_has_the_bits_of_our_own(cases, name):
    read, (case, yards) = cases[name], yardsticks(name)
    arrays, options = case.arguments()
    ours = dict(zip(("query", "key", "value"), arrays, strict=True)) | options
    assert read["arguments"].keys() == ours.keys()
    for x, y in zip(read["arguments"].values(), ours.values(), strict=True):
        if isinstance(y, np.ndarray):
            assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
        else:
            assert x == (list(y) if isinstance(y, tuple) else y)
    if "cotangent" in read:
        assert np.array_equal(read["cotangent"], cotangent(case))
    assert read["results"].keys() == yards.keys()
    for what, yard in yards.items():
        result = read["results"][what]
        exact = result["exact"].astype(yard.exact.dtype) + result.get("rest", 0)
        wanted = yard.exact if case.dtype == "float64" else yard.exact.astype(np.float64)
        assert np.array_equal(exact, wanted, equal_nan=True), what
        assert np.array_equal(result["limit"], yard.allowed.astype(np.float64))


@pytest.mark.parametrize("name", ["plain", "mask hides some rows"])
def test_the_reader_draws_the_line_where_the_suite_does(cases, name):
    for what, yard in yardsticks(name)[1].items():
        expected = cases[name]["results"][what] | {"dtype": "float64"}
        off = np.zeros(yard.exact.shape)
        off[np.unravel_index(np.argmax(yard.allowed), off.shape)] = np.max(yard.allowed)
        for times, is_right in ((0, True), (0.5, True), (1.5, False)):
            result = (yard.exact + times * off).astype(np.float64)
            assert (fault(result, expected, None) is None) == is_right, (what, times)
            assert (deviation(result, yard, "").fault is None) == is_right, (what, times)


def test_the_reader_finds_what_is_right_right_and_names_what_is_wrong(folder):
    assert list(wrong(folder, attention)) == []

    def top_left(query, key, value, is_causal=False):
        return attention(query, key, value, is_causal=is_causal, query_offset=0)

    (line,) = wrong(folder, top_left)
    assert line.startswith("causal, L > S: (0, 0, 0, 0) is ")
    lines = list(wrong(folder, lambda query, key, value: value[0]))
    assert lines[0].startswith("plain: float32 (2, 11, 8), must be float32 (2, 2, ")


def test_a_folder_that_is_not_empty_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(written, "cases_to_write", list)
    (tmp_path / "taken").write_text("", encoding="utf-8")
    assert main(["check", "--write-cases", str(tmp_path)]) == 2
    assert f"needs a new or empty folder; {tmp_path} exists" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("name", ["causal", "E != D"])
def test_the_limit_of_twenty_lines_is_near_ours(name):
    case = replace(CASES[name], rows=None)
    arrays, seen = case.arguments()[0], np.ones((case.L, case.S), bool)
    if "is_causal" in dict(case.options):
        seen = np.tri(*seen.shape, case.S - case.L, dtype=bool)
    exact, limits = on_the_page("exact_and_limits")(*arrays, cotangent(case), seen=seen)
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
