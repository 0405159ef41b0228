"""Run polyattn's own test suite on this plugin."""

from polyattn.conformance.suite import BackendSuite


class TestEinsum(BackendSuite):
    backend = "einsum"
