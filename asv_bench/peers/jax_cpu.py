"""The compiled kernel under jax.jit over `jax.nn`, the `xla` kernel and NumPy, on one thread.

Processor time of windows that alternate in one process, medians; forward, and forward + backward.
``python asv_bench/peers/jax_cpu.py`` prints a table in Markdown.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
os.environ["POLYATTN_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import script

import polyattn

LENGTHS = 32, 128, 512, 2048


def calls(length: int, *, is_causal: bool) -> dict[str, script.Call]:
    """Return the contenders, and each with its gradients."""
    rng = np.random.default_rng(0)
    raw = [rng.standard_normal((1, 12, length, 64)).astype("float32") for _ in range(3)]
    ours = [jnp.asarray(array) for array in raw]
    theirs = [array.swapaxes(1, 2) + 0 for array in ours]

    def attend(kernel: str) -> Callable[..., Any]:
        return lambda *x: polyattn.attention(*x, is_causal=is_causal, kernel=kernel)

    def of_jax(*x: Any) -> Any:
        return jax.nn.dot_product_attention(*x, is_causal=is_causal)

    def waiting(function: Callable[..., Any], x: list[Any]) -> script.Call:
        return lambda: jax.block_until_ready(function(*x))

    found: dict[str, script.Call] = {"NumPy": lambda: attend("native")(*raw)}
    contenders = ("native", attend("native"), ours), ("xla", attend("xla"), ours)
    for name, function, x in (*contenders, ("jax.nn", of_jax, theirs)):
        # Not a plain sum, whose gradient is a constant that XLA computes ahead with.
        both = jax.jit(jax.grad(lambda *x, f=function: (f(*x) * x[0]).sum(), (0, 1, 2)))
        found[name] = waiting(jax.jit(function), x)
        found[f"{name}, both"] = waiting(both, x)
    return found


def main() -> None:
    """Print the table."""
    parser = script.parser(__doc__, 7, "quick", cpu_time=True, window=0.06, rest=0.0)
    options = script.read(parser)
    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[-1:])
    print("| tokens | | `jax.nn` | `xla` | NumPy arrays | both, `jax.nn` | both, `xla` |")
    print("|---|---|---|---|---|---|---|")
    for length in LENGTHS[:1] if options.quick else LENGTHS:
        for is_causal in (False, True):
            rows = script.compare(calls(length, is_causal=is_causal), options)
            took = {row.name: row.seconds for row in rows}
            pairs = [("native", other) for other in ("jax.nn", "xla", "NumPy")]
            pairs += [("native, both", f"{other}, both") for other in ("jax.nn", "xla")]
            ratios = " | ".join(f"{took[one] / took[other]:.2f}" for one, other in pairs)
            print(f"| {length} | {'causal' if is_causal else 'full'} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
