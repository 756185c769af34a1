"""Happens-before: vector clocks of the host and of every stream, and who touched which rows of a memory last.

The checker asks it at every operation. It knows nothing of devices: an edge exists because the checker joined two clocks.

A clock maps an agent to the time of the last of its operations that is known to be done. An operation of an agent comes after
whatever its clock knows; two operations are unordered when neither clock knows the other (Lamport 1978; Mattern 1989). Each
memory keeps the last write and the reads since, by agent, as FastTrack does (Flanagan and Freund 2009), but by row ranges.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from polydraft.instruments.sanitize.site import Trace

HOST = 0
"""Index of the host among the agents."""

Clock = dict[int, int]


def join(clock: Clock, other: Clock) -> None:
    """Let `clock` know what `other` knows."""
    for agent, time in other.items():
        if clock.get(agent, 0) < time:
            clock[agent] = time


def covers(clock: Clock, other: Clock) -> bool:
    """Whether `clock` knows all that `other` knows."""
    return all(clock.get(agent, 0) >= time for agent, time in other.items())


class Agent:
    """The host or one stream: does its operations one after the other."""

    __slots__ = ("clock", "index", "name")

    def __init__(self, index: int, name: str) -> None:
        self.index, self.name = index, name
        self.clock: Clock = {index: 0}

    def tick(self) -> int:
        """Begin an operation; its time."""
        self.clock[self.index] += 1
        return self.clock[self.index]


class Access(NamedTuple):
    """Rows [low, high) of a memory, touched by one operation of an agent."""

    low: int
    high: int
    agent: int
    time: int
    trace: Trace

    def known_to(self, clock: Clock) -> bool:
        """Whether the operation is done for whoever has this clock."""
        return clock.get(self.agent, 0) >= self.time


class History:
    """Accesses to one memory that a later one could collide with.

    An access that a later write covers is forgotten: whatever collides with it collides with that write too, or comes after."""

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        self.reads: list[Access] = []
        self.writes: list[Access] = []

    def unordered(self, clock: Clock, low: int, high: int, *, write: bool) -> Iterator[tuple[Access, bool]]:
        """Accesses (and whether each is a write) that collide with an access to [low, high) by whoever has `clock`."""
        for access in self.writes:
            if access.low < high and low < access.high and not access.known_to(clock):
                yield access, True
        for access in self.reads if write else ():
            if access.low < high and low < access.high and not access.known_to(clock):
                yield access, False

    def note(self, access: Access, *, write: bool) -> None:
        """Keep an access, and forget what it makes superfluous."""
        low, high, agent = access.low, access.high, access.agent
        if write:
            self.writes = [a for a in self.writes if a.low < low or high < a.high]
            self.writes.append(access)
            if self.reads:
                self.reads = [a for a in self.reads if a.low < low or high < a.high]
        else:
            self.reads = [a for a in self.reads if a.agent != agent or a.low < low or high < a.high]
            self.reads.append(access)
