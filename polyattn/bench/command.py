"""Define and check the options of ``polyattn bench``, and print and write its results.

Errors in the command line are reported before anything is measured. Rows are printed as soon as
they are measured, and an interrupt does not lose them.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from polyattn._base.extras import require_matplotlib
from polyattn._base.files import check_file, replacing, write_file
from polyattn._base.streams import bars, complain, progress, reason, show
from polyattn._core.call.features import DTYPES

LENGTHS = "256:4096"
SECONDS = 60.0
ALL = "all"  # kernels
FILES = "json", "csv", "plot"  # the options that name a file to write


def add_options(add: Callable[..., Any], window: Callable[[str], tuple[int | None, ...]]) -> None:
    """Add the command's options."""
    add("--backends", metavar="NAMES", help="such as numpy,torch:cuda,jax (default: all installed)")
    add(
        "--lengths", type=_lengths, default=LENGTHS, metavar="LENGTHS",
        help="256:4096 (doubling) or 512,1000,2048 (default: %(default)s)",
    )  # fmt: skip
    add("--batch", type=_positive, default=1, metavar="B", help="batch size (default: %(default)s)")
    add(
        "--heads", type=_positive, default=8, metavar="H",
        help="number of query heads (default: %(default)s)",
    )  # fmt: skip
    add(
        "--key-heads", type=_positive, metavar="G",
        help="number of key and value heads (default: as --heads)",
    )  # fmt: skip
    add("--size", type=_positive, default=64, metavar="D", help="head size (default: %(default)s)")
    add("--dtype", choices=DTYPES, default="float32", help="(default: %(default)s)")
    add("--causal", action="store_true", help="each query sees no later key")
    add(
        "--window",
        type=window,
        metavar="LEFT,RIGHT",
        help="visible keys before and after each query, such as 255,0 or none,0",
    )
    add("--decode", action="store_true", help="one query, with keys of each length")
    add(
        "--kernel", metavar="NAMES",
        help="such as flex,auto: the first that can run; all: a row for each that can",
    )  # fmt: skip
    add(
        "--seconds", type=_seconds, default=SECONDS, metavar="N",
        help="time budget, without loading libraries (default: %(default)g)",
    )  # fmt: skip
    add("--plot", type=Path, metavar="FILE.png", help="plot rates and the roofline against length")
    add("--json", type=Path, metavar="FILE", help="write the results for --compare")
    add("--csv", type=Path, metavar="FILE", help="write the rows for a spreadsheet")
    add(
        "--compare", type=Path, nargs=2, metavar=("A.json", "B.json"),
        help="compare the files of two runs; nothing is measured",
    )  # fmt: skip


def _lengths(text: str) -> tuple[int, ...]:
    """Read 256:4096 or 512,1000,2048."""
    try:
        if ":" in text:
            first, last = map(int, text.split(":"))
            lengths = [first << n for n in range(64) if 0 < first << n <= last]
        else:
            lengths = sorted({int(length) for length in text.split(",")})
    except ValueError:
        lengths = []
    if not lengths or lengths[0] < 1:
        raise argparse.ArgumentTypeError(
            f"lengths are written 256:8192, doubling from the first to the last, or 512,1000,2048;"
            f" got {text!r}"
        )
    return tuple(lengths)


def _positive(text: str) -> int:
    with suppress(ValueError):
        if int(text) > 0:
            return int(text)
    raise argparse.ArgumentTypeError(f"a positive integer is required; got {text!r}")


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < 1e9:
            return float(text)
    raise argparse.ArgumentTypeError(f"a positive number of seconds is required; got {text!r}")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    _check_files(options)
    if options.compare is not None:
        from polyattn.bench.compare import compare
        from polyattn.bench.results import read

        a, b = options.compare
        show("\n".join(compare(read(a), read(b), str(a), str(b))))
        return 0
    return _measure(options)


def _check_files(options: argparse.Namespace) -> None:
    written = {f"--{name}": file for name in FILES if (file := getattr(options, name)) is not None}
    for option, file in written.items():
        if options.compare is not None:
            raise ValueError(f"--compare measures nothing, so {option} has nothing to write")
        check_file(option, file)
        if list(written.values()).count(file) > 1:
            raise ValueError(f"{file} is given twice: name a different file for {option}")
    if options.plot is not None:
        try:
            require_matplotlib()
        except ImportError as error:
            raise ValueError(f"--plot: {error}") from None
        if options.plot.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--plot writes .png, .svg or .pdf; got {options.plot}")


