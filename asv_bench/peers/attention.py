"""Attention against its peers on this machine, as ratios of alternating runs in one process.

Each table compares calls case by case: a ratio is of a call's time over that of the first. Every
contender may use the same number of threads. ``python asv_bench/peers/attention.py TABLE`` prints:

- `cpu`, which ``make bench-peers`` prints: with the largest error against float64;
- `native`, which ``make bench-peers PEERS=native`` prints: the compiled kernel, with a mark where
  it misses the bound that it is held to;
- `gradients`; `half`, 16 bits over 32; `jax`, the compiled kernel under `jit` on one thread;
  `onnxruntime`; and `options`, each over the plain call.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cases import Array, Case, both
from engines import (
    EAGER,
    JAX,
    MOST_SCORES,
    NATIVE,
    REFERENCE,
    Call,
    compiled,
    gradient_on_jax,
    gradients,
    gradients_of_torch,
    installed,
    kernels,
    machine,
    on_jax,
    on_onnxruntime,
    on_openvino,
    on_torch,
    onnx_session,
    ours,
    pairs_on_torch,
    textbook,
)

import polyattn
from polyattn._base import text_table
from polyattn.bench import timing
from polyattn.bench.table import duration

# Where `make bench-peers PEERS=native` puts OpenVINO, which would bring another NumPy.
sys.path.append(str(Path(sys.prefix) / "openvino"))
ONNXRUNTIME = "onnxruntime"


class Row(NamedTuple):
    """A case, what the times are divided by, the passes, and the bound of the compiled kernel.

    The bound is for AVX2, and 0.1 above that for AVX-512.
    """

    case: Case
    bound: float | None = None
    over: str = REFERENCE
    passes: str = "forward"  # or "both", or "backward"

    @property
    def title(self) -> str:
        """The row as text."""
        passes = {"forward": "", "both": ", gradients", "backward": ", backward"}[self.passes]
        return self.case.title + passes + f", over {self.over}" * (self.over != REFERENCE)


class Table(NamedTuple):
    """Rows, those of a quick run, and the calls of a row, the first of them the reference's."""

    rows: Sequence[Row]
    quick: Sequence[Row]
    contenders: Callable[[Row, int], dict[str, Call]]
    rounds: int = 9
    window: float = 0.15  # seconds of calls in a round
    error: Callable[[Any, Any], float] | None = None


def rows(cases: Iterable[Case], *bounds: float, **same: Any) -> list[Row]:
    """Return rows of cases, with a bound each if there are bounds."""
    cases = list(cases)
    return [Row(x, y, **same) for x, y in zip(cases, bounds or [None] * len(cases), strict=True)]


# ---- cpu: NumPy's kernel beside the functions of all libraries ---------------------------------


def on_cpu(row: Row, threads: int) -> dict[str, Call]:
    """Return the installed contenders that support the case."""
    case = row.case
    (arrays, options), own = case.arguments(), ours(case)
    peers = {REFERENCE: lambda: on_torch(case, threads)}
    peers |= {name: lambda call=call: call for name, call in own.items()}
    if case.scores <= MOST_SCORES:
        mask, bias = case.mask(options), options.get("bias")
        peers["textbook"] = lambda: partial(textbook, *arrays, mask=mask, bias=bias)
        if case.kind in ("full", "causal"):
            peers |= {name: partial(on_jax, name, arrays, case) for name in JAX}
            if case.heads == case.groups:
                peers[ONNXRUNTIME] = lambda: on_onnxruntime(case, threads)
    return installed(peers)


def exact_rows(case: Case) -> tuple[Array, Array]:
    """Return the indices of some rows of the last head, and their attention in float64."""
    arrays, options = case.arguments()
    query, key, value = (array[-1:, -1:].astype(np.float64) for array in arrays)
    some = np.unique(np.linspace(0, case.length - 1, 64).astype(int))
    mask, bias = (
        None if x is None else x[-1:] if x.ndim == 4 else x[some]
        for x in (case.mask(options), options.get("bias"))
    )  # fmt: skip
    return some, textbook(query[:, :, some], key, value, mask=mask, bias=bias)


