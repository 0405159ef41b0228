"""Libraries without a plugin: the core's own kernels serve them unchanged, traced and lazy too."""

import numpy as np
import pytest
from optional import array_api_strict, da, jax, jnp

from polyattn import attention, attention_partial, explain, merge

RNG = np.random.default_rng(0)
Q = RNG.standard_normal((2, 4, 6, 8), dtype=np.float32)
K = RNG.standard_normal((2, 2, 9, 8), dtype=np.float32)
V = RNG.standard_normal((2, 2, 9, 5), dtype=np.float32)

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "rows without keys": {"is_causal": True, "query_offset": -3},
    "window": {"window": (2, 1), "softcap": 2.0, "scale": 0.5},
    "functions": {
        "mask": lambda b, h, i, j: (i + j + h + b) % 3 != 0,
        "score_mod": lambda s, b, h, i, j: s * s * 0.3 - s,
    },
    "arrays": {
        "mask": RNG.random((2, 1, 6, 9)) > 0.3,
        "bias": RNG.standard_normal((4, 6, 9), dtype=np.float32),
        "sinks": RNG.standard_normal(4, dtype=np.float32),
        "query_offset": np.array([1, 3]),
        "is_causal": True,
    },
}


def as_library(asarray, options):
    return {k: asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}


@pytest.fixture(params=["dense", "tiled"])
def kernel(request):
    return request.param


@pytest.fixture(params=["2024.12", "2025.12"])
def strictest(request):
    version = request.param
    array_api_strict.set_array_api_strict_flags(
        boolean_indexing=False,
        data_dependent_shapes=False,
        enabled_extensions=(),
        api_version=version,
    )
    yield
    array_api_strict.reset_array_api_strict_flags()


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("device", ["CPU_DEVICE", "device1"])
@pytest.mark.usefixtures("strictest")
def test_array_api_strict(case, device, kernel):
    def asarray(x):
        return array_api_strict.asarray(x, device=array_api_strict.Device(device))

    expected = attention_partial(Q, K, V, **OPTIONS[case])
    options = as_library(asarray, OPTIONS[case])
    output, logsumexp = attention_partial(*map(asarray, (Q, K, V)), kernel=kernel, **options)
    assert output.device == logsumexp.device == array_api_strict.Device(device)
    for mine, theirs in ((output, expected.output), (logsumexp, expected.logsumexp)):
        on_host = np.asarray(mine.to_device(array_api_strict.Device("CPU_DEVICE")))
        np.testing.assert_allclose(on_host, theirs, atol=2e-6)


@pytest.mark.slow
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


def test_the_default_of_each_library_is_its_own():
    own = {jnp.asarray: ("jax", "xla"), da.from_array: ("dask", "chunked")}
    for asarray in (array_api_strict.asarray, jnp.asarray, da.from_array):
        chosen = explain(*map(asarray, (Q, K, V))).chosen
        assert (chosen.backend, chosen.kernel) == own.get(asarray, ("array-api", "dense"))


def test_merge_of_jax_under_jit():
    @jax.jit
    def halves(q, k, v):
        left = attention_partial(q, k[:, :, :4], v[:, :, :4])
        return merge(left, attention_partial(q, k[:, :, 4:], v[:, :, 4:])).output

    np.testing.assert_allclose(halves(Q, K, V), attention(Q, K, V), atol=2e-6)
