"""JAX on CPU, CUDA and TPU. This module must not import JAX."""

from polyattn.plugin import CONTRACT_VERSION, BackendSpec

SPEC = BackendSpec(
    name="jax",
    namespaces=("jax",),
    implementation="polyattn_jax.backend:JaxBackend",
    requires=("jax",),
    install='pip install "polyattn[jax]"',
    contract_version=CONTRACT_VERSION,
    devices=("cpu", "cuda", "rocm", "tpu", "metal"),
)
