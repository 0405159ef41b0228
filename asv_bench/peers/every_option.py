"""Every option, and pairs of them, against the plain call and the textbook's formula.

A call is expected to take the time of the plain call, plus what its options add to the textbook's
formula in the same library. The rows with the largest ratio of time to expected time are printed.
Times are of the processor, on one thread, the least of the rounds; the libraries run one after
another in one process. The formula also checks the results.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ.update(dict.fromkeys(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"], "1"))
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false " + os.environ.get(
        "XLA_FLAGS", ""
    )

import numpy as np
import script

import polyattn
from polyattn import masks, scores
from polyattn.bench import timing

Array = Any
LIBRARIES = ("numpy", "torch", "jax")
SIZE = 64
#: Query heads, rows and keys. Pairs are timed at the one of `PAIRED`.
SHAPES = {"1 on 8192": (8, 1, 8192), "1024": (4, 1024, 1024), "8192": (1, 8192, 8192)}
QUICK = {"1 on 8192": (4, 1, 64), "1024": (4, 32, 32)}
PAIRED = "1024"
WINDOW = 0.01  # seconds
LOGSUMEXP = "logsumexp"  # in place of an argument: `attention_partial`


class Option(NamedTuple):
    """An option of the call, and the same in the textbook's formula.

    Attributes
    ----------
    name : str
        Its text in the table.
    given : function
        Returns the arguments, from the arrays of a call.
    textbook : function
        Returns what the formula's `step` does with it, from the arrays and, in the later steps, the
        scores.
    step : {"inputs", "similarity", "scores", "mask", "softmax", "weights"}
        The step.
    prepare : function
        Returns query, key and value that replace others before the call.
    pairs : bool
        Whether it is timed in pairs: one of each kind.
    small : bool
        Whether the formula is too slow for the largest size.
    """

    name: str
    given: Callable[[Any], dict[str, Any]]
    textbook: Callable[..., Any]
    step: str = "scores"
    pairs: bool = True
    small: bool = False
    prepare: Callable[[Any, dict[str, Array]], dict[str, Array]] = lambda xp, given: {}


def arrays(heads: int, length: int, keys: int) -> dict[str, np.ndarray]:
    """Return the arrays that some call reads, by name."""
    rng = np.random.default_rng(0)
    rows, columns = np.arange(keys - length, keys)[:, None], np.arange(keys)
    return {
        "i": rows,
        "j": columns,
        "q": rng.standard_normal((1, heads, length, SIZE), dtype=np.float32),
        "k": rng.standard_normal((1, heads, keys, SIZE), dtype=np.float32),
        "v": rng.standard_normal((1, heads, keys, SIZE), dtype=np.float32),
        "allowed": np.logical_or(rng.random((length, keys)) > 0.5, np.arange(keys) == 0),
        "bias": rng.standard_normal((length, keys), dtype=np.float32),
        "key_bias": rng.standard_normal(keys, dtype=np.float32),
        "lengths": np.asarray([keys * 3 // 4]),
        "offset": np.asarray([keys - length]),
        "ids": np.arange(keys) // max(1, keys // 8),
        "sinks": rng.standard_normal(heads, dtype=np.float32),
        "table": rng.standard_normal((32, heads), dtype=np.float32),
        "vector": rng.standard_normal(SIZE, dtype=np.float32) / 8,
    }


def textbook(x: Any, options: Iterable[Option]) -> Array:
    """Compute softmax(query·keyᵀ/√D)·value with what some options change."""
    steps: dict[str, list[Any]] = {}
    for option in options:
        steps.setdefault(option.step, []).append(option.textbook)
    for change in steps.get("inputs", []):
        x = change(x)
    s = steps.get("similarity", [lambda x: dot(x) / math.sqrt(SIZE)])[0](x)
    x.seen = [seen(x) for seen in steps.get("mask", [])]
    for change in steps.get("scores", []):
        s = change(x, s)
    for seen in x.seen:
        s = x.xp.where(seen, s, x.low)
    w = steps.get("softmax", [softmax])[0](x, s)
    for change in steps.get("weights", []):
        w = change(x, w)
    return w @ x.v


def dot(x: Any) -> Array:
    """Return query·keyᵀ."""
    return x.q @ x.xp.matrix_transpose(x.k)


def softmax(x: Any, s: Array, sinks: Array | None = None) -> Array:
    """Return the weights of scores."""
    most = x.xp.max(s, axis=-1, keepdims=True)
    w = x.xp.exp(s - most)
    total = x.xp.sum(w, axis=-1, keepdims=True)
    return w / (total if sinks is None else total + x.xp.exp(sinks[:, None, None] - most))


def sparsemax(x: Any, s: Array) -> Array:
    """Return the projection of scores onto the simplex."""
    z = x.xp.sort(s, axis=-1, descending=True)
    z = x.xp.where(z == x.low, x.low, z)
    count = x.xp.arange(1, s.shape[-1] + 1, dtype=s.dtype)
    sums = x.xp.cumulative_sum(x.xp.where(z == x.low, x.zero, z), axis=-1)
    inside = 1 + count * z > sums
    size = x.xp.sum(x.xp.astype(inside, s.dtype), axis=-1, keepdims=True)
    total = x.xp.sum(x.xp.where(inside, z, x.zero), axis=-1, keepdims=True)
    return x.xp.maximum(s - (total - 1) / size, x.zero)


def away(x: Any) -> Array:
    """Return how far keys are behind the rows."""
    return x.i - x.j


def relative_bias(x: Any, s: Array) -> Array:
    """Add T5's bias."""
    behind = x.xp.abs(away(x))
    far = 8 + x.xp.astype(
        x.xp.log(x.xp.maximum(behind, 1 + 0 * behind) / 8) / math.log(16) * 8, behind.dtype
    )
    bucket = x.xp.where(behind < 8, behind, x.xp.minimum(far, 15 + 0 * behind))
    bucket = bucket + 16 * x.xp.astype(away(x) < 0, bucket.dtype)
    return s + x.xp.permute_dims(x.table[bucket, :], (2, 0, 1))


