"""The official client against a started server: completions, chat, streams, log probabilities, errors, cancellation.

Every text is the one that the offline interface gives for the same seed, on row-invariant arithmetic.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
from typing import Any

import pytest

openai = pytest.importorskip("openai")

from polydraft import LLM, RequestOutput, SamplingParams  # noqa: E402  behind the check for the client
from tests.serving.conftest import MODEL, Served  # noqa: E402
from tests.support import tiny  # noqa: E402
from tests.support.letters import checkpoint as letters  # noqa: E402

PROMPT = "w5 w9 w33"


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@functools.cache
def llm() -> LLM:
    return LLM(model=str(tiny.checkpoint(MODEL)), backend="reference", draft_tokens=3, invariant=True, logprobs=20)


@functools.cache
def offline(prompt: str = PROMPT, **params: Any) -> RequestOutput:
    return llm().generate(prompt, SamplingParams(**params))[0]


def complete(client: Any, **options: Any) -> Any:
    given = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **options}
    return client.completions.create(**given)


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError, match=f"'org/other' is not served here, wanted '{MODEL}'"):
        client.models.retrieve("org/other")


def test_a_completion_is_the_offline_text_and_counts_its_drafts(client: Any) -> None:
    answer, wanted = complete(client), offline(max_new_tokens=12)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == wanted.text
    assert answer.choices[0].finish_reason == wanted.finish_reason
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, len(wanted.token_ids))
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == wanted.accepted
    assert details.rejected_prediction_tokens == wanted.drafted - wanted.accepted


def test_a_stream_is_the_same_text_in_pieces(client: Any) -> None:
    stream = complete(client, stream=True, stream_options={"include_usage": True}, max_tokens=20)
    events = list(stream)
    wanted = offline(max_new_tokens=20)
    assert "".join(e.choices[0].text for e in events if e.choices) == wanted.text
    assert [e.choices[0].finish_reason for e in events if e.choices][-1] == wanted.finish_reason
    assert len([e for e in events if e.choices]) > 3, "a stream comes in pieces"
    assert events[-1].usage.completion_tokens == len(wanted.token_ids)
    assert events[-1].usage.completion_tokens_details.accepted_prediction_tokens == wanted.accepted


def test_sampling_by_seed_and_several_choices(client: Any) -> None:
    answer = complete(client, n=3, temperature=0.9, seed=7, top_p=0.95)
    wanted = [offline(max_new_tokens=12, temperature=0.9, seed=7 + i, top_p=0.95).text for i in range(3)]
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == 3
    several = complete(client, prompt=[PROMPT, "w7 w1"], n=2, seed=3, temperature=0.8)
    assert len(several.choices) == 4
    assert several.choices[2].text == offline("w7 w1", max_new_tokens=12, temperature=0.8, seed=3).text
    assert several.usage.prompt_tokens == 5


def test_prompts_as_token_ids(client: Any) -> None:
    assert complete(client, prompt=[5, 9, 33]).choices[0].text == offline(max_new_tokens=12).text


def test_stop_texts(client: Any) -> None:
    whole = offline(max_new_tokens=20).text.split()
    answer = complete(client, stop=[whole[4]], max_tokens=20)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text.split() == whole[: whole.index(whole[4])]


def test_processing_reaches_the_engine(client: Any) -> None:
    wanted = offline(max_new_tokens=12, frequency_penalty=1.5, logit_bias=((4, -100),)).text
    assert complete(client, frequency_penalty=1.5, logit_bias={"4": -100}).choices[0].text == wanted


def test_completion_logprobs(client: Any) -> None:
    answer, wanted = complete(client, logprobs=3).choices[0].logprobs, offline(max_new_tokens=12, logprobs=3)
    assert answer.tokens == [f"w{t.token_id}" for t in wanted.tokens]
    assert answer.token_logprobs == pytest.approx([t.logprob for t in wanted.tokens])
    for got, token in zip(answer.top_logprobs, wanted.tokens, strict=True):
        likely = {f"w{t}": value for t, value in token.top}
        assert got == pytest.approx({f"w{token.token_id}": token.logprob, **likely})
        assert len(got) == (3 if f"w{token.token_id}" in likely else 4)


def test_echo_with_logprobs_tells_the_prompts_too(client: Any) -> None:
    choice = complete(client, logprobs=1, echo=True, max_tokens=2).choices[0]
    wanted = offline(max_new_tokens=2, logprobs=1, prompt_logprobs=1)
    assert wanted.prompt_logprobs is not None
    assert choice.text.startswith(PROMPT)
    assert choice.logprobs.tokens == ["w5", "w9", "w33", *(f"w{t}" for t in wanted.token_ids)]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:3] == pytest.approx([p.logprob for p in wanted.prompt_logprobs[1:] if p])


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"prompt": [PROMPT, "w7 " * 40]}], ids=["one", "two", "several prompts"])
def test_a_stream_tells_of_an_echo_what_a_whole_answer_does(client: Any, options: dict[str, Any]) -> None:
    ask = {"logprobs": 2, "echo": True, "max_tokens": 5, **options}
    whole = {choice.index: choice for choice in complete(client, **ask).choices}
    texts: dict[int, str] = dict.fromkeys(whole, "")
    columns: dict[int, dict[str, list[Any]]] = {index: {} for index in whole}
    for event in complete(client, **ask, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                for name, values in choice.logprobs.to_dict().items():
                    columns[choice.index].setdefault(name, []).extend(values)
    for index, choice in whole.items():
        assert texts[index] == choice.text
        assert columns[index] == choice.logprobs.to_dict()
        assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) >= 8


def test_offsets_are_places_of_the_text(client: Any) -> None:
    special = {"prompt": [5, 0, 9], "extra_body": {"skip_special_tokens": False}}
    for ask in ({"echo": True}, {"echo": False}, {"echo": True, **special}):
        choice = complete(client, logprobs=0, max_tokens=6, **ask).choices[0]
        assert ("<eos>" in choice.text) == ("extra_body" in ask)
        starts = choice.logprobs.text_offset
        pieces = [choice.text[begin:end].strip() for begin, end in zip(starts, [*starts[1:], None], strict=True)]
        assert pieces == choice.logprobs.tokens


def test_an_end_within_a_text_takes_no_place_of_it(client: Any) -> None:
    """Where special tokens are shown that of a prompt is, and one that was generated never."""
    shown = {"skip_special_tokens": False, "ignore_eos": True}
    ask = {"prompt": [5, 0, 9], "logit_bias": {"0": 10}, "frequency_penalty": 2, "extra_body": shown}
    choice = complete(client, logprobs=0, echo=True, max_tokens=8, **ask).choices[0]
    tokens, starts = choice.logprobs.tokens, choice.logprobs.text_offset
    assert "<eos>" in tokens[3:-1]
    assert choice.text.count("<eos>") == 1
    pieces = [choice.text[begin:end].strip() for begin, end in zip(starts, [*starts[1:], None], strict=True)]
    assert pieces == ["" if place > 2 and token == "<eos>" else token for place, token in enumerate(tokens)]


def chat(client: Any, **options: Any) -> Any:
    given: dict[str, Any] = {"model": MODEL, "max_tokens": 10, "temperature": 0, **options}
    return client.chat.completions.create(messages=[{"role": "user", "content": PROMPT}], **given)


def test_chat_whole_and_streamed(client: Any) -> None:
    wanted = offline(f"{PROMPT} ", max_new_tokens=10)
    answer = chat(client)
    assert answer.object == "chat.completion"
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", wanted.text)
    events = list(chat(client, stream=True, max_tokens=None, max_completion_tokens=10))
    assert events[0].object == "chat.completion.chunk"
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(e.choices[0].delta.content or "" for e in events) == wanted.text


def test_a_chat_with_what_the_client_may_send_is_the_same(client: Any) -> None:
    harmless: dict[str, Any] = {
        "service_tier": "auto",
        "store": False,
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "verbosity": "medium",
    }
    told: dict[str, Any] = {
        "user": "u",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "stream_options": {"include_obfuscation": False},
    }
    wanted = chat(client).choices[0].message.content
    chunks = list(chat(client, **harmless, **told, stream=True, extra_headers={"X-Request-Id": "mine"}))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == wanted
    assert {chunk.id for chunk in chunks} == {"chatcmpl-mine"}
    assert chat(client)._request_id
    with pytest.raises(openai.BadRequestError, match="wanted false") as refused:
        chat(client, store=True)
    assert refused.value.param == "store"
    assert refused.value.request_id


def test_a_chat_may_name_its_length_twice_but_not_two_lengths(client: Any) -> None:
    assert chat(client, max_tokens=3, max_completion_tokens=3).usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError, match="is 3 and max_completion_tokens is 4, wanted one length"):
        chat(client, max_tokens=3, max_completion_tokens=4)


def test_an_answer_that_called_tools_needs_no_content(client: Any) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]}
    answer = client.chat.completions.create(model=MODEL, messages=[called, {"role": "user", "content": "w1"}], max_tokens=2)
    assert answer.choices[0].finish_reason


def test_chat_logprobs(client: Any) -> None:
    content = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    wanted = offline(f"{PROMPT} ", max_new_tokens=10, logprobs=2).tokens
    assert [c.token for c in content] == [f"w{t.token_id}" for t in wanted]
    assert [c.logprob for c in content] == pytest.approx([t.logprob for t in wanted])
    assert [[top.token for top in c.top_logprobs] for c in content] == [[f"w{t}" for t, _ in w.top] for w in wanted]
    assert bytes(content[0].bytes).decode() == content[0].token


NAMES = ("max_drafts", "num_speculative_tokens")
"""Of a request's limit of drafts."""


