"""What a proposer keeps is what the committed tokens make of it: rows that are computed anew make the same drafts, bit by bit.

`--check-draft-state` is run on as many rounds as it can, in which requests pause drafting, are preempted, share prefixes, come in
chunks, meet new weights, and are replayed as graphs. Each fault here leaves all texts as they are, and is found.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from polydraft import Engine, SamplingParams
from polydraft.config import EngineConfig
from polydraft.conformance.core_faults import no_keep_part
from polydraft.errors import CapabilityError, ConfigError
from polydraft.host.differences import MOST_TIES
from polydraft.host.draft_state_check import DraftStateCheck
from polydraft.host.kv_blocks import BlockLedger
from polydraft.host.scheduler import Scheduler
from polydraft.program.plan import Drafted
from polydraft.step.graphs import CapturedSteps
from tests.step.test_drafts_per_step import MODEL, PARAMS, PROMPTS, is_consistent, same_text
from tests.step.test_update_weights import write
from tests.support import tiny
from tests.support.cpu import needs_kernels
from tests.support.depth import among, crossed
from tests.support.drafting import drawing
from tests.support.programs import WAYS, program
from tests.support.runs import DEVICES, Ask, drive, engine, solo

ALL: dict[str, Any] = {"check_draft_state": 1.0}
LONG = replace(PARAMS, max_new_tokens=60)
ASKS = [
    Ask(prompt, replace(LONG, temperature=0.8 * (i % 2), seed=i, max_drafts=(None, 2, None, 0)[i]), arrival=2 * i)
    for i, prompt in enumerate(PROMPTS)
]


def checks(served_by: Engine) -> tuple[int, int]:
    """Checked, and found to differ."""
    assert served_by.draft_state is not None
    return served_by.draft_state.compared.checked, served_by.draft_state.compared.differed


# -- honest runs --------------------------------------------------------------------------------------------------------------
HAPPENED: Counter[str] = Counter()


PROGRAMS = [seed for seed in range(1100, 1190) if program(seed).num_drafts > 1]


# 1123: a step asks for one draft, is replayed by a graph for two, and a slot is bound to end behind the first.
@pytest.mark.parametrize("seed", among((*PROGRAMS[:4], 1123), PROGRAMS))
def test_a_program(seed: int) -> None:
    of = program(seed)
    of = replace(of, options={**of.options, **ALL, "proposer": ("mtp", "hybrid")[seed % 3 == 0]})
    with drawing(seed):
        served_by = of.build(*WAYS[seed % len(WAYS)])
    outputs = of.serve(served_by)
    alone = replace(of, options={**of.options, "proposer": "auto", "draft_vocab": ""})
    for ask, output in zip(of.asks, outputs, strict=True):
        if of.options["verify"] != "rejection" or ask.params.temperature == 0:
            assert same_text(output, alone._alone(ask)), f"seed {seed}"
    checked, differed = checks(served_by)
    assert not differed
    graphs = served_by.runner.graphs
    HAPPENED.update(
        checked=checked, preempted=served_by.scheduler.num_preemptions, shared=served_by.ledger.num_hits,
        replayed=graphs.counters.replayed_steps if graphs else 0,
    )  # fmt: skip
    is_consistent(served_by, outputs)
    served_by.close()


def test_the_programs_do_what_they_are_for() -> None:
    """Behind all of the ones above, in the same process."""
    if HAPPENED["checked"] < 15:
        pytest.skip("not all programs ran in this process")
    assert min(HAPPENED[name] for name in ("shared", "replayed")) > 5


@pytest.mark.parametrize(("by", "proposer"), crossed(4, DEVICES, ["mtp", "hybrid"]))
def test_drafts_behind_new_rows_are_those_behind_the_old(by: str, proposer: str) -> None:
    """Prompts come in chunks, and K is drawn for each step."""
    depth = {"overlap": 1} if proposer == "hybrid" and by == "lazy-2" else {}
    options: dict[str, Any] = {
        "draft_tokens": 5,
        "max_num_seqs": 3,
        "block_size": 4,
        "max_batched_tokens": 25,
        **depth,
    }
    with drawing(3):
        served_by = engine(MODEL, device=by, proposer=proposer, **options, **ALL)
    outputs = drive(served_by, ASKS)
    for ask, output in zip(ASKS, outputs, strict=True):
        assert same_text(output, solo(MODEL, 3, ask.prompt_ids, replace(ask.params, max_drafts=None)))
    checked, differed = checks(served_by)
    assert checked > 5
    assert not differed
    assert served_by.alarms.count["state"] == 0
    assert served_by.scheduler.num_preemptions == 0, "checks are no preemptions for lack of blocks"
    served_by.close()


@pytest.mark.parametrize(
    "options", [{"overlap": 0}, {"overlap": 1}, {"overlap": 1, "graph": "decode", "graph_sizes": (1, 3)}], ids=str
)
def test_drafts_that_nobody_looks_at_are_no_hazard(options: dict[str, Any]) -> None:
    """A share of the rounds is checked; the drafts of the others are copied up as well, and overwritten unread."""
    memory: dict[str, Any] = {"max_num_seqs": 3, "block_size": 4}
    served_by = engine(MODEL, device="lazy-1", draft_tokens=3, sanitize=True, check_draft_state=0.2, **memory, **options)
    drive(served_by, ASKS)
    assert checks(served_by)[0] > 1
    served_by.close()  # which raises for hazards


@needs_kernels
@pytest.mark.parametrize("options", [{"invariant": True}, {"invariant": False, "graph": "decode"}], ids=["invariant", "graphs"])
def test_on_compiled_kernels(options: dict[str, Any]) -> None:
    from tests.step.test_cpu_backend import cpu_engine

    served_by = cpu_engine(MODEL, 3, max_num_seqs=3, block_size=4, **options, **ALL)
    drive(served_by, ASKS)
    assert checks(served_by)[0] > 5
    assert checks(served_by)[1] == 0
    assert served_by.alarms.count["state"] == 0
    served_by.close()


@pytest.mark.parametrize("running", ["finish", "recompute"])
def test_weights_change_between(running: Any, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(tiny.checkpoint(tiny.moved(MODEL)), tmp_path / "changed"))
    served_by = engine(MODEL, device="lazy-1", draft_tokens=3, max_num_seqs=3, block_size=4, **ALL)
    drive_with_update(served_by, changed, running)
    assert checks(served_by)[0] > 5
    assert checks(served_by)[1] == 0
    served_by.close()


def drive_with_update(served_by: Engine, changed: Path, running: Any) -> None:
    """Prompts, new weights in the middle of their texts, and then the same prompts again."""
    for prompt in PROMPTS[::-1]:
        served_by.add(prompt, LONG)
    for _ in range(6):
        served_by.step()
    served_by.update_weights(changed, running=running)
    for prompt in PROMPTS[::-1]:
        served_by.add(prompt, LONG)
    while served_by.has_work:
        served_by.step()
    assert all(output.finish_reason == "length" for output in served_by.poll())


@pytest.mark.parametrize("by", ["lazy-1", "lazy-2"])
def test_a_request_that_a_step_has_left_out_is_not_checked(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device pauses those that lack blocks: what lies behind the passes of such a step is not of their drafts."""
    served_by = engine(MODEL, device=by, draft_tokens=3, max_num_seqs=3, block_size=4, num_blocks=22, **ALL)
    begin, paused, looked = DraftStateCheck._begin, 0, 0

    def where_some_are_paused(self: DraftStateCheck, *of_step: Any) -> None:
        nonlocal paused, looked
        if served_by.totals.paused > paused:
            begin(self, *of_step)
            looked += 1
        paused = served_by.totals.paused

    monkeypatch.setattr(DraftStateCheck, "_begin", where_some_are_paused)
    for _ in range(6):
        drive(served_by, ASKS)
    assert looked > 3
    assert checks(served_by)[0] > 0
    assert checks(served_by)[1] == 0
    served_by.close()


