"""What an instrument is, and how a list of them comes to lie around one engine.

An instrument looks at a run without changing it. It may wrap three places, and no others:

* *bind*: every launch that is enqueued by itself (`Instrument.bind`): providers bound to their records, fills of forward
  metadata, blocks that compute themselves. What a graph replays was wrapped when it was captured, and is not seen again.
* *device*: the device that everything is built with (`device`), the backend's factories of weights and caches (`factories`) and
  its graphs (`capture`). Plugins only ever see their own device (`bare`).
* *step*: the named points of a step on the host (`begin`, `end` of the `stages` it names), see `polydraft.program.points`.

Several instruments wrap each place in one order, whatever order they were given in: a lower `order` lies further outside.

| order | instrument | lies there because |
|---|---|---|
| 0 | of plugins, unless they say otherwise | what is asked of core's own instruments is asked of the engine as they show it |
| 10 | record | its waits and copies must not look like the engine's: nothing further inside sees them |
| 20 | sanitize | it holds what the engine asks of the device against what orders it |
| 30 | trace | it times calls of the device without the checker's work for them |
| 40 | idle | it must take next to no time: nothing lies between it and the device but a counter |
| 50 | allocations | it counts what the device counts |
| 60 | drafts | it looks at plans alone |

What an instrument asks of the device for itself it asks of the bare one, within `Aside`; then no other instrument takes that
for the engine's doing.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

from polydraft.device import Array, Buffer, Device, DeviceCounters, Event, GraphCapture, Launch, Staging, Stream
from polydraft.errors import ConfigError
from polydraft.instruments.timeline import clock_of, keeps_timeline
from polydraft.plugins.checks import check_result
from polydraft.plugins.plugins import Plugins
from polydraft.program.points import Points, Stage

if TYPE_CHECKING:
    from polydraft.backend import BackendInfo, Collectives, DeviceOptions, ForwardMeta, KernelTable, PassBuffers
    from polydraft.contracts.base import Limits
    from polydraft.engine import Engine
    from polydraft.plugins.kernel_table import Binding, BoundTable
    from polydraft.ranks import Group
    from polydraft.resolve import Resolved

I = TypeVar("I", bound="Instrument")  # noqa: E741  the kind of instrument that is asked for


@dataclass(frozen=True)
class Setting:
    """What is known of an engine before anything of it is built: what was decided, and what the backend says of itself."""

    resolved: Resolved
    info: BackendInfo


class Instrument:
    """One instrument of one engine; a base class whose every place leaves things as they are.

    `on`: whether it begins when the engine is built. One that is off wraps its places all the same, and passes calls on; `start`
    and `stop` turn it on and off between steps."""

    name: ClassVar[str]
    """What refusals call it; an engine has one of each name."""
    reads_weights: ClassVar[bool] = False
    """Whether it reads values of weights again where they were loaded from."""
    order: int = 0
    """Its place among others; a lower one lies further outside."""
    stages: ClassVar[tuple[Stage, ...]] = ()
    """At which points of a step it listens while it is on."""
    eager: ClassVar[bool] = False
    """Whether it has the launches of steps enqueued one by one which would be replayed as graphs (`Points.eager`)."""
    measures: ClassVar[bool] = False
    """Whether what it reports is how long steps take as they are served: nothing may have them launched in another way."""
    graphs: ClassVar[Literal["any", "off", "on"]] = "any"
    """What it needs of graphs."""
    apart: ClassVar[Mapping[str, str]] = {}
    """Names of instruments that it cannot go with, each with the reason as half a sentence."""

    def __init__(self, *, on: bool = True) -> None:
        self._on = on
        self._engine: Engine | None = None

    # -- before anything is built ------------------------------------------------------------------
    def refuse(self, setting: Setting) -> str:
        """Why it cannot look at this engine, with what to do about it; "" where it can."""
        del setting
        return ""

    # -- places ------------------------------------------------------------------------------------
    def device(self, device: Device) -> Device:
        """The device that everything is built with."""
        return device

    def factories(self, table: KernelTable) -> KernelTable:
        """What the backend makes weights and caches by."""
        return table

    def capture(self, capture: GraphCapture) -> GraphCapture:
        """What the backend captures graphs by."""
        return capture

    def metadata(self, meta: ForwardMeta, buffers: PassBuffers) -> None:
        """Called with the metadata for one kind of pass, and of the buffers that it is filled from."""

    def bind(self, binding: Binding, launch: Launch) -> Launch:
        """A launch that is enqueued by itself."""
        del binding
        return launch

    def begin(self, stage: Stage, subject: Any) -> None:
        """A stage of `stages` is about to begin, see `polydraft.program.points`."""

    def end(self, stage: Stage, subject: Any, result: Any) -> None:
        """It has ended."""

    # -- its life ----------------------------------------------------------------------------------
    @property
    def engine(self) -> Engine:
        """The engine that it looks at. Raises `ConfigError` before there is one."""
        if self._engine is None:
            raise ConfigError(f"{self.name} looks at no engine yet; give it to one: Engine(..., instruments=(...,))")
        return self._engine

    @property
    def is_on(self) -> bool:
        """Whether it listens now, or will once the engine is built."""
        return self._on

    def built(self, engine: Engine) -> None:
        """All of the engine is there; the first step is still to come."""
        self._engine = engine
        if self._on:
            self.start()

    def start(self) -> None:
        """Begin, or go on."""
        self._on = True
        for stage in self.stages:
            self.engine.points.add(stage, self)

    def stop(self) -> None:
        """Stop; what was found stays."""
        self._on = False
        for stage in self.stages:
            self.engine.points.remove(stage, self)

    def closing(self) -> None:
        """The engine is about to give its device back."""

    def close(self) -> None:
        """The engine has given its device back. May raise what it has to say of the run."""


class Instruments:
    """The instruments of one engine, outermost first; one object around each place, whichever of them wrap it."""

    def __init__(self, given: Sequence[Instrument], brought: Sequence[tuple[str, Instrument]] = ()) -> None:
        """`given` to the engine, and `brought` by its plugins, each with the name of its plugin."""
        for plugin, one in brought:
            check_result(plugin, "polydraft_instruments", one, Instrument)
        given = (*given, *(one for _, one in brought))
        for one in given:
            if not isinstance(one, Instrument):
                raise ConfigError(f"instruments have {one!r}, wanted objects of polydraft.instruments; make one, such as Trace()")
            if one._engine is not None:
                raise ConfigError(f"{one.name} looks at an engine already, wanted one for this engine alone; make another")
        self._all = tuple(sorted(given, key=lambda one: one.order))
        self.aside = Aside()
        self.points = Points()
        """Where they listen to a step."""

    def __iter__(self) -> Iterator[Instrument]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def inwards(self) -> tuple[Instrument, ...]:
        """Innermost first: the order in which things are wrapped."""
        return self._all[::-1]

    def find(self, kind: type[I]) -> I | None:
        """The instrument of this kind, if there is one."""
        return next((one for one in self._all if isinstance(one, kind)), None)

    def __getitem__(self, kind: type[I]) -> I:
        """The instrument of this kind. Raises `ConfigError` where there is none."""
        found = self.find(kind)
        if found is None:
            raise ConfigError(
                f"this engine has no instrument {kind.name!r}, wanted one that it was built with; build it with "
                f"instruments=({kind.__name__}(),)"
            )
        return found

    def check(self, setting: Setting) -> None:
        """Raise `ConfigError` for instruments that cannot look at such an engine, or not together."""
        graph = setting.resolved.graph
        for one in self._all:
            reason = one.refuse(setting)
            if not reason and one.graphs == "on" and graph == "off":
                reason = "it looks at graphs, and this engine has none; choose --graph decode, or leave it out"
            if not reason and one.graphs == "off" and graph != "off":
                reason = f"it needs launches, and this engine replays graphs ({graph}); choose --graph off, or leave it out"
            if reason:
                raise ConfigError(f"instrument {one.name}: {reason}")
        for one, other in itertools.combinations(self._all, 2):
            reason = _apart(one, other, graph)
            if reason:
                raise ConfigError(f"instruments {one.name} and {other.name}: {reason}")

    def over(self, plugins: Plugins) -> Plugins:
        """The plugins as the engine is built with them: their answers wrapped. Without instruments they are what they were."""
        if not self._all:
            return plugins
        fields = {field.name: getattr(plugins, field.name) for field in dataclasses.fields(Plugins)}
        return InstrumentedPlugins(**fields, instruments=self)

    def built(self, engine: Engine) -> None:
        """All of the engine is there."""
        for one in self.inwards:
            one.built(engine)

    def closing(self) -> None:
        """The engine is about to give its device back."""
        for one in self._all:
            one.closing()

    def close(self) -> None:
        """The engine has given its device back; raises the first thing that an instrument has to say, once all were notified."""
        said: list[Exception] = []
        for one in self._all:
            try:
                one.close()
            except Exception as error:  # noqa: BLE001  raised below
                said.append(error)
        if said:
            raise said[0]


def _apart(one: Instrument, other: Instrument, graph: str) -> str:
    """Why two instruments cannot go together in an engine with graphs of this mode; "" where they can."""
    if one.name == other.name:
        return "there may be one of each; leave one out"
    for a, b in ((one, other), (other, one)):
        if b.name in a.apart:
            return f"{a.apart[b.name]}; run them one by one"
        if a.eager and b.measures and graph != "off":
            return (
                f"{a.name} has launches enqueued one by one, and {b.name} measures steps that are replayed as graphs ({graph}); "
                "run them one by one, or both with --graph off"
            )
    return ""


class Allocated(NamedTuple):
    """So many allocations, of so many bytes together."""

    number: int
    nbytes: int

    def __sub__(self, other: Allocated) -> Allocated:
        return Allocated(self.number - other.number, self.nbytes - other.nbytes)


class Aside:
    """What instruments ask of the bare device for themselves, so that others can leave it out of what they say of the engine."""

    def __init__(self) -> None:
        self._begun: list[float] = []
        self._ended: list[float] = []
        self.allocated = Allocated(0, 0)
        """What they took for it."""

    @contextmanager
    def of(self, device: Device) -> Iterator[None]:
        """Around such calls."""
        counters: DeviceCounters = device.counters
        before = Allocated(counters.allocations, counters.bytes_allocated)
        now, timed = clock_of(device), keeps_timeline(device)
        observing: Any = device if hasattr(device, "observed_accesses") else None
        operation = observing.operation if observing else 0
        begun = now()
        try:
            if observing:
                observing.operation = 0  # nobody's: what is touched now is held against no declaration
            yield
        finally:
            if observing:
                observing.operation = operation
            if timed:
                self._begun.append(begun)
                self._ended.append(now())
            more = Allocated(counters.allocations, counters.bytes_allocated) - before
            self.allocated = Allocated(self.allocated.number + more.number, self.allocated.nbytes + more.nbytes)

    def covers(self, moment_s: float) -> bool:
        """Whether something was asked for at a moment of the device's clock."""
        place = bisect.bisect_right(self._begun, moment_s) - 1
        return place >= 0 and moment_s <= self._ended[place]


