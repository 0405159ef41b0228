"""The command-line option of the suite that needs no code; brought by ``pytest -p``."""

from __future__ import annotations

import pytest

__all__ = ["BACKEND", "LIBRARY", "pytest_addoption", "pytest_report_header"]

BACKEND, LIBRARY = "--polyattn-backend", "--polyattn-library"


def pytest_report_header(config: pytest.Config) -> str:
    """Say which backend is checked."""
    library = config.getoption(LIBRARY)
    where = f" on arrays of {library}" if library else ""
    return f"polyattn backend: {config.getoption(BACKEND)}{where}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what says which backend to check, on which library's arrays."""
    group = parser.getgroup("polyattn", "conformance of a polyattn backend")
    group.addoption(BACKEND, metavar="NAME", default="numpy", help="the backend to check")
    group.addoption(
        LIBRARY, metavar="MODULE", help="whose arrays, such as jax.numpy (the backend's own)"
    )
