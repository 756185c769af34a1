"""A backend as somebody else wrote it for specification 1.0. It is frozen: nobody edits it, and it has to load and conform.

A device, memory, metadata and tables of its own, through the documented protocols alone; eight kernels in NumPy of its own, and
the goldens for the others, which is why it calls its evidence "emulator".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from polydraft import BackendInfo, Capabilities, hookimpl
from polydraft.contracts import REGISTRY
from polydraft.contracts.base import LogicalCache, OpaqueSpec, ParamSpec, TensorSpec
from polydraft.device import DTYPES, DeviceCounters
from polydraft.errors import DeviceError

CONTRACTS = (
    "update_slots", "update_tokens", "update_blocks", "reserve_blocks", "pack_rows", "pack_logit_rows", "embed", "rms_norm",
    "residual_add", "linear", "rope_kv_write", "paged_attention", "swiglu", "gather_rows", "process_logits", "argmax",
    "gumbel_noise", "sample", "verify_match", "commit_window", "snapshot_output", "pack_draft_rows", "begin_draft",
    "combine_draft_inputs", "select_last_rows", "advance_draft",
)  # fmt: skip


# -- memory ------------------------------------------------------------------------------------------
class Memory:
    """A buffer, or staging: a NumPy array."""

    def __init__(self, name: str, shape: Any, dtype: str) -> None:
        self.name, self.dtype = name, dtype
        self.array = np.full(tuple(shape), 0x5A, DTYPES[dtype])

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.array.shape
        return shape


class Weight:
    def __init__(self, value: Any) -> None:
        self.value = np.array(value, np.float32)

    @property
    def nbytes(self) -> int:
        return self.value.nbytes


class Cache:
    """Keys and values in one array, [2, blocks, block_size, heads, dim]."""

    def __init__(self, spec: Any) -> None:
        shape = (2, spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        self.both = np.zeros(shape, np.float32)

    @property
    def nbytes(self) -> int:
        return self.both.nbytes

    def read_logical(self) -> tuple[Any, Any]:
        return self.both[0].copy(), self.both[1].copy()

    def write_logical(self, k: Any, v: Any) -> None:
        self.both[0], self.both[1] = k, v


# -- the device --------------------------------------------------------------------------------------
class Stream:
    def wait(self, event: Any) -> None:
        """Everything has run."""


class Event:
    def __init__(self, counters: DeviceCounters) -> None:
        self.counters = counters

    def record(self, stream: Any) -> None:
        """Everything has run."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.counters.host_syncs += 1


class Device:
    spec = "frozen"

    def __init__(self) -> None:
        self.counters, self.stream, self.closed = DeviceCounters(), Stream(), False

    def empty(self, name: str, shape: Any, dtype: str) -> Memory:
        if self.closed:
            raise DeviceError(f"device frozen is closed; open another one to allocate {name}")
        memory = Memory(name, shape, dtype)
        self.counters.allocations += 1
        self.counters.bytes_allocated += memory.array.nbytes
        return memory

    def staging(self, name: str, shape: Any, dtype: str) -> Memory:
        return Memory(name, shape, dtype)

    def event(self) -> Event:
        return Event(self.counters)

    def upload(self, stream: Any, target: Memory, source: Memory, rows: int) -> None:
        self.counters.uploads += 1
        self.counters.bytes_uploaded += source.array[:rows].nbytes
        target.array[:rows] = source.array[:rows]

    def download(self, stream: Any, target: Memory, source: Memory, rows: int) -> None:
        self.counters.downloads += 1
        self.counters.bytes_downloaded += source.array[:rows].nbytes
        target.array[:rows] = source.array[:rows]

    def load(self, target: Memory, value: Any) -> None:
        target.array[...] = value

    def memory(self) -> int:
        return self.counters.bytes_allocated

    def synchronize(self) -> None:
        self.counters.host_syncs += 1

    def close(self) -> None:
        self.closed = True


# -- kernels -----------------------------------------------------------------------------------------
def embed(a: Any, n: int) -> None:
    a.out[:n] = np.where(a.ids[:n, None] >= 0, a.weight[np.maximum(a.ids[:n], 0)], 0)


def rms_norm(a: Any, n: int) -> None:
    x = a.x[:n].astype(np.float32)
    gain = 1 + a.weight if a.plus_one else a.weight
    a.out[:n] = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(a.eps)) * gain


def residual_add(a: Any, n: int) -> None:
    a.x[:n] += a.y[:n]


def linear(a: Any, n: int) -> None:
    a.out[:n] = a.x[:n] @ a.weight.T
    if a.bias is not None:
        a.out[:n] += a.bias


