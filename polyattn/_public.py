"""The public names of `polyattn`, which has them when the first of them is used."""

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
from polyattn._dispatch.errors import (
    BackendError,
    BackendUnavailableError,
    UnknownBackendError,
    UnsupportedError,
)
from polyattn._dispatch.explanation import Explanation
from polyattn._dispatch.listing import list_backends
from polyattn._dispatch.request import use_backend

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
__dir__ = __all__.copy
