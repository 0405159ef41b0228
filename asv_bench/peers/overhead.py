"""The overhead of `polyattn.attention` over the bare call that it makes, on very small arrays.

Both run in turns in one process; differences and ratios are of medians. The bare calls are five
lines of NumPy and torch's `scaled_dot_product_attention`. A second table has the steps of a call,
and a third one the whole time of calls with options, most of which are described each time.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import polyattn
from polyattn import masks, scores
from polyattn._api.run import plan_of
from polyattn._base.arrays import library_of
from polyattn._core.call.describe import describe
from polyattn._core.call.key import call_key
from polyattn._core.call.operands import Operands
from polyattn._core.call.problem import examine
from polyattn._dispatch.cache import cached_call
from polyattn._dispatch.request import request
from polyattn._dispatch.select import select
from polyattn.bench import timing

SHAPE = (1, 1, 16, 16)
ROUNDS = 41
WINDOW = 0.02  # seconds


def textbook(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Compute softmax(query·keyᵀ/√D)·value."""
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(np.float32(query.shape[-1]))
    scores = scores - scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights @ value


def measure(bare: Callable[..., Any], arrays: list[Any]) -> list[float]:
    """Return the medians, in microseconds per call, of polyattn and of a bare call."""
    calls = {"ours": partial(polyattn.attention, *arrays), "bare": partial(bare, *arrays)}
    *_, times = timing.rounds(calls, lambda name: timing.window(calls[name], WINDOW), ROUNDS)
    return [statistics.median(seconds) * 1e6 for seconds in times.values()]


def steps(arrays: list[Any]) -> dict[str, float]:
    """Return the medians, in microseconds, of the steps of a repeated call and of a first one."""
    polyattn.attention(*arrays)
    requested, (call, _) = request(None), describe(*arrays)
    key, problem, xp = call_key(arrays, {}), examine(call), library_of(arrays[0]).xp
    assert key is not None
    (known,) = cached_call(key, requested)
    kernel, (backend, _, chosen, _), *_ = known.plan
    plain = Operands(*arrays)
    calls = {
        "whole call": lambda: polyattn.attention(*arrays),
        "key": lambda: call_key(arrays, {}),
        "request, look up": lambda: cached_call(key, request(None)),
        "backend": lambda: known.run(plain),
        "of which kernel": lambda: kernel(chosen, plain, backend),
        "first: describe": lambda: describe(*arrays),
        "first: examine": lambda: examine(call),
        "first: select": lambda: select(call, problem, requested, None, xp),
    }
    *_, times = timing.rounds(calls, lambda name: timing.window(calls[name], WINDOW / 4), ROUNDS)
    return {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}


def described(arrays: list[Any]) -> dict[str, float]:
    """Return the least times, in microseconds, of calls with options and of one with gradients."""
    attention, bias = polyattn.attention, arrays[0][0, 0]
    mask = masks.window(4, 0) | masks.prefix(2)
    own = copy.copy(plan_of(describe(*arrays)[0], arrays[0], None, "dense").kernel)
    four = {"bias": bias, "mask": mask, "softcap": 5.0, "score_mod": scores.alibi(1)}
    calls = {
        "plain": lambda: attention(*arrays),
        "is_causal": lambda: attention(*arrays, is_causal=True),
        "mask, an array": lambda: attention(*arrays, mask=bias > 0),
        "mask, an expression": lambda: attention(*arrays, mask=mask),
        "dropout": lambda: attention(*arrays, dropout=(0.1, 3)),
        "mask, bias, softcap, score_mod": lambda: attention(*arrays, **four),
        "kernel, an object": lambda: attention(*arrays, kernel=own),
        "attention_vjp and its gradients": lambda: polyattn.attention_vjp(*arrays)[1](arrays[0]),
    }
    *_, times = timing.rounds(calls, lambda name: timing.window(calls[name], WINDOW / 20), ROUNDS)
    return {name: min(seconds) * 1e6 for name, seconds in times.items()}


def show(title: str, tables: dict[str, dict[str, float]]) -> None:
    """Print tables with the same rows side by side."""
    print(f"\n{title:35}" + "".join(f"{name:>8}" for name in tables))
    for row in next(iter(tables.values())):
        print(f"{row:35}" + "".join(f"{table[row]:8.1f}" for table in tables.values()))


def main() -> None:
    """Print a line for each installed library, and the tables."""
    array = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    cases = [("numpy", textbook, [array] * 3)]
    try:
        import torch
    except ImportError:
        pass
    else:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        cases.append(("torch", sdpa, [torch.from_numpy(array)] * 3))
    print(f"{SHAPE} float32, microseconds per call, medians of {ROUNDS} alternating rounds")
    for name, bare, arrays in cases:
        ours, theirs = measure(bare, arrays)
        print(
            f"{name:6} polyattn {ours:6.1f}  bare {theirs:6.1f}  added {ours - theirs:6.1f}"
            f"  ratio {ours / theirs:.2f}"
        )
    titles = {
        "median microseconds of the steps": steps,
        "least microseconds with options": described,
    }
    for title, measured in titles.items():
        show(title, {name: measured(arrays) for name, _, arrays in cases})


if __name__ == "__main__":
    main()
