"""The compiled kernel in `same_bits`: one result for all libraries and programs, or a refusal."""

import jax
import numpy as np
import pytest
import torch

from polyattn import UnsupportedError, attention, explain, same_bits
from polyattn.conformance.checks import cuts
from polyattn.conformance.checks.target import Target

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 4, 300, 32), dtype=np.float32)


def call(q, x):
    return attention(q, x, x, is_causal=True)


def heads_last(q, x):
    q, x = (np.ascontiguousarray(np.swapaxes(one, 1, 2)) for one in (q, x))
    return np.swapaxes(attention(q, x, x, is_causal=True, layout="...LHD"), 1, 2)


def compiled(q, x):
    return torch.compile(call, backend="eager", fullgraph=True)(*map(torch.from_numpy, (q, x)))


#: Ways to make one call, from arrays of NumPy.
WAYS = {
    "numpy": call,
    "numpy, heads after length": heads_last,
    "torch": lambda q, x: call(*map(torch.from_numpy, (q, x))),
    "torch, trained": lambda q, x: call(
        torch.from_numpy(q).requires_grad_(), torch.from_numpy(x)
    ).detach(),
    "torch.compile": compiled,
    "jax": lambda q, x: call(*map(jax.numpy.asarray, (q, x))),
    "jax.jit": lambda q, x: jax.jit(call)(q, x),
    "jax.vmap": lambda q, x: jax.vmap(call)(q, x),
    "jax.vjp": lambda q, x: jax.vjp(call, q, x)[0],
}  # fmt: skip


@pytest.mark.parametrize(
    ("way", "dtype"), [*((way, "float32") for way in WAYS), ("jax", "float16")]
)
def test_the_bits_are_those_of_the_whole_call_on_numpy(way, dtype):
    x = X.astype(dtype)
    with same_bits():
        whole = call(x, x)
        for rows in (1, 300):
            found = WAYS[way](x[:, :, -rows:].copy(), x)
            np.testing.assert_array_equal(np.asarray(found), whole[:, :, -rows:])


@pytest.mark.parametrize("padding", [64, 282])
def test_hidden_keys_at_the_begin_of_a_block_are_not_counted(padding):
    """They fill cells of the mask, and all other keys of the block are shown."""
    x = RNG.standard_normal((1, 1, 1100, 16), dtype=np.float32)
    padded = np.concatenate([np.zeros_like(x[:, :, :padding]), x], axis=2)
    mask = np.arange(padding + 1100)[None] >= padding
    with same_bits():
        whole = attention(x, x, x, is_causal=True, window=(1024, None))
        found = attention(x, padded, padded, mask=mask, is_causal=True, window=(1024, None))
    np.testing.assert_array_equal(found, whole)


@pytest.mark.slow
def test_every_cut_has_the_same_bits_on_jax():
    """The suite of JAX tries some."""
    target = Target("jax")
    with same_bits():
        run = cuts._runner(target, target.variants(["native"])[0])
        found = {case: cuts.differing(*case, run)[0] for case in cuts.cut_cases(target.dtypes)}
    assert [case for case, different in found.items() if different] == []


def test_a_call_that_another_kernel_computes_in_less_time_runs_too():
    row = torch.zeros(1, 4, 1, 24)
    assert explain(row, row, row).chosen.kernel == "sdpa"  # type: ignore[union-attr]
    with same_bits():
        assert explain(row, row, row).chosen.kernel == "native"  # type: ignore[union-attr]


def summed(q):
    return call(q, q).sum()


#: What another kernel would compute, if it were not refused.
REFUSED = {
    "torch.func.vmap": lambda x: torch.func.vmap(summed)(torch.from_numpy(x)),
    "torch.func.grad": lambda x: torch.func.grad(summed)(torch.from_numpy(x)),
    "a function as a mask": lambda x: attention(x, x, x, mask=lambda b, h, i, j: j != 1),
    "dropout under jax.vmap": lambda x: jax.vmap(
        lambda q: attention(q, q, q, dropout=(0.1, 3))
    )(x),
    "a second derivative": lambda x: jax.hessian(summed)(x[:1, :1, :2]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_another_kernel_would_compute_is_refused(name):
    with same_bits(), pytest.raises((UnsupportedError, ValueError), match=r"same_bits\(\)"):
        REFUSED[name](X)
