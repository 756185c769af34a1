"""The emulator's kernels: the reference's row-invariant NumPy, bound so that a kernel can do only what its contract says.

`polydraft_kernels` returns the table. A launch issues one operation. When it runs, buffers that the contract calls outputs are
poisoned first (nothing may depend on what they held), inputs are read-only views (writing one is a failure that the next wait
raises), and buffers that a composite declares dead are poisoned afterwards. Nothing runs during the host's call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from polydraft.backend import CacheSpec, Weight
from polydraft.contracts import COMPOSITES, REGISTRY, contract_named
from polydraft.contracts.base import CAPACITY, Access, Args, ColumnsSpec, Contract, Limits, OpaqueSpec, TensorSpec, Workspace
from polydraft.contracts.composite import CompositeArgs, name_of
from polydraft.contracts.packing import Matrix
from polydraft.device import Array, Launch
from polydraft.errors import ContractError
from polydraft.reference.device import poison_array
from polydraft.reference.packed_weights import packing_of, unpacked
from polydraft.reference.provider import Kernel
from polydraft.reference.table import kernels
from polydraft.sentinels import Phase
from polydraft_emulator.forward_meta import EmulatorForwardMeta
from polydraft_emulator.memory import EmulatorCache, EmulatorWeight, Memory
from polydraft_emulator.options import ROWS
from polydraft_emulator.streams import EmulatorStream, Work

if TYPE_CHECKING:
    from polydraft_emulator.device import EmulatorDevice


class Binding:
    """Arguments of one kernel as the arrays that it gets, and what the device must know of them."""

    def __init__(self, device: EmulatorDevice, name: str, args: Args | CompositeArgs, limits: Limits) -> None:
        self._device, self._limits = device, limits
        self.uses: list[tuple[Memory, Array]] = []
        self.writes: list[Array] = []
        self.outputs: list[tuple[Array, bool]] = []
        """Arrays that are poisoned before a run: below the launch length, or as a whole."""
        self._opened: dict[int, Array] = {}
        self.metas: list[EmulatorForwardMeta] = []
        """Metadata that nobody fills, because the kernel is run without any: built here before each run."""
        composite = COMPOSITES.get(name)
        contracts = composite.contracts if composite else (contract_named(name),)
        records = args.parts if isinstance(args, CompositeArgs) else (args,)
        parts = [self._part(contract, record) for contract, record in zip(contracts, records, strict=True)]
        dead = composite.dead if composite else ()
        self.dead = [next(self._array(getattr(r, field)) for r in records if hasattr(r, field)) for field in dead]
        self._keep_inputs(contracts, records, dead)
        self.arrays = SimpleNamespace(parts=tuple(parts)) if composite else parts[0]

    def _part(self, contract: Contract, record: Args) -> SimpleNamespace:
        values = {}
        for field, spec in contract.args.specs().items():
            value = getattr(record, field)
            if isinstance(spec, OpaqueSpec) and spec.kind == "meta":
                value = value if value is not None else self._own_meta(record)
            elif isinstance(spec, ColumnsSpec):
                value = tuple(self._use(column, spec.access) for column in value)
            elif value is not None and isinstance(spec, (TensorSpec, OpaqueSpec)):
                value = self._open(contract, spec, value)
            values[field] = value
        return SimpleNamespace(**values)

    def _open(self, contract: Contract, spec: TensorSpec | OpaqueSpec, memory: Memory) -> Any:
        """What a kernel is handed for one argument."""
        array, view = self._array(memory), self._use(memory, spec.access)
        if isinstance(spec, OpaqueSpec):
            if spec.kind == "cache":
                return SimpleNamespace(kv=view, spec=memory.spec)  # type: ignore[attr-defined]  # a cache has one
            return SimpleNamespace(array=view, packing=memory.packing)  # type: ignore[attr-defined]  # of a weight
        if spec.access == "out":
            counted = "N" if contract.unit == "any" else CAPACITY[contract.unit]
            if spec.symbols[0] == counted or spec.pad != "any":  # a record may end before its memory does
                self.outputs.append((array, spec.symbols[0] != counted))
        return view

    def _use(self, memory: Memory, access: Access) -> Array:
        """A view of a memory that can be written only where the contract says so."""
        array = self._array(memory)
        self.uses.append((memory, array))
        view = array.view()
        view.flags.writeable = access != "in"
        if access != "in":
            self.writes.append(array)
        return view

    def _array(self, memory: Memory) -> Array:
        if id(memory) not in self._opened:
            self._opened[id(memory)] = self._device.bound(memory)[1]
        return self._opened[id(memory)]

    def _own_meta(self, record: Any) -> EmulatorForwardMeta:
        meta = EmulatorForwardMeta(
            self._device,
            row_slot=record.row_slot,
            positions=record.positions,
            block_table=record.block_table,
            limits=self._limits,
        )
        self.metas.append(meta)
        return meta

    def _keep_inputs(self, contracts: tuple[Contract, ...], records: tuple[Args, ...], dead: tuple[str, ...]) -> None:
        """A buffer that some part reads is not poisoned before the run, unless it is dead."""
        read = [
            self._array(getattr(record, field))
            for contract, record in zip(contracts, records, strict=True)
            for field, spec in contract.args.specs().items()
            if isinstance(spec, TensorSpec) and spec.access != "out" and field not in dead and getattr(record, field) is not None
        ]
        self.outputs = [(out, whole) for out, whole in self.outputs if not any(out is array for array in read)]


@dataclass(frozen=True)
class EmulatorProvider:
    """A `Provider` over one NumPy kernel."""

    kernel: Kernel
    device: EmulatorDevice

    def bind(self, args: Args | CompositeArgs, limits: Limits, workspace: Workspace | None) -> Launch:
        """Resolve addresses once and return the launch. Raises `DeviceError` for memory of another device."""
        del workspace
        device, name, issue = self.device, name_of(args), self.device.executor.issue
        binding = Binding(device, name, args, limits)
        with device.guard:
            run = self.kernel(binding.arrays, limits)
        uses, spoils = tuple(binding.uses), tuple(binding.writes)
        check = _row_order_check(device, binding.arrays) if name == "pack_rows" else None

        def execute(n: int) -> None:
            for array, whole in binding.outputs:
                poison_array(array if whole else array[:n])
            if check is not None:
                check()
            for meta in binding.metas:
                meta.build(n)
            run(n)
            for array in binding.dead:
                poison_array(array)

        def launch(stream: EmulatorStream, n: int) -> None:
            issue(stream, Work("kernel", name, n, lambda: execute(n), uses=uses, spoils=spoils))

        return launch  # type: ignore[return-value]  # takes this device's own streams

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        """NumPy kernels bring their own temporaries (declared as `pool_temporaries`)."""
        del args, limits
        return 0


def _row_order_check(device: EmulatorDevice, a: Any) -> Callable[[], None]:
    """What a chip that packs slots in an order of its own would take for granted: core lays the launch order out that way."""
    order = ROWS[device.options.rows]

    def check() -> None:
        slots = a.slot_order[a.slot_order >= 0]
        prefill = a.phase[slots] == Phase.PREFILL
        if order == "slot" and (np.diff(slots) <= 0).any():
            raise ContractError(f"the launch order {slots.tolist()} is not in order of slots, which row_order 'slot' declares")
        if order == "prefill_first" and (np.diff(prefill.astype(np.int8)) > 0).any():
            raise ContractError(f"the launch order {slots.tolist()} has decode before prefill; row_order declares the opposite")

    return check


class EmulatorTable:
    """The kernel table: every kernel of the reference in its row-invariant arithmetic."""

    def __init__(self, device: EmulatorDevice) -> None:
        chosen = kernels(row_invariant=True)
        self.providers: Mapping[str, EmulatorProvider] = {n: device.bind_kernel(kernel) for n, kernel in chosen.items()}
        self.versions: Mapping[str, int] = {n: 1 if n in COMPOSITES else REGISTRY[n].version for n in chosen}
        self._device = device

    def prepare_weight(self, role: str, value: Matrix, dtype: str, previous: Weight | None = None) -> EmulatorWeight:
        """A copy in float32. `previous` is refilled at its address, at once and in no stream's order: an error while work in
        flight uses it."""
        if dtype != "f32":
            raise ContractError(f"the emulator computes in f32, got dtype {dtype!r}; leave --dtype on auto")
        device = self._device
        if previous is None:
            device.reserve(f"a weight ({role})", 4 * math.prod(value.shape))
            own = np.array(unpacked(value), np.float32, order="C")
            weight: EmulatorWeight = device.keep(EmulatorWeight(role, own, device.guard, packing_of(value)))
            return weight
        assert isinstance(previous, EmulatorWeight), "core hands back what it was given"
        device.executor.refuse_in_capture(f"refilling {previous.name}")
        device.check_idle(previous)
        target = device.bound(previous)[1]
        if target.shape != value.shape:
            raise ContractError(f"weight update: got shape {value.shape}, wanted {target.shape}; load the same architecture")
        np.copyto(target, unpacked(value))
        return previous

    def allocate_cache(self, spec: CacheSpec) -> EmulatorCache:
        """A fresh cache of NaN, in the device's layout."""
        device = self._device
        cache = EmulatorCache(spec, device.row_map(spec.num_blocks, spec.block_size), device.guard, device.synchronize)
        device.reserve(cache.name, cache.nbytes)
        kept: EmulatorCache = device.keep(cache)
        return kept
