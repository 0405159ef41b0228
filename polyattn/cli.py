"""The command line: ``polyattn backends | explain | check | bench | demo``.

Results go to standard output and are plain text, the same on a terminal and in a file; errors go to
standard error. Exit codes: 0 done, 1 it cannot be done here, 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import math
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import polyattn
from polyattn.bench import command
from polyattn.dispatch.errors import BackendError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that has no Σ shows a ? for it
            stream.reconfigure(errors="replace")
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # the reader, such as head, has seen enough
            print(f"polyattn: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["demo"]:
        return _demo(arguments[1:])
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # said by the command's own parser, with its usage
        getattr(options, "parser", parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command is None:
        parser.print_help()
        return 2
    try:
        code: int = options.run(options)
    except BackendError as error:
        print(f"polyattn {options.command}: {error}", file=sys.stderr)
        return 1
    except (TypeError, ValueError) as error:
        print(f"polyattn {options.command}: {error}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="polyattn",
        description="Attention for every array library: what is here, what would run, whether it is"
        " right, how fast it is, and a demo.",
        epilog="POLYATTN_BACKEND, such as torch:cuda,numpy, sets the backend of every call.",
    )
    parser.add_argument("--version", action="version", version=f"polyattn {polyattn.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_backends(commands)
    _add_explain(commands)
    _add_check(commands)
    _add_bench(commands)
    commands.add_parser("demo", help="two sentences through a real encoder, and a picture of it")
    return parser


def _add_backends(commands: Any) -> None:
    backends = commands.add_parser(
        "backends",
        help="what is installed, on which devices, and the command that installs what is missing",
        description="List every backend: its library, devices and kernels, or what it lacks and"
        " the command that installs it. Loads the libraries that are installed.",
    )
    backends.add_argument("--json", action="store_true", help="print JSON instead of a table")
    backends.set_defaults(run=_backends, parser=backends)


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="which kernel would run for given shapes, and why no other",
        description="Say which kernel attention would run for arrays of these shapes, and why each"
        " other one would not. Nothing is computed. In the table, next is what would run if those"
        " above could not, and on request what runs only if --kernel names it.",
        epilog="example: polyattn explain --shape 2,8,1024,64 --key-shape 2,2,1024,64 --causal"
        " --library torch",
    )
    add = explain.add_argument
    add("--shape", type=_shape, required=True, help="of the query: ...,H,L,D")
    add("--key-shape", type=_shape, metavar="SHAPE", help="...,G,S,D (default: the query's)")
    add("--value-shape", type=_shape, metavar="SHAPE", help="...,G,S,E (default: the key's)")
    add("--dtype", default="float32", help="of query, key and value (default: %(default)s)")
    add("--library", default="numpy", help="whose arrays they are (default: %(default)s)")
    add("--device", metavar="NAME", help="where they are (default: the library's own default)")
    add("--causal", action="store_true", help="is_causal=True")
    add("--window", type=_window, metavar="LEFT,RIGHT", help="such as 255,0 or none,0")
    add("--query-offset", type=int, metavar="N", help="position of the first query")
    add("--scale", type=float, metavar="X", help="in place of 1/sqrt(D)")
    add("--softcap", type=float, metavar="X", help="bound of the scores")
    add("--mask-shape", type=_shape, metavar="SHAPE", help="a bool mask of this shape")
    add("--bias-shape", type=_shape, metavar="SHAPE", help="a bias of this shape")
    add("--sinks", action="store_true", help="one sink per query head")
    add("--layout", default="...HLD", help='"...HLD" or "...LHD" (default: %(default)s)')
    add("--logsumexp", action="store_true", help="as attention_partial needs it")
    add("--backend", metavar="NAMES", help="such as torch:cuda,numpy")
    add("--kernel", metavar="NAME", help="insist on a kernel")
    add("--json", action="store_true", help="print JSON instead of a table")
    explain.set_defaults(run=_explain, parser=explain)


def _add_check(commands: Any) -> None:
    check = commands.add_parser(
        "check",
        help="whether the kernels of a backend compute attention correctly, and how accurately",
        description="Check every kernel of the backends against the written meaning of attention,"
        " and print a table: a row for each feature, dtype and corner case, a column for each"
        " kernel. A cell is the largest error, in units of eps times the condition, or why the"
        ' kernel refuses. Needs pip install "polyattn[testing]".',
        epilog="example: polyattn check torch --kernel sdpa --html report.html",
    )
    add = check.add_argument
    add(
        "backends",
        nargs="*",
        metavar="BACKEND",
        help="the backends to check (default: all installed)",
    )
    add("--library", metavar="MODULE", help="library that makes the arrays, such as jax.numpy")
    add(
        "--callable",
        metavar="MODULE:FUNCTION",
        help="check this function instead of a backend; its arguments are named as in torch's"
        " scaled_dot_product_attention or in polyattn.attention",
    )
    add(
        "--kernel",
        action="append",
        default=[],
        metavar="NAME",
        help="check only this kernel; may be repeated",
    )
    add("--quick", action="store_true", help="check one case of each feature and corner case")
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--html", type=Path, metavar="FILE", help="also write an HTML page")
    check.set_defaults(run=_check, parser=check)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="how fast the backends are on this machine, side by side",
        description="Time the same call on several backends, in turns, at growing lengths, and"
        " print a table: the median time with its quartiles, the rate and its share of what the"
        " hardware reaches, the error against float64, and the memory.",
        epilog="example: polyattn bench --backends numpy,torch,jax --lengths 256:8192 --causal",
    )
    command.add_options(bench.add_argument, _window)
    bench.set_defaults(run=command.run, parser=bench)


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(length) for length in text.split(","))
    except ValueError:
        shape = (-1,)
    if min(shape) < 0:
        raise argparse.ArgumentTypeError(f"a shape is written 2,8,128,64; got {text!r}")
    return shape


def _window(text: str) -> tuple[int | None, ...]:
    try:
        return tuple(None if end == "none" else int(end) for end in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a window is written 255,0 or none,0; got {text!r}"
        ) from None


def _backends(options: argparse.Namespace) -> int:
    table = polyattn.list_backends()
    print(json.dumps(table.as_dicts(), indent=2) if options.json else table)
    return 0


def _explain(options: argparse.Namespace) -> int:
    key = options.key_shape or options.shape
    heads = options.shape[-3 if options.layout == "...HLD" else -2] if len(options.shape) > 2 else 1
    explanation = polyattn.explain(
        options.shape,
        key,
        options.value_shape or key,
        mask=options.mask_shape,
        bias=options.bias_shape,
        is_causal=options.causal,
        window=options.window,
        query_offset=options.query_offset,
        scale=options.scale,
        softcap=options.softcap,
        sinks=(heads,) if options.sinks else None,
        layout=options.layout,
        backend=options.backend,
        kernel=options.kernel,
        logsumexp=options.logsumexp,
        library=options.library,
        device=options.device,
        dtype=options.dtype,
    )
    print(json.dumps(explanation.as_dict(), indent=2) if options.json else explanation)
    return 0 if explanation.chosen else 1


def _check(options: argparse.Namespace) -> int:
    """Return 0 if all cases agree, 1 if one does not, 2 if they cannot be checked."""
    try:
        from polyattn.conformance import CASES, ESSENTIAL, Target
        from polyattn.conformance.report import html as page
        from polyattn.conformance.report import run
    except ModuleNotFoundError as error:
        print(f"polyattn check: {error}", file=sys.stderr)
        return 2
    if options.html is not None and (options.html.is_dir() or not options.html.parent.is_dir()):
        raise ValueError(f"--html needs a file in an existing folder; got {options.html}")
    cases = ESSENTIAL if options.quick else CASES
    if options.callable is not None:
        return _check_callable(options, cases)
    try:
        if options.backends:
            names = [name for given in options.backends for name in given.split(",")]
            targets = [Target(name, options.library) for name in names]
        else:
            targets = run.default_targets(options.library)
    except BackendError as error:
        print(f"polyattn check: {error}", file=sys.stderr)
        return 2
    report = run.run(run.steps(targets, cases, options.kernel), run.progress)
    print(_json(report.as_dict()) if options.json else report)
    if options.html is not None:
        options.html.write_text(page.page(report), encoding="utf-8")
    if report.done < report.total:
        print(f"polyattn check: interrupted after {report.done} of {report.total}", file=sys.stderr)
        return 130
    return 1 if report.failed else 0


def _json(results: Any) -> str:
    """Return JSON, which has no infinity: an infinite error becomes null."""

    def finite(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: finite(y) for name, y in x.items()}
        if isinstance(x, (list, tuple)):
            return [finite(y) for y in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(finite(results), indent=2, allow_nan=False)


def _check_callable(options: argparse.Namespace, cases: Any) -> int:
    from polyattn.conformance.functions import check as callables
    from polyattn.conformance.functions import report as function_report
    from polyattn.conformance.report import html as page
    from polyattn.conformance.report import run

    for name, values in (("a backend", options.backends), ("--kernel", options.kernel)):
        if values:
            raise ValueError(f"--callable takes the place of {name}; got {' '.join(values)}")
    sys.path.insert(0, "")  # where python -m would find a module of the user's
    function = callables.load(options.callable)
    target = callables.target_of(options.callable, options.library)
    bar = partial(run.bar, describe=lambda case: options.callable)
    rows = function_report.summarise(function, cases.values(), target.to, target.back, bar)
    if options.json:
        print(_json([function_report.as_dict(row) for row in rows]))
    else:
        print(f"{options.callable} on arrays of {target.library}\n")
        print(*function_report.lines(rows), sep="\n")
    if options.html is not None:
        options.html.write_text(page.callable_page(options.callable, rows), encoding="utf-8")
    differing = sum(row.count(callables.DIFFERS) + row.count(callables.RAISES) for row in rows)
    if not options.json:
        print(f"  {differing or 'no'} case{'s' * (differing != 1)} differ{'s' * (differing == 1)}")
    return 1 if differing else 0


def _demo(arguments: list[str]) -> int:
    """Run the demo of the source tree that this package is installed from."""
    file = Path(__file__).resolve().parents[1] / "examples" / "minilm" / "demo.py"
    spec = importlib.util.spec_from_file_location("polyattn_demo", file)
    if not file.is_file() or spec is None or spec.loader is None:
        print(
            "polyattn demo: the demo comes with the source, not with the installed package; in a"
            " clone of the repository, run: make demo",
            file=sys.stderr,
        )
        return 1
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    code: int = demo.main(arguments)
    return code
