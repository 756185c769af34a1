"""Every check of the profile async as a test of its own, and the claim as the last one."""

from polydraft.conformance.vendor import Conformance


class TestOpenCL(Conformance):
    """The claim of the backend."""

    backend = "opencl"
    profile = "async"
    features = ("dense", "sampling")
