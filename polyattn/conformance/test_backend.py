"""Run the suite on the backend that the command line names (default: numpy)."""

from __future__ import annotations

import pytest

from polyattn.conformance.options import BACKEND, LIBRARY
from polyattn.conformance.suite import BackendSuite


class TestBackend(BackendSuite):
    """The backend of ``--polyattn-backend``."""

    backend = "numpy"

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Take backend and library from the command line."""
        cls = type(self)
        cls.backend = metafunc.config.getoption(BACKEND, "numpy")
        cls.library = metafunc.config.getoption(LIBRARY, None)
        super().pytest_generate_tests(metafunc)
