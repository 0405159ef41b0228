"""Gradients on a CPU against torch's, as ratios of alternating runs in one process.

"both" is the forward and the backward pass, "backward" the latter only, from a result that is
there. A window is timed over causal attention instead, since torch would need a mask of all scores.
Gradients of JAX are those of polyattn's `xla` kernel and of `jax.nn`, both under `jit`.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import script
from cpu import MOST_SCORES, Case, both, one_window, to_jax

import polyattn
from polyattn.bench import timing

REFERENCE = "torch"
PASSES = {"both": 0, "backward": 1}
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
        return {kind: {name: call[n] for name, call in calls.items()} for kind, n in PASSES.items()}
    calls = {REFERENCE: _torch(arrays, along, case, threads), "polyattn": ours(options)}
    passes = {kind: {name: call[n] for name, call in calls.items()} for kind, n in PASSES.items()}
    if case.batch * case.heads * case.length * case.keys <= MOST_SCORES:
        with contextlib.suppress(ImportError):
            passes["both"]["polyattn jax"] = _jax(arrays, along, case, polyattn.attention, 2)
            passes["both"]["jax"] = _jax(arrays, along, case, None, 1)
    return passes


def _jax(
    arrays: list[Any], along: Any, case: Case, attend: Any, head_axis: int
) -> Callable[[], Any]:
    import jax

    attend = attend or jax.nn.dot_product_attention
    *inputs, along = to_jax([*arrays, along], head_axis)

    def loss(*inputs: Any) -> Any:
        return (attend(*inputs, is_causal=case.kind == "causal") * along).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2)))

    def call() -> list[Any]:
        found = jax.block_until_ready(compiled(*inputs))
        return [gradient.swapaxes(head_axis, 2) for gradient in found]

    return call


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


def error_of(case: Case, calls: dict[str, Callable[[], Any]], name: str) -> float:
    """Return the largest difference from the reference, over its largest number."""
    if case.kind == "window":
        return float("nan")
    found = (tuple(calls[one]())[:3] for one in (REFERENCE, name))
    pairs = [tuple(map(np.asarray, pair)) for pair in zip(*found, strict=True)]
    return max(float(np.abs(one - other).max() / np.abs(one).max()) for one, other in pairs)


class Row(NamedTuple):
    """A contender in a pass: the median of its seconds, and its ratio to the reference."""

    kind: str
    name: str
    seconds: float
    ratio: timing.Spread
    error: float


def measure(case: Case, threads: int, rounds: int, window: float) -> Iterator[Row]:
    """Yield the rows of a case."""
    for kind, calls in contenders(case, threads).items():
        errors = {name: error_of(case, calls, name) for name in calls}
        *_, times = timing.rounds(calls, partial(_seconds, calls, window), rounds)
        ratios = timing.ratios(times, REFERENCE)
        for name in calls:
            yield Row(kind, name, statistics.median(times[name]), ratios[name], errors[name])


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
    print(f"{'case':32} {'pass':9} {'contender':13} {'ms':>8} {'ratio':>6}  quartiles  error")
    results = []
    with polyattn.use_threads(threads):
        for case in QUICK if options.quick else CASES:
            title = f"{case.shape} {case.kind}"
            if options.cases not in title:
                continue
            for kind, name, seconds, ratio, error in measure(case, threads, rounds, window):
                print(
                    f"{title:32} {kind:9} {name:13} {seconds * 1e3:8.2f} {ratio.median:6.2f}"
                    f"  {ratio.low:.2f}-{ratio.high:.2f}  {error:.0e}",
                    flush=True,
                )
                row = {"case": case._asdict(), "pass": kind, "contender": name}
                results.append(row | ratio._asdict())
    if options.json:
        script.write_json(options.json, {"machine": script.machine(threads), "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
