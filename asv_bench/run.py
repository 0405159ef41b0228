"""Run asv on this tree, in this environment, and print the backends side by side.

It adds what asv lacks. Results are labelled with a commit, so the tree must be that commit. Library
versions and hardware are written beside the results. And since asv does not report skipped
benchmarks as failures, every installed backend must have a number in every case.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import report
from benchmarks.common import BACKENDS

import polyattn
from polyattn.bench.machine import look

if TYPE_CHECKING:
    from polyattn._dispatch.listing import BackendInfo

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CONF = HERE / "asv.conf.json"
# A process for each case takes seconds: the shortest of each benchmark, by its last parameter.
HOSTS = "cpu|numpy|native|array-api|dask|mlx|onnxruntime"
SHORTEST = rf"(256|512|'float32'|'full'|({HOSTS})')\)|imports"
MEASURED = ("polyattn", "backends", "asv_bench", "pyproject.toml")


def main(arguments: list[str] | None = None) -> int:
    """Run asv and print the tables; return 1 if an installed backend has no result."""
    parser = argparse.ArgumentParser(
        prog="make bench",
        allow_abbrev=False,
        description=__doc__.split("\n\n")[0],
        epilog="Other options are passed to `asv run`, such as --show-stderr.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="run the shortest cases once and keep nothing"
    )
    parser.add_argument("--machine", help="name of the results in asv")
    parser.add_argument(
        "--bench",
        "-b",
        action="append",
        default=[],
        metavar="REGEX",
        help="only matching ones",
    )
    options, others = parser.parse_known_args(arguments)
    if options.quick and not options.bench:
        options.bench = [SHORTEST]
    if not options.quick and (reason := why_not_labelled()):
        print(reason, file=sys.stderr)
        return 2
    if options.machine:
        others.append(f"--machine={options.machine}")
    with configuration(options.quick) as (conf, results):
        asv = [sys.executable, "-P", "-m", "asv", "--config", str(conf)]
        introduce(asv, options.machine)
        code, benchmarks = run(asv, results, options, others)
    gaps = list(missing(benchmarks, expected(polyattn.list_backends())))
    if gaps:
        print("\n" + "\n".join(gaps), file=sys.stderr)
    if code:
        print("asv failed; --show-stderr shows why", file=sys.stderr)
    return code or (1 if gaps else 0)


def run(
    asv: list[str], results: Path, options: argparse.Namespace, others: list[str]
) -> tuple[int, list[report.Benchmark]]:
    """Run the benchmarks and print the results; return asv's exit status and the results."""
    # The clock of the file system may be a tick behind.
    start, environ = time.time() - 1, dict(os.environ)
    command = ["run", f"--environment=existing:{sys.executable}"]
    command += [f"--set-commit-hash={_git('rev-parse', 'HEAD')}", *others]
    command += [f"--bench={pattern}" for pattern in options.bench]
    if options.quick:
        # On a busy machine BLAS threads that wait for each other would take minutes.
        command, environ = [*command, "--quick"], environ | {"OMP_NUM_THREADS": "1"}
    code = subprocess.run([*asv, *command], env=environ).returncode
    try:
        file = report.newest(results)
    except FileNotFoundError:
        return code or 1, []
    if file.stat().st_mtime < start:
        return code or 1, []
    report.environment_file(file).write_text(environment(), encoding="utf-8")
    benchmarks = report.show(file, start, options.bench)
    if options.quick:
        print("\n--quick: the shortest cases once, with one BLAS thread: a check, no measurement")
    return code, benchmarks


def why_not_labelled() -> str | None:
    """Return why results cannot be labelled with the current commit, or None."""
    # -E ignores PYTHONPATH, as asv does.
    where = [sys.executable, "-E", "-P", "-c", "import polyattn; print(polyattn.__file__)"]
    output = subprocess.run(where, cwd=HERE, check=True, capture_output=True, text=True).stdout
    installed = Path(output.strip()).resolve().parent.parent
    if installed != ROOT:
        return f"polyattn is imported from {installed}: pip install --editable {ROOT}"
    changed = _git("status", "--porcelain", "--", *MEASURED)
    if not changed:
        return None
    return (
        "the results would be labelled with a commit that these files differ from:\n"
        f"{changed}\ncommit them first, or use --quick to check that the benchmarks run"
    )


@contextlib.contextmanager
def configuration(quick: bool) -> Iterator[tuple[Path, Path]]:
    """Yield asv's configuration file and its folder of results, temporary for a quick run."""
    if not quick:
        yield CONF, report.RESULTS
        return
    with tempfile.TemporaryDirectory(prefix="polyattn-bench-") as name:
        folder = Path(name)
        conf = json.loads(CONF.read_text(encoding="utf-8"))
        conf |= {"repo": str(ROOT), "benchmark_dir": str(HERE / conf["benchmark_dir"])}
        conf |= {f"{kind}_dir": str(folder / kind) for kind in ("env", "results", "html")}
        file = folder / CONF.name
        file.write_text(json.dumps(conf), encoding="utf-8")
        yield file, folder / "results"


def introduce(asv: list[str], machine: str | None) -> None:
    """Tell asv about this machine, which it keeps in the home folder, so that it does not ask."""
    known = Path.home() / ".asv-machine.json"
    if not known.exists():
        subprocess.run([*asv, "machine", "--yes"], check=True, stdout=subprocess.DEVNULL)
    if machine and machine not in json.loads(known.read_text(encoding="utf-8")):
        subprocess.run([*asv, "machine", f"--machine={machine}"], check=True)


def environment() -> str:
    """Return the machine and its libraries; asv keeps only the name of the processor."""
    backends = str(polyattn.list_backends())
    return "\n".join([*look(()).lines(), "", backends, ""])


def expected(table: Iterable[BackendInfo]) -> list[str]:
    """Return the backends of the benchmarks that are installed."""
    available: set[str] = set()
    for info in table:
        if info.available:
            kinds = {device.partition(":")[0] for device in info.devices}
            available |= {info.name, *(f"{info.name}:{kind}" for kind in kinds)}
            available |= {"native"} & set(info.kernels) if info.name == "numpy" else set()
    return [backend for backend in BACKENDS if backend in available]


def missing(benchmarks: Iterable[report.Benchmark], backends: Iterable[str]) -> Iterator[str]:
    """Yield a line for each benchmark that lacks a number for one of the backends."""
    benchmarks, backends = list(benchmarks), set(backends)
    if not benchmarks:
        yield "no benchmark ran"
    for benchmark in benchmarks:
        without = [
            " ".join(case) or "its only case"
            for case, value in benchmark.values.items()
            if value is None and ("backend" not in benchmark.axes or case[0] in backends)
        ]
        if without:
            yield f"{benchmark.name} has no result for {', '.join(without)}"


def _git(*command: str) -> str:
    git = subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True)
    return git.stdout.rstrip()


if __name__ == "__main__":
    raise SystemExit(main())
