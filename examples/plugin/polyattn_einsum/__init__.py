"""Attention by numpy.einsum. Importing this must not import NumPy."""

from polyattn.plugin import BackendSpec

__all__ = ["SPEC"]

SPEC = BackendSpec(
    name="einsum",
    namespaces=("numpy",),
    implementation="polyattn_einsum.backend:EinsumBackend",
    requires=("numpy",),
    install="pip install polyattn-einsum",
    contract_version=5,
    dtypes=("float32", "float64"),
)
