"""The rules of the check: every operation of host and streams passes here and is held against them, then ordered.

The wrappers of device, kernels and graphs call it before they pass a call on. It never changes what a call does, and never
looks at the contents of a memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from polydraft.device import Device, DeviceCounters
from polydraft.errors import DeviceError
from polydraft.instruments.sanitize.accesses import Touch
from polydraft.instruments.sanitize.memory import Copied, Memory, StagingMemory
from polydraft.instruments.sanitize.order import Agent
from polydraft.instruments.sanitize.ordering import Ordering, Point
from polydraft.instruments.sanitize.site import Trace

Region = Literal["", "launch", "collect"]
"""Where the host is: in the launch path of a step, where it never waits; in `collect`, where it waits once; elsewhere."""


class Checker(Ordering):
    """The check of one engine: the rules, on top of the order."""

    def __init__(self, *, strict: bool = False) -> None:
        super().__init__(strict=strict)
        self.region: Region = ""
        self._num_waits = 0
        self._voided: list[Callable[[], None]] = []

    # -- waiting -----------------------------------------------------------------------------------
    def reset(self) -> None:
        """Nothing is in flight any more, because it has run or because the device has failed; nobody will read its snapshots."""
        self.host_knows_all()
        for memory in self.memories:
            if isinstance(memory, StagingMemory):
                memory.unread = None
        for call in self._voided:
            call()

    def on_void(self, call: Callable[[], None]) -> None:
        """Have `call` called whenever what was in flight is void."""
        self._voided.append(call)

    def host_waits(self, point: Point, event: str) -> None:
        """The host is about to block until an event."""
        trace = self.wait_refused_here(f"wait for {event}", event)
        if point.clock is None:
            self.tell("unrecorded-event", event, trace, "a record of it behind the work that is waited for")

    def wait_refused_here(self, what: str, memory: str) -> Trace:
        """File a wait of the host where there may be none; returns its trace."""
        trace = self.trace(what)
        if self.recording is not None:
            self.tell("sync-in-capture", memory, trace, "a capture that only launches; wait before or behind it")
        elif self.region == "launch":
            self.tell("sync-in-launch", memory, trace, "a launch path that never waits; read results from the snapshot")
        elif self.region == "collect":
            self._num_waits += 1
            if self._num_waits > 1:
                self.tell("sync-in-launch", memory, trace, "a step that waits once, for its snapshot's event alone")
        return trace

    # -- memory ------------------------------------------------------------------------------------
    def allocates(self, name: str, *, staging: bool = False) -> Trace:
        """Memory is about to be allocated under a name."""
        trace = self.trace(f"allocation of {name}")
        self._refuse_allocation(trace, name)
        for recording in () if staging else self.captured:
            if any(held.name == name for held in recording.addresses):
                missing = "a copy into the captured buffer, or a new capture: graphs go on with the old one"
                self.tell("captured-buffer-rebound", name, trace, missing, recording.trace)
                break
        return trace

    def _refuse_allocation(self, trace: Trace, name: str) -> None:
        if self.recording is not None:
            self.tell("allocation-in-capture", name, trace, "an allocation before the capture")
        elif self.region:
            self.tell("allocation-in-launch", name, trace, "an allocation when the engine is built")

    def free(self, thing: Any) -> None:
        """Memory is given back by the host."""
        memory, trace = self.memories[thing], self.trace("free")
        self.order(self.host, Touch(memory, 0, memory.rows, reads=False, writes=True), trace, self.host.tick(), "freed-memory")
        memory.freed = trace

    def close(self) -> None:
        """The device is closed: all of its memory is given back, and nobody waits for what is in flight."""
        trace = self.trace("close of the device")
        self.reset()
        for memory in self.memories:
            memory.freed = memory.freed or trace

    def host_writes(self, thing: Any, what: str) -> None:
        """The host overwrites device memory, outside of streams."""
        memory = self.memories[thing]
        trace = self.trace(f"{what} of {memory.name}")
        self.touch(self.host, Touch(memory, 0, memory.rows, reads=False, writes=True), trace, self.host.tick())

    # -- launches and copies -----------------------------------------------------------------------
    def check_rows(self, what: object, stream: Agent, rows: int, memories: Iterable[Memory]) -> None:
        """A launch or copy of `rows` rows must fit every memory whose rows it counts."""
        if rows < 0:
            missing = f"a count of 0 or more, got {rows}"
            self.tell("negative-length", "the launch length", self.trace(str(what), stream.name), missing)
        for memory in memories:
            if rows > memory.rows:
                missing = f"a count of at most {memory.rows}, got {rows}"
                self.tell("above-capacity", memory.name, self.trace(str(what), stream.name), missing)

    def check_addresses(self, bound: Iterable[tuple[Memory, int]], trace: Trace) -> None:
        """A launch finds its memory where it lay when it was bound."""
        for memory, address in bound:
            now = memory.address
            if now != address and memory.freed is None and memory.moved_to != now:
                memory.moved_to = now  # reported once, however many launches use it
                missing = "a copy into the memory that the launch is bound to instead of a new address, or a new binding"
                self.tell("rebound-buffer", memory.name, trace, missing, memory.made)

    def check_copied(self, memory: Memory, trace: Trace) -> None:
        """A copy of the launch path must use a buffer that some launch is bound to."""
        if self.region == "launch" and not memory.bound:
            missing = "a copy to or from the buffer that launches are bound to; nothing reads or writes this one"
            self.tell("unbound-buffer", memory.name, trace, missing, memory.made)

    # -- staging -----------------------------------------------------------------------------------
    def host_reads_staging(self, memory: StagingMemory, low: int, high: int) -> None:
        """The host reads rows of staging."""
        trace = self._host_touches(memory, low, high, "read", writes=False)
        memory.unread = None
        landed = memory.landed
        if landed is not None and high > landed.rows:
            missing = f"a download of all rows that are read; the last one wrote {landed.rows}"
            self.tell("stale-host-read", memory.named(landed.rows, high), trace, missing, landed.trace)

    def host_writes_staging(self, memory: StagingMemory, low: int, high: int) -> None:
        """The host writes rows of staging."""
        self._host_touches(memory, low, high, "write", writes=True)
        if memory.sent:
            memory.written.clear()
            memory.sent = None
        memory.written.add(low, high)
        memory.written_step = self.step

    def _host_touches(self, memory: StagingMemory, low: int, high: int, verb: str, *, writes: bool) -> Trace:
        trace = self.trace(f"host {verb} of {memory.named(low, high)}")
        if self.recording is not None:
            self.tell("host-access-in-capture", memory.name, trace, "a capture that only launches")
        self.order(self.host, Touch(memory, low, high, not writes, writes), trace, self.host.tick(), "unordered-access")
        return trace

    def upload(self, stream: Agent, target: Any, source: StagingMemory, rows: int) -> None:
        """A copy from staging into a buffer."""
        memory = self.memories[target]
        what = f"upload {source.name} -> {memory.name}"
        self.check_rows(what, stream, rows, (memory, source))
        touches = [Touch(source, 0, rows, reads=True, writes=False), Touch(memory, 0, rows, reads=False, writes=True)]
        trace = self.issue(stream, what, touches)
        if self.recording is None:
            if not source.written.holds(0, rows) or (source.sent and source.written_step != self.step):
                missing = "a write of every row that is sent, padding included, in the same step"
                self.tell("stale-upload", source.named(0, rows), trace, missing, source.sent)
            values = source.thing.array[:rows].copy() if memory.tells_reach else None
            source.sent, memory.uploaded = trace, Copied(rows, trace, values)
        self.check_copied(memory, trace)

    def download(self, stream: Agent, target: StagingMemory, source: Any, rows: int) -> None:
        """A copy from a buffer into staging."""
        memory = self.memories[source]
        what = f"download {memory.name} -> {target.name}"
        self.check_rows(what, stream, rows, (memory, target))
        touches = [Touch(memory, 0, rows, reads=True, writes=False), Touch(target, 0, rows, reads=False, writes=True)]
        trace = self.issue(stream, what, touches)
        if self.recording is None:
            if target.unread is not None:
                missing = "a read of the first by the host before, or staging of its own for each step in flight"
                self.tell("snapshot-overwritten", target.name, trace, missing, target.unread)
            target.landed, target.unread = Copied(rows, trace), trace
        self.check_copied(memory, trace)

    # -- calls into the device ---------------------------------------------------------------------
    @contextmanager
    def inside(self, device: Device, what: object, stream: Agent) -> Iterator[None]:
        """Around a call that the device, a kernel or a graph answers: what it counts as waited for or allocated is reported, and
        a `DeviceError` voids what is in flight."""
        counters: DeviceCounters = device.counters
        syncs, allocations = counters.host_syncs, counters.allocations
        try:
            yield
        except DeviceError:
            self.reset()
            raise
        if counters.host_syncs != syncs:
            self.wait_refused_here(f"wait inside {what}", stream.name)
        if counters.allocations != allocations:
            self._refuse_allocation(self.trace(f"allocation inside {what}", stream.name), str(what))

    # -- steps -------------------------------------------------------------------------------------
    def enter(self, region: Region, step: int) -> None:
        """The launch or the collection of a step begins."""
        self.region, self.step, self._num_waits = region, step, 0

    def leave(self) -> None:
        """It has ended."""
        self.region, self.step = "", None

    def release(self, slot: int, holding: Sequence[int]) -> None:
        """A slot goes back to the ledger while the steps `holding` it are in flight."""
        if holding:
            missing = f"the snapshot of step {holding[-1]}, which holds the slot; release it when that has been applied"
            self.tell("slot-released-in-flight", f"slot {slot}", self.trace("release of a slot and its blocks"), missing)
