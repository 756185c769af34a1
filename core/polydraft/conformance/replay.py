"""The replay of recorded kernel calls: each one alone on a backend, from its recorded inputs, and the first difference.

`polydraft replay` calls it. A recorded call is an ordinary case of its contract, so it is bound, launched and compared as the
conformance kit does: on poisoned memory, with the golden saying what a call writes and how far apart two right answers may
be. It never runs an engine and needs no model where the weights are in the file.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from polydraft.backend import StepMeta
from polydraft.conformance.causes import causes, resembled
from polydraft.conformance.harness import run_golden, run_kernel
from polydraft.conformance.kernel_checks import Table
from polydraft.conformance.outcomes import Result
from polydraft.conformance.target import Opened, Target
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.base import Case, ColumnsSpec, Contract, LogicalCache, TensorSpec, column_name
from polydraft.contracts.compare import Comparison, Expected, Mismatch, compare, from_host
from polydraft.contracts.composite import Composite, Expansion
from polydraft.contracts.inputs import FLEXIBLE, POISON, Kernel, contract_of, field_of, kernel_of
from polydraft.contracts.kv_quant import KV_DTYPES, Kv
from polydraft.device import Array
from polydraft.errors import ConfigError, PolydraftError
from polydraft.instruments.record_file import Call, Record, RecordedCache, digest_of
from polydraft.models.block import laid_out

SCHEMA: Final = "polydraft.replay/1"
RECORDED, GOLDEN = "recorded", "golden"
TWO_SIDES: Final = 2.0
"""Two right answers lie on two sides of the golden: they may be twice a tolerance apart."""

Weights = Callable[[str], Array]
"""Canonical float32 values of a weight by name."""


@dataclass(frozen=True)
class Difference:
    """One call whose outputs differ, at its worst element."""

    call: Call
    mismatch: Mismatch
    causes: str = ""

    @property
    def sentence(self) -> str:
        """Which call, which element, what was there and what was wanted."""
        return (
            f"{self.call.place}: {self.mismatch.contract}, case {self.mismatch.case!r}: {self.mismatch.describe()}{self.causes}"
        )

    def describe(self) -> dict[str, Any]:
        """For --json."""
        call, wrong = self.call, self.mismatch
        return {
            "call": call.number, "step": call.step, "part": call.part, "stage": call.stage, "contract": call.contract,
            "argument": wrong.argument, "index": None if wrong.index is None else list(wrong.index), "got": wrong.got,
            "wanted": wrong.wanted, "count": wrong.count, "total": wrong.total, "sentence": self.sentence,
        }  # fmt: skip


@dataclass(frozen=True)
class Replay:
    """What a replay came to. `compared` calls with `elements` elements; `skipped`: (call, reason)."""

    backend: str
    against: str
    compared: int
    elements: int
    differences: tuple[Difference, ...]
    skipped: tuple[tuple[Call, str], ...]

    @property
    def status(self) -> int:
        """0 where something was compared and nothing differs."""
        return 1 if self.differences or not self.compared else 0


def replay(
    record: Record,
    target: Target,
    *,
    against: str | Target = RECORDED,
    weights: Weights | None = None,
    calls: Sequence[int] = (),
    listen: Callable[[Call], None] | None = None,
) -> Replay:
    """Run the recorded calls (those numbered in `calls`; all where it is empty) on `target` and compare.

    `against`: "recorded", "golden", or another target that runs the same call. `weights` is asked for those that the file only
    names. Raises `ConfigError` for what does not fit the record, and what opening a device raises; an error that a kernel raises
    is a difference."""
    chosen = [record.calls[number] for number in _numbers(record, calls)]
    _refuse_other_versions(chosen)
    targets = (target, against) if isinstance(against, Target) else (target,)
    for call, one in itertools.product(chosen[:1], targets):
        _opened(record, call, one)  # what opens no device says nothing of any kernel
    differences: list[Difference] = []
    skipped: list[tuple[Call, str]] = []
    compared = elements = 0
    for call in chosen:
        if listen is not None:
            listen(call)
        reason = next((why for one in targets for why in [_lacking(call, one, _kv(record))] if why), "")
        if reason:
            skipped.append((call, reason))
            continue
        comparison = _compared(record, call, target, against, weights or _nowhere)
        compared, elements = compared + 1, elements + comparison.elements
        if not comparison.ok:
            looks = causes(Result(call.place, "fail", like=comparison.like))
            differences.append(Difference(call, comparison.mismatches[0], f"; looks like {looks}" if looks else ""))
    name = against if isinstance(against, str) else against.info.name
    return Replay(target.info.name, name, compared, elements, tuple(differences), tuple(skipped))


def _numbers(record: Record, calls: Sequence[int]) -> Iterable[int]:
    for number in calls:
        if not 0 <= number < len(record.calls):
            raise ConfigError(f"the record has no call {number}, wanted one from 0 to {len(record.calls) - 1}; choose another")
    return calls or range(len(record.calls))


def _refuse_other_versions(calls: Sequence[Call]) -> None:
    """Raise `ConfigError` for a call of a contract that core does not serve, or serves in another version."""
    served = {**{contract.name: contract.version for contract in REGISTRY}, **dict.fromkeys(COMPOSITES, 1)}
    for call in calls:
        if served.get(call.contract) != call.version:
            here = f"{call.contract}/{served[call.contract]}" if call.contract in served else "no contract of that name"
            raise ConfigError(
                f"{call.place} is one of {call.contract}/{call.version}, core serves {here}; replay it with the release that "
                "recorded it, or record it anew"
            )


def _nowhere(name: str) -> Array:
    raise ConfigError(
        f"the record names the weight {name} and does not hold its values; give its model with --model, or record with "
        "--record-weights"
    )


def _lacking(call: Call, target: Target, kv: Kv) -> str:
    """Why this backend cannot run the call, "" where it can: alone, or a composite as its parts."""
    if kv and call.caches and kv not in target.info.capabilities.kv_dtypes:
        return f"{target.info.name} does not declare KV rows in {kv}"
    offered = target.offered
    parts = COMPOSITES[call.contract].parts if call.contract in COMPOSITES else (call.contract,)
    absent = [part for part in parts if part not in offered] if call.contract not in offered else []
    return f"{target.info.name} does not offer {', '.join(absent)}" if absent else ""


# -- one call ----------------------------------------------------------------------------------------
def _compared(record: Record, call: Call, target: Target, against: str | Target, weights: Weights) -> Comparison:
    kernel, act = kernel_of(call.contract), record.about["dtype"]
    with _as_declared(call):
        case = case_of(record, call, weights)
        want = run_golden(kernel, case, act, kv=_kv(record), products=target.info.capabilities.f32_matmul)
        found = dict(_recorded(record, call)) if against == RECORDED else {}
        want = {name: _as(one, *found[name]) if name in found else one for name, one in want.items()}
    try:
        got = _run(record, call, case, target)
    except PolydraftError as error:
        return _failed(kernel, case, f"an error: {error}")
    except Exception as error:  # noqa: BLE001  whatever a kernel raises is what differs
        return _failed(kernel, case, f"an error: {type(error).__name__}: {error}")
    if isinstance(against, Target):
        other = _run(record, call, case, against)
        want = {name: _as(one, from_host(other[name], one.dtype), whole=True) for name, one in want.items()}
    comparison = compare(contract_of(kernel), case, got, want)
    return comparison if comparison.ok else replace(comparison, like=resembled(kernel, case, got, act=act, kv=_kv(record)))


@contextmanager
def _as_declared(call: Call) -> Iterator[None]:
    """Raise `ConfigError` for a call that its contract's golden cannot run: no backend is involved yet."""
    try:
        yield
    except PolydraftError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{call.place} is no call of {call.contract} as its contract declares it ({type(error).__name__}: {error}), wanted a "
            "file as it was recorded; record it anew"
        ) from error


