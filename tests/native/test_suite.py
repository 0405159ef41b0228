"""The conformance suite on the compiled kernel."""

from compiled_kernel import using

from polyattn.conformance.suite import BackendSuite


class TestNative(BackendSuite):
    """The kernel `native` on NumPy, beside which the suite has the backend without it."""

    backend = library = "numpy"
    test_import_hygiene = test_dtypes_are_kept = test_xfails_are_names_of_tests = None

    def pytest_generate_tests(self, metafunc):
        """Choose cases while the kernel is found."""
        with using(is_native=True):
            super().pytest_generate_tests(metafunc)

    def _params(self, test, fill, runs):
        return super()._params(test, fill, [run for run in runs if str(run[0]) == "native"])
