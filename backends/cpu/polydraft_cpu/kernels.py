"""The kernel table of the CPU backend: providers that bind argument records to compiled kernels, packed weights, paged caches.

`polydraft_kernels` returns it. Binding converts a record to words once; a launch is one C call. Nothing is computed in Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from polydraft.backend import CacheSpec, Weight
from polydraft.contracts.base import Args, Limits, Workspace
from polydraft.contracts.composite import CompositeArgs
from polydraft.contracts.kernels.expert_leaves import ExpertLeavesV1
from polydraft.contracts.kernels.expert_mlp import ExpertMlpV1
from polydraft.contracts.kernels.paged_attention import PagedAttentionV1
from polydraft.contracts.kernels.rope_kv_write import RopeKvWriteV1, turns
from polydraft.contracts.packing import Matrix, PackedWeight
from polydraft.device import Array, Launch
from polydraft.errors import ContractError
from polydraft_cpu.device import CpuDevice, aligned
from polydraft_cpu.library import CacheStruct, WeightStruct, last_error, served, words_of

VERSION, NEWER = 1, {"pack_logprobs": 2}
"""Version of every contract that a compiled kernel is written for, and of those whose first version is not served any more."""
PANEL = 16
MOST_ROWS, ROUNDED_ROWS = 8, 128
EXPERT_ROWS = 256
VECTOR_F32, ROWS_F32, ROWS_BF16, PANELS_F32, PANELS_BF16, PANELS_I8, PANELS_F8, PANELS_I4 = range(8)
DTYPES_OF: Final[Mapping[int, Any]] = {
    ROWS_BF16: np.uint16, PANELS_BF16: np.uint16, PANELS_I8: np.int8, PANELS_F8: np.uint8, PANELS_I4: np.uint32,
}  # fmt: skip
"""What arrays of a format hold; the others hold float32."""
PACKED: Final = {"int8": PANELS_I8, "fp8": PANELS_F8, "int4": PANELS_I4}


def up(size: int, to: int = PANEL) -> int:
    """`size` rounded up to a multiple, to a whole panel where none is named."""
    return -(-size // to) * to


def versions() -> Mapping[str, int]:
    """Contract or composite to the version that its compiled kernel is written for."""
    return {name: NEWER.get(name, VERSION) for name in served()}


# -- weights and caches ----------------------------------------------------------------------------
class CpuWeight:
    """A weight as the kernels read it, behind a struct whose address never changes: kernels see a refilled weight at once."""

    def __init__(self, device: CpuDevice, role: str, shape: tuple[int, ...]) -> None:
        self._device, self.role, self.shape = device, role, shape
        self._struct = WeightStruct()
        self.address = ctypes.addressof(self._struct)
        self._data: Array = np.empty(0, np.uint8)
        self._beside: dict[str, Array] = {}
        """Scales and zero points, by the name of their pointer in the struct."""

    @property
    def nbytes(self) -> int:
        return self._data.nbytes + sum(array.nbytes for array in self._beside.values())

    @property
    def rounds(self) -> bool:
        """Whether rows are rounded before they are multiplied."""
        return bool(self._struct.rounding)

    @property
    def group(self) -> int:
        """Inputs that have a scale of their own; 0: all of them."""
        return int(self._struct.group)

    @property
    def format(self) -> int:
        """One of the formats above."""
        return int(self._struct.format)

    def fill(self, value: Matrix) -> None:
        """Lay `value` out, in place where the format stays the same, behind everything that was issued."""
        self._device.settle()
        if isinstance(value, PackedWeight):
            self._fill_packed(value)
            return
        value = np.ascontiguousarray(value, np.float32)
        chosen = self._format(value)
        stack, rows, cols = (1, 1, value.size) if value.ndim == 1 else (1, *value.shape)[-3:]
        lib = self._device.library
        data = self._memory(chosen, stack, rows, cols)
        beside: dict[str, Array] = {}
        if chosen in (VECTOR_F32, ROWS_F32):
            np.copyto(data.reshape(value.shape), value)
        elif chosen == ROWS_BF16:
            lib.pd_pack_rows_bf16(value.ctypes.data, value.size, data.ctypes.data)
        else:
            if chosen == PANELS_I8:
                beside["scale"] = self._kept("scale", (stack, up(rows)), np.float32)
            for i, matrix in enumerate(value.reshape(stack, rows, cols)):
                scale = beside["scale"][i].ctypes.data if beside else 0
                lib.pd_pack_panels(matrix.ctypes.data, rows, cols, chosen, data[i].ctypes.data, scale)
        self._point(data, chosen, rows, cols, beside)

    def _fill_packed(self, value: PackedWeight) -> None:
        """Lay numbers, scales and zero points out in panels, one matrix of a stack behind the other."""
        packing, (rows, cols) = value.packing, value.shape[-2:]
        matrices = list(value) if value.ndim > 2 else [value]
        chosen, stack = PACKED[packing.number], len(matrices)
        data = self._memory(chosen, stack, rows, cols)
        group = packing.columns if packing.columns < cols else 0
        shape = (stack, up(rows) // PANEL, -(-cols // group) if group else 1, PANEL)
        narrow = group > 0 and not np.any(value.scales.view(np.uint32) & 0xFFFF)
        name = "groups" if group else "scale"
        beside = {name: self._kept(name, shape, np.uint16 if narrow else np.float32)}
        if value.zeros is not None:
            beside["zeros"] = self._kept("zeros", shape, np.uint8)
        for i, one in enumerate(matrices):
            numbers = one.numbers
            if chosen == PANELS_I4:  # eight of a row in a word
                numbers = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % 4))).view("<u4")
            _side_by_side(numbers, data[i])
            scales = np.repeat(one.scales, packing.rows, axis=0)[:rows] if packing.rows > 1 else one.scales
            _side_by_side((scales.view(np.uint32) >> 16).astype(np.uint16) if narrow else scales, beside[name][i])
            if one.zeros is not None:
                _side_by_side(one.zeros, beside["zeros"][i])
        self._point(data, chosen, rows, cols, beside)
        s = self._struct
        s.groups_bf16, s.group = int(narrow), group
        s.rounding, s.rounding_cols = (PACKED[packing.rounded_to], packing.columns or cols) if packing.activations else (0, 0)

    def _point(self, data: Array, chosen: int, rows: int, cols: int, beside: dict[str, Array]) -> None:
        """Let the struct name what was laid out."""
        s, self._data, self._beside = self._struct, data, beside
        s.data, s.format, s.rows, s.cols = data.ctypes.data, chosen, rows, cols
        for name in ("scale", "groups", "zeros"):
            setattr(s, name, beside[name].ctypes.data if name in beside else 0)
        s.groups_bf16 = s.group = s.rounding = s.rounding_cols = 0

    def _kept(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """The array of before where it fits, else a new one."""
        known = self._beside.get(name)
        return known if known is not None and known.shape == shape and known.dtype == dtype else aligned(shape, dtype)

    def _memory(self, chosen: int, stack: int, rows: int, cols: int) -> Array:
        """The array of before where it fits, else a new one."""
        shape: tuple[int, ...] = (rows, cols)
        if chosen >= PANELS_F32:
            shape = (stack, up(rows) // PANEL, -(-cols // 8) if chosen == PANELS_I4 else -(-cols // 2) * 2, PANEL)
        dtype = DTYPES_OF.get(chosen, np.float32)
        if self._data.size and self._data.shape == shape and self._data.dtype == dtype:
            return self._data
        return aligned(shape, dtype)

    def _format(self, value: Array) -> int:
        if value.ndim == 1:
            return VECTOR_F32
        device, wish = self._device, self._device.options.weights
        if self.role == "router":  # what is chosen should not depend on how weights are kept
            return PANELS_BF16 if device.library.pd_is_bf16(value.ctypes.data, value.size) else PANELS_F32
        exact = device.dtype == "bf16" or bool(device.library.pd_is_bf16(value.ctypes.data, value.size))
        if self.role == "embedding":
            return ROWS_BF16 if exact and wish != "f32" else ROWS_F32
        if wish == "int8":
            return PANELS_I8
        return PANELS_BF16 if wish == "bf16" or (exact and wish == "exact") else PANELS_F32


def _side_by_side(rows: Array, out: Array) -> None:
    """Write rows [outputs, n] as panels [outputs / 16, at least n, 16] with 0 where there is none."""
    whole, width = len(rows) // PANEL, rows.shape[1]
    out[:whole, :width] = rows[: whole * PANEL].reshape(whole, PANEL, width).swapaxes(1, 2)
    out[:, width:] = 0
    if whole < len(out):
        out[whole] = 0
        out[whole, :width, : len(rows) - whole * PANEL] = rows[whole * PANEL :].T


class CpuCache:
    """One layer's keys and values in blocks: keys with positions side by side, values with elements side by side. Fresh rows
    hold NaN: reading one that was never written shows."""

    def __init__(self, device: CpuDevice, spec: CacheSpec) -> None:
        self._device, self.spec = device, spec
        n, g, d, size = spec.num_blocks, spec.num_kv_heads, spec.head_dim, spec.block_size
        self._k: Array = device.empty("cache.k", (n, g, d, up(size)), spec.dtype).host_array
        self._v: Array = device.empty("cache.v", (n, g, size, up(d)), spec.dtype).host_array
        for array in (self._k, self._v):
            array.fill(np.nan if spec.dtype == "f32" else 0x7FC0)
        self._struct = CacheStruct(self._k.ctypes.data, self._v.ctypes.data, n, size, g, d, up(size), up(d))
        self.address = ctypes.addressof(self._struct)

    @property
    def nbytes(self) -> int:
        return self._k.nbytes + self._v.nbytes

    def read_logical(self) -> tuple[Array, Array]:
        """(k, v) as [num_blocks, block_size, num_kv_heads, head_dim]; tests only."""
        self._device.settle()
        s = self.spec
        shape = (s.num_blocks, s.block_size, s.num_kv_heads, s.head_dim)
        k, v = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self._copy(k, v, back=1)
        return k, v

    def write_logical(self, k: Array, v: Array) -> None:
        """Overwrite all rows; tests only."""
        self._device.settle()
        self._copy(np.ascontiguousarray(k, np.float32), np.ascontiguousarray(v, np.float32), back=0)

    def _copy(self, k: Array, v: Array, *, back: int) -> None:
        device = self._device
        device.library.pd_cache_logical(self.address, device.act_code, k.ctypes.data, v.ctypes.data, back)


# -- providers -------------------------------------------------------------------------------------
Scratch = Callable[[Any, Limits, int], int]
"""Bytes of scratch for the records of a kernel (one, or the parts of a composite) and a number of threads."""


def _sampling(logits: str, rows: int) -> Scratch:
    """`rows` rows of the vocabulary a thread."""
    return lambda parts, limits, threads: threads * rows * up(getattr(parts[-1], logits).shape[1]) * 4


def _attention(parts: Any, limits: Limits, threads: int) -> int:
    """Scores and eight queries a thread."""
    del limits
    a: PagedAttentionV1 = parts[0]
    return threads * 8 * (up(a.block_table.shape[1] * a.block_size) + a.head_dim) * 4


def _experts(parts: Any, limits: Limits, threads: int) -> int:
    """Terms, gathered rows and what experts work in, for a block of rows a thread: `ExpertSpace` of experts.inc."""
    del limits
    a: ExpertMlpV1 | ExpertLeavesV1 = parts[0]
    rows, hidden, pieces = min(EXPERT_ROWS, a.x.shape[0]), a.x.shape[1], len_of(a.down) // len_of(a.gate_up)
    return int(threads * (rows * ((a.expert_ids.shape[1] * pieces + 1) * hidden + a.gate_up.shape[1]) + 2 * PANEL) * 4)


def len_of(stack: CpuWeight) -> int:
    """Matrices of a stack."""
    return stack.shape[0]


SCRATCH: Final[Mapping[str, Scratch]] = {
    "paged_attention": _attention,
    "rope_kv_write": lambda parts, limits, threads: threads * (parts[0].head_dim + PANEL) * 4,
    "sample": _sampling("logits", 4),
    "gumbel_noise+sample": _sampling("logits", 4),
    "filter_probs": _sampling("logits", 4),
    "top_logprobs": _sampling("logits", 4),
    "draft_logprobs": _sampling("logits", 4),
    "draft_top_logprobs": _sampling("logits", 4),
    "penalise_logits": _sampling("logits", 1),
    "route_experts": lambda parts, limits, threads: threads * 3 * up(parts[0].logits.shape[1]) * 4,
    "expert_mlp": _experts,
    "expert_leaves": _experts,
}


def _rows_in_floats(a: Any) -> int:
    """Rows of a tile of a product, converted or rounded."""
    return MOST_ROWS * (a.x.shape[1] + 2 * PANEL) * 4 if a.x.dtype == "bf16" or a.weight.rounds else 0


def _rows_in_bytes(a: Any) -> int:
    """Rounded rows of a product with their scales, and unpacked weights beside them: `Rows` of numeric_avx512vnni.cpp."""
    if not a.weight.rounds:
        return 0
    rows, inputs = a.x.shape
    stride, groups = up(inputs, 64), -(-inputs // a.weight.group) if a.weight.group else 1
    return up(min(ROUNDED_ROWS, rows) * (stride + 8 * groups), 64) + 3 * PANEL * stride


@dataclass(frozen=True)
class CpuProvider:
    """A `Provider` over one compiled kernel."""

    name: str
    device: CpuDevice

    def bind(self, args: Any, limits: Limits, workspace: Workspace | None) -> Launch:
        """Turn the record into words, once. Raises `ContractError` for a record that the compiled kernel does not know."""
        device = self.device
        claims = np.zeros(2, np.int64) if self.name in ("expert_mlp", "expert_leaves") else None
        table = column_table(args) if self.name == "scatter" else claims
        words = [word for part in _parts(args) for word in words_of(part)] + self._extra(args, limits, table)
        memory: Any = None if workspace is None else workspace.buffer.host_array  # type: ignore[attr-defined]
        scratch = None if memory is None else memory.ctypes.data
        array = (ctypes.c_int64 * len(words))(*words)
        op = device.library.pd_bind(device.context, self.name.encode(), device.act_code, array, len(words), scratch)
        if not op:
            raise ContractError(f"cpu backend: {last_error()}; reinstall polydraft so that its kernels are built again")
        return device.launch_of(op, self.name, (args, memory, table))

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        """What the kernel's threads need between them."""
        threads = self.device.options.num_threads
        if self.name in ("linear", "linear_leaves"):
            return threads * max(_rows_in_floats(args), _rows_in_bytes(args))
        return SCRATCH[self.name](_parts(args), limits, threads) if self.name in SCRATCH else 0

    def _extra(self, args: Any, limits: Limits, table: Array | None) -> list[int]:
        """Words behind the record: the table of slot columns, the claims of experts (and those of a leaf), or the table of the
        rotation."""
        if table is not None:
            by_experts = self.name == "expert_leaves" and args.split == "experts"
            run = [len_of(args.gate_up) // args.leaves if by_experts else 0] if self.name == "expert_leaves" else []
            return [table.ctypes.data, *run]
        if self.name != "rope_kv_write":
            return []
        length = max(limits.max_len, args.block_table.shape[1] * args.block_size)
        return [rope_table(self.device, args, length).ctypes.data]


def _parts(args: Args | CompositeArgs) -> tuple[Args, ...]:
    return args.parts if isinstance(args, CompositeArgs) else (args,)


def column_table(args: Any) -> Array:
    """[columns, 2] int64: address and width of each slot column."""
    arrays = [column.host_array for column in args.columns]
    return np.array([(array.ctypes.data, array[0].size) for array in arrays], np.int64)


def rope_table(device: CpuDevice, args: RopeKvWriteV1, length: int) -> Array:
    """[length, 2, pairs] float32: cosines and sines of every position. One a device and rotation."""
    key = (args.frequencies, args.attention_factor, length)
    if key not in device.rope_tables:
        device.rope_tables[key] = np.stack(turns(args, length), axis=1).astype(np.float32)
    return device.rope_tables[key]


class CpuTable:
    """The `KernelTable` of the CPU."""

    def __init__(self, device: CpuDevice) -> None:
        self.providers: Mapping[str, CpuProvider] = {name: CpuProvider(name, device) for name in versions()}
        self.versions = versions()
        self._device = device

    def prepare_weight(self, role: str, value: Matrix, dtype: str, previous: Weight | None = None) -> CpuWeight:
        """Pack a weight for the kernels; `previous` is refilled and stays the same object at the same address."""
        if dtype != self._device.dtype:
            raise ContractError(f"weight of dtype {dtype!r} for a device opened with {self._device.dtype!r}; open another device")
        weight = CpuWeight(self._device, role, value.shape) if previous is None else previous
        assert isinstance(weight, CpuWeight), "core hands back what it was given"
        if weight.shape != value.shape:
            raise ContractError(f"weight update: got shape {value.shape}, wanted {weight.shape}; load the same architecture")
        weight.fill(value)
        return weight

    def allocate_cache(self, spec: CacheSpec) -> CpuCache:
        """A fresh cache; `DeviceError` when memory is short."""
        return CpuCache(self._device, spec)
