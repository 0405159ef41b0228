"""JAX on CPU, CUDA and TPU. Importing this must not import JAX."""

from polyattn.plugin import BackendSpec

__all__ = ["SPEC"]

SPEC = BackendSpec(
    name="jax",
    namespaces=("jax",),
    implementation="polyattn_jax.backend:JaxBackend",
    requires=("jax",),
    install='pip install "polyattn[jax]"',
    devices=("cpu", "cuda", "rocm", "tpu", "metal"),
)