# -- the device --------------------------------------------------------------------------------------
class WrappedDevice:
    """A device around another that passes every call on; instruments override what they look at. What a device has beyond the
    protocol is reached as it is."""

    def __init__(self, inner: Device) -> None:
        self.inner = inner
        self.stream: Stream = inner.stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def spec(self) -> str:
        """The device as the user names it."""
        return self.inner.spec

    @property
    def counters(self) -> DeviceCounters:
        """The bare device's own."""
        return self.inner.counters

    def empty(self, name: str, shape: Sequence[int], dtype: str) -> Buffer:
        """As the device."""
        return self.inner.empty(name, shape, dtype)

    def staging(self, name: str, shape: Sequence[int], dtype: str) -> Staging:
        """As the device."""
        return self.inner.staging(name, shape, dtype)

    def event(self) -> Event:
        """As the device."""
        return self.inner.event()

    def upload(self, stream: Stream, target: Buffer, source: Staging, rows: int) -> None:
        """As the device."""
        self.inner.upload(stream, target, source, rows)

    def download(self, stream: Stream, target: Staging, source: Buffer, rows: int) -> None:
        """As the device."""
        self.inner.download(stream, target, source, rows)

    def load(self, target: Buffer, value: Array) -> None:
        """As the device."""
        self.inner.load(target, value)

    def memory(self) -> int:
        """As the device."""
        return self.inner.memory()

    def synchronize(self) -> None:
        """As the device."""
        self.inner.synchronize()

    def close(self) -> None:
        """As the device."""
        self.inner.close()


