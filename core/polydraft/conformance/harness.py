"""Runs one case to a verdict: run the golden, run a backend's kernel on a device, compare the results.

The tests of contracts and of the reference, the adequacy gate and the conformance kit call it with any `Device` and
`KernelTable`, for contracts and composites alike. It does not know which backend that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np

from polydraft.backend import CacheSpec, ForwardMeta, KernelTable, PassBuffers, StepMeta, Weight
from polydraft.contracts.arguments import check_arguments
from polydraft.contracts.base import (
    Args,
    Case,
    ColumnsSpec,
    Contract,
    Limits,
    LogicalCache,
    OpaqueSpec,
    ParamSpec,
    TensorSpec,
    column_name,
)
from polydraft.contracts.compare import (
    EPS,
    FLUSHED,
    NORMAL,
    TF32_EPS,
    Comparison,
    Expected,
    Products,
    compare,
    from_host,
    to_host,
)
from polydraft.contracts.composite import Composite, CompositeArgs
from polydraft.contracts.inputs import POISON, Kernel, Poison, arrays, contract_of, dtype_of, kept, limits_of, namespace, symbols
from polydraft.contracts.kv_quant import Kv, quanta, quantise
from polydraft.contracts.large import taken
from polydraft.contracts.packing import Matrix, PackedWeight
from polydraft.device import DTYPES, Array, Buffer, Device, Launch, Staging, Stream
from polydraft.errors import ContractError

T = TypeVar("T")
TIPPED: Final = 1.5
"""Quanta by which a stored key may be off: where its row's exponent is one higher, half a quantum there and half one here."""

SCRIBBLED: Final = (0x5A, 0x00, 0xFF)
"""Bytes that other launches leave in a workspace, in turn."""

InitMeta = Callable[[Device, PassBuffers, Limits], ForwardMeta]
"""The hook `polydraft_init_forward_meta` of a backend."""


@dataclass(frozen=True)
class DeviceWorkspace:
    """Workspace of a kernel under test: a byte buffer of the device."""

    buffer: Buffer
    nbytes: int


def deliver(contract: Contract, case: Case, found: Mapping[str, Array], act: str = "f32") -> dict[str, Array]:
    """Return canonical arrays as a device would hand them back: rounded, in their host representation."""
    return {name: to_host(array, dtype_of(contract, case, name, act)) for name, array in found.items()}


def run_golden(
    kernel: Kernel,
    case: Case,
    act: str = "f32",
    poison: Poison = POISON,
    *,
    kv: Kv = "",
    golden: Callable[[Any, int], None] | None = None,
    products: Products = "f32",
) -> dict[str, Expected]:
    """Run the golden (or `golden` in its place) on fresh, poisoned arguments; return what it left in every array, with the error
    allowed there, on a device whose `products` of float32 round their factors like that. With `kv`, caches hold quantised rows
    before and afterwards: arithmetic is compared, not quantisation.

    Buffers that a composite declares dead are left out. Floating-point exceptions are not reported: infinities and NaN
    are ordinary inputs.
    """
    contract = contract_of(kernel)
    if case.repeats is not None:
        small = run_golden(kernel, case.repeats.case, act, poison, kv=kv, golden=golden, products=products)
        return _repeated(contract, small, case.repeats.places)
    a = namespace(contract, case, act, poison, kv)
    before = {name: array.copy() for name, array in arrays(contract, a).items()}
    with np.errstate(all="ignore"):
        scales = contract.scale(namespace(contract, case, act, poison, kv), case.n) if contract.scale else {}
        coarse = TF32_EPS if contract.products and products == "tf32" and act == "f32" else 0.0
        off = max(contract.tolerance.values(), default=0.0) * max(EPS[act], coarse)
        tipped = contract.tipped(namespace(contract, case, act, poison, kv), case.n, off) if contract.tipped else {}
        (golden or contract.golden)(a, case.n)
    finite = all(np.isfinite(array).all() for array in before.values() if array.dtype.kind == "f")
    expected, sizes = {}, symbols(contract, case)
    for name, value in arrays(contract, a).items():
        dtype = dtype_of(contract, case, name, act)
        added = sizes[contract.sums[name]] if name in contract.sums else 0
        allowed = _allowed(contract, name, value, before[name], scales, act if "." in name else dtype, added, coarse)
        if name in tipped and allowed is not None:
            allowed = allowed + tipped[name]
        loose = _loose(contract, name, value, case.n, poison.of(dtype))
        expected[name] = Expected(value, before[name], dtype, allowed, loose, loose_finite=finite)
        if kv and "." in name:
            expected[name] = _quantised(expected[name], kv)
    return _live(kernel, expected)