def _failed(kernel: Kernel, case: Case, what: str) -> Comparison:
    wrong = Mismatch(contract_of(kernel).key, case.name, "the launch", "nothing", what, "a result")
    return Comparison(wrong.contract, case.name, 1, (wrong,), None)


def _as(want: Expected, value: Array, whole: bool) -> Expected:
    """What is expected where `value` is the right answer: within two tolerances where the golden wrote. `whole`: elements that
    the golden leaves alone count as well; otherwise they have to be as before."""
    same = (want.value == want.before) | (np.isnan(want.value) & np.isnan(want.before) if want.value.dtype.kind == "f" else False)
    value = value[tuple(slice(size) for size in want.value.shape)]  # of a buffer that was larger than its fellows
    wanted = value if whole else np.where(same, want.value, value)
    allowed = None if want.allowed is None else TWO_SIDES * want.allowed
    return dataclasses.replace(want, value=np.asarray(wanted, want.value.dtype), allowed=allowed)


def _recorded(record: Record, call: Call) -> Iterator[tuple[str, tuple[Array, bool]]]:
    """Recorded results by argument name, and whether all of the array was recorded: what lay in an output before was not."""
    for name, key in call.outputs.items():
        tensor = record.tensors[key]
        yield name, (from_host(tensor.array, tensor.dtype), name in call.inputs)
    for name, cache in call.caches.items():
        for half, key in (("k", cache.k_after), ("v", cache.v_after)):
            yield f"{name}.{half}", (_blocks(record, cache, key, record.about["dtype"]), True)


def _opened(record: Record, call: Call, target: Target) -> Opened:
    """A device for a call, which calls of one step share."""
    return target.opened(dtype=record.about["dtype"], row_invariant=_invariant(record, target), key=call.step)


