"""Gradients on a CPU against torch's, as ratios of alternating runs in one process.

"both" is the forward and the backward pass, "backward" the latter only, from a result that is
there. A window is timed over NumPy's causal attention, since torch would need a mask of all scores.
Gradients of JAX are those of polyattn's `xla` kernel and of `jax.nn`, both under `jit`.
"""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from typing import Any

import numpy as np
import script
from cases import JAX, MOST_SCORES, REFERENCE, Case, both, kernels, on_jax
from script import Call

import polyattn

CASES = (
    *both(1, 12, 512, 64),
    *both(4, 8, 1024, 64),
    *both(1, 12, 2048, 64),
    *both(1, 1, 8192, 64),
    Case(1, 4, 4, 8192, 8192, 64, "window"),
)
QUICK = (*both(1, 4, 256, 64), Case(1, 4, 4, 512, 512, 64, "window"))


def contenders(case: Case, threads: int) -> dict[str, dict[str, Call]]:
    """Return the calls to compare, of both passes and of the backward pass; the reference first."""
    arrays, options = case.arguments()
    along = np.random.default_rng(1).standard_normal(arrays[0].shape, dtype=np.float32)

    def ours(**options: Any) -> tuple[Call, Call]:
        forward = partial(polyattn.attention_partial, *arrays, **options)
        backward = partial(polyattn.attention_backward, *arrays, **options)
        return lambda: backward(forward(), along), partial(backward, forward(), along)

    windowed = case.kind == "window"
    calls = {} if windowed else {REFERENCE: _torch(arrays, along, case, threads, **options)}
    for name, kernel in reversed(kernels(arrays, options).items()):
        if windowed:
            calls[f"{name}, causal"] = ours(is_causal=True, **kernel)
        calls[name] = ours(**options, **kernel)
    whole, last = ({name: pair[n] for name, pair in calls.items()} for n in (0, 1))
    if case.scores <= MOST_SCORES and not windowed and "bias" not in options:
        with contextlib.suppress(ImportError):
            for name in JAX:
                whole[name] = on_jax(name, [*arrays, along], case, _gradient)
    return {"both": whole, "backward": last}


def _gradient(attend: Call) -> Call:
    import jax

    def loss(query: Any, key: Any, value: Any, along: Any) -> Any:
        return (attend(query, key, value) * along).sum()

    return jax.grad(loss, (0, 1, 2))


def _torch(
    arrays: list[Any], along: Any, case: Case, threads: int, *, bias: Any = None, **_: Any
) -> tuple[Call, Call]:
    import torch

    torch.set_num_threads(threads)
    given = arrays if bias is None else [*arrays, bias]
    inputs = [torch.from_numpy(array).requires_grad_() for array in given]
    attend = partial(
        torch.nn.functional.scaled_dot_product_attention, *inputs, is_causal=case.is_causal
    )
    gradients = partial(torch.autograd.grad, inputs=inputs, grad_outputs=[torch.from_numpy(along)])
    return lambda: gradients(attend()), partial(gradients, attend(), retain_graph=True)


def relative(found: Any, exact: Any) -> float:
    """Return the largest difference of three gradients, over the exact one's largest number."""
    pairs = zip(found[:3], exact[:3], strict=True)
    return max(script.difference(a, b) / script.difference(b, 0.0) for a, b in pairs)


def main() -> int:
    """Print the table."""
    parser = script.parser(__doc__, 9, "quick", "json", "cases", "threads", window=0.15)
    options = script.read(parser)
    with script.measuring(options) as show:
        for case in script.chosen(options, CASES, QUICK):
            for kind, calls in contenders(case, options.threads).items():
                error = None if case.kind == "window" else relative
                rows = script.compare(calls, options, error)
                show(case.title, rows, f"{case.title:32} {kind:9} ", about={"pass": kind})
    return 0


if __name__ == "__main__":
    sys.exit(main())
