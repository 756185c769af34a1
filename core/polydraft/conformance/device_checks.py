"""Level L1: memory, copies, streams and events of a device, through the protocols that core itself uses.

It needs no kernel; `linear` is a further way to keep a device busy, where it is offered. A check that reads device memory does so
as core does: a copy into staging followed by an event. It does not ask what kind of device it has: every device must do what the
protocol promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, Final

import numpy as np

from polydraft.conformance.busy import BUSY_S, COPIES, Filling, at_rest, busy
from polydraft.conformance.check import Check, Tally, Unseen, Unsupported
from polydraft.conformance.guards import GuardedDevice
from polydraft.conformance.target import Target, bare
from polydraft.device import DTYPES, Array, Buffer, Device, Stream, further_stream
from polydraft.errors import DeviceError

ROWS: Final = 257
"""Rows of most buffers: no multiple of anything that a device might round to."""
LARGE: Final = 1 << 18
"""Elements of copies that take a real device a while."""
HUGE: Final = 1 << 22
"""Elements of a copy that takes longer than a host thread takes to wake up."""
LONG_ATTEMPTS: Final = 8
"""Times that one with `HUGE` copies is: those take longer than the host takes to ask, on a loaded machine, too."""
ATTEMPTS: Final = 40
"""Times that a check of events is repeated on one device: what runs early by chance once does not do so every time."""
BEHIND: Final = 6
"""Times that something is tried behind work that runs."""

FREE_LARGE: Final = 1 << 24
"""Bytes of an allocation that free memory has to show."""
FREE_ATTEMPTS: Final = 8
"""Times that it is tried."""


def checks() -> Iterator[Check]:
    """Every check of L1."""
    for dtype in DTYPES:
        yield Check(f"L1/round-trip/{dtype}", _round_trip(dtype))
    yield Check("L1/part-of-a-buffer", _part)
    yield Check("L1/neighbours-untouched", _neighbours)
    yield Check("L1/empty-copies", _empty)
    yield Check("L1/stream-order", _stream_order)
    yield Check("L1/copies-behind-work", _copies_behind_work, ("asynchronous",))
    yield Check("L1/load-behind-work", _load_behind_work, ("asynchronous",))
    yield Check("L1/staging-after-its-event", _staging_reuse)
    yield Check("L1/event-not-early", _event_not_early)
    yield Check("L1/event-moves", _event_moves)
    yield Check("L1/query-is-honest", _query)
    yield Check("L1/copies-each-way-in-one-order", _ping_pong)
    yield Check("L1/load-replaces-all", _load)
    yield Check("L1/counters", _counters)
    yield Check("L1/guard-bands", _guard_bands)
    yield Check("L1/wrong-shape-is-refused", _wrong_shape)
    yield Check("L1/two-streams", _two_streams)
    yield Check("L1/event-of-another-stream", _other_streams_event)
    yield Check("L1/closed-device-refuses", _closed)


def pattern(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    """Arbitrary numbers of a dtype, different for every seed; finite where they are floats."""
    rng = np.random.default_rng(seed)
    if dtype in ("f32", "f16"):
        return rng.standard_normal(shape).astype(DTYPES[dtype])
    high = 1 << (8 * DTYPES[dtype].itemsize - 1)
    return rng.integers(0, high - 1, shape).astype(DTYPES[dtype])


def read(device: Device, buffer: Any) -> Array:
    """All rows of a buffer behind what was issued, through staging that held another pattern before."""
    staging, event = device.staging("conform.back", buffer.shape, buffer.dtype), device.event()
    staging.array.view(np.uint8).fill(0x5A)
    device.download(device.stream, staging, buffer, buffer.shape[0])
    event.record(device.stream)
    event.synchronize()
    return staging.array.copy()


def write(device: Device, buffer: Any, value: Array, rows: int | None = None, staging: Any = None) -> Any:
    """Upload, in stream order; returns the staging, which must stay as it is until an event behind this has completed."""
    staging = device.staging("conform.up", value.shape, buffer.dtype) if staging is None else staging
    staging.array[...] = value
    device.upload(device.stream, buffer, staging, len(value) if rows is None else rows)
    return staging


def _device(target: Target) -> Device:
    return target.opened(key="L1").device


def _round_trip(dtype: str) -> Any:
    def run(target: Target, tally: Tally) -> None:
        """Up and down again, in two shapes: every bit comes back."""
        device = _device(target)
        for shape in ((ROWS,), (31, 7, 3)):
            buffer, value = device.empty("conform.b", shape, dtype), pattern(shape, dtype)
            tally.equal("shape of a buffer", tuple(buffer.shape), shape)
            tally.equal("dtype of a buffer", buffer.dtype, dtype)
            kept = write(device, buffer, value)
            tally.equal(f"a buffer of {dtype} read back", read(device, buffer).view(np.uint8), value.view(np.uint8))
            del kept

    return run


def _part(target: Target, tally: Tally) -> None:
    """A copy of some rows changes those rows and no others, in both directions."""
    device = _device(target)
    buffer, old, new = device.empty("conform.b", (ROWS, 3), "i32"), pattern((ROWS, 3), "i32", 1), pattern((ROWS, 3), "i32", 2)
    device.load(buffer, old)
    for rows in (1, 100, ROWS - 1):
        kept = write(device, buffer, new, rows)
        tally.equal(f"after {rows} rows went up", read(device, buffer), np.concatenate((new[:rows], old[rows:])))
        device.load(buffer, old)
        del kept
    staging, event = device.staging("conform.part", (ROWS, 3), "i32"), device.event()
    device.download(device.stream, staging, buffer, 100)
    event.record(device.stream)
    event.synchronize()
    tally.equal("100 rows that came down", staging.array[:100], old[:100])


def _neighbours(target: Target, tally: Tally) -> None:
    """Buffers are memory of their own: filling one leaves those allocated before and behind it alone."""
    device = _device(target)
    buffers = [device.empty(f"conform.b{i}", (ROWS,), "i32") for i in range(5)]
    values = [pattern((ROWS,), "i32", i) for i in range(5)]
    for buffer, value in zip(buffers, values, strict=True):
        device.load(buffer, value)
    values[2] = pattern((ROWS,), "i32", 9)
    kept = write(device, buffers[2], values[2])
    for i, (buffer, value) in enumerate(zip(buffers, values, strict=True)):
        tally.equal(f"buffer {i} of five", read(device, buffer), value)
    del kept


def _empty(target: Target, tally: Tally) -> None:
    """Copies of no rows are legal and do nothing."""
    device = _device(target)
    buffer, old = device.empty("conform.b", (4,), "i32"), pattern((4,), "i32", 1)
    device.load(buffer, old)
    kept = write(device, buffer, pattern((4,), "i32", 2), 0)
    tally.equal("after an upload of no rows", read(device, buffer), old)
    del kept


def _stream_order(target: Target, tally: Tally) -> None:
    """Many uploads into one buffer and downloads between them: each sees those before it, none that came later."""
    device = _device(target)
    buffer = device.empty("conform.b", (LARGE,), "i32")
    ups = [device.staging(f"conform.up{i}", (LARGE,), "i32") for i in range(6)]
    downs = [device.staging(f"conform.down{i}", (LARGE,), "i32") for i in range(6)]
    for i, (up, down) in enumerate(zip(ups, downs, strict=True)):
        up.array[...] = i + 1
        device.upload(device.stream, buffer, up, LARGE)
        device.download(device.stream, down, buffer, LARGE)
    event = device.event()
    event.record(device.stream)
    event.synchronize()
    for i, down in enumerate(downs):
        tally.equal(f"download {i} of six", down.array[:: LARGE // 64], np.full(64, i + 1, np.int32))


Way = tuple[Stream, Filling]
"""A stream, and a way to keep it busy."""


def _ways(target: Target) -> list[Way]:
    """Those of the compute stream; `Unseen` where there is none."""
    opened = target.opened(key="L1")
    found = busy(opened.device, opened.table, target.info.capabilities.dtypes[0]).fillings
    if not found:
        raise Unseen("what happens behind work that runs: the device was never busy for long enough to look")
    return [(opened.device.stream, filling) for filling in found]


def _ways_beside(target: Target) -> list[Way]:
    """Those of a further stream, where there is one that can be kept busy."""
    opened = target.opened(key="L1")
    other = further_stream(opened.device, "conform")
    if other is opened.device.stream:
        return []
    return [(other, one) for one in busy(opened.device, opened.table, target.info.capabilities.dtypes[0], other).fillings]


def _filled(device: Device, stream: Stream, filling: Filling) -> bool:
    """Fill a stream, as often as it takes until the work is seen running; whether it is."""
    for _ in range(filling.attempts):
        device.synchronize()
        filling.fill(stream, BUSY_S)
        if filling.runs():
            return True
    return False


def _span(array: Array) -> tuple[int, int]:
    return int(array.min()), int(array.max())


def _copies_behind_work(target: Target, tally: Tally) -> None:
    """Behind work that runs a download brings what the uploads in front of it left, and nothing of those behind it: copies happen
    in their turn and not when they are called. On every stream, in every size."""
    device = _device(target)
    for (stream, filling), size in product(_ways(target) + _ways_beside(target), COPIES):
        buffer, up = device.empty("conform.b", (size,), "i32"), device.staging("conform.up", (size,), "i32")
        downs = [device.staging(f"conform.d{i}", (size,), "i32") for i in range(2)]
        for number in range(BEHIND):
            device.load(buffer, np.full(size, -1, np.int32))
            up.array[...] = number
            with at_rest(device):
                if not _filled(device, stream, filling):
                    continue
                device.download(stream, downs[0], buffer, size)
                device.upload(stream, buffer, up, size)
                device.download(stream, downs[1], buffer, size)
            for down, where, wanted in zip(downs, ("in front of", "behind"), (-1, number), strict=True):
                what = f"a download {where} an upload of {4 * size} bytes, on a busy stream"
                tally.equal(what, _span(down.array), (wanted, wanted))


def _load_behind_work(target: Target, tally: Tally) -> None:
    """A load comes behind the copies that work on its buffer and have not run, or is refused; it does not overtake them. What it
    was given is the caller's again when it returns."""
    device = _device(target)
    for (stream, filling), size in product(_ways(target), COPIES):
        buffer, other = (device.empty(f"conform.{name}", (size,), "i32") for name in "bc")
        up, down = (device.staging(f"conform.{name}", (size,), "i32") for name in ("up", "down"))
        for number in range(BEHIND):
            device.load(buffer, np.full(size, -1, np.int32))
            up.array[...], left = -2, number
            with at_rest(device):
                if not _filled(device, stream, filling):
                    continue
                device.download(stream, down, buffer, size)
                device.upload(stream, buffer, up, size)
                value = np.full(size, number, np.int32)
                try:
                    device.load(buffer, value)
                except DeviceError:
                    left = -2
                device.load(other, value)  # with which nobody works
                value.fill(-3)
            tally.equal(f"a download of {4 * size} bytes in front of a load, on a busy stream", _span(down.array), (-1, -1))
            what = f"a buffer of {4 * size} bytes, uploaded and then loaded on a busy stream"
            tally.equal(what, _span(read(device, buffer)), (left, left))
            tally.equal(f"a buffer of {4 * size} bytes, loaded beside one", _span(read(device, other)), (number, number))


