"""Findings of the review of FastDeploy's work on XPU graphs (pull requests 7761, 7864, 7941, 8032, 8061), each a test here.

Every test runs in the XPU's row order. It first holds on the engine as it is, and then has to fail once the fault that the
review found is planted: a test that cannot see its fault guards nothing.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from polydraft import Engine, EngineConfig, SamplingParams
from polydraft import resolve as resolve_module
from polydraft.conformance.faulty_backends import MUTANTS
from polydraft.contracts.base import UNITS
from polydraft.errors import CapabilityError, ConfigError
from polydraft.plugins.program_pass import Fill
from polydraft.program import program as program_module
from polydraft.step.graphs import CapturedSteps, GraphPolicy, Part
from tests.support import tiny
from tests.support.emulator import Emulator, emulated
from tests.support.project import ROOT
from tests.support.runs import Ask, drive, packing

MODEL, SLOTS, DRAFTS, BUCKETS = "narrow", 4, 3, (1, 3, 4)
"""3 is no multiple of the window, which the upstream capture sizes had to be."""
XPU = "policy=fifo&rows=prefill-first"
ASKS = [Ask((i + 1, 5, 9), SamplingParams(max_new_tokens=10 + 6 * i, ignore_eos=True)) for i in range(SLOTS)]


def served(**options: Any) -> Engine:
    wanted = {"draft_tokens": DRAFTS, "max_num_seqs": SLOTS, "overlap": 1, "graph": "decode", "graph_sizes": BUCKETS}
    return emulated(XPU, MODEL, **{**wanted, **options})


def fails(check: Callable[[], None], *errors: type[Exception]) -> None:
    """The fault that is planted around this call is seen."""
    with pytest.raises((AssertionError, *errors)):
        check()


# -- the number of drafts hard-coded to 0 ----------------------------------------------------------------
PREFILL: dict[str, Any] = {"graph": "prefill", "graph_sizes": (4, 16)}
PATHS: tuple[dict[str, Any], ...] = ({"graph": "off", "graph_sizes": ()}, {}, PREFILL, {"overlap": 0})


def every_path_drafts() -> None:
    for options in PATHS:
        engine = served(**options)
        drive(engine, ASKS)
        engine.close()
        drafted = list(engine.totals.drafted_at)
        assert len(drafted) == DRAFTS
        assert all(drafted), f"{options}: drafts were made at {drafted}"


def test_the_number_of_drafts_is_not_0_on_any_path():
    every_path_drafts()
    silently_off: Any = next(mutant for mutant in MUTANTS if mutant.id == "M18").broken
    with mock.patch("tests.support.emulator.Emulator", lambda spec: silently_off(Emulator(spec))):
        fails(every_path_drafts)


# -- the path of prefill graphs silently removed ---------------------------------------------------------
def prefill_is_replayed() -> None:
    engine = served(**PREFILL)
    drive(engine, ASKS)
    graphs = engine.runner.graphs
    engine.close()
    assert graphs is not None
    assert graphs.counters.replayed_steps > 0
    assert engine.resolved.graph == "prefill"


def test_graphs_of_prefill_alone_are_still_there():
    prefill_is_replayed()
    with mock.patch.object(GraphPolicy, "bucket", return_value=None):
        fails(prefill_is_replayed)
    with mock.patch.object(CapturedSteps, "capture_all"):
        fails(prefill_is_replayed, KeyError)


# -- the guard of an unsupported device removed, which was an environment variable -----------------------
def graphs_are_refused_where_there_are_none() -> None:
    plugin = packing("prefill_first")  # on the reference, which captures nothing
    config = EngineConfig(model=str(tiny.checkpoint(MODEL)), plugins=tiny.PLUGINS, graph="decode")
    with pytest.raises(CapabilityError, match="does not declare graph_capture; use --graph off"):
        Engine(config, backend=plugin)


def reads_of_the_environment(source: str) -> list[int]:
    """Lines that read the environment."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
    ]


