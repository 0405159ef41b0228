"""The benchmarks: the same everywhere, they run, and nothing that is left out is silent."""

import contextlib
import functools
import importlib
import importlib.machinery
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

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


def classes():
    """Yield every class that asv would find, with the names of its methods."""
    for name in SUITES:
        module = importlib.import_module(f"benchmarks.{name}")
        for found in vars(module).values():
            if inspect.isclass(found) and found.__module__ == module.__name__:
                methods = [m for m in dir(found) if re.match("(time|track|timeraw)_", m)]
                if methods:
                    yield found, methods


CLASSES = {
    f"{found.__module__.partition('.')[2]}.{found.__name__}": found for found, _ in classes()
}
METHODS = {
    f"{found.__name__}.{name}": (found, name) for found, names in classes() for name in names
}


def smallest(found, backend):
    """The first value of each parameter, beside the backend."""
    axes = found.params if isinstance(found.params[0], tuple) else (found.params,)
    return (backend, *(axis[0] for axis in axes[1:]))


@pytest.fixture(autouse=True)
def _variables(monkeypatch):
    """Undo what opening a library sets; polyattn reads it once, here."""
    monkeypatch.setenv("POLYATTN_NATIVE", "1")
    polyattn.explain((1, 1), (1, 1), (1, 1))


# ---- what runs ----


def test_every_module_is_a_suite_or_shared():
    found = {file.stem for file in (BENCH / "benchmarks").glob("*.py")}
    assert found - {"__init__", "common", "libraries"} == set(SUITES)
    assert {name.partition(".")[0] for name in CLASSES} == set(SUITES)


@pytest.mark.parametrize("name", METHODS)
def test_every_benchmark_runs_at_its_smallest(name):
    """On NumPy, on torch where NumPy has none, and where it is for GPUs alone it is skipped."""
    found, method = METHODS[name]
    if method.startswith("timeraw"):
        # asv starts an interpreter to time it; that it runs is seen in this one.
        exec(inspect.cleandoc(getattr(found(), method)()), {})
        return
    known = found.params[0] if isinstance(found.params[0], tuple) else found.params
    backend = next((b for b in ("numpy", "torch:cpu") if b in known), known[0])
    benchmark, case = found(), smallest(found, backend)
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
    arrays = common.random(*[(1, 2, 5, 4)] * 3)
    attend = run.polyattn.attention
    options = dict(library.options)
    output = library.call(lambda *x: attend(*x, **options), *map(library.put, arrays))()
    made_by = {"jax": "jaxlib", "dask": "numpy", "onnxruntime": "numpy"}
    module = made_by.get(library.module, library.module)
    assert type(output).__module__.partition(".")[0] == module
    np.testing.assert_allclose(np.asarray(output), attend(*arrays), atol=1e-6)


@pytest.mark.parametrize("backend", ["torch:cpu", "jax:cpu"])
def test_gradients_are_along_what_is_given(backend):
    library = libraries.open_library(backend)
    x, along = map(library.put, common.random((3, 2), (3, 2)))
    found = library.gradients(lambda x: x * x, along, x)()
    np.testing.assert_allclose(np.asarray(found[0]), 2 * np.asarray(x) * np.asarray(along))


@pytest.mark.parametrize("backend", ["numpy", "array-api", "dask", "mlx", "onnxruntime"])
def test_gradients_without_autograd_are_those_of_attention(backend):
    library = libraries.open_library(backend)
    x, along = common.random((2, 3, 4), (2, 3, 4))
    own, own_along = map(library.put, (x, along))
    attend = functools.partial(polyattn.attention, is_causal=True, **library.options)
    found = np.asarray(library.gradients(attend, own_along, own, own, own)().query)
    _, pullback = polyattn.attention_vjp(x, x, x, is_causal=True)
    np.testing.assert_allclose(found, pullback(along).query, rtol=1e-5, atol=1e-6)