@pytest.mark.parametrize("names", [NAMES[:1], NAMES[1:], NAMES], ids=" and ".join)
def test_a_request_may_do_without_drafts(client: Any, names: tuple[str, ...]) -> None:
    """The text is the same, and it says that none were verified."""
    plain = complete(client, max_tokens=20, extra_body={**dict.fromkeys(names, 0), "provenance": True})
    assert plain.choices[0].text == offline(max_new_tokens=20).text
    details = plain.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    assert {token["source"] for token in plain.choices[0].provenance} == {"target"}


def test_two_limits_of_drafts_are_one_error(client: Any) -> None:
    said = "max_drafts is 0 and num_speculative_tokens is 2, two names of one limit, wanted one number; leave out one of them"
    for ask in (complete, chat):
        with pytest.raises(openai.BadRequestError, match=said):
            ask(client, extra_body={"max_drafts": 0, "num_speculative_tokens": 2})


def test_a_stream_with_provenance_tells_what_went_on_where(client: Any) -> None:
    events = list(complete(client, stream=True, max_tokens=20, extra_body={"provenance": True}))
    spans = [span for event in events for span in event.choices[0].timing["spans"]]
    assert {side for side, *_ in spans} == {"host", "device"}
    assert {"plan", "commit"} <= {name for side, name, *_ in spans if side == "host"}
    steps = [(name, start, ms) for side, name, start, ms in spans if side == "device"]
    assert len(steps) >= len(events) - 1
    for (name, start, ms), (other, after, _) in itertools.pairwise(steps):
        assert name != other
        assert start + ms <= after + 0.01, "a synchronous device does one step after the other"
    assert "synchronous" in events[0].choices[0].timing["device_times"]


