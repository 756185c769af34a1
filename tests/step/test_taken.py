"""News handed over as arrays: made into results on another thread, seldom taken, or of records that cannot be read.

What a converter makes of batches, wherever and whenever it runs, is what `poll` gives; nothing is lost, and nothing comes twice.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polydraft import Engine, SamplingParams
from polydraft.contracts.layout import HEADER_WORDS, LogprobEntry, LogprobHeader
from polydraft.runtime.logprobs import SPARE
from polydraft.runtime.output import Converter, Piece
from polydraft.runtime.taken import MOST_REPORTS, Taken
from tests.support.kernel_doubles import backend_with
from tests.support.runs import engine, solo

MODEL = "narrow"
LONG = SamplingParams(max_new_tokens=30, ignore_eos=True, logprobs=2)
ASKS: list[tuple[tuple[int, ...], SamplingParams, bool]] = [
    ((5, 9, 33), LONG, True),
    ((7, 7, 12), replace(LONG, logprobs=None, stop=("w3",)), True),
    ((1,), replace(LONG, logprobs=0, prompt_logprobs=1, stop=("w1 w", "w4 w")), True),
    ((2, 40), replace(LONG, temperature=0.9, seed=3), False),
    ((8, 3), replace(LONG, logprobs=None), True),
]


def started(**options: Any) -> Engine:
    running = engine(MODEL, **{"draft_tokens": 3, "logprobs": 2, "max_num_seqs": 3, **options})
    for number, (prompt, params, streaming) in enumerate(ASKS):
        running.add(prompt, params, id=str(number), stream=streaming)
    return running


class Joined:
    """The pieces of one request, put together."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.rounds: list[tuple[int, int]] = []
        self.text, self.steps, self.end = "", 0, ""

    def add(self, piece: Piece) -> None:
        assert not self.end, "nothing comes behind the end"
        self.tokens += piece.tokens.tolist()
        self.rounds += zip(piece.rounds.tolist(), piece.round_drafts.tolist(), strict=True)
        self.text += piece.new_text
        self.steps += sum(step.count for step in piece.steps)
        self.end = (piece.request.finish_reason or "") if piece.finished else ""


def joined(pieces: list[Piece]) -> dict[str, Joined]:
    found: dict[str, Joined] = {}
    for piece in pieces:
        found.setdefault(piece.request.id, Joined()).add(piece)
    return found


def polled() -> dict[str, Any]:
    running, outputs = started(), dict[str, Any]()
    while running.has_work:
        running.step()
        outputs |= {output.id: output for output in running.poll() if output.finished}
    return outputs


@pytest.mark.parametrize("every", [1, 4, 1000])
def test_pieces_made_on_another_thread_are_what_poll_gives(every: int) -> None:
    """However seldom anybody takes: the news of the steps between become one batch, whose arrays are the taker's."""
    running, batches, pieces = started(), queue.Queue[Taken | None](), list[Piece]()
    converter = Converter(running.tokenizer)

    def convert() -> None:
        while (taken := batches.get()) is not None:
            pieces.extend(converter.pieces(taken))

    thread = threading.Thread(target=convert)
    thread.start()
    step = 0
    while running.has_work:
        running.step()
        step += 1
        if step % every == 0:
            batches.put(running.take())
    batches.put(running.take())
    batches.put(None)
    thread.join(30)
    found, wanted = joined(pieces), polled()
    assert set(found) == set(wanted)
    for name, output in wanted.items():
        mine = found[name]
        assert (mine.text, mine.tokens, mine.end) == (output.text, list(output.token_ids), output.finish_reason)
        assert mine.rounds == list(zip(output.rounds, output.round_drafts, strict=True))
        assert mine.steps == sum(step.count for step in output.logprobs)
    if every == 1000:
        assert len(pieces) == len(ASKS), "one piece each"
    assert not running.take()


def test_log_probabilities_alone_are_handed_over_now_and_then() -> None:
    """Requests that tell nothing before their end leave their records where they are, but not without bound."""
    running = engine(MODEL, draft_tokens=0, logprobs=2, max_num_seqs=1)
    running.add((5, 9), replace(LONG, max_new_tokens=90), stream=False)
    while running.has_work and len(running.slots.reports) < 40:
        running.step()
        assert not running.take()
    running.slots.reports *= MOST_REPORTS // 40 + 1
    assert running.take()
    assert not running.slots.reports


