"""NumPy on the CPU. This module must not import NumPy."""

from polyattn.plugin import CONTRACT_VERSION, BackendSpec

SPEC = BackendSpec(
    name="numpy",
    namespaces=("numpy",),
    implementation="polyattn_numpy.backend:NumpyBackend",
    requires=("numpy",),
    install="pip install polyattn",
    contract_version=CONTRACT_VERSION,
)
