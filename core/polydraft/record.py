"""Owns the recording of kernel calls: what every launch of chosen steps was given and what it left, without the model.

`generate --record FILE` puts it around an engine; a vendor reproduces a failure from the file with `polydraft replay`. It walks
the step program, so whatever a step launches is recorded. Without a recorder nothing is wrapped and nothing is paid.

A recorded step runs eagerly, with a wait behind every launch: what is recorded is what the kernels compute, not their order.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from polydraft._version import __version__
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.base import Args, OpaqueSpec, ParamSpec, TensorSpec
from polydraft.contracts.composite import CompositeArgs
from polydraft.contracts.inputs import Kernel, contract_of
from polydraft.device import Array, Buffer, Device, Staging
from polydraft.errors import ConfigError, ContractError
from polydraft.record_file import Call, Record, RecordedCache, RecordedWeight, Tensors, digest_of
from polydraft.runtime.program import Bound, Fill, Program, step_meta

if TYPE_CHECKING:
    from polydraft.backend import Cache, StepMeta
    from polydraft.engine import Engine
    from polydraft.runtime.plan import StepPlan
    from polydraft.runtime.runner import Ticket

T = TypeVar("T")

DEFAULT_STEPS = range(1, 5)
"""Steps count from 1; the first ones have a prefill and some rounds."""
ROWS_BEYOND = 2
"""Rows behind the launch length that are kept, so that a kernel that writes there shows in a replay."""


def steps_of(text: str) -> frozenset[int]:
    """Step numbers of a text such as `1-4,9`. Raises `ConfigError` for anything else."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or int(first) < 1 or (dash and int(last) < int(first)):
            raise ConfigError(f"steps to record are {text!r}, wanted numbers from 1 and ranges, such as 1-4,9; correct them")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def text_of(steps: Collection[int]) -> str:
    """The shortest text that `steps_of` reads as these."""
    ordered = sorted(steps)
    first = [step for step in ordered if step - 1 not in steps]
    last = [step for step in ordered if step + 1 not in steps]
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))


def kernel_of(contract: str, version: int) -> Kernel:
    """The contract (in that version) or composite of this name. Raises `ContractError` for one that is not known here."""
    return COMPOSITES[contract] if contract in COMPOSITES else REGISTRY[f"{contract}/{version}"]


