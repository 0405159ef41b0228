"""The compiled kernel against its peers, and the ratios that it is held to.

Each cell is the median over the rounds of a call's time over torch's, in windows that alternate in
one process; over NumPy's own kernel, or over the plain call, where the row says so. A row that
misses its bound is marked. ``make bench-native`` prints the tables, in Markdown.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import backward
import script
from cases import NATIVE, REFERENCE, Case, both, on_onnxruntime, on_openvino, on_torch, ours
from script import Call

# Where `make bench-native` puts OpenVINO, which would bring another NumPy.
sys.path.append(str(Path(sys.prefix) / "openvino"))


class Held(NamedTuple):
    """A case, and the most that the compiled kernel's time may be over that of another."""

    case: Case
    bound: float
    over: str = REFERENCE
    gradients: bool = False

    @property
    def title(self) -> str:
        """The row's title."""
        over = "" if self.over == REFERENCE else f", over {self.over}"
        return self.case.title + ", gradients" * self.gradients + over


def held(cases: Iterable[Case], *bounds: float, gradients: bool = False) -> list[Held]:
    """Return cases with a bound each."""
    pairs = zip(cases, bounds, strict=True)
    return [Held(case, bound, gradients=gradients) for case, bound in pairs]


def of_dtype(dtype: str) -> list[Case]:
    """Return the cases of another dtype."""
    return [case._replace(dtype=dtype) for case in both(1, 12, 1024, 64)]


# For AVX2, and 0.1 below for AVX-512.
PEERS = (
    *held(both(1, 12, 32, 64), 1.1, 1.1),
    *held(both(1, 12, 64, 64), 0.9, 0.8),
    *held(both(1, 12, 128, 64), 0.9, 0.65),
    *held(both(1, 12, 256, 64), 0.9, 0.65),
    *held(both(1, 12, 512, 64), 0.9, 0.65),
    *held(both(1, 12, 1024, 64), 0.9, 0.8),
    *held(both(1, 12, 2048, 64), 0.9, 0.8),
)
OTHERS = (
    *held(both(4, 8, 1024, 64), 0.9, 0.8),
    *held(both(1, 8, 4096, 128), 1.0, 0.95),
    *held(both(1, 1, 16384, 64), 0.9, 0.95),
    Held(Case(32, 12, 12, 128, 128, 64, "padding"), 0.7),
    Held(Case(1, 12, 12, 2048, 2048, 64, "mask"), 0.85),
    Held(Case(1, 12, 12, 2048, 2048, 64, "bias"), 1.0),
    Held(Case(8, 32, 8, 1, 4096, 128), 0.8),
    Held(Case(1, 8, 8, 8192, 8192, 64, "window"), 0.1),
    *held(of_dtype("float64"), 0.9, 0.9),
    *held(of_dtype("float16"), 1.1, 0.9),
    *held(of_dtype("bfloat16"), 0.95, 0.7),
    *held(both(1, 12, 512, 64), 1.0, 0.85, gradients=True),
    *held(both(4, 8, 1024, 64), 1.0, 0.85, gradients=True),
    *held(both(1, 12, 2048, 64), 1.0, 0.85, gradients=True),
    Held(Case(1, 12, 12, 1024, 1024, 64, "bias"), 1.0, gradients=True),
    Held(Case(1, 8, 8, 2048, 2048, 64, "softcap"), 0.8, "NumPy"),
    Held(Case(1, 8, 8, 2048, 2048, 64, "softcap, window"), 0.8, "NumPy"),
    Held(Case(1, 8, 8, 2048, 2048, 64, "documents"), 0.8, "NumPy"),
    Held(Case(1, 8, 8, 1024, 1024, 64, "low scores"), 1.1, "plain"),
    Held(Case(8, 32, 8, 1, 4096, 128, "half the keys"), 0.65, "plain"),
    Held(Case(8, 32, 8, 1, 4096, 128, "pages of 128"), 1.1, "plain"),
    Held(Case(8, 32, 8, 1, 4096, 128, "pages of 16"), 1.3, "plain"),
)
QUICK = held(both(1, 2, 32, 64), 9.9, 9.9)
COLUMNS = {"numpy": "NumPy", "openvino": "OpenVINO", "attention": "Attention"}
COLUMNS |= {"multihead": "MultiHeadAttention"}


def calls_of(row: Held, options: script.Options) -> dict[str, Call]:
    """Return the calls to compare, that with which the others are compared first."""
    case, threads = row.case, options.threads
    if row.gradients:
        calls = backward.contenders(case, threads)["both"]
        return {name: calls[name] for name in (REFERENCE, NATIVE, "numpy") if name in calls}
    if row.over == "plain":
        return {row.over: ours(case._replace(kind="full"))[NATIVE], NATIVE: ours(case)[NATIVE]}
    calls = ours(case)
    if row.over == "NumPy":
        return dict(reversed(calls.items()))
    return {REFERENCE: on_torch(case, threads)} | calls


def peers(row: Held, options: script.Options) -> dict[str, Call]:
    """Return the calls of the row, and those of OpenVINO and ONNX Runtime."""
    calls, case, threads = calls_of(row, options), row.case, options.threads
    arrays, _ = case.arguments()
    with contextlib.suppress(ImportError):
        calls["openvino"] = on_openvino(arrays, case, threads)
    with contextlib.suppress(ImportError):
        calls["attention"] = on_onnxruntime(arrays, case, threads)
        calls["multihead"] = on_onnxruntime(arrays, case, threads, "MultiHeadAttention")
    return calls


def line(row: Held, rows: list[script.Row], names: Iterable[str]) -> str:
    """Return a row of the table."""
    found = {one.name: one.ratio for one in rows}
    median, low, high = found[NATIVE]
    cells = [row.title, f"**{median:.2f}** ({low:.2f}–{high:.2f})"]
    cells += [f"{found[name].median:.2f}" if name in found else "" for name in names]
    cells.append(f"{row.bound:g}" + ", missed" * (median > row.bound))
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> int:
    """Print the tables."""
    parser = script.parser(__doc__, 5, "quick", "threads", "cases", "cpu-time", window=0.06)
    options = script.read(parser, arguments)
    tables = {peers: (PEERS, COLUMNS), calls_of: (OTHERS, ["numpy"])}
    with script.measuring(options):
        if script.compiled().startswith("without"):
            print("there is no compiled kernel: pip install polyattn-native")
            return 1
        for contenders, (cases, names) in tables.items():
            heads = ["(B, H, L, S, D)", NATIVE, *(COLUMNS[name] for name in names), "at most"]
            print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
            for row in script.chosen(options, cases, QUICK):
                found = script.compare(contenders(row, options), options)
                print(line(row, found, names), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
