"""Import an optional library, or say how to install it."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["require_matplotlib"]


def require_matplotlib(module: str = "") -> Any:
    """Return matplotlib, or its submodule of this name."""
    try:
        return importlib.import_module(f"matplotlib.{module}" if module else "matplotlib")
    except ImportError as error:
        raise ImportError(
            f'drawing needs matplotlib: pip install "polyattn[plot]" ({error})'
        ) from error