@pytest.mark.parametrize("streaming", [False, True])
def test_provenance_is_an_extra_that_is_asked_for(client: Any, streaming: bool) -> None:
    wanted = offline(max_new_tokens=12, logprobs=0).tokens
    answer = complete(client, extra_body={"provenance": True}, stream=streaming)
    events = list(answer) if streaming else [answer]
    told = [token for event in events for token in event.choices[0].provenance]
    assert [(t["token_id"], t["source"]) for t in told] == [(t.token_id, t.source) for t in wanted]
    assert [t["draft_position"] or 0 for t in told] == [t.draft_position for t in wanted]
    assert not hasattr(complete(client).choices[0], "provenance")


def test_a_client_that_goes_away_ends_its_text(client: Any, server: Served) -> None:
    stream = complete(client, stream=True, max_tokens=80, extra_body={"ignore_eos": True}, prompt="w2")
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 10
    while (server.get("/health")["requests"] or server.get("/stats")["running"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.get("/health")["requests"] == 0
    assert server.get("/stats")["running"] == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "other"}, "NotFoundError", "model 'other' is not served here"),
        ({"temperature": -1}, "BadRequestError", "temperature is -1"),
        ({"max_tokens": 0}, "BadRequestError", "max_tokens"),
        ({"extra_body": {"max_token": 3}}, "BadRequestError", "did you mean 'max_tokens'"),
        ({"best_of": 4}, "BadRequestError", "best_of is 4"),
        ({"prompt": []}, "BadRequestError", "empty list"),
        ({"prompt": [[1, 2], "x"]}, "BadRequestError", "neither texts nor token ids"),
        ({"prompt": [64]}, "BadRequestError", "wanted an id from 0 to 63"),
        ({"prompt": "w1 " * 96}, "BadRequestError", "wanted fewer than 96"),
        ({"logprobs": 21}, "BadRequestError", "wanted at most 20"),
        ({"n": 65}, "BadRequestError", "wanted at most 64"),
    ],
)
def test_errors_are_the_clients_and_say_what_to_do(client: Any, options: Any, error: str, message: str) -> None:
    with pytest.raises(getattr(openai, error)) as raised:
        complete(client, **options)
    assert message in raised.value.body["message"]


