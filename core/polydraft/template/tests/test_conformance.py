"""Every check of the conformance kit as a test of its own, and the claim as the last one."""

from polydraft.conformance.vendor import Conformance


class TestMychip(Conformance):
    """The claim of mychip; `profile = "graph"` raises it once graphs are there."""

    backend = "mychip"
