"""Attention kernels for CPUs in C++, which join those of other backends."""

from polyattn.plugin import KernelSpec

SPEC = KernelSpec(
    name="native",
    kernels={"numpy": "polyattn_native.kernel:Native"},
    requires=("numpy",),
    install="pip install polyattn-native",
)
