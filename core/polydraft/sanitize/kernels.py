"""Owns the watched kernels: providers, metadata and graphs of any backend, whose launches are told to the checker and passed on.

Programs are bound through it instead of the backend's own table. It never changes an argument but to unwrap what it had
wrapped, and a launch does what it did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polydraft.backend import Cache, CacheSpec, ForwardMeta, KernelTable, PassBuffers, StepMeta, Weight
from polydraft.contracts.base import Args, Limits, Provider, Workspace
from polydraft.contracts.composite import CompositeArgs
from polydraft.device import Array, Graph, GraphCapture, Launch, Stream
from polydraft.sanitize.accesses import Declaration, Touch, declare
from polydraft.sanitize.checker import Checker
from polydraft.sanitize.device import WatchedDevice
from polydraft.sanitize.memory import Memory
from polydraft.sanitize.ordering import Recording


class WatchedLaunch:
    """A bound launch. `label` says what it is: its contract and, once the program is known, program and room."""

    def __init__(self, label: str, inner: Launch, declaration: Declaration, device: WatchedDevice) -> None:
        self.label, self._inner, self._declaration, self._device = label, inner, declaration, device

    def __str__(self) -> str:
        return f"launch {self.label}"

    def __call__(self, stream: Stream, n: int) -> None:
        """Tell, then launch."""
        device, checker, declaration = self._device, self._device.checker, self._declaration
        watched = device.stream_of(stream)
        checker.check_rows(self, watched.agent, n, (declaration.smallest,) if declaration.smallest else ())
        trace = checker.issue(watched.agent, self, declaration.touches(n))
        checker.check_addresses(declaration.addresses, trace)
        with checker.inside(device.inner, self, watched.agent):
            self._inner(watched.inner, n)


@dataclass(frozen=True)
class WatchedProvider:
    """A provider of contract (or composite) `name`."""

    name: str
    version: int
    inner: Provider
    device: WatchedDevice

    def bind(self, args: Any, limits: Limits, workspace: Workspace | None) -> Launch:
        """Resolve what the launch may touch, and bind the backend's provider to the backend's own objects."""
        declaration = declare(self.name, self.version, args, workspace, self.device.checker.memories)
        return WatchedLaunch(self.name, self.inner.bind(unwatched(args), limits, workspace), declaration, self.device)

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        """As the backend's."""
        return self.inner.workspace_bytes(unwatched(args), limits)


def unwatched(args: Any) -> Any:
    """The same record with the backend's own metadata."""
    if isinstance(args, CompositeArgs):
        return CompositeArgs(tuple(unwatched(part) for part in args.parts))
    meta = getattr(args, "meta", None)
    if not isinstance(args, Args) or not isinstance(meta, WatchedMeta):
        return args
    return dataclasses.replace(args, meta=meta.inner)  # type: ignore[type-var]  # every subclass of Args is a dataclass


class WatchedMeta:
    """Metadata of one kind of pass: a fill reads the pass's buffers and writes the metadata."""

    def __init__(self, inner: ForwardMeta, buffers: PassBuffers, device: WatchedDevice) -> None:
        self.inner, self._device = inner, device
        self.name = f"{buffers.role} metadata"
        memories = device.checker.memories
        self._mine = memories.add(Memory(self, self.name, 1))
        self._rows = [memories[buffers.row_slot], memories[buffers.positions]]
        self._table = memories[buffers.block_table]
        for memory in (*self._rows, self._table):
            memory.bound = True

    def fill(self, stream: Stream, step: StepMeta) -> None:
        """Tell, then fill."""
        device, checker, n = self._device, self._device.checker, step.launch_rows
        watched = device.stream_of(stream)
        what = f"fill of {self.name} (pass {step.pass_index})"
        checker.check_rows(what, watched.agent, n, self._rows)
        reads = [Touch(memory, 0, min(n, memory.rows), reads=True, writes=False) for memory in self._rows]
        reads.append(Touch(self._table, 0, self._table.rows, reads=True, writes=False))
        checker.issue(watched.agent, what, [*reads, Touch(self._mine, 0, 1, reads=False, writes=True)])
        with checker.inside(device.inner, what, watched.agent):
            self.inner.fill(watched.inner, step)


@dataclass(frozen=True)
class WatchedFactories:
    """The backend's table as `BoundTable` uses it once providers are taken out: factories of weights and caches."""

    inner: KernelTable
    checker: Checker
    providers: Any
    versions: Any

    def prepare_weight(self, role: str, value: Array, dtype: str, previous: Weight | None = None) -> Weight:
        """A new weight, or a refill in place, which nothing in flight may still read."""
        trace = self.checker.trace("preparation of a weight")
        if previous is not None:
            self.checker.host_writes(previous, "refill")
        weight = self.inner.prepare_weight(role, value, dtype, previous)
        if weight is not previous:
            self.checker.memories.add(Memory(weight, f"weight {role}{list(value.shape)}", 1, made=trace))
        return weight

    def allocate_cache(self, spec: CacheSpec) -> Cache:
        """A cache: a region for each block where the device tells which were written, one region elsewhere."""
        name = f"KV cache {sum(memory.name.startswith('KV cache') for memory in self.checker.memories)}"
        trace = self.checker.allocates(name)
        cache = self.inner.allocate_cache(spec)
        self.checker.memories.add(Memory(cache, name, spec.num_blocks, made=trace, paged=True))
        return cache


class WatchedGraph:
    """A captured graph and what it was seen to do."""

    def __init__(self, inner: Graph, recording: Recording, device: WatchedDevice) -> None:
        self.inner, self._recording, self._device = inner, recording, device
        device.checker.captured.add(recording)

    def replay(self, stream: Stream) -> None:
        """Tell every captured operation again, then replay."""
        watched, checker = self._device.stream_of(stream), self._device.checker
        checker.replay(watched.agent, self._recording)
        with checker.inside(self._device.inner, "replay of a graph", watched.agent):
            self.inner.replay(watched.inner)


class WatchedCapture:
    """The capture facility of the backend."""

    def __init__(self, inner: GraphCapture, device: WatchedDevice) -> None:
        self.inner, self._device = inner, device

    def capture(self, stream: Stream, fn: Callable[[], None]) -> WatchedGraph:
        """Capture `fn`, keeping what it tells meanwhile."""
        checker, watched = self._device.checker, self._device.stream_of(stream)
        recording = Recording(checker.trace("capture", watched.agent.name))
        checker.recording = recording

        def launching() -> None:
            try:
                fn()
            finally:
                checker.recording = None  # what the backend does behind `fn` is its own business

        try:
            graph = self._device.failing(lambda: self.inner.capture(watched.inner, launching))
        finally:
            checker.recording = None
        return WatchedGraph(graph, recording, self._device)

    def memory(self) -> int:
        """Bytes held by captured graphs."""
        return self.inner.memory()
