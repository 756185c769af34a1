"""Whole runs on the worst legal accelerator: bit-equal to the synchronous reference in every schedule, at every depth.

A failing run prints its device string, e.g. `emulator:0?seed=7&policy=reversed`: that line brings the failure about again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft import Engine, RequestOutput, SamplingParams
from polydraft.backend import RowOrder
from polydraft.errors import DeviceError
from polydraft.host.commit import NAN_ERROR
from tests.oracle import CODE_PROMPTS
from tests.support.depth import crossed
from tests.support.emulator import SCHEDULES, EmulatorDevice, EmulatorEvent, EmulatorStaging, emulated
from tests.support.poison import poison_free_blocks
from tests.support.runs import Ask, demo_prompt, drive, essence, solo

DEPTHS = (0, 1, 2)
each_depth = pytest.mark.parametrize("depth", DEPTHS)
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.9, top_p=0.95, seed=11)


def check(served_by: Engine, model: str, num_drafts: int, asks: list[Ask], limit: int = 1000) -> list[RequestOutput]:
    """Serve `asks`; every request has the text and the rounds that it has alone, one that was aborted the beginning of them."""
    outputs = drive(served_by, asks, each_step=poison_free_blocks, limit=limit)
    context = f"{served_by.device.spec} overlap={served_by.resolved.overlap}"
    for ask, output in zip(asks, outputs, strict=True):
        alone = solo(model, num_drafts, ask.prompt_ids, ask.params)
        if output.finish_reason == "abort":
            assert output.token_ids == alone.token_ids[: len(output.token_ids)], context
            assert output.rounds == alone.rounds[: len(output.rounds)], context
        else:
            assert essence(output) == essence(alone), context
    return outputs


# -- the demo checkpoint ---------------------------------------------------------------------------
DEMO_SEEDS = range(5)


def demo_schedule(seed: int) -> str:
    return SCHEDULES[3 * seed + seed % 3]


@pytest.mark.parametrize("seed", DEMO_SEEDS)
def test_demo_model(seed: int) -> None:
    """Two prompts, three drafts, 24 tokens: with the seeds every policy, row order and depth is met."""
    schedule, depth = demo_schedule(seed), DEPTHS[2 * seed % 3]
    served_by = emulated(f"seed={seed}&{schedule}", draft_tokens=3, max_num_seqs=2, overlap=depth)
    asks = [Ask(demo_prompt(text), replace(GREEDY, max_new_tokens=24)) for text in CODE_PROMPTS[:2]]
    outputs = check(served_by, "", 3, asks)
    served_by.close()
    assert sum(output.accepted for output in outputs) > 10, "drafts that are never accepted prove little"


def test_the_demo_seeds_meet_every_schedule() -> None:
    met = {demo_schedule(seed) for seed in DEMO_SEEDS}
    assert {part for schedule in met for part in schedule.split("&")} == {p for s in SCHEDULES for p in s.split("&")}


# -- tiny checkpoints ------------------------------------------------------------------------------
@pytest.mark.parametrize(("schedule", "depth"), crossed(5, SCHEDULES, DEPTHS))
def test_every_schedule_at_every_depth(schedule: str, depth: int) -> None:
    served_by = narrow(f"seed={1 + (SCHEDULES.index(schedule) + depth) % 2}&{schedule}", depth)
    prompts = ((5, 7, 9, 11), (3, 1, 4, 1, 5, 9, 2, 6))
    check(served_by, "narrow", 3, [Ask(ids, replace(GREEDY, max_new_tokens=24, ignore_eos=True)) for ids in prompts])
    served_by.close()


def test_few_blocks_long_texts_and_equal_beginnings() -> None:
    """Preemption, an abort and shared blocks in one run."""
    served_by = emulated("seed=5", "narrow", draft_tokens=2, max_num_seqs=4, block_size=4, num_blocks=24, overlap=1)
    prompt = tuple(range(1, 20))
    asks = [Ask((*prompt, i), replace(GREEDY, max_new_tokens=40, ignore_eos=True), 2 * i) for i in range(5)]
    check(served_by, "narrow", 2, [*asks, Ask(prompt, replace(GREEDY, max_new_tokens=40), 4, abort=12)])
    assert served_by.scheduler.num_preemptions > 0
    assert served_by.ledger.num_hits > 0
    served_by.close()


def test_a_seed_is_a_run() -> None:
    """The same line gives the same schedule: the same work was left over after each step."""

    def left_over(seed: int) -> list[int]:
        served_by = narrow(f"seed={seed}", 2)
        device: Any = served_by.device
        left: list[int] = []
        some = [Ask((1, 2, 3), replace(GREEDY, max_new_tokens=8))]
        drive(served_by, some, each_step=lambda engine: left.append(device.outstanding))
        served_by.close()
        return left

    each = [left_over(seed) for seed in range(6)]
    assert left_over(3) == each[3]
    assert len(set(map(tuple, each))) > 3


@each_depth
def test_one_wait_a_step(depth: int) -> None:
    served_by = emulated("seed=1", "narrow", draft_tokens=2, overlap=depth)
    before = served_by.device.counters.copy()
    drive(served_by, [Ask((1, 2, 3), replace(GREEDY, max_new_tokens=30)), Ask((4, 5), replace(GREEDY, max_new_tokens=30))])
    after = served_by.device.counters
    assert after.host_syncs - before.host_syncs == served_by.totals.steps
    assert after.allocations == before.allocations
    served_by.close()


# -- graphs ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("uncapturable", "depth", "seed"), crossed(5, ["", "forward_meta", "paged_attention,argmax"], DEPTHS, (1, 2, 3))
)
def test_graphs_whole_and_in_pieces(uncapturable: str, depth: int, seed: int) -> None:
    """The batch fills up and drains through every bucket; prefill runs eagerly in between."""
    schedule = SCHEDULES[(7 * seed + depth) % len(SCHEDULES)]
    query = f"seed={seed}&{schedule}&uncapturable={uncapturable}"
    options = {"graph": "decode", "graph_sizes": (1, 2, 4), "overlap": depth}
    served_by = emulated(query, "narrow", draft_tokens=2, max_num_seqs=4, **options)
    asks = [Ask((5, 7, 9 + i), replace(rng_params(i), max_new_tokens=12 + 3 * i), 2 * i) for i in range(6)]
    check(served_by, "narrow", 2, asks)
    assert served_by.runner.graphs is not None
    assert served_by.runner.graphs.counters.replayed_steps > 10
    assert served_by.device.counters.graph_replays >= (1 if depth else 2) * served_by.runner.graphs.counters.replayed_steps
    assert served_by.runner.graphs.capture.memory() > 0
    served_by.close()


PACK = """
import polydraft_emulator
from types import SimpleNamespace
from polydraft import hookimpl
from polydraft.backend import PackNotes