def _repeated(contract: Contract, found: Mapping[str, Expected], places: Mapping[str, Array]) -> dict[str, Expected]:
    """What the golden of a small case says of the large one that repeats its places."""

    def all_of(one: Expected, spec: Any) -> Expected:
        def each(array: Array) -> Array:
            return np.asarray(taken(np.broadcast_to(array, one.value.shape), spec, places))

        allowed, loose = (None if array is None else each(array) for array in (one.allowed, one.loose))
        return replace(one, value=each(one.value), before=each(one.before), allowed=allowed, loose=loose)

    specs = contract.args.specs()
    return {name: all_of(one, specs.get(name)) for name, one in found.items()}


def _quantised(want: Expected, kv: Kv) -> Expected:
    """What a cache of quantised rows holds in the place of `want`. A row of which some element may be off by rounding may lie on
    either side of every border; one that is only moved is exact. What was written counts as such even where it has become equal
    to what was there before."""
    written = ~((want.value == want.before) | (np.isnan(want.value) & np.isnan(want.before)))
    value, before, allowed = quantise(want.value, kv), np.where(written, np.nan, want.before), want.allowed
    if allowed is not None:
        allowed = np.broadcast_to(allowed, value.shape)
        off = (allowed > 0.0).any(axis=-1, keepdims=True)
        allowed = allowed + np.where(off, TIPPED * np.nan_to_num(quanta(want.value, kv)), 0.0)
    return replace(want, value=value, before=before, allowed=allowed)


def _live(kernel: Kernel, found: dict[str, T]) -> dict[str, T]:
    """Without what a composite leaves undefined."""
    dead = kernel.dead if isinstance(kernel, Composite) else ()
    return {name: value for name, value in found.items() if name not in dead}


def _allowed(
    contract: Contract,
    name: str,
    value: Array,
    before: Array,
    scales: Mapping[str, Array],
    dtype: str,
    added: int = 0,
    coarse: float = 0.0,
) -> Array | None:
    """c * eps * scale, for an eps of at least `coarse`, and what a float32 sum of `added` numbers may be off beside it, where
    a scale that is not 0 counts as a normal number at least and a subnormal result may be flushed. The halves of a cache may
    have entries of their own, or share the cache's."""
    field = name.partition(".")[0]
    c = contract.tolerance.get(name, contract.tolerance.get(field))
    if c is None or dtype not in EPS:
        return None
    scale = scales.get(name, scales.get(field))
    if scale is None:  # the largest magnitude that the golden wrote in this row; poison is no magnitude
        written = np.where(np.isfinite(value) & (value != before), np.abs(value), 0.0)
        axes = tuple(range(2 if "." in name else 1, value.ndim))
        scale = written.max(axis=axes, keepdims=True, initial=0.0) if axes else written
    some = np.asarray(scale) > 0.0
    least = np.where(some, np.maximum(scale, NORMAL[dtype]), scale)
    relative = np.asarray((c * max(EPS[dtype], coarse) + added**0.5 / 4 * EPS["f32"]) * least, np.float64)
    return np.asarray(np.maximum(relative, np.where(some, FLUSHED[dtype], 0.0)))


def _loose(contract: Contract, name: str, value: Array, n: int, poison: float) -> Array | None:
    """Elements below the launch length that the contract leaves open: pad "any", and the golden wrote nothing."""
    spec = contract.args.specs().get(name)
    if not isinstance(spec, TensorSpec) or spec.pad != "any":
        return None
    loose: Array = value == poison
    loose[n:] = False
    return loose


# -- the kernel ------------------------------------------------------------------------------------------


