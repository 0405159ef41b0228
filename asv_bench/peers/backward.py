"""Gradients on a CPU against torch's, as ratios of alternating runs in one process.

"both" is the forward and the backward pass, "backward" the latter only, from a result that is
there. A window is timed over causal attention instead, since torch would need a mask of all scores.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import script
from cpu import Case, both, one_window

import polyattn
from polyattn.bench import timing

REFERENCE = "torch"
CASES = (
    *both(1, 12, 512, 64),
    *both(4, 8, 1024, 64),
    *both(1, 12, 2048, 64),
    *both(1, 1, 8192, 64),
    Case(1, 4, 4, 8192, 8192, 64, "window"),
)
QUICK = (*both(1, 4, 256, 64), Case(1, 4, 4, 512, 512, 64, "window"))


def contenders(case: Case, threads: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return the calls to compare, of both passes and of the backward pass; the reference first."""
    arrays, options = case.arguments()
    along = np.random.default_rng(1).standard_normal(arrays[0].shape, dtype=np.float32)

    def ours(options: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
        forward = partial(polyattn.attention_partial, *arrays, backend="numpy", **options)
        backward = partial(polyattn.attention_backward, *arrays, backend="numpy", **options)
        return lambda: backward(forward(), along), partial(backward, forward(), along)

    if case.kind == "window":
        calls = {REFERENCE: ours({"is_causal": True}), "polyattn": ours(options)}
    else:
        calls = {REFERENCE: _torch(arrays, along, case, threads), "polyattn": ours(options)}
    passes = enumerate(("both", "backward"))
    return {kind: {name: call[n] for name, call in calls.items()} for n, kind in passes}


def _torch(
    arrays: list[Any], along: Any, case: Case, threads: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import torch

    torch.set_num_threads(threads)
    inputs = [torch.from_numpy(array).requires_grad_() for array in arrays]
    attend = partial(
        torch.nn.functional.scaled_dot_product_attention, *inputs, is_causal=case.kind == "causal"
    )
    gradients = partial(torch.autograd.grad, inputs=inputs, grad_outputs=[torch.from_numpy(along)])
    return lambda: gradients(attend()), partial(gradients, attend(), retain_graph=True)


def error_of(case: Case, calls: dict[str, Callable[[], Any]]) -> float:
    """Return the largest difference from the reference, over its largest number."""
    if case.kind == "window":
        return float("nan")
    found = (tuple(calls[name]())[:3] for name in (REFERENCE, "polyattn"))
    pairs = [tuple(map(np.asarray, pair)) for pair in zip(*found, strict=True)]
    return max(float(np.abs(one - other).max() / np.abs(one).max()) for one, other in pairs)


def measure(
    case: Case, threads: int, rounds: int, window: float
) -> Iterator[tuple[str, list[float], timing.Spread, float]]:
    """Yield each pass of a case: its name, the median times, their ratio and the error."""
    for kind, calls in contenders(case, threads).items():
        error = error_of(case, calls)
        seconds = partial(_seconds, calls, window)
        *_, times = timing.rounds(calls, seconds, rounds)
        medians = [statistics.median(times[name]) for name in calls]
        yield kind, medians, timing.ratios(times, REFERENCE)["polyattn"], error


def _seconds(calls: dict[str, Callable[[], Any]], window: float, name: str) -> float:
    return one_window(calls[name], window)


def main() -> int:
    """Print the table."""
    parser = script.parser(__doc__, 9)
    parser.add_argument("--quick", action="store_true", help="one round of small shapes: a check")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the ratios")
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases with this text")
    parser.add_argument("--threads", type=int, default=0, help="of each (default: all)")
    options = parser.parse_args()
    threads = options.threads or script.all_threads()
    rounds, window = (1, 0.0) if options.quick else (options.rounds, 0.15)
    print(script.machine(threads))
    print(f"{'case':32} {'pass':9} {'reference ms':>13} {'ms':>8} {'ratio':>6}  quartiles  error")
    results = []
    with polyattn.use_threads(threads):
        for case in QUICK if options.quick else CASES:
            name = f"{case.shape} {case.kind}"
            if options.cases not in name:
                continue
            for kind, (theirs, ours), ratio, error in measure(case, threads, rounds, window):
                print(
                    f"{name:32} {kind:9} {theirs * 1e3:13.2f} {ours * 1e3:8.2f}"
                    f" {ratio.median:6.2f}  {ratio.low:.2f}-{ratio.high:.2f}  {error:.0e}",
                    flush=True,
                )
                results.append({"case": case._asdict(), "pass": kind, **ratio._asdict()})
    if options.json:
        script.write_json(options.json, {"machine": script.machine(threads), "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
