"""Libraries without a plugin: the core's own kernels serve them unchanged, traced and lazy too."""

import numpy as np
import pytest
from optional import array_api_strict, jax, jnp

from polyattn import attention, attention_partial, merge

RNG = np.random.default_rng(0)
Q = RNG.standard_normal((2, 4, 6, 8), dtype=np.float32)
K = RNG.standard_normal((2, 2, 9, 8), dtype=np.float32)
V = RNG.standard_normal((2, 2, 9, 5), dtype=np.float32)


@pytest.mark.parametrize("kernel", ["dense", "tiled"])
def test_arrays_stay_on_a_device_of_array_api_strict(kernel):
    device = array_api_strict.Device("device1")
    options = {
        "mask": RNG.random((2, 1, 6, 9)) > 0.3,
        "bias": RNG.standard_normal((1, 4, 6, 9), dtype=np.float32),
        "sinks": RNG.standard_normal(4, dtype=np.float32),
        "query_offset": np.array([1, 3]),
    }
    there = {name: array_api_strict.asarray(x, device=device) for name, x in options.items()}
    arrays = [array_api_strict.asarray(x, device=device) for x in (Q, K, V)]
    found = attention_partial(*arrays, is_causal=True, kernel=kernel, **there)
    expected = attention_partial(Q, K, V, is_causal=True, **options)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.device == device
        on_host = np.asarray(mine.to_device(array_api_strict.Device("CPU_DEVICE")))
        np.testing.assert_allclose(on_host, theirs, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["dense", "tiled"])
def test_jax_gradient_and_vmap_pass_through(kernel):
    mask = jnp.asarray(np.arange(9) < np.arange(6)[:, None])  # the first row sees nothing

    def loss(q, k, v):
        return attention(q, k, v, mask=mask, kernel=kernel).sum()

    with jax.debug_nans(True):
        gradients = jax.grad(loss, argnums=(0, 1, 2))(Q, K, V)
    assert all(np.isfinite(g).all() for g in gradients)
    assert not np.asarray(gradients[0])[:, :, 0].any()
    mapped = jax.vmap(lambda q, k, v: attention(q, k, v, kernel=kernel))(Q, K, V)
    np.testing.assert_allclose(mapped, attention(Q, K, V), atol=2e-6)


def test_jax_with_a_traced_position():
    @jax.jit
    def step(q, k, v, position):
        return attention(q, k, v, is_causal=True, query_offset=position)

    for position in (0, 4):
        output = step(Q[:, :, :1], K, V, jnp.asarray(position))
        expected = attention(Q[:, :, :1], K, V, is_causal=True, query_offset=position)
        np.testing.assert_allclose(output, expected, atol=2e-6)


def test_merge_of_jax_under_jit():
    @jax.jit
    def halves(q, k, v):
        left = attention_partial(q, k[:, :, :4], v[:, :, :4])
        return merge(left, attention_partial(q, k[:, :, 4:], v[:, :, 4:])).output

    np.testing.assert_allclose(halves(Q, K, V), attention(Q, K, V), atol=2e-6)
