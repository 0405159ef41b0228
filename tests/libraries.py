"""The libraries that corners are tested on: how NumPy arrays go there and come back."""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from optional import array_api_strict, far, near, torch

from polyattn._core.call.features import DTYPES
from polyattn._kernels import tiled
from polyattn._kernels.tiled import Tiled
from polyattn.conformance.cases.expression_cases import VARIANTS
from polyattn.masks import Mask


def to_torch(x):
    x = np.array(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def from_torch(x):
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


@dataclass(frozen=True)
class Library:
    """How a NumPy array goes to a library and comes back, bit for bit."""

    name: str
    to: Callable
    back: Callable
    dtypes: tuple[str, ...] = DTYPES

    def __str__(self):
        return self.name

    def call(self, function, case, poisoned=True, **more):
        """`function` of the case's arrays in this library."""
        arrays, options = case.arguments(poisoned)
        options = {
            name: self.to(x) if isinstance(x, np.ndarray) else x for name, x in options.items()
        }
        return function(*map(self.to, arrays), **options, **more)


NUMPY = Library("numpy", np.array, np.asarray)
TORCH = Library("torch", to_torch, from_torch)
FAR = Library("torch on a device", lambda x: far(to_torch(x)), lambda x: from_torch(near(x)))
# The standard has no 16-bit dtypes, and neither has its strict implementation.
STRICT = Library("strict", array_api_strict.asarray, np.asarray, ("float32", "float64"))
LIBRARIES = (NUMPY, TORCH, STRICT)
EVERYWHERE = (*LIBRARIES, FAR)

#: The masks of the conformance suite that are made of numbers and fit any lengths.
MASKS_OF_NUMBERS = {
    f"{name} of the suite": fields["mask"]
    for name, fields in VARIANTS.items()
    if fields.keys() == {"mask"} and isinstance(m := fields["mask"], Mask) and not m.carried()
}


def tiles_of(scores):
    """Return the tiled kernel with tiles of so few scores that short arrays have many."""
    kernel = Tiled()
    kernel.tile = scores
    return kernel


def visited_tiles(monkeypatch):
    """Return a list of the tiles that the tiled kernel computes: rows, columns, if masked."""
    visited, attend = [], tiled.attend

    def noted(problem, x, backend, query, rows, columns, **options):
        visited.append((rows, columns, options["masked"]))
        return attend(problem, x, backend, query, rows, columns, **options)

    monkeypatch.setattr(tiled, "attend", noted)
    return visited
