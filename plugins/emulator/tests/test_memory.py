"""Device memory: unreadable for the host, poisoned until it is written, and written only as a contract says."""

from typing import Any

import numpy as np
import pytest

from polydraft.backend import CacheSpec, PassBuffers
from polydraft.contracts.base import Limits
from polydraft.contracts.composite import CompositeArgs
from polydraft.contracts.kernels.argmax import ArgmaxV1
from polydraft.contracts.kernels.rms_norm import RmsNormV1
from polydraft.contracts.kernels.scatter import ScatterV1
from polydraft.device import Array
from polydraft.errors import ContractError, DeviceError, GraphBufferError
from polydraft_emulator import Emulator
from polydraft_emulator.device import EmulatorDevice
from polydraft_emulator.kernels import EmulatorProvider, EmulatorTable
from polydraft_emulator.memory import EmulatorBuffer
from polydraft_emulator.testing import open_device

POISONED = np.frombuffer(b"\xa5" * 4, np.int32)[0]
LIMITS = Limits(
    max_seqs=4, num_drafts=3, max_rows=8, max_logit_rows=8, max_len=32, block_size=4, num_blocks=8, max_blocks=8,
    max_stop_tokens=2, vocab_size=16,
)  # fmt: skip
SPEC = CacheSpec(num_blocks=8, block_size=4, num_kv_heads=2, head_dim=3, dtype="f32")


def filled(device: EmulatorDevice, name: str, value: Array, dtype: str = "i32") -> EmulatorBuffer:
    buffer = device.empty(name, value.shape, dtype)
    device.load(buffer, value)
    return buffer


# -- what the host sees -------------------------------------------------------------------------------------


def test_the_host_cannot_look_into_device_memory():
    device = open_device()
    buffer, table = device.empty("state.tokens", (4, 2), "i32"), EmulatorTable(device)
    weight, cache = table.prepare_weight("linear", np.ones((2, 2)), "f32"), table.allocate_cache(SPEC)
    for look in (lambda: buffer.host_array, weight.open, lambda: cache.kv):
        with pytest.raises(DeviceError, match="which it cannot read"):
            look()
    with pytest.raises(DeviceError, match=r"state\.tokens"):
        np.asarray(buffer.host_array)


def test_running_work_may_look_and_the_host_not_after_it():
    device, seen = open_device("policy=lazy"), []
    buffer = filled(device, "b", np.arange(3, dtype=np.int32))
    device.enqueue(device.stream, lambda: seen.append(buffer.host_array.copy()))
    device.synchronize()
    assert seen[0].tolist() == [0, 1, 2]
    with pytest.raises(DeviceError, match="cannot read"):
        buffer.host_array.copy()


def test_the_host_may_not_look_after_work_that_failed_either():
    device = open_device("policy=lazy&fault=kernel@1")
    buffer = device.empty("b", (3,), "i32")
    device.enqueue(device.stream, lambda: None)
    with pytest.raises(DeviceError, match="failed"):
        device.synchronize()
    with pytest.raises(DeviceError, match="cannot read"):
        buffer.host_array.copy()


def test_a_buffer_cannot_be_given_another_array():
    buffer = open_device().empty("step.ids", (3,), "i32")
    with pytest.raises(GraphBufferError, match=r"step\.ids cannot be given another array"):
        buffer.host_array = np.zeros(3, np.int32)
    for name in ("shape", "dtype", "name"):
        assert getattr(buffer, name)


# -- poison -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "poisoned"), [("i32", lambda a: (a == POISONED).all()), ("f32", lambda a: np.isnan(a).all())])
def test_fresh_memory_is_poisoned(dtype: str, poisoned: Any):
    device = open_device()
    assert poisoned(device.read(device.empty("b", (5, 2), dtype)))
    assert poisoned(device.staging("s", (5, 2), dtype).array)


