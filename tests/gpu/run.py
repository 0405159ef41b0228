"""All that needs a GPU, in one command: the tests in this folder, the figures, and a page of both.

``make gpu`` runs it in an environment of its own. On a machine that has the libraries already and
no way to install more, ``python tests/gpu/run.py`` runs it with those. It writes
``docs/results/DEVICE.md``; without a GPU it says what is missing and ends with 2.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
ENGINES = ("torch", "jax", "jaxlib", "cupy-cuda13x", "cupy-cuda12x")


def main(arguments: list[str] | None = None) -> int:
    """Run the tests and the figures, and write the page."""
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__.split("\n\n")[0])
    parser.add_argument("--select", default="", metavar="TEXT", help="tests, as pytest's -k")
    parser.add_argument("--rounds", type=int, default=21, help="of each figure (default: 21)")
    parser.add_argument("--no-tests", action="store_true", help="the figures alone")
    parser.add_argument("--no-figures", action="store_true", help="the tests alone")
    parser.add_argument("--page", type=Path, default=None, help="where to write (docs/results)")
    options = parser.parse_args(arguments)
    make_importable()
    # Libraries and processes share the device; JAX would take three quarters of its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    found = devices()
    if not found:
        print("no library here can use a CUDA device:", file=sys.stderr)
        print("\n".join(f"  {line}" for line in backends()), file=sys.stderr)
        return 2
    print(f"{found}\n", flush=True)
    start, lines, failed = time.perf_counter(), [], False
    if not options.no_tests:
        summary, failed = run_tests(options.select)
        lines += ["## Tests", "", summary, ""]
    if not options.no_figures:
        lines += ["## Figures", "", *run_figures(options.rounds), ""]
    minutes = (time.perf_counter() - start) / 60
    page = options.page or RESULTS / f"{slug(found)}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join([*head(found, minutes), *lines]), encoding="utf-8")
    print(f"\nwritten: {page} ({minutes:.1f} min)")
    return 1 if failed else 0


def make_importable() -> None:
    """Let polyattn and its plugins be found although nothing is installed, here and by children."""
    if any(e.dist and e.dist.name == "polyattn" for e in entry_points(group="polyattn.backends")):
        return
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = Path(tempfile.mkdtemp(prefix="polyattn-"))
    info = folder / "polyattn-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: polyattn\nVersion: 0\n")
    lines = [f"{name} = {at}" for name, at in project["entry-points"]["polyattn.backends"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[polyattn.backends]", *lines, ""]))
    paths = [str(ROOT), str(ROOT / "backends"), str(folder)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])


def backends() -> list[str]:
    """Return what polyattn says of the backends that can run on CUDA."""
    import polyattn

    wanted = [info for info in polyattn.list_backends() if info.name in ("cupy", "jax", "torch")]
    return [f"{info.name}: {info.reason or ', '.join(info.devices)}" for info in wanted]


def devices() -> str:
    """Return the name of the first CUDA device that some library can use, or nothing."""
    import polyattn

    for info in polyattn.list_backends():
        for device, known in info.hardware.items():
            if device.startswith("cuda"):
                return str(known.get("name", device))
    return ""


def slug(device: str) -> str:
    """Return a device's name as a file's."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def run_tests(select: str) -> tuple[str, bool]:
    """Run the tests of this folder; return pytest's last line and whether any failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors", str(ROOT / "tests/gpu")]
    command += ["-k", select] if select else []
    if find_spec("xdist"):  # with which pytest-benchmark warns, and warnings are errors
        command += ["-n", "auto", "--dist", "worksteal", "-p", "no:benchmark"]
    last = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last = line.strip() or last
    return f"`{last.strip('= ')}`", process.returncode != 0


def run_figures(rounds: int) -> Iterator[str]:
    """Yield the tables' lines as they are measured."""
    sys.path.insert(0, str(ROOT / "asv_bench" / "peers"))
    from gpu import tables

    for line in tables("cuda", rounds, 0.02):
        print(line, flush=True)
        yield line


def head(device: str, minutes: float) -> list[str]:
    """Return the page's first lines: what ran, where, with what."""
    import polyattn

    found = []
    for package in ENGINES:
        try:
            found.append(f"{package} {version(package)}")
        except ModuleNotFoundError:
            continue
    return [
        f"# {device}",
        "",
        f"Written by `make gpu` on {datetime.date.today()}, in {minutes:.0f} minutes, with"
        f" {', '.join(found)}.",
        "",
        "```",
        str(polyattn.list_backends()),
        "```",
        "",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
