"""polyattn's plugin for MLX."""

from polyattn.plugin import BackendSpec

SPEC = BackendSpec(
    name="mlx",
    namespaces=("mlx",),
    implementation="polyattn_mlx.backend:MlxBackend",
    requires=("mlx",),
    install="pip install 'polyattn[mlx]', or mlx[cuda13] for CUDA",
    devices=("cpu", "gpu"),
)