def test_a_download_poisons_its_staging_until_it_has_run():
    device = open_device("policy=lazy")
    buffer = filled(device, "b", np.arange(4, dtype=np.int32))
    staging, event = device.staging("s", (6,), "i32"), device.event()
    staging.array[:] = 7
    device.download(device.stream, staging, buffer, 3)
    assert (staging.array == POISONED).all(), "what was there before must not pass for the copy"
    event.record(device.stream)
    event.synchronize()
    assert staging.array[:3].tolist() == [0, 1, 2]
    assert (staging.array[3:] == POISONED).all()


def test_an_upload_reads_its_staging_when_it_runs():
    device = open_device("policy=lazy")
    buffer, staging = device.empty("b", (2,), "i32"), device.staging("s", (2,), "i32")
    staging.array[:] = 1, 2
    device.upload(device.stream, buffer, staging, 2)
    staging.array[1] = 9
    assert device.read(buffer).tolist() == [1, 9]


def test_freed_memory_is_poisoned_and_refuses_new_work():
    device, seen = open_device("policy=lazy"), []
    buffer = filled(device, "old", np.zeros(3, np.int32))
    staging = device.staging("s", (3,), "i32")
    device.download(device.stream, staging, buffer, 3)
    device.free(buffer)
    device.synchronize()
    assert (staging.array == POISONED).all()
    with pytest.raises(DeviceError, match="old was freed"):
        device.upload(device.stream, buffer, staging, 3)
    device.enqueue(device.stream, lambda: seen.append(buffer.host_array))
    with pytest.raises(DeviceError, match="old was freed"):
        device.synchronize()


def test_memory_that_moved_leaves_poison_behind():
    device = open_device("policy=lazy")
    buffer, staging = filled(device, "b", np.arange(3, dtype=np.int32)), device.staging("s", (3,), "i32")
    before = buffer.address
    device.download(device.stream, staging, buffer, 3)
    device.move(buffer)
    assert buffer.address != before
    device.synchronize()
    assert (staging.array == POISONED).all(), "the copy was bound to the old address"
    assert device.read(buffer).tolist() == [0, 1, 2]


def test_a_closed_device_refuses_everything():
    device = open_device()
    buffer, staging, event = device.empty("b", (2,), "i32"), device.staging("s", (2,), "i32"), device.event()
    event.record(device.stream)
    device.close()
    calls = (
        lambda: device.empty("c", (1,), "i32"),
        lambda: device.staging("c", (1,), "i32"),
        lambda: device.load(buffer, np.zeros(2, np.int32)),
        lambda: device.upload(device.stream, buffer, staging, 1),
        lambda: event.record(device.stream),
        lambda: device.stream.wait(event),
        event.query,
        event.synchronize,
        device.synchronize,
    )
    for call in calls:
        with pytest.raises(DeviceError, match=r"closed|freed"):
            call()
    device.close()


# -- sizes and owners ---------------------------------------------------------------------------------------


def test_copies_and_loads_that_do_not_fit_are_refused():
    device, other = open_device(), open_device()
    buffer, staging = device.empty("b", (2,), "i32"), device.staging("s", (4,), "i32")
    with pytest.raises(DeviceError, match="3 rows does not fit buffer b, which has 2"):
        device.upload(device.stream, buffer, staging, 3)
    with pytest.raises(DeviceError, match=r"shape \(2,\), got a value of shape \(3,\)"):
        device.load(buffer, np.zeros(3, np.int32))
    with pytest.raises(DeviceError, match="'b' is no memory of device"):
        other.download(other.stream, staging, buffer, 1)


def test_capacity_is_kept_and_peak_is_told():
    device = open_device("memory=1")
    device.empty("half", (128, 1024), "f32")
    with pytest.raises(DeviceError, match=r"could not allocate 525,312 bytes for more, free: 524,288 bytes; lower --num-blocks"):
        device.empty("more", (513, 256), "f32")
    device.empty("rest", (128, 1024), "f32")
    assert device.memory() == 1 << 20
    assert device.counters.allocations == 2
    with pytest.raises(DeviceError, match="could not allocate"):
        EmulatorTable(device).prepare_weight("norm", np.ones(1), "f32")