CPU = [
    *both(1, 12, 32, 64),
    *both(1, 12, 64, 64),
    Case(32, 12, 12, 32, 32, 64, "padding"),
    *both(1, 12, 128, 64),
    Case(32, 12, 12, 128, 128, 64, "padding"),
    *both(1, 12, 256, 64),
    *both(1, 12, 512, 64),
    *both(4, 8, 1024, 64),
    *both(1, 12, 2048, 64),
    *both(1, 8, 4096, 128),
    *both(1, 1, 16384, 64),
    Case(8, 32, 8, 1, 4096, 128),
    Case(1, 12, 12, 2048, 2048, 64, "mask"),
    Case(1, 12, 12, 2048, 2048, 64, "bias"),
    Case(1, 8, 8, 8192, 8192, 64, "window"),
]
CPU_QUICK = [
    *both(1, 4, 256, 64),
    Case(1, 8, 2, 1, 512, 64),
    Case(1, 4, 4, 256, 256, 64, "window"),
]

# ---- native and gradients ----------------------------------------------------------------------


def with_native(row: Row, threads: int) -> dict[str, Call]:
    """Return the compiled kernel, NumPy's own and the peers of the row."""
    case = row.case
    if case.kind == "pairs":
        return with_pairs(row, threads)
    if row.passes != "forward":
        calls = with_gradients(row, threads)
        return {name: calls[name] for name in (REFERENCE, NATIVE, "numpy") if name in calls}
    if row.over == "plain":
        return {row.over: ours(case._replace(kind="full"))[NATIVE], NATIVE: ours(case)[NATIVE]}
    calls = ours(case)
    if row.over == "NumPy":
        return dict(reversed(calls.items()))
    has_peers = case.kind in ("full", "causal") and case.heads == case.groups
    peers = {
        "openvino": lambda: on_openvino(case, threads),
        "attention": lambda: on_onnxruntime(case, threads),
        "multihead": lambda: on_onnxruntime(case, threads, "MultiHeadAttention"),
    }
    has_peers &= case.dtype == "float32" and case.scores <= MOST_SCORES
    return {REFERENCE: on_torch(case, threads)} | calls | (installed(peers) if has_peers else {})


def with_pairs(row: Row, threads: int) -> dict[str, Call]:
    """Return attention of pairs written out on torch, by its function, and polyattn's kernels."""
    case, passes = row.case, row.passes
    arrays, options = case.arguments()
    peers = dict.fromkeys((row.over, REFERENCE))
    calls = {name: pairs_on_torch(name, case, threads, passes) for name in peers}
    if passes == "forward":
        return calls | ours(case)
    along, own = np.ones_like(arrays[0]), kernels(arrays, options)
    return calls | {n: gradients(arrays, along, passes, **options, **x) for n, x in own.items()}


def with_gradients(row: Row, threads: int) -> dict[str, Call]:
    """Return both passes or the backward pass; a window's over those of causal attention."""
    case, passes = row.case, row.passes
    arrays, options = case.arguments()
    along = np.random.default_rng(1).standard_normal(arrays[0].shape, dtype=np.float32)
    own = dict(reversed(kernels(arrays, options).items()))
    calls = {}
    if row.over == "causal":
        calls["causal"] = gradients(arrays, along, passes, is_causal=True, **own["numpy"])
    else:
        calls[REFERENCE] = gradients_of_torch(case, along, threads, passes)
    calls |= {n: gradients(arrays, along, passes, **options, **x) for n, x in own.items()}
    is_for_jax = case.kind in ("full", "causal") and row.bound is None
    if passes == "both" and is_for_jax and case.scores <= MOST_SCORES:
        given = [*arrays, along]
        makers = {name: partial(on_jax, name, given, case, gradient_on_jax) for name in JAX}
        calls |= installed(makers)
    return calls


def difference(result: Any, exact: Any) -> float:
    """Return the largest difference of two results."""
    one, other = (np.asarray(x, dtype=np.float32) for x in (result, exact))
    return float(np.abs(one - other).max())


