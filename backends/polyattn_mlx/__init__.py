"""polyattn's plugin for MLX."""

from polyattn.plugin import CONTRACT_VERSION, BackendSpec

SPEC = BackendSpec(
    name="mlx",
    namespaces=("mlx",),
    implementation="polyattn_mlx.backend:MlxBackend",
    requires=("mlx",),
    install='pip install "polyattn[mlx]", or mlx[cuda13] for CUDA',
    contract_version=CONTRACT_VERSION,
    devices=("cpu", "gpu"),
)
