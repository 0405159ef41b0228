"""The exceptions that choosing a backend can raise.

Wrong arguments raise plain `TypeError` and `ValueError`. These three say that the call is right
but that what was asked for by name is not to be had, and carry the whole decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyattn.dispatch.explanation import Explanation

__all__ = ["BackendError", "BackendUnavailableError", "UnknownBackendError", "UnsupportedError"]


class BackendError(Exception):
    """Base of the three: no backend or kernel that was asked for can take the call.

    Attributes
    ----------
    explanation : Explanation or None
        Every candidate with its reasons, where it came to weighing them.
    """

    explanation: Explanation | None = None


class UnknownBackendError(BackendError, ValueError):
    """A name that no installed plugin has."""


class BackendUnavailableError(BackendError, ImportError):
    """Every backend asked for is known, and none can be loaded here."""


class UnsupportedError(BackendError, NotImplementedError):
    """Backends asked for are here, and none can do what the call needs."""
