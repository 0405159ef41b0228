"""Attention against its peers on this machine, as ratios of alternating runs in one process.

Each table compares calls case by case: a ratio is of a call's time over that of the first. Every
contender may use the same number of threads. ``python asv_bench/peers/attention.py TABLE`` prints:

- `cpu`, which ``make bench-cpu`` prints: with the largest error against float64;
- `native`, which ``make bench-native`` prints: what the compiled kernel is held to. A row that
  misses its bound is marked, and plain ones show their share of the rate of NumPy's product;
- `gradients`; `half`, 16 bits over 32; `jax`, the compiled kernel under `jit` on one thread;
  `onnxruntime`; and `options`, each over the plain call.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import script
from cases import Array, Case, both
from engines import (
    EAGER,
    JAX,
    MOST_SCORES,
    NATIVE,
    REFERENCE,
    Call,
    gradient_on_jax,
    gradients,
    gradients_of_torch,
    installed,
    kernels,
    on_jax,
    on_onnxruntime,
    on_openvino,
    on_torch,
    onnx_session,
    ours,
    pairs_on_torch,
    textbook,
)
from threadpoolctl import threadpool_limits

import polyattn

# Where `make bench-native` puts OpenVINO, which would bring another NumPy.
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


def relative(result: Any, exact: Any) -> float:
    """Return the largest difference of three gradients, over the exact one's largest number."""
    pairs = zip(result[:3], exact[:3], strict=True)
    return max(script.difference(a, b) / script.difference(b, 0.0) for a, b in pairs)


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
        error=script.difference,
    ),
    "jax": Table(on_jax_rows((32, 128, 512, 2048)), on_jax_rows([32]), under_jit, 7, 0.06),
    ONNXRUNTIME: Table(
        [*rows([*both(1, 12, 128, 64), *both(1, 12, 512, 64)]), *exported(512), *exported(2048)],
        [*rows(both(1, 4, 128, 64)), *exported(128)],
        by_onnxruntime,
        rounds=15,
        error=script.difference,
    ),
    "options": Table(
        with_options(PLAIN), with_options(PLAIN._replace(length=256, keys=256)), over_plain, 7
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Print a table."""
    flags = ("quick", "threads", "cases", "cpu-time", "window", "json")
    parser = script.parser(__doc__ or "", 0, *flags, window=None)
    parser.add_argument("table", choices=TABLES)
    parser.epilog = "Without --rounds and --window, each table has its own."
    options = script.read(parser, arguments)
    name, table = options.table, TABLES[options.table]
    options.rounds = options.rounds or table.rounds
    options.window = table.window if options.window is None else options.window
    if name == "jax":
        options.cpu_time, options.threads, options.rest = True, 1, 0.0
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
        os.sched_setaffinity(0, list(os.sched_getaffinity(0))[-1:])
    if name in ("native", "jax") and script.compiled().startswith("without"):
        print("there is no compiled kernel: pip install polyattn-native")
        return 1
    with script.measuring(options) as show:
        for row in table.quick if options.quick else table.rows:
            if options.cases in row.title:
                measure(name, row, options, show)
    return 0


@cache
def limits(threads: int, cpu_time: bool) -> tuple[float, float]:
    """Return the operations a second of NumPy's product of matrices, and the bytes of its sum."""
    clock = time.process_time if cpu_time else time.perf_counter
    square, (x, y) = np.ones((1024, 1024), np.float32), np.ones((2, 2**25), np.float32)

    def least(call: Call) -> float:
        return min(script.window(call, 0.1, clock=clock) for _ in range(3))

    with threadpool_limits(threads):
        product = 2 * len(square) ** 3 / least(partial(np.matmul, square, square))
    return product, 3 * x.nbytes / least(partial(np.add, x, y, out=x))


def share_of_limit(row: Row, seconds: float, options: script.Options) -> str:
    """Return the share of a limit that a plain float32 call reaches, of one row the memory's."""
    case = row.case
    if row.passes != "forward" or case.kind not in ("full", "causal") or case.dtype != "float32":
        return ""
    product, memory = limits(options.threads, options.cpu_time)
    if case.length == 1:  # keys and values are read once
        read = 8 * case.batch * case.groups * case.keys * case.size
        return f"  {read / seconds / memory:.2f} of the memory's limit"
    return f"  {4 * case.visible * case.size / seconds / product:.2f} of the processor's limit"


def measure(name: str, row: Row, options: script.Options, show: Callable[..., None]) -> None:
    """Compare the contenders of a row and print the results."""
    table, exact = TABLES[name], None
    error = None if row.over == "causal" else table.error
    if name == "cpu":
        some, exact = exact_rows(row.case)

        def error(result: Array, exact: Array) -> float:
            return float(np.abs(np.asarray(result)[-1:, -1:][:, :, some] - exact).max())

    def held(result: script.Result) -> str:
        if row.bound is None or result.name != NATIVE:
            return ""
        missed = ", missed" * (result.ratio.median > row.bound)
        return f"  at most {row.bound:g}{missed}{share_of_limit(row, result.seconds, options)}"

    results = script.compare(table.contenders(row, options.threads), options, error, exact)
    show(row.title, results, held)


if __name__ == "__main__":
    sys.exit(main())
