"""The ways in which a mutant breaks a backend from outside: its kernels, its device, its graphs, its identity.

The faulty backends are made of them. They work around any backend: a faulty kernel is the golden's mutant, run on the host on the
contents of device memory, and written back through ordinary copies. No backend contains any of this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from polydraft.conformance.target import Proxy, TableProxy, bare, wrap
from polydraft.contracts import REGISTRY
from polydraft.contracts.base import ColumnsSpec, OpaqueSpec, ParamSpec, TensorSpec, column_name
from polydraft.contracts.compare import from_host, to_host
from polydraft.contracts.packing import Matrix, PackedWeight
from polydraft.device import Array

Golden = Callable[[Any, int], None]
Corrupt = Callable[[Golden, Any, int], None]
"""`corrupt(golden, a, n)`: what the mutant computes on the namespace `a`, by calling the golden or not."""
Break = Callable[[Any], ModuleType]
"""Turns a plugin into its broken wrapper."""


@contextmanager
def uncounted(device: Any) -> Iterator[None]:
    """What happens in the block leaves no trace in the device's counters: a mutant must die of its fault alone."""
    before = device.counters.copy()
    try:
        yield
    finally:
        for field in dataclasses.fields(before):
            setattr(device.counters, field.name, getattr(before, field.name))


class Computed:
    """A provider that computes a contract on the host, with a fault. Only for contracts without caches. `weights`: what each
    weight was made from, by its identity."""

    def __init__(self, contract: str, corrupt: Corrupt, device: Any, weights: Mapping[int, Matrix]) -> None:
        self.contract, self._corrupt, self._device, self._weights = REGISTRY[contract], corrupt, device, weights

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        """Allocate the staging now; a launch waits, reads, computes and writes."""
        del limits, workspace
        device, specs = self._device, self.contract.args.specs()
        buffers = {name: buffer for name, (buffer, _) in args.buffers().items()}
        columns = {n: len(getattr(args, n)) for n, s in specs.items() if isinstance(s, ColumnsSpec)}
        with uncounted(device):
            pins = {n: device.staging(f"mutant.{n}", buffer.shape, buffer.dtype) for n, buffer in buffers.items()}
            event = device.event()
        fixed = {n: getattr(args, n) for n, s in specs.items() if isinstance(s, ParamSpec)}
        fixed |= {n: None for n, s in specs.items() if isinstance(s, TensorSpec) and n not in buffers}
        fixed |= {n: self._weights.get(id(getattr(args, n))) for n, s in specs.items() if isinstance(s, OpaqueSpec)}

        def launch(stream: Any, n: int) -> None:
            with uncounted(device):
                for name, buffer in buffers.items():
                    device.download(stream, pins[name], buffer, buffer.shape[0])
                event.record(stream)
                event.synchronize()
                values = {name: from_host(pins[name].array, buffer.dtype).copy() for name, buffer in buffers.items()}
                whole = {n: tuple(values[column_name(n, i)] for i in range(count)) for n, count in columns.items()}
                fields = {name: value for name, value in values.items() if name in specs}
                self._corrupt(self.contract.golden, SimpleNamespace(**fixed, **fields, **whole), n)
                for name, buffer in buffers.items():
                    pins[name].array[...] = to_host(values[name], buffer.dtype)
                    device.upload(stream, buffer, pins[name], buffer.shape[0])
                event.record(stream)
                event.synchronize()

        return launch

    def workspace_bytes(self, args: Any, limits: Any) -> int:
        """None."""
        del args, limits
        return 0


@dataclasses.dataclass(frozen=True)
class BrokenGolden:
    """The `Break` of a kernel that computes a golden with a fault: what it leaves can be worked out on any case (`causes.py`)."""

    contract: str
    corrupt: Corrupt

    def __call__(self, plugin: Any) -> ModuleType:
        """The broken wrapper of a plugin."""
        weights = _Weights()

        def providers(table: Any, device: Any) -> dict[str, Any]:
            del table
            return {self.contract: Computed(self.contract, self.corrupt, device, weights.values)}

        return with_table(providers, without=self.contract, weights=weights)(plugin)


def computed(contract: str, corrupt: Corrupt) -> BrokenGolden:
    """Replace a kernel, and drop the composites that contain it, so that it is used."""
    return BrokenGolden(contract, corrupt)


