"""PyTorch on CPU, CUDA and MPS. This module must not import torch."""

from polyattn.plugin import CONTRACT_VERSION, BackendSpec

SPEC = BackendSpec(
    name="torch",
    namespaces=("torch",),
    implementation="polyattn_torch.backend:TorchBackend",
    requires=("torch",),
    install='pip install "polyattn[torch]"',
    contract_version=CONTRACT_VERSION,
    devices=("cpu", "cuda", "mps", "xpu", "meta"),
)
