"""The kit as pytest tests: one import and one name make a vendor's test file.

A vendor derives a class from `Conformance` and names the backend; pytest then collects one test per check, and a last one for the
claim. It needs pytest (the extra `conform`) and runs in pytest's own process.

    from polydraft.conformance.vendor import Conformance


    class TestMychip(Conformance):
        backend = "mychip"
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from polydraft.conformance.check import Check
from polydraft.conformance.outcomes import Result
from polydraft.conformance.report import Selection, make, with_causes
from polydraft.conformance.target import Target

CLAIM = "claim"
"""Id of the last test, which judges the others."""


class Conformance:
    """Base of a vendor's test class. Set `backend`, and whatever else differs from its default."""

    backend: ClassVar[str] = ""
    """Name of the backend, as after `--backend`."""
    profile: ClassVar[str] = "basic"
    """What is claimed: basic, graph, async or full."""
    features: ClassVar[tuple[str, ...]] = ()
    """For which features, as after `--feature`; () for whatever the backend has all of."""
    device: ClassVar[str] = ""
    """As after `--device`; "" for the default."""
    plugins: ClassVar[tuple[str, ...]] = ()
    """Files or modules, as after `--plugin`."""
    kernels: ClassVar[tuple[str, ...]] = ()
    """Kernel packs, as after `--kernels`."""
    seed: ClassVar[int] = 0
    """As after `--seed`; always the same unless you change it, so that a test says today what it said yesterday."""

    _target: ClassVar[Target | None] = None
    _results: ClassVar[dict[str, Result]]

    def __init_subclass__(cls) -> None:
        cls._target, cls._results = None, {}

    @classmethod
    def pytest_generate_tests(cls, metafunc: Any) -> None:
        """One test a check of the profile, then the claim."""
        if "check" in metafunc.fixturenames:
            checks: list[Check | None] = [*cls._selection().checks(), None]
            metafunc.parametrize("check", checks, ids=lambda check: CLAIM if check is None else check.id)

    def test_conformance(self, check: Check | None) -> None:
        """A check of the kit: what is not declared (`unsupported`) or cannot be seen (`unseen`) skips and says what that is, the
        rest passes or fails."""
        __tracebackhide__ = True
        if check is None:
            return self._judge()
        result = with_causes(check.result(self.target()), self.target())
        self._results[result.id] = result
        if result.outcome in ("unsupported", "unseen"):
            pytest.skip(result.message)
        if result.outcome != "pass":
            pytest.fail(f"{result.id}: {result.message}", pytrace=False)
        return None

    @classmethod
    def _selection(cls) -> Selection:
        return Selection(cls.profile, seed=cls.seed, features=cls.features)

    @classmethod
    def target(cls) -> Target:
        """The backend under test, loaded once a class."""
        if cls._target is None:
            wants = cls._selection().wants
            cls._target = Target(cls.backend, device=cls.device, files=cls.plugins, packs=cls.kernels, wants=wants)
        return cls._target

    def _judge(self) -> None:
        """The verdict over a whole run; all checks skipped, or every kernel delegated, is no success."""
        __tracebackhide__ = True
        wanted = {check.id for check in self._selection().checks()}
        if wanted - set(self._results):
            pytest.skip(f"{len(wanted - set(self._results))} checks were not run here; a claim needs all of them")
        report = make(self.target(), self._selection(), list(self._results.values()))
        if report.status:
            pytest.fail(report.content["verdict"]["sentence"], pytrace=False)