class CallRecorder:
    """Records the calls of the steps numbered `steps` (from 1), from outside, until `remove`.

    `include_weights`: store the values of the weights that they use, and not only names and digests."""

    def __init__(self, engine: Engine, steps: Collection[int] = DEFAULT_STEPS, *, include_weights: bool = False) -> None:
        self._engine, self._steps, self._include_weights = engine, frozenset(steps), include_weights
        self._weight_names = {id(weight): name for name, weight in engine._weights.items()}
        self._filled: dict[int, StepMeta] = {}
        self._read = _Reader(engine.device)
        self.tensors = Tensors()
        self.calls: list[Call] = []
        runner = engine.runner
        self._launch, self._resume = runner.launch, runner.resume
        runner.launch, runner.resume = self._launched, self._resumed  # type: ignore[method-assign]  # until `remove`

    def remove(self) -> None:
        """Take the wrappers away again; what was recorded stays."""
        for name in ("launch", "resume"):
            vars(self._engine.runner).pop(name, None)

    def _launched(self, plan: StepPlan) -> Ticket:
        return self._recording(plan, lambda: self._launch(plan))

    def _resumed(self, ticket: Ticket) -> None:
        self._recording(ticket.plan, lambda: self._resume(ticket))

    def _recording(self, plan: StepPlan, enqueue: Callable[[], T]) -> T:
        """Enqueue (a part of) a step, from recording programs where it was chosen."""
        if plan.step_id not in self._steps:
            return enqueue()
        runner = self._engine.runner
        programs, graphs = runner.programs, runner.graphs
        runner.graphs = None
        runner.programs = {
            kind: {part: self._recorded(program, part, plan.step_id) for part, program in parts.items()}
            for kind, parts in programs.items()
        }
        try:
            return enqueue()
        finally:
            runner.programs, runner.graphs = programs, graphs

    def _recorded(self, program: Program, part: str, step: int) -> Program:
        calls = tuple((self._call(entry, part, step), entry.unit) for entry in program.entries)
        return dataclasses.replace(program, calls=calls)

    def _call(self, entry: Bound, part: str, step: int) -> Callable[[Any, int], None]:
        launch, args = entry.launch, entry.args

        def fill(stream: Any, n: int) -> None:
            assert isinstance(args, Fill)
            self._filled[id(args.meta)] = step_meta(args, self._engine.runner.context, n)
            launch(stream, n)

        def call(stream: Any, n: int) -> None:
            kernel = kernel_of(entry.contract, entry.version)
            fields = self._fields(entry, kernel)
            before = self._seen(fields, kernel, "in", n)
            launch(stream, n)
            self._engine.device.synchronize()
            self._file(entry, fields, kernel, n=n, part=part, step=step, before=before)

        if args is None:
            return launch  # no contract says what it reads and writes
        return fill if isinstance(args, Fill) else call

    # -- one call --------------------------------------------------------------------------------------
    def _fields(self, entry: Bound, kernel: Kernel) -> dict[str, Any]:
        """What each field of the kernel's record was bound to. Fields of one name in a composite are one object."""
        records = entry.args.parts if isinstance(entry.args, CompositeArgs) else (entry.args,)
        fields: dict[str, Any] = {}
        for record in records:
            assert isinstance(record, Args), "a launch is bound to records"
            fields |= {name: getattr(record, name) for name in record.specs()}
        tensors = {n: s for n, s in _specs(kernel).items() if isinstance(s, TensorSpec) and fields[n] is not None}
        for name, spec in tensors.items():
            if spec.access != "in" and any(fields[other] is fields[name] for other in tensors if other != name):
                raise ContractError(
                    f"{entry.contract} writes {name}, and another field is the same buffer, which a record cannot say; bind it "
                    "to one of its own"
                )
        return fields

    def _seen(self, fields: Mapping[str, Any], kernel: Kernel, access: str, n: int) -> dict[str, Any]:
        """Tensors by name, as keys, and cache contents by name, of what may be read (`access` "in") or written ("out").

        Of what has a row a launched row ("N"), rows far beyond the launch are left out: no kernel looks there."""
        seen: dict[str, Any] = {}
        for name, spec in _specs(kernel).items():
            value = fields[name]
            if isinstance(spec, TensorSpec) and value is not None and spec.access in (access, "inout"):
                rows = n + ROWS_BEYOND if spec.symbols[:1] == ("N",) else None
                seen[name] = self.tensors.add(self._read.buffer(value)[:rows], value.dtype)
            elif isinstance(spec, OpaqueSpec) and spec.kind == "cache":
                seen[name] = self._read.cache(value)
        return seen

    def _file(
        self, entry: Bound, fields: Mapping[str, Any], kernel: Kernel, *, n: int, part: str, step: int, before: Mapping[str, Any]
    ) -> None:
        specs, after = _specs(kernel), self._seen(fields, kernel, "out", n)
        caches = [name for name, spec in specs.items() if isinstance(spec, OpaqueSpec) and spec.kind == "cache"]
        opaque = {name: spec.kind for name, spec in specs.items() if isinstance(spec, OpaqueSpec) and fields[name] is not None}
        call = Call(
            number=len(self.calls),
            step=step,
            part=part,
            room=entry.room,
            contract=entry.contract,
            version=entry.version,
            n=n,
            inputs={name: key for name, key in before.items() if name not in caches},
            outputs={name: key for name, key in after.items() if name not in caches},
            params={name: fields[name] for name, spec in specs.items() if isinstance(spec, ParamSpec)},
            weights={name: self._weight(fields[name]) for name, kind in opaque.items() if kind == "weight"},
            caches={name: self._cache(fields, before[name], after[name]) for name in caches},
            metas={name: self._meta(fields[name]) for name, kind in opaque.items() if kind == "meta"},
        )
        self.calls.append(call)

    def _weight(self, weight: object) -> str:
        name = self._weight_names.get(id(weight))
        if name is None:
            raise ConfigError("a launch uses a weight that is none of the model's, which cannot be recorded; record without it")
        return name

    def _meta(self, meta: object) -> dict[str, Any]:
        filled = self._filled.get(id(meta))
        return {} if filled is None else dataclasses.asdict(filled)

    def _cache(self, fields: Mapping[str, Any], before: tuple[Array, Array], after: tuple[Array, Array]) -> RecordedCache:
        """The blocks that the block table names; the others belong to nobody."""
        add, num_blocks = self.tensors.add, len(before[0])
        blocks = np.arange(num_blocks, dtype=np.int32)
        if fields.get("block_table") is not None:
            named = np.unique(self._read.buffer(fields["block_table"]))
            blocks = named[(named >= 0) & (named < num_blocks)].astype(np.int32)
        values = {name: add(one[blocks].astype(np.float32), "f32") for name, one in
                  zip(("k", "v", "k_after", "v_after"), (*before, *after), strict=True)}  # fmt: skip
        return RecordedCache(num_blocks=num_blocks, blocks=add(blocks, "i32"), **values)

    # -- the record ------------------------------------------------------------------------------------
    def finish(self) -> Record:
        """What was recorded so far. Reads the weights that were used from the checkpoint, which must still be open."""
        return Record(self._about(), tuple(self.calls), self._weights(), self.tensors)

    def _weights(self) -> dict[str, RecordedWeight]:
        used = sorted({name for call in self.calls for name in call.weights.values()})
        canonical = self._engine.canonical_weights() if used else {}
        weights = {}
        for name in used:
            value = np.asarray(canonical[name], np.float32)
            key = self.tensors.add(value, "f32") if self._include_weights else ""
            weights[name] = RecordedWeight(digest_of(value), value.shape, key)
        return weights

    def _about(self) -> dict[str, Any]:
        engine = self._engine
        info, loaded, resolved = engine.info, engine.plugins.backend, engine.resolved
        backend = {"name": info.name, "version": info.version, "package": info.package, "digest": loaded.digest}
        about = {
            "polydraft": __version__,
            "backend": {**backend, "evidence": info.evidence},
            "plugins": engine.plugins.report(),
            "device": engine.device.spec,
            "model": engine.model.name,
            "demo": not engine.config.model,
            "dtype": resolved.dtype,
            "invariant": resolved.invariant,
            "block_size": resolved.limits.block_size,
            "config": resolved.describe(),
        }
        return dict(json.loads(json.dumps(about)))  # what it is once it has been in a file


def _specs(kernel: Kernel) -> dict[str, TensorSpec | ParamSpec | OpaqueSpec]:
    return contract_of(kernel).args.specs()


class _Reader:
    """Reads device memory behind everything that was issued."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pins: dict[tuple[tuple[int, ...], str], Staging] = {}

    def buffer(self, buffer: Buffer) -> Array:
        """A copy of a buffer's contents, in host representation."""
        device, form = self._device, (tuple(buffer.shape), buffer.dtype)
        if form not in self._pins:
            self._pins[form] = device.staging(f"record{len(self._pins)}", *form)
        pin, event = self._pins[form], device.event()
        device.download(device.stream, pin, buffer, buffer.shape[0])
        event.record(device.stream)
        event.synchronize()
        return pin.array.copy()

    def cache(self, cache: Cache) -> tuple[Array, Array]:
        """The logical contents of a cache."""
        self._device.synchronize()
        return cache.read_logical()
