"""Products of matrices in a block of `same_bits`, by a kernel for the arrays' library."""

from __future__ import annotations

from functools import cache

from polyattn._base.arrays import Array, facts_of, library_of
from polyattn._base.tracing import is_compiling
from polyattn._dispatch import extensions, registry
from polyattn._dispatch.errors import UnsupportedError
from polyattn.plugin import Kernel


def multiply(x: Array, weight: Array, bias: Array | None) -> Array:
    """Return x · weight + bias by the first kernel that keeps the bits of each row, or raise."""
    for kernel in () if is_compiling() else _kernels_for(library_of(x).name):
        found = kernel.multiply(x, weight, bias)
        if found is not None:
            return found
    given = ", ".join(str(facts_of(one)) for one in (x, weight, bias) if one is not None)
    raise UnsupportedError(
        "in same_bits(), a map of polyattn.nn needs polyattn-native, and float32 or float64 arrays"
        " of NumPy, or of torch on the CPU, of one dtype, outside of torch.compile and torch.func;"
        f" got {given} of {library_of(x).name} {facts_of(x).device}: cast the model, or call it"
        " outside of same_bits()"
    )


@cache
def _kernels_for(library: str) -> tuple[Kernel, ...]:
    """Return the kernels that may run unnamed on arrays of a library: a process finds them once."""
    for name in registry.serving(library):
        if registry.load(name) is None:
            held = dict(extensions.withheld(name))
            kernels = registry.kernels_of(registry.loaded(name))
            return tuple([kernel for kernel in kernels if kernel.name not in held])
    return ()
