"""The backend in OpenCL C: small, in memory that the host cannot see, and what it claims it holds."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from itertools import count
from typing import Any

import numpy as np
import polydraft_opencl
import pytest

from polydraft import LLM, SamplingParams
from polydraft.conformance import conform
from polydraft.conformance.catalogue import every_check
from polydraft.conformance.pages import page
from polydraft.conformance.proof import matrix, prove
from polydraft.conformance.report import Selection
from polydraft.conformance.target import Target
from polydraft.contracts.kernels.residual_add import ResidualAddV1
from polydraft.errors import DeviceError
from tests.support.project import ROOT

cl = pytest.importorskip("pyopencl", reason="pyopencl is not installed, see plugins/opencl/README.md")
device_module = pytest.importorskip("polydraft_opencl.device")

PACKAGE = ROOT / "plugins" / "opencl" / "polydraft_opencl"
FEATURES = ("dense", "sampling")
OF_ORDER = {
    "L5/greedy/K3-B3", "L5/sampled/0", "L4/overlap-1/arrivals", "L4/overlap-2/stop-in-flight", "L4/launch-returns/linear",
    "L4/copies-return",
}  # fmt: skip
FILES = () if "opencl" in {found.name for found in entry_points(group="polydraft.backends")} else ("polydraft_opencl",)
"""What `--plugin` has to name."""


def first_that_works() -> tuple[str, str]:
    """The first device whose implementation compiles the kernels on this machine; or "", and what all of them said."""
    said: list[str] = []
    for index in count():
        try:
            device_module.compiled(index)
        except DeviceError as error:
            said.append(str(error))
            if "does not compile" not in said[-1]:
                return "", ". ".join(said)
        else:
            return f"opencl:{index}", ""
    raise AssertionError


DEVICE, SAID = first_that_works()
needs_device = pytest.mark.skipif(
    not DEVICE,
    reason=f"no implementation of OpenCL works on this machine; Debian's pocl-opencl-icd may. What was tried: {SAID[:500]}",
)


@pytest.fixture
def device() -> Iterator[Any]:
    opened = polydraft_opencl.polydraft_open_device(DEVICE)
    yield opened
    opened.close()


def test_it_is_small():
    files = [*PACKAGE.glob("*.py"), *PACKAGE.glob("*.cl")]
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 900


@needs_device
@pytest.mark.deep
def test_its_kernels_hold_and_so_do_its_device_and_its_order():
    """A selection that takes seconds: L0, L1, part of L2, and of each further level what hits hardest."""
    target = Target(polydraft_opencl, device=DEVICE)
    checks = [
        c for c in every_check() if c.level in ("L0", "L1") or c.id in OF_ORDER or c.id.endswith(("/seeds", "/guard-bands"))
    ]
    results = [check.result(target) for check in checks]
    target.close()
    assert [(r.id, r.message) for r in results if r.outcome not in ("pass", "unsupported")] == []
    assert {r.id for r in results if r.outcome == "pass"} >= OF_ORDER
    assert {name for name, owner in target.owners.items() if owner == "own"} == set(polydraft_opencl.CONTRACTS)


@needs_device
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_its_text_is_the_references(num_drafts: int):
    def text(**backend: Any) -> str:
        llm = LLM(draft_tokens=num_drafts, max_num_seqs=2, **backend)
        return llm.generate("def fibonacci(n):", SamplingParams(max_new_tokens=16))[0].text

    assert text(backend="opencl", plugins=FILES, device=DEVICE, overlap=1) == text(backend="reference")


@needs_device
def test_nothing_waits_for_a_queue_that_is_held(device: Any):
    """A launch, copies both ways and an event are enqueued while the queue waits for the host, and run when it lets go."""
    from polydraft_opencl.kernels import OpenCLTable

    record = ResidualAddV1(x=device.empty("x", (4, 3), "f32"), y=device.empty("y", (4, 3), "f32"))
    launch = OpenCLTable(device).providers["residual_add"].bind(record, None, None)  # type: ignore[arg-type]
    up, down = device.staging("up", (4, 3), "f32"), device.staging("down", (4, 3), "f32")
    up.array[...], down.array[...] = 3.0, -1.0
    gate, event = cl.UserEvent(device.context), device.event()
    cl.enqueue_barrier(device.stream.queue, wait_for=[gate])
    device.upload(device.stream, record.x, up, 4)
    device.upload(device.stream, record.y, up, 4)
    launch(device.stream, 4)
    device.download(device.stream, down, record.x, 4)
    event.record(device.stream)
    assert not event.query()
    assert (down.array == -1.0).all()
    gate.set_status(cl.command_execution_status.COMPLETE)
    event.synchronize()
    assert event.query()
    assert (down.array == 6.0).all()
    assert (device.counters.launches, device.counters.uploads, device.counters.bytes_downloaded) == (1, 2, 48)


@needs_device
def test_a_failure_is_told_at_the_next_wait(device: Any):
    """The event stands for one of a launch that failed; that of the host may be made to fail, too."""
    event = device.event()
    event.marker = cl.UserEvent(device.context)
    event.marker.set_status(-5)
    assert event.query(), "a failure is an end, nobody may wait for ever"
    with pytest.raises(DeviceError, match="a launch or copy failed"):
        event.synchronize()


@needs_device
def test_what_cannot_be_is_refused(device: Any):
    with pytest.raises(DeviceError, match=r"wanted opencl:<index>"):
        polydraft_opencl.polydraft_open_device("cpu")
    with pytest.raises(DeviceError, match=r"device is 'opencl:4096', there are: opencl:0 "):
        polydraft_opencl.polydraft_open_device("opencl:4096")
    with pytest.raises(DeviceError, match=r"x of \d+ bytes is not to be had; lower --num-blocks"):
        device.empty("x", (1 << 45,), "u8")
    with pytest.raises(DeviceError, match=r"wanted \(4, 3\)"):
        device.load(device.empty("x", (4, 3), "f32"), np.zeros((3, 4), np.float32))
    device.close()
    with pytest.raises(DeviceError, match="the device is closed"):
        device.empty("x", (4, 3), "f32")


@pytest.mark.deep
@needs_device
def test_it_conforms():
    report = conform(polydraft_opencl, device=DEVICE, selection=Selection(profile="async", features=FEATURES))
    assert report.status == 0, page(report)


@pytest.mark.deep
@needs_device
def test_the_zoo_dies_around_it():
    """In children: an implementation that aborts takes nobody along."""
    proof = prove("opencl", files=FILES, device=DEVICE, limit_s=120)
    assert proof.status == 0, matrix(proof)