def test_the_rows_themselves_are_the_same_bits() -> None:
    """On the reference, whose cache can be read: keys and values of the MTP layer before a check and behind it."""
    served_by = engine(MODEL, draft_tokens=3, max_num_seqs=1, block_size=4, **ALL)
    compared = 0

    def rows(slot: int, count: int) -> list[Any]:
        cache: Any = served_by.runner.memory.caches["mtp.0"]
        blocks, place = served_by.ledger.granted(slot), np.arange(count)
        return [part[blocks[place // 4], place % 4] for part in cache.read_logical()]

    preempt = Scheduler.preempt

    def kept(self: Scheduler, slot: int, **options: Any) -> None:
        before["known"], before["rows"] = int(self.slots.num_known[slot]), rows(slot, int(self.slots.kv_len[slot]))
        preempt(self, slot, **options)

    before: dict[str, Any] = {}

    def look(_: Engine) -> None:
        nonlocal compared
        t = served_by.slots
        if before and t.num_known[0] == before["known"] and t.kv_len[0] == before["known"] - 1 and not t.draining[0]:
            for old, new in zip(before["rows"], rows(0, len(before["rows"][0])), strict=True):
                assert np.array_equal(old, new)
            compared += 1
            before.clear()

    with mock.patch.object(Scheduler, "preempt", kept):
        drive(served_by, [Ask(PROMPTS[3], LONG)], each_step=look)
    assert compared > 5
    served_by.close()


# -- faults -------------------------------------------------------------------------------------------------------------------
@contextmanager
def blocks_outlive_weights() -> Iterator[None]:
    """New weights leave the prefix cache as it was: requests begin with rows of the old ones."""
    with mock.patch.object(BlockLedger, "forget_all"):
        yield


@contextmanager
def graphs_store_nothing() -> Iterator[dict[str, Engine]]:
    """What the draft passes of a replayed step store in the proposer's cache is lost."""
    replay = CapturedSteps.replay

    def lost(self: CapturedSteps, *args: Any) -> None:
        runner = served["by"].runner
        runner.device.synchronize()
        cache: Any = runner.memory.caches["mtp.0"]
        before = np.nan_to_num(cache.kv)
        replay(self, *args)
        runner.device.synchronize()
        cache.kv[...] = before

    served: dict[str, Engine] = {}
    with mock.patch.object(CapturedSteps, "replay", lost):
        yield served


def faulty(fault: AbstractContextManager[Any], **options: Any) -> Engine:
    """A run under a fault."""
    with fault as tell, drawing(3):
        served_by = engine(MODEL, draft_tokens=5, max_num_seqs=3, block_size=4, **options, **ALL)
        if tell is not None:
            tell["by"] = served_by
        outputs = drive(served_by, ASKS)
    for ask, output in zip(ASKS, outputs, strict=True):
        assert output.token_ids == solo(MODEL, 3, ask.prompt_ids, replace(ask.params, max_drafts=None)).token_ids, (
            "no text shows it"
        )
    return served_by


def test_rows_of_steps_without_drafts_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    served_by = faulty(no_keep_part())
    assert checks(served_by)[1] > 0
    assert served_by.alarms.count["state"] > 0
    assert "the proposer's rows are not those of the text" in caplog.text
    served_by.close()


def test_rows_that_graphs_lose() -> None:
    options = {"device": "lazy-1", "graph": "decode", "graph_sizes": (1, 2, 3)}
    served_by = faulty(graphs_store_nothing(), **options)
    assert served_by.alarms.count["state"] > 0
    served_by.close()


@pytest.mark.deep  # `make test` has rows that graphs lose
def test_rows_of_weights_that_are_gone(tmp_path: Path) -> None:
    changed, rng = Path(shutil.copytree(tiny.checkpoint(MODEL), tmp_path / "changed")), np.random.default_rng(1)
    write(changed, {name: one + rng.standard_normal(one.shape) * one.std() for name, one in tiny.weights(MODEL).items()})
    served_by = engine(MODEL, draft_tokens=3, max_num_seqs=3, block_size=4, **ALL)
    with blocks_outlive_weights():
        drive_with_update(served_by, changed, "finish")
    assert served_by.alarms.count["state"] > 0
    served_by.close()


# -- what is told ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("exact", "wanted"), [(True, [1, 2, 3, 4, 5]), (False, [0, 0, 0, 0, 1])])
def test_where_rounding_may_differ_a_few_differences_are_ties(exact: bool, wanted: list[int]) -> None:
    said: list[str] = []
    check = DraftStateCheck(1.0, SimpleNamespace(), SimpleNamespace(), SimpleNamespace(), said.append, exact=exact)  # type: ignore[arg-type]
    assert MOST_TIES == 4
    told = []
    for _ in wanted:
        for after in ([1, 7], [1, 2], []):
            check._compare(Drafted(np.array([1, 2, 3]), b"state"), Drafted(np.array(after, np.int32), b"other"))
        told.append(len(said))
    assert told == wanted
    assert (check.compared.checked, check.compared.differed) == (10, 5)
    check._compare(*(Drafted(np.array([1, 2]), state) for state in (b"one", b"another")))
    assert check.compared.differed == 5 + exact, "bits of the state, where they mean something"
    check._compare(*(Drafted(np.array([1, 2]), state) for state in (b"one", b"")))
    assert check.compared.differed == 5 + exact


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(CapabilityError, match=r"--check-draft-state 0.1: proposer ngram keeps nothing between rounds"):
        engine(MODEL, draft_tokens=2, proposer="ngram", check_draft_state=0.1)
    for share in (1.5, -1, True, "0.1"):
        with pytest.raises(ConfigError, match=r"check_draft_state is .*, wanted a share of rounds from 0 to 1"):
            EngineConfig(check_draft_state=share)  # type: ignore[arg-type]


def test_a_small_share_costs_few_prefills() -> None:
    served_by = engine(MODEL, draft_tokens=2, max_num_seqs=3, check_draft_state=0.02)
    drive(served_by, [Ask(prompt, SamplingParams(max_new_tokens=60, ignore_eos=True)) for prompt in PROMPTS])
    assert 0 < checks(served_by)[0] <= 0.02 * served_by.totals.rounds + 1
    served_by.close()
