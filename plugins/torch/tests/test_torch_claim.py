"""Every check of the profile basic as a test of its own, and the claim as the last one."""

from polydraft.conformance.vendor import Conformance


class TestTorch(Conformance):
    """The claim of the backend."""

    backend = "torch"