@hookimpl
def polydraft_kernels(device):
    providers = {"swiglu": polydraft_emulator.polydraft_kernels(device).providers["swiglu"]}
    return SimpleNamespace(providers=providers, versions={"swiglu": 1}, notes=PackNotes(uncapturable=UNCAPTURABLE))
"""


@pytest.mark.parametrize("uncapturable", ["()", "('swiglu',)"])
def test_a_pack_may_have_kernels_that_cannot_be_captured(uncapturable: str, tmp_path: Path) -> None:
    """Steps are captured in pieces around them, though the backend declares nothing."""
    file = tmp_path / "waiting.py"
    file.write_text(PACK.replace("UNCAPTURABLE", uncapturable))
    served_by = emulated(
        "seed=2", "narrow", draft_tokens=2, max_num_seqs=1, graph="decode", graph_sizes=(1,), plugins=(str(file),)
    )  # fmt: skip
    check(served_by, "narrow", 2, [Ask((1, 2, 3), GREEDY)])
    assert served_by.info.capabilities.uncapturable == ()
    assert served_by.runner.graphs is not None
    counters = served_by.runner.graphs.counters
    assert counters.replayed_steps > 5
    pieces = served_by.device.counters.graph_replays / counters.replayed_steps
    assert pieces > 3 if "swiglu" in uncapturable else pieces <= 3
    served_by.close()


def rng_params(index: int) -> SamplingParams:
    return SAMPLED if index % 3 == 2 else GREEDY


@pytest.mark.parametrize("name", ["ids", "kv_len", "scratch.qkv", "draft.x"])
def test_a_captured_buffer_that_moves_ends_requests_with_its_name(name: str) -> None:
    served_by = emulated("policy=lazy", "narrow", draft_tokens=2, max_num_seqs=2, graph="decode", graph_sizes=(2,))
    device: Any = served_by.device
    check(served_by, "narrow", 2, [Ask((1, 2, 3), GREEDY)])
    device.move(moved := next(memory for memory in device._memories if memory.name.rstrip("0123456789") == name))
    (output,) = drive(served_by, [Ask((1, 2, 3), GREEDY)])
    assert output.finish_reason == "error"
    assert f"{moved.name} lies at another address since this graph was captured" in output.error
    served_by.close()


# -- it does see what it is there for --------------------------------------------------------------
def is_damaged(served_by: Engine) -> bool:
    """Whether a run goes wrong in any way that a user would notice. Requests arrive while others are in flight."""
    asks = [Ask((1, 2, 3 + i), replace(GREEDY, max_new_tokens=16, ignore_eos=True), i) for i in range(4)]
    try:
        check(served_by, "narrow", 3, asks, limit=100)
    except (AssertionError, IndexError, ValueError, OverflowError):
        return True
    finally:
        served_by.close()
    return False


def narrow(query: str, depth: int) -> Engine:
    return emulated(query, "narrow", draft_tokens=3, max_num_seqs=2, overlap=depth)


@each_depth
def test_a_run_without_damage(depth: int) -> None:
    assert not is_damaged(narrow("policy=lazy", depth))


@each_depth
def test_reading_a_snapshot_before_its_event_shows(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    served_by = narrow("policy=lazy", depth)
    monkeypatch.setattr(EmulatorEvent, "synchronize", lambda event: None)
    assert is_damaged(served_by)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("shared", "policy"), [("staging", "lazy"), ("snapshot", "eager")])
def test_host_memory_shared_by_steps_in_flight_shows(
    shared: str, policy: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every set of staging is there for one step in flight; here all of them are the first one. On the way down a device that
    is late brings it to light, on the way up one that is early."""
    allocate = EmulatorDevice.staging
    first: dict[str, EmulatorStaging] = {}

    def staging(device: EmulatorDevice, name: str, shape: Sequence[int], dtype: str) -> EmulatorStaging:
        own = allocate(device, name, shape, dtype)
        return first.setdefault(re.sub(r"\d", "", name), own) if name.startswith(shared) else own

    monkeypatch.setattr(EmulatorDevice, "staging", staging)
    assert is_damaged(narrow(f"policy={policy}", depth))