def check_kernel(
    kernel: Kernel,
    case: Case,
    device: Device,
    table: KernelTable,
    *,
    act: str = "f32",
    init_meta: InitMeta | None = None,
    want: Mapping[str, Expected] | None = None,
    kv: Kv = "",
    products: Products = "f32",
) -> Comparison:
    """Compare a kernel with the golden on one case, its caches kept as `kv` says, `products` of float32 as the device declares
    them; `want` spares the golden's run. Raises as `run_kernel` does."""
    want = run_golden(kernel, case, act, kv=kv, products=products) if want is None else want
    got = run_kernel(kernel, case, device, table, act=act, init_meta=init_meta, kv=kv)
    return held(kernel, case, got, want, act=act, kv=kv)


def held(
    kernel: Kernel, case: Case, got: Mapping[str, Array], want: Mapping[str, Expected], *, act: str = "f32", kv: Kv = ""
) -> Comparison:
    """Compare what a kernel left, host representations by argument name, with what the golden left; what is wrong says which
    mutants leave the same."""
    comparison = compare(contract_of(kernel), case, got, want)
    if comparison.ok:
        return comparison
    from polydraft.conformance.causes import resembled  # the zoo, which a kernel that is right has no use for

    return replace(comparison, like=resembled(kernel, case, got, act=act, kv=kv))


def run_kernel(
    kernel: Kernel,
    case: Case,
    device: Device,
    table: KernelTable,
    *,
    act: str = "f32",
    init_meta: InitMeta | None = None,
    step: StepMeta | None = None,
    stream: Stream | None = None,
    kv: Kv = "",
) -> dict[str, Array]:
    """Bind a backend's kernel to fresh poisoned buffers, launch it once and read every array back.

    Returns host representations by argument name: inputs too, caches as float32 `<name>.k` and `<name>.v`, nothing dead.
    `init_meta` prepares forward metadata for arguments of that kind, filled as `step` says (None: as for a target pass over the
    case's rows); without it they are None. Synchronises before and after the launch. Raises `ContractError` when the table has
    no such kernel, or when the launch returns something, allocates on the device or synchronises.
    """
    contract = contract_of(kernel)
    bound = Bound(kernel, case, device, table, act=act, init_meta=init_meta, step=step, stream=stream, kv=kv)
    device.synchronize()
    _launch(contract, case, device, bound.stream, bound.launch)
    return bound.read()


