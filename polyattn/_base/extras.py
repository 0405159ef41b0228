"""Import an optional library, or say how to install it."""

from __future__ import annotations

import importlib
from typing import Any


def require_matplotlib(module: str = "") -> Any:
    """Return matplotlib, or its submodule of this name."""
    try:
        return importlib.import_module(f"matplotlib.{module}" if module else "matplotlib")
    except ImportError as error:
        raise ImportError(
            f'drawing needs matplotlib: pip install "polyattn[plot]" ({error})'
        ) from error


def require_onnx(module: str) -> Any:
    """Return one of the modules that write models of ONNX."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f'exporting needs onnx, ndonnx and spox: pip install "polyattn[onnx]" ({error})'
        ) from error
