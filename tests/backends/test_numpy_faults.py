"""Faults of NumPy itself: which releases have them, that nothing meets them, when a row can go."""

import ast
import tomllib
from pathlib import Path

import numpy as np
import pytest

import polyattn
from polyattn import explain
from polyattn_numpy.faults import FAULTS, faults_of

ROOT = Path(polyattn.__file__).parents[1]


def negates_wrongly():
    columns = [np.ones((106, 4), "float32")[:, -1:], np.ones((106, 8))[:, -1:]]
    return any((np.negative(column, out=column) != -1).any() for column in columns)


def misses_finite_numbers():
    flags = np.zeros((106, 8), bool)
    return not np.isfinite(np.ones((106, 8), "float32")[:, -1:], out=flags[:, -1:]).all()


PRESENT = {"negative": negates_wrongly, "isfinite": misses_finite_numbers}


@pytest.mark.parametrize(
    ("release", "names"),
    [
        ("2.5.0rc1", ["negative", "isfinite"]),
        ("2.5.5", ["isfinite"]),
    ],
)
def test_which_releases_have_which(release, names):
    assert [fault.function for fault in faults_of(release)] == names


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.function)
def test_a_row_holds_for_this_release_and_can_go_when_no_supported_one_has_the_fault(fault):
    assert fault in faults_of(np.__version__) or not PRESENT[fault.function]()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (least,) = (x.removeprefix("numpy>=") for x in project["dependencies"] if "numpy>=" in x)
    assert fault.last is None or fault.last >= tuple(map(int, least.split(".")))


@pytest.mark.parametrize("root", ["backends", "polyattn"])
def test_no_function_with_a_fault_is_given_an_output(root):
    names = {fault.function for fault in FAULTS}
    texts = {file: file.read_text(encoding="utf-8") for file in (ROOT / root).rglob("*.py")}
    calls = [
        (file.name, node.lineno)
        for file, text in texts.items()
        if any(name in text for name in names)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") in names
        and (len(node.args) > 1 or any(word.arg == "out" for word in node.keywords))
    ]
    assert not calls


def test_the_list_and_explain_name_faults(monkeypatch):
    (info,) = (info for info in polyattn.list_backends() if info.name == "numpy")
    assert info.faults == tuple(map(str, faults_of()))
    rows, _, below = str(polyattn.list_backends()).partition("Known faults of these libraries:")
    assert bool(below) == bool(info.faults)
    assert all(fault.split(":")[0] in below for fault in info.faults)
    assert not any(fault.split(":")[0] in rows for fault in info.faults)
    kernel = "polyattn_numpy.tiled_kernel"
    monkeypatch.setattr(f"{kernel}.faults_of", lambda **x: faults_of("2.4.0", **x))
    for size, dtype, named in ((3, "float32", True), (7, "float64", True), (7, "float32", False)):
        shape = (1, 2, 400, size)
        text = str(explain(shape, shape, shape, dtype=dtype, backend="numpy"))
        assert (str(FAULTS[0]) in text) == named