def test_records_wait_where_they_landed_and_the_memory_comes_back() -> None:
    """Of more than there is room for copies are made, so that no step lacks a place to land."""

    def running(*, polled: bool) -> tuple[Engine, list[Any]]:
        made = engine(MODEL, draft_tokens=0, logprobs=2, max_num_seqs=1)
        made.add((5, 9), LONG, stream=True)
        outputs = []
        while made.has_work:
            made.step()
            outputs += made.poll() if polled else []
        return made, outputs

    late, _ = running(polled=False)
    lent = [records.home is not None for records in late.slots.reports]
    assert len(lent) > SPARE
    assert lent == [place < SPARE for place in range(len(lent))]
    assert late.runner._logprobs is not None
    free = late.runner._logprobs._free
    assert len(free) == late.resolved.overlap + 1
    (output,) = late.poll()
    assert len(free) == len(set(free)) == late.resolved.overlap + 1 + SPARE
    assert not any(landing.occupants for landing in free), "nobody's request is kept"
    assert output.tokens == running(polled=True)[1][-1].tokens


def test_a_step_in_flight_reports_nothing_of_a_request_that_left() -> None:
    running = engine(MODEL, draft_tokens=2, logprobs=2, max_num_seqs=2, overlap=1)
    for name in ("leaves", "stays"):
        running.add((5, 9), LONG, id=name)
    for _ in range(6):
        running.step()
    running.abort("leaves")
    while running.has_work:
        running.step()
    outputs = {output.id: output for output in running.poll()}
    for output in outputs.values():
        assert sum(step.count for step in output.logprobs) == len(output.token_ids)
    assert 0 < len(outputs["leaves"].token_ids) < len(outputs["stays"].token_ids)


def test_a_step_makes_no_object_of_any_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """What log probabilities say is looked at when somebody wants a result, and on no step."""
    import polydraft.runtime.packed as module

    looked: list[Any] = []
    real = module._split

    def split(*given: Any) -> Any:
        looked.append(given)
        return real(*given)

    monkeypatch.setattr(module, "_split", split)
    running = engine(MODEL, draft_tokens=3, logprobs=2)
    running.add((5, 9), LONG)
    for _ in range(5):
        running.step()
    assert len(running.slots.reports) > 2
    assert not looked
    (request,) = running.requests.values()
    assert not request.logprobs
    while running.has_work:
        running.step()
    (output,) = running.poll()
    assert len(looked) == len(output.logprobs)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("word", "value", "said"),
    [
        (HEADER_WORDS + len(LogprobEntry), -7, "rank between -7"),
        (LogprobHeader.VERSION, 9, "version 9"),
        (LogprobHeader.NUM_ENTRIES, 2, "2 entries"),
    ],
    ids=("body", "version", "entries"),
)
def test_a_record_that_lies_ends_its_requests_and_nothing_else(word: int, value: int, said: str, streaming: bool) -> None:
    """No step minds; who makes results of it does, and the engine ends what it came from."""

    def lies(a: Any, n: int) -> None:
        from polydraft.reference import logprobs

        logprobs.pack_logprobs(a, n)
        a.record[word] = np.int32(value)

    running = engine(MODEL, draft_tokens=2, logprobs=2, plugin=backend_with(pack_logprobs=lies))
    running.add((5, 9), replace(LONG, logprobs=1), id="refused", stream=streaming)
    outputs = []
    while running.has_work:
        running.step()
        outputs += running.poll()
    (output,) = (o for o in outputs if o.finished)
    assert output.finish_reason == "error"
    assert said in output.error
    assert (output.logprobs, len(output.tokens)) == ((), len(output.token_ids))
    assert all(not o.new_token_ids for o in outputs if not o.finished), "no token is told without its number"
    quiet = replace(LONG, logprobs=None)
    running.add((5, 9), quiet, id="served")
    while running.has_work:
        running.step()
    (output,) = running.poll()
    assert output.token_ids == solo(MODEL, 2, (5, 9), quiet).token_ids
