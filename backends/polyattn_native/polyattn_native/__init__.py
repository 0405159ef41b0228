"""Attention kernels for CPUs in C++, which join those of other backends."""

from polyattn.plugin import KernelSpec

SPEC = KernelSpec(
    name="native",
    kernels={
        "numpy": "polyattn_native.kernel:Native",
        "torch": "polyattn_native.on_torch:NativeOnTorch",
        "jax": "polyattn_native.on_jax:NativeOnJax",
    },
    requires=("numpy",),
    install="pip install polyattn-native",
    contract_version=5,
    before={"jax": "xla"},
)