def bare(device: Device) -> Device:
    """The backend's own device, below all instruments."""
    while isinstance(device, WrappedDevice):
        device = device.inner
    return device


# -- the plugins -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class InstrumentedPlugins(Plugins):
    """One engine's plugins, whose answers come wrapped by its instruments; they themselves see their own device."""

    instruments: Instruments = dataclasses.field(default_factory=lambda: Instruments(()))

    def open_device(self, spec: str, options: DeviceOptions) -> Device:
        """Open the backend's device; what is built with it is wrapped."""
        device = super().open_device(spec, options)
        for one in self.instruments.inwards:
            device = one.device(device)
        return device

    def kernels(self, device: Device) -> BoundTable:
        """The table with packs laid over it; what it binds and what it makes is wrapped."""
        table = super().kernels(bare(device))
        backend = table.backend
        for one in self.instruments.inwards:
            backend = one.factories(backend)
        return dataclasses.replace(table, backend=backend, device=device, instruments=self.instruments.inwards)

    def collectives(self, device: Device, group: Group) -> Collectives:
        """The backend's collectives; what they are bound to is wrapped as launches of the table are."""
        return super().collectives(bare(device), group)

    def graph_capture(self, device: Device) -> GraphCapture:
        """The backend's capture facility, wrapped."""
        capture = super().graph_capture(bare(device))
        for one in self.instruments.inwards:
            capture = one.capture(capture)
        return capture

    def init_forward_meta(self, device: Device, buffers: PassBuffers, limits: Limits) -> ForwardMeta:
        """The backend's metadata for one kind of pass; all instruments are notified."""
        meta = super().init_forward_meta(bare(device), buffers, limits)
        for one in self.instruments.inwards:
            one.metadata(meta, buffers)
        return meta


__all__ = ["Allocated", "Aside", "Instrument", "InstrumentedPlugins", "Instruments", "Points", "Setting", "WrappedDevice", "bare"]
