"""The calls of other libraries beside our own: `polyattn.attention` on NumPy is the reference."""

import itertools

import numpy as np
from arrays import to_numpy
from optional import jnp, torch

from polyattn import attention_partial

B, H, G, D, E = 2, 4, 2, 16, 8
RNG = np.random.default_rng(0)
#: Tensors share the memory of the NumPy arrays: what is written to one is in the other.
TO = {"numpy": lambda x: x, "torch": torch.asarray, "jax": jnp.asarray}


def normal(*shape):
    return RNG.standard_normal(shape)


def moved(library, options):
    """Return options whose arrays are those of a library."""
    return {k: TO[library](x) if isinstance(x, np.ndarray) else x for k, x in options.items()}


def ours(q, k, v, **options):
    """Return attention of (..., L, H, D), and the logsumexp (..., H, L)."""
    arrays = map(to_numpy, (q, k, v))
    output, total = attention_partial(*arrays, layout="...LHD", backend="numpy", **options)
    return output, np.swapaxes(total, -1, -2)


def spans(ends):
    """Return the slice of each sequence between its ends."""
    return [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]


def turn(x, angles, interleaved=False):
    """Return (..., L, H, D) rotated by angles, (..., L, R), as complex numbers."""
    xp = torch if isinstance(x, torch.Tensor) else np
    half = angles.shape[-1]
    one, other = x[..., :half], x[..., half : 2 * half]
    if interleaved:
        one, other = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    turned = (one + 1j * other) * xp.exp(1j * angles)[..., None, :]
    pair = turned.real, turned.imag
    whole = xp.concat(pair, -1)
    if interleaved:
        whole = xp.stack(pair, -1).reshape(whole.shape)
    return xp.concat([whole, x[..., 2 * half :]], -1)
