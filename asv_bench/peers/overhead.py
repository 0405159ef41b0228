"""What `polyattn.attention` costs over the bare call that it makes, on a problem of no size.

Both sides run in turn in one process; a ratio and a difference are of medians. The bare calls are
the five lines of NumPy that anyone writes and `F.scaled_dot_product_attention`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import polyattn

SHAPE = (1, 1, 16, 16)
ROUNDS = 41
CALLS = 500


def textbook(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Compute softmax(query·keyᵀ/√D)·value."""
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(np.float32(query.shape[-1]))
    scores = scores - scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights @ value


def measure(
    ours: Callable[..., Any], bare: Callable[..., Any], *arrays: Any
) -> tuple[float, float]:
    """Return the medians, in microseconds a call, of the two in turn."""
    times: dict[Callable[..., Any], list[float]] = {ours: [], bare: []}
    for _ in range(ROUNDS):
        for function in (ours, bare):
            start = time.perf_counter()
            for _ in range(CALLS):
                function(*arrays)
            times[function].append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(times[ours]), statistics.median(times[bare])


def main() -> None:
    """Print a line for each library that is here."""
    array = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    cases = [("numpy", textbook, [array] * 3)]
    try:
        import torch
    except ImportError:
        pass
    else:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        cases.append(("torch", sdpa, [torch.from_numpy(array)] * 3))
    print(f"{SHAPE} float32, microseconds a call, medians of {ROUNDS} alternating rounds")
    for name, bare, arrays in cases:
        ours, theirs = measure(polyattn.attention, bare, *arrays)
        print(
            f"{name:6} polyattn {ours:6.1f}  bare {theirs:6.1f}  added {ours - theirs:6.1f}"
            f"  ratio {ours / theirs:.2f}"
        )


if __name__ == "__main__":
    main()
