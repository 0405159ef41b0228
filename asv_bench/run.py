"""Run asv on this tree, in this environment, and print the backends side by side.

What asv leaves out is added: results are labelled with a commit, so the tree must be that commit;
library versions and hardware are written beside them; and since a skipped benchmark is no failure
to asv, every backend that is here must have given a number in every case.
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
    from polyattn.dispatch.listing import BackendInfo

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CONF = HERE / "asv.conf.json"
MEASURED = ("polyattn", "backends", "asv_bench", "pyproject.toml")


def main(arguments: list[str] | None = None) -> int:
    """Run asv and print the tables; return 1 if a backend that is here gave nothing."""
    parser = argparse.ArgumentParser(
        prog="make bench",
        allow_abbrev=False,
        description=__doc__.split("\n\n")[0],
        epilog="Anything else is handed on to `asv run`, such as --show-stderr.",
    )
    parser.add_argument("--quick", action="store_true", help="run each case once, and keep nothing")
    parser.add_argument("--machine", help="the name that asv keeps the results under")
    parser.add_argument(
        "--bench", "-b", action="append", default=[], metavar="REGEX", help="only what this finds"
    )
    options, others = parser.parse_known_args(arguments)
    if not options.quick and (reason := why_not_labelled()):
        print(reason, file=sys.stderr)
        return 2
    if options.machine:
        others.append(f"--machine={options.machine}")
    with configuration(options.quick) as (conf, results):
        asv = [sys.executable, "-m", "asv", "--config", str(conf)]
        introduce(asv, options.machine)
        code, found = run(asv, results, options, others)
    gaps = list(missing(found, expected(polyattn.list_backends())))
    if gaps:
        print("\n" + "\n".join(gaps), file=sys.stderr)
    if code:
        print("asv failed; with --show-stderr it says why", file=sys.stderr)
    return code or (1 if gaps else 0)


def run(
    asv: list[str], results: Path, options: argparse.Namespace, others: list[str]
) -> tuple[int, list[report.Benchmark]]:
    """Run the benchmarks and print what they gave; return asv's exit status, and it."""
    # The clock of files may be behind by a tick.
    start, environ = time.time() - 1, dict(os.environ)
    command = ["run", f"--environment=existing:{sys.executable}"]
    command += [f"--set-commit-hash={_git('rev-parse', 'HEAD')}", *others]
    command += [f"--bench={pattern}" for pattern in options.bench]
    if options.quick:
        # Threads of BLAS that wait for each other on a busy machine would take minutes.
        command, environ = [*command, "--quick"], environ | {"OMP_NUM_THREADS": "1"}
    code = subprocess.run([*asv, *command], env=environ).returncode
    try:
        file = report.newest(results)
    except FileNotFoundError:
        return code or 1, []
    if file.stat().st_mtime < start:
        return code or 1, []
    report.environment_file(file).write_text(environment(), encoding="utf-8")
    found = report.show(file, start, options.bench)
    if options.quick:
        print("\n--quick: each case once, on one thread of BLAS: a check, no measurement")
    return code, found


def why_not_labelled() -> str | None:
    """Return why results of what is installed cannot carry the commit's name, or None."""
    # asv hides PYTHONPATH from what it measures, and so does -E.
    where = [sys.executable, "-E", "-c", "import polyattn; print(polyattn.__file__)"]
    told = subprocess.run(where, cwd=HERE, check=True, capture_output=True, text=True).stdout
    installed = Path(told.strip()).resolve().parent.parent
    if installed != ROOT:
        return f"polyattn is imported from {installed}: pip install --editable {ROOT}"
    changed = _git("status", "--porcelain", "--", *MEASURED)
    if not changed:
        return None
    return (
        "the results would carry the name of a commit that these files differ from:\n"
        f"{changed}\ncommit them first, or see with --quick that all of it runs"
    )


@contextlib.contextmanager
def configuration(quick: bool) -> Iterator[tuple[Path, Path]]:
    """Yield asv's configuration and where its results go; those of a quick run are not kept."""
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
    """Tell asv what this machine is, where it would ask: it keeps that in the home folder."""
    known = Path.home() / ".asv-machine.json"
    if not known.exists():
        subprocess.run([*asv, "machine", "--yes"], check=True, stdout=subprocess.DEVNULL)
    if machine and machine not in json.loads(known.read_text(encoding="utf-8")):
        subprocess.run([*asv, "machine", f"--machine={machine}"], check=True)


def environment() -> str:
    """Return what results were measured on, of which asv keeps the processor's name alone."""
    backends = str(polyattn.list_backends())
    return "\n".join([*look(()).lines(), "", backends, ""])


def expected(table: Iterable[BackendInfo]) -> list[str]:
    """Return which of the benchmarks' backends are here."""
    here: set[str] = set()
    for info in table:
        if info.available:
            kinds = {device.partition(":")[0] for device in info.devices}
            here |= {info.name, *(f"{info.name}:{kind}" for kind in kinds)}
    return [backend for backend in BACKENDS if backend in here]


def missing(found: Iterable[report.Benchmark], backends: Iterable[str]) -> Iterator[str]:
    """Yield a line for each benchmark that lacks a number."""
    found, backends = list(found), set(backends)
    if not found:
        yield "no benchmark ran"
    for benchmark in found:
        without = [
            " ".join(case) or "its only case"
            for case, value in benchmark.values.items()
            if value is None and ("backend" not in benchmark.axes or case[0] in backends)
        ]
        if without:
            yield f"{benchmark.name} gave nothing for {', '.join(without)}"


def _git(*command: str) -> str:
    git = subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True)
    return git.stdout.rstrip()


if __name__ == "__main__":
    raise SystemExit(main())
