"""The backend that was written from the tutorial on PyTorch: small, asynchronous, and what it claims it holds."""

from __future__ import annotations

from collections.abc import Iterator

import polydraft_torch
import pytest
import torch
from polydraft_torch.kernels import OWN

from polydraft.backend import DeviceOptions
from polydraft.conformance import conform
from polydraft.conformance.catalogue import every_check
from polydraft.conformance.faulty_backends import MUTANTS
from polydraft.conformance.pages import page
from polydraft.conformance.proof import matrix, prove
from polydraft.conformance.report import Selection
from polydraft.conformance.target import Target
from polydraft.errors import DeviceError
from tests.support.project import ROOT

PACKAGE = ROOT / "plugins" / "torch" / "polydraft_torch"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_it_is_small():
    lines = [line for file in PACKAGE.glob("*.py") for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(lines) <= 400


@pytest.mark.deep
def test_its_own_kernels_hold_and_so_do_its_device_and_its_order():
    """A selection that takes seconds: L0, L1, L2 of its own kernels, and of each further level what hits hardest."""
    target = Target(polydraft_torch)
    wanted = {"L5/greedy/K3-B3", "L4/overlap-1/arrivals", "L4/overlap-2/stop-in-flight", "L4/delayed-copies"}
    checks = [c for c in every_check() if c.level in ("L0", "L1") or c.kernel in OWN or c.id in wanted]
    results = [check.result(target) for check in checks]
    target.close()
    assert [(r.id, r.message) for r in results if r.outcome not in ("pass", "unsupported")] == []
    assert wanted <= {r.id for r in results if r.outcome == "pass"}
    assert {name for name, owner in target.owners.items() if owner == "own"} == set(OWN)
    assert set(target.owners.values()) == {"own", "delegated"}, "delegation in a thread is seen too"


@pytest.mark.deep
@pytest.mark.parametrize("selection", [Selection(), Selection(level="L4")], ids=["basic", "L4"])
def test_it_conforms(selection: Selection):
    report = conform(polydraft_torch, selection=selection)
    assert report.status == 0, page(report)


@pytest.mark.deep
def test_the_zoo_dies_around_it():
    proof = prove(polydraft_torch)
    assert proof.status == 0, matrix(proof)


def test_refills_are_seen_of_a_backend_that_keeps_the_arrays_it_is_given():
    """Its weights lie in the case's own arrays, which a refill overwrites: each compared with itself says nothing."""
    (trial,) = prove(polydraft_torch, mutants=[mutant for mutant in MUTANTS if mutant.id == "M280"], variants=()).trials
    assert (trial.unbroken, trial.broken) == ("pass", "fail"), trial
    assert "behind a second refill" in trial.message


def test_a_failed_launch_is_told_at_the_next_wait():
    device = Target(polydraft_torch).plugins.open_device("", DeviceOptions())
    device.enqueue(device.stream, lambda: 1 // 0)  # type: ignore[attr-defined]
    event = device.event()
    event.record(device.stream)
    with pytest.raises(DeviceError, match="a launch failed with ZeroDivisionError"):
        event.synchronize()
    device.synchronize()
    device.close()
    device.close()
    with pytest.raises(DeviceError, match="wanted 'cpu'"):
        polydraft_torch.polydraft_open_device("cuda")