class _Weights:
    """What prepared weights were made from, in float64, by the identity of the weight; the weights are kept alive with them."""

    def __init__(self) -> None:
        self.values: dict[int, Matrix] = {}
        self._alive: list[Any] = []

    def note(self, weight: Any, value: Matrix, dtype: str) -> None:
        self._alive.append(weight)
        self.values[id(weight)] = value if isinstance(value, PackedWeight) else from_host(to_host(value, dtype), dtype)


class _NotedTable(TableProxy):
    def __init__(self, inner: Any, providers: Mapping[str, Any], weights: _Weights) -> None:
        super().__init__(inner, providers)
        self._weights = weights

    def prepare_weight(self, role: str, value: Matrix, dtype: str, previous: Any = None) -> Any:
        weight = self._inner.prepare_weight(role, value, dtype, previous)
        self._weights.note(weight, value, "f32" if role == "router" else dtype)
        return weight


def launched(contract: str, change: Callable[[Any, Any], Any]) -> Break:
    """Replace a kernel's launch: `change(launch, device)` returns what is launched instead, once for each binding."""
    return with_table(lambda table, device: {contract: Launched(table.providers[contract], change, device)}, without=contract)


class Launched(Proxy):
    """A provider whose launches are replaced."""

    def __init__(self, inner: Any, change: Callable[[Any, Any], Any], device: Any) -> None:
        super().__init__(inner)
        self._change, self._device = change, device

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        return self._change(self._inner.bind(args, limits, workspace), self._device)


def spoiled(contract: str, change: Callable[[Any, int], None]) -> Break:
    """Let a kernel do its work, then change what it left: `change(a, n)` gets host copies of all its buffers by field name, and
    its parameters; what it changes is written back."""
    return with_table(lambda table, device: {contract: Spoiled(table.providers[contract], change, device)}, without=contract)


class Spoiled(Proxy):
    """A provider of which each launch is followed by a change of what it left, as `spoiled` says."""

    def __init__(self, inner: Any, change: Callable[[Any, int], None], device: Any) -> None:
        super().__init__(inner)
        self._change, self._device = change, device

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        launch, device, change = self._inner.bind(args, limits, workspace), self._device, self._change
        buffers = {name: buffer for name, (buffer, _) in args.buffers().items()}
        fixed = {n: getattr(args, n) for n, s in args.specs().items() if isinstance(s, ParamSpec)}
        with uncounted(device):
            pins = {n: device.staging(f"mutant.{n}", buffer.shape, buffer.dtype) for n, buffer in buffers.items()}
            event = device.event()

        def run(stream: Any, n: int) -> None:
            launch(stream, n)
            with uncounted(device):
                for name, buffer in buffers.items():
                    device.download(stream, pins[name], buffer, buffer.shape[0])
                event.record(stream)
                event.synchronize()
                left = {name: from_host(pins[name].array, buffer.dtype).copy() for name, buffer in buffers.items()}
                change(SimpleNamespace(**fixed, **left), n)
                for name, buffer in buffers.items():
                    array = to_host(left[name], buffer.dtype)
                    if not (array == pins[name].array).all():
                        pins[name].array[...] = array
                        device.upload(stream, buffer, pins[name], buffer.shape[0])
                event.record(stream)
                event.synchronize()

        return run


def rebound(contract: str, change: Callable[[Any], Any]) -> Break:
    """Bind a kernel to other arguments: `change(args)` returns them."""
    return with_table(lambda table, device: {contract: _Rebound(table.providers[contract], change)}, without=contract)


class _Rebound(Proxy):
    def __init__(self, inner: Any, change: Callable[[Any], Any]) -> None:
        super().__init__(inner)
        self._change = change

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        return self._inner.bind(self._change(args), limits, workspace)

    def workspace_bytes(self, args: Any, limits: Any) -> int:
        return int(self._inner.workspace_bytes(self._change(args), limits))


