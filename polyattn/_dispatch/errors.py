"""The exceptions raised if no requested backend or kernel can run a valid call.

Wrong arguments raise plain `TypeError` and `ValueError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyattn._dispatch.explanation import Explanation


class BackendError(Exception):
    """Base class: no requested backend or kernel can run the call.

    Attributes
    ----------
    explanation : Explanation or None
        Every candidate with the reasons against it; None if no candidate was examined.
    """

    explanation: Explanation | None = None


class UnknownBackendError(BackendError, ValueError):
    """No installed plugin has a backend of this name."""


class BackendUnavailableError(BackendError, ImportError):
    """Every requested backend is known, but none can be loaded on this machine."""


class UnsupportedError(BackendError, NotImplementedError):
    """Requested backends are available, but none supports the call."""