def relative(result: Any, exact: Any) -> float:
    """Return the largest difference of three gradients, over the exact one's largest number."""
    pairs = zip(result[:3], exact[:3], strict=True)
    return max(difference(a, b) / difference(b, 0.0) for a, b in pairs)


def of_pairs(size: int, *bounds: tuple[int, float | None], **same: Any) -> list[Row]:
    """Return rows of as many items as rows and keys, with a bias that the items share."""
    return [
        Row(Case(n, 4, 4, n, n, size, "pairs", **same), bound, EAGER, passes)
        for n, bound in bounds
        for passes in ("forward", "both")
    ]


HELD = [
    *rows(both(1, 12, 32, 64), 1.1, 1.1),
    *rows(both(1, 12, 64, 64), 0.9, 0.8),
    *rows(both(1, 12, 128, 64), 0.9, 0.65),
    *rows(both(1, 12, 256, 64), 0.9, 0.65),
    *rows(both(1, 12, 512, 64), 0.9, 0.65),
    *rows(both(1, 12, 1024, 64), 0.9, 0.8),
    *rows(both(1, 12, 2048, 64), 0.9, 0.8),
    *rows(both(4, 8, 1024, 64), 0.9, 0.8),
    *rows(both(1, 8, 4096, 128), 1.0, 0.95),
    *rows(both(1, 1, 16384, 64), 0.9, 0.95),
    Row(Case(32, 12, 12, 128, 128, 64, "padding"), 0.7),
    Row(Case(1, 12, 12, 2048, 2048, 64, "mask"), 0.85),
    Row(Case(1, 12, 12, 2048, 2048, 64, "bias"), 1.0),
    Row(Case(8, 32, 8, 1, 4096, 128), 0.8),
    Row(Case(1, 8, 8, 8192, 8192, 64, "window"), 0.1),
    *rows(both(1, 12, 1024, 64, "float64"), 0.9, 0.9),
    *rows(both(1, 12, 1024, 64, "float16"), 1.1, 0.9),
    *rows(both(1, 12, 1024, 64, "bfloat16"), 0.95, 0.7),
    *rows(both(1, 12, 512, 64), 1.0, 0.85, passes="both"),
    *rows(both(4, 8, 1024, 64), 1.0, 0.85, passes="both"),
    *rows(both(1, 12, 2048, 64), 1.0, 0.85, passes="both"),
    Row(Case(1, 12, 12, 1024, 1024, 64, "bias"), 1.0, passes="both"),
    *of_pairs(8, (64, 0.9), (128, 0.7)),
    *of_pairs(16, (64, 1.0), (128, 0.7)),
    *of_pairs(32, (64, 1.0), (128, 0.8), (256, 0.8)),
    *of_pairs(16, (64, None), (128, None), dtype="bfloat16"),
    Row(Case(512, 4, 4, 512, 512, 16, "pairs"), 0.8),
    Row(Case(1, 8, 8, 2048, 2048, 64, "softcap"), 0.8, "NumPy"),
    Row(Case(1, 8, 8, 2048, 2048, 64, "softcap, window"), 0.8, "NumPy"),
    Row(Case(1, 8, 8, 2048, 2048, 64, "documents"), 0.8, "NumPy"),
    Row(Case(1, 8, 8, 1024, 1024, 64, "low scores"), 1.1, "plain"),
    Row(Case(8, 32, 8, 1, 4096, 128, "half the keys"), 0.65, "plain"),
    Row(Case(8, 32, 8, 1, 4096, 128, "pages of 128"), 1.1, "plain"),
    Row(Case(8, 32, 8, 1, 4096, 128, "pages of 16"), 1.3, "plain"),
]
TRAINED = [
    *both(1, 12, 512, 64),
    *both(4, 8, 1024, 64),
    *both(1, 12, 2048, 64),
    *both(1, 1, 8192, 64),
]


def of_passes(cases: Iterable[Case], window: Case) -> list[Row]:
    """Return rows of both passes and of the backward pass."""
    found = [*rows(cases, passes="both"), Row(window, None, "causal", "both")]
    return [row._replace(passes=passes) for row in found for passes in ("both", "backward")]


