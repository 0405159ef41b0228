"""The command-line option of the suite that needs no code; brought by ``pytest -p``."""

from __future__ import annotations

import pytest

__all__ = ["BACKEND", "LIBRARY", "pytest_addoption"]

BACKEND, LIBRARY = "--polyattn-backend", "--polyattn-library"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what says which backend to check, on which library's arrays."""
    group = parser.getgroup("polyattn", "conformance of a polyattn backend")
    group.addoption(BACKEND, metavar="NAME", default="numpy", help="the backend to check")
    group.addoption(
        LIBRARY, metavar="MODULE", help="whose arrays, such as jax.numpy (the backend's own)"
    )