def test_metrics_have_vllms_names_and_count(client: Any, server: Served) -> None:
    import urllib.request

    complete(client)
    complete(client, extra_body={"max_drafts": 0})
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    values = {line.rpartition(" ")[0].partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if line[:1] != "#"}
    for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total", "vllm:request_success_total", "vllm:time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_count", "vllm:e2e_request_latency_seconds_count",
        "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "polydraft:acceptance_per_position", "polydraft:tokens_per_round", "polydraft:host_gap_seconds",
        "polydraft:device_idle_ratio", "polydraft:steps_by_drafts_total", "polydraft:acceptance_alarms_total",
        "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total", "vllm:request_prompt_tokens_count", "vllm:request_generation_tokens_sum",
    ):  # fmt: skip
        assert name in values, name
    assert values["vllm:generation_tokens_total"] >= 12
    first = next(line for line in lines if line.startswith("polydraft:draft_tokens_per_pos_total{") and 'position="0"' in line)
    assert values["vllm:spec_decode_num_drafts_total"] == float(first.rpartition(" ")[2]), (
        "rounds without drafts are none of them"
    )
    assert 0 <= values["polydraft:device_idle_ratio"] < 1, "the device has worked"
    assert values["vllm:prefix_cache_queries_total"] >= values["vllm:prefix_cache_hits_total"]
    assert 12 <= values["vllm:request_generation_tokens_sum"] <= values["vllm:generation_tokens_total"], "cancelled ones apart"


def test_the_log_has_no_text_of_anybody(client: Any, server: Served) -> None:
    complete(client, prompt="w11 w12 w13 w14")
    for wrong in ({"stop": ["w11", ""]}, {"extra_body": {"bad_words": ["w11", 5]}}, {"logit_bias": {"w11": 1}}):
        with pytest.raises(openai.BadRequestError):
            complete(client, **wrong)
    text = server.log.read_text(encoding="utf-8")
    assert "w11" not in text, "nor what an error repeats of a request"
    assert any(event["event"] == "request" and event["completion_tokens"] for event in server.events())


# -- bound output -------------------------------------------------------------------------------------------------------
MANY_BRANCHES = "start: " + " | ".join(f'"a" r{i}' for i in range(3000)) + "\n" + "\n".join(f'r{i}: "b{i}"' for i in range(3000))


