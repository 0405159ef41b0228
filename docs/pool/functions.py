"""Find the functions of the pool by name."""

import inspect
from types import ModuleType

import numpy as np
import torch

from pool import caches, formula, gradients, masking, steps, tiles

MODULES = (formula, masking, caches, tiles, gradients)
#: What the wrong functions are made of, and is right.
SHARED = {"with_lengths", "with_logsumexp", "with_rule", "moved", "first_keys", "online", "rounded"}
SHARED |= {"by_scores", "rule", *vars(steps)}
#: The right functions: every check must pass them.
CONTROLS = {"attend": steps.attend, "serve": steps.serve, "differentiated": gradients.attend}


def names(module: ModuleType) -> list[str]:
    """Return the wrong functions of a module, in order."""
    return [
        name
        for name, x in vars(module).items()
        if inspect.isfunction(x) and x.__module__ == module.__name__ and name not in SHARED
    ]


#: The wrong functions by name.
WRONG = {name: getattr(module, name) for module in MODULES for name in names(module)}


def to_torch(x):
    """Return an array of NumPy as a tensor that shares no memory with it."""
    x = np.asarray(x)
    narrow = x.dtype.name == "bfloat16"
    return torch.tensor(x.astype("float32")).bfloat16() if narrow else torch.tensor(x.copy())


def from_torch(x):
    """Return a tensor as an array of NumPy."""
    x = x.detach()
    if x.dtype != torch.bfloat16:
        return x.numpy()
    import ml_dtypes

    return x.float().numpy().astype(ml_dtypes.bfloat16)


def converters(function):
    """Return the functions that convert arrays of NumPy to the library of a function and back."""
    on_torch = function.__module__ == gradients.__name__
    return (to_torch, from_torch) if on_torch else (np.array, np.asarray)
