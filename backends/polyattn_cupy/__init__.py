"""CuPy on CUDA. This module must not import CuPy."""

from polyattn.plugin import CONTRACT_VERSION, BackendSpec

SPEC = BackendSpec(
    name="cupy",
    namespaces=("cupy",),
    implementation="polyattn_cupy.backend:CupyBackend",
    requires=("cupy",),
    install='pip install "polyattn[cupy-cuda13x]", or cupy-cuda12x for a driver of CUDA 12',
    contract_version=CONTRACT_VERSION,
    devices=("cuda",),
)
