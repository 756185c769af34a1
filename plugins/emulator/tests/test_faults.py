"""Faults: the operation that was named fails, the next wait says so once, and nothing that depended on it passes for done."""

import numpy as np
import pytest

from polydraft.errors import ConfigError, DeviceError
from polydraft_emulator import Emulator
from polydraft_emulator.options import POLICIES
from polydraft_emulator.testing import Log, open_device

each_policy = pytest.mark.parametrize("policy", POLICIES)


@each_policy
@pytest.mark.parametrize("seed", range(4))
def test_a_kernel_fails_where_it_was_told_to_in_every_schedule(policy: str, seed: int):
    device = open_device(f"policy={policy}&seed={seed}&fault=kernel@3")
    log, event = Log(device), device.event()
    for name in "abcde":
        log.issue(name)
    event.record(device.stream)
    with pytest.raises(DeviceError, match=rf"kernel 'c' failed on {device.spec}".replace("?", r"\?")):
        event.synchronize()
    assert log.ran == ["a", "b"], "the failed one did not run, and what followed is void"


def test_a_failure_is_silent_until_a_wait_and_is_said_once():
    device = open_device("policy=eager&fault=kernel@1")
    log, event = Log(device), device.event()
    log.issue("fails")
    log.issue("void, since the host does not know yet")
    event.record(device.stream)
    with pytest.raises(DeviceError, match=r"'fails' failed.*as fault=kernel@1 asks.*every step in flight is void"):
        device.synchronize()
    device.synchronize()
    assert log.ran == []
    log.issue("served")
    device.synchronize()
    assert log.ran == ["served"]
    with pytest.raises(DeviceError, match="marks work that an earlier failure has voided"):
        event.synchronize()
    with pytest.raises(DeviceError, match="voided"):
        event.query()
    with pytest.raises(DeviceError, match="voided"):
        device.stream.wait(event)
    event.record(device.stream)
    event.synchronize()


def test_any_wait_tells_even_one_for_something_older():
    device = open_device("policy=fifo&fault=kernel@2")
    log, older, younger = Log(device), device.event(), device.event()
    log.issue("a")
    older.record(device.stream)
    older.synchronize()
    log.issue("b")
    younger.record(device.stream)
    with pytest.raises(DeviceError, match="'b' failed"):
        younger.synchronize()
    older.synchronize()


@pytest.mark.parametrize(
    ("what", "kind", "name"),
    [
        ("copy@1", "upload", "b"),
        ("copy@2", "download", "b"),
        ("upload@1", "upload", "b"),
        ("download@1", "download", "b"),
        ("kernel@1", "kernel", "host function"),
        ("op@2", "kernel", "host function"),
        ("op@3", "download", "b"),
    ],
)
def test_operations_are_named_by_kind_and_counted_in_issue_order(what: str, kind: str, name: str):
    device = open_device(f"policy=lazy&fault={what}")
    buffer, staging = device.empty("b", (2,), "i32"), device.staging("s", (2,), "i32")
    staging.array[:] = 1
    device.upload(device.stream, buffer, staging, 2)
    device.enqueue(device.stream, lambda: None)
    device.download(device.stream, device.staging("back", (2,), "i32"), buffer, 2)
    with pytest.raises(DeviceError, match=f"{kind} '{name}' failed"):
        device.synchronize()


def test_what_a_failed_copy_writes_is_poisoned():
    device = open_device("policy=lazy&fault=upload@1,download@1")
    buffer, staging, back = device.empty("b", (2,), "i32"), device.staging("s", (2,), "i32"), device.staging("t", (2,), "i32")
    device.load(buffer, np.array([4, 5], np.int32))
    staging.array[:] = 1
    device.upload(device.stream, buffer, staging, 1)
    with pytest.raises(DeviceError, match="upload"):
        device.synchronize()
    assert device.read(buffer).tolist() == [np.frombuffer(b"\xa5" * 4, np.int32)[0], 5]
    device.download(device.stream, back, buffer, 2)
    with pytest.raises(DeviceError, match="download"):
        device.synchronize()
    assert (back.array < 0).all()


def test_out_of_memory_in_flight_is_said_at_the_wait_and_in_an_allocation_at_once():
    device = open_device("policy=lazy&fault=op@1:oom,alloc@2")
    device.empty("first", (1,), "i32")
    with pytest.raises(DeviceError, match="could not allocate 4 bytes for second"):
        device.empty("second", (1,), "i32")
    device.empty("third", (1,), "i32")
    device.enqueue(device.stream, lambda: None)
    with pytest.raises(DeviceError, match="ran out of memory"):
        device.synchronize()
    device.synchronize()


@each_policy
def test_a_lost_device_raises_at_every_call_from_then_on(policy: str):
    device = open_device(f"policy={policy}&fault=op@2:lost")
    log, event = Log(device), device.event()

    def step() -> None:
        for name in "abc":
            log.issue(name)
        event.record(device.stream)
        event.synchronize()

    with pytest.raises(DeviceError, match="lost the device"):
        step()
    for call in (device.synchronize, event.query, lambda: log.issue("d"), lambda: device.empty("b", (1,), "i32")):
        with pytest.raises(DeviceError, match=r"lost the device.*open a new engine"):
            call()
    assert log.ran == ["a"]


@each_policy
@pytest.mark.parametrize("seed", range(4))
def test_a_replay_fails_as_a_whole_or_in_one_of_its_launches(policy: str, seed: int):
    for fault, failing in (("replay@2", "a"), ("kernel@4", "b"), ("op@5", "a")):
        device = open_device(f"policy={policy}&seed={seed}&fault={fault}")
        log = Log(device)
        graph = log.capture("ab")
        graph.replay(device.stream)
        graph.replay(device.stream)
        with pytest.raises(DeviceError, match=f"'{failing}' failed"):
            device.synchronize()
        assert log.ran == (["a", "b", "a"] if failing == "b" else ["a", "b"])


def test_what_a_kernel_raises_is_a_failure_of_the_device_with_its_cause():
    device = open_device("policy=lazy")
    device.enqueue(device.stream, lambda: np.zeros(2)[5], "reads too far")
    with pytest.raises(DeviceError, match=r"'reads too far' failed.*IndexError: index 5 is out of bounds") as raised:
        device.synchronize()
    assert isinstance(raised.value.__cause__, IndexError)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("fault=copy", r"fault has 'copy', wanted <what>@<n>"),
        ("fault=copy@0", r"fault has 'copy@0'"),
        ("fault=copy@1:burn", r"fault has 'copy@1:burn', wanted <what>@<n>\[:fail\|oom\|lost\]"),
        ("fault=copies@1", r"fault names 'copies', wanted one of kernel, upload, .*alloc.*linear"),
        ("delay=copy@1:soon", r"delay has 'copy@1:soon'"),
        ("delay=alloc@1", r"delay names 'alloc'"),
    ],
)
def test_wrong_triggers_are_refused(query: str, said: str):
    with pytest.raises(ConfigError, match=said):
        open_device(query)


def test_contracts_can_be_named():
    assert Emulator("?fault=linear@3,residual_add+rms_norm@1:oom,forward_meta@2&delay=linear@1:40.5").options.fault
    open_device("fault=linear@3,residual_add+rms_norm@1:oom,forward_meta@2&delay=linear@1:40.5")
