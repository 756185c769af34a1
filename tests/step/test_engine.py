"""The engine as its clients see it: requests in, records out, ends of every kind, on every kind of device.

What a request must give is taken from the same request served alone (`runs.solo`), cut by hand where a test ends it early.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft import LLM, Engine, EngineConfig, RequestOutput, SamplingParams
from polydraft.errors import CapabilityError, ConfigError, DeviceError, RequestError
from polydraft.host.request import Status
from polydraft.instruments.base import Instrument
from polydraft.program.points import Stage
from polydraft.sampling_params import MAX_STOP_TOKENS
from tests.support import runs, tiny
from tests.support.depth import crossed
from tests.support.meddling import byte_checkpoint
from tests.support.runs import Ask, drive, essence, solo

MODEL, K = "shared", 3
PROMPTS = tuple(tuple(range(1 + i, 2 + i + 2 * (i % 5))) for i in range(11))
"""Eleven different prompts of 1 to 9 tokens."""
FREE = SamplingParams(max_new_tokens=24, ignore_eos=True)


@pytest.fixture(params=runs.DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(device: str = "reference", **options: Any) -> Engine:
    return runs.engine(MODEL, device=device, **{"max_num_seqs": 4, "draft_tokens": K, **options})


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 24, "ignore_eos": True, **values})


def alone(prompt: tuple[int, ...], own: SamplingParams = FREE) -> RequestOutput:
    return solo(MODEL, K, prompt, own)


def rounds_of(output: RequestOutput, num_tokens: int) -> tuple[int, ...]:
    """The rounds of the first `num_tokens` tokens: which round each token came from, counted token by token."""
    made_by = [-1]  # the prefill
    is_draft = [False]
    for index, accepted in enumerate(output.rounds):
        made_by += [index] * (accepted + 1)
        is_draft += [True] * accepted + [False]
    kept = list(zip(made_by, is_draft, strict=True))[:num_tokens]
    return tuple(sum(draft for made, draft in kept if made == index) for index in range(kept[-1][0] + 1))


# -- many requests -------------------------------------------------------------------------------------
def test_more_requests_than_slots(device: str):
    asks = [Ask(prompt, params(max_new_tokens=8 + 2 * i)) for i, prompt in enumerate(PROMPTS)]
    engine = make(device)
    for ask, output in zip(asks, drive(engine, asks), strict=True):
        assert output.prompt_ids == ask.prompt_ids
        assert essence(output) == essence(alone(ask.prompt_ids, ask.params))


def test_totals_are_the_sums_of_the_requests(device: str):
    stops = {i: alone(prompt).text[9 + i : 14 + i] for i, prompt in enumerate(PROMPTS)}
    engine = make(device)
    outputs = drive(engine, [Ask(prompt, params(stop=stops[i] if i % 2 else ())) for i, prompt in enumerate(PROMPTS)])
    totals, rounds = engine.totals, [accepted for output in outputs for accepted in output.rounds]
    assert any(output.finish_reason == "stop" for output in outputs)
    assert totals.new_tokens == sum(len(output.token_ids) for output in outputs)
    assert (totals.rounds, totals.accepted) == (len(rounds), sum(rounds))
    assert totals.drafted == sum(totals.drafted_at) == sum(output.drafted for output in outputs)
    assert totals.accepted_at == [sum(accepted > place for accepted in rounds) for place in range(K)]


def test_a_request_has_times():
    (output,) = drive(make(), [Ask(PROMPTS[3])])
    assert output.ttft_s is not None
    assert output.latency_s is not None
    assert 0 < output.ttft_s < output.latency_s


def test_the_time_of_a_single_token_is_both_times():
    (output,) = drive(make(), [Ask(PROMPTS[3], params(max_new_tokens=1))])
    assert output.ttft_s == output.latency_s is not None


# -- ends ----------------------------------------------------------------------------------------------
def test_one_new_token(device: str):
    first = alone(PROMPTS[2]).token_ids[:1]
    (output,) = drive(make(device), [Ask(PROMPTS[2], params(max_new_tokens=1))])
    assert (output.token_ids, output.rounds, output.drafted, output.finish_reason) == (first, (), 0, "length")


def eventful() -> RequestOutput:
    """A text with a full window and a rejected one."""
    return next(alone(prompt) for prompt in PROMPTS if {0, K} <= set(alone(prompt).rounds))


def test_stop_tokens_anywhere(device: str):
    """Every token of a text as the stop token: the prefill's, accepted drafts, and the target's own."""
    free = eventful()
    ends = sorted({free.token_ids.index(token) + 1 for token in free.token_ids})
    assert ends[0] == 1
    drafts = [sum(rounds_of(free, end)) - sum(rounds_of(free, end - 1)) for end in ends[1:]]
    assert set(drafts) == {0, 1}  # some end at a draft, some at a token of the target's own
    asks = [Ask(free.prompt_ids, params(stop_token_ids=(free.token_ids[end - 1],))) for end in ends]
    for end, output in zip(ends, drive(make(device), asks), strict=True):
        assert (output.token_ids, output.finish_reason) == (free.token_ids[:end], "stop")
        assert output.rounds == rounds_of(free, end)


def stopped(free: RequestOutput, stops: tuple[str, ...], tokenizer: Any) -> dict[str, Any]:
    """What stop strings leave of a text whose tokens decode one by one: naive, over whole texts."""
    for end in range(1, len(free.token_ids) + 1):
        text = tokenizer.decode(free.token_ids[:end])
        places = [text.find(stop) for stop in stops if stop in text]
        if places:
            cut = {"token_ids": free.token_ids[:end], "text": text[: min(places)], "rounds": rounds_of(free, end)}
            return {**cut, "finish_reason": "stop"}
    return {name: getattr(free, name) for name in ("token_ids", "text", "rounds", "finish_reason")}


def test_stop_strings_anywhere(device: str):
    """Stop strings cut from the texts themselves, across tokens and windows, alone and in pairs, and some that never come."""
    engine, asks, wanted = make(device), [], []
    for i, prompt in enumerate(PROMPTS):
        text = alone(prompt).text
        word = text.split()[5]
        for stops in (
            (text[2 + i : 9 + i],),
            (text[20 + i : 23 + i], text[22 + i : 33 + i]),
            (word[1:], word),  # both end with the same token
            (text[-4:],),
            (f"{text[8:14]}~",),
        ):
            asks.append(Ask(prompt, params(stop=stops)))
            wanted.append(stopped(alone(prompt), stops, engine.tokenizer))
    assert {entry["finish_reason"] for entry in wanted} == {"stop", "length"}
    for output, entry in zip(drive(engine, asks), wanted, strict=True):
        assert {name: getattr(output, name) for name in entry} == entry


def test_a_stop_string_beats_a_stop_token_behind_it_in_the_same_window(device: str):
    """One window brings both; without drafts the stop token had not come any more."""
    asks, wanted, tokenizer = [], [], make().tokenizer
    for free in map(alone, PROMPTS):
        begin = 1
        for accepted in free.rounds:
            word, token = tokenizer.decode(free.token_ids[begin : begin + 1]), free.token_ids[min(begin + 2, 23)]
            if (
                accepted == K
                and word not in tokenizer.decode(free.token_ids[:begin])
                and token not in free.token_ids[: begin + 2]
            ):
                asks.append(Ask(free.prompt_ids, params(stop=word, stop_token_ids=(token,))))
                wanted.append(stopped(free, (word,), tokenizer))
            begin += accepted + 1
    assert asks
    for output, entry in zip(drive(make(device), asks), wanted, strict=True):
        assert {name: getattr(output, name) for name in entry} == entry


def test_the_end_of_text_is_a_token_but_no_text():
    prompt = next(p for p in PROMPTS if 0 in alone(p).token_ids)
    free = alone(prompt)
    end = free.token_ids.index(0) + 1
    (output,) = drive(make(), [Ask(prompt, SamplingParams(max_new_tokens=24))])
    assert (output.token_ids, output.finish_reason) == (free.token_ids[:end], "stop")
    assert output.text == make().tokenizer.decode(free.token_ids[: end - 1])


def test_a_model_with_more_ends_than_a_request_may_name(device: str, tmp_path: Path):
    """Each of them ends a text, beside as many stop tokens as one may name."""
    free = eventful()
    unseen = sorted({*range(runs.engine(MODEL).model.vocab_size)} - {*free.token_ids})
    of_model, of_request = unseen[:30], tuple(unseen[-MAX_STOP_TOKENS:])
    last = free.token_ids[5]
    assert not {*of_model} & {*of_request}
    directory = Path(shutil.copytree(tiny.checkpoint(MODEL), tmp_path / "many"))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [*of_model, last]}))
    options: dict[str, Any] = {"model": str(directory), "plugins": tiny.PLUGINS, "max_num_seqs": 4, "draft_tokens": K}
    many = runs.engine(device=device, **options)
    assert len(many.model.eos_token_ids) > MAX_STOP_TOKENS
    own = SamplingParams(max_new_tokens=24, stop_token_ids=of_request)
    end = free.token_ids.index(last) + 1
    for output in drive(many, [Ask(free.prompt_ids, own), Ask(free.prompt_ids, replace(own, stop_token_ids=()))]):
        assert (output.token_ids, output.finish_reason) == (free.token_ids[:end], "stop")


# -- aborts --------------------------------------------------------------------------------------------
def until(engine: Engine, request_id: str, status: Status, *, tokens: int = 0) -> None:
    """Step until the request has that status and at least so many tokens."""
    request = engine.requests[request_id]
    for _ in range(100):
        known = engine.slots.num_known[request.slot] - len(request.prompt_ids) if request.slot >= 0 else 0
        if request.status is status and known >= tokens:
            return
        engine.step()
    raise AssertionError(f"{request_id} is {request.status} after 100 steps")


def rest(engine: Engine) -> dict[str, RequestOutput]:
    """Run what is left; last records by id."""
    done: dict[str, RequestOutput] = {}
    for _ in range(500):
        engine.step()
        done |= {output.id: output for output in engine.poll() if output.finished}
        if not engine.requests:
            runs.come_to_rest(engine)
            return done
    raise AssertionError("the engine does not come to rest")


def test_abort_while_waiting(device: str):
    engine = make(device, max_num_seqs=1)
    first, second, third = (engine.add(prompt, FREE) for prompt in PROMPTS[:3])
    until(engine, first, Status.RUNNING, tokens=2)
    engine.abort(second)
    done = rest(engine)
    assert (done[second].token_ids, done[second].text, done[second].finish_reason) == ((), "", "abort")
    assert done[second].prompt_ids == PROMPTS[1]
    assert essence(done[first]) == essence(alone(PROMPTS[0]))
    assert essence(done[third]) == essence(alone(PROMPTS[2]))


def test_abort_in_prefill(device: str):
    long = tuple(range(1, 60))
    engine = make(device, max_batched_tokens=16)
    victim, other = engine.add(long, FREE), engine.add(PROMPTS[1], FREE)
    engine.step()
    assert engine.slots.prefill_planned[engine.requests[victim].slot] < len(long)
    engine.abort(victim)
    done = rest(engine)
    assert (done[victim].token_ids, done[victim].finish_reason) == ((), "abort")
    assert essence(done[other]) == essence(alone(PROMPTS[1]))


@pytest.mark.parametrize("tokens", [1, 6])
def test_abort_in_decode_keeps_what_was_produced(device: str, tokens: int):
    engine = make(device)
    victim, other = engine.add(PROMPTS[4], FREE), engine.add(PROMPTS[1], FREE)
    until(engine, victim, Status.RUNNING, tokens=tokens)
    engine.abort(victim)
    engine.abort(victim)  # once more changes nothing
    done = rest(engine)
    aborted, free = done[victim], alone(PROMPTS[4])
    num = len(aborted.token_ids)
    assert tokens <= num < len(free.token_ids)
    assert aborted.finish_reason == "abort"
    assert aborted.token_ids == free.token_ids[:num]
    assert aborted.text == engine.tokenizer.decode(free.token_ids[:num])
    assert aborted.rounds == rounds_of(free, num)
    assert essence(done[other]) == essence(alone(PROMPTS[1]))


def test_an_aborted_slot_serves_the_next_request(device: str):
    engine = make(device, max_num_seqs=1)
    victim = engine.add(PROMPTS[4], FREE)
    until(engine, victim, Status.RUNNING, tokens=3)
    engine.abort(victim)
    following = engine.add(PROMPTS[5], FREE)
    assert essence(rest(engine)[following]) == essence(alone(PROMPTS[5]))


def test_abort_of_a_request_that_has_ended():
    engine = make()
    request_id = engine.add(PROMPTS[0], params(max_new_tokens=1))
    engine.step()
    engine.abort(request_id)  # it has ended and waits to be polled
    (output,) = engine.poll()
    assert output.finish_reason == "length"
    with pytest.raises(RequestError, match=r"no request 'request-0'.*polled"):
        engine.abort(request_id)
    with pytest.raises(RequestError, match="no request 'nobody'"):
        engine.abort("nobody")


# -- records -------------------------------------------------------------------------------------------
def test_poll_tells_everything_once(device: str):
    engine = make(device)
    streaming, quiet = engine.add(PROMPTS[4], FREE, stream=True), engine.add(PROMPTS[5], FREE)
    records: dict[str, list[RequestOutput]] = {streaming: [], quiet: []}
    while engine.requests:
        engine.step()
        for output in engine.poll():
            records[output.id].append(output)
        assert engine.poll() == []
    runs.come_to_rest(engine)
    assert essence(records[quiet][0]) == essence(alone(PROMPTS[5]))
    assert [output.finished for output in records[quiet]] == [True]
    news = records[streaming]
    assert len(news) > 3
    assert [output.finished for output in news] == [False] * (len(news) - 1) + [True]
    assert essence(news[-1]) == essence(alone(PROMPTS[4]))
    assert "".join(output.text_delta for output in news) == news[-1].text
    assert sum((output.new_token_ids for output in news), ()) == news[-1].token_ids
    assert sum((output.new_rounds for output in news), ()) == news[-1].rounds
    for output in news:
        assert len(output.token_ids) == len(output.rounds) + sum(output.rounds) + 1


@pytest.mark.parametrize("stop", [(), ("ü",), ("\ufffd\ufffda",)])
def test_invalid_utf8_is_streamed_as_whole_characters(tmp_path: Path, stop: tuple[str, ...]):
    """Most bytes of this model form no character; a piece never ends inside one that does, and nothing is taken back."""
    engine = LLM(model=str(byte_checkpoint(tmp_path / "bytes")), backend="reference", draft_tokens=K, invariant=True).engine
    ids = {engine.add([1, 2, 3 + i], params(max_new_tokens=32, stop=stop), stream=True): "" for i in range(8)}
    finals = {}
    while engine.requests:
        engine.step()
        for output in engine.poll():
            ids[output.id] += output.text_delta
            assert ids[output.id] == output.text
            finals[output.id] = output
    runs.come_to_rest(engine)
    texts = [output.text for output in finals.values()]
    whole = [engine.tokenizer.decode(output.token_ids) for output in finals.values()]
    assert any("ü" in text for text in whole)
    assert any("\u2600" <= character for text in whole for character in text if character != "\ufffd")  # 3 bytes or more
    if not stop:
        assert texts == whole
        assert any(text.endswith("\ufffd") for text in texts)  # also what stays unfinished at the very end
    else:
        assert texts == [text.partition(stop[0])[0] for text in whole]
        assert "stop" in {output.finish_reason for output in finals.values()}


# -- ids -----------------------------------------------------------------------------------------------
def test_ids_of_the_engine_avoid_those_of_callers():
    engine = make()
    assert engine.add(PROMPTS[0], FREE, id="request-1") == "request-1"
    ids = [engine.add(PROMPTS[0], FREE) for _ in range(3)]
    assert len({"request-1", *ids}) == 4
    assert len(rest(engine)) == 4


# -- LLM -----------------------------------------------------------------------------------------------
def llm(**options: Any) -> LLM:
    """An `LLM` around an engine as above."""
    client = LLM.__new__(LLM)
    client._serve_from(make(**options))
    return client


def interrupt_at(client: LLM, step: int, monkeypatch: pytest.MonkeyPatch, *, presses: int = 1) -> None:
    """Press Ctrl-C in the middle of a step: between planning it and noting that it is in flight."""
    launch, calls = client.engine.runner.launch, iter(range(10_000))

    def pressed(plan: Any) -> Any:
        if next(calls) == step:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
        return launch(plan)

    monkeypatch.setattr(client.engine.runner, "launch", pressed)


@pytest.mark.parametrize("step", [0, 3])
def test_ctrl_c_ends_requests_with_what_they_have_and_the_engine_lives_on(
    device: str, step: int, monkeypatch: pytest.MonkeyPatch
):
    client = llm(device=device)
    interrupt_at(client, step, monkeypatch)
    outputs = client.generate(PROMPTS, FREE)
    assert [output.finish_reason for output in outputs] == ["abort"] * len(PROMPTS)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == alone(prompt).token_ids[: len(output.token_ids)]
    assert any(output.token_ids for output in outputs) == (step > 0 or client.engine.resolved.overlap == 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    runs.come_to_rest(client.engine)
    assert [essence(output) for output in client.generate(PROMPTS[:3], FREE)] == [essence(alone(p)) for p in PROMPTS[:3]]


@pytest.mark.parametrize("place", ["launch", "collect", "apply"])
def test_a_second_ctrl_c_breaks_the_step_off_and_the_engine_lives_on(device: str, place: str, monkeypatch: pytest.MonkeyPatch):
    """What was planned, launched and applied by then does not agree: nothing of it is used."""
    client = llm(device=device)
    owner: Any = client.engine if place == "apply" else client.engine.runner
    function, calls = getattr(owner, place), iter(range(10_000))

    def pressed_twice(*given: Any) -> Any:
        result = function(*given) if place != "launch" else None
        if next(calls) == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return function(*given) if place == "launch" else result

    monkeypatch.setattr(owner, place, pressed_twice)
    outputs = client.generate(PROMPTS, FREE)
    assert [output.finish_reason for output in outputs] == ["abort"] * len(PROMPTS)
    assert any(output.token_ids for output in outputs)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == alone(prompt).token_ids[: len(output.token_ids)]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    runs.come_to_rest(client.engine)
    assert [essence(output) for output in client.generate(PROMPTS[:3], FREE)] == [essence(alone(p)) for p in PROMPTS[:3]]


def test_a_third_ctrl_c_does_not_wait_for_the_device(device: str, monkeypatch: pytest.MonkeyPatch):
    """It may be why the step took so long."""
    client = llm(device=device)

    def stuck() -> None:
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        interrupt_at(client, 3, patched, presses=2)
        patched.setattr(client.engine.device, "synchronize", stuck)
        outputs = client.generate(PROMPTS, FREE)
    assert {output.finish_reason for output in outputs[:2]} == {"abort"}
    assert {output.error for output in outputs if output.finish_reason == "error"} == {client.engine.failure}
    assert not client.engine.requests
    with pytest.raises(DeviceError, match="the wait for the device was interrupted"):
        client.generate(PROMPTS[0], FREE)
    client.close()


def test_somebody_elses_interrupt_handler_stays(monkeypatch: pytest.MonkeyPatch):
    client, seen = llm(), []
    interrupt_at(client, 2, monkeypatch)
    previous = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        outputs = client.generate(PROMPTS[:2], FREE)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert seen == [1]
    assert [output.finish_reason for output in outputs] == ["length"] * 2


def test_a_stream_that_nobody_reads_on_leaves_nothing_behind(device: str):
    client = llm(device=device)
    stream = client.stream(PROMPTS[:6], FREE)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    runs.come_to_rest(client.engine)


def ended(steps: int, monkeypatch: pytest.MonkeyPatch, client: LLM) -> None:
    """A call that waits for what never comes fails after so many steps."""
    step, left = client.engine.step, iter(range(steps))
    monkeypatch.setattr(client.engine, "step", lambda: (next(left), step())[1])


@pytest.mark.parametrize("inner", [1, 8, 60], ids=lambda n: f"{n} tokens within")
def test_calls_within_a_stream_take_none_of_its_text(device: str, inner: int, monkeypatch: pytest.MonkeyPatch):
    """Whichever of the two ends first: the inner call polls the outputs of both."""
    client, own, texts = llm(device=device), params(max_new_tokens=inner, ignore_eos=True), []
    ended(400, monkeypatch, client)
    pieces = []
    for piece in client.stream(PROMPTS[0], FREE):
        pieces.append(piece)
        if len(pieces) in (1, 3):
            texts.append(client.generate(PROMPTS[1], own)[0].token_ids)
            with pytest.raises(RequestError, match="the prompt is empty"):
                client.generate([PROMPTS[0], []], FREE)
            next(client.stream(PROMPTS[2], FREE))  # nobody reads on
    tokens = tuple(token for piece in pieces for token in piece.new_token_ids)
    assert tokens == pieces[-1].token_ids == solo(MODEL, K, PROMPTS[0], FREE).token_ids
    assert {piece.id for piece in pieces} == {pieces[0].id}
    assert texts == [solo(MODEL, K, PROMPTS[1], own).token_ids] * len(texts)
    assert texts
    runs.come_to_rest(client.engine)


def test_streams_may_be_read_in_turn(device: str, monkeypatch: pytest.MonkeyPatch):
    client = llm(device=device)
    ended(400, monkeypatch, client)
    found: dict[str, list[int]] = {}
    streams = [client.stream(prompt, FREE) for prompt in PROMPTS[:3]]
    for pieces in itertools.zip_longest(*streams):
        for piece in filter(None, pieces):
            found.setdefault(piece.id, []).extend(piece.new_token_ids)
    assert [tuple(tokens) for tokens in found.values()] == [solo(MODEL, K, prompt, FREE).token_ids for prompt in PROMPTS[:3]]
    runs.come_to_rest(client.engine)


@pytest.mark.parametrize("calls", ["generate", "stream"])
def test_threads_are_served_beside_each_other(device: str, calls: str):
    """None of them waits for the end of another, and each has the texts of its own prompts."""
    client, found, met = llm(device=device), dict[int, tuple[int, ...]](), threading.Barrier(3)

    def call(place: int) -> None:
        met.wait()
        for _ in range(3):
            given = PROMPTS[place]
            outputs = client.generate(given, FREE) if calls == "generate" else list(client.stream(given, FREE))
            assert len({output.id for output in outputs}) == 1
            found[place] = outputs[-1].token_ids
            with pytest.raises(RequestError, match="the prompt is empty"):
                client.generate([PROMPTS[0], []], FREE)

    threads = [threading.Thread(target=call, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {place: solo(MODEL, K, PROMPTS[place], FREE).token_ids for place in range(3)}
    runs.come_to_rest(client.engine)


def test_a_thread_that_takes_steps_lets_others_in():
    """A lock alone goes to whoever has just let it go, time after time."""
    client, few = llm(), replace(FREE, max_new_tokens=2)
    stream = client.stream(PROMPTS[0], replace(FREE, max_new_tokens=40))
    next(stream)
    other = threading.Thread(target=client.generate, args=(PROMPTS[1], few))
    with client._in_turn():
        other.start()
        while not client._next.locked():  # until it waits
            time.sleep(0.001)
    assert sum(not other.is_alive() for _ in stream) > 1, "it has ended before the stream"
    runs.come_to_rest(client.engine)


def test_one_bad_prompt_runs_none():
    client = llm()
    with pytest.raises(RequestError, match="the prompt is empty"):
        client.generate([PROMPTS[0], []], FREE)
    runs.come_to_rest(client.engine)
    assert client.engine.totals.steps == 0


def test_a_call_that_breaks_off_while_it_adds_leaves_no_request(monkeypatch: pytest.MonkeyPatch):
    """Neither Ctrl-C while prompts become tokens, nor what is no fault of a request."""
    for error in (KeyboardInterrupt, CapabilityError):
        client, added = llm(), list[str]()
        add = client.engine.add

        def add_some(*given: Any, add: Any = add, added: Any = added, error: Any = error, **more: Any) -> str:
            added.append(add(*given, **more))
            if len(added) == 3:
                raise error("in the middle")
            return str(added[-1])

        stream = client.stream(PROMPTS[3], FREE)
        first = next(stream)
        with monkeypatch.context() as patched:
            patched.setattr(client.engine, "add", add_some)
            with pytest.raises(error):
                client.generate(PROMPTS[:4], FREE)
        assert set(client.engine.requests) == {first.id}
        assert {piece.id for piece in stream} == {first.id}
        runs.come_to_rest(client.engine)


def test_what_another_call_has_brought_is_not_lost_where_one_is_interrupted():
    """Such as the end of a text, which an interrupt meets before it was handed on."""
    client, mine = llm(), deque[RequestOutput]()
    ids = client._add_all([list(prompt) for prompt in PROMPTS[:2]], FREE, mine, stream=False)
    while client.engine.has_work:
        client.engine.step()
    client._poll(deque())
    assert sorted(output.id for output in client._interrupt(set(ids), mine)) == ids


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, GeneratorExit])
def test_what_progress_raises_is_passed_on_and_ends_every_request(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Also where somebody holds what hands the results on, as a debugger may, and nothing ends with the last reference to it."""
    client, kept, run = llm(), list[Any](), LLM._run

    def keeping(self: LLM, *given: Any) -> Any:
        kept.append(run(self, *given))
        return kept[-1]

    monkeypatch.setattr(LLM, "_run", keeping)

    def progress(done: int, total: int) -> None:
        raise error(f"{done} of {total}")

    with pytest.raises(error, match="1 of 3"):
        client.generate(PROMPTS[:3], [params(max_new_tokens=n) for n in (2, 30, 40)], progress=progress)
    assert not client.engine.requests
    assert not client._calls
    runs.come_to_rest(client.engine)
    assert [len(output.token_ids) for output in client.generate(PROMPTS[:2], params(max_new_tokens=4))] == [4, 4]


