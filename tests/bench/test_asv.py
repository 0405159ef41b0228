"""The benchmarks: the same everywhere, they run, and nothing that is left out is silent."""

import functools
import importlib
import importlib.machinery
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import polyattn

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "asv_bench"
CONF = json.loads((BENCH / "asv.conf.json").read_text(encoding="utf-8"))
SUITES = ("accuracy", "backward", "decode", "dispatch", "forward", "imports", "masks", "memory")

sys.path.insert(0, str(BENCH))
common = importlib.import_module("benchmarks.common")
libraries = importlib.import_module("benchmarks.libraries")
memory = importlib.import_module("benchmarks.memory")
report = importlib.import_module("report")
run = importlib.import_module("run")
sys.path.remove(str(BENCH))
Skip = libraries.SkipNotImplemented


def methods():
    """Yield the class and name of every method that asv would find."""
    for name in SUITES:
        module = importlib.import_module(f"benchmarks.{name}")
        for found in vars(module).values():
            if inspect.isclass(found) and found.__module__ == module.__name__:
                yield from ((found, m) for m in dir(found) if re.match("(time|track|timeraw)_", m))


METHODS = {f"{found.__name__}.{name}": (found, name) for found, name in methods()}


def axes(found):
    return found.params if isinstance(found.params[0], tuple) else (found.params,)


@pytest.fixture(autouse=True)
def _variables(monkeypatch):
    """Undo what opening a library sets; polyattn reads it once, here."""
    monkeypatch.setenv("POLYATTN_NATIVE", "1")
    polyattn.explain((1, 1), (1, 1), (1, 1))


# ---- what runs ----


@pytest.mark.parametrize("name", METHODS)
def test_every_benchmark_runs_at_its_smallest(name):
    """On NumPy, and where it is for GPUs alone it is skipped."""
    found, method = METHODS[name]
    if method.startswith("timeraw"):
        # asv starts an interpreter to time it; that it runs is seen in this one.
        exec(inspect.cleandoc(getattr(found(), method)()), {})
        return
    backends, *others = axes(found)
    backend = "numpy" if "numpy" in backends else backends[0]
    benchmark, case = found(), (backend, *(axis[0] for axis in others))
    if backend.endswith("cuda") and not libraries.has_driver():
        with pytest.raises(Skip, match=r"no GPU driver|is not installed"):
            benchmark.setup(*case)
        return
    benchmark.setup(*case)
    value = getattr(benchmark, method)(*case)
    assert (value is None) == method.startswith("time_")
    assert value is None or value > 0


# The compiled kernel is in or out for a whole process.
@pytest.mark.parametrize("backend", [name for name in common.ON_HOST if name != "native"])
def test_every_backend_computes_the_same(backend):
    library = libraries.open_library(backend)
    assert os.environ["POLYATTN_NATIVE"] == "0"
    arrays = common.random(*[(1, 2, 5, 4)] * 4)
    attend = functools.partial(polyattn.attention, is_causal=True)
    along, *own = map(library.put, arrays)
    ours = functools.partial(attend, **library.options)
    output = library.call(ours, *own)()
    np.testing.assert_allclose(np.asarray(output), attend(*arrays[1:]), atol=1e-6)
    query, *_ = library.gradients(ours, along, *own)()
    _, pullback = polyattn.attention_vjp(*arrays[1:], is_causal=True)
    np.testing.assert_allclose(np.asarray(query), pullback(arrays[0]).query, atol=1e-5)


def test_parameters_are_the_same_where_no_framework_is_and_none_is_imported():
    """asv keeps results by parameter, and pays for every import in each process."""
    code = f"""
import importlib, sys
for name in ("torch", "jax", "cupy", "dask", "mlx", "onnxruntime"):
    sys.modules[name] = None
sys.path.insert(0, {str(BENCH)!r})
for name in {SUITES!r}:
    module = importlib.import_module("benchmarks." + name)
    for found in vars(module).values():
        if getattr(found, "__module__", "") == module.__name__ and hasattr(found, "params"):
            print(found.__name__, found.params)
"""
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    classes = {found for found, _ in METHODS.values() if hasattr(found, "params")}
    assert {f"{found.__name__} {found.params}" for found in classes} <= set(told)
    for found in classes:
        assert set(axes(found)[0]) <= set(common.BACKENDS)
        # Without one, asv takes a hash of the source and every edit ends a series of results.
        assert found.version.isdigit()


def test_what_is_absent_is_skipped_with_a_reason(monkeypatch):
    monkeypatch.setattr(libraries, "has_driver", lambda: True)
    with pytest.raises(Skip, match="torch finds no cuda"):
        libraries.open_library("torch:cuda")
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Skip, match="torch is not installed"):
        libraries.open_library("torch:cpu")


# ---- the configuration ----


def test_an_environment_of_asv_has_what_polyattn_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in needed}
    assert set(CONF["matrix"]["req"]) == names
    assert all((ROOT / name).exists() for name in run.MEASURED)


@pytest.mark.slow
def test_asv_finds_no_fault():
    command = [sys.executable, "-m", "asv", "check", f"--environment=existing:{sys.executable}"]
    done = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No problems found" in done.stdout


# ---- the peers ----


