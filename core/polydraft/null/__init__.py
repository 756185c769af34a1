"""The null backend: kernels that cost nothing and a commit that accepts every draft, to time the host alone.

`polydraft bench` opens it; its text means nothing and says so. It never computes a logit: only the few state kernels that the
host's view depends on run, in NumPy, and what they take is measured and left out of host figures.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from polydraft._version import __version__
from polydraft.backend import BackendInfo, CacheSpec, Capabilities
from polydraft.device import Array, Buffer, Staging, Stream
from polydraft.hooks import hookimpl
from polydraft.sentinels import NO_TOKEN, Finish, Phase

if TYPE_CHECKING:
    from polydraft.backend import DeviceOptions, ForwardMeta, PassBuffers, StepMeta, Weight
    from polydraft.contracts.base import Limits, Provider
    from polydraft.device import Launch
    from polydraft.reference.device import ReferenceDevice

ACCEPTED_TOKEN = 5
"""What every place of every window holds: no stop token of the demo model."""
COUNTED = ("scatter", "pack_rows", "verify_match", "commit_window", "snapshot_output", "pack_logprobs", "pack_prompt_rows")
"""The contracts that do something here."""


@hookimpl
def polydraft_backend_info() -> BackendInfo:
    """Always available; the evidence class says what it is."""
    from polydraft.contracts import REGISTRY

    return BackendInfo(
        name="null",
        version=__version__,
        package="polydraft",
        device_pattern="null",
        summary="kernels that cost nothing, every draft accepted: times the host alone, its text means nothing",
        devices=("null",),
        capabilities=Capabilities(dtypes=("f32",), synthetic_acceptance=False, sliding_window=True),
        contract_versions=MappingProxyType({name: REGISTRY[name].version for name in REGISTRY.names()}),
        evidence="double only",
    )


@hookimpl
def polydraft_open_device(spec: str, options: DeviceOptions) -> ReferenceDevice:
    """Host arrays as device memory; `counters.extra["kernel_ns"]` collects what the counted kernels and copies took."""
    from polydraft.errors import DeviceError
    from polydraft.reference.device import ReferenceDevice

    if spec not in ("", "null"):
        raise DeviceError(f"the null backend runs on 'null', got {spec!r}; leave --device out or choose another --backend")

    class NullDevice(ReferenceDevice):
        """Copies are the device's work, too: what they take is counted with the kernels."""

        def upload(self, stream: Stream, target: Buffer, source: Staging, rows: int) -> None:
            start = time.perf_counter_ns()
            super().upload(stream, target, source, rows)
            self.counters.extra["kernel_ns"] += time.perf_counter_ns() - start

        def download(self, stream: Stream, target: Staging, source: Buffer, rows: int) -> None:
            start = time.perf_counter_ns()
            super().download(stream, target, source, rows)
            self.counters.extra["kernel_ns"] += time.perf_counter_ns() - start

    del options
    device = NullDevice(spec or "null")
    device.counters.extra["kernel_ns"] = 0
    return device


@hookimpl
def polydraft_kernels(device: ReferenceDevice) -> NullTable:
    """A provider for every contract, nearly all of which do nothing."""
    return NullTable(device)


@hookimpl
def polydraft_init_forward_meta(device: ReferenceDevice, buffers: PassBuffers, limits: Limits) -> ForwardMeta:
    """Metadata that is never looked at."""
    del device, buffers, limits
    return NullMeta()


class NullMeta:
    """Fills nothing."""

    def fill(self, stream: Stream, step: StepMeta) -> None:
        """Nothing to fill."""


class NullWeight:
    """Takes no memory."""

    nbytes = 0


class NullCache:
    """Holds no rows; the logical accessors of tests have nothing to show."""

    nbytes = 0

    def read_logical(self) -> tuple[Array, Array]:
        """No rows."""
        return np.empty(0, np.float32), np.empty(0, np.float32)

    def write_logical(self, k: Array, v: Array) -> None:
        """Rows are dropped."""


class NullProvider:
    """Binds to a launch that does nothing."""

    def bind(self, args: Any, limits: Limits, workspace: Any) -> Launch:
        """Nothing to capture."""
        del args, limits, workspace
        return nothing

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        """None."""
        del args, limits
        return 0


def nothing(stream: Stream, n: int) -> None:
    """The launch of every null kernel."""