def test_parameters_go_to_their_prompts():
    client, seen = llm(), []
    own = [params(max_new_tokens=n) for n in (3, 1, 5)]
    outputs = client.generate(PROMPTS[:3], own, progress=lambda done, total: seen.append((done, total)))
    assert [len(output.token_ids) for output in outputs] == [3, 1, 5]
    assert seen == [(1, 3), (2, 3), (3, 3)]
    with pytest.raises(RequestError, match="2 sampling parameters for 3 prompts"):
        client.generate(PROMPTS[:3], own[:2])


@pytest.mark.parametrize(
    ("prompts", "own", "said"),
    [
        (None, None, "prompts are NoneType, wanted a text, a list of token ids, or a list of either"),
        (5, None, "prompts are int"),
        (np.array(5), None, "prompts are ndarray"),
        ({"prompt": "w1"}, None, "prompts are dict"),
        (["w1"], {"max_new_tokens": 2}, "are {'max_new_tokens': 2}, wanted SamplingParams"),
        (["w1"], {}, "are {}, wanted SamplingParams"),
        (["w1"], [{"max_new_tokens": 2}], "wanted SamplingParams"),
    ],
)
def test_calls_of_another_kind_are_refused(prompts: Any, own: Any, said: str):
    client = llm()
    with pytest.raises(RequestError, match=re.escape(said)):
        client.generate(prompts, own)
    assert not client.engine.requests


