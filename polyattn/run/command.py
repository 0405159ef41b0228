"""Run a program for GPUs on this machine: ``polyattn run``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from polyattn.run.stand_ins import BY_DEFAULT, PACKAGES, TUPLES, VARIABLE, is_real, names_of

#: The first words of what Python runs, beside files.
_PYTHON = ("-m", "-c", "-")
_SITE = str(Path(__file__).resolve().parent / "site")
#: What the parser says beside its arguments.
TEXTS: dict[str, Any] = {
    "usage": "polyattn run [--as NAMES] [--replace] PROGRAM [ARGUMENT ...]\n"
    "       polyattn run [--as NAMES] [--replace] -m MODULE | -c CODE | - [ARGUMENT ...]\n"
    "       polyattn run [--as NAMES] --check FILE [FILE ...]\n"
    "       polyattn run [--as NAMES] [--replace] --environment",
    "description": "Run a Python program, a module, or a command such as torchrun, unedited, on any"
    " device: imports of flash_attn and xformers find polyattn's modules, in it and in its child"
    " processes. Packages that are installed are used as they are.",
    "epilog": "examples: polyattn run train.py --epochs 1; polyattn run torchrun --nproc-per-node 2"
    f" train.py; polyattn run --check model.py. {VARIABLE} in the environment has the names if --as"
    " is not given. The exit code is the program's; 2 for a wrong argument; 1 if --check found"
    " something.",
    "allow_abbrev": False,  # what follows the program is its own
}


def main(arguments: list[str]) -> int:
    """Run a program, or check files, and return the exit code."""
    stop = 0
    while arguments[stop:] and arguments[stop].startswith("-") and arguments[stop] not in _PYTHON:
        stop += 1 + (arguments[stop] == "--as")
    parser = argparse.ArgumentParser(prog="polyattn run", **TEXTS)
    add_options(parser.add_argument)
    # argparse would read options of the program, and gets no word of it.
    options, unknown = parser.parse_known_args(arguments[:stop])
    if unknown:
        parser.error(
            f"unrecognized arguments: {' '.join(unknown)}; options of Python follow its name, as in"
            " polyattn run python -u train.py"
        )
    return _run(options, arguments[stop:], parser)


def add_options(add: Any) -> None:
    """Add the arguments of the command."""
    add("program", nargs="?", metavar="PROGRAM", help="a file or a command, before its arguments")
    add("-m", action="store_true", help="run a module, as python -m does")
    add(
        "--as",
        dest="names",
        metavar="NAMES",
        help=f"the packages, such as {','.join(PACKAGES)}; by default {','.join(BY_DEFAULT)}, if"
        f" they are not installed; functions of flash_attn_interface{TUPLES} return (output,"
        " logsumexp), as until August 2025",
    )
    add("--replace", action="store_true", help="stand in for packages that are installed, too")
    add(
        "--check",
        action="store_true",
        help="run nothing; list the imports and calls of files that would fail",
    )
    add(
        "--environment",
        action="store_true",
        help="run nothing; print the variables with which the programs of a service do the same",
    )


def _run(options: argparse.Namespace, program: list[str], parser: argparse.ArgumentParser) -> int:
    """Run what the options say, in place of this process."""
    asked = os.environ.get(VARIABLE) if options.names is None else options.names
    try:
        names = names_of(
            asked or ",".join(BY_DEFAULT), VARIABLE if options.names is None else "--as"
        )
    except ValueError as error:
        parser.error(str(error))
    if options.check and program:
        from polyattn.run.check import check

        return check(program, names)
    command = [] if options.environment else _command(program, parser)
    # What the program will have first in place of the folder of this command.
    is_script = command[:1] == [sys.executable] and program[0] not in _PYTHON
    sys.path[0] = str(Path(program[0]).resolve().parent) if is_script else ""
    real = [] if options.replace else [name for name in names if is_real(name.partition(":")[0])]
    if real and asked:
        parser.error(
            f"{' and '.join(real)}: installed already; leave it out of --as, or add --replace to"
            " run the program without it"
        )
    names = [name for name in names if name not in real]
    changes = _changes(names)
    if options.environment:
        print("\n".join("=".join(change) for change in changes.items()))
        return 0
    _say(names, real)
    environment = os.environ | changes
    if sys.platform == "win32":  # where exec does not wait
        from subprocess import call

        return call(command, env=environment)
    try:
        os.execve(command[0], command, environment)
    except OSError as error:  # no binary, and no line that says what runs it
        parser.error(f"{command[0]}: {error.strerror}; name what runs it, such as python or bash")


def _command(program: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return a command for what Python runs, or for what is a command itself."""
    if program in ([], ["-m"], ["-c"]) or not program[0]:
        parser.error("name a program, or the files of --check, such as train.py")
    file = Path(program[0])
    is_python = file.is_dir() or file.suffix in (".py", ".pyw", ".pyc", ".pyz", ".zip")
    found = None
    if program[0] not in _PYTHON and not (
        file.exists() and (is_python or not os.access(file, os.X_OK))
    ):
        from shutil import which

        # Those of this environment first, also where it is not activated.
        folders = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        found = which(program[0], path=os.pathsep.join(folders))
        if not (found or file.exists()):
            parser.error(f"{program[0]}: no such file in this folder, and no such command")
    return [found, *program[1:]] if found else [sys.executable, *program]


def _changes(names: list[str]) -> dict[str, str]:
    """Return the variables by which a Python and its child processes start with these modules."""
    given = os.environ.get("PYTHONPATH")
    folders = [one for one in given.split(os.pathsep) if one != _SITE] if given else []
    path = os.pathsep.join([_SITE, *folders])
    return {VARIABLE: ",".join(names), "PYTHONPATH": path} if names else {}


def _say(names: list[str], real: list[str]) -> None:
    """Say once, on standard error, what stands in for what."""
    said = [f"{name} {PACKAGES[name.partition(':')[0]][1]}" for name in names]
    if said:
        print(f"polyattn run: polyattn stands in for {' and '.join(said)}", file=sys.stderr)
    if real:
        rest = f"{' and '.join(real)}: installed, used as it is; --replace changes that"
        print(f"polyattn run: {rest}", file=sys.stderr)
    sys.stderr.flush()
