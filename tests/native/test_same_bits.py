"""The compiled kernel in `same_bits`: one result for all libraries and programs, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polyattn import UnsupportedError, attention, same_bits, use_threads

pytest.importorskip("polyattn_native.library")
jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 4, 300, 24), dtype=np.float32)


def call(x: Any) -> Any:
    return attention(x, x, x, is_causal=True)


def on_one_thread(x: Any) -> Any:
    with use_threads(1):
        return call(x)


def heads_last(x: Any) -> Any:
    turned = np.ascontiguousarray(np.swapaxes(x, 1, 2))
    output = attention(turned, turned, turned, is_causal=True, layout="...LHD")
    return np.swapaxes(output, 1, 2)


#: Ways to make one call, from an array of NumPy.
WAYS: dict[str, Callable[[Any], Any]] = {
    "numpy": call,
    "numpy, one thread": on_one_thread,
    "numpy, heads after length": heads_last,
    "torch": lambda x: call(torch.from_numpy(x)),
    "torch, trained": lambda x: call(torch.from_numpy(x).requires_grad_()).detach(),
    "torch.compile": lambda x: torch.compile(call, backend="eager", fullgraph=True)(
        torch.from_numpy(x)
    ),
    "jax": lambda x: call(jax.numpy.asarray(x)),
    "jax.jit": lambda x: jax.jit(call)(x),
    "jax.vmap": lambda x: jax.vmap(call)(x),
    "jax.vjp": lambda x: jax.vjp(call, x)[0],
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("way", WAYS)
def test_the_bits_are_those_of_numpy(way: str, dtype: str) -> None:
    x = X.astype(dtype)
    with same_bits():
        np.testing.assert_array_equal(np.asarray(WAYS[way](x)), call(x))


#: What another kernel would compute, if it were not refused.
REFUSED: dict[str, Callable[[Any], Any]] = {
    "torch.func.vmap": lambda x: torch.func.vmap(call)(torch.from_numpy(x)),
    "torch.func.grad": lambda x: torch.func.grad(lambda q: call(q).sum())(torch.from_numpy(x)),
    "a function as a mask": lambda x: attention(x, x, x, mask=lambda b, h, i, j: j != 1),
    "dropout under jax.vmap": lambda x: jax.vmap(
        lambda q: attention(q, q, q, dropout=(0.1, 3))
    )(x),
    "a second derivative": lambda x: jax.hessian(lambda q: call(q).sum())(x[:1, :1, :2]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_another_kernel_would_compute_is_refused(name: str) -> None:
    with same_bits(), pytest.raises((UnsupportedError, ValueError), match=r"same_bits\(\)"):
        REFUSED[name](X)
