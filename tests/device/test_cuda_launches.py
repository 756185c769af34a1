"""What the CUDA backend launches, kernel by kernel with grids and arguments, is what it launched while providers still joined
what had been bound before them, in whatever order launches are bound."""

import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polydraft.instruments.sanitize import Sanitizer
from polydraft.plugins.program_pass import Entry
from polydraft.program import program
from polydraft.program.program import lengths
from polydraft_cuda.kernels.linear import LEAST_PROMPT_ROWS
from tests.device import traced
from tests.support.depth import among

pytest.importorskip("cuda.bindings", reason="matrices are described to the copy engine in types of cuda-bindings")
RECORDED: dict[str, Any] = json.loads(traced.RECORDED.read_text(encoding="utf-8"))
WAYS = ("eager", "captured")
TURNED_APART = {"all joined": False, "windows of two tiles": False, "wide windows": True}
"""Engines by whether a captured step turns heads by a launch of their own."""


QUICK = ("all joined", "rounded rows", "experts", "sm_80")


@pytest.mark.parametrize("name", among(QUICK, traced.ENGINES))
def test_every_program_launches_what_was_recorded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = traced.engine_of(name, tmp_path, monkeypatch)
    for way in WAYS:
        found = traced.launches(engine, captured=way == "captured")
        if name == traced.IN_FULL:  # a difference is readable
            assert {key: found[key] for key in RECORDED["launches"][way]} == RECORDED["launches"][way]
        assert traced.digest(found) == RECORDED["digests"][name][way]
        if way == "captured" and name in TURNED_APART:
            assert ("rope_kv_write" in " ".join(found["greedy target 8"])) == TURNED_APART[name]


def test_the_recorded_steps_are_joined_where_they_are_captured():
    for kind in ("greedy", "sampling"):
        apart, together = (" ".join(RECORDED["launches"][way][f"{kind} draft 8"]) for way in WAYS)
        for kernel in ("rope_kv_write", "swiglu"):
            assert (kernel in apart, kernel in together) == (True, False)
        assert ("linear_screen" in together) == (kind == "greedy")
        assert "linear_screen" not in apart


@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_of_binding_changes_no_launch(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Launches of a program are bound in any order, those of others among them, and some are bound twice."""
    rng, bind, finish = random.Random(seed), program.ProgramBuilder.bind, program.ProgramBuilder.finish
    shuffled = 0

    def in_any_order(self: program.ProgramBuilder, entries: list[Entry]) -> program.Program:
        nonlocal shuffled
        order = [one for entry in entries for one in (entry, *getattr(entry, "nodes", ()))]
        rng.shuffle(order)
        bound = {id(entry): bind(self, entry) for entry in (*order, *order[:9])}
        monkeypatch.setattr(self, "bind", lambda entry: bound[id(entry)])
        shuffled += len(order)
        return finish(self, entries)

    monkeypatch.setattr(program.ProgramBuilder, "finish", in_any_order)
    engine = traced.engine_of(traced.IN_FULL, tmp_path, monkeypatch)
    assert shuffled > 400
    for way in WAYS:
        assert traced.digest(traced.launches(engine, captured=way == "captured")) == RECORDED["digests"][traced.IN_FULL][way]


def test_prompts_take_gate_up_and_activation_as_one_beside_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Unless an instrument looks between launches; what else graphs join stays apart."""
    engine: Any = traced.engine_of(traced.IN_FULL, tmp_path, monkeypatch, max_batched_tokens=LEAST_PROMPT_ROWS)
    runner, size = engine.runner, lengths(rows=LEAST_PROMPT_ROWS, logit_rows=64, seqs=64, prompt_rows=1)
    runner.context.real_slots, runner.context.has_prefill = 64, True
    step = SimpleNamespace(kind="greedy", shape=None, lengths=size)

    def launched() -> list[str]:
        engine.device.restart()
        runner._run("target", step)
        return [one.split()[0] for one in engine.device.trace]

    apart = launched()
    monkeypatch.setattr(runner, "graphs", SimpleNamespace())
    beside = launched()
    gates = [i for i, name in enumerate(apart) if name == "mlp.cu:swiglu"]
    assert len(gates) == 2
    for i in reversed(gates):
        apart[i - 1 : i + 1] = ["linear_prompt.cu:linear_prompt"]
    assert beside == apart
    monkeypatch.setattr(runner.points, "eager", [lambda plan: False])
    assert "mlp.cu:swiglu" in launched()


def test_an_engine_tells_what_it_has_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = traced.engine_of(traced.IN_FULL, tmp_path, monkeypatch)
    told = {one.joined.contracts: one for one in engine.runner.joined()}
    assert {name for name, one in told.items() if one.joined.captured} == {
        "linear+swiglu", "linear+process_logits+argmax", "rope_kv_write+paged_attention",
    }  # fmt: skip
    assert told["linear+process_logits+argmax"].launches == {"greedy.target": 1, "greedy.draft": 3}
    assert {one.joined.by for one in told.values()} == {"cuda"}
    assert all(one.joined.why for one in told.values())
    half = "linear+route_experts+linear+swiglu+linear+expert_mlp+residual_add"
    sparse = {one.joined.contracts: one for one in traced.engine_of("experts", tmp_path, monkeypatch).runner.joined()}
    assert {f"{half}+rms_norm", half, "rope_kv_write+paged_attention"} <= sparse.keys(), "the last half has no norm behind it"
    assert [sparse[name].launches["greedy.target"] for name in (f"{half}+rms_norm", half)] == [1, 1]
    plain = traced.engine_of("invariant", tmp_path, monkeypatch)
    assert {one.joined.contracts for one in plain.runner.joined() if one.joined.captured} == {
        "linear_leaves+sum_leaves", *(name for name, one in told.items() if one.joined.captured),
    }  # fmt: skip
    kept = traced.engine_of("log probabilities", tmp_path, monkeypatch)
    found = [one.launches for one in kept.runner.joined() if one.joined.contracts == "linear+process_logits+argmax"]
    kinds = ("greedy.logprobs", "greedy.logprobs.prompt")
    assert {f"{kind}.{part}": count for kind in kinds for part, count in (("target", 1), ("draft", 3))} in found, "which are read"


def test_norms_round_rows_for_packed_projections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = traced.engine_of("rounded rows", tmp_path, monkeypatch)
    told = {
        one.joined.contracts: one.launches["greedy.target"]
        for one in engine.runner.joined()
        if "norm+linear" in one.joined.contracts
    }
    assert told == {"rms_norm+linear": 1, "residual_add+rms_norm+linear": 1, "residual_add+rms_norm+linear+swiglu": 2}
    names = [one.split()[0] for one in traced.launches(engine, captured=True)["greedy target 8"]]
    assert names.count("norms.cu:rounded_norm") == 4
    apart = [behind for front, behind in itertools.pairwise(names) if front == "packed.cu:round_rows"]
    assert len(apart) == 5, "rows of o and down, in two blocks, and of the head"


def test_the_hazard_checker_sees_what_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine: Any = traced.engine_of(traced.IN_FULL, tmp_path, monkeypatch, sanitize=True)
    _, size = next(traced.steps((8,)))
    watched = []
    for part in ("target", "draft"):
        for contract, launch, unit in engine.runner.programs["greedy"][part].recorded():
            launch(engine.device.stream, size[unit])
            watched.append(str(launch) if contract != "forward_meta" else "")
    assert "launch linear+process_logits+argmax (greedy.draft: draft 2)" in watched
    assert engine.instruments[Sanitizer].report.hazards == ()
