"""Shared parts of the scripts in this folder: options, the first line, JSON and plots."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyattn.bench.machine import processor, versions


def parser(doc: str, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with ``--rounds``, described by the first paragraph of a docstring."""
    arguments = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    arguments.add_argument(
        "--rounds", type=int, default=rounds, help="alternating rounds (default: %(default)s)"
    )
    return arguments


def add_quick(add: Any) -> None:
    """Add ``--quick``."""
    add("--quick", action="store_true", help="one round of small shapes: a check, no measurement")


def add_files(add: Any) -> None:
    """Add ``--quick``, ``--plot`` and ``--json``."""
    add_quick(add)
    add("--plot", type=Path, metavar="FILE.png", help="draw a plot")
    add("--json", type=Path, metavar="FILE", help="write the times")


def all_threads() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine(threads: int, dtypes: str = "float32") -> str:
    """Describe the processor and the libraries that the times were measured on."""
    return f"{processor()}, {threads} threads each; {versions()}; {dtypes}"


def write_json(file: Path, times: Any) -> None:
    """Write times as JSON."""
    file.write_text(json.dumps(times, indent=1), encoding="utf-8")


def subplots(columns: int, size: Sequence[float], title: str) -> tuple[Any, Any]:
    """Return a figure without a window, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, columns, sharey=True)
    figure.suptitle(title, fontsize=9)
    return figure, axes
