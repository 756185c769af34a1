"""What a bound launch may touch: the accesses that its contract declares, resolved to memories and row rules.

Providers are bound through it once; a launch then only fills in its length. It never looks at a kernel.

Static regions: rows [0, n) of fields that the launch length counts, else the whole field; one region for a layer's cache, for a
weight, for a pass's metadata and for the workspace. Only of a payload of runs it depends on the runs how much of it is read:
as far as those that were uploaded reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from polydraft.contracts import COMPOSITES, contract_named
from polydraft.contracts.base import CAPACITY, Args, ColumnsSpec, ParamSpec, TensorSpec
from polydraft.contracts.composite import CompositeArgs, part_lengths
from polydraft.contracts.kernels.scatter import payload_words
from polydraft.instruments.sanitize.memory import Memories, Memory


class Touch(NamedTuple):
    """Rows [low, high) of a memory, read, written or both, by one operation."""

    memory: Memory
    low: int
    high: int
    reads: bool
    writes: bool


@dataclass(frozen=True)
class Declared:
    """One memory of a bound launch. `part`: which part's launch length bounds the rows; None is the whole memory."""

    memory: Memory
    reads: bool
    writes: bool
    part: int | None
    runs: Memory | None = None
    """Of a payload the runs that say what of it is read."""

    def high(self, lengths: Sequence[int]) -> int:
        """Behind the last row that a launch of these lengths touches."""
        if self.runs is not None and self.runs.uploaded is not None:
            return payload_words(self.runs.uploaded.values[: lengths[0]])
        return self.memory.rows if self.part is None else max(0, min(lengths[self.part], self.memory.rows))


@dataclass(frozen=True)
class Declaration:
    """Everything that a bound launch may touch, and the rows it has room for."""

    fields: tuple[Declared, ...]
    smallest: Memory | None
    """Of the memories whose rows the launch length counts the one with the fewest: the capacity of a launch."""
    lengths: Callable[[int], Sequence[int]]
    """Launch length to that of each part (one, but for composites)."""
    addresses: tuple[tuple[Memory, int], ...]
    """Where each memory lay when the launch was bound, on backends that tell."""

    def touches(self, n: int) -> list[Touch]:
        """The accesses of a launch of length `n`, one a memory."""
        lengths = self.lengths(n)
        found: dict[int, Touch] = {}
        for field in self.fields:
            high = field.high(lengths)
            touch = Touch(field.memory, 0, high, field.reads, field.writes)
            before = found.get(id(field.memory))
            if before is not None:
                touch = Touch(field.memory, 0, max(high, before.high), before.reads or field.reads, before.writes or field.writes)
            found[id(field.memory)] = touch
        return list(found.values())


def declare(name: str, args: Args | CompositeArgs, workspace: Any, memories: Memories) -> Declaration:
    """Resolve the accesses of a launch of contract (or composite, or contracts joined by a pass) `name` that is bound to `args`
    and to `workspace`."""
    composite = COMPOSITES.get(name)
    contracts = tuple(contract_named(part) for part in name.split("+"))
    records = args.parts if isinstance(args, CompositeArgs) else (args,)
    dead = composite.dead if composite else ()
    unit = next((contract.unit for contract in contracts if contract.unit != "any"), "any")
    fields: list[Declared] = []
    counted: list[Memory] = []
    for part, (contract, record) in enumerate(zip(contracts, records, strict=True)):
        symbol = "N" if contract.unit == "any" else CAPACITY[contract.unit]
        for field, spec in record.specs().items():
            value = getattr(record, field)
            if value is None or isinstance(spec, ParamSpec):
                continue
            if isinstance(spec, ColumnsSpec):  # which slots are named is in the runs: any
                for column in value:
                    fields.append(Declared(memories[column], reads=True, writes=True, part=None))
                    memories[column].bound = True
                continue
            memory = memories[value]
            if field == "payload" and contract.name == "scatter":
                runs = memories[record.runs]  # type: ignore[attr-defined]  # as its record has them
                runs.tells_reach = memory.bound = True
                fields.append(Declared(memory, reads=True, writes=False, part=None, runs=runs))
                continue
            leading = isinstance(spec, TensorSpec) and spec.symbols[0] == symbol and field not in dead  # those may be short
            if leading and contract.unit in {"any", unit}:
                counted.append(memory)
            by_rows = leading and symbol != CAPACITY["seqs"]  # [B] may be by slot as well: the whole field then
            fields.append(Declared(memory, spec.access != "out", spec.access != "in", part if by_rows else None))
            memory.bound = True
    scratch = getattr(workspace, "buffer", None)
    if scratch is not None:
        fields.append(Declared(memories[scratch], reads=True, writes=True, part=None))
    return Declaration(
        tuple(fields),
        min(counted, key=lambda memory: memory.rows, default=None),
        (lambda n: (n,) * len(contracts)) if composite is None else (lambda n: part_lengths(composite, records, n)),
        tuple((f.memory, address) for f in fields if (address := f.memory.address) is not None),
    )
