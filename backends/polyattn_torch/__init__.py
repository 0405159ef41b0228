"""PyTorch on CPU, CUDA and MPS. This module must not import torch."""

from polyattn.plugin import BackendSpec

SPEC = BackendSpec(
    name="torch",
    namespaces=("torch",),
    implementation="polyattn_torch.backend:TorchBackend",
    requires=("torch",),
    install='pip install "polyattn[torch]"',
    devices=("cpu", "cuda", "mps", "xpu", "meta"),
)
