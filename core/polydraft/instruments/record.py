"""The recording of kernel calls: what every launch of chosen steps was given and what it left, without the model.

`generate --record FILE` puts it around an engine; a vendor reproduces a failure from the file with `polydraft replay`. It looks
at launches as they are bound, so whatever a step launches is recorded.

A recorded step runs eagerly, with a wait behind every launch: what is recorded is what the kernels compute, not their order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from polydraft._version import __version__
from polydraft.contracts.base import Args, ColumnsSpec, OpaqueSpec, ParamSpec, Spec, TensorSpec, column_name
from polydraft.contracts.composite import CompositeArgs
from polydraft.contracts.inputs import Kernel, contract_of, kernel_of
from polydraft.demo import demo_model_path
from polydraft.device import Array, Buffer, Device, Launch, Staging, Stream
from polydraft.errors import ConfigError, ContractError
from polydraft.instruments.base import Aside, Instrument, Setting, bare
from polydraft.instruments.record_file import Call, Record, RecordedCache, RecordedWeight, Tensors, digest_of
from polydraft.json_text import as_json
from polydraft.plugins.program_pass import Fill
from polydraft.program.points import Stage
from polydraft.program.program import step_meta

if TYPE_CHECKING:
    from polydraft.backend import Cache, StepMeta
    from polydraft.engine import Engine
    from polydraft.models.checkpoint import Checkpoint
    from polydraft.plugins.kernel_table import Binding
    from polydraft.program.plan import StepPlan, StepWidth

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


class CallRecorder(Instrument):
    """Records the calls of the steps numbered `steps` (from 1) while it is on.

    `include_weights`: store the values of all weights that they use. Without it, of those of the model's checkpoint names and
    digests are stored, and the values of the others, which nobody finds in the model's directory. A record is of one checkpoint:
    after `update_weights` the next of these steps forgets those before."""

    name = "record"
    reads_weights = True
    order = 10
    stages = ("launch", "resume")
    eager = True

    def refuse(self, setting: Setting) -> str:
        """Records hold weights as float32."""
        made, stored = setting.resolved.packing, setting.resolved.packed_as
        if made is not None:
            return f"a record cannot hold weights packed as {made.name}; leave --weights or the record out"
        return f"a record cannot hold weights packed as {', '.join(stored)}; leave it out" if stored else ""

    def __init__(self, steps: Collection[int] = DEFAULT_STEPS, *, include_weights: bool = False, on: bool = True) -> None:
        super().__init__(on=on)
        self._steps, self._include_weights = frozenset(steps), include_weights
        self._weight_names: dict[int, str] = {}
        self._filled: dict[int, StepMeta] = {}
        self._checkpoint: Checkpoint | None = None
        """That of the calls so far."""
        self._now: int | None = None
        """The chosen step whose launches are being enqueued."""
        self.tensors = Tensors()
        self.calls: list[Call] = []
        self.widths: dict[int, StepWidth] = {}

    # -- steps -------------------------------------------------------------------------------------
    def built(self, engine: Engine) -> None:
        """Memory is read behind its device's own stream."""
        self._read = _Reader(bare(engine.device), engine.instruments.aside)
        super().built(engine)

    def start(self) -> None:
        """Have the chosen steps launched one by one, and record them."""
        super().start()
        self.engine.points.eager.append(self._wants)

    def stop(self) -> None:
        """Record no more; what was recorded stays."""
        if self.is_on:
            self.engine.points.eager.remove(self._wants)
        super().stop()

    def _wants(self, plan: StepPlan) -> bool:
        return plan.step_id in self._steps

    def begin(self, stage: Stage, subject: Any) -> None:
        """(A part of) a step is enqueued."""
        plan: StepPlan = subject if stage == "launch" else subject.plan
        if self._wants(plan):
            if self._checkpoint is not self.engine.checkpoint:
                self._checkpoint, self.tensors = self.engine.checkpoint, Tensors()
                self.calls.clear()
                self.widths.clear()
            self._now = plan.step_id
            self.widths[plan.step_id] = plan.width
            self._weight_names = {id(weight): name for name, weight in self.engine.runner.memory.weights.items()}

    def end(self, stage: Stage, subject: Any, result: Any) -> None:
        """It is."""
        del stage, subject, result
        self._now = None

    def bind(self, binding: Binding, launch: Launch) -> Launch:
        """Launches of the chosen steps are waited for, and filed with what they read and wrote."""
        args = binding.args
        if args is None:
            return launch  # no contract says what it reads and writes

        def call(stream: Stream, n: int) -> None:
            if self._now is None:
                launch(stream, n)
                return
            kernel = kernel_of(binding.contract)
            fields = self._fields(binding, kernel)
            before = self._seen(fields, kernel, "in", n)
            launch(stream, n)
            self._file(binding, fields, kernel, n=n, step=self._now, before=before)

        return self._bind_fill(args, launch) if isinstance(args, Fill) else call

    def _bind_fill(self, args: Fill, launch: Launch) -> Launch:
        def fill(stream: Stream, n: int) -> None:
            if self._now is not None:
                self._filled[id(args.meta)] = step_meta(args, self.engine.runner.context, n)
            launch(stream, n)

        return fill

    # -- one call --------------------------------------------------------------------------------------
    def _fields(self, entry: Binding, kernel: Kernel) -> dict[str, Any]:
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
            elif isinstance(spec, ColumnsSpec):
                seen |= {column_name(name, i): self.tensors.add(self._read.buffer(c), c.dtype) for i, c in enumerate(value)}
            elif isinstance(spec, OpaqueSpec) and spec.kind == "cache":
                seen[name] = self._read.cache(value)
        return seen

    def _file(
        self, entry: Binding, fields: Mapping[str, Any], kernel: Kernel, *, n: int, step: int, before: Mapping[str, Any]
    ) -> None:
        specs, after = _specs(kernel), self._seen(fields, kernel, "out", n)
        caches = [name for name, spec in specs.items() if isinstance(spec, OpaqueSpec) and spec.kind == "cache"]
        opaque = {name: spec.kind for name, spec in specs.items() if isinstance(spec, OpaqueSpec) and fields[name] is not None}
        call = Call(
            number=len(self.calls),
            step=step,
            part=entry.program.rpartition(".")[2],
            stage=entry.stage,
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
            raise ConfigError("a launch uses a weight that is none of the engine's, which cannot be recorded; record without it")
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
        """What was recorded so far. Reads the weights that were used from the checkpoint, which must still be open, and
        from the proposer's own."""
        return Record(self._about(), tuple(self.calls), self._weights(), self.tensors, dict(self.widths))

    def _weights(self) -> dict[str, RecordedWeight]:
        used = sorted({name for call in self.calls for name in call.weights.values()})
        canonical = self.engine.weights.canonical() if used else {}
        added = self.engine.weights.added([name for name in used if name not in canonical])
        declared, weights = self.engine.share.weights(), {}
        for name in used:
            value = np.asarray(added[name] if name in added else canonical[name], np.float32)
            key = self.tensors.add(value, "f32") if self._include_weights or name in added else ""
            leaves = declared[name].leaves if name in declared else 0
            weights[name] = RecordedWeight(digest_of(value), value.shape, key, leaves)
        return weights

    def _about(self) -> dict[str, Any]:
        engine = self.engine
        info, loaded, resolved = engine.info, engine.plugins.backend, engine.resolved
        backend = {"name": info.name, "version": info.version, "package": info.package, "digest": loaded.digest}
        about = {
            "polydraft": __version__,
            "backend": {**backend, "evidence": info.evidence},
            "plugins": engine.plugins.report(),
            "device": engine.device.spec,
            "model": engine.model.name,
            "demo": engine.config.model is None and engine.checkpoint.path == demo_model_path(),
            "dtype": resolved.dtype,
            "invariant": resolved.invariant,
            "block_size": resolved.limits.block_size,
            "config": resolved.describe(),
        }
        return dict(as_json(about))


def _specs(kernel: Kernel) -> dict[str, Spec]:
    return contract_of(kernel).args.specs()


class _Reader:
    """Reads device memory behind everything that was issued, beneath all other instruments."""

    def __init__(self, device: Device, aside: Aside) -> None:
        self._device, self._aside = device, aside
        self._pins: dict[tuple[tuple[int, ...], str], Staging] = {}

    def buffer(self, buffer: Buffer) -> Array:
        """A copy of a buffer's contents, in host representation."""
        device, form = self._device, (tuple(buffer.shape), buffer.dtype)
        with self._aside.of(device):
            if form not in self._pins:
                self._pins[form] = device.staging(f"record{len(self._pins)}", *form)
            pin, event = self._pins[form], device.event()
            device.download(device.stream, pin, buffer, buffer.shape[0])
            event.record(device.stream)
            event.synchronize()
        return pin.array.copy()

    def cache(self, cache: Cache) -> tuple[Array, Array]:
        """The logical contents of a cache."""
        with self._aside.of(self._device):
            self._device.synchronize()
            return cache.read_logical()