# ---- half, jax, onnxruntime and options --------------------------------------------------------


def of_16_bits(row: Row, threads: int) -> dict[str, Call]:
    """Return NumPy's own kernel in 32 and in 16 bits."""
    case = row.case
    return {row.over: ours(case._replace(dtype=row.over))["numpy"], case.dtype: ours(case)["numpy"]}


def under_jit(row: Row, threads: int) -> dict[str, Call]:
    """Return the compiled kernel under `jit`, and that which it is over."""
    arrays, _ = row.case.arguments()
    if row.over == "NumPy":
        over = ours(row.case)[NATIVE]
    elif row.passes == "both":
        arrays = [*arrays, arrays[0]]
    made = gradient_on_jax if row.passes == "both" else lambda attend: attend
    on = partial(on_jax, arrays=arrays, case=row.case, made=made, turns_back=False)
    if row.over != "NumPy":
        over = on("jax") if row.over == "jax" else on("polyattn jax", kernel=row.over)
    return {row.over: over, NATIVE: on("polyattn jax", kernel=NATIVE)}


def on_jax_rows(lengths: Iterable[int]) -> list[Row]:
    """Return the rows of the compiled kernel under `jit`."""
    kinds = [("jax", "forward"), ("xla", "forward"), ("NumPy", "forward")]
    kinds += [("jax", "both"), ("xla", "both")]
    cases = [case for length in lengths for case in both(1, 12, length, 64)]
    return [Row(case, None, over, passes) for case in cases for over, passes in kinds]


def by_onnxruntime(row: Row, threads: int) -> dict[str, Call]:
    """Return torch, a bare session and the engine; or an exported call, one node or written out."""
    arrays, options = row.case.arguments()
    if row.over == REFERENCE:
        attend = partial(polyattn.attention, *arrays, backend=ONNXRUNTIME, **options)
        bare = on_onnxruntime(row.case, threads)
        return {REFERENCE: on_torch(row.case, threads), "bare session": bare, "polyattn": attend}
    from polyattn.export import onnx

    shapes = {n: x.shape for n, x in zip(("query", "key", "value"), arrays, strict=True)}
    calls = {}
    for name, kernel in ((row.over, "native"), ("written out", "dense")):
        model = onnx(polyattn.attention, shapes, options=options | {"kernel": kernel})
        calls[name] = onnx_session(model, arrays, threads)
    return calls


def exported(length: int) -> list[Row]:
    """Return the rows of exported calls."""
    kinds = ("full", "causal", "alibi", "sinks")
    return [Row(Case(1, 12, 12, length, length, 64, kind), None, "one node") for kind in kinds]


def over_plain(row: Row, threads: int) -> dict[str, Call]:
    """Return the plain call of a kernel and the call with an option, or `torch.cdist` and ours."""
    arrays, options = row.case.arguments()
    library, _, kernel = row.over.partition(" ")
    if library == "numpy":
        attend = partial(polyattn.attention, *arrays, backend="numpy")
        return {row.over: partial(attend, kernel=kernel), "numpy": partial(attend, **options)}
    import torch

    torch.set_num_threads(threads)
    query, key, value = map(torch.from_numpy, arrays)
    attend = partial(polyattn.attention, query, key, value)
    over = partial(attend, kernel=kernel)
    if library == "cdist":
        over = lambda: torch.softmax(-torch.cdist(query, key), -1) @ value  # noqa: E731
    return {row.over: over, "torch": partial(attend, **options)}


PLAIN = Case(1, 8, 8, 1024, 1024, 64)
OPTIONS = "window documents softcap alibi function sinks dropout by_norm sigmoid cosine distance"


def with_options(plain: Case) -> list[Row]:
    """Return a row for each option and library."""
    cases = [plain._replace(kind=kind) for kind in OPTIONS.split()]
    over = ("numpy tiled", "torch tiled")
    return [*[Row(x, None, y) for x in cases for y in over], Row(cases[-1], None, "cdist")]


# ---- all tables --------------------------------------------------------------------------------

