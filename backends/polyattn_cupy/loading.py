"""Load nvidia-cudnn-frontend and the cuDNN that it finds, and check their versions."""

from __future__ import annotations

import functools
from typing import Any

# The frontend refuses gradients of 9.10.0 and 9.10.1 and windows of 9.14.0.
OLDEST_CUDNN = 91500
# 1.24 to 1.26 need functions that cuDNN lacks before 9.20; 1.28 is the oldest tested version.
OLDEST_FRONTEND = (1, 28)


@functools.cache
def library() -> Any:
    """Return cuDNN's frontend, which loads cuDNN when it is imported."""
    import cudnn

    return cudnn


@functools.cache
def why_no_library() -> str | None:
    """Return why cuDNN cannot be used on this machine, or None."""
    try:
        frontend, cudnn = library().__version__, library().backend_version()
    except ImportError:
        return 'nvidia-cudnn-frontend is not installed: pip install "polyattn[cupy-cudnn]"'
    except RuntimeError as error:  # of symbols, where cuDNN is not loaded
        return f'cuDNN is not found: {first_line(error)}: pip install "polyattn[cupy-cudnn]"'
    if tuple(int(part) for part in frontend.split(".")[:2]) < OLDEST_FRONTEND:
        return f"nvidia-cudnn-frontend {frontend} is older than {_dotted(OLDEST_FRONTEND)}"
    if cudnn < OLDEST_CUDNN:
        return f"cuDNN {_version(cudnn)} is older than {_version(OLDEST_CUDNN)}"
    return None


def versions() -> dict[str, str]:
    """Return the versions of cuDNN and its frontend, those that are installed."""
    result = {}
    try:
        result["cudnn-frontend"] = str(library().__version__)
        result["cudnn"] = _version(library().backend_version())
    except (ImportError, RuntimeError):
        pass
    return result


def _version(number: int) -> str:
    return _dotted((number // 10000, number // 100 % 100, number % 100))


def _dotted(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [repr(error)])[0]
