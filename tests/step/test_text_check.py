"""`--check-texts`: the end of a text is written once more without drafts, unseen; honest texts are equal, others are told."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import polydraft.cli.run
import polydraft.llm
from polydraft import LLM, Engine, SamplingParams
from polydraft.cli.prompts import Job
from polydraft.cli.run import Run
from polydraft.config import EngineConfig
from polydraft.errors import ConfigError
from polydraft.host.differences import MOST_TIES
from polydraft.host.request import Request
from polydraft.host.text_check import TAIL, TextCheck
from polydraft.host.totals import EngineTotals
from tests.step.test_drafts_per_step import MODEL, PARAMS, PROMPTS, is_consistent, same_text
from tests.support import runs, tiny
from tests.support.depth import among
from tests.support.drafting import drawing
from tests.support.programs import WAYS, program
from tests.support.runs import Ask, drive, engine

HAPPENED: Counter[str] = Counter()


def checks(served_by: Engine) -> tuple[int, int]:
    """Checked, and found to differ."""
    assert served_by.text_check is not None
    return served_by.text_check.compared.checked, served_by.text_check.compared.differed


@pytest.fixture(autouse=True)
def _rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs end when what nobody sees has ended, too."""
    come_to_rest = runs.come_to_rest

    def rest(served_by: Engine) -> None:
        while served_by.has_work:
            served_by.step()
            served_by.ledger.audit()
        assert served_by.poll() == []
        come_to_rest(served_by)

    monkeypatch.setattr(runs, "come_to_rest", rest)


@pytest.mark.parametrize("seed", among((1201, 1202), [seed for seed in range(1200, 1260) if program(seed).num_drafts]))
def test_a_program(seed: int) -> None:
    of = program(seed)
    of = replace(of, options={**of.options, "check_texts": 1.0, "check_draft_state": 0.2, "proposer": "mtp"})
    with drawing(seed):
        served_by = of.build(*WAYS[seed % len(WAYS)])
    outputs = of.serve(served_by)
    alone = replace(of, options={**of.options, "proposer": "auto"})
    for ask, output in zip(of.asks, outputs, strict=True):
        if of.options["verify"] != "rejection" or ask.params.temperature == 0:
            assert same_text(output, alone._alone(ask)), f"seed {seed}"
    HAPPENED["checked"] += checks(served_by)[0]
    assert checks(served_by)[1] == 0
    is_consistent(served_by, outputs)
    served_by.close()


