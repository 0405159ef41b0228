"""Dask arrays, by their chunks. This module must not import dask."""

from polyattn.plugin import CONTRACT_VERSION, BackendSpec

SPEC = BackendSpec(
    name="dask",
    namespaces=("dask",),
    implementation="polyattn_dask.backend:DaskBackend",
    requires=("dask",),
    install='pip install "dask[array]"',
    contract_version=CONTRACT_VERSION,
    accepts=("numpy", "cupy"),
)