def test_load_under_work_in_flight_is_an_error():
    device = open_device("policy=lazy")
    buffer, staging = filled(device, "b", np.zeros(2, np.int32)), device.staging("s", (2,), "i32")
    device.download(device.stream, staging, buffer, 2)
    with pytest.raises(DeviceError, match="b was overwritten from the host while work in flight uses it"):
        device.load(buffer, np.ones(2, np.int32))
    device.synchronize()
    device.load(buffer, np.ones(2, np.int32))
    assert staging.array.tolist() == [0, 0]


# -- kernels ------------------------------------------------------------------------------------------------


def bind(device: EmulatorDevice, name: str, args: Any) -> Any:
    return EmulatorTable(device).providers[name].bind(args, LIMITS, None)


def test_a_kernel_that_writes_an_input_fails_at_the_next_wait():
    device = open_device("policy=lazy")
    tokens, runs = device.empty("tokens", (2, 4), "i32"), filled(device, "runs", np.zeros((1, 5), np.int32))
    payload = filled(device, "payload", np.zeros(1, np.int32))

    def vandal(a: Any, limits: Limits) -> Any:
        del limits
        return a.runs.fill  # with the launch length

    provider: Any = device.bind_kernel(vandal)
    provider.bind(ScatterV1(runs=runs, payload=payload, columns=(tokens,)), LIMITS, None)(device.stream, 1)
    with pytest.raises(DeviceError, match=r"'scatter' failed on emulator:0\?policy=lazy \(ValueError: .*read-only"):
        device.synchronize()


def test_outputs_are_poisoned_below_the_launch_length_before_a_kernel_runs():
    device = open_device("policy=lazy")
    logits, slots = filled(device, "logits", np.zeros((4, 3), np.float32), "f32"), filled(device, "slots", np.zeros(4, np.int32))
    tokens = filled(device, "tokens", np.arange(4, dtype=np.int32))
    provider: Any = device.bind_kernel(lambda a, limits: lambda n: None)
    provider.bind(ArgmaxV1(logits=logits, row_slot=slots, tokens=tokens), LIMITS, None)(device.stream, 3)
    assert device.read(tokens).tolist() == [POISONED, POISONED, POISONED, 3]


def test_in_place_arguments_keep_what_they_hold():
    device = open_device("policy=lazy")
    tokens = filled(device, "tokens", np.zeros((2, 3), np.int32))
    biases = filled(device, "biases", np.zeros(2, np.float32), "f32")
    runs = filled(device, "runs", np.array([[0, 1, 2, 1, 1], [1, 0, 0, 1, 0]], np.int32))
    payload = filled(device, "payload", np.array([0x3FC00000, 8], np.int32))
    bind(device, "scatter", ScatterV1(runs=runs, payload=payload, columns=(tokens, biases)))(device.stream, 2)
    assert device.read(tokens).tolist() == [[0, 0, 0], [0, 0, 8]]
    assert device.read(biases).tolist() == [1.5, 0.0]


def test_what_a_composite_calls_dead_is_poisoned_behind_it():
    from polydraft.conformance.harness import run_kernel
    from polydraft.contracts import COMPOSITES, REGISTRY
    from polydraft.contracts.inputs import default_cases

    composite = COMPOSITES["verify_match+commit_window"]
    device: Any = open_device("rows=seeded")
    kept: dict[str, EmulatorBuffer] = {}

    class Spy(EmulatorProvider):
        def bind(self, args: CompositeArgs, limits: Limits, workspace: Any) -> Any:  # type: ignore[override]
            kept.update({name: getattr(args.parts[0], name) for name in composite.dead})
            return super().bind(args, limits, workspace)

    table = EmulatorTable(device)
    known = table.providers[composite.name]
    table.providers = {composite.name: Spy(known.kernel, device)}
    case = next(case for case in default_cases(composite) if case.n > 1)
    run_kernel(composite, case, device, table)
    assert set(kept) == {"window", "window_len", "accepted"}
    assert all((device.read(buffer) == POISONED).all() for buffer in kept.values())
    assert set(composite.dead) <= set(REGISTRY["verify_match"].args.specs())