class Bound:
    """A backend's kernel bound to fresh poisoned buffers that hold a case, for checks that launch it more than once.

    `launch`: what the provider returned; `metas`: forward metadata, filled for the case, by argument name. Raises `ContractError`
    where the table has no such kernel."""

    def __init__(
        self,
        kernel: Kernel,
        case: Case,
        device: Device,
        table: KernelTable,
        *,
        act: str = "f32",
        init_meta: InitMeta | None = None,
        step: StepMeta | None = None,
        stream: Stream | None = None,
        kv: Kv = "",
    ) -> None:
        contract = contract_of(kernel)
        provider = table.providers.get(kernel.name)
        if provider is None:
            known = ", ".join(sorted(table.providers))
            raise ContractError(f"{contract.key} has no provider, got {known or 'none'}; add it to the backend's kernels")
        self.kernel, self.contract, self.device, self.act, self.kv, self._table = kernel, contract, device, act, kv, table
        self._written = 0
        self.stream = device.stream if stream is None else stream
        limits = limits_of(contract, case)
        self._values = _buffers(contract, case, device, table, act, kv)
        self.metas = {}
        if init_meta is not None:
            self.metas = _metadata(contract, device, self._values, init_meta=init_meta, limits=limits)
            self._values |= self.metas
            self.fill(step or _step_of(case))
        args = _args(kernel, self._values)
        check_arguments(kernel, args)
        nbytes = provider.workspace_bytes(args, limits)
        workspace = DeviceWorkspace(device.empty(f"{kernel.name}.workspace", (nbytes,), "u8"), nbytes) if nbytes else None
        self.launch = provider.bind(args, limits, workspace)
        self._workspace = workspace
        self._scribble()
        specs = contract.args.specs()
        self._tensors = _tensors_of(contract, self._values)
        self._caches = [name for name, spec in specs.items() if isinstance(spec, OpaqueSpec) and spec.kind == "cache"]
        self._weights = {
            name: spec
            for name, spec in specs.items()
            if isinstance(spec, OpaqueSpec) and spec.kind == "weight" and self._values[name] is not None
        }
        self._staged: dict[str, Staging] = {}
        self._contents: dict[int, tuple[Case, dict[str, Array], dict[str, LogicalCache]]] = {}

    def fill(self, step: StepMeta) -> None:
        """Fill the forward metadata."""
        for meta in self.metas.values():
            meta.fill(self.stream, step)

    def _scribble(self) -> None:
        """Leave in the workspace what another launch might."""
        if self._workspace is not None:
            self._written += 1
            buffer, nbytes = self._workspace.buffer, self._workspace.nbytes
            self.device.load(buffer, np.full(nbytes, SCRIBBLED[self._written % len(SCRIBBLED)], np.uint8))

    def load(self, case: Case) -> None:
        """Put the contents of another case of the same form in the place of whatever the buffers hold now, poison in outputs,
        anything in the workspace, and fill the metadata for it. Weights stay as they are. Waits."""
        if id(case) not in self._contents:
            a = namespace(self.contract, case, self.act, kv=self.kv)
            found, dtypes = arrays(self.contract, a), {n: dtype_of(self.contract, case, n, self.act) for n in self._tensors}
            caches = {n: getattr(a, n) for n in self._caches}
            self._contents[id(case)] = case, {n: to_host(found[n], dtypes[n]) for n in self._tensors}, caches
        _, tensors, caches = self._contents[id(case)]
        self.device.synchronize()
        for name, array in tensors.items():
            self.device.load(self._tensors[name], array)
        for name, cache in caches.items():
            self._values[name].write_logical(cache.k.astype(np.float32), cache.v.astype(np.float32))
        self._scribble()
        self.fill(_step_of(case))

    def refill(self, case: Case) -> None:
        """Put the weights of another case of the same form in the place of those that the kernel is bound to. Raises
        `ContractError` where one of them is another object then."""
        for name, spec in self._weights.items():
            previous = self._values[name]
            if _prepared(self._table, name, spec, case.arrays[name], self.act, previous) is not previous:
                raise ContractError(
                    f"{self.contract.key}: refilling {name} returned another weight, wanted the one that was given; fill that "
                    "one in place, since kernels and graphs are bound to it"
                )

    def read(self) -> dict[str, Array]:
        """Bring every tensor back behind what was launched, through poisoned staging, and read every cache: host representations
        by argument name, caches as float32 `<name>.k` and `<name>.v`, nothing dead."""
        device, stream = self.device, self.stream
        for name, buffer in self._tensors.items():
            if name not in self._staged:
                self._staged[name] = device.staging(f"{self.contract.name}.{name}.back", buffer.shape, buffer.dtype)
            self._staged[name].array.view(np.uint8).fill(0x5A)
            device.download(stream, self._staged[name], buffer, buffer.shape[0])
        event = device.event()
        event.record(stream)
        event.synchronize()
        got = {name: staging.array.copy() for name, staging in self._staged.items()}
        for name in self._caches:
            got[f"{name}.k"], got[f"{name}.v"] = self._values[name].read_logical()
        return _live(self.kernel, got)


def _tensors_of(contract: Contract, values: Mapping[str, Any]) -> dict[str, Buffer]:
    """Every buffer of a record that is there, columns among them."""
    found: dict[str, Buffer] = {}
    for name, spec in contract.args.specs().items():
        if isinstance(spec, ColumnsSpec):
            found |= {column_name(name, i): column for i, column in enumerate(values[name])}
        elif isinstance(spec, TensorSpec) and values[name] is not None:
            found[name] = values[name]
    return found


def record_of(kernel: Kernel, case: Case, device: Device, table: KernelTable, act: str = "f32") -> Args | CompositeArgs:
    """The record of one case, on fresh buffers of the device and without forward metadata; nothing is bound."""
    return _args(kernel, _buffers(contract_of(kernel), case, device, table, act))


def weight_role(name: str, spec: OpaqueSpec) -> str:
    """Return the role under which a weight argument is prepared; a matrix whose rows are tokens is an embedding, and what has an
    axis of experts is stacked by it, or routes."""
    if spec.shape.startswith("EX"):
        return "experts" if " " in spec.shape else "router"
    if len(spec.shape.split()) > 1:
        return "embedding" if spec.shape.startswith("V ") else "linear"
    return "bias" if name == "bias" else "norm"


