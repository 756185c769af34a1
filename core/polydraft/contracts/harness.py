"""Owns the way from a case to a verdict: run the golden, run a backend's kernel on a device, compare what they left.

The tests of contracts and of the reference, the adequacy gate and the conformance kit call it with any `Device` and
`KernelTable`. It never knows which backend that is and never fills in what a case leaves out.

Activation dtype: a case holds its "act" floats, weights and caches in float32. A run for `act` rounds them to that
dtype first, for the golden and the kernel alike, so that what is compared is arithmetic and not rounding of inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from polydraft.backend import CacheSpec, ForwardMeta, KernelTable, PassBuffers, StepMeta
from polydraft.contracts.base import Case, Contract, Limits, LogicalCache, OpaqueSpec, ParamSpec, TensorSpec
from polydraft.contracts.compare import EPS, Comparison, Expected, compare, from_host, to_host
from polydraft.device import DTYPES, Array, Buffer, Device, Launch, Stream
from polydraft.errors import ContractError

SEEDS: Final = 20
"""Generated cases of a contract that every run takes, beside the named ones."""

FLEXIBLE: Final = ("act", "float")
"""Dtype names that a run replaces: "act" by its activation dtype, "float" by what the case says of that output."""

InitMeta = Callable[[Device, PassBuffers, Limits], ForwardMeta]
"""The hook `polydraft_init_forward_meta` of a backend."""


@dataclass(frozen=True)
class Poison:
    """What memory holds that nobody has written. Both numbers are exact in every dtype they are used for and should
    occur in no case; the float is finite, since a NaN written and a NaN never overwritten could not be told apart."""

    real: float = -24576.0
    integer: int = 0x5A5A5A5A

    def of(self, dtype: str) -> float | int:
        """The poison of a dtype name, in canonical numbers."""
        return self.real if dtype in EPS else self.integer & (2 ** (8 * DTYPES[dtype].itemsize) - 1)


POISON: Final = Poison()


@dataclass(frozen=True)
class Scratch:
    """Workspace of a kernel under test: a byte buffer of the device."""

    buffer: Buffer
    nbytes: int


# -- cases ---------------------------------------------------------------------------------------------


def default_cases(contract: Contract, seeds: int = SEEDS) -> Iterator[Case]:
    """Yield the named cases, then `seeds` generated ones."""
    yield from contract.cases()
    for seed in range(seeds):
        yield generated(contract, seed)


def generated(contract: Contract, seed: int) -> Case:
    """Return the generated case of one seed, named `seed-<number>` and the same in every run."""
    return dataclasses.replace(contract.generate(np.random.default_rng(seed)), name=f"seed-{seed}")


def symbols(contract: Contract, case: Case) -> dict[str, int]:
    """Return the size of every shape symbol in this case.

    Raises `ContractError` where the case and the record disagree: an argument missing or unknown, a dtype that is not
    the declared one, axes or sizes that contradict the record or another argument, a negative launch length.
    """
    specs = contract.args.specs()
    unknown = sorted({*case.arrays, *case.outputs, *case.params} - set(specs))
    if unknown:
        raise _unusable(contract, case, ", ".join(unknown), "a value", f"fields of {contract.args.__name__} only")
    if case.n < 0:
        raise _unusable(contract, case, "the launch", f"length {case.n}", "0 or more")
    sizes: dict[str, int] = {}
    for name, spec in specs.items():
        if isinstance(spec, ParamSpec):
            if name not in case.params:
                raise _unusable(contract, case, name, "no value", "one")
            continue
        shape = _shape(contract, case, name, spec)
        if shape is None or not spec.shape:
            continue
        axes = spec.shape.split()
        wanted = [int(s) if s.isdigit() else sizes.setdefault(s, size) for s, size in zip(axes, shape, strict=False)]
        if len(axes) != len(shape) or wanted != list(shape):
            raise _unusable(contract, case, name, f"shape {shape}", f"[{spec.shape}], here {wanted}")
    return sizes


def _shape(contract: Contract, case: Case, name: str, spec: TensorSpec | OpaqueSpec) -> tuple[int, ...] | None:
    """The shape a case gives to an argument; None where there is none or the argument may be, and is, left out."""
    if isinstance(spec, TensorSpec) and spec.access == "out":
        shape, dtype = case.outputs.get(name, (None, ""))
        if shape is None or not (dtype == spec.dtype or (spec.dtype == "float" and dtype in ("act", "f32"))):
            raise _unusable(contract, case, name, f"{(shape, dtype)} in `outputs`", f"a shape and {spec.dtype}")
        return shape
    value = case.arrays.get(name)
    if value is None and _may_be_absent(contract, name):
        return None
    if isinstance(value, LogicalCache):
        return None
    wanted = DTYPES["f32"] if isinstance(spec, OpaqueSpec) or spec.dtype in FLEXIBLE else DTYPES[spec.dtype]
    if not isinstance(value, np.ndarray) or value.dtype != wanted:
        raise _unusable(contract, case, name, f"{getattr(value, 'dtype', type(value))}", f"an array of {wanted}")
    return tuple(value.shape)


def _may_be_absent(contract: Contract, name: str) -> bool:
    fields = dataclasses.fields(contract.args)  # type: ignore[arg-type]
    return any(field.name == name and field.default is None for field in fields)


def _unusable(contract: Contract, case: Case, name: str, got: str, wanted: str) -> ContractError:
    return ContractError(f"{contract.key}, case {case.name!r}: {name} has {got}, wanted {wanted}; correct the case")


# -- the golden ----------------------------------------------------------------------------------------


def dtype_of(contract: Contract, case: Case, name: str, act: str) -> str:
    """Return the dtype name in which the array `name` is handed over: caches are read back in float32."""
    spec = contract.args.specs().get(name)
    if not isinstance(spec, TensorSpec):
        return "f32"
    declared = case.outputs[name][1] if spec.access == "out" else spec.dtype
    return act if declared in FLEXIBLE else declared


def namespace(contract: Contract, case: Case, act: str = "f32", poison: Poison = POISON) -> SimpleNamespace:
    """Return fresh arguments for a golden: floats rounded to their dtype and widened to float64, integers as they are,
    outputs poisoned, caches as `LogicalCache`, metadata and absent arguments None."""
    a = SimpleNamespace(**case.params)
    for name, spec in contract.args.specs().items():
        value = case.arrays.get(name)
        if isinstance(spec, ParamSpec):
            continue
        if isinstance(spec, TensorSpec):
            dtype = dtype_of(contract, case, name, act)
            if spec.access == "out":
                value = np.full(case.outputs[name][0], poison.of(dtype), np.float64 if dtype in EPS else DTYPES[dtype])
            elif value is not None:
                value = _rounded(value, dtype)
        elif isinstance(value, LogicalCache):
            value = LogicalCache(_rounded(value.k, act), _rounded(value.v, act))
        elif value is not None:
            value = _rounded(value, act)
        setattr(a, name, value)
    return a


def _rounded(value: Array, dtype: str) -> Array:
    return from_host(to_host(value, dtype), dtype) if dtype in EPS else value.copy()


def arrays(contract: Contract, a: Any) -> dict[str, Array]:
    """Return every array of a namespace that a launch could change, by argument name: tensors (inputs too, so that a
    kernel that writes one is seen) and caches as `<name>.k` and `<name>.v`. Nothing is copied."""
    found: dict[str, Array] = {}
    for name, spec in contract.args.specs().items():
        value = getattr(a, name)
        if isinstance(value, LogicalCache):
            found |= {f"{name}.k": value.k, f"{name}.v": value.v}
        elif isinstance(spec, TensorSpec) and value is not None:
            found[name] = value
    return found


def deliver(contract: Contract, case: Case, found: Mapping[str, Array], act: str = "f32") -> dict[str, Array]:
    """Return canonical arrays as a device would hand them back: rounded, in their host representation."""
    return {name: to_host(array, dtype_of(contract, case, name, act)) for name, array in found.items()}


def run_golden(contract: Contract, case: Case, act: str = "f32", poison: Poison = POISON) -> dict[str, Expected]:
    """Run the golden on fresh, poisoned arguments; return what it left in every array, with the error allowed there.

    Floating-point exceptions are not reported: infinities and NaN are ordinary inputs.
    """
    a = namespace(contract, case, act, poison)
    before = {name: array.copy() for name, array in arrays(contract, a).items()}
    with np.errstate(all="ignore"):
        scales = contract.scale(namespace(contract, case, act, poison), case.n) if contract.scale else {}
        contract.golden(a, case.n)
    finite = all(np.isfinite(array).all() for array in before.values() if array.dtype.kind == "f")
    expected = {}
    for name, value in arrays(contract, a).items():
        dtype = dtype_of(contract, case, name, act)
        eps = EPS.get(act if "." in name else dtype)
        allowed = _allowed(contract, name, value, before[name], scales, eps=eps)
        loose = _loose(contract, name, value, case.n, poison.of(dtype))
        expected[name] = Expected(value, before[name], dtype, allowed, loose, loose_finite=finite)
    return expected


def _allowed(
    contract: Contract, name: str, value: Array, before: Array, scales: Mapping[str, Array], *, eps: float | None
) -> Array | None:
    """c * eps * scale; the halves of a cache may have entries of their own or share the cache's."""
    field = name.partition(".")[0]
    c = contract.tolerance.get(name, contract.tolerance.get(field))
    if c is None or eps is None:
        return None
    scale = scales.get(name, scales.get(field))
    if scale is None:  # the largest magnitude that the golden wrote in this row; poison is no magnitude
        written = np.where(np.isfinite(value) & (value != before), np.abs(value), 0.0)
        axes = tuple(range(2 if "." in name else 1, value.ndim))
        scale = written.max(axis=axes, keepdims=True, initial=0.0) if axes else written
    return np.asarray(c * eps * scale, np.float64)


