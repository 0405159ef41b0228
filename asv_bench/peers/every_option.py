"""Every option, and pairs of them, against the plain call and the textbook's formula.

A call is expected to take the time of the plain call, plus what its options add to the textbook's
formula in the same library. The rows with the largest ratio of time to expected time are printed.
Times are of the processor, on one thread, the least of the rounds; the libraries run one after
another in one process. The formula also checks the results.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ.update(dict.fromkeys(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"], "1"))
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false " + os.environ.get(
        "XLA_FLAGS", ""
    )

import numpy as np
import script
from formula import LOGSUMEXP, OPTIONS, Array, Option, arrays, textbook

import polyattn
from polyattn.bench import timing

LIBRARIES = ("numpy", "torch", "jax")
#: Query heads, rows and keys. Pairs are timed at the one of `PAIRED`.
SHAPES = {"1 on 8192": (8, 1, 8192), "1024": (4, 1024, 1024), "8192": (1, 8192, 8192)}
QUICK = {"1 on 8192": (4, 1, 64), "1024": (4, 32, 32)}
PAIRED = "1024"
WINDOW = 0.01  # seconds


# ---- the calls in a library --------------------------------------------------------------------


class Library(NamedTuple):
    """A library: its namespace, and how arrays, random numbers and calls are made there."""

    name: str
    xp: Any
    put: Callable[[np.ndarray], Array]
    random: Callable[[Any, tuple[int, ...]], Array]
    jit: Callable[..., Callable[..., Array]] | None = None


def library(name: str) -> Library:
    """Return a library."""
    if name == "numpy":
        import array_api_compat.numpy as xp

        rng = np.random.default_rng(0)
        return Library(name, xp, np.asarray, lambda x, n: rng.random(n, dtype=np.float32))
    if name == "torch":
        import array_api_compat.torch as xp
        import torch

        torch.set_num_threads(1)
        return Library(name, xp, torch.from_numpy, lambda x, n: torch.rand(n))
    import jax

    def random(x: Any, shape: tuple[int, ...]) -> Array:
        return jax.random.uniform(jax.random.key(x.lengths[0]), shape)

    return Library(name, jax.numpy, jax.numpy.asarray, random, jax.jit)


def call_of(
    lib: Library, given: dict[str, Array], options: tuple[Option, ...], *, formula: bool
) -> Callable[[], Array]:
    """Return a call of polyattn, or of the formula, with some options on some arrays."""
    for option in options:
        given = given | option.prepare(lib.xp, given)

    def collect(given: dict[str, Array]) -> Any:
        return SimpleNamespace(xp=lib.xp, random=lib.random, **given)

    def arguments(given: dict[str, Array]) -> dict[str, Any]:
        return {n: v for o in options for n, v in o.given(collect(given)).items()}

    def compute(given: dict[str, Array]) -> Array:
        if not formula:
            return attend(given, fixed or arguments(given))
        x = collect(given)
        x.low, x.zero = (lib.xp.asarray(n, dtype=lib.xp.float32) for n in (-math.inf, 0.0))
        return textbook(x, options)

    # Without `jit`, expressions are made once; under it, from the arrays that are traced.
    fixed = {} if lib.jit or formula else arguments(given)
    if lib.jit is None:
        return lambda: compute(given)
    made = lib.jit(compute)
    return lambda: made(given).block_until_ready()


def attend(given: dict[str, Array], arguments: dict[str, Any]) -> Array:
    """Call polyattn."""
    qkv = [given[n] for n in "qkv"]
    if LOGSUMEXP in arguments:
        rest = {n: value for n, value in arguments.items() if n != LOGSUMEXP}
        return polyattn.attention_partial(*qkv, **rest).output
    return polyattn.attention(*qkv, **arguments)


# ---- the sweep ---------------------------------------------------------------------------------


class Row(NamedTuple):
    """A call in seconds, and over the plain call, the formula and the expected time."""

    library: str
    size: str
    options: str
    seconds: float
    plain: float
    formula: float
    expected: float


PLAIN: tuple[Option, ...] = ()


def cases(size: str, paired: bool) -> list[tuple[Option, ...]]:
    """Return the options of each call at a size, the plain call first."""
    single = [(o,) for o in OPTIONS if not (o.small and size == "8192")]
    pairs = itertools.combinations([o for o in OPTIONS if o.pairs], 2) if paired else ()
    return [PLAIN, *single, *pairs]


def same(lib: Library, results: list[Array], near: float) -> bool:
    """Return whether two results agree; rows without keys, NaN in the formula, are left out."""
    one, other = (np.asarray(lib.xp.astype(a, lib.xp.float32)) for a in results)
    return bool(np.all(np.isnan(other) | (np.abs(one - other) <= near)))


def calls_of(
    lib: Library, shape: tuple[int, int, int], options: list[tuple[Option, ...]]
) -> Iterator[tuple[tuple[Option, ...], list[tuple[Callable[[], Array], float]]]]:
    """Yield the calls that are taken, polyattn's and the formula's, and their first time.

    They are checked against each other.
    """
    given = {n: lib.put(array) for n, array in arrays(*shape).items()}
    x = SimpleNamespace(xp=lib.xp, **given)
    for chosen in options:
        names = " + ".join(o.name for o in chosen)
        arguments = [n for o in chosen for n in o.given(x)]
        if len({*arguments}) < len(arguments):
            continue
        try:
            ours = call_of(lib, given, chosen, formula=False)
            result, own = script.timed(ours, time.process_time)
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            say(f"{lib.name}: {names} is left out: {str(error).splitlines()[0][:90]}")
            continue
        formula = call_of(lib, given, chosen, formula=True)
        expected, other = script.timed(formula, time.process_time)
        near = 2e-2 if "float16" in names else 2e-3
        if "dropout" not in names and not same(lib, [result, expected], near):
            raise AssertionError(f"{lib.name}: {names} differs from the formula")
        yield chosen, [(ours, own), (formula, other)]


def sweep(
    lib: Library, size: str, shape: Any, paired: bool, rounds: int, window: float
) -> Iterator[Row]:
    """Time the calls of a library at a size in turns."""
    calls: dict[Any, Callable[[], Array]] = {}
    expected: dict[Any, float] = {}
    for chosen, pair in calls_of(lib, shape, cases(size, paired)):
        for formula, (call, first) in enumerate(pair):
            calls[chosen, bool(formula)], expected[chosen, bool(formula)] = call, first
        say(f"{lib.name}, {size}: {len(calls) // 2} calls ready", passing=True)

    def measure(case: Any) -> float:
        return timing.window(calls[case], window, expected[case], time.process_time)

    turns = timing.rounds(calls, measure, rounds)
    for done in range(1, rounds + 1):
        times = next(turns)
        say(f"{lib.name}, {size}: {done} of {rounds} rounds of {len(calls) // 2} calls")
    seconds = {case: min(each) for case, each in times.items()}
    plain, bare = seconds[PLAIN, False], seconds[PLAIN, True]
    for chosen, formula in calls:
        if chosen and not formula:
            own, other = seconds[chosen, False], seconds[chosen, True]
            least = plain + max(0.0, other - bare)
            names = ", ".join(o.name for o in chosen)
            yield Row(lib.name, size, names, own, own / plain, own / other, own / least)


def say(text: str, *, passing: bool = False) -> None:
    """Print progress; what is `passing` only to a terminal, where the next line replaces it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="" if passing else "\n", file=sys.stderr, flush=True)
    elif not passing:
        print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Print the worst rows."""
    parser = script.parser(__doc__, 3, "quick", "json", threads=1, window=WINDOW)
    parser.add_argument(
        "--library", action="append", choices=LIBRARIES, help="(default: all that are installed)"
    )
    parser.add_argument("--size", action="append", choices=list(SHAPES), help="(default: all)")
    parser.add_argument("--alone", action="store_true", help="leave out the pairs")
    parser.add_argument("--worst", type=int, default=20, help="rows (default: %(default)s)")
    options = script.read(parser, arguments)
    shapes = QUICK if options.quick else SHAPES
    rows: list[Row] = []
    with polyattn.use_threads(1), np.errstate(all="ignore"):
        for name in options.library or LIBRARIES:
            try:
                lib = library(name)
            except ImportError:
                continue
            for size in options.size or shapes:
                paired = size == PAIRED and not (options.quick or options.alone)
                rows += sweep(lib, size, shapes[size], paired, options.rounds, options.window)
    print(f"{script.machine(1)}; processor time, {options.rounds} rounds, {len(rows)} calls")
    if options.json:
        script.write_json(options.json, [row._asdict() for row in rows])
    print(table(rows, options.worst))
    return 0


def table(rows: list[Row], worst: int) -> str:
    """Return the rows with the largest ratios to the expected time, as a table of Markdown."""
    lines = ["| library | size | options | ms | over plain | over formula | over expected |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: -row.expected)[:worst]:
        lines.append(
            f"| {row.library} | {row.size} | `{row.options}` | {row.seconds * 1e3:.3g} |"
            f" {row.plain:.2f} | {row.formula:.2f} | **{row.expected:.2f}** |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