def test_weights_are_copies_and_are_refilled_in_place():
    device = open_device("policy=lazy")
    table, value = EmulatorTable(device), np.ones((2, 3), np.float32)
    weight = table.prepare_weight("linear", value, "f32")
    address = weight.address
    value[:] = 5
    norm = table.prepare_weight("norm", np.full(3, 2.0, np.float32), "f32")
    x, out = filled(device, "x", np.ones((2, 3), np.float32), "f32"), device.empty("out", (2, 3), "f32")
    launch = bind(device, "rms_norm", RmsNormV1(x=x, weight=norm, eps=0.0, plus_one=False, out=out))
    launch(device.stream, 2)
    with pytest.raises(DeviceError, match=r"weight \(norm\) was overwritten from the host while work in flight uses it"):
        table.prepare_weight("norm", np.ones(3), "f32", norm)
    assert device.read(out).tolist() == [[2.0] * 3] * 2
    assert table.prepare_weight("linear", np.zeros((2, 3)), "f32", weight) is weight
    assert weight.address == address
    with pytest.raises(ContractError, match="got shape"):
        table.prepare_weight("linear", np.zeros((3, 3)), "f32", weight)
    with pytest.raises(ContractError, match="computes in f32"):
        table.prepare_weight("linear", value, "bf16")


# -- the cache ----------------------------------------------------------------------------------------------


def test_cache_rows_lie_where_the_seed_puts_them():
    def rows(query: str) -> list[int]:
        device = open_device(query)
        cache = EmulatorTable(device).allocate_cache(SPEC)
        assert np.isnan(cache.read_logical()[0]).all()
        numbers = np.arange(32.0).reshape(8, 4, 1, 1) + np.zeros((8, 4, 2, 3))
        cache.write_logical(numbers, -numbers)
        k, v = cache.read_logical()
        np.testing.assert_array_equal(k, numbers)
        np.testing.assert_array_equal(v, -numbers)
        with device.guard:
            lie: list[int] = cache.kv[0, 0, :, 0].astype(int).tolist()
        return lie

    assert rows("layout=plain") == list(range(32))
    assert rows("seed=1") != list(range(32))
    assert rows("seed=1") == rows("seed=1") != rows("seed=2")
    blocks = np.array(rows("seed=1")).reshape(8, 4) // 4
    assert (blocks == blocks[:, :1]).all(), "a block stays together"


def test_discarded_blocks_hold_poison_behind_what_was_issued():
    device = open_device("policy=lazy&seed=3")
    cache = EmulatorTable(device).allocate_cache(SPEC)
    cache.write_logical(np.ones((8, 4, 2, 3)), np.ones((8, 4, 2, 3)))
    seen = []
    device.enqueue(device.stream, lambda: seen.append(float(cache.kv.sum())))
    device.discard(np.array([2, 5]))
    k, _ = cache.read_logical()
    assert seen == [8 * 4 * 2 * 3 * 2]
    assert np.isnan(k[[2, 5]]).all()
    assert (k[[0, 1, 3, 4, 6, 7]] == 1).all()


def test_metadata_is_filled_when_it_runs():
    from polydraft.backend import StepMeta

    device = open_device("policy=lazy")
    slots = filled(device, "row_slot", np.zeros(8, np.int32))
    positions = filled(device, "positions", np.arange(8, dtype=np.int32))
    table = filled(device, "block_table", np.arange(32, dtype=np.int32).reshape(4, 8))
    meta: Any = Emulator().polydraft_init_forward_meta(device, PassBuffers("target", slots, positions, table), LIMITS)
    meta.fill(device.stream, StepMeta(0, launch_rows=6, real_slots=1, has_prefill=True))
    assert meta.layout.segments == ()
    device.synchronize()
    assert len(meta.layout.valid) == 6
    np.testing.assert_array_equal(meta.layout.destinations, device.row_map(8, 4)[:6])
