"""One planted mistake at a time: each must be found.

``python tests/mutations.py`` plants the mistakes of ``mutations.toml`` in copies of the package. It
exits with 1 if one is not found or does not run, with 2 if one no longer fits the code: a text is
not there once, the code with it does not compile, or a name that it reads is not in its module. It
first tries what found the mistake last time, and all cases only if that passes now. What finds the
mistake then goes into the table. Each mistake has a process of its own, forked from one that has
imported the libraries but not the package. Without a compiler, those in the compiled kernel are
left out.
"""

import argparse
import builtins
import dis
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import tomllib
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import redirect_stdout
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import kernel_calls

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("mutations.toml")
CONTEXT = multiprocessing.get_context("forkserver")
#: Those that take long to import; one that starts threads must not be forked.
LIBRARIES = (
    *("dask.array", "jax.numpy", "ml_dtypes", "mpmath", "pytest", "torch._dynamo", "transformers"),
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
PYTEST = ("-q", "-p", "no:cacheprovider")


class Mutation(NamedTuple):
    """A mistake: what must find it, its name, the file, and pairs of a text and its replacement."""

    kind: str
    name: str
    file: str
    changes: list[list[str]]
    found_by: str = ""


def read_table():
    """Return the planted mistakes."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return [Mutation(kind, **row) for kind, rows in table.items() for row in rows]


def write_found(found):
    """Write into the table what finds each mistake now."""
    text = TABLE.read_text(encoding="utf-8")
    for name, finder in found.items():
        row = rf"^(name = {re.escape(json.dumps(name, ensure_ascii=False))}\n)(found_by = .*\n)?"
        line = f"found_by = {json.dumps(finder, ensure_ascii=False)}\n"
        text = re.sub(row, lambda match, line=line: match[1] + line, text, flags=re.MULTILINE)
    TABLE.write_text(text, encoding="utf-8")


def copy_to(folder):
    """Copy the package into a folder, with what Python has compiled."""
    for package in ("polyattn", "backends"):
        shutil.copytree(ROOT / package, folder / package)
    return folder


def with_mistake(mutation):
    """Return the text of the file with the mistake in it."""
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    for old, new in mutation.changes:
        if text.count(old) != 1:
            raise ValueError(f"{mutation.file} has {text.count(old)} of {old!r}")
        text = text.replace(old, new)
    # A name that does not exist would fail any case, and show nothing.
    if mutation.kind != "native" and (unknown := unknown_names(text)):
        raise ValueError(f"{mutation.file} has no {', '.join(sorted(unknown))}")
    return text


def unknown_names(text):
    """Return the names that a module reads and that neither it nor Python has."""
    known, read = {*dir(builtins), "__annotations__", "__file__", "__name__"}, set()
    codes = [compile(text, "mistake", "exec")]
    for code in codes:
        codes += [part for part in code.co_consts if hasattr(part, "co_code")]
        steps = [(step.opname, step.argval) for step in dis.get_instructions(code)]
        stored = {name for kind, name in steps if kind == "STORE_NAME"}
        if code is codes[0]:
            known |= stored
        known |= {name for kind, name in steps if kind == "STORE_GLOBAL"}
        # What a class stores, its own body reads and its methods do not.
        read |= {name for kind, name in steps if kind == "LOAD_NAME" and name not in stored}
        read |= {name for kind, name in steps if kind == "LOAD_GLOBAL"}
    return read - known


def outdated(mutations):
    """Yield each mistake that does not fit the code as it is now, and what is wrong with it."""
    for mutation in mutations:
        try:
            with_mistake(mutation)
        except (OSError, SyntaxError, ValueError) as error:
            yield mutation.name, error


def finder_of(mutation, copies):
    """Return what finds the mistake in a copy: a test or a random call, or None."""
    folder = copies.get()
    try:
        (folder / mutation.file).write_text(with_mistake(mutation), encoding="utf-8")
        if mutation.kind == "native":
            return kernel_calls.wrong_call(folder, mutation.found_by)
        with ProcessPoolExecutor(1, CONTEXT) as pool:
            return pool.submit(run_in, folder, mutation).result()
    finally:
        shutil.copy2(ROOT / mutation.file, folder / mutation.file)
        copies.put(folder)


def run_in(folder, mutation):
    """Return what finds the mistake in this process, with the package in a folder."""
    signal.alarm(1200)
    os.chdir(folder)
    backends = folder / "backends"
    paths = [str(folder), str(backends), str(backends / "polyattn_native")]
    sys.path[:0] = paths
    # What is installed to be edited has a finder that comes before the path.
    sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in type(one).__module__]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    import polyattn

    if folder not in Path(polyattn.__file__).parents:
        raise RuntimeError(f"{polyattn.__file__} is not the copy with the mistake")
    if mutation.kind == "test":
        return run_test(mutation)
    from mutation_search import failing_case

    # NumPy's plugin has kernels of its own, and what all plugins share serves those too.
    backends = ["numpy"] if "numpy" in mutation.file else ["array-api", "numpy"]
    return failing_case(backends, mutation.found_by, mutation.kind == "gradients")


def run_test(mutation):
    """Return the test of a mistake if it fails, or None."""
    import pytest

    options = [*PYTEST, "-x", "-m", "slow or not slow"]
    with redirect_stdout(io.StringIO()) as output:
        code = pytest.main([*options, str(ROOT / mutation.found_by)])
    if code not in (0, 1):
        raise RuntimeError(f"{mutation.name}: the test did not run\n{output.getvalue()}")
    return mutation.found_by if code else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "words", nargs="*", help="only the mistakes with one of these in their name"
    )
    parser.add_argument("--check", action="store_true", help="only say which do not fit the code")
    options = parser.parse_args()
    warnings.simplefilter("error", SyntaxWarning)  # of a mistake that would fail any case
    words = options.words or [""]
    chosen = [m for m in read_table() if any(word in m.name for word in words)]
    wrong = dict(outdated(chosen))
    for name, error in wrong.items():
        print(f"{name}: {error}")
    if options.check:
        return 2 if wrong else 0
    chosen = [m for m in chosen if m.name not in wrong]
    if not kernel_calls.is_possible():
        print("without the mistakes in the compiled kernel: no compiler for them")
        chosen = [m for m in chosen if kernel_calls.NATIVE not in m.file]
    found = {}
    os.environ.update(ENVIRONMENT)
    CONTEXT.set_forkserver_preload([*LIBRARIES])
    copies, workers = SimpleQueue(), os.cpu_count()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        for number in range(workers):
            copies.put(copy_to(Path(folder, str(number))))
        runs = {pool.submit(finder_of, mutation, copies): mutation.name for mutation in chosen}
        for number, run in enumerate(as_completed(runs), start=1):
            name, error = runs[run], run.exception()
            finder = None if error else run.result()
            if finder:
                found[name] = finder
            what = f"DID NOT RUN: {error!r}" if error else finder or "NOT FOUND"
            print(f"[{number}/{len(chosen)}] {name}: {what}", flush=True)
    print(f"{len(found)} of {len(chosen)} mistakes are found")
    write_found(found)
    return 2 if wrong else 1 if len(found) < len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