def _loose(contract: Contract, name: str, value: Array, n: int, poison: float) -> Array | None:
    """Elements below the launch length that the contract leaves open: pad "any", and the golden wrote nothing."""
    spec = contract.args.specs().get(name)
    if not isinstance(spec, TensorSpec) or spec.pad != "any":
        return None
    loose: Array = value == poison
    loose[n:] = False
    return loose


# -- a kernel ------------------------------------------------------------------------------------------


def check_kernel(
    contract: Contract,
    case: Case,
    device: Device,
    table: KernelTable,
    *,
    act: str = "f32",
    init_meta: InitMeta | None = None,
    want: Mapping[str, Expected] | None = None,
) -> Comparison:
    """Compare a kernel with the golden on one case; `want` spares the golden's run. Raises as `run_kernel` does."""
    want = run_golden(contract, case, act) if want is None else want
    return compare(contract, case, run_kernel(contract, case, device, table, act=act, init_meta=init_meta), want)


def run_kernel(
    contract: Contract,
    case: Case,
    device: Device,
    table: KernelTable,
    *,
    act: str = "f32",
    init_meta: InitMeta | None = None,
    stream: Stream | None = None,
) -> dict[str, Array]:
    """Bind a backend's kernel to fresh poisoned buffers, launch it once and read every array back.

    Returns host representations by argument name, inputs included, caches as float32 `<name>.k` and `<name>.v`.
    `init_meta` prepares forward metadata for arguments of that kind; without it they are None. Synchronises before and
    after the launch. Raises `ContractError` when the table has no such kernel, or when the launch returns something,
    allocates on the device or synchronises.
    """
    provider = table.providers.get(contract.name)
    if provider is None:
        raise ContractError(f"{contract.key}: the backend has {', '.join(sorted(table.providers))}; implement this one too")
    stream = device.stream if stream is None else stream
    limits = limits_of(contract, case)
    values = _buffers(contract, case, device, table, act)
    if init_meta is not None:
        values |= _metadata(contract, case, device, values, init_meta=init_meta, limits=limits, stream=stream)
    args = contract.args(**values)
    nbytes = provider.workspace_bytes(args, limits)
    scratch = Scratch(device.empty(f"{contract.name}.workspace", (nbytes,), "u8"), nbytes) if nbytes else None
    launch = provider.bind(args, limits, scratch)
    device.synchronize()
    _launch(contract, case, device, stream, launch)
    return _read_back(contract, device, stream, values)