RATIO = r"ratio \d+\.\d{3} \(.* to \d+\.\d{3}\)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "line", "times"),  # what is printed for each call, and how often
    [
        ("attention.py cpu --cases 256,", RATIO + "  error ", 15),
        ("attention.py gradients", RATIO, 16),
        ("attention.py onnxruntime", r"error (?:0|\S+e-0[6-9]|\S+e-1\d|0\.0e\+00)$", 14),
        ("overhead.py", r"^\w+ +bare \S+ µs, polyattn \S+ µs, added \S+ .* ratio", 3),
    ],
)
def test_a_comparison_prints_what_it_measured(command, line, times, monkeypatch):
    script, *options = command.split()
    monkeypatch.setenv("POLYATTN_NATIVE", "0")
    command = [sys.executable, BENCH / "peers" / script, *options, "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert len(re.findall(line, done.stdout, re.MULTILINE)) == times, done.stdout


def test_the_example_of_a_new_benchmark_runs():
    (code,) = re.findall(r"```python\n(.*?)```", (BENCH / "README.md").read_text(), re.DOTALL)
    names = {"__name__": "benchmarks.cross", "__package__": "benchmarks"}
    exec(code, names)
    benchmark = names["Cross"]()
    benchmark.setup("numpy", 512)
    assert benchmark.run().shape == (1, 8, 16, 64)


# ---- the run ----

COLUMNS = ["result", "params", "version", "started_at", "duration"]
NAN = float("nan")
TIMES = (
    "seconds",
    {"backend": ["numpy", "torch:cpu", "cupy"], "length": [256, 2048]},
    [0.002, 0.08, 0.001, 0.1, NAN, NAN],
)


def results(folder, **benchmarks):
    """Write what asv writes, a benchmark being (unit, names and values of axes, numbers)."""
    known, rows = {}, {}
    for name, (unit, axes, numbers) in benchmarks.items():
        known[name] = {"unit": unit, "param_names": list(axes)}
        rows[name] = [numbers, [[repr(x) for x in axis] for axis in axes.values()], "1", 7e12, 0.1]
    file = folder / "machine" / "0123abcd-existing-py.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    (folder / "benchmarks.json").write_text(json.dumps(known))
    file.write_text(json.dumps({"result_columns": COLUMNS, "results": rows}))
    return file


@pytest.fixture
def asv(monkeypatch, tmp_path):
    """Stand in for asv: keep its commands, and write results when it runs."""
    stub = SimpleNamespace(commands=[], numbers=TIMES[2], code=0, environ={})

    def fake(command, **options):
        stub.commands.append([str(part) for part in command])
        stub.environ = options["env"]
        conf = json.loads(Path(command[command.index("--config") + 1]).read_text())
        stub.results = Path(conf["results_dir"])
        named = {} if stub.numbers is None else {"time_it": (*TIMES[:2], stub.numbers)}
        results(stub.results, **named)
        return SimpleNamespace(returncode=stub.code)

    replaced = {
        "introduce": lambda *given: None,
        "environment": lambda: "a processor",
        "_git": lambda *command: "0123abcd",
        "expected": lambda table: ["numpy", "torch:cpu"],
    }
    for name, function in replaced.items():
        monkeypatch.setattr(run, name, function)
    monkeypatch.setattr(run.subprocess, "run", fake)
    return stub


def test_a_quick_run_shows_its_short_table_and_keeps_nothing(asv, capsys):
    assert run.main(["--quick", "--show-stderr"]) == 0
    (command,) = asv.commands
    expected = {"--quick", "--show-stderr", "--set-commit-hash=0123abcd"}
    assert {*expected, f"--environment=existing:{sys.executable}"} <= set(command)
    assert asv.environ["OMP_NUM_THREADS"] == "1"
    told = capsys.readouterr().out
    assert re.search(
        r"time_it, ms \(ratio to torch:cpu\)\n.*\n +256 +2 \(2\.00\) +1 \(1\.00\)", told
    )
    assert "2048" not in told  # the shortest cases only
    assert not asv.results.exists()
    assert not asv.results.is_relative_to(ROOT)


@pytest.mark.parametrize(
    ("numbers", "asvs_code", "arguments", "code", "said"),
    [
        ([NAN, 0.1, NAN, NAN, NAN, NAN], 0, ["-b", "it.*numpy.*2048"], 0, ""),
        ([NAN, *TIMES[2][1:]], 0, [], 1, "time_it has no result for numpy 256"),
        (None, 2, [], 2, "--show-stderr shows why"),
    ],
    ids=["not asked for", "skipped", "asv failed"],
)
def test_what_was_asked_for_and_has_no_number_fails_the_run(
    asv, capsys, numbers, asvs_code, arguments, code, said
):
    asv.numbers, asv.code = numbers, asvs_code
    assert run.main(["--quick", *arguments]) == code
    assert said in capsys.readouterr().err


def test_results_of_changed_files_are_not_labelled_with_the_commit(monkeypatch, capsys):
    monkeypatch.setattr(run, "_git", lambda *command: " M polyattn/masks.py")
    assert run.main([]) == 2
    assert " M polyattn/masks.py\ncommit them first" in capsys.readouterr().err
    monkeypatch.setattr(run, "_git", lambda *command: "")
    assert run.why_not_labelled() is None
