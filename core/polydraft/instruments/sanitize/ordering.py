"""The bookkeeping of the check: agents and their clocks, what events stand for, and every access held against those before.

`Checker` builds the rules on it. It knows nothing of steps, and never looks at the contents of a memory.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from polydraft.instruments.sanitize.accesses import Touch
from polydraft.instruments.sanitize.hazards import Hazard, Report
from polydraft.instruments.sanitize.memory import Memories, Memory, StagingMemory
from polydraft.instruments.sanitize.observed import Observations
from polydraft.instruments.sanitize.order import HOST, Access, Agent, Clock, covers, join
from polydraft.instruments.sanitize.site import Trace, caller


@dataclass(eq=False)
class Point:
    """What an event stands for: the work behind which it was last recorded."""

    clock: Clock | None = None
    """None until it is recorded."""
    recorded: Trace | None = None
    waited: bool = False
    """Whether somebody has waited for this point."""


@dataclass(eq=False)
class Recording:
    """What a capture has recorded: each operation with its accesses, and where every memory lay. Lives as long as its graph."""

    trace: Trace
    operations: list[tuple[object, list[Touch]]] = field(default_factory=list)
    addresses: dict[Memory, int | None] = field(default_factory=dict)


class Ordering:
    """Who has done what, and what is known to be done. `report` has the findings."""

    def __init__(self, *, strict: bool = False) -> None:
        self.report = Report(strict=strict)
        self.memories = Memories()
        self.host = Agent(HOST, "host")
        self.agents: list[Agent] = [self.host]
        self.step: int | None = None
        self.recording: Recording | None = None
        self.captured: weakref.WeakSet[Recording] = weakref.WeakSet()
        self.observations: Observations | None = None
        self._last_wait: Trace | None = None

    # -- telling -----------------------------------------------------------------------------------
    def trace(self, what: str, where: str = "host") -> Trace:
        """An operation that begins now, called from outside the checker."""
        return Trace(what, where, self.step, *caller())

    def tell(self, name: str, memory: str, second: Trace, missing: str, first: Trace | None = None) -> None:
        """File a hazard."""
        self.report.add(Hazard(name, memory, second.operation, first and first.operation, missing))

    # -- streams and events ------------------------------------------------------------------------
    def agent(self, name: str) -> Agent:
        """A new stream."""
        self.agents.append(Agent(len(self.agents), name))
        return self.agents[-1]

    def record(self, point: Point, stream: Agent, event: str) -> None:
        """An event is recorded on a stream."""
        trace = self.trace(f"record of {event}", stream.name)
        if point.clock is not None and not point.waited and not covers(self.host.clock, point.clock):
            missing = "a wait for the point it stood for, or an event of its own for each"
            self.tell("event-rerecorded", event, trace, missing, point.recorded)
        join(stream.clock, self.host.clock)
        point.clock, point.recorded, point.waited = dict(stream.clock), trace, False

    def stream_waits(self, stream: Agent, point: Point, event: str) -> None:
        """Later work of a stream comes after an event."""
        trace = self.trace(f"wait for {event}", stream.name)
        if point.clock is None:
            self.tell("unrecorded-event", event, trace, "a record of it behind the work that is waited for")
            return
        point.waited = True
        join(stream.clock, point.clock)

    def host_knows(self, point: Point) -> None:
        """The host has seen that the point of an event is reached."""
        if point.clock is not None:
            point.waited = True
            self._last_wait = point.recorded
            join(self.host.clock, point.clock)
        self.observe()

    def host_knows_all(self) -> None:
        """The host knows that all work is done, or that none of it ever will be."""
        for agent in self.agents:
            join(self.host.clock, agent.clock)
        self.observe()

    def observe(self) -> None:
        """Hold what the device saw operations do against what they declare, where it tells."""
        for name, memory, trace, missing in self.observations.undeclared(self.memories) if self.observations else ():
            self.tell(name, memory, trace, missing)

    # -- work of streams ---------------------------------------------------------------------------
    def issue(self, stream: Agent, what: object, touches: list[Touch]) -> Trace:
        """Work is issued on a stream, or recorded while a graph is captured; its trace. `what` is worded by `str`."""
        trace = self.trace(str(what), stream.name)
        if self.observations is not None:
            self.observations.begin(trace, touches, captured=self.recording is not None)
        if self.recording is not None:
            self.recording.operations.append((what, touches))
            for touch in touches:
                self.recording.addresses.setdefault(touch.memory, touch.memory.address)
        else:
            self._run(stream, trace, touches)
        return trace

    def _run(self, stream: Agent, trace: Trace, touches: list[Touch]) -> None:
        join(stream.clock, self.host.clock)
        time = stream.tick()
        for touch in touches:
            self.touch(stream, touch, trace, time)

    def replay(self, stream: Agent, recording: Recording) -> None:
        """The work of a graph is issued again."""
        for memory, address in recording.addresses.items():
            if memory.freed is None and memory.address != address:
                missing = "a copy into the captured memory instead of a new address, or a new capture"
                self.tell("captured-buffer-rebound", memory.name, self.trace("replay", stream.name), missing, recording.trace)
        for what, touches in recording.operations:
            self._run(stream, self.trace(f"{what}, in a graph", stream.name), touches)

    def touch(self, agent: Agent, touch: Touch, trace: Trace, time: int) -> None:
        """One access of an operation that an agent has begun at `time`."""
        memory = touch.memory
        if memory.freed is not None:
            self.tell("freed-memory", memory.name, trace, "memory that is alive", memory.freed)
        copied = memory.uploaded
        if touch.reads and copied is not None and touch.high > copied.rows:
            missing = f"an upload of all rows that are read; the last one wrote {copied.rows}"
            self.tell("stale-padding", memory.named(copied.rows, touch.high), trace, missing, copied.trace)
        if touch.writes:
            memory.uploaded = None
        self.order(agent, touch, trace, time, "unordered-access")

    def order(self, agent: Agent, touch: Touch, trace: Trace, time: int, name: str) -> None:
        """Hold one access against those before it, then keep it."""
        memory, low, high, _, writes = touch
        if low >= high:
            return
        for access, was_write in memory.history.unordered(agent.clock, low, high, write=writes):
            collision = self._collision(name, agent, memory, writes, was_write)
            about = memory.named(max(low, access.low), min(high, access.high))
            self.tell(collision, about, trace, self._edge(access, agent), access.trace)
        memory.history.note(Access(low, high, agent.index, time, trace), write=writes)

    @staticmethod
    def _collision(name: str, agent: Agent, memory: Memory, writes: bool, was_write: bool) -> str:
        if agent.index != HOST or not isinstance(memory, StagingMemory):
            return name
        return "early-host-read" if was_write and not writes else "staging-rewritten"

    def _edge(self, access: Access, agent: Agent) -> str:
        """What would have ordered the two."""
        first = access.trace.where
        event = f"an event recorded on stream {first} behind that operation"
        if agent.index != HOST:
            return f"the edge {first} -> {agent.name}: {event}, which stream {agent.name} waits for"
        edge = f"the edge {first} -> host: {event}, which the host waits for"
        last = self._last_wait
        return f"{edge} (last it waited for one that {last.operation.site} recorded on stream {last.where})" if last else edge