def limits_of(contract: Contract, case: Case) -> Limits:
    """Return capacities that fit a case exactly; a capacity the contract has no symbol for is as small as it can be."""
    size = symbols(contract, case)
    cache = next((value for value in case.arrays.values() if isinstance(value, LogicalCache)), None)
    num_blocks, block_size = cache.k.shape[:2] if cache else (1, 1)
    block_size = int(case.params.get("block_size", block_size))
    max_blocks = size.get("MB", 1)
    return Limits(
        max_seqs=size.get("B", 1),
        num_drafts=size.get("K", size.get("W", 1) - 1),
        max_rows=size.get("R", size.get("N", 1)),
        max_logit_rows=size.get("NL", size.get("N", 1)),
        max_len=size.get("L", max_blocks * block_size),
        block_size=block_size,
        num_blocks=int(num_blocks),
        max_blocks=max_blocks,
        max_stop_tokens=size.get("S", 1),
        vocab_size=size.get("V", 1),
    )


def weight_role(name: str, spec: OpaqueSpec) -> str:
    """Return the role under which a weight argument is prepared; a matrix whose rows are tokens is an embedding."""
    if len(spec.shape.split()) == 2:
        return "embedding" if spec.shape.startswith("V ") else "linear"
    return "bias" if name == "bias" else "norm"


