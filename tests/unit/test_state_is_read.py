"""Nothing is kept that nobody reads: every declared buffer, every field of the slot table, requests, plans, outcomes.

A device buffer is read where a kernel that is bound to it in some program reads it (what the record declares as input, and what
the golden looks at where the record says in and out), where metadata is made of it, and where the host downloads it. A field of
a host record is read where the source of core loads it from something that is called like such a record.

Storing into a field, also by index or `+=`, is no reading. Each check is shown a field that nobody reads.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polydraft import LLM
from polydraft.backend import PassBuffers
from polydraft.conformance.adequacy import _read, _Trial
from polydraft.contracts import REGISTRY
from polydraft.contracts.base import Args, TensorSpec
from polydraft.contracts.inputs import default_cases
from polydraft.host.request import Request
from polydraft.host.slots import SlotTable
from polydraft.plugins.plugins import Plugins
from polydraft.plugins.program_pass import Fill, Node
from polydraft.program import program
from polydraft.program.columns import Writes
from polydraft.program.declare import Admission
from polydraft.program.plan import StepOutcome, StepPlan
from polydraft.step import runner
from tests.support import tiny
from tests.support.launched import launched
from tests.support.project import CORE, modules_of_core, walked

# -- device buffers ---------------------------------------------------------------------------------------------------
ENGINES: list[dict[str, Any]] = [
    {"verify": "coupled", "draft_tokens": 2, "accept_schedule": (0.5, 0.5)},
    {"verify": "rejection", "draft_tokens": 2},
    {"proposer": "ngram", "draft_tokens": 2},
    {"proposer": "hybrid", "draft_tokens": 2},
    {"proposer": "host-suffix", "draft_tokens": 2, "backend": "reference", "plugins": ("tests.support.host_features",)},
    {"draft_tokens": 2, "logprobs": 1},
    {"draft_tokens": 2, "constraints": True},
    {"draft_tokens": 2, "draft_vocab": f"{tiny.token_counts(64)}:16"},
]
"""Engines whose programs together launch every contract that the runtime knows."""
DOWNLOADED = {"record", "kept_drafts", "logprobs.window.record", "logprobs.prompt.record"}
"""What the runner copies to the host."""


@functools.cache
def looked_at(name: str) -> frozenset[str]:
    """Arguments that the golden of a contract reads in some case."""
    contract = REGISTRY[name]
    return frozenset(_read(contract, [_Trial(case, {}) for case in default_cases(contract)]))


def reads(node: Node | Fill, metas: dict[int, PassBuffers]) -> Iterator[Any]:
    """Buffers that a node reads."""
    if isinstance(node, Fill):
        buffers = metas[id(node.meta)]
        yield from (buffers.row_slot, buffers.positions, buffers.block_table)
        return
    assert isinstance(node.args, Args)
    contract = REGISTRY[node.contract]
    for field, spec in contract.args.specs().items():
        if isinstance(spec, TensorSpec) and (
            spec.access == "in" or (spec.access == "inout" and field in looked_at(node.contract))
        ):
            yield getattr(node.args, field)


def never_read(monkeypatch: pytest.MonkeyPatch) -> tuple[set[str], set[str]]:
    """Buffers that no engine which has them reads, by name, and the contracts that the engines launch."""
    nodes: list[Node | Fill] = []
    metas: dict[int, PassBuffers] = {}
    build, init = program.build, Plugins.init_forward_meta

    def noted(builders: Any) -> Any:
        nodes.extend(node for builder in builders for node in builder.nodes)
        return build(builders)

    def kept(self: Plugins, device: Any, buffers: PassBuffers, limits: Any) -> Any:
        meta = init(self, device, buffers, limits)
        metas[id(meta)] = buffers
        return meta

    monkeypatch.setattr(runner, "build", noted)
    monkeypatch.setattr(program, "build", noted)  # of staged writes
    monkeypatch.setattr(Plugins, "init_forward_meta", kept)
    alive, declared, found = [], set[str](), set[str]()
    for options in ENGINES:
        given = {"model": str(tiny.checkpoint("narrow")), "backend": "reference", **options}
        alive.append(LLM(**given))  # alive, so that identities stay apart
        buffers = alive[-1].engine.runner.memory.buffers
        read = {id(buffer) for node in nodes for buffer in reads(node, metas)}
        declared |= set(buffers)
        found |= {name for name, buffer in buffers.items() if id(buffer) in read}
    return declared - found - DOWNLOADED, {node.contract for node in nodes if isinstance(node, Node)}


def test_every_device_buffer_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers, contracts = never_read(monkeypatch)
    assert launched() - contracts == set(), "ENGINES lack what launches these contracts"
    assert buffers == set()


def test_the_check_of_buffers_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the launch that reads them, seeds and penalties are only ever written."""
    for name in ("gumbel_noise", "uniform_noise", "penalise_logits"):
        contract = REGISTRY[name]
        specs = {
            field: dataclasses.replace(spec, access="out") if isinstance(spec, TensorSpec) else spec
            for field, spec in contract.args.specs().items()
        }
        monkeypatch.setattr(contract.args, "specs", classmethod(lambda cls, specs=specs: specs))
    buffers, _ = never_read(monkeypatch)
    assert {"seed", "presence_penalty", "frequency_penalty"} <= buffers


