"""The backend under test as the checks see it: its identity, fresh devices with a kernel table, engines on the probe model.

Every check gets one `Target`; for a faulty backend it wraps a plugin instead of the real one. It compares nothing.
"""

from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from polydraft import reference
from polydraft.backend import BackendInfo, DeviceOptions, ForwardMeta, PassBuffers
from polydraft.config import EngineConfig
from polydraft.conformance.probe import Model, checkpoint
from polydraft.contracts.base import Limits
from polydraft.contracts.compare import Products
from polydraft.contracts.inputs import contract_of
from polydraft.device import Device
from polydraft.engine import Engine
from polydraft.errors import ConfigError, DeviceError, PolydraftError
from polydraft.host.draft_policy import DraftPolicy
from polydraft.instruments.base import Instrument
from polydraft.plugins.bring_up import Delegated
from polydraft.plugins.checks import check_device
from polydraft.plugins.kernel_table import BoundTable
from polydraft.plugins.plugins import Plugins
from polydraft.resolve import FIXED_DRAFTS


@dataclass(frozen=True)
class Opened:
    """An open device with everything that the harness wants."""

    device: Device
    table: BoundTable
    init_meta: Callable[[Device, PassBuffers, Limits], ForwardMeta]
    products: Products
    """`Capabilities.f32_matmul`."""
    aside: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What checks keep with the device, by a name of theirs."""


class Target:
    """A backend under test. `device` is what `--device` says, `files` what `--plugin` names, `packs` what `--kernels` does.
    Variants of the backend that have passed on this device are in use, as for a user, unless `variants` is off; with
    `allow_cpu_fallback` what the device has no kernel for may run on the CPU.

    Where no device is named it is the backend's default, or, if that does not declare the capabilities that a test `wants`, the
    first of the backend's devices that does; `device_reason` then says so.

    Raises `PluginError` for a backend or pack that cannot be loaded."""

    def __init__(
        self,
        backend: str | object,
        *,
        device: str = "",
        files: Sequence[str] = (),
        packs: Sequence[str] = (),
        variants: bool = True,
        wants: Sequence[str] = (),
        allow_cpu_fallback: bool = False,
    ) -> None:
        self.plugins = Plugins.load(backend, files=files, packs=packs, device=device, variants=variants)
        self.device_reason = ""
        if not device and (device := _device_with(wants, self.plugins)):
            self.device_reason = f"none was named, and it is the first that declares {' and '.join(wants)}"
            self.plugins = Plugins.load(backend, files=files, packs=packs, device=device, variants=variants)
        self.device_spec, self.files, self.packs, self.uses_variants = device, tuple(files), tuple(packs), variants
        self.allow_cpu_fallback = allow_cpu_fallback
        self.owners: dict[str, str] = {}
        """Whose code each offered kernel runs in (`outcomes.Ownership`); filled by level L0."""
        self.withdrawn: Mapping[str, str] = {}
        """Capabilities that the device was found to lack when it was opened (`BackendInfo.withdrawn`)."""
        self.kernels: dict[str, Any] = {}
        """`BoundTable.report` of what packs that were named serve; filled by `ask_packs`."""
        self._kept: tuple[object, Opened] | None = None

    @property
    def info(self) -> BackendInfo:
        """The backend's identity, less what its device was found to lack."""
        return self.plugins.info().without(self.withdrawn)

    @property
    def plugin(self) -> object:
        """The plugin itself."""
        return self.plugins.backend.plugin

    @property
    def command(self) -> str:
        """The command that runs the kit on it again, to which a selection can be added."""
        options = {"--device": (self.device_spec,), "--plugin": self.files, "--kernels": (",".join(self.packs),)}
        given = [f"{option} {shlex.quote(value)}" for option, values in options.items() for value in values if value]
        given += ["--allow-cpu-fallback"] if self.allow_cpu_fallback else []
        return " ".join(["polydraft conform", self.info.name, *given])

    @cached_property
    def offered(self) -> Mapping[str, int]:
        """Name to version of what can be bound: the backend's kernels with the packs laid over them."""
        if not self.plugins.packs and not self.plugins.variants:
            return self.info.contract_versions
        opened = self.open()
        opened.device.close()
        return opened.table.versions

    @property
    def is_reference(self) -> bool:
        """Whether this is the reference, whose arithmetic is its own."""
        return getattr(self.plugin, "conformance_base", self.plugin) is reference

    def rounding(self, dtype: str) -> str:
        """How coarsely an engine with activations in `dtype` computes: as that, but "tf32" where factors of float32 products are
        rounded so."""
        return "tf32" if dtype == "f32" and self.info.capabilities.f32_matmul == "tf32" else dtype

    def device_of(self, ranks: int) -> str:
        """The device of an engine with so many ranks: as many of those that were named."""
        shared = not self.info.capabilities.rank_devices
        return self.device_spec if shared else ",".join(self.device_spec.split(",")[:ranks])

    def open(self, *, dtype: str = "", row_invariant: bool = False, rank: int = 0) -> Opened:
        """Open a fresh device, of one rank of several."""
        device = self._open(dtype, row_invariant, rank)
        return Opened(device, self.plugins.kernels(device), self.plugins.init_forward_meta, self.info.capabilities.f32_matmul)

    def _open(self, dtype: str = "", row_invariant: bool = False, rank: int = 0) -> Device:
        options = DeviceOptions(dtype or self.info.capabilities.dtypes[0], row_invariant, self.allow_cpu_fallback, rank=rank)
        device = self.plugins.open_device(self.device_of(1 + rank), options)
        self.withdrawn = self.plugins.info_of(device).withdrawn
        check_device(self.info.name, device)
        return device

    def refuse_unopenable(self) -> None:
        """Raise `DeviceError` where a device was named that cannot be opened: no check could say anything of the backend then. A
        default that cannot be opened, and a plugin that fails in opening, are found by the checks."""
        if not self.device_spec:
            return
        try:
            self._open().close()
        except (DeviceError, ConfigError) as error:
            raise DeviceError(str(error)) from error

    def ask_packs(self) -> None:
        """Fill `kernels` where packs were named. Raises `PluginError` where one of them has no table for the device; that a
        device cannot be opened is found by the checks."""
        if not self.plugins.packs:
            return
        try:
            opened = self.open()
        except (DeviceError, ConfigError):
            return
        self.kernels = opened.table.report()
        opened.device.close()

    def opened(self, *, dtype: str = "", row_invariant: bool = False, key: object = None) -> Opened:
        """A device that lives as long as consecutive callers agree on the arguments; `key` bounds what it piles up."""
        wanted = (dtype, row_invariant, key)
        if self._kept is None or self._kept[0] != wanted:
            self.close()
            self._kept = wanted, self.open(dtype=dtype, row_invariant=row_invariant)
        return self._kept[1]

    def close(self) -> None:
        """Close the device that was kept."""
        if self._kept is not None:
            with suppress(PolydraftError):  # a lost device may refuse to be closed; its check has said so
                self._kept[1].device.close()
        self._kept = None

    def within(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options of an engine with as many slots and drafts as the backend declares at most, and buckets that fit them. Every
        step makes as many drafts: what one does must not depend on measured times."""
        declared, found = self.info.capabilities, dict(options)
        most = {"max_num_seqs": declared.max_seqs, "draft_tokens": declared.max_window - 1}
        found.setdefault("max_num_seqs", EngineConfig.max_num_seqs)
        found.setdefault("draft_tokens", FIXED_DRAFTS)
        found |= {name: min(found[name], bound) for name, bound in most.items() if isinstance(found.get(name), int)}
        if found.get("graph") == "decode" and "graph_sizes" in found:
            found["graph_sizes"] = tuple(sorted({min(size, found["max_num_seqs"]) for size in found["graph_sizes"]}))
        return found

    @contextmanager
    def engine(
        self,
        *,
        plugin: object | None = None,
        features: Sequence[Any] = (),
        instruments: Sequence[Instrument] = (),
        draft_policy: DraftPolicy | None = None,
        model: Model = "dense",
        within: bool = True,
        **options: Any,
    ) -> Iterator[Engine]:
        """An engine on a probe model, closed behind the block. Row-invariant arithmetic where the backend declares it. Slots and
        drafts are no more than it declares, unless `within` is off."""
        options = self.within(options) if within else options
        files = tuple(pack.origin for pack in self.plugins.packs if pack.origin in self.files)
        given = {"invariant": self.info.capabilities.row_invariant, "kernels": self.packs, **options}
        given.setdefault("device", self.device_of(given.get("tensor_parallel", 1)))
        given.setdefault("plugins", files)
        given.setdefault("variants", "auto" if self.uses_variants else "off")
        given.setdefault("allow_cpu_fallback", self.allow_cpu_fallback)
        backend = self.plugin if plugin is None else plugin
        if given.get("tensor_parallel", 1) > 1 and self.info.capabilities.ranks == "processes":
            given["backend"], backend = self.info.name, None  # an object does not reach them
        config = EngineConfig(model=str(checkpoint(model=model)), **given)
        engine = Engine(
            config, backend=backend, features=features, instruments=instruments,
            draft_policy=draft_policy,
        )  # fmt: skip
        try:
            yield engine
        finally:
            with suppress(PolydraftError):
                engine.close()


def _device_with(wants: Sequence[str], plugins: Plugins) -> str:
    """The first device of a backend that declares all of `wants`; "" where the default one does, or none."""

    def declares(info: BackendInfo) -> bool:
        return info.available and all(getattr(info.capabilities, name) for name in wants)

    if declares(plugins.info()):
        return ""
    return next((spec for spec in plugins.info().devices if declares(plugins.info_on(spec))), "")


# -- whose code runs -------------------------------------------------------------------------------
_NO_KERNELS = ("__init__", "device", "forward_meta", "kv_grid", "packed_weights", "provider", "queued", "sleeping", "table")
"""Modules of the reference that a backend may call: they launch, allocate and prepare. Every other one counts as its kernels."""
_ARITHMETIC = frozenset(str(file) for file in Path(reference.__file__).parent.glob("*.py") if file.stem not in _NO_KERNELS)


@contextmanager
def threads_watched() -> Iterator[None]:
    """Threads that start within the block can be seen by a `Witness`, also afterwards: a device may run its kernels in one.
    From Python 3.12 on, those that run already can be seen as well."""
    watch: Any = getattr(threading, "setprofile_all_threads", threading.setprofile)
    before, mine = threading.getprofile(), sys.getprofile()
    watch(_relay)
    sys.setprofile(mine)
    try:
        yield
    finally:
        watch(before)
        sys.setprofile(mine)


def _relay(frame: FrameType, event: str, argument: object) -> None:
    """The profile function of watched threads."""
    for witness in _WATCHING:
        witness.look(frame, event, argument)


_WATCHING: list[Witness] = []
"""Witnesses whose block runs."""


class Witness:
    """Notes, while its block runs, whether code of the reference's kernels or a golden is called: on this thread, or on one that
    was started while threads were watched.

    It watches calls and not names, so that a fallback is seen whichever way it was imported."""

    def __init__(self, kernel: Any) -> None:
        self.seen: set[str] = set()
        golden = contract_of(kernel).golden
        self._goldens = {golden.__code__} if hasattr(golden, "__code__") else set()

    def __enter__(self) -> set[str]:
        self._before = sys.getprofile()
        _WATCHING.append(self)
        sys.setprofile(self.look)
        return self.seen

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(self._before)
        _WATCHING.remove(self)

    def look(self, frame: FrameType, event: str, argument: object) -> None:
        """A profile function."""
        del argument
        if event == "call" and (frame.f_code.co_filename in _ARITHMETIC or frame.f_code in self._goldens):
            self.seen.add(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")


def belongs_to_reference(provider: object) -> bool:
    """Whether a provider is the reference's own object, openly passed on, or openly runs it on host copies."""
    return isinstance(provider, Delegated) or type(provider).__module__.startswith("polydraft.reference")


# -- wrapping --------------------------------------------------------------------------------------
def wrap(plugin: Any, **hooks: Callable[..., Any]) -> ModuleType:
    """A plugin that answers like `plugin`, each hook named in `hooks` passed through a function: `hook(answer, **arguments)`
    returns what is answered instead; of the identity hook it gets the answer alone. A device that is a `Proxy` is taken off
    before the real plugin sees it."""
    from polydraft.hooks import hookimpl
    from polydraft.plugins.checks import implementations

    module = ModuleType(getattr(plugin, "__name__", type(plugin).__name__))
    module.conformance_base = getattr(plugin, "conformance_base", plugin)  # type: ignore[attr-defined]
    for one in implementations(plugin):
        if one.wraps or not one.specified:
            setattr(module, one.attribute, one.function)
        else:
            setattr(module, one.hook, hookimpl(_passed(one.function, one.hook, hooks.get(one.hook))))
    return module


def _passed(real: Any, hook: str, change: Callable[..., Any] | None) -> Any:
    """The hook `hook` with its full signature, which calls the real one with the arguments that it takes."""
    import inspect

    from polydraft import hooks

    wanted = list(inspect.signature(getattr(hooks, hook)).parameters)
    taken = list(inspect.signature(real).parameters)

    def call(**arguments: Any) -> Any:
        answer = real(**{name: bare(arguments[name]) for name in taken})
        if change is None:
            return answer
        return change(answer) if hook == "polydraft_backend_info" else change(answer, **arguments)

    source = f"def {hook}({', '.join(wanted)}):\n    return call({', '.join(f'{n}={n}' for n in wanted)})\n"
    space: dict[str, Any] = {"call": call}
    exec(source, space)  # noqa: S102  pluggy passes by name, so the signature has to be the hook's
    return space[hook]


class Proxy:
    """An object in whose place another one answers, save for what a subclass defines."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def bare(value: Any) -> Any:
    """What stands behind proxies."""
    while isinstance(value, Proxy):
        value = value._inner
    return value


class TableProxy(Proxy):
    """A kernel table with some providers replaced."""

    def __init__(self, inner: Any, providers: Mapping[str, Any]) -> None:
        super().__init__(inner)
        self.providers: Mapping[str, Any] = {**inner.providers, **providers}
        self.versions: Mapping[str, int] = inner.versions