def _buffers(contract: Contract, case: Case, device: Device, table: KernelTable, act: str, kv: Kv = "") -> dict[str, Any]:
    """Fields of the `Args` record, loaded; metadata and absent arguments are None. Large arrays are not widened on the way."""
    values: dict[str, Any] = dict(case.params)
    for name, spec in contract.args.specs().items():
        if isinstance(spec, ParamSpec):
            continue
        value = values[name] = case.arrays.get(name)
        if isinstance(spec, TensorSpec) and spec.access == "out":
            dtype = dtype_of(contract, case, name, act)
            value = np.full(case.outputs[name][0], POISON.of(dtype), np.float32 if dtype in EPS else DTYPES[dtype])
        if value is None:
            continue
        if isinstance(spec, TensorSpec):
            values[name] = _loaded(contract, case, device, name, value, act)
        elif isinstance(spec, ColumnsSpec):
            values[name] = tuple(
                _loaded(contract, case, device, column_name(name, i), column, act) for i, column in enumerate(value)
            )
        elif isinstance(value, LogicalCache):
            blocks, block_size, heads, head_dim = value.k.shape
            values[name] = table.allocate_cache(CacheSpec(blocks, block_size, heads, head_dim, act, kv=kv))
            rows = kept(value, act, kv)
            values[name].write_logical(rows.k.astype(np.float32), rows.v.astype(np.float32))
        else:
            values[name] = _prepared(table, name, spec, value, act)
    return values


def weights_of(kernel: Contract) -> list[str]:
    """Names of the arguments of a contract that are weights."""
    return [name for name, spec in kernel.args.specs().items() if isinstance(spec, OpaqueSpec) and spec.kind == "weight"]


def _prepared(table: KernelTable, name: str, spec: OpaqueSpec, value: Matrix, act: str, previous: Weight | None = None) -> Weight:
    """A weight argument as an engine prepares it, or refills it."""
    if not isinstance(value, PackedWeight) and act != "f32":
        value = from_host(to_host(value, act), act).astype(np.float32)
    return table.prepare_weight(weight_role(name, spec), value, act, previous)


def _loaded(contract: Contract, case: Case, device: Device, name: str, value: Array, act: str) -> Buffer:
    """A buffer of the device that holds `value`."""
    dtype = dtype_of(contract, case, name, act)
    buffer = device.empty(f"{contract.name}.{name}", value.shape, dtype)
    device.load(buffer, to_host(value, dtype))
    return buffer


def _args(kernel: Kernel, values: Mapping[str, Any]) -> Args | CompositeArgs:
    """The record a provider binds: of the contract, or of each part of a composite."""
    if isinstance(kernel, Contract):
        return kernel.args(**values)
    return CompositeArgs(tuple(part.args(**{name: values[name] for name in part.args.specs()}) for part in kernel.contracts))


def _metadata(
    contract: Contract, device: Device, values: Mapping[str, Any], *, init_meta: InitMeta, limits: Limits
) -> dict[str, ForwardMeta]:
    """Arguments of kind "meta", over the buffers of a target pass."""
    found = {}
    for name, spec in contract.args.specs().items():
        if isinstance(spec, OpaqueSpec) and spec.kind == "meta":
            buffers = PassBuffers("target", values["row_slot"], values["positions"], values["block_table"])
            found[name] = init_meta(device, buffers, limits)
    return found


def _step_of(case: Case) -> StepMeta:
    """What a runtime would say of a target pass over the rows of a case; of a case without rows, next to nothing."""
    given = case.arrays.get("row_slot")
    slots = np.empty(0, np.int32) if given is None else given[: case.n]
    return StepMeta(0, launch_rows=case.n, real_slots=len(set(slots[slots >= 0].tolist())), has_prefill=True)


def _launch(contract: Contract, case: Case, device: Device, stream: Stream, launch: Launch) -> None:
    """Launch once and hold the kernel to what every launch promises."""
    before = device.counters.copy()
    result: object = launch(stream, case.n)  # type: ignore[func-returns-value]
    allocated = device.counters.allocations - before.allocations
    synchronised = device.counters.host_syncs - before.host_syncs
    wrong = [] if result is None else [f"returned {result!r}, wanted None; let it return nothing"]
    if allocated or synchronised:
        wrong.append(f"allocated {allocated} and synchronised {synchronised} times, wanted 0 and 0; move that work to `bind`")
    if wrong:
        raise ContractError(f"{contract.key}, case {case.name!r}: the launch {', and it '.join(wrong)}")
