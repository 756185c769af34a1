"""What is new, handed over as arrays: made into results on another thread, seldom taken, or of records that cannot be read.

What an output processor makes of batches, wherever and whenever it runs, is what `poll` gives; nothing is lost, and nothing comes
twice.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polydraft import Engine, SamplingParams
from polydraft.contracts.layout import HEADER_WORDS, LogprobEntry, LogprobHeader, Snapshot
from polydraft.output.engine_outputs import MOST_UNREAD, EngineOutputs
from polydraft.output.output_processor import OutputProcessor
from polydraft.output.provenance import provenance
from polydraft.output.request_delta import RequestDelta
from polydraft.sampling.logprobs import SPARE
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
    """The deltas of one request, put together."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.rounds: list[tuple[int, int]] = []
        self.logprobs: list[float] = []
        self.text, self.end = "", ""

    def add(self, delta: RequestDelta) -> None:
        assert not self.end, "nothing comes behind the end"
        self.tokens += delta.token_ids.tolist()
        self.rounds += zip(delta.rounds.tolist(), delta.round_drafts.tolist(), strict=True)
        self.text += delta.text
        self.logprobs += [row["logprobs"][0] for row in delta.logprobs]
        self.end = delta.finish


def joined(deltas: list[RequestDelta]) -> dict[str, Joined]:
    found: dict[str, Joined] = {}
    for delta in deltas:
        found.setdefault(str(delta.handle), Joined()).add(delta)
    return found


def polled() -> dict[str, Any]:
    running, outputs = started(), dict[str, Any]()
    while running.has_work:
        running.step()
        outputs |= {output.id: output for output in running.poll() if output.finished}
    return outputs


@pytest.mark.parametrize("every", [1, 4, 1000])
def test_deltas_made_on_another_thread_are_what_poll_gives(every: int) -> None:
    """However seldom anybody takes: what the steps between bring becomes one batch, whose arrays are the taker's."""
    running, batches, deltas = started(), queue.Queue[EngineOutputs | None](), list[RequestDelta]()
    processor = OutputProcessor(running.tokenizer)

    def process() -> None:
        while (taken := batches.get()) is not None:
            deltas.extend(processor.deltas(taken))

    thread = threading.Thread(target=process)
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
    found, wanted = joined(deltas), polled()
    assert set(found) == set(wanted)
    for name, output in wanted.items():
        mine = found[name]
        assert (mine.text, mine.tokens, mine.end) == (output.text, list(output.token_ids), output.finish_reason)
        assert mine.rounds == list(zip(output.rounds, output.round_drafts, strict=True))
        assert mine.logprobs == [record.logprob for record in output.tokens if record.logprob is not None]
    if every == 1000:
        assert len(deltas) == len(ASKS), "one each"
    assert not running.take()


def test_log_probabilities_alone_are_handed_over_now_and_then() -> None:
    """Requests that tell nothing before their end leave their records where they are, but not without bound."""
    running = engine(MODEL, draft_tokens=0, logprobs=2, max_num_seqs=1)
    running.add((5, 9), replace(LONG, max_new_tokens=90), stream=False)
    while running.has_work and len(running.slots.reports) < 40:
        running.step()
        assert not running.take()
    running.slots.reports *= MOST_UNREAD // 40 + 1
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
        assert len(output.logprobs) == len(output.rounds) + 1
        assert all(record.logprob is not None for record in output.tokens)
    assert 0 < len(outputs["leaves"].token_ids) < len(outputs["stays"].token_ids)


def test_a_step_makes_no_object_of_any_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """What log probabilities say is looked at when somebody wants a result, and on no step."""
    import polydraft.program.packed as module

    looked: list[Any] = []
    real = module.decode_logprobs

    def decode(*given: Any) -> Any:
        looked.append(given)
        return real(*given)

    monkeypatch.setattr(module, "decode_logprobs", decode)
    running = engine(MODEL, draft_tokens=3, logprobs=2)
    running.add((5, 9), LONG)
    for _ in range(5):
        running.step()
    assert len(running.slots.reports) > 2
    assert not looked
    assert not running._processor._states
    while running.has_work:
        running.step()
    (output,) = running.poll()
    assert len(looked) == len(output.logprobs)


def test_who_proposed_a_token_is_worked_out_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def noted(num_tokens: int, *given: Any) -> Any:
        asked.append(num_tokens)
        return provenance(num_tokens, *given)

    monkeypatch.setattr("polydraft.output.request_output.provenance", noted)
    running, outputs = started(), list[Any]()
    while running.has_work:
        running.step()
        outputs += running.poll()
    assert len(outputs) > len(ASKS)
    assert not asked
    assert len(outputs[-1].tokens) == len(outputs[-1].token_ids)
    assert asked == [len(outputs[-1].token_ids)]


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


@pytest.mark.parametrize("position", [0, -1, 3, 1 << 20])
def test_a_position_that_no_prompt_has_ends_its_request(position: int) -> None:
    def lies(a: Any, n: int) -> None:
        from polydraft.reference import logprobs

        logprobs.pack_logprobs(a, n)
        if a.drafts is None:
            a.record[HEADER_WORDS + LogprobEntry.EXTRA] = np.int32(position)

    running = engine(MODEL, draft_tokens=2, logprobs=2, plugin=backend_with(pack_logprobs=lies))
    running.add((5, 9, 33), replace(LONG, logprobs=None, prompt_logprobs=1))
    outputs = []
    while running.has_work:
        running.step()
        outputs += running.poll()
    (output,) = outputs
    assert output.finish_reason == "error"
    assert "of a prompt, wanted 1 to 2" in output.error


@pytest.mark.parametrize("streaming", [True, False])
def test_rounds_that_lie_end_their_request(streaming: bool) -> None:
    """A snapshot that says of its rounds what they cannot have been, in words that each could be."""

    def lies(a: Any, n: int) -> None:
        from polydraft.reference import state_kernels

        state_kernels.snapshot_output(a, n)
        accepted = a.record[:n, Snapshot.ACCEPTED]
        accepted[accepted > 0] -= 1

    running = engine(MODEL, draft_tokens=2, max_num_seqs=1, plugin=backend_with(snapshot_output=lies))
    running.add((5, 9), replace(LONG, logprobs=None), stream=streaming)
    outputs = []
    while running.has_work:
        running.step()
        outputs += running.poll()
    (output,) = (o for o in outputs if o.finished)
    assert output.finish_reason == "error"
    assert output.error.startswith("rounds that bring ")