def by_norm(x: Any, s: Array) -> Array:
    """Divide scores by the norm of those that their row sees."""
    counted = s
    for seen in x.seen:
        counted = x.xp.where(seen, counted, x.zero)
    return s / x.xp.sqrt(x.xp.sum(counted * counted, axis=-1, keepdims=True))


def euclidean(x: Any) -> Array:
    """Return the negative distances of queries and keys."""
    squares = [x.xp.sum(a * a, axis=-1) for a in (x.q, x.k)]
    square = squares[0][..., :, None] + squares[1][..., None, :] - 2 * dot(x)
    return -x.xp.sqrt(x.xp.maximum(square, x.zero))


def cosine(x: Any) -> Array:
    """Return the cosines of queries and keys."""
    q, k = (a / x.xp.sqrt(x.xp.sum(a * a, axis=-1, keepdims=True)) for a in (x.q, x.k))
    return q @ x.xp.matrix_transpose(k)


def by_component(x: Any, change: Callable[[Array, Array, int], Array]) -> Array:
    """Return the sum over the components of queries and keys of a function of two."""
    parts = (change(x.q[..., n, None], x.k[..., None, :, n], n) for n in range(SIZE))
    return functools.reduce(operator.add, parts)


def changed(x: Any, **values: Array) -> Any:
    """Return a call's arrays, some of them replaced."""
    return SimpleNamespace(**{**vars(x), **values})


def repeated(x: Any) -> Any:
    """Repeat key and value heads for the query heads that read them."""
    times = x.q.shape[1] // x.k.shape[1]
    return changed(x, **{n: x.xp.repeat(getattr(x, n), times, axis=1) for n in "kv"})


def widened(x: Any) -> Any:
    """Return a call's arrays in float32."""
    return changed(x, **{n: x.xp.astype(getattr(x, n), x.xp.float32) for n in "qkv"})


def rule(b: Array, h: Array, i: Array, j: Array) -> Array:
    """Show the first key and every third."""
    return (j % 3 == 0) | (j == 0)


