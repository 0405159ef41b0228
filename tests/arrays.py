"""Arrays for tests: drawn in each library, compared, and attention by the textbook's formula."""

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


def draw(*shapes, to=np.asarray, dtype="float32", seed=0):
    """Return an array of normal numbers for each shape, the same ones each time."""
    rng = np.random.default_rng(seed)
    return [to(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


def close(actual, expected, roundings=40):
    """Compare arrays of any library, or tuples of them, to some roundings of the largest number."""
    if isinstance(actual, tuple | list):
        for pair in zip(actual, expected, strict=True):
            close(*pair, roundings)
        return
    actual, expected = to_numpy(actual), to_numpy(expected)
    assert actual.shape == expected.shape
    epsilon = float(ml_dtypes.finfo(actual.dtype).eps)
    largest = np.abs(expected[np.isfinite(expected)], dtype="float64").max(initial=1.0)
    actual, expected = actual.astype("float64"), expected.astype("float64")
    np.testing.assert_allclose(actual, expected, rtol=0, atol=roundings * epsilon * largest)


def formula(query, key, value, *, scale=None, softcap=0.0, bias=0.0, mask=True):
    """Return output and logsumexp in float64, by the textbook; a row without keys has zeros."""
    query, key, value = (to_numpy(x).astype("float64") for x in (query, key, value))
    group = query.shape[-3] // key.shape[-3]
    key, value = (np.repeat(x, group, axis=-3) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ np.swapaxes(key, -1, -2) * scale
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    scores = np.where(to_numpy(mask), scores + to_numpy(bias), -np.inf)
    largest = np.nan_to_num(scores.max(-1, keepdims=True, initial=-np.inf), neginf=0)
    weights = np.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        logsumexp = np.log(total) + largest
    return weights @ value / np.where(total == 0, 1, total), logsumexp[..., 0]


def to_numpy(x):
    """Return an array of any library, on any device, as one of NumPy."""
    if torch and isinstance(x, torch.Tensor):
        return from_torch(x.detach().cpu())
    return np.asarray(x)


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
