"""polyattn's plugin for MLX."""

from polyattn.plugin import BackendSpec

SPEC = BackendSpec(
    name="mlx",
    namespaces=("mlx",),
    implementation="polyattn_mlx.backend:MlxBackend",
    requires=("mlx",),
    install="pip install mlx, or mlx[cpu] or mlx[cuda13] on Linux",
    devices=("cpu", "gpu"),
)