class BoundLast(Proxy):
    """A provider with one place for what it is bound to: every launch works on what was bound last."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._last: list[Any] = [None]

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        self._last[0] = self._inner.bind(args, limits, workspace)

        def launch(stream: Any, n: int) -> None:
            self._last[0](stream, n)  # whatever that is by then

        return launch


def offering(kept: Callable[[str], bool]) -> Break:
    """A backend that offers only the contracts and composites whose names are `kept`, and declares no more than that."""

    def those(mapping: Any) -> dict[str, Any]:
        return {name: value for name, value in mapping.items() if kept(name)}

    def table(answer: Any, device: Any) -> Any:
        del device
        changed = TableProxy(answer, {})
        changed.providers, changed.versions = those(answer.providers), those(answer.versions)
        return changed

    def info(answer: Any) -> Any:
        declared = answer.capabilities
        declared = dataclasses.replace(declared, ordered_sums=declared.ordered_sums and kept("sum_leaves"))
        return dataclasses.replace(answer, contract_versions=those(answer.contract_versions), capabilities=declared)

    return lambda plugin: wrap(plugin, polydraft_kernels=table, polydraft_backend_info=info)


def with_table(providers: Callable[[Any, Any], dict[str, Any]], *, without: str = "", weights: _Weights | None = None) -> Break:
    """A backend with some providers replaced, and without the composites that contain the contract `without`. `weights` notes
    what weights are made from."""

    def dropped(name: str) -> bool:
        return "+" in name and without in name.split("+")

    def table(answer: Any, device: Any) -> Any:
        mine = providers(answer, bare(device))
        changed = TableProxy(answer, mine) if weights is None else _NotedTable(answer, mine, weights)
        changed.providers = {name: one for name, one in changed.providers.items() if not dropped(name)}
        changed.versions = {name: answer.versions[name] for name in changed.providers}
        return changed

    def info(answer: Any) -> Any:
        kept = {name: version for name, version in answer.contract_versions.items() if not dropped(name)}
        return dataclasses.replace(answer, contract_versions=kept)

    return lambda plugin: wrap(plugin, polydraft_kernels=table, polydraft_backend_info=info)


def with_device(make: Callable[[Any], Any]) -> Break:
    """A backend whose device is replaced by `make(device)`, a `Proxy`."""
    return lambda plugin: wrap(plugin, polydraft_open_device=lambda answer, **_: make(answer))


def with_capture(make: Callable[[Any, Any], Any]) -> Break:
    """A backend whose capture facility is replaced by `make(facility, device)`."""
    return lambda plugin: wrap(plugin, polydraft_graph_capture=lambda answer, device: make(answer, bare(device)))


def with_info(change: Callable[[Any], Any]) -> Break:
    """A backend that says something else of itself."""
    return lambda plugin: wrap(plugin, polydraft_backend_info=change)


# -- devices -------------------------------------------------------------------------------------------
class EventDevice(Proxy):
    """A device whose events are replaced."""

    def __init__(self, inner: Any, event: Callable[[Any, Any], Any]) -> None:
        super().__init__(inner)
        self._event = event

    def event(self) -> Any:
        return self._event(self._inner.event(), self)


class NeverWaits(Proxy):
    """An event whose `synchronize` returns at once."""

    def synchronize(self) -> None:
        """Nothing is waited for."""


class AlwaysReached(Proxy):
    """An event whose `query` says True."""

    def query(self) -> bool:
        return True


class HesitatesOnce(Proxy):
    """An event whose first `query` behind a record says False: legal, since it never promises progress."""

    _asked = True

    def record(self, stream: Any) -> None:
        self._asked = False
        self._inner.record(stream)

    def query(self) -> bool:
        if not self._asked:
            self._asked = True
            return False
        return bool(self._inner.query())


class LateDownloads(Proxy):
    """A device whose downloads are enqueued behind the event that should stand behind them."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.pending: list[tuple[Any, ...]] = []

    def download(self, stream: Any, target: Any, source: Any, rows: int) -> None:
        self.pending.append((stream, target, source, rows))

    def event(self) -> Any:
        return _EarlyEvent(self._inner.event(), self)


class _EarlyEvent(Proxy):
    def __init__(self, inner: Any, device: LateDownloads) -> None:
        super().__init__(inner)
        self._device = device

    def record(self, stream: Any) -> None:
        self._inner.record(stream)
        for one in self._device.pending:
            self._device._inner.download(*one)
        self._device.pending.clear()


