"""One planted mistake at a time: each must fail a case of the conformance suite.

The mistakes in the code of outputs are in ``formula_mutations.py``. Those in the code of gradients
are in ``gradient_mutations.py``, and must fail a case of the suite's gradients or directional
derivatives. Those that the suite cannot see are in ``other_mutations.py``, each with the test that
must fail. Those in the compiled kernel are in ``native_mutations.py``, and random calls in C++ must
find them; without a compiler they are left out.

``python tests/mutations.py`` plants them in copies of the package, and exits with 1 if one is not
found or does not run, with 2 if one no longer fits the code: a text is not there once, the code
with it does not compile, or a name that it reads is not in its module. It first runs the case that
found the mistake last time, as ``mutations_found.json`` says, and all cases only if that one passes
now. What finds the mistake then goes into the file. Each mistake has a process of its own, forked
from one that has imported the libraries but not the package.
"""

import argparse
import builtins
import dis
import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import redirect_stdout
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import formula_mutations
import gradient_mutations
import native_mutations
import other_mutations

ROOT = Path(__file__).resolve().parents[1]
FOUND = Path(__file__).with_name("mutations_found.json")
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


class Mutation(NamedTuple):
    """A mistake: what it is, the file, and each text to replace with what replaces it."""

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    in_gradients: bool = False
    test: str = ""  # the test that finds it, in place of a case
    in_native: bool = False


def rows(mutations, **more):
    """Return the mistakes that rows describe: a name, a file, texts and replacements by turns."""
    return [
        Mutation(name, file, tuple(zip(texts[::2], texts[1::2], strict=True)), **more)
        for name, file, *texts in mutations
    ]


MUTATIONS = (
    *rows(formula_mutations.MUTATIONS),
    *rows(gradient_mutations.MUTATIONS, in_gradients=True),
    *rows(native_mutations.in_source(), in_native=True),
    *(one for test, *row in other_mutations.MUTATIONS for one in rows([row], test=test)),
)


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
    if not mutation.in_native and (unknown := unknown_names(text)):
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
            yield mutation, error


def found_by(mutation, hint, copies):
    """Return the name of a case or test that finds the mistake in a copy, or None if all pass."""
    folder = copies.get()
    try:
        (folder / mutation.file).write_text(with_mistake(mutation), encoding="utf-8")
        if mutation.in_native:
            return native_mutations.wrong_call(folder, ROOT, hint)
        with ProcessPoolExecutor(1, CONTEXT) as pool:
            return pool.submit(run_in, folder, mutation, hint).result()
    finally:
        shutil.copy2(ROOT / mutation.file, folder / mutation.file)
        copies.put(folder)


def run_in(folder, mutation, hint):
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
    return run_test(mutation) if mutation.test else run_cases(mutation, hint)


def run_cases(mutation, hint):
    """Return the first case that fails, or None."""
    from mutation_search import search

    # NumPy's plugin has kernels of its own, and what all plugins share serves those too.
    backends = ["numpy"] if "numpy" in mutation.file else ["array-api", "numpy"]
    return search(backends, hint, mutation.in_gradients)


def run_test(mutation):
    """Return the test of a mistake if it fails, or None."""
    import pytest

    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    with redirect_stdout(io.StringIO()) as output:
        code = pytest.main([*options, str(ROOT / mutation.test)])
    if code not in (0, 1):
        raise RuntimeError(f"{mutation.name}: the test did not run\n{output.getvalue()}")
    return mutation.test if code else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "words", nargs="*", help="only the mistakes with one of these in their name"
    )
    parser.add_argument("--check", action="store_true", help="only say which do not fit the code")
    options = parser.parse_args()
    warnings.simplefilter("error", SyntaxWarning)  # of a mistake that would fail any case
    chosen = [m for m in MUTATIONS if not options.words or any(w in m.name for w in options.words)]
    wrong = dict(outdated(chosen))
    for mutation, error in wrong.items():
        print(f"{mutation.name}: {error}")
    if options.check:
        return 2 if wrong else 0
    chosen = [m for m in chosen if m not in wrong]
    if not native_mutations.is_possible():
        print("without the mistakes in the compiled kernel: no compiler for them")
        chosen = [m for m in chosen if native_mutations.NATIVE not in m.file]
    hints = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {}
    found = {}
    os.environ.update(ENVIRONMENT)
    CONTEXT.set_forkserver_preload([*LIBRARIES])
    copies, workers = SimpleQueue(), os.cpu_count()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        for number in range(workers):
            copies.put(copy_to(Path(folder, str(number))))
        runs = {pool.submit(found_by, m, hints.get(m.name, ""), copies): m.name for m in chosen}
        for number, run in enumerate(as_completed(runs), start=1):
            name, error = runs[run], run.exception()
            found[name] = None if error else run.result()
            what = f"DID NOT RUN: {error!r}" if error else found[name] or "NOT FOUND"
            print(f"[{number}/{len(chosen)}] {name}: {what}", flush=True)
    escaped = sum(case is None for case in found.values())
    print(f"{len(chosen) - escaped} of {len(chosen)} mistakes are found")
    known = hints | {name: case for name, case in found.items() if case}
    ordered = {m.name: known[m.name] for m in MUTATIONS if m.name in known and not m.test}
    if ordered != hints:
        FOUND.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    return 2 if wrong else 1 if escaped else 0


if __name__ == "__main__":
    sys.exit(main())
