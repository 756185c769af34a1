"""The watched launches, weights, caches and graphs of any backend: reported to the checker and passed on.

What is bound, made and captured by an engine is wrapped by these. They never change an argument, and a launch does what it did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from polydraft.backend import Cache, CacheSpec, ForwardMeta, KernelTable, PassBuffers, Weight
from polydraft.contracts.base import Args
from polydraft.contracts.composite import CompositeArgs
from polydraft.contracts.packing import Matrix
from polydraft.device import Graph, GraphCapture, Launch, Stream
from polydraft.instruments.sanitize.accesses import Declaration, Touch, declare
from polydraft.instruments.sanitize.checker import Checker
from polydraft.instruments.sanitize.device import WatchedDevice
from polydraft.instruments.sanitize.memory import Memory
from polydraft.instruments.sanitize.ordering import Recording
from polydraft.plugins.kernel_table import Binding


@dataclass(frozen=True)
class Pass:
    """Metadata of one kind of pass: its own memory, and what a fill of it reads."""

    name: str
    mine: Memory
    rows: tuple[Memory, ...]
    table: Memory

    @classmethod
    def of(cls, meta: ForwardMeta, buffers: PassBuffers, checker: Checker) -> Pass:
        """The memories of `meta`, which was made for `buffers`."""
        name, memories = f"{buffers.role} metadata", checker.memories
        rows, table = (memories[buffers.row_slot], memories[buffers.positions]), memories[buffers.block_table]
        for memory in (*rows, table):
            memory.bound = True
        return cls(name, memories.add(Memory(meta, name, 1)), rows, table)

    def touches(self, n: int) -> list[Touch]:
        """What a fill for `n` rows touches."""
        reads = [Touch(memory, 0, min(n, memory.rows), reads=True, writes=False) for memory in self.rows]
        reads.append(Touch(self.table, 0, self.table.rows, reads=True, writes=False))
        return [*reads, Touch(self.mine, 0, 1, reads=False, writes=True)]


def watched_launch(binding: Binding, launch: Launch, device: WatchedDevice, passes: Mapping[int, Pass]) -> Launch:
    """A launch that is reported before it runs, on the backend's own stream. What no contract describes is only run there."""
    args = binding.args
    if isinstance(args, (Args, CompositeArgs)):
        declaration = declare(binding.contract, args, binding.workspace, device.checker.memories)
        place = f" ({binding.program}: {binding.stage})" if binding.program else ""
        return WatchedLaunch(f"{binding.contract}{place}", launch, declaration, device)
    if args is None:
        return lambda stream, n: launch(device.stream_of(stream).inner, n)
    filled = passes[id(args.meta)]
    return WatchedFill(f"fill of {filled.name} (pass {args.pass_index})", launch, filled, device)


class WatchedLaunch:
    """A bound launch. `label` says what it is: its contract, program and stage."""

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


class WatchedFill:
    """A fill of metadata."""

    def __init__(self, what: str, inner: Launch, filled: Pass, device: WatchedDevice) -> None:
        self._what, self._inner, self._filled, self._device = what, inner, filled, device

    def __call__(self, stream: Stream, n: int) -> None:
        """Tell, then fill."""
        device, checker, filled = self._device, self._device.checker, self._filled
        watched = device.stream_of(stream)
        checker.check_rows(self._what, watched.agent, n, filled.rows)
        checker.issue(watched.agent, self._what, filled.touches(n))
        with checker.inside(device.inner, self._what, watched.agent):
            self._inner(watched.inner, n)


@dataclass(frozen=True)
class WatchedFactories:
    """The backend's table as `BoundTable` uses it once providers are taken out: factories of weights and caches."""

    inner: KernelTable
    checker: Checker
    providers: Any
    versions: Any

    def prepare_weight(self, role: str, value: Matrix, dtype: str, previous: Weight | None = None) -> Weight:
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
