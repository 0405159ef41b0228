"""Attention kernels for CPUs in C++, which join those of other backends."""

from polyattn.plugin import KernelSpec

SPEC = KernelSpec(
    name="native",
    kernels={
        "numpy": "polyattn_native.kernel:Native",
        "torch": "polyattn_native.on_torch:NativeOnTorch",
    },
    requires=("numpy",),
    install="pip install polyattn-native",
)