def _buffers(contract: Contract, case: Case, device: Device, table: KernelTable, act: str) -> dict[str, Any]:
    """Fields of the `Args` record, loaded; metadata and absent arguments are None."""
    a = namespace(contract, case, act)
    values: dict[str, Any] = {}
    for name, spec in contract.args.specs().items():
        value = values[name] = getattr(a, name)
        if value is None or isinstance(spec, ParamSpec):
            continue
        if isinstance(spec, TensorSpec):
            dtype = dtype_of(contract, case, name, act)
            values[name] = device.empty(f"{contract.name}.{name}", value.shape, dtype)
            device.load(values[name], to_host(value, dtype))
        elif isinstance(value, LogicalCache):
            blocks, block_size, heads, head_dim = value.k.shape
            values[name] = table.allocate_cache(CacheSpec(blocks, block_size, heads, head_dim, act))
            values[name].write_logical(value.k.astype(np.float32), value.v.astype(np.float32))
        else:
            values[name] = table.prepare_weight(weight_role(name, spec), value.astype(np.float32), act)
    return values


def _metadata(
    contract: Contract,
    case: Case,
    device: Device,
    values: Mapping[str, Any],
    *,
    init_meta: InitMeta,
    limits: Limits,
    stream: Stream,
) -> dict[str, ForwardMeta]:
    """Arguments of kind "meta", filled for the case's rows as the runtime would for a target pass."""
    filled = {}
    for name, spec in contract.args.specs().items():
        if isinstance(spec, OpaqueSpec) and spec.kind == "meta":
            buffers = PassBuffers("target", values["row_slot"], values["positions"], values["block_table"])
            filled[name] = init_meta(device, buffers, limits)
            slots = case.arrays["row_slot"][: case.n]
            real = len(set(slots[slots >= 0].tolist()))
            filled[name].fill(stream, StepMeta("target", 0, launch_rows=case.n, real_slots=real, has_prefill=True))
    return filled


def _launch(contract: Contract, case: Case, device: Device, stream: Stream, launch: Launch) -> None:
    """Launch once and hold the kernel to what every launch promises."""
    before = device.counters.copy()
    result: object = launch(stream, case.n)  # type: ignore[func-returns-value]
    allocated = device.counters.allocations - before.allocations
    synchronised = device.counters.host_syncs - before.host_syncs
    if result is not None or allocated or synchronised:
        raise ContractError(
            f"{contract.key}, case {case.name!r}: the launch returned {result!r}, allocated {allocated} and "
            f"synchronised {synchronised} times, wanted None, 0 and 0; move that work to `bind`"
        )


def _read_back(contract: Contract, device: Device, stream: Stream, values: Mapping[str, Any]) -> dict[str, Array]:
    """Download every tensor behind the launch, through poisoned staging, and read every cache."""
    specs = contract.args.specs()
    staged = {}
    for name, buffer in values.items():
        if isinstance(specs[name], TensorSpec) and buffer is not None:
            staged[name] = device.staging(f"{contract.name}.{name}.back", buffer.shape, buffer.dtype)
            staged[name].array.view(np.uint8).fill(0x5A)
            device.download(stream, staged[name], buffer, buffer.shape[0])
    event = device.event()
    event.record(stream)
    event.synchronize()
    got = {name: staging.array.copy() for name, staging in staged.items()}
    for name, spec in specs.items():
        if isinstance(spec, OpaqueSpec) and spec.kind == "cache":
            got[f"{name}.k"], got[f"{name}.v"] = values[name].read_logical()
    return got
