"""Import an optional library, or say how to install it."""

from __future__ import annotations

import importlib
from typing import Any


def require_matplotlib(module: str = "") -> Any:
    """Return matplotlib, or its submodule of this name."""
    name = f"matplotlib.{module}" if module else "matplotlib"
    return _imported(name, 'drawing needs matplotlib: pip install "polyattn[plot]"')


def require_onnx(module: str) -> Any:
    """Return one of the modules that write models of ONNX."""
    return _imported(module, 'exporting needs onnx, ndonnx and spox: pip install "polyattn[onnx]"')


def require_for_weights(module: str, package: str) -> Any:
    """Return a module that files of weights need."""
    return _imported(module, f"a file of these weights needs {package}: pip install {package}")


def _imported(module: str, otherwise: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{otherwise} ({error})") from error
