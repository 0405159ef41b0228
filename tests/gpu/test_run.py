"""`make gpu` as far as a machine without a GPU can tell: what it says, and the page it writes."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(monkeypatch):
    """Return the module that `make gpu` runs."""
    monkeypatch.syspath_prepend(ROOT / "tests/gpu")
    monkeypatch.delitem(sys.modules, "run", raising=False)
    return importlib.import_module("run")


def test_without_a_gpu_it_says_what_is_missing_and_writes_nothing(run, capsys, tmp_path):
    page = tmp_path / "page.md"
    assert run.main(["--page", str(page)]) == 2
    told = capsys.readouterr().err
    assert "no library here can use a CUDA device" in told
    assert "cupy: it cannot be loaded: " in told
    assert "jax: cpu:0" in told
    assert not page.exists()


def test_the_page_holds_the_machine_the_tests_and_the_figures(run, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "devices", lambda: "NVIDIA H200")
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(run, "run_tests", lambda select: ("`7 passed`", False))
    monkeypatch.setattr(run, "run_figures", lambda rounds: iter(["| a | b |"] * rounds))
    assert run.main(["--rounds", "2"]) == 0
    (page,) = tmp_path.iterdir()
    assert page.name == "nvidia-h200.md"
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# NVIDIA H200\n\nWritten by `make gpu` on ")
    assert "jax 0" in text
    assert text.index("`7 passed`") < text.index("| a | b |\n| a | b |")
    monkeypatch.setattr(run, "run_tests", lambda select: ("`1 failed`", True))
    assert run.main(["--no-figures", "--page", str(page)]) == 1
    assert "Figures" not in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_tests_of_the_folder_run_and_are_summed_up(run):
    told, failed = run.run_tests("no_test_has_this_name")
    assert "skipped" in told or "deselected" in told
    assert failed  # pytest ends with 5 where nothing ran


def test_it_runs_where_nothing_is_installed(run, tmp_path):
    code = """
import importlib.metadata, runpy, sys
genuine = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **options: []
run = runpy.run_path("tests/gpu/run.py")
run["make_importable"]()
names = {e.name for e in genuine(group="polyattn.backends") if e.dist.version == "0"}
print(*sorted(names))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    names = "cupy dask jax mlx numpy onnx onnxruntime torch"
    assert done.stdout.split() == names.split(), done.stderr


@pytest.mark.slow
def test_the_figures_are_taken_as_on_a_gpu():
    command = [sys.executable, "asv_bench/peers/gpu.py", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--window", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| (1, 4 on 2")]
    assert {row.split("|")[2].strip() for row in rows} == {"torch", "jax"}
    assert all(float(row.split("|")[5].strip(" %")) > 0 for row in rows)
    assert "| torch, (1, 4 on 2" in done.stdout
