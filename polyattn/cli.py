"""Implement the command line: ``polyattn backends | explain | check | bench | export | run``.

Results go to standard output as plain text, as wide as the terminal; errors and progress go to
standard error. A stream that is closed counts as the null device.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import polyattn
from polyattn._base.files import check_file
from polyattn._base.streams import complain, open_streams, progress, reason, settle, show
from polyattn._dispatch import listing, registry
from polyattn._dispatch.errors import BackendError, UnknownBackendError
from polyattn._dispatch.request import parse
from polyattn.bench import command
from polyattn.run import command as run

EXIT_CODES = (
    "Exit codes: 0 for success; 1 if a check failed, no kernel can compute the call, or something"
    " could not be measured or written; 2 for a wrong argument or a missing package; 130 if"
    " interrupted."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    open_streams()
    arguments = sys.argv[1:] if argv is None else list(argv)
    name = " ".join(["polyattn", *arguments[:1]])
    try:
        try:
            return _run(arguments)
        finally:  # that of --help too, which ends by SystemExit
            sys.stdout.flush()
    except KeyboardInterrupt:
        complain(f"{name}: interrupted")
        return 130
    except (BackendError, ImportError, TypeError, ValueError) as error:
        complain(f"{name}: {error}")
        return 2
    except OSError as error:
        about = ": ".join(filter(None, (error.filename, reason(error))))
        if not isinstance(error, BrokenPipeError):  # the reader, such as head, has stopped
            complain(f"{name}: {about}")
        return 1
    finally:
        settle()


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["run"]:  # whose other arguments may be a program's
        return run.main(arguments[1:])
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # reported by the subcommand's parser, with its usage
        getattr(options, "parser", parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command is None:
        parser.print_help()
        return 2
    code: int = options.run(options)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="polyattn",
        description="Attention for every array library: list the backends, explain which kernel"
        " runs, check and time the kernels, export calls, and run programs that are for GPUs.",
        epilog=f"{EXIT_CODES} POLYATTN_BACKEND, such as torch:cuda,numpy, sets the backend of every"
        " call.",
    )
    parser.add_argument("--version", action="version", version=f"polyattn {polyattn.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    add = _add_command(
        commands,
        "backends",
        _backends,
        help="the backends, their devices, and the commands that install missing ones",
        description="List every backend: its library, devices and kernels, or what is missing and"
        " the command that installs it. Loads the installed libraries.",
    )
    add("--json", action="store_true", help="print JSON instead of a table")
    _add_explain(commands)
    _add_check(commands)
    add = _add_command(
        commands,
        "bench",
        command.run,
        help="how fast the backends are, side by side, and what the hardware can do",
        description="Time the same call on several backends, in turns, at growing lengths, and"
        " print a table: the median time of a call with its quartiles, its rate, the time over that"
        " of the first backend, and the share of the hardware's peak rate.",
        epilog="example: polyattn bench --backends numpy,torch,jax --lengths 256:8192 --causal",
    )
    command.add_options(add, _window)
    _add_export(commands)
    about = "a program that imports flash_attn or xformers, unedited, on any device"
    run.add_options(_add_command(commands, "run", run.main, help=about, **run.TEXTS))
    return parser


def _add_command(commands: Any, name: str, run: Any, **texts: str) -> Any:
    """Add a subcommand and return the function that adds its arguments."""
    parser = commands.add_parser(name, **texts)
    parser.set_defaults(run=run, parser=parser)
    return parser.add_argument


def _add_explain(commands: Any) -> None:
    add = _add_command(
        commands,
        "explain",
        _explain,
        help="which kernel would run for given shapes, and why no other",
        description="Show which kernel attention would run for arrays of these shapes, and why each"
        " other one would not. Nothing is computed. In the table, next marks the kernel that would"
        " run if those above could not, on request one that runs only if --kernel names it, and not"
        " allowed one of another distribution.",
        epilog="example: polyattn explain --shape 2,8,1024,64 --key-shape 2,2,1024,64 --causal"
        " --library torch",
    )
    _add_arrays(add, _shape)
    add("--library", help="library of the arrays (default: numpy, and dask with --chunks)")
    add(
        "--chunks",
        type=_shape,
        metavar="N",
        help="length of the chunks of dask arrays: of the tokens, or one for each axis",
    )
    add("--device", metavar="NAME", help="device of the arrays (default: the library's default)")
    _add_numbers(add)
    add("--mask-shape", type=_shape, metavar="SHAPE", help="a bool mask of this shape")
    add("--bias-shape", type=_shape, metavar="SHAPE", help="a bias of this shape")
    add("--sinks", action="store_true", help="one sink per query head")
    add("--dropout", type=float, metavar="RATE", help="dropout=(RATE, 0)")
    add("--logsumexp", action="store_true", help="with the logsumexp, as for attention_partial")
    add("--gradients", action="store_true", help="of the gradients, as for attention_backward")
    add("--backend", metavar="NAMES", help="such as torch:cuda,numpy")
    add("--kernel", metavar="NAMES", help="such as flex,auto: the first that can run")
    add("--json", action="store_true", help="print JSON instead of a table")


def _add_arrays(add: Any, shape: Callable[[str], tuple[int | str, ...]]) -> None:
    """Add the options that describe query, key and value."""
    add("--shape", type=shape, required=True, help="shape of the query, ...,H,L,D")
    add("--key-shape", type=shape, metavar="SHAPE", help="...,G,S,D (default: the query's)")
    add("--value-shape", type=shape, metavar="SHAPE", help="...,G,S,E (default: the key's)")
    add("--dtype", default="float32", help="of query, key and value (default: %(default)s)")


def _add_numbers(add: Any) -> None:
    """Add the options of a call, but for arrays."""
    add("--causal", action="store_true", help="is_causal=True")
    add("--window", type=_window, metavar="LEFT,RIGHT", help="such as 255,0 or none,0")
    add("--query-offset", type=int, metavar="N", help="position of the first query")
    add("--scale", type=float, metavar="X", help="in place of 1/sqrt(D)")
    add("--softcap", type=float, metavar="X", help="bound of the scores")
    add("--layout", default="...HLD", help='"...HLD" or "...LHD" (default: %(default)s)')


def _add_export(commands: Any) -> None:
    add = _add_command(
        commands,
        "export",
        _export,
        help="a call of attention as a model of ONNX",
        description="Write a call of attention as a model of ONNX, checked, and say what it became."
        " A name in place of a length leaves it to the one who runs the model. Needs"
        ' pip install "polyattn[onnx]".',
        epilog="example: polyattn export attention.onnx --shape B,8,L,64 --key-shape B,2,S,64"
        " --causal",
    )
    add("file", type=Path, metavar="FILE", help="the model, such as attention.onnx")
    _add_arrays(add, _lengths)
    _add_numbers(add)
    add("--opset", type=int, default=24, help="the newest that may be used (default: %(default)s)")


def _add_check(commands: Any) -> None:
    add = _add_command(
        commands,
        "check",
        _check,
        help="whether the kernels of a backend agree with the definition of attention",
        description="Compare every kernel of the backends with the definition of attention, case by"
        " case, and print a table: a row for each feature, dtype and corner case, a column for each"
        " kernel, the largest error in units of eps times the condition, or the reason for a"
        ' refusal. Needs pip install "polyattn[testing]".',
        epilog="example: polyattn check torch --kernel sdpa --quick",
    )
    add("backends", nargs="*", metavar="BACKEND", help="default: all installed ones")
    add(
        "--library",
        metavar="MODULE",
        help="library of the arrays, such as jax.numpy; for --callable also torch:cuda",
    )
    add(
        "--callable",
        metavar="MODULE:FUNCTION",
        help="instead of a backend, any function with the signature of torch's"
        " scaled_dot_product_attention or of a dialect, or with our argument names",
    )
    add(
        "--subject",
        metavar="NAMES",
        help="instead of a backend, attention functions of other libraries, such as"
        " torch.sdpa,jax.nn, each in a process of its own; a wrong name lists them",
    )
    add("--kernel", action="append", default=[], metavar="NAMES", help="only these")
    add(
        *("--quick", "--essential"),
        action="store_true",
        help="the essential cases: one for each feature and corner case",
    )
    add("--case", action="append", metavar="NAME", help="only this case of --list; may be repeated")
    counts = "with --callable: instead, count the rows that have other bits decoded, cut or packed"
    add("--same-bits", action="store_true", help=counts)
    add("--list", action="store_true", help="print the cases and which kernels run them; run none")
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--repro", type=Path, metavar="FILE", help="also write a failing case as a script")
    add("--write-cases", type=Path, metavar="DIR", help="instead, write cases with exact results")


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(length) for length in text.split(","))
    except ValueError:
        shape = (-1,)
    if min(shape) < 0:
        raise argparse.ArgumentTypeError(f"a shape is written 2,8,128,64; got {text!r}")
    return shape


def _lengths(text: str) -> tuple[int | str, ...]:
    return tuple(int(length) if length.isdecimal() else length for length in text.split(","))


def _window(text: str) -> tuple[int | None, ...]:
    try:
        return tuple(None if end == "none" else int(end) for end in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a window is written 255,0 or none,0; got {text!r}"
        ) from None


def _backends(options: argparse.Namespace) -> int:
    for name in progress(registry.names(), unit="backend"):
        registry.load(name)
    for message in listing.unknown_variables():
        complain(f"polyattn backends: {message}")
    table = polyattn.list_backends()
    show(json.dumps(table.as_dicts(), indent=2) if options.json else table)
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
        **_numbers(options),
        sinks=(heads,) if options.sinks else None,
        dropout=None if options.dropout is None else (options.dropout, 0),
        backend=options.backend,
        kernel=options.kernel,
        logsumexp=options.logsumexp,
        gradients=options.gradients,
        library=options.library or ("dask" if options.chunks else "numpy"),
        device=options.device,
        dtype=options.dtype,
        chunks=options.chunks and (options.chunks if options.chunks[1:] else options.chunks[0]),
    )
    show(json.dumps(explanation.as_dict(), indent=2) if options.json else explanation)
    return 0 if explanation.chosen else 1


def _numbers(options: argparse.Namespace) -> dict[str, Any]:
    names = ("window", "query_offset", "scale", "softcap", "layout")
    return {"is_causal": options.causal} | {name: getattr(options, name) for name in names}


def _export(options: argparse.Namespace) -> int:
    """Return 0 if the model is written."""
    from polyattn.export import onnx

    key = options.key_shape or options.shape
    inputs = {"query": options.shape, "key": key, "value": options.value_shape or key}
    numbers = _numbers(options)
    against: list[str] = []

    def attention(**arrays: Any) -> Any:
        explanation = polyattn.explain(**arrays, **numbers)
        against.extend(r for one in explanation.candidates[:1] for r in one.reasons)
        return polyattn.attention(**arrays, **numbers)

    model = onnx(attention, inputs, opset=options.opset, dtype=options.dtype, file=options.file)
    kinds = [node.op_type for node in model.graph.node]
    nodes = f"{len(kinds)} node{'s' * (len(kinds) != 1)}"
    native = f"none is Attention: {'; '.join(against)}" if against else "one is Attention"
    show(f"{options.file}: opset {model.opset_import[0].version}, {nodes}, {native}")
    return 0


def _check(options: argparse.Namespace) -> int:
    """Return 0 if all results agree, 1 if one does not, 130 if interrupted."""
    from polyattn.conformance import CASES, ESSENTIAL, Case, Target, selection, written
    from polyattn.conformance.checks.frames import print_fatal_errors
    from polyattn.conformance.functions import command as functions
    from polyattn.conformance.functions import repro
    from polyattn.conformance.report import files, run

    if options.kernel:
        options.kernel = parse(options.kernel, "--kernel ")
    if options.repro is not None:
        check_file("--repro", options.repro)
    if options.write_cases is not None:
        if options.backends or options.callable or options.subject:
            raise ValueError("--write-cases checks nothing; leave out the backend and --callable")
        others = (options.same_bits, options.list, options.kernel, options.library, options.case)
        if options.repro or any(others):
            raise ValueError("--write-cases writes one set of cases; leave out the other options")
        show(written.write(options.write_cases, progress(written.cases_to_write(), unit="case")))
        return 0
    if options.same_bits and (options.repro or options.case or not options.callable):
        raise ValueError("--same-bits prints counts of --callable: give a function only")
    if options.list and (options.callable or options.subject or options.json or options.repro):
        raise ValueError(
            "--list prints a table of kernels; leave out --callable, --subject, --json and --repro"
        )
    cases = selection.named(options.case) if options.case else ESSENTIAL if options.quick else CASES
    print_fatal_errors()
    if options.callable is not None or options.subject is not None:
        return functions.check(options, list(cases.values()))
    if options.backends:
        try:
            names = ",".join(options.backends).split(",")
            targets = [Target(name, options.library) for name in names]
        except UnknownBackendError as error:
            raise ValueError(f"{error}; for a function write --callable module:function") from None
    else:
        targets = run.default_targets(options.library)
    if options.list:
        show("\n".join(selection.lines(targets, cases, options.kernel)))
        return 0
    steps = run.steps(targets, cases, options.kernel)
    only = [x for x in steps if not options.case or isinstance(x.what, Case)]
    with warnings.catch_warnings():  # about NaN and infinity, in dask's threads
        warnings.filterwarnings("ignore", "", RuntimeWarning, r"dask\.")
        report = run.run(only, run.described)
    make_script = partial(repro.of_report, report) if report.failed else None
    text = files.as_json(report.as_dict()) if options.json else report
    files.give(text, options.repro, make_script)
    if report.done < report.total:
        complain(f"polyattn check: interrupted after {report.done} of {report.total}")
        return 130
    return 1 if report.failed else 0