def test_ids_may_be_an_array():
    ids: Any = np.array(PROMPTS[0])
    assert llm().generate(ids, params())[0].prompt_ids == tuple(PROMPTS[0])


def test_a_closed_llm_says_so():
    with llm() as client:
        assert client.generate(PROMPTS[0], params(max_new_tokens=1))[0].finish_reason == "length"
    client.close()
    with pytest.raises(DeviceError, match="this engine is closed, wanted an open one; make a new one"):
        client.generate(PROMPTS[0])


@pytest.mark.parametrize(
    ("arguments", "options"), [((EngineConfig(),), {"draft_tokens": 2}), (("a/model",), {})], ids=["both", "path"]
)
def test_llm_takes_a_config_or_options(arguments: tuple[Any, ...], options: dict[str, Any]):
    with pytest.raises(ConfigError, match="wanted an EngineConfig or keyword options"):
        LLM(*arguments, **options)


# -- errors in the middle of a step --------------------------------------------------------------------
class Broken(Instrument):
    """Raises once, at the beginning or the end of a stage."""

    name = "broken"

    def __init__(self, stage: Stage, place: str) -> None:
        super().__init__()
        self._place, self._left = place, 4
        self.stages = (stage,)  # type: ignore[misc]

    def _count(self, place: str) -> None:
        self._left -= place == self._place
        if place == self._place and not self._left:
            raise ValueError("a bug of the instrument")

    def begin(self, stage: Stage, subject: Any) -> None:
        self._count("begin")

    def end(self, stage: Stage, subject: Any, result: Any) -> None:
        self._count("end")


