"""nvidia-cudnn-frontend and the cuDNN that it finds: whether they are here, and new enough."""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["first_line", "library", "versions", "why_no_library"]

# The frontend refuses gradients of 9.10.0 and 9.10.1 and windows of 9.14.0.
OLDEST_CUDNN = 91500
# 1.24 to 1.26 ask cuDNN for what it has not before 9.20; 1.28 is the oldest that was tried.
OLDEST_FRONTEND = (1, 28)


@functools.cache
def library() -> Any:
    """Return cuDNN's frontend, which finds cuDNN itself when it is imported."""
    import cudnn

    return cudnn


@functools.cache
def why_no_library() -> str | None:
    """Return why cuDNN cannot be called here, or None."""
    try:
        frontend, cudnn = library().__version__, library().backend_version()
    except ImportError:
        return 'nvidia-cudnn-frontend is not installed: pip install "polyattn[cupy-cudnn]"'
    except RuntimeError as error:  # it looks for symbols of a library that it has not found
        return f'cuDNN is not found: {first_line(error)}: pip install "polyattn[cupy-cudnn]"'
    if tuple(int(part) for part in frontend.split(".")[:2]) < OLDEST_FRONTEND:
        return f"nvidia-cudnn-frontend {frontend} is older than {_dotted(OLDEST_FRONTEND)}"
    if cudnn < OLDEST_CUDNN:
        return f"cuDNN {_version(cudnn)} is older than {_version(OLDEST_CUDNN)}"
    return None


def versions() -> dict[str, str]:
    """Return the versions of cuDNN and its frontend, as far as they are here."""
    found = {}
    try:
        found["cudnn-frontend"] = str(library().__version__)
        found["cudnn"] = _version(library().backend_version())
    except (ImportError, RuntimeError):
        pass
    return found


def _version(number: int) -> str:
    return _dotted((number // 10000, number // 100 % 100, number % 100))


def _dotted(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))


def first_line(error: BaseException) -> str:
    """Return what an error says, less its details."""
    return (str(error).strip().splitlines() or [repr(error)])[0]
