"""Drafts a request allows: its rounds are those of an engine with as few, whatever runs beside it, and its text is the same.

Where nobody wants drafts, none are made, and blocks whose draft rows are missing are shared with nobody.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polydraft import SamplingParams
from polydraft.errors import RequestError
from tests.support.emulator import emulated
from tests.support.runs import DEVICES, Ask, drive, engine, essence, solo

MODEL = "narrow"
FREE = SamplingParams(max_new_tokens=25, ignore_eos=True)
PROMPTS = ((5, 9, 33), (7, 7, 12, 40, 2, 61), (1,), tuple(range(3, 24)))
CAPS = (0, 1, 2, 7)
ASKS = [
    Ask(prompt, replace(FREE, max_drafts=cap, temperature=0.7 * (i % 2), seed=i), arrival=i)
    for i, (prompt, cap) in enumerate(zip(PROMPTS, CAPS, strict=True))
]


def served(by: str, **options: Any) -> Any:
    if by.startswith("emulator"):
        return emulated("seed=5&rows=prefill-first", MODEL, draft_tokens=3, overlap=int(by[-1]), **options)
    return engine(MODEL, device=by, draft_tokens=3, **options)


@pytest.mark.parametrize("graph", ["off", "decode"])
@pytest.mark.parametrize("by", ["emulator-0", "emulator-2"])
def test_rounds_on_an_emulator(by: str, graph: str) -> None:
    sizes: dict[str, Any] = {"graph": graph, "graph_sizes": (1, 4)} if graph == "decode" else {"graph": graph}
    outputs = drive(served(by, max_num_seqs=4, **sizes), ASKS)
    for ask, output in zip(ASKS, outputs, strict=True):
        cap = min(ask.params.max_drafts or 0, 3)
        assert essence(output) == essence(solo(MODEL, cap, ask.prompt_ids, replace(ask.params, max_drafts=None)))
        assert max(output.round_drafts, default=0) <= cap


@pytest.mark.parametrize("by", list(DEVICES))
def test_a_request_has_the_rounds_of_an_engine_with_as_few_drafts(by: str) -> None:
    outputs = drive(served(by, max_num_seqs=3), ASKS)
    for ask, output in zip(ASKS, outputs, strict=True):
        cap = min(ask.params.max_drafts or 0, 3)
        assert essence(output) == essence(solo(MODEL, cap, ask.prompt_ids, replace(ask.params, max_drafts=None)))
        assert max(output.round_drafts, default=0) == cap


def test_where_nobody_wants_drafts_none_are_made() -> None:
    launches = {}
    for drafts, cap in ((3, 0), (0, None), (3, None)):
        running = engine(MODEL, draft_tokens=drafts, graph="off")
        running.add((5, 9), replace(FREE, max_drafts=cap))
        for _ in range(3):
            running.step()
        before = running.device.counters.launches
        running.step()
        launches[drafts, cap] = running.device.counters.launches - before
    assert launches[3, 0] == launches[0, None] < launches[3, None]


def test_blocks_without_draft_rows_are_shared_with_nobody() -> None:
    """A request with the same beginning would otherwise draft from rows that nobody wrote."""
    running = engine(MODEL, draft_tokens=3, block_size=4, graph="off")
    ask = Ask(PROMPTS[3], FREE)
    for prompt in (PROMPTS[3], PROMPTS[3]):
        drive(running, [Ask(prompt, replace(FREE, max_drafts=0))])
    assert running.ledger.num_hits == 0
    (output,) = drive(running, [ask])
    assert essence(output) == essence(solo(MODEL, 3, ask.prompt_ids, FREE))
    (again,) = drive(running, [Ask(PROMPTS[3], replace(FREE, max_drafts=0))])
    assert running.ledger.num_hits > 0, "it may still share what others have written whole"
    assert again.token_ids == output.token_ids


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "3"])
def test_a_number_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(RequestError, match="max_drafts is"):
        SamplingParams(max_drafts=wrong)
