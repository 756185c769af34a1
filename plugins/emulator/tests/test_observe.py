"""What the emulator sees its operations touch: writes by row and by KV block, reads of memory that was opened on the way."""

from typing import Any

import numpy as np

from polydraft.backend import CacheSpec
from polydraft.contracts.base import Limits
from polydraft.contracts.kernels.argmax import ArgmaxV1
from polydraft.device import DTYPES
from polydraft_emulator.device import EmulatorDevice
from polydraft_emulator.graph import EmulatorCapture
from polydraft_emulator.kernels import EmulatorTable
from polydraft_emulator.streams import Work
from polydraft_emulator.testing import open_device

LIMITS = Limits(2, 2, 8, 4, 12, 4, 8, 3, 1, 100)


def filled(device: EmulatorDevice, name: str, *shape: int, dtype: str = "i32") -> Any:
    buffer = device.empty(name, shape, dtype)
    device.load(buffer, np.zeros(shape, DTYPES[dtype]))
    return buffer


def issue(device: EmulatorDevice, buffer: Any) -> None:
    """A kernel that adds 1 to all of a buffer."""
    use = device.bound(buffer)

    def work() -> None:
        use[1][...] += 1

    device.executor.issue(device.stream, Work("kernel", "k", 4, work, uses=(use,)))


def seen(device: EmulatorDevice) -> list[tuple[int, str, str, Any]]:
    device.synchronize()
    return [(operation, memory.name, access, rows) for operation, memory, access, rows in device.observed_accesses()]


def test_nothing_is_seen_until_somebody_numbers_operations() -> None:
    device = open_device()
    x = filled(device, "x", 4)
    use = device.bound(x)
    device.executor.issue(device.stream, Work("kernel", "k", 4, lambda: use[1].fill(3), uses=(use,)))
    assert seen(device) == []
    device.operation = 7
    device.executor.issue(device.stream, Work("kernel", "k", 4, lambda: use[1].fill(4), uses=(use,)))
    assert seen(device) == [(7, "x", "write", (0, 4))]
    assert seen(device) == [], "each access is told once"


def test_work_is_its_operations_whenever_it_runs_and_in_every_replay() -> None:
    device = open_device("policy=lazy")
    x, y = filled(device, "x", 4), filled(device, "y", 2)
    for number, buffer in ((1, x), (2, y)):
        device.operation = number
        issue(device, buffer)
    device.operation = 3
    assert [(operation, name) for operation, name, _, _ in seen(device)] == [(1, "x"), (2, "y")]

    def launches() -> None:
        device.operation = 4
        issue(device, x)

    graph = EmulatorCapture(device, frozenset()).capture(device.stream, launches)
    device.operation = 5
    graph.replay(device.stream)
    graph.replay(device.stream)
    assert [operation for operation, *_ in seen(device)] == [4, 4]


def test_only_rows_that_hold_other_bytes_are_written() -> None:
    device = open_device()
    x = filled(device, "x", 8, 3, dtype="f32")
    use = device.bound(x)

    def work() -> None:
        use[1][2, 1] = np.nan
        use[1][5] = 1

    device.operation = 1
    device.executor.issue(device.stream, Work("kernel", "k", 8, work, uses=(use,)))
    assert seen(device) == [(1, "x", "write", (2, 6))]
    device.executor.issue(device.stream, Work("kernel", "k", 8, work, uses=(use,)))
    assert seen(device) == [], "the same bytes, NaN among them"


def test_a_kv_write_is_told_by_block() -> None:
    device = open_device("seed=5")
    cache = EmulatorTable(device).allocate_cache(CacheSpec(6, 4, 2, 3, "f32"))
    use = device.bound(cache)

    def work() -> None:
        rows = np.array([2 * 4, 2 * 4 + 1, 5 * 4 + 3])  # two rows of block 2, one of block 5
        use[1][:, :, cache.row_map[rows]] = 1

    device.operation = 1
    device.executor.issue(device.stream, Work("kernel", "k", 3, work, uses=(use,)))
    assert seen(device) == [(1, "KV cache", "write", (2, 3)), (1, "KV cache", "write", (5, 6))]
    device.discard(np.array([1]))
    assert seen(device) == [], "what tests do to free blocks is no operation"


def test_opening_memory_on_the_way_is_a_read() -> None:
    device = open_device()
    x, strange = filled(device, "x", 4), filled(device, "strange", 4)
    use = device.bound(x)
    device.operation = 1
    device.executor.issue(device.stream, Work("kernel", "k", 4, lambda: strange.host_array + 1, uses=(use,)))
    assert seen(device) == [(1, "strange", "read", None)]


def test_a_kernel_writes_what_its_contract_says() -> None:
    device = open_device()
    logits, slots, tokens = filled(device, "logits", 4, 9, dtype="f32"), filled(device, "slots", 4), filled(device, "tokens", 4)
    provider = EmulatorTable(device).providers["argmax"]
    launch = provider.bind(ArgmaxV1(logits=logits, row_slot=slots, tokens=tokens), LIMITS, None)
    device.load(tokens, np.full(4, 5, np.int32))
    device.operation = 9
    stream: Any = device.stream
    launch(stream, 3)
    assert seen(device) == [(9, "tokens", "write", (0, 3))]