class TimedProvider:
    """A NumPy kernel whose time is counted as the device's."""

    def __init__(self, kernel: Any, counters: Any) -> None:
        self._kernel, self._extra = kernel, counters.extra

    def bind(self, args: Any, limits: Limits, workspace: Any) -> Launch:
        """Bind the kernel; its launch adds to `kernel_ns`."""
        del workspace
        from polydraft.reference.provider import arrays_of

        run, extra = self._kernel(arrays_of(args), limits), self._extra

        def launch(stream: Stream, n: int) -> None:
            del stream
            start = time.perf_counter_ns()
            run(n)
            extra["kernel_ns"] += time.perf_counter_ns() - start

        return launch

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        """None."""
        del args, limits
        return 0


class NullTable:
    """The null backend's kernel table."""

    def __init__(self, device: ReferenceDevice) -> None:
        from polydraft.contracts import REGISTRY
        from polydraft.reference import logprobs, state_kernels

        real = {
            **state_kernels.KERNELS,
            **logprobs.KERNELS,
            "pack_logprobs": PackAgain(),
            "pack_rows": count_rows,
            "verify_match": verify_everything,
            "commit_window": accept_everything,
        }
        self.providers: Mapping[str, Provider] = {
            name: TimedProvider(real[name], device.counters) if name in COUNTED else NullProvider() for name in REGISTRY.names()
        }
        self.versions: Mapping[str, int] = {name: REGISTRY[name].version for name in REGISTRY.names()}

    def prepare_weight(self, role: str, value: Array, dtype: str, previous: Weight | None = None) -> Weight:
        """Keep nothing."""
        del role, value, dtype
        return previous or NullWeight()

    def allocate_cache(self, spec: CacheSpec) -> NullCache:
        """Keep nothing."""
        del spec
        return NullCache()


def count_rows(a: Any, limits: Limits) -> Any:
    """`pack_rows` as far as the host could notice it: how many rows each sequence has, full windows in decode."""

    def run(n: int) -> None:
        del n  # every sequence, as the real kernel does
        slots = a.slot_order
        phase = a.phase[slots]
        wanted = np.where(phase == Phase.PREFILL, a.prefill_len[slots] - a.kv_len[slots], limits.window * (phase == Phase.DECODE))
        a.seq_len[:] = np.minimum(a.seq_rows, wanted) * (slots >= 0)

    return run


def verify_everything(a: Any, limits: Limits) -> Any:
    """`verify_match` for windows that were never computed: every decode round verified K drafts."""

    def run(n: int) -> None:
        a.drafted[:n] = np.where(a.phase[a.slot_order[:n]] == Phase.DECODE, limits.num_drafts, -1)

    return run


class PackAgain:
    """`pack_logprobs` as far as the host could notice it: of prompt rows always, since they say which; of tokens, whose numbers
    were never computed, only where others want them than those of whom the record is."""

    def __init__(self) -> None:
        self._packed = b"", b""

    def __call__(self, a: Any, limits: Limits) -> Any:
        """The kernel, which every program that packs shares the record with."""
        from polydraft.reference.logprobs import KERNELS

        pack = KERNELS["pack_logprobs"](a, limits)

        def run(n: int) -> None:
            wanted = a.slot_order[:n].tobytes(), a.num_top.tobytes()
            if wanted != self._packed:
                pack(n)
                self._packed = wanted

        return pack if a.drafts is None else run


def accept_everything(a: Any, limits: Limits) -> Any:
    """`commit_window` for windows that were never computed: full windows of one token, up to the length limit."""
    places = np.arange(limits.window)

    def run(n: int) -> None:
        slots, rows = a.slot_order[:n], a.seq_len[:n]
        prefill = a.phase[slots] == Phase.PREFILL
        known = a.prompt_len[slots] + a.num_generated[slots]
        computed = a.kv_len[slots] + rows * prefill
        done = prefill & (computed == a.prefill_len[slots]) & (rows > 0)
        window = np.minimum(limits.window, a.max_total[slots] - known) * (rows > 0)
        emitted = np.where(prefill, done & (computed == known), window)
        a.kv_len[slots] = np.where(prefill, computed, computed + emitted)
        a.num_generated[slots] += emitted
        ends = (emitted > 0) & (known + emitted >= a.max_total[slots])
        a.phase[slots[done]] = Phase.DECODE
        a.phase[slots[ends]] = Phase.FINISHED
        a.finish[slots[ends]] = Finish.LENGTH
        a.out_len[:n] = emitted
        a.out_accepted[:n] = np.where(prefill, 0, np.maximum(emitted - 1, 0))
        a.out_tokens[:n] = np.where(places < emitted[:, None], ACCEPTED_TOKEN, NO_TOKEN)

    return run