def _measure(options: argparse.Namespace) -> int:
    from polyattn.bench import contender, machine, table
    from polyattn.bench.measure import measure, measure_peaks
    from polyattn.bench.results import BenchResults

    workload = _workload(options)
    names = contender.everything_here() if options.backends is None else options.backends
    contenders = _supporting(contender.contenders(names), workload, options)
    results = BenchResults(machine.look(contenders), workload, _command(options, contenders))
    titles = [one.name for one in contenders]
    _print(table.head(results))
    deadline = time.perf_counter() + options.seconds
    results.interrupted = True
    try:
        with progress(unit="row", total=len(titles) * len(options.lengths)) as bar:
            measure_peaks(results, contenders, deadline, bar.set_description)
            _print(table.heading(results, titles))
            for rows in measure(
                results, contenders, options.lengths, deadline, bar.set_description
            ):
                _print(table.group(results, rows, titles))
                bar.update(len(rows))
        results.interrupted = False
        _print(table.footer(results, titles))
    except KeyboardInterrupt:
        complain(f"polyattn bench: interrupted after {len(results.rows)} rows")
    finally:  # also after an error, such as a closed pipe
        written = _write(results, options)
    if results.interrupted:
        return 130
    return 0 if written and any(row.seconds is not None for row in results.rows) else 1


def _workload(options: argparse.Namespace) -> Any:
    from polyattn.bench.workload import Workload

    if options.dtype == "bfloat16":
        if importlib.util.find_spec("ml_dtypes") is None:
            raise ValueError("NumPy needs ml_dtypes for bfloat16: pip install ml_dtypes")
        importlib.import_module("ml_dtypes")
    given = {name: getattr(options, name) for name in Workload.__dataclass_fields__}
    kernel = None if options.kernel == ALL else options.kernel
    return Workload(**given | {"key_heads": options.key_heads or options.heads, "kernel": kernel})


def _supporting(contenders: Sequence[Any], workload: Any, options: argparse.Namespace) -> list[Any]:
    """Return the backends that support the call; raise if one that was named does not."""
    from polyattn._dispatch.errors import UnsupportedError

    supporting: list[Any] = []
    for one in contenders:
        refusals = [one.refusal(workload, length) for length in options.lengths]
        if None in refusals:  # a refused length gets a note in its row
            length = options.lengths[refusals.index(None)]
            each = one.each_kernel(workload, length) if options.kernel == ALL else [one]
            supporting += each
        elif options.backends:
            raise UnsupportedError(f"{one.name} does not support this call\n{refusals[-1]}")
        else:
            complain(f"polyattn bench: {one.name} does not support this call and is left out")
    if not supporting:
        raise UnsupportedError(
            "no installed backend supports this call; name one with --backends to see why"
        )
    return supporting


def _command(options: argparse.Namespace, contenders: Sequence[Any]) -> str:
    """Return the command that repeats the run, with every option written out."""
    names = dict.fromkeys(one.name.removesuffix(f"/{one.kernel}") for one in contenders)
    words = ["polyattn", "bench", "--backends", ",".join(names)]
    words += ["--lengths", ",".join(map(str, options.lengths))]
    for name in ("batch", "heads", "key_heads", "size", "dtype", "kernel"):
        value = getattr(options, name)
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    if options.window is not None:
        ends = ",".join("none" if end is None else str(end) for end in options.window)
        words += ["--window", ends]
    words += [f"--{name}" for name in ("causal", "decode") if getattr(options, name)]
    return shlex.join([*words, "--seconds", f"{options.seconds:g}"])


def _write(results: Any, options: argparse.Namespace) -> bool:
    """Write the files that the options name; return whether all were written."""
    if results.interrupted and not results.rows:  # older results are better than none
        return False
    written = True
    for name in FILES:
        file = getattr(options, name)
        if file is None:
            continue
        try:
            if name == "plot":
                from polyattn.bench import picture

                with replacing(file.parent, file.name) as made:
                    picture.draw(results).savefig(made / file.name, dpi=picture.DPI)
            else:
                write_file(file, results.as_json() if name == "json" else results.as_csv())
        except OSError as error:
            written = False
            complain(f"polyattn bench: --{name} {file}: {reason(error)}")
    return written


def _print(lines: Sequence[str]) -> None:
    """Print lines above the progress bar, at once even into a pipe."""
    with bars().external_write_mode():
        show("\n".join(lines))
