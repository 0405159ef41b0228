"""JAX on CUDA: the suite, cuDNN through jax.nn, and no traffic with the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyattn import attention, explain
from polyattn.conformance.suite import BackendSuite

if not any(device.platform == "gpu" for device in jax.local_devices()):
    pytest.skip("no CUDA device that JAX can use", allow_module_level=True)

RNG = np.random.default_rng(0)
SHAPES = (2, 8, 256, 64), (2, 2, 256, 64), (2, 2, 256, 64)
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal window": {"is_causal": True, "window": (31, 0)},
    "mask": {"mask": RNG.random((256, 256)) > 0.5},
    "rows that see nothing": {"mask": np.arange(256)[:, None] > 3},
}


class TestJaxOnCuda(BackendSuite):
    backend = "jax:cuda"
    thorough = False


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_cudnn_comes_first_where_it_is_right(dtype, options):
    arrays = [jnp.asarray(RNG.standard_normal(shape), dtype) for shape in SHAPES]
    options = {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    kernel = "xla" if "mask" in options and dtype == "float16" else "cudnn"
    assert explain(*arrays, **options).chosen.kernel == kernel


@pytest.mark.parametrize("kernel", ["cudnn", "xla"])
def test_nothing_goes_to_or_from_the_host(kernel):
    arrays = [jnp.asarray(RNG.standard_normal(shape), "bfloat16") for shape in SHAPES]
    attention(*arrays, is_causal=True, kernel=kernel)
    with jax.transfer_guard("disallow"):
        output = attention(*arrays, is_causal=True, kernel=kernel)
    assert output.devices() == arrays[0].devices()