@pytest.mark.parametrize("by", ["reference", "lazy-1"])
def test_a_text_is_written_once_more_where_nobody_sees_it(by: str) -> None:
    asks = [
        Ask(prompt, replace(PARAMS, max_new_tokens=TAIL // 2 + 20 * i, temperature=0.7 * (i % 2), seed=i), arrival=20 * i)
        for i, prompt in enumerate(PROMPTS)
    ]
    plain = drive(engine(MODEL, device=by, draft_tokens=3, max_num_seqs=2), asks)
    served_by = engine(MODEL, device=by, draft_tokens=3, max_num_seqs=2, check_texts=1.0)
    outputs = drive(served_by, asks)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert checks(served_by)[0] >= 2
    assert checks(served_by)[1] == 0
    is_consistent(served_by, outputs)
    assert served_by.totals.new_tokens == sum(len(output.token_ids) for output in outputs), "the second time does not count"
    served_by.close()


def test_drafts_that_change_a_text_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Every draft is taken, whatever the target says."""
    served_by = engine(MODEL, draft_tokens=3, max_num_seqs=2, verify="coupled", accept_schedule=(1.0, 1.0, 1.0), check_texts=1.0)
    drive(served_by, [Ask(PROMPTS[0], replace(PARAMS, max_new_tokens=60))])
    assert checks(served_by) == (1, 1)
    assert served_by.alarms.count["text"] == 1
    assert "wanted the same text: drafts changed it" in caplog.text
    served_by.close()


def test_new_weights_and_ends_leave_no_check_behind(tmp_path: Path) -> None:
    served_by = engine(MODEL, device="lazy-1", draft_tokens=3, max_num_seqs=2, check_texts=1.0)
    served_by.add(PROMPTS[0], replace(PARAMS, max_new_tokens=8))
    served_by.add(PROMPTS[1], PARAMS)
    while served_by.text_check is None or served_by.text_check.shadow is None:
        served_by.step()
    served_by.update_weights(tiny.checkpoint(tiny.moved(MODEL)), running="recompute")
    assert served_by.text_check.shadow is None
    while served_by.has_work:
        served_by.step()
    assert checks(served_by)[1] == 0, "what was written by old weights is not compared"
    assert len(served_by.poll()) == 2
    served_by.close()


def test_where_rounding_may_differ_a_few_differences_are_ties() -> None:
    for exact, wanted in ((True, [1, 2, 3, 4, 5]), (False, [0, 0, 0, 0, 1])):
        said: list[str] = []
        queue: list[Request] = []
        totals = EngineTotals(accepted_at=[0], drafted_at=[0], drafts_per_step=[0, 0])
        check = TextCheck(1.0, queue.append, totals, said.append, exact=exact)
        told = []
        for _ in range(MOST_TIES + 1):
            text = list(range(50))
            request = Request("one", (1, 2), SamplingParams(), 0, (0, 0), (), 100)
            request.token_ids, request.finish_reason = text, "length"
            assert check.offer(request, 7)
            assert not check.offer(request, 8), "one at a time"
            shadow = queue[-1]
            assert (shadow.token_ids, shadow.max_total, shadow.params.max_drafts) == (text[:-TAIL], 52, 0)
            assert not check.ended(request)
            shadow.token_ids, shadow.finish_reason = [*text[:40], 99], "stop"
            assert check.ended(shadow)
            told.append(len(said))
        assert told == wanted
        assert "token 40 of a text was [40], and [99]" in said[-1]
        assert (check.compared.checked, check.compared.differed) == (5, 5)


def test_whoever_waits_for_texts_waits_for_their_check() -> None:
    """The last text of a call or of a command is checked, too, and only what was asked for is counted."""
    asked = [(prompt, replace(PARAMS, max_new_tokens=10 + 30 * i)) for i, prompt in enumerate(PROMPTS[:2])]
    prompts, params = zip(*asked, strict=True)
    llm = LLM(model=str(tiny.checkpoint(MODEL)), plugins=tiny.PLUGINS, backend="reference", draft_tokens=3, check_texts=1.0)
    called = [llm.generate(prompts[:1], params[:1]), llm.generate(prompts, params), list(llm.stream(prompts[1], params[1]))]
    ended = [output for outputs in called for output in outputs if output.finished]
    assert checks(llm.engine) == (4, 0)
    assert llm.engine.totals.new_tokens == sum(len(output.token_ids) for output in ended)
    run = Run(llm.engine, [Job(list(prompts[0]), params[0])])
    run.to_the_end(lambda output: None)
    assert checks(llm.engine) == (5, 0)
    llm.close()


def test_who_interrupts_does_not_wait_for_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(model=str(tiny.checkpoint(MODEL)), plugins=tiny.PLUGINS, backend="reference", draft_tokens=3, check_texts=1.0)
    interrupted = lambda: llm.engine.checks_text  # noqa: E731
    for module in (polydraft.llm, polydraft.cli.run):
        monkeypatch.setattr(module, "noted_interrupts", lambda: nullcontext(interrupted))
    llm.generate(PROMPTS[:1], replace(PARAMS, max_new_tokens=40))
    assert llm.engine.checks_text
    run = Run(llm.engine, [Job(list(PROMPTS[0]), PARAMS)])
    run.to_the_end(lambda output: None)
    assert run.interrupted
    assert llm.engine.checks_text
    llm.close()


def test_a_share_is_one() -> None:
    for share in (2, -0.1, "1", np.nan):
        with pytest.raises(ConfigError, match=r"check_texts is .*, wanted a share of requests from 0 to 1"):
            EngineConfig.from_mapping({"check_texts": share})


def test_a_small_share() -> None:
    served_by = engine(MODEL, draft_tokens=2, max_num_seqs=1, check_texts=0.3)
    for _ in range(7):
        drive(served_by, [Ask(PROMPTS[1], replace(PARAMS, max_new_tokens=5))])
    assert checks(served_by)[0] == 1
    served_by.close()