def test_what_guards_graphs_is_a_capability_and_no_variable():
    graphs_are_refused_where_there_are_none()
    unguarded = mock.patch.object(resolve_module, "_graph", return_value=("decode", (1,)))
    with unguarded, pytest.raises(BaseException) as seen:  # noqa: PT011  pytest's own failure, or what came instead
        graphs_are_refused_where_there_are_none()
    assert not isinstance(seen.value, CapabilityError)
    folders = [ROOT / "core" / "polydraft", *(ROOT / "backends").glob("*/polydraft_*")]
    texts = {path: path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py")}
    suspects = {path for path, text in texts.items() if "env" in text and path.name != "environment.py"}
    assert {path: reads_of_the_environment(texts[path]) for path in suspects} == {path: [] for path in suspects}
    assert reads_of_the_environment("import os\nif os.environ.get('ENABLE_GRAPHS'):\n    pass\n") == [2]


# -- capture sizes divided by the window -----------------------------------------------------------------
def buckets_count_sequences() -> None:
    engine = served()
    graphs = engine.runner.graphs
    assert graphs is not None
    captured = {shape.bucket for _, _, shape in graphs._calls}
    drive(engine, ASKS)
    engine.close()
    assert captured == set(BUCKETS), "every size that was asked for, and no other"
    for bucket in BUCKETS:
        n = dict(zip(UNITS, graphs.policy.lengths(bucket, engine.resolved.limits), strict=True))
        assert (n["seqs"], n["rows"]) == (bucket, bucket * (DRAFTS + 1))


def test_capture_sizes_are_not_divided_by_the_window():
    buckets_count_sequences()
    lengths = GraphPolicy.lengths

    def divided(self: GraphPolicy, bucket: int, limits: Any, num_drafts: int | None = None) -> Any:
        return lengths(self, max(bucket // limits.window, 1), limits, num_drafts)

    with mock.patch.object(GraphPolicy, "lengths", divided):
        fails(buckets_count_sequences)


# -- a log field that says something else than the value -------------------------------------------------
def what_is_explained_is_what_is_used() -> None:
    engine = served()
    said = engine.resolved.describe()
    graphs, limits = engine.runner.graphs, engine.resolved.limits
    assert graphs is not None
    used = {
        "graph": graphs.policy.mode, "graph_sizes": graphs.policy.buckets, "draft_tokens": limits.num_drafts,
        "max_num_seqs": limits.max_seqs, "max_batched_tokens": limits.max_rows, "num_blocks": limits.num_blocks,
        "block_size": limits.block_size, "max_model_len": limits.max_len, "device": engine.device.spec,
        "verify": engine.resolved.verify, "overlap": engine.runner._config.overlap,
    }  # fmt: skip
    engine.close()
    assert {name: said[name] for name in used} == used


def test_what_is_reported_is_the_value_that_decides():
    what_is_explained_is_what_is_used()
    choose = resolve_module._Negotiation.choose

    def misleading(self: Any, name: str, chosen: Any, reason: str) -> Any:
        choose(self, name, tuple(s * (DRAFTS + 1) for s in chosen) if name == "graph_sizes" else chosen, reason)
        return chosen

    with mock.patch.object(resolve_module._Negotiation, "choose", misleading):
        fails(what_is_explained_is_what_is_used)


# -- switches that nothing reads -------------------------------------------------------------------------
@functools.cache
def options_read() -> frozenset[str]:
    """What modules of core read from a configuration: as an attribute, or by name."""
    named: set[str] = set()
    for path in (ROOT / "core" / "polydraft").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name == "config.py" or "config" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and "config" in ast.unparse(node.value).lower():
                named.add(node.attr)
            elif isinstance(node, ast.Call) and len(node.args) > 1 and ast.unparse(node.func) in ("getattr", "n.choose"):
                named |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return frozenset(named)


def unread_options(config: Any) -> set[str]:
    return {one.name for one in dataclasses.fields(config)} - options_read()


def test_no_option_is_dead():
    assert unread_options(EngineConfig) == set()
    planted = dataclasses.make_dataclass("Planted", ["graph", "enable_graph_debug_dump"])
    assert unread_options(planted) == {"enable_graph_debug_dump"}
    with pytest.raises(ConfigError, match="unknown engine option 'enable_graph_debug_dump'"):
        EngineConfig.from_mapping({"enable_graph_debug_dump": True})


# -- padding behind preparation, or before it, by platform -----------------------------------------------
WRITES: dict[Part, str] = {"target": "pack_rows", "draft": "pack_draft_rows"}
"""What packs, and pads, the rows of a pass."""


@contextmanager
def moved_before_packing() -> Iterator[None]:
    """Metadata is prepared before rows are packed and padded, as one platform's path had it."""
    build = program_module.build

    def misordered(builders: Any) -> Any:
        for builder in builders:
            fills = [node for node in builder.nodes if isinstance(node, Fill)]
            builder.nodes[:] = [*fills, *(node for node in builder.nodes if not isinstance(node, Fill))]
        return build(builders)

    with mock.patch("polydraft.step.runner.build", misordered):
        yield


def padding_precedes_preparation() -> None:
    engine = served()
    programs = engine.runner.programs["greedy"]
    drive(engine, ASKS)
    engine.close()
    for part, packs in WRITES.items():
        entries = [entry.contract for entry in programs[part].entries]
        first = next(i for i, name in enumerate(entries) if packs in name.split("+"))
        fills = [i for i, name in enumerate(entries) if name == "forward_meta"]
        readers = [i for i, name in enumerate(entries) if "paged_attention" in name.split("+")]
        assert first < fills[0] < readers[0], f"{part}: {entries}"
        for reader in readers:  # every pass has metadata of its own, prepared behind whatever wrote its rows
            mine = max(fill for fill in fills if fill < reader)
            between = entries[mine + 1 : reader]
            assert not {"pack_rows", "pack_draft_rows", "begin_draft", "advance_draft"} & set(between), f"{part}: {between}"


def test_padding_precedes_preparation_on_every_path():
    padding_precedes_preparation()
    with moved_before_packing():
        fails(padding_precedes_preparation)


# -- captured buffers assigned anew ----------------------------------------------------------------------
def replays_read_what_was_captured() -> None:
    engine = served()
    (output,) = drive(engine, ASKS[:1])
    engine.close()
    assert not output.error, output.error


def test_a_captured_buffer_that_is_assigned_anew_is_named():
    replays_read_what_was_captured()
    drive_ = drive

    def reassigned(engine: Engine, asks: list[Ask]) -> Any:
        device: Any = engine.device
        device.move(next(memory for memory in device._memories if memory.name == "kv_len"))
        return drive_(engine, asks)

    with mock.patch(f"{__name__}.drive", reassigned), pytest.raises(AssertionError) as seen:
        replays_read_what_was_captured()
    assert "kv_len lies at another address since this graph was captured" in str(seen.value)
