"""Attention for every array library: one function, one written meaning, backends by name."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from polyattn import masks, scores
from polyattn._api.attention import attention
from polyattn._api.explain import explain
from polyattn._api.gradients import attention_backward, attention_jvp, attention_vjp
from polyattn._api.partial import Partial, attention_partial, merge
from polyattn._api.top_keys import top_keys
from polyattn._api.weights import TopWeights, attention_weights
from polyattn._base.progress import show_progress
from polyattn._base.same_bits import same_bits
from polyattn._base.threads import use_threads
from polyattn._core.call.gradients import Gradients
from polyattn._core.expressions.expression import RENDERERS
from polyattn._dispatch.errors import (
    BackendError,
    BackendUnavailableError,
    UnknownBackendError,
    UnsupportedError,
)
from polyattn._dispatch.explanation import Explanation
from polyattn._dispatch.listing import list_backends
from polyattn._dispatch.request import use_backend

__version__: str  # of the last tag, which the installed metadata has

__all__ = [
    "BackendError",
    "BackendUnavailableError",
    "Explanation",
    "Gradients",
    "Partial",
    "TopWeights",
    "UnknownBackendError",
    "UnsupportedError",
    "attention",
    "attention_backward",
    "attention_jvp",
    "attention_partial",
    "attention_vjp",
    "attention_weights",
    "explain",
    "list_backends",
    "masks",
    "merge",
    "same_bits",
    "scores",
    "show_progress",
    "top_keys",
    "use_backend",
    "use_threads",
]

_LATER = ("conformance", "dialects", "export", "nn", "parallel", "plot")


def __dir__() -> list[str]:
    return [*__all__, *_LATER, "__version__"]


def _renderer(module: str, name: str) -> Callable[..., Any]:
    """Return a function that draws, whose module is imported when it is first called."""

    def draw(*args: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **options)

    return draw


RENDERERS.update(
    figure=_renderer("polyattn.plot.mask_picture", "mask"),
    html=_renderer("polyattn.plot.svg", "as_html"),
)


def __getattr__(name: str) -> ModuleType:
    """Import a part that attention does not need, when it is first used."""
    if name == "__version__":
        found: ModuleType = importlib.import_module("importlib.metadata").version("polyattn")
        return found
    if name in _LATER:
        return importlib.import_module(f"polyattn.{name}")
    raise AttributeError(f"module 'polyattn' has no attribute {name!r}")
