"""Every check of the conformance kit as a test of its own, and the claim as the last one."""

from polydraft.conformance.vendor import Conformance


class TestTemplate(Conformance):
    """The claim of template; `profile = "graph"` raises it once graphs are there."""

    backend = "template"
