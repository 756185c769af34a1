"""A reduced draft vocabulary: the same text, drafts from it alone, fewer of them accepted."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from polydraft import LLM, RequestOutput, SamplingParams
from polydraft.errors import CapabilityError
from polydraft.sampling.draft_vocab import read
from tests.support import tiny
from tests.support.runs import Ask, drive, engine, essence

MODEL, DRAFTS, SLOTS = "narrow", 3, 3
VOCAB = tiny.CONFIGS[MODEL]["vocab_size"]
SAMPLED = {"temperature": 0.9, "top_p": 0.95}
BOUND = {"repetition_penalty": 1.2, "bad_words": ((7,),), "min_tokens": 9}
PARAMS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": SAMPLED, "processed": {**SAMPLED, **BOUND}}


def option(number: int | None) -> str:
    """What `--draft-vocab` is given; None: nothing."""
    return f"{tiny.token_counts(VOCAB)}:{number}" if number else ""


def asks(params: dict[str, Any]) -> list[Ask]:
    return [Ask((i + 1, 5, 9), SamplingParams(max_new_tokens=24, ignore_eos=True, seed=i, **params)) for i in range(4)]


@functools.cache
def served(number: int | None, params: str, verify: str = "coupled") -> list[RequestOutput]:
    running = engine(MODEL, draft_tokens=DRAFTS, max_num_seqs=SLOTS, draft_vocab=option(number), verify=verify)
    outputs = drive(running, asks(PARAMS[params]))
    running.close()
    return outputs


def accepted(outputs: list[RequestOutput]) -> int:
    return sum(output.accepted for output in outputs)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("number", [1, VOCAB // 4, VOCAB // 2])
def test_the_text_is_that_of_the_whole_vocabulary(number: int, params: str) -> None:
    few, all_ = served(number, params), served(None, params)
    assert [output.token_ids for output in few] == [output.token_ids for output in all_]
    assert accepted(few) < accepted(all_)


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
@pytest.mark.parametrize("params", PARAMS)
def test_with_all_tokens_nothing_changes(params: str, verify: str) -> None:
    assert [essence(o) for o in served(VOCAB, params, verify)] == [essence(o) for o in served(None, params, verify)]


def test_more_tokens_to_draft_from_are_accepted_more_often() -> None:
    found = [accepted(served(number, "greedy")) for number in (1, VOCAB // 4, VOCAB // 2, VOCAB)]
    assert found == sorted(found)
    assert found[0] < found[1] < found[-1]


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
@pytest.mark.parametrize("params", PARAMS)
def test_only_tokens_of_the_vocabulary_are_drafted(params: str, verify: str) -> None:
    number = VOCAB // 4
    running = engine(MODEL, draft_tokens=DRAFTS, max_num_seqs=SLOTS, draft_vocab=option(number), verify=verify)
    may, seen = set(read(option(number), VOCAB, running.model.eos_token_ids).tolist()), set[int]()
    for ask in asks(PARAMS[params])[:SLOTS]:
        running.add(ask.prompt_ids, ask.params)
    while running.has_work:
        running.step()
        buffers: Any = running.runner.memory.buffers
        drafts, lens = buffers["drafts"].host_array, buffers["draft_len"].host_array
        for slot, length in enumerate(lens):
            seen |= set(drafts[slot, :length].tolist())
    running.close()
    assert seen <= may
    assert len(seen) > 3


def test_weights_that_are_replaced_replace_the_drafts_head_too(tmp_path: Path) -> None:
    """Rounds behind the update are those of an engine that was built with the other weights."""
    moved = tiny.moved(MODEL)
    options: dict[str, Any] = {"draft_tokens": DRAFTS, "max_num_seqs": SLOTS, "draft_vocab": option(VOCAB // 4)}
    running, fresh = engine(MODEL, **options), engine(moved, **options)
    drive(running, asks({})[:2])
    running.update_weights(tiny.checkpoint(moved))
    assert [essence(o) for o in drive(running, asks({}))] == [essence(o) for o in drive(fresh, asks({}))]


def test_it_is_a_decision_with_a_reason() -> None:
    running = engine(MODEL, draft_tokens=DRAFTS, draft_vocab=option(8))
    (decision,) = (d for d in running.resolved.decisions if d.name == "draft_vocab")
    number = len(read(option(8), VOCAB, running.model.eos_token_ids))
    assert (decision.asked, decision.chosen) == (option(8), number)
    assert f"among {number} of {VOCAB} tokens and verified over all of them" in decision.reason
    running.close()


@pytest.mark.parametrize("proposer", ["none", "ngram"])
def test_a_proposer_without_a_head_is_refused(proposer: str) -> None:
    drafts = 0 if proposer == "none" else DRAFTS
    with pytest.raises(CapabilityError, match=f"--draft-vocab narrows the head of an MTP model, got proposer {proposer}"):
        LLM(
            model=str(tiny.checkpoint(MODEL)), plugins=tiny.PLUGINS, backend="reference", proposer=proposer, draft_tokens=drafts,
            draft_vocab=option(8),
        )  # fmt: skip
