"""Define the pytest options of the suite that needs no code; load them with ``pytest -p``."""

from __future__ import annotations

import pytest

BACKEND, LIBRARY = "--polyattn-backend", "--polyattn-library"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for the backend and the library of the arrays."""
    group = parser.getgroup("polyattn", "conformance of a polyattn backend")
    group.addoption(BACKEND, metavar="NAME", default="numpy", help="the backend to check")
    group.addoption(LIBRARY, metavar="MODULE", help="library of the arrays, such as jax.numpy")
