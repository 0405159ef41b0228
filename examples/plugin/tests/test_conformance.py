"""What attention means, held against this plugin: polyattn's own suite."""

from polyattn.conformance.suite import BackendSuite


class TestEinsum(BackendSuite):
    backend = "einsum"