def _staging_reuse(target: Target, tally: Tally) -> None:
    """Staging may be rewritten once an event behind its upload has completed; what went up stays."""
    device = _device(target)
    first, second = device.empty("conform.a", (LARGE,), "i32"), device.empty("conform.b", (LARGE,), "i32")
    staging, event = device.staging("conform.s", (LARGE,), "i32"), device.event()
    for buffer, value in ((first, 1), (second, 2)):
        staging.array[...] = value
        device.upload(device.stream, buffer, staging, LARGE)
        event.record(device.stream)
        event.synchronize()
    staging.array[...] = 3
    tally.equal("first buffer", np.unique(read(device, first)), [1])
    tally.equal("second buffer", np.unique(read(device, second)), [2])


def _event_not_early(target: Target, tally: Tally) -> None:
    """An event recorded behind copies is complete only when the host's copies hold what was copied. There are several, since one
    may be done before the host wakes up on a loaded machine."""
    device = _device(target)
    buffer, up = device.empty("conform.b", (HUGE,), "i32"), device.staging("conform.up", (HUGE,), "i32")
    downs = [device.staging(f"conform.d{i}", (HUGE,), "i32") for i in range(4)]
    for attempt in range(ATTEMPTS // 4):
        write(device, buffer, np.full(HUGE, attempt, np.int32), staging=up)
        for down in downs:
            down.array[...] = -1
        for down in downs:
            device.download(device.stream, down, buffer, HUGE)
        event = device.event()
        event.record(device.stream)
        event.synchronize()
        newest = downs[-1].array
        last = int(newest[-1])  # looked at first: most copies come to it last
        found = last, int(newest.min()), int(newest.max())
        tally.equal("a download behind its event", found, (attempt,) * 3)
    device.synchronize()  # a device that is wrong still copies, and the memory must outlive that


def _event_moves(target: Target, tally: Tally) -> None:
    """An event that is recorded again stands for the later point; one that was never recorded counts as reached."""
    device = _device(target)
    tally.true("query() of an event that was never recorded is True", device.event().query())
    buffer, event = device.empty("conform.b", (LARGE,), "i32"), device.event()
    downs = [device.staging(f"conform.d{i}", (LARGE,), "i32") for i in range(2)]
    kept = []
    for i, down in enumerate(downs):
        kept.append(write(device, buffer, np.full(LARGE, i + 1, np.int32)))
        device.download(device.stream, down, buffer, LARGE)
        event.record(device.stream)
    event.synchronize()
    tally.true("query() is True behind synchronize()", event.query())
    tally.equal("the later of two copies behind one event", np.unique(downs[1].array), [2])


def _query(target: Target, tally: Tally) -> None:
    """`query()` says True only when the work before the event is done: then, and only then, the host looks at the copy."""
    device = _device(target)
    for size, attempts in ((LARGE, ATTEMPTS), (HUGE, LONG_ATTEMPTS)):
        buffer, down = device.empty("conform.b", (size,), "i32"), device.staging("conform.d", (size,), "i32")
        ups = [device.staging(f"conform.up{i}", (size,), "i32") for i in range(2)]
        for attempt in range(attempts):
            event = device.event()
            ups[0].array[...], ups[1].array[...], down.array[...] = -2, attempt, -1
            for up in ups:
                device.upload(device.stream, buffer, up, size)
            device.download(device.stream, down, buffer, size)
            event.record(device.stream)
            for _ in range(3):
                if event.query():
                    found = int(down.array.min()), int(down.array.max())
                    tally.equal("what lies in staging once query() said True", found, (attempt, attempt))
                    break
            event.synchronize()
            tally.true("query() is True behind synchronize()", event.query())


def _ping_pong(target: Target, tally: Tally) -> None:
    """Copies up and down between the same staging and buffers, in one order."""
    device = _device(target)
    a, b = device.empty("conform.a", (ROWS,), "f32"), device.empty("conform.b", (ROWS,), "f32")
    between, event, value = device.staging("conform.s", (ROWS,), "f32"), device.event(), pattern((ROWS,), "f32", 4)
    device.load(a, value)
    device.download(device.stream, between, a, ROWS)
    device.upload(device.stream, b, between, ROWS)
    event.record(device.stream)
    event.synchronize()
    tally.equal("what went down and up again", read(device, b), value)


def _load(target: Target, tally: Tally) -> None:
    """`load` replaces all of a buffer at once."""
    device = _device(target)
    buffer = device.empty("conform.b", (ROWS, 2), "f32")
    for seed in range(3):
        value = pattern((ROWS, 2), "f32", seed)
        device.load(buffer, value)
        tally.equal("a loaded buffer", read(device, buffer), value)


def _counters(target: Target, tally: Tally) -> None:
    """Copies, bytes, allocations and waits are counted, since L6 and every user's figures rest on them; and so is free memory,
    where it is told."""
    device = _device(target)
    before = device.counters.copy()
    buffer = device.empty("conform.b", (8, 4), "i32")
    tally.true("an allocation counts", device.counters.allocations > before.allocations)
    kept = write(device, buffer, pattern((8, 4), "i32"), 5)
    read(device, buffer)
    now = device.counters
    tally.equal("uploads", now.uploads - before.uploads, 1)
    tally.equal("bytes uploaded", now.bytes_uploaded - before.bytes_uploaded, 5 * 4 * 4)
    tally.equal("downloads", now.downloads - before.downloads, 1)
    tally.equal("bytes downloaded", now.bytes_downloaded - before.bytes_downloaded, 8 * 4 * 4)
    tally.true("a wait for an event counts as a synchronisation", now.host_syncs > before.host_syncs)
    tally.true(f"memory() is a count of bytes, got {device.memory()}", device.memory() >= 0)
    del kept
    _free_memory(device, tally)


def _free_memory(device: Device, tally: Tally) -> None:
    """Where the device says how much memory is free, that is less behind large allocations: engines are planned by it."""
    ask: Callable[[], int] | None = getattr(device, "free_memory", None)
    if ask is None:
        return
    fell, held = 0, list[Buffer]()
    while fell < FREE_LARGE // 2 and len(held) < FREE_ATTEMPTS:  # others may give memory back meanwhile, and a pool may have some
        before = ask()
        held.append(device.empty("conform.free", (FREE_LARGE,), "u8"))
        device.load(held[-1], np.ones(FREE_LARGE, np.uint8))
        device.synchronize()
        fell = before - ask()
    tally.true(f"free_memory() falls behind an allocation of {FREE_LARGE} bytes, got {fell} less", fell >= FREE_LARGE // 2)


def _guard_bands(target: Target, tally: Tally) -> None:
    """Copies and loads of odd sizes stay within their buffers."""
    device, sizes = GuardedDevice(_device(target)), ((1,), (3,), (31, 1), (17, 5), (257,))
    for dtype in DTYPES:
        for seed, shape in enumerate(sizes):
            buffer, value = device.empty("conform.b", shape, dtype), pattern(shape, dtype, seed)
            device.load(buffer, value)
            kept = write(bare(device), buffer, value, max(len(value) - 1, 1))
            tally.equal(
                f"a buffer of {dtype} and of shape {shape}", read(bare(device), buffer).view(np.uint8), value.view(np.uint8)
            )
            del kept
    device.hold(tally, "copies and loads", read)


def _wrong_shape(target: Target, tally: Tally) -> None:
    """A load of another shape is refused, and changes nothing."""
    device = _device(target)
    buffer, value = device.empty("conform.b", (4, 3), "i32"), pattern((4, 3), "i32")
    device.load(buffer, value)
    for shape in ((3, 4), (4, 4), (5, 3), (12,)):
        load = partial(device.load, buffer, pattern(shape, "i32", 1))
        tally.raises(Exception, f"a load of shape {shape} into (4, 3)", load)
    tally.equal("the buffer behind refused loads", read(device, buffer), value)


def _second_stream(device: Device) -> Any:
    """A stream beside the compute stream; `Unsupported` on devices that have one."""
    stream = further_stream(device, "conform")
    if stream is device.stream:
        raise Unsupported("the device has one stream")
    return stream


def _two_streams(target: Target, tally: Tally) -> None:
    """Streams are ordered by events alone, and by them they are: what waits sees what it waited for."""
    device = _device(target)
    other = _second_stream(device)
    buffer, down = device.empty("conform.b", (HUGE,), "i32"), device.staging("conform.d", (HUGE,), "i32")
    ups = [device.staging(f"conform.up{i}", (HUGE,), "i32") for i in range(3)]
    for attempt in range(LONG_ATTEMPTS):
        for source, sink in ((device.stream, other), (other, device.stream)):
            for i, up in enumerate(ups):
                up.array[...] = 10 * attempt + i
                device.upload(source, buffer, up, HUGE)
            behind, done = device.event(), device.event()
            behind.record(source)
            sink.wait(behind)
            device.download(sink, down, buffer, HUGE)
            done.record(sink)
            done.synchronize()
            found = int(down.array.min()), int(down.array.max())
            tally.equal("what a stream sees of one that it waited for", found, (10 * attempt + 2,) * 2)
            device.synchronize()  # a device that is wrong still copies, and the memory must outlive that


def _other_streams_event(target: Target, tally: Tally) -> None:
    """An event of one stream says nothing about another's work, and its own work is done when it says so."""
    device = _device(target)
    other = _second_stream(device)
    buffers = [device.empty(f"conform.b{i}", (LARGE,), "i32") for i in range(2)]
    downs = [device.staging(f"conform.d{i}", (LARGE,), "i32") for i in range(2)]
    ups = [device.staging(f"conform.up{i}", (LARGE,), "i32") for i in range(2)]
    for attempt in range(ATTEMPTS // 4):
        events = [device.event() for _ in range(2)]
        for stream, buffer, down, up, event in zip((device.stream, other), buffers, downs, ups, events, strict=True):
            up.array[...] = attempt
            down.array[...] = -1
            device.upload(stream, buffer, up, LARGE)
            device.download(stream, down, buffer, LARGE)
            event.record(stream)
        for index in ((0, 1), (1, 0))[attempt % 2]:
            events[index].synchronize()
            found = int(downs[index].array.min()), int(downs[index].array.max())
            tally.equal(f"the download of stream {index} behind its event", found, (attempt, attempt))


def _closed(target: Target, tally: Tally) -> None:
    """A closed device refuses further allocation with `DeviceError`."""
    device = target.open().device
    device.close()
    tally.raises(DeviceError, "an allocation on a closed device", lambda: device.empty("conform.late", (1,), "i32"))