def _run(record: Record, call: Call, case: Case, target: Target) -> dict[str, Array]:
    """Run a call on a backend: its own kernel, or a composite that it does not offer as its parts."""
    opened = _opened(record, call, target)
    kernel = kernel_of(call.contract)
    table: Any = opened.table
    if isinstance(kernel, Composite) and call.contract not in opened.table.providers:
        table = Table(opened.table, {call.contract: Expansion(kernel, opened.table.providers)})
    meta = next(iter(call.metas.values()), None)
    init_meta, step = (opened.init_meta, StepMeta(**meta)) if meta else (None, None)
    act, kv = record.about["dtype"], _kv(record)
    return run_kernel(kernel, case, opened.device, table, act=act, init_meta=init_meta, step=step, kv=kv)


def _kv(record: Record) -> Kv:
    """How the engine that was recorded kept KV rows."""
    asked = record.about.get("config", {}).get("kv_dtype")
    return next((kv for kv in KV_DTYPES if kv == asked), "")


def _invariant(record: Record, target: Target) -> bool:
    return bool(record.about["invariant"] and target.info.capabilities.row_invariant)


def case_of(record: Record, call: Call, weights: Weights) -> Case:
    """A recorded call as a case of its contract: inputs as recorded, outputs by shape."""
    kernel, act = kernel_of(call.contract), record.about["dtype"]
    contract = contract_of(kernel)
    used = {name: (one, record.weights[one]) for name, one in call.weights.items()}
    arrays: dict[str, Any] = {
        name: laid_out(_values(record, weight, one, weights), weight.leaves) for name, (one, weight) in used.items()
    }
    outputs: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, spec in contract.args.specs().items():
        if isinstance(spec, ColumnsSpec):
            count = sum(field_of(one) == name for one in call.inputs)
            arrays[name] = tuple(record.tensors[call.inputs[column_name(name, i)]].array for i in range(count))
        elif isinstance(spec, TensorSpec) and name in call.inputs:
            tensor = record.tensors[call.inputs[name]]
            value = from_host(tensor.array, tensor.dtype)
            arrays[name] = value.astype(np.float32) if spec.dtype in FLEXIBLE else tensor.array
        elif isinstance(spec, TensorSpec) and name in call.outputs:
            tensor = record.tensors[call.outputs[name]]
            free = "f32" if tensor.dtype == "f32" and act != "f32" else "act"
            outputs[name] = (tuple(tensor.array.shape), free if spec.dtype == "float" else spec.dtype)
    _fit(contract, arrays, outputs, dead=kernel.dead if isinstance(kernel, Composite) else ())
    for name, cache in call.caches.items():
        k, v = (_blocks(record, cache, key, act).astype(np.float32) for key in (cache.k, cache.v))
        arrays[name] = LogicalCache(k, v)
    return Case(f"call-{call.number}", arrays, dict(call.params), call.n, outputs)


def _fit(
    contract: Contract, arrays: dict[str, Any], outputs: dict[str, tuple[tuple[int, ...], str]], dead: Sequence[str]
) -> None:
    """Cut leading axes of one symbol to the shortest: a step may bind buffers of different capacities, and what lies beyond the
    shortest cannot be meant. A dead buffer, which may be a stand-in of any size, gets that size."""
    first = {n: s.symbols[0] for n, s in contract.args.specs().items() if isinstance(s, TensorSpec) and s.symbols}
    sizes: dict[str, int] = {}
    for name, symbol in first.items():
        size = outputs[name][0][0] if name in outputs else len(arrays[name]) if name in arrays else None
        if size is not None and name not in dead:
            sizes[symbol] = min(size, sizes.get(symbol, size))
    for name, symbol in first.items():
        if name in outputs and symbol in sizes:
            outputs[name] = ((sizes[symbol], *outputs[name][0][1:]), outputs[name][1])
        elif name in arrays:
            arrays[name] = arrays[name][: sizes[symbol]]


def _blocks(record: Record, cache: RecordedCache, key: str, act: str) -> Array:
    """The blocks of a cache in float64, to one behind the last that was named; those that nobody named hold poison, so that
    touching one shows."""
    rows, blocks = record.tensors[key].array, record.tensors[cache.blocks].array
    used = min(cache.num_blocks, int(blocks.max(initial=-1)) + 2)
    whole = np.full((used, *rows.shape[1:]), POISON.of(act), np.float64)
    whole[blocks] = rows
    return whole


def _values(record: Record, weight: Any, name: str, weights: Weights) -> Array:
    """A weight's values, from the file or from the model; they have to be the recorded ones."""
    if weight.key:
        return record.tensors[weight.key].array
    value = np.asarray(weights(name), np.float32)
    if digest_of(value) != weight.digest:
        raise ConfigError(f"the weight {name} is not the recorded one; give the model that was recorded")
    return value
