"""The conformance suite of polyattn, run on this plugin."""

from polyattn.conformance.suite import BackendSuite


class TestEinsum(BackendSuite):
    backend = "einsum"