SMALL = both(1, 2, 32, 64)
HALF = [
    case
    for dtype in ("float16", "bfloat16")
    for case in (*both(1, 12, 1024, 64, dtype), *both(1, 8, 4096, 128, dtype))
]
TABLES = {
    "cpu": Table(rows(CPU), rows(CPU_QUICK), on_cpu, window=0.1),
    "native": Table(HELD, rows(SMALL, 9.9, 9.9), with_native, rounds=5, window=0.06),
    "gradients": Table(
        of_passes(TRAINED, Case(1, 4, 4, 8192, 8192, 64, "window")),
        of_passes(both(1, 4, 256, 64), Case(1, 4, 4, 512, 512, 64, "window")),
        with_gradients,
        error=relative,
    ),
    "half": Table(
        rows(HALF, over="float32"),
        rows(both(1, 2, 64, 16, "float16"), over="float32"),
        of_16_bits,
        error=difference,
    ),
    "jax": Table(on_jax_rows((32, 128, 512, 2048)), on_jax_rows([32]), under_jit, 7, 0.06),
    ONNXRUNTIME: Table(
        [*rows([*both(1, 12, 128, 64), *both(1, 12, 512, 64)]), *exported(512), *exported(2048)],
        [*rows(both(1, 4, 128, 64)), *exported(128)],
        by_onnxruntime,
        rounds=15,
        error=difference,
    ),
    "options": Table(
        with_options(PLAIN), with_options(PLAIN._replace(length=256, keys=256)), over_plain, 7
    ),
}


def read(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; a quick run has one round of one call each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("table", choices=TABLES)
    add("--rounds", type=int, help="alternating rounds (default: each table has its own)")
    add("--threads", type=int, help="of each contender (default: all cores)")
    add("--cases", metavar="TEXT", default="", help="only cases with this text")
    add("--quick", action="store_true", help="one round, of small shapes: no measurement")
    add("--cpu-time", action="store_true", help="count processor time, of one thread")
    options = parser.parse_args(arguments)
    table = TABLES[options.table]
    if options.table == "jax":
        options.cpu_time = True
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
        os.sched_setaffinity(0, list(os.sched_getaffinity(0))[-1:])
    options.threads = 1 if options.cpu_time else options.threads or len(os.sched_getaffinity(0))
    options.turns = timing.Turns(
        options.rounds or table.rounds,
        table.window,
        0.0 if options.table == "jax" else timing.TURNS.rest,
        time.process_time if options.cpu_time else time.perf_counter,
    )
    if options.quick:
        options.turns = options.turns._replace(rounds=1, window=0.0, rest=0.0)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Print a table."""
    options = read(arguments)
    table = TABLES[options.table]
    if options.table in ("native", "jax") and not compiled():
        print("there is no compiled kernel: pip install polyattn-native")
        return 1
    print(f"{machine(options.threads)}; {options.turns.rounds} rounds", flush=True)
    with polyattn.use_threads(options.threads):
        for row in table.quick if options.quick else table.rows:
            if options.cases in row.title:
                measure(row, options)
    return 0


def measure(row: Row, options: argparse.Namespace) -> None:
    """Compare the contenders of a row and print the results."""
    table, exact = TABLES[options.table], None
    error = None if row.over == "causal" else table.error
    if options.table == "cpu":
        some, exact = exact_rows(row.case)

        def error(result: Array, exact: Array) -> float:
            return float(np.abs(np.asarray(result)[-1:, -1:][:, :, some] - exact).max())

    calls, details = table.contenders(row, options.threads), {}
    for name, call in calls.items():  # also warms up
        result = call()
        exact = result if exact is None else exact
        details[name] = "" if error is None else f"  error {error(result, exact):.1e}"
    times = timing.alternate(calls, options.turns)
    for name, ratio in timing.ratios(times, next(iter(calls))).items():
        if row.bound is not None and name == NATIVE:
            missed = ", missed" * (ratio.median > row.bound)
            details[name] += f"  at most {row.bound:g}{missed}"
        text = f"ratio {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}){details[name]}"
        cells = row.title, name, f"{duration(timing.spread_of(times[name]).median)} ms", text
        print(text_table.line(cells, (-34, -14, 13, -1)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