def test_a_grammar_that_fails_in_the_middle_is_the_clients_error(bound: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot be followed: Parser Error"):
        bound.completions.create(model="letters", prompt="a", extra_body={"structured_outputs": {"grammar": MANY_BRANCHES}})


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_constraint_that_forbidden_words_leave_nothing_of_is_the_clients_error(bound: Any, temperature: float) -> None:
    asked = {"structured_outputs": {"regex": "a+"}, "bad_words": ["a"]}
    with pytest.raises(openai.BadRequestError, match="no token was left to choose"):
        bound.completions.create(model="letters", prompt="a", temperature=temperature, extra_body=asked)
    assert bound.completions.create(model="letters", prompt="a", max_tokens=3, extra_body={"bad_words": ["a"]}).choices


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    served = Served(tmp_path_factory.mktemp("bound"), "--constraints", "--draft-logprobs", model=letters())
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    assert served.stop() == 0


def test_provenance_tells_what_else_a_draft_could_have_been(bound: Any) -> None:
    extra = {"provenance": True, "ignore_eos": True}
    answer = complete(bound, model="letters", prompt=[5, 9], max_tokens=16, logprobs=2, extra_body=extra)
    told = [token for token in answer.choices[0].provenance if token["draft"] is not None]
    assert len(told) > 3
    for token in told:
        assert (token["draft"] == token["token"]) == (token["source"] == "draft")
        assert len(token["draft_top_logprobs"]) == 2
        likely, numbers = (
            list(part) for part in zip(*((t["token"], t["logprob"]) for t in token["draft_top_logprobs"]), strict=True)
        )
        assert (likely[0], numbers) == (token["draft"], sorted(numbers, reverse=True)), "a greedy draft is the most likely token"


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_chat_keeps_to_a_json_schema(bound: Any, temperature: float) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}},
    }
    messages = [{"role": "user", "content": "abc"}]
    for seed in range(4):
        answer = bound.chat.completions.create(
            model="letters", messages=messages, temperature=temperature, seed=seed, max_tokens=40, response_format=form
        )
        assert json.loads(answer.choices[0].message.content)["a"] in ("b", "c")
    text = bound.completions.create(
        model="letters", prompt="abc", temperature=temperature, max_tokens=40, extra_body={"response_format": form}
    ).choices[0].text  # fmt: skip
    assert json.loads(text)["a"] in ("b", "c")


def test_a_completion_keeps_to_a_regular_expression(bound: Any) -> None:
    answer = bound.completions.create(
        model="letters", prompt="a", temperature=1.0, seed=3,
        extra_body={"structured_outputs": {"regex": "[0-9]{4}"}, "provenance": True},
    )  # fmt: skip
    assert re.fullmatch("[0-9]{4}", answer.choices[0].text)
    assert answer.choices[0].provenance[-1]["source"] == "forced", "the end is all that may come"


@pytest.mark.parametrize("grammar", ['root ::= "ab" [0-9]', 'start: "ab" /[0-9]/'])
def test_a_completion_keeps_to_a_grammar(bound: Any, grammar: str) -> None:
    answer = bound.completions.create(
        model="letters", prompt="a", temperature=0, extra_body={"structured_outputs": {"grammar": grammar}}
    )
    assert re.fullmatch("ab[0-9]", answer.choices[0].text)


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_grammar_is_the_clients_error(bound: Any, client: Any, *, stream: bool) -> None:
    for body in ({"regex": "(["}, {"nothing": "x"}, {"regex": "a", "json": {}}, {"regex": r"[^\s\S]"}, {"json": '{"$ref": "#"}'}):
        with pytest.raises(openai.BadRequestError):
            bound.completions.create(model="letters", prompt="a", stream=stream, extra_body={"structured_outputs": body})
    with pytest.raises(openai.BadRequestError, match="constraints=True"):
        complete(client, extra_body={"structured_outputs": {"regex": "a"}})