@pytest.mark.parametrize(
    ("stage", "place", "device"),
    crossed(4, ["step", "plan", "launch", "upload", "collect", "wait", "commit"], ["begin", "end"], runs.DEVICES),
    indirect=["device"],
)
def test_an_error_in_the_middle_of_a_step_ends_its_requests_and_not_the_engine(device: str, stage: Stage, place: str):
    """It is raised as it is; whatever the step had done by then, no slot is held and none waits for blocks that never come."""
    engine = make(device, max_num_seqs=2, instruments=(Broken(stage, place),))
    with pytest.raises(ValueError, match="a bug of the instrument"):
        drive(engine, [Ask(prompt, FREE) for prompt in PROMPTS[:3]])
    more = [Ask(prompt, FREE, arrival=3 * i) for i, prompt in enumerate(PROMPTS[3:7])]
    running = {output.id: output for output in engine.poll()}
    assert sorted(running) == ["ask-0", "ask-1"]
    for output, prompt in zip(running.values(), PROMPTS, strict=False):
        assert output.error == "a step failed: ValueError: a bug of the instrument"
        assert output.token_ids == alone(prompt).token_ids[: len(output.token_ids)]
    engine.abort("ask-2")
    engine.poll()
    assert [essence(output) for output in drive(engine, more)] == [essence(alone(ask.prompt_ids)) for ask in more]
