"""The compiled kernel under jax.jit over `jax.nn`, the `xla` kernel and NumPy, on one thread.

Processor time of windows that alternate in one process, medians; forward, and forward + backward.
``python asv_bench/peers/jax_cpu.py`` prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
os.environ["POLYATTN_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"

import jax
import jax.numpy as jnp
import numpy as np

import polyattn

LENGTHS = 32, 128, 512, 2048


def times(calls: dict[str, Callable[[], Any]], rounds: int, window: float) -> dict[str, float]:
    """Return the processor time of each call."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):  # the first compiles
        for name, call in calls.items():
            start, count = time.process_time(), 0
            while count == 0 or time.process_time() - start < window:
                jax.block_until_ready(call())
                count += 1
            if turn:
                found[name].append((time.process_time() - start) / count)
    return {name: statistics.median(each) for name, each in found.items()}


def calls(length: int, *, is_causal: bool) -> dict[str, Callable[[], Any]]:
    """Return the contenders, and each with its gradients."""
    rng = np.random.default_rng(0)
    raw = [rng.standard_normal((1, 12, length, 64)).astype("float32") for _ in range(3)]
    ours = [jnp.asarray(array) for array in raw]
    theirs = [array.swapaxes(1, 2) + 0 for array in ours]

    def attend(kernel: str) -> Callable[..., Any]:
        return lambda *x: polyattn.attention(*x, is_causal=is_causal, kernel=kernel)

    def of_jax(*x: Any) -> Any:
        return jax.nn.dot_product_attention(*x, is_causal=is_causal)

    found: dict[str, Callable[[], Any]] = {"NumPy": lambda: attend("native")(*raw)}
    contenders = ("native", attend("native"), ours), ("xla", attend("xla"), ours)
    for name, function, x in (*contenders, ("jax.nn", of_jax, theirs)):
        forward = jax.jit(function)
        # Not a plain sum, whose gradient is a constant that XLA computes ahead with.
        both = jax.jit(jax.grad(lambda *x, f=function: (f(*x) * x[0]).sum(), (0, 1, 2)))
        found[name] = lambda f=forward, x=x: f(*x)
        found[f"{name}, both"] = lambda f=both, x=x: f(*x)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one round of the shortest")
    options = parser.parse_args()
    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[-1:])
    print("| tokens | | `jax.nn` | `xla` | NumPy arrays | both, `jax.nn` | both, `xla` |")
    print("|---|---|---|---|---|---|---|")
    rounds, window = (1, 0.001) if options.quick else (options.rounds, 0.06)
    for length in LENGTHS[:1] if options.quick else LENGTHS:
        for is_causal in (False, True):
            took = times(calls(length, is_causal=is_causal), rounds, window)
            pairs = [("native", other) for other in ("jax.nn", "xla", "NumPy")]
            pairs += [("native, both", f"{other}, both") for other in ("jax.nn", "xla")]
            ratios = " | ".join(f"{took[one] / took[other]:.2f}" for one, other in pairs)
            print(f"| {length} | {'causal' if is_causal else 'full'} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