# -- host records -----------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Record:
    """A record, and the names under which core holds one."""

    cls: type
    called: str

    @property
    def fields(self) -> set[str]:
        if dataclasses.is_dataclass(self.cls):
            return {f.name for f in dataclasses.fields(self.cls)}
        init = next(n for n in ast.walk(_class(self.cls)) if isinstance(n, ast.FunctionDef) and n.name == "__init__")
        targets = [target for node in ast.walk(init) for target in _stored(node)]
        return {t.attr for t in targets if isinstance(t, ast.Attribute) and ast.unparse(t.value) == "self"}


RECORDS = [
    Record(SlotTable, r"(^|\.)(t|slots)$"),
    Record(Request, r"(^|\.)(request|r|other|one)$|waiting\[0\]$"),
    Record(StepPlan, r"(^|\.)(plan|last|made)$"),
    Record(Writes, r"(^|\.)(writes|granted)$"),
    Record(Admission, r"^(a|one|admission)$"),
    Record(StepOutcome, r"(^|\.)outcome$"),
]
FOR_OTHERS: dict[str, str] = {}
"""Fields that core keeps for those who read its records, with the reason."""


def _class(cls: type) -> ast.ClassDef:
    tree = modules_of_core()[CORE / Path(*cls.__module__.split(".")).with_suffix(".py")]
    return next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == cls.__name__)


def _stored(node: ast.AST) -> list[ast.expr]:
    """What a statement stores into: targets, and the arrays of targets by index."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    flat = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return [e.value if isinstance(e, ast.Subscript) else e for e in flat]


@functools.cache
def names() -> frozenset[str]:
    """Of all fields of all records."""
    return frozenset[str]().union(*(record.fields for record in RECORDS))


@functools.cache
def loaded(tree: ast.AST) -> frozenset[tuple[str, str]]:
    """(receiver, field) of every attribute that is called like a field of some record, and is not only stored into."""
    attributes = [node for node in walked(tree) if isinstance(node, ast.Attribute) and node.attr in names()]
    stored = {id(target) for node in walked(tree) for target in _stored(node)} if attributes else set()
    return frozenset((ast.unparse(node.value), node.attr) for node in attributes if id(node) not in stored)


def unread_fields(record: Record, trees: Iterable[ast.AST]) -> set[str]:
    """Fields that no source loads from something called like the record, its own methods included."""
    own = {field for receiver, field in loaded(_class(record.cls)) if receiver == "self"}
    read = {field for tree in trees for receiver, field in loaded(tree) if re.search(record.called, receiver)}
    return record.fields - read - own


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.cls.__name__)
def test_every_field_is_read(record: Record) -> None:
    name = record.cls.__name__
    kept = {field.partition(".")[2] for field in FOR_OTHERS if field.startswith(f"{name}.")}
    assert unread_fields(record, modules_of_core().values()) == kept, (
        "nobody reads these, or the list of exceptions is out of date"
    )


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("x = t.sampling[3]", True),
        ("if not self.slots.sampling.any(): pass", True),
        ("t.epoch[t.sampling] = 1", True),
        ("t.sampling[slot] = t.sampling[slot] + 1", True),
        ("t.sampling[slot] = 3", False),
        ("t.sampling[slot] += 1", False),
        ("t.sampling = 3", False),
        ("t.sampling[a], t.epoch[a] = 1, 2", False),
        ("x = params.sampling", False),
    ],
)
def test_check_sees(source: str, read: bool) -> None:
    record = Record(SlotTable, RECORDS[0].called)
    assert ("sampling" not in unread_fields(record, [ast.parse(source)])) == read