def swiglu(a: Any, n: int) -> None:
    gate, up = np.split(a.gate_up[:n], 2, axis=-1)
    with np.errstate(over="ignore"):
        a.out[:n] = gate / (1 + np.exp(-gate)) * up


def gather_rows(a: Any, n: int) -> None:
    a.out[:n] = np.where(a.index[:n, None] >= 0, a.x[np.maximum(a.index[:n], 0)], 0)


def argmax(a: Any, n: int) -> None:
    best = np.argmax(a.logits[:n], axis=-1)
    bad = (a.row_slot[:n] < 0) | ~np.isfinite(a.logits[:n].max(axis=-1, initial=-np.inf))
    a.tokens[:n] = np.where(bad, -1, best)


def select_last_rows(a: Any, n: int) -> None:
    for i in range(n):
        a.out[i] = 0
        if a.draft_slot[i] >= 0:
            start = a.seq_start[i]
            a.out[i] = a.hidden[start + a.draft_position[i] - a.positions[start]]


OWN: dict[str, Callable[[Any, int], None]] = {
    "embed": embed, "rms_norm": rms_norm, "residual_add": residual_add, "linear": linear, "swiglu": swiglu,
    "gather_rows": gather_rows, "argmax": argmax, "select_last_rows": select_last_rows,
}  # fmt: skip


class Kernel:
    """A provider: an own kernel on the arrays themselves, or the golden on copies in float64."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.specs = REGISTRY[f"{name}/1"].args.specs()

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        values = {field: getattr(args, field) for field in self.specs}
        return self._own(values) if self.name in OWN else self._golden(values)

    def workspace_bytes(self, args: Any, limits: Any) -> int:
        return 0

    def _own(self, values: Mapping[str, Any]) -> Any:
        plain = {n: v.array if isinstance(v, Memory) else v.value if isinstance(v, Weight) else v for n, v in values.items()}
        a, function = SimpleNamespace(**plain), OWN[self.name]

        def launch(stream: Any, n: int) -> None:
            function(a, n)

        return launch

    def _golden(self, values: Mapping[str, Any]) -> Any:
        golden = REGISTRY[f"{self.name}/1"].golden

        def launch(stream: Any, n: int) -> None:
            a = SimpleNamespace(**{name: self._wide(name, value) for name, value in values.items()})
            with np.errstate(all="ignore"):
                golden(a, n)
                for name, value in values.items():
                    if isinstance(value, Memory):
                        value.array[...] = getattr(a, name)
                    elif isinstance(value, Cache):
                        value.both[0], value.both[1] = getattr(a, name).k, getattr(a, name).v

        return launch

    def _wide(self, name: str, value: Any) -> Any:
        spec = self.specs[name]
        if value is None or isinstance(spec, ParamSpec) or (isinstance(spec, OpaqueSpec) and spec.kind == "meta"):
            return None if isinstance(spec, OpaqueSpec) else value
        if isinstance(value, Cache):
            return LogicalCache(value.both[0].astype(np.float64), value.both[1].astype(np.float64))
        array = value.value if isinstance(value, Weight) else value.array
        floats = not isinstance(spec, TensorSpec) or array.dtype.kind == "f"
        return array.astype(np.float64) if floats else array.copy()


class Table:
    def __init__(self) -> None:
        self.providers = {name: Kernel(name) for name in CONTRACTS}
        self.versions = dict.fromkeys(CONTRACTS, 1)

    def prepare_weight(self, role: str, value: Any, dtype: str, previous: Weight | None = None) -> Weight:
        if previous is None:
            return Weight(value)
        previous.value[...] = value
        return previous

    def allocate_cache(self, spec: Any) -> Cache:
        return Cache(spec)


class Meta:
    def fill(self, stream: Any, step: Any) -> None:
        """Attention here needs nothing but the rows themselves."""


# -- hooks -------------------------------------------------------------------------------------------
@hookimpl
def polydraft_backend_info() -> BackendInfo:
    return BackendInfo(
        name="frozen",
        version="1.0",
        package="frozen-backend",
        device_pattern="frozen",
        summary="a backend written for specification 1.0",
        devices=("frozen",),
        capabilities=Capabilities(dtypes=("f32",), pool_temporaries=True, synthetic_acceptance=False),
        contract_versions=dict.fromkeys(CONTRACTS, 1),
        evidence="emulator",
    )


@hookimpl
def polydraft_open_device(spec: str) -> Device:
    if spec not in {"", "frozen"}:
        raise DeviceError(f"device is {spec!r}, wanted 'frozen'; leave --device out")
    return Device()


@hookimpl
def polydraft_kernels(device: Device) -> Table:
    return Table()


@hookimpl
def polydraft_init_forward_meta(buffers: Any) -> Meta:
    return Meta()