def test_the_accuracy_of_numpy_is_that_of_its_dtype():
    (accuracy,) = (found for found, _ in classes() if found.__name__ == "Accuracy")
    errors = {}
    for dtype in accuracy.params[1]:
        benchmark = accuracy()
        benchmark.setup("numpy", dtype)
        errors[dtype] = benchmark.track_largest_error("numpy", dtype)
    assert 1e-8 < errors["float32"] < 1e-5 < errors["float16"] < 1e-2


# ---- what every benchmark shares ----


def test_the_backends_are_always_the_same():
    names = "numpy native torch:cpu torch:cuda torch:mps cupy jax:cpu jax:cuda dask mlx"
    names += " onnxruntime array-api"
    assert " ".join(common.BACKENDS) == names
    for name, found in CLASSES.items():
        if name != "imports.Imports":
            known = found.params[0] if isinstance(found.params[0], tuple) else found.params
            assert set(known) <= set(common.BACKENDS), name
            assert found.param_names[0] == "backend"


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
            print(name + "." + found.__name__, found.params)
"""
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    here = [f"{n} {found.params}" for n, found in CLASSES.items() if hasattr(found, "params")]
    assert set(here) <= set(told)


def test_versions_are_set_by_hand():
    """Without one, asv takes a hash of the source and every edit ends a series of results."""
    assert all(re.fullmatch(r"\d+", found.version) for found in CLASSES.values())


def test_the_call_is_prepared_once_and_warm_before_it_is_timed():
    """asv calls `setup` before every sample."""
    log = []

    class Counted(common.BackendBenchmark):
        def prepare(self, backend, length):
            log.append((backend, length))
            return lambda: log.append("run")

    benchmark = Counted()
    for _ in range(3):
        benchmark.setup("numpy", 4)
    assert log == [("numpy", 4), "run", "run"]


def test_what_is_not_installed_is_skipped_and_says_so(monkeypatch):
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    (found,) = (found for found, _ in classes() if found.__name__ == "Forward")
    for backend in ("torch:cpu", "jax:cpu", "cupy", "dask", "mlx", "onnxruntime"):
        module = backend.partition(":")[0]
        with pytest.raises(Skip, match=f"{module} is not installed"):
            found().setup(backend, 256)


@pytest.mark.parametrize("backend", ["torch:cuda", "cupy", "jax:cuda"])
def test_without_a_driver_or_device_a_gpu_is_skipped(backend, monkeypatch):
    monkeypatch.setattr(libraries, "has_driver", lambda: True)
    if backend != "cupy":
        with pytest.raises(Skip, match=f"{backend.partition(':')[0]} finds no cuda"):
            libraries.open_library(backend)
    there = importlib.machinery.ModuleSpec("there", None)
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: there)
    monkeypatch.setattr(libraries, "has_driver", lambda: False)
    monkeypatch.setitem(sys.modules, backend.partition(":")[0], None)  # before it is imported
    with pytest.raises(Skip, match="there is no GPU driver"):
        libraries.open_library(backend)


def test_a_call_of_torch_is_over_when_the_device_is_done(monkeypatch):
    import torch

    log = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: log.append("done"))
    library = libraries.open_library("torch:cpu")
    x = torch.ones(2)

    def square(x):
        log.append("queued")
        return x * x

    library.call(square, x)()
    assert log == ["queued"]
    library.device = "cuda"
    library.call(square, x)()
    library.gradients(square, x, x)()
    assert log == ["queued", *["queued", "done"] * 2]


def test_a_call_of_jax_is_over_when_its_result_is_there(monkeypatch):
    import jax

    seen = []
    monkeypatch.setattr(jax, "block_until_ready", lambda x: seen.append(x) or x)
    library = libraries.open_library("jax:cpu")
    output = library.call(lambda x: x + 1, library.put(np.ones(2)))()
    assert seen == [output]


def test_a_call_of_cupy_is_over_when_its_stream_is_done(monkeypatch):
    log = []
    stream = SimpleNamespace(synchronize=lambda: log.append("done"))
    cuda = SimpleNamespace(is_available=lambda: True, get_current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, asarray=np.asarray))
    library = libraries.CuPy("")
    assert library.call(lambda x: log.append("queued") or x, 3)() == 3
    assert log == ["queued", "done"]


# ---- memory ----


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_the_peak_on_the_host_is_of_what_the_call_takes_and_frees():
    def call():
        first = np.ones(2**23)
        del first
        np.ones(2**22)

    # The kernel counts pages in lots.
    assert 63 * 2**20 <= memory.host_peak(call) < 72 * 2**20


def test_the_peak_on_a_device_is_beyond_what_was_there(monkeypatch):
    import torch

    cuda = {"memory_allocated": lambda: 100, "max_memory_allocated": lambda: 350}
    for name, function in (cuda | {"reset_peak_memory_stats": lambda: None}).items():
        monkeypatch.setattr(torch.cuda, name, function)
    peaks = memory.DEVICE_PEAKS
    assert peaks["torch"](None, lambda: None) == 250
    stats = {"bytes_in_use": 10, "peak_bytes_in_use": 60}
    place = SimpleNamespace(memory_stats=lambda: stats)
    assert peaks["jax"](SimpleNamespace(place=place), lambda: None) == 50

    held = [80, 30]  # in use, and free
    pool = SimpleNamespace(
        free_all_blocks=lambda: held.__setitem__(1, 0), total_bytes=lambda: sum(held)
    )
    fake = SimpleNamespace(get_default_memory_pool=lambda: pool)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    assert peaks["cupy"](None, lambda: held.__setitem__(1, 7)) == 7


# ---- the configuration ----


def test_the_configuration_points_to_what_exists():
    assert (BENCH / CONF["repo"] / ".git").exists()
    assert (BENCH / CONF["benchmark_dir"] / "__init__.py").exists()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert CONF["project_url"] == project["urls"]["Source"]
    assert CONF["show_commit_url"] == f"{project['urls']['Source']}/commit/"
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    for folder in ("env_dir", "results_dir", "html_dir"):
        assert CONF[folder].startswith("../.asv/")
    assert ".asv/" in ignored


def test_an_environment_of_asv_has_what_polyattn_needs_and_what_builds_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in needed}
    assert set(CONF["matrix"]["req"]) == names


@pytest.mark.slow
def test_asv_finds_no_fault():
    command = [sys.executable, "-m", "asv", "check", f"--environment=existing:{sys.executable}"]
    done = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No problems found" in done.stdout


def test_commands_that_are_told_start_what_exists():
    pages = [ROOT / "Makefile", ROOT / "README.md", BENCH / "README.md", *ROOT.glob("docs/*.md")]
    told = {name for page in pages for name in re.findall(r"asv_bench/\S+?\.py", page.read_text())}
    assert {f"asv_bench/peers/{name}.py" for name in ("cpu", "encoder", "masks")} <= told
    assert not [name for name in told if not (ROOT / name).exists()]


COMPARISONS = sorted(
    file.stem for file in (BENCH / "peers").glob("*.py") if "__main__" in file.read_text()
)
ENGINES = {
    "long_arrays": "distributed",
    "mlx_fast": "mlx.core",
    "jax_cpu": "polyattn_native",
    "native": "polyattn_native",
    "onnx_runtime": "onnxruntime",
    "ring": "torch",
    "rules": "torch",
    "scale": "distributed",
}


@functools.cache
def printed(name, *options):
    """Return what a comparison with peers prints."""
    pytest.importorskip(ENGINES.get(name, "numpy"))
    command = [sys.executable, str(BENCH / "peers" / f"{name}.py"), *options]
    environ = {**os.environ, "POLYATTN_NATIVE": "1" if name in ("native", "jax_cpu") else "0"}
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, env=environ
    ).stdout


def test_comparisons_with_peers_say_how_they_are_used(monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCH / "peers")
    for name in COMPARISONS:
        if importlib.util.find_spec(ENGINES.get(name, "numpy").partition(".")[0]):
            monkeypatch.setattr(sys, "argv", [name, "--help"])
            with contextlib.suppress(SystemExit), patch.dict(os.environ):
                runpy.run_path(str(BENCH / "peers" / f"{name}.py"), run_name="__main__")
            said = capsys.readouterr().out
            assert said.startswith(f"usage: {name}.py ")
            assert ("--quick" if name == "scale" else "--rounds") in said


RATIO = r"\d\.\d\d to \d+\.\d\d"
GENERATION = "generate --library torch --layers 1 --size 64 --prompt 4 --steps 3 --rounds 1"
#: What a comparison prints: the options, a line or a part of it, and how often it is there.
PRINTED = [
    ("half --quick", RATIO, 6),
    ("backward --quick", RATIO, 16),
    ("cpu --quick --cases 256,", RATIO, 15),
    ("mlx_fast --quick", RATIO, 4),
    (GENERATION, RATIO, 4),
    ("native --quick", r"^\| \(1, 2, 32, .* \*\*\d+\.\d\d\*\* \(.*\| 9\.9(?:, missed)? \|$", 4),
    ("jax_cpu --quick", r"^\| 32 \| (?:full|causal) \|(?: \d+\.\d\d \|){5}$", 2),
    ("masks --quick", r"^causal .* \d\d\.\d%  ratio 1\.000 \(1\.000 to 1\.000\)$", 1),
    ("overhead --quick", r"^numpy +bare \S+ µs, polyattn \S+ µs, added \S+ .* ratio", 1),
    ("overhead --quick", r"^first: select +\d+\.\d", 1),
    ("rules --quick", r"^(?:numpy|torch), \S+ .*\d\.\d\d  ", 10),
    # Two calls of three contenders, and four of two exports.
    ("onnx_runtime --quick", r"error (?:0|\S+e-0[6-9]|\S+e-1\d)$", 14),
    ("onnx_runtime --quick", r"bare session \S+ µs, polyattn \S+ µs, added \S+ ", None),
    (
        "every_option --quick --library numpy --worst 3",
        r"^\| numpy \| 1.*\| `.+` \| \S+ \| \S+ \| \S+ \| \*\*\S+\*\* \|$",
        3,
    ),
    ("scale --quick", r"quick: 7 of 16 pairs \[<= 7: kept\]; 4 tasks", 1),
    ("scale --quick", "BROKEN", 0),
    (
        "long_arrays --quick",
        r"^dask \S+ s, loop \S+ s\nratio \S+\npeak of the workers: \d+ MiB",
        1,
    ),
    (
        "ring --length 512 --rounds 1 --calls 1 --strategies ring",
        r"^\| ring \| \d.* \| 5 \| 5 \| 1\.0 \|$",
        1,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "line", "times"), PRINTED)
def test_a_comparison_prints_what_it_measured(options, line, times):
    rows = printed(*options.split())
    found = len(re.findall(line, rows, re.MULTILINE))
    assert found == times or (times is None and found), rows


@pytest.mark.slow
def test_times_are_written(tmp_path):
    file = tmp_path / "times.json"
    printed("half", "--quick", "--cases", "causal", "--threads", "1", "--json", str(file))
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert {row["case"] for row in results} == {"(1, 2, 64, 64, 16) causal"}
    assert results[0]["contender"] == "float32"
    assert [results[0][name] for name in ("ratio", "low", "high", "error")] == [1.0, 1.0, 1.0, 0.0]


def test_the_example_of_a_new_benchmark_runs():
    (code,) = re.findall(r"```python\n(.*?)```", (BENCH / "README.md").read_text(), re.DOTALL)
    names = {"__name__": "benchmarks.cross", "__package__": "benchmarks"}
    exec(code, names)
    benchmark = names["Cross"]()
    benchmark.setup("numpy", 512)
    benchmark.time_cross("numpy", 512)
    assert benchmark.run().shape == (1, 8, 16, 64)


# ---- the tables ----

COLUMNS = ["result", "params", "version", "started_at", "duration"]


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


TIMES = (
    "seconds",
    {"backend": ["numpy", "torch:cpu", "cupy"], "length": [256, 2048]},
    [0.002, 0.08, 0.001, 0.1, float("nan"), float("nan")],
)


def test_backends_stand_side_by_side(tmp_path, capsys):
    file = results(tmp_path, time_it=TIMES)
    file.with_suffix(".txt").write_text("a processor\n")
    assert report.main([str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "",
        "a processor",
        "",
        "time_it, ms (ratio to torch:cpu)",
        "   length             numpy         torch:cpu",
        "      256          2 (2.00)          1 (1.00)",
        "     2048         80 (0.80)        100 (1.00)",
    ]


@pytest.mark.parametrize(
    ("benchmark", "line", "told"),
    [
        (("seconds", {}, [0.0123]), 0, "name: 12.3 ms"),
        (("bytes", {"backend": ["numpy"]}, [2.5e6]), 0, "name, MB (ratio to numpy)"),
        (("error", {"backend": ["numpy"]}, [2e-7]), 0, "name, error (ratio to numpy)"),
        (("s", {"backend": ["cupy"]}, [None]), 0, "name: no backend for it is installed"),
        (("s", {}, None), 0, "name: - s"),
        (("s", TIMES[1], [1.0, None, 2.0, 2.0, None, None]), -1, "2048 - 2 (1.00)"),  # skipped
    ],
)
def test_a_table_is_in_the_unit_that_reads_best(benchmark, line, told, tmp_path):
    (found,) = report.read(results(tmp_path, name=benchmark))
    assert " ".join(list(report.lines(found))[line].split()) == told


def test_without_results_the_report_says_how_to_have_some(tmp_path):
    with pytest.raises(FileNotFoundError, match="run `make bench` first"):
        report.newest(tmp_path)


# ---- the run ----


@pytest.fixture
def asv(monkeypatch, tmp_path):
    """Stand in for asv: keep its commands, and write results when it runs."""
    stub = SimpleNamespace(commands=[], benchmarks={"time_it": TIMES}, code=0, environ={})

    def fake(command, **options):
        command = [str(part) for part in command]
        stub.commands.append(command)
        if "run" in command:
            stub.environ = options["env"]
            conf = json.loads(Path(command[command.index("--config") + 1]).read_text())
            folder = Path(conf["results_dir"])
            stub.results = folder
            results(folder if folder.is_absolute() else tmp_path, **stub.benchmarks)
        return SimpleNamespace(returncode=stub.code)

    monkeypatch.setattr(run, "introduce", lambda *given: None)
    monkeypatch.setattr(run, "environment", lambda: "a processor")
    monkeypatch.setattr(run, "_git", lambda *command: "0123abcd")
    monkeypatch.setattr(run.subprocess, "run", fake)
    monkeypatch.setattr(run, "expected", lambda table: ["numpy", "torch:cpu"])
    return stub


def test_a_quick_run_shows_its_short_table_and_keeps_nothing(asv, capsys):
    assert run.main(["--quick"]) == 0
    (command,) = asv.commands
    assert "--quick" in command
    assert "--set-commit-hash=0123abcd" in command
    assert f"--environment=existing:{sys.executable}" in command
    assert asv.environ["OMP_NUM_THREADS"] == "1"
    told = capsys.readouterr().out
    assert "a processor" in told
    assert "time_it, ms (ratio to torch:cpu)" in told
    assert "256" in told
    assert "2048" not in told  # the shortest cases only
    assert not asv.results.exists()
    assert not asv.results.is_relative_to(ROOT)


def test_what_was_not_asked_for_is_neither_shown_nor_missed(asv, capsys):
    unit, axes, (_, second, *_) = TIMES
    nan = float("nan")
    asv.benchmarks = {"time_it": (unit, axes, [nan, second, nan, nan, nan, nan])}
    assert run.main(["--quick", "--show-stderr", "-b", "it.*numpy.*2048"]) == 0
    (command,) = asv.commands
    assert {"--bench=it.*numpy.*2048", "--show-stderr"} <= set(command)
    shown = capsys.readouterr().out.splitlines()
    assert [line.split() for line in shown[-4:-2]] == [
        ["length", "numpy"],
        ["2048", "80", "(1.00)"],
    ]
    assert run.main(["--quick", "-b", "it.*numpy"]) == 1
    assert capsys.readouterr().err.strip() == "time_it has no result for numpy 256"


@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_backend_that_is_here_and_gave_nothing_fails_the_run(asv, capsys, value):
    unit, axes, numbers = TIMES
    asv.benchmarks = {"time_it": (unit, axes, [value, *numbers[1:]])}
    assert run.main(["--quick"]) == 1
    assert "time_it has no result for numpy 256" in capsys.readouterr().err


def test_a_failure_of_asv_or_a_run_of_nothing_fails(asv, capsys):
    asv.benchmarks, asv.code = {}, 2
    assert run.main(["--quick"]) == 2
    assert "--show-stderr" in capsys.readouterr().err
    asv.code = 0
    assert run.main(["--quick"]) == 1
    assert "no benchmark ran" in capsys.readouterr().err


def test_a_benchmark_without_backends_must_have_its_number():
    failed = report.Benchmark("timeraw_it", "seconds", 0.0, (), {(): None})
    assert list(run.missing([failed], [])) == ["timeraw_it has no result for its only case"]


def test_results_are_not_labelled_with_a_commit_that_they_are_not_of(asv, monkeypatch, capsys):
    monkeypatch.setattr(run, "why_not_labelled", lambda: "there are changes")
    assert run.main([]) == 2
    assert not asv.commands
    assert capsys.readouterr().err == "there are changes\n"


def test_changes_in_what_is_measured_are_told(monkeypatch):
    monkeypatch.setattr(run, "_git", lambda *command: " M polyattn/masks.py")
    assert re.search(
        r"differ from:\n M polyattn/masks\.py\ncommit them first", run.why_not_labelled()
    )
    monkeypatch.setattr(run, "_git", lambda *command: "")
    assert run.why_not_labelled() is None
    monkeypatch.setattr(run, "ROOT", ROOT / "elsewhere")
    assert f"polyattn is imported from {ROOT}: pip install --editable" in run.why_not_labelled()


def test_every_folder_that_is_measured_exists():
    assert all((ROOT / name).exists() for name in run.MEASURED)


def test_the_backends_that_are_here_are_expected_and_no_others():
    def info(name, available, *devices, kernels=()):
        return SimpleNamespace(name=name, available=available, devices=devices, kernels=kernels)

    here = [info("numpy", True, "cpu"), info("array-api", True), info("jax", True, "cpu:0")]
    gone = [info("torch", False), info("acme", True, "cpu")]
    assert run.expected([*here, *gone]) == ["numpy", "jax:cpu", "array-api"]
    gpus = [info("torch", True, "cpu", "cuda:0", "cuda:1"), info("cupy", True, "cuda:0")]
    assert run.expected(gpus) == ["torch:cpu", "torch:cuda", "cupy"]
    assert run.expected([info("numpy", True, kernels=("native",))]) == ["numpy", "native"]


def test_other_backends_are_timed_without_the_compiled_kernel():
    libraries.open_library("numpy")
    assert os.environ["POLYATTN_NATIVE"] == "0"


@pytest.mark.needs("jax", "torch")
def test_what_asv_does_not_keep_is_written_beside_the_results():
    told = run.environment()
    assert "processor" in told
    for name in ("numpy", "torch", "jax"):
        assert f"{name} {importlib.metadata.version(name)}" in told
    file = ROOT / "0123abcd-existing.json"
    assert report.environment_file(file).suffix == ".txt"  # asv would read any other .json