@pytest.mark.parametrize(("declared", "laid_out"), [("slot", "prefill_first"), ("prefill-first", "slot")])
def test_another_order_than_the_declared_one_shows(declared: str, laid_out: RowOrder) -> None:
    served_by = narrow(f"rows={declared}", 0)
    served_by.scheduler.row_order = laid_out
    lengths = (2, 30, 2) if laid_out == "prefill_first" else (30, 2)  # a later prompt is prefilled while the long one decodes
    asks = [Ask((1 + i,), replace(GREEDY, max_new_tokens=n, ignore_eos=True), 3 * i) for i, n in enumerate(lengths)]
    outputs = drive(served_by, asks)
    assert any("the launch order" in output.error for output in outputs)
    served_by.close()


def test_a_row_that_was_never_written_shows() -> None:
    served_by = narrow("policy=lazy", 0)
    device: Any = served_by.device

    def spoil(engine: Engine) -> None:
        device.discard(engine.ledger.table[engine.ledger.table >= 0][:1])

    outputs = drive(served_by, [Ask((1, 2, 3), replace(GREEDY, max_new_tokens=20, ignore_eos=True))], each_step=spoil)
    assert [output.error for output in outputs] == [NAN_ERROR]
    served_by.close()


def test_the_host_cannot_read_the_state_of_a_slot() -> None:
    served_by = narrow("policy=eager", 0)
    drive(served_by, [Ask((1, 2, 3), GREEDY)])
    kv_len: Any = served_by.runner.memory.buffers["kv_len"]
    with pytest.raises(DeviceError, match=r"\bkv_len, which it cannot read"):
        np.asarray(kv_len.host_array)
    served_by.close()