class SharedStaging(Proxy):
    """A device that hands out one piece of host memory for all sets of staging that are called alike but for digits."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._first: dict[str, Any] = {}

    def staging(self, name: str, shape: Any, dtype: str) -> Any:
        plain = "".join(c for c in name if not c.isdigit())
        own = self._inner.staging(name, shape, dtype)
        return self._first.setdefault(plain, own) if name != plain else own


class HeedlessStreams(Proxy):
    """A device whose streams do not wait for each other."""

    def make_stream(self, name: str) -> Any:
        stream = self._inner.make_stream(name)
        object.__setattr__(stream, "wait", lambda event: None)
        return stream


class SynchronousCopies(Proxy):
    """A device that waits behind every download: slower, and legal, though L6 would count it."""

    def download(self, stream: Any, target: Any, source: Any, rows: int) -> None:
        self._inner.download(stream, target, source, rows)
        with uncounted(self._inner):
            self._inner.synchronize()


# -- graphs --------------------------------------------------------------------------------------------
class NeverCaptures(Proxy):
    """A facility that runs the function again instead of replaying a graph."""

    def capture(self, stream: Any, fn: Callable[[], None]) -> Any:
        del stream
        return SimpleNamespace(replay=lambda stream: fn())


class NotedCaptures(Proxy):
    """A facility that says in `captures` whether it captures now."""

    def __init__(self, inner: Any, captures: list[bool]) -> None:
        super().__init__(inner)
        self._captures = captures

    def capture(self, stream: Any, fn: Callable[[], None]) -> Any:
        self._captures[0] = True
        try:
            return self._inner.capture(stream, fn)
        finally:
            self._captures[0] = False


class OneGraph(Proxy):
    """A facility all of whose graphs replay what was captured last."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._last: list[Any] = [None]

    def capture(self, stream: Any, fn: Callable[[], None]) -> Any:
        self._last[0] = self._inner.capture(stream, fn)

        def replay(stream: Any) -> None:
            self._last[0].replay(stream)

        return SimpleNamespace(replay=replay)


class RunsWhileCapturing(Proxy):
    """A facility that runs what it captures as well."""

    def capture(self, stream: Any, fn: Callable[[], None]) -> Any:
        graph = self._inner.capture(stream, fn)
        fn()
        return graph


class Stale:
    """A launch that reads, for ever, what an input held when it was launched first: a new tensor was assigned."""

    def __init__(self, field: str) -> None:
        self.field = field

    def provider(self, inner: Any, device: Any) -> Any:
        """Wrap a provider."""
        return _StaleProvider(inner, device, self.field)


class _StaleProvider(Proxy):
    def __init__(self, inner: Any, device: Any, field: str) -> None:
        super().__init__(inner)
        self._device, self._field = device, field

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        device, real = self._device, getattr(args, self._field)
        with uncounted(device):
            shadow = device.empty("mutant.shadow", real.shape, real.dtype)
            pin, event = device.staging("mutant.shadow", real.shape, real.dtype), device.event()
        launch = self._inner.bind(dataclasses.replace(args, **{self._field: shadow}), limits, workspace)
        copied: list[bool] = []

        def stale(stream: Any, n: int) -> None:
            if not copied:
                copied.append(True)
                with uncounted(device):
                    device.download(stream, pin, real, real.shape[0])
                    device.upload(stream, shadow, pin, real.shape[0])
                    event.record(stream)
                    event.synchronize()
            launch(stream, n)

        return stale


def once(launch: Any, device: Any) -> Any:
    """A launch that works the first time and then never again."""
    del device
    done: list[bool] = []

    def run(stream: Any, n: int) -> None:
        if not done:
            done.append(True)
            launch(stream, n)

    return run


def late(launch: Any, device: Any) -> Any:
    """A launch whose work happens when it is launched the next time: meanwhile it is on a stream of its own, and looks free."""
    del device
    pending: list[tuple[Any, int]] = []

    def run(stream: Any, n: int) -> None:
        pending.append((stream, n))
        if len(pending) > 1:
            launch(*pending.pop(0))

    return run


def keep(a: Any, name: str) -> Array:
    """What an array holds now."""
    array: Array = getattr(a, name).copy()
    return array