def steeper(s: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
    """Add a number that grows with the key's index."""
    return s + 0.001 * j


def compiled(x: Any) -> Any:
    """Return the rule, compiled."""
    return masks.compile(rule, x.q.shape[-2], x.k.shape[-2])


def mask(name: str, given: Any, seen: Callable[[Any], Array], pairs: bool = False) -> Option:
    """Return an option that hides keys."""
    return Option(name, given, seen, "mask", pairs)


def like(argument: str, value: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    """Return a function that gives one argument."""
    return lambda x: {argument: value(x)}


def inside(x: Any) -> Array:
    """Return which keys a window of 129 shows."""
    return (away(x) >= 0) & (away(x) <= 128)


def slopes(x: Any) -> Array:
    """Return ALiBi's slopes, for a number of heads that is a power of two."""
    heads = x.q.shape[1]
    return x.xp.asarray([2.0 ** (-8 * (n + 1) / heads) for n in range(heads)], dtype=x.xp.float32)


def few_heads(xp: Any, given: dict[str, Array]) -> dict[str, Array]:
    """Return a fourth of the key heads."""
    return {n: given[n][:, : max(1, given[n].shape[1] // 4)] for n in "kv"}


def halves(name: str, pairs: bool = False) -> Option:
    """Return the call in 16 bits."""

    def prepare(xp: Any, given: dict[str, Array]) -> dict[str, Array]:
        return {n: xp.astype(given[n], getattr(xp, name)) for n in "qkv"}

    return Option(name, lambda x: {}, widened, "inputs", pairs, prepare=prepare)


OPTIONS = (
    mask("is_causal", like("is_causal", lambda x: True), lambda x: away(x) >= 0, True),
    mask("window=(128, 0)", like("window", lambda x: (128, 0)), inside, True),
    mask(
        "query_offset=array, is_causal",
        lambda x: {"query_offset": x.offset, "is_causal": True},
        lambda x: away(x) >= 0,
        True,
    ),
    mask("mask=array (L, S)", like("mask", lambda x: x.allowed), lambda x: x.allowed, True),
    mask("mask=array (S,)", like("mask", lambda x: x.j < x.lengths), lambda x: x.j < x.lengths),
    mask(
        "masks.padding(array)",
        like("mask", lambda x: masks.padding(x.lengths)),
        lambda x: x.j < x.lengths,
        True,
    ),
    mask("masks.prefix(8)", like("mask", lambda x: masks.prefix(8)), lambda x: x.j < 8),
    mask(
        "masks.segments",
        like("mask", lambda x: masks.segments(x.ids[x.ids.shape[0] - x.q.shape[-2] :], x.ids)),
        lambda x: x.ids[x.ids.shape[0] - x.q.shape[-2] :, None] == x.ids,
        True,
    ),
    mask(
        "masks.dilated(2)",
        like("mask", lambda x: masks.dilated(2)),
        lambda x: away(x) % 2 == 0,
    ),
    mask(
        "masks.window | global_tokens",
        like("mask", lambda x: masks.window(128, 0) | masks.global_tokens(0, 1)),
        lambda x: inside(x) | (x.j < 2) | (x.i < 2),
    ),
    mask(
        "~masks.window",
        like("mask", lambda x: ~masks.window(8, 0)),
        lambda x: (away(x) < 0) | (away(x) > 8),
    ),
    mask("mask=function", like("mask", lambda x: rule), lambda x: rule(0, 0, x.i, x.j), True),
    mask("masks.compile", like("mask", compiled), lambda x: rule(0, 0, x.i, x.j)),
    Option(
        "scale=0.2", like("scale", lambda x: 0.2), lambda x, s: s * (0.2 * SIZE**0.5), pairs=False
    ),
    Option(
        "scale=long_sequence()",
        like("scale", lambda x: scores.long_sequence()),
        lambda x, s: s / math.sqrt(x.k.shape[-2]),
        pairs=False,
    ),
    Option("scale=by_norm()", like("scale", lambda x: scores.by_norm()), by_norm),
    Option("softcap=30", like("softcap", lambda x: 30.0), lambda x, s: 30 * x.xp.tanh(s / 30)),
    Option(
        "scores.temperature(2)",
        like("score_mod", lambda x: scores.temperature(2.0)),
        lambda x, s: s / 2,
        pairs=False,
    ),
    Option(
        "scores.alibi",
        like("score_mod", lambda x: scores.alibi(x.q.shape[1])),
        lambda x, s: s - slopes(x)[:, None, None] * x.xp.astype(x.xp.abs(away(x)), s.dtype),
    ),
    Option(
        "scores.relative_bias",
        like("score_mod", lambda x: scores.relative_bias(x.table)),
        relative_bias,
    ),
    Option(
        "score_mod=function",
        like("score_mod", lambda x: steeper),
        lambda x, s: steeper(s, 0, 0, x.i, x.j),
    ),
    Option("bias=array (L, S)", like("bias", lambda x: x.bias), lambda x, s: s + x.bias),
    Option(
        "bias=array (S,)",
        like("bias", lambda x: x.key_bias),
        lambda x, s: s + x.key_bias,
        pairs=False,
    ),
    Option(
        "sinks", like("sinks", lambda x: x.sinks), lambda x, s: softmax(x, s, x.sinks), "softmax"
    ),
    Option(
        "normalizer=sigmoid()",
        like("normalizer", lambda x: scores.sigmoid()),
        lambda x, s: 1 / (1 + x.xp.exp(-s)),
        "softmax",
    ),
    Option(
        "normalizer=sparsemax()",
        like("normalizer", lambda x: scores.sparsemax()),
        sparsemax,
        "softmax",
    ),
    Option(
        "dropout=(0.1, 7)",
        like("dropout", lambda x: (0.1, 7)),
        lambda x, w: x.xp.where(x.random(x, w.shape) >= 0.1, w / 0.9, x.zero),
        "weights",
    ),
    Option(
        "similarity=cosine()", like("similarity", lambda x: scores.cosine()), cosine, "similarity"
    ),
    Option(
        "similarity=distance()",
        like("similarity", lambda x: scores.distance()),
        euclidean,
        "similarity",
    ),
    Option(
        "similarity=distance(1)",
        like("similarity", lambda x: scores.distance(1)),
        lambda x: -by_component(x, lambda q, k, n: x.xp.abs(q - k)),
        "similarity",
        pairs=False,
        small=True,
    ),
    Option(
        "similarity=additive",
        like("similarity", lambda x: scores.additive(x.vector)),
        lambda x: by_component(x, lambda q, k, n: x.vector[n] * x.xp.tanh(q + k)),
        "similarity",
        pairs=False,
        small=True,
    ),
    Option("4 query heads a key head", lambda x: {}, repeated, "inputs", prepare=few_heads),
    halves("float16", pairs=True),
    halves("bfloat16"),
    Option("logsumexp", lambda x: {LOGSUMEXP: True}, lambda x, w: w, "weights"),
)


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
    """A call, and its time over those of others.

    Attributes
    ----------
    library, size, options : str
        What was called.
    seconds, plain, formula, expected : float
        Seconds per call; that over the plain call, over the formula with the same options, and
        over the expected time.
    """

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
            result, own = timed(ours)
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            say(f"{lib.name}: {names} is left out: {str(error).splitlines()[0][:90]}")
            continue
        formula = call_of(lib, given, chosen, formula=True)
        expected, other = timed(formula)
        near = 2e-2 if "float16" in names else 2e-3
        if "dropout" not in names and not same(lib, [result, expected], near):
            raise AssertionError(f"{lib.name}: {names} differs from the formula")
        yield chosen, [(ours, own), (formula, other)]


def timed(call: Callable[[], Array]) -> tuple[Array, float]:
    """Return the result of a call, and its processor time."""
    start = time.process_time()
    return call(), time.process_time() - start


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
    parser = script.parser(__doc__, 3)
    parser.add_argument(
        "--library", action="append", choices=LIBRARIES, help="(default: all that are installed)"
    )
    parser.add_argument("--size", action="append", choices=list(SHAPES), help="(default: all)")
    parser.add_argument("--alone", action="store_true", help="leave out the pairs")
    parser.add_argument("--worst", type=int, default=20, help="rows (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows")
    script.add_quick(parser.add_argument)
    options = parser.parse_args(arguments)
    shapes, rounds, window = (QUICK, 1, 0.0) if options.quick else (SHAPES, options.rounds, WINDOW)
    rows: list[Row] = []
    with polyattn.use_threads(1), np.errstate(all="ignore"):
        for name in options.library or LIBRARIES:
            try:
                lib = library(name)
            except ImportError:
                continue
            for size in options.size or shapes:
                paired = size == PAIRED and not (options.quick or options.alone)
                rows += sweep(lib, size, shapes[size], paired, rounds, window)
    print(f"{script.machine(1)}; processor time, {rounds} rounds, {len(rows)} calls")
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
