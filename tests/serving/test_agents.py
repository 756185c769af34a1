"""What agents ask a server for, with the official client: reasoning told from the reply, and calls of tools.

The demo model knows nothing of it, so its texts are bound to what such a model would write.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

from tests.serving.agents import CITY, DAYS, PLAIN, TEMPLATE, bound, tool  # noqa: E402  behind the check for the client
from tests.serving.conftest import Served  # noqa: E402
from tests.support.letters import CHARACTERS  # noqa: E402
from tests.support.letters import checkpoint as letters  # noqa: E402


@pytest.fixture(scope="module")
def client(agents: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{agents.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: Any, content: str = "hi", extra: dict[str, Any] | None = None, **options: Any) -> Any:
    given = {"model": "letters", "messages": [{"role": "user", "content": content}], "temperature": 1, "seed": 5, **options}
    return client.chat.completions.create(**given, extra_body=extra)


# -- reasoning -------------------------------------------------------------------------------------
def test_the_start_says_how_reasoning_is_told_from_the_reply(agents: Served) -> None:
    ready = agents.event("ready")
    assert ready["reasoning_parser"] == "qwen3 (the chat template has <think> and </think>)"


def test_reasoning_stands_in_fields_of_its_own(client: Any) -> None:
    answer = chat(client, extra=bound("[a-f]{4}"), logprobs=True)
    message = answer.choices[0].message
    assert re.fullmatch("[a-f]{4}", message.content)
    assert message.reasoning == message.reasoning_content
    assert 0 < len(message.reasoning) <= 6, "the limit of thinking"
    assert "</think>" not in message.reasoning
    details = answer.usage.completion_tokens_details
    assert details.reasoning_tokens == 6
    assert answer.usage.completion_tokens == 6 + len("</think>") + 4 + 1, "with the end of the text"
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens


def test_a_stream_tells_reasoning_and_reply_apart(client: Any) -> None:
    whole = chat(client, extra=bound("[a-f]{40}", 30)).choices[0].message
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = list(chat(client, extra=bound("[a-f]{40}", 30), **options))
    deltas = [event.choices[0].delta for event in events]
    assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == whole.reasoning
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == whole.reasoning
    assert "".join(delta.content or "" for delta in deltas) == whole.content
    assert sum(hasattr(delta, "reasoning") for delta in deltas) > 3, "reasoning is streamed"
    assert deltas[0].role == "assistant"
    assert last.usage.completion_tokens_details.reasoning_tokens == 30


def test_a_text_that_ends_within_its_reasoning_has_no_reply(client: Any) -> None:
    answer = chat(client, max_tokens=5)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("length", None)
    assert choice.message.reasoning
    assert answer.usage.completion_tokens_details.reasoning_tokens == 5


def test_reasoning_that_a_template_switches_off_is_no_reasoning(client: Any) -> None:
    for options in ({"chat_template_kwargs": {"enable_thinking": False}},):
        answer = chat(client, extra={**options, "guided_regex": "[a-f]{4}"})
        assert re.fullmatch("[a-f]{4}", answer.choices[0].message.content)
        assert not hasattr(answer.choices[0].message, "reasoning")
        assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def rendered(agents: Served, **body: Any) -> str:
    """The prompt that a conversation became."""
    given = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "return_token_ids": True, **body}
    answer = httpx.post(f"{agents.url}/v1/chat/completions", json=given, timeout=20)
    assert answer.status_code == 200, answer.text
    found = httpx.post(f"{agents.url}/detokenize", json={"tokens": answer.json()["prompt_token_ids"]}, timeout=20)
    return str(found.json()["prompt"])


def test_what_a_template_reads_reaches_it(agents: Served) -> None:
    assert rendered(agents, reasoning_effort="high") == "user  hi\nhigh\n<think>\n"
    assert rendered(agents, chat_template_kwargs={"enable_thinking": False}) == "user  hi\n<think>\n</think>"
    answered = {"role": "assistant", "content": "no"}
    for field in ("reasoning", "reasoning_content"):
        said = rendered(agents, messages=[{**answered, field: "hm"}, {"role": "user", "content": "so"}])
        assert said == "assistant hm no\nuser  so\n<think>\n"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_by_name(agents: Served, body: dict[str, Any], param: str) -> None:
    given = {"messages": [{"role": "user", "content": "hi"}], **body}
    answer = httpx.post(f"{agents.url}/v1/chat/completions", json=given, timeout=20)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


# -- tools -----------------------------------------------------------------------------------------
TOOLS = [tool("weather", city=CITY, days=DAYS), tool("clock", zone={"type": "string", "pattern": "^[a-z]{3}$"})]
STRICT = [{**one, "function": {**one["function"], "strict": True}} for one in TOOLS]


def check(call: Any, names: tuple[str, ...] = ("weather", "clock")) -> None:
    """A call keeps to the schema of its tool."""
    assert call.type == "function"
    assert re.fullmatch("call_[0-9a-f]{24}", call.id)
    assert call.function.name in names
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments["city"] in CITY["enum"]
        assert 10 <= arguments["days"] <= 99
    else:
        assert re.fullmatch("[a-z]{3}", arguments["zone"])
    assert len(arguments) == (2 if call.function.name == "weather" else 1)


def test_the_start_says_how_tools_are_called(agents: Served) -> None:
    ready = agents.event("ready")
    assert ready["tool_call_parser"] == 'hermes (the chat template has <tool_call> and </tool_call> and "arguments")'


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_is_one_of_the_tools(client: Any, seed: int) -> None:
    answer = chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, extra=PLAIN, seed=seed)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    check(call)


def test_a_named_tool_is_called(client: Any) -> None:
    for name in ("weather", "clock"):
        answer = chat(client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": name}}, extra=PLAIN)
        (call,) = answer.choices[0].message.tool_calls
        check(call, (name,))


def test_several_calls_are_streamed_as_they_are_written(client: Any) -> None:
    extra = {**PLAIN, "logit_bias": {"0": -6}}  # rather another call than the end
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "extra": extra, "max_tokens": 120, "seed": 3}
    whole = chat(client, **options).choices[0]
    events = list(chat(client, stream=True, **options))
    calls: dict[int, list[str]] = {}
    pieces = 0
    for event in events:
        for call in event.choices[0].delta.tool_calls or ():
            if call.index not in calls:
                assert call.id
                assert call.type == "function"
                calls[call.index] = [call.function.name, ""]
            else:
                assert (call.id, call.function.name) == (None, None)
            calls[call.index][1] += call.function.arguments
            pieces += 1
    assert [(call.function.name, call.function.arguments) for call in whole.message.tool_calls] == [*map(tuple, calls.values())]
    assert len(calls) > 1, "parallel calls"
    assert pieces > 4 * len(calls), "arguments come in pieces"
    assert events[-1].choices[0].finish_reason == whole.finish_reason
    for call in whole.message.tool_calls[: None if whole.finish_reason == "tool_calls" else -1]:
        check(call)


def test_the_client_puts_a_streamed_call_together(client: Any) -> None:
    """As agents do that use the client's own accumulator."""
    given = {"model": "letters", "messages": [{"role": "user", "content": "hi"}], "seed": 5, "temperature": 1}
    strict = [tool("weather", strict=True, city=CITY, days=DAYS)]
    with client.chat.completions.stream(**given, tools=strict, tool_choice="required", parallel_tool_calls=False,
                                        extra_body=PLAIN) as stream:  # fmt: skip
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    (call,) = final.choices[0].message.tool_calls
    assert call.function.parsed_arguments["city"] in CITY["enum"]


def test_a_model_may_answer_by_schema_or_call(client: Any) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    found = set()
    for seed in range(12):
        answer = chat(client, tools=STRICT, response_format=form, parallel_tool_calls=False, extra=PLAIN, seed=seed)
        message = answer.choices[0].message
        found.add("call" if message.tool_calls else "answer")
        if message.tool_calls:
            check(message.tool_calls[0])
        else:
            assert json.loads(message.content).keys() == {"ok"}
        if len(found) == 2:
            break
    assert found == {"call", "answer"}


def test_a_call_comes_behind_its_reasoning(client: Any) -> None:
    extra = {"thinking_limit": 5, "logit_bias": {"0": -100}}
    message = chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, extra=extra).choices[0].message
    assert len(message.reasoning) <= 5
    check(message.tool_calls[0])


def test_no_tool_is_shown_that_may_not_be_called(client: Any, agents: Served) -> None:
    assert rendered(agents, tools=TOOLS, tool_choice="none") == "user  hi\n<think>\n"
    text = chat(client, tools=TOOLS, tool_choice="none", extra={**PLAIN, "guided_regex": "<tool_call>[a-f]"}).choices[0].message
    assert text.tool_calls is None
    assert text.content.startswith("<tool_call>")


def test_earlier_calls_and_their_results_reach_the_template(agents: Served) -> None:
    call = {"id": "c-1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "utc"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c-1", "content": [{"type": "text", "text": "noon"}]},
    ]
    said = rendered(agents, messages=messages, tools=[tool("clock", strict=True)], max_tokens=1)
    shown, *rest = said.split("\n")
    assert json.loads(shown) == [tool("clock")], "`strict` is for the server"
    wanted = 'user  hi|assistant  <tool_call>|{"name": "clock", "arguments": {"zone": "utc"}}|</tool_call>|tool  noonc-1|<think>|'
    assert "|".join(rest) == wanted


@pytest.mark.deep
def test_markers_that_are_special_tokens_are_read_as_well(tmp_path: Path) -> None:
    model = tmp_path / "letters"
    shutil.copytree(letters(2048), model)
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    first = len(CHARACTERS) + 1
    call, end, think, reply = range(first, first + 4)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    for number, marker in enumerate(("<tool_call>", "</tool_call>", "<think>", "</think>"), first):
        tokenizer["added_tokens"].append({"id": number, "content": marker, **plain})
    file.write_text(json.dumps(tokenizer))
    template = tmp_path / "special.jinja"
    template.write_text(TEMPLATE)
    options = ("--constraints", "--think-start-ids", str(think), "--think-end-ids", str(reply), "--chat-template", str(template))
    served = Served(tmp_path, *options, model=str(model))
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        extra = {
            "thinking_limit": 5,
            "logit_bias": dict.fromkeys(map(str, (0, call, end, think, reply)), -50),
            "return_token_ids": True,
        }
        answer = chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, extra=extra)
        message = answer.choices[0].message
        assert message.reasoning
        assert message.content is None
        check(message.tool_calls[0])
        assert answer.choices[0].token_ids[5] == reply
        assert call in answer.choices[0].token_ids
        assert answer.usage.completion_tokens_details.reasoning_tokens == 5
        spelt = {**PLAIN, "guided_grammar": f"start: <[{call}]> /a/"}
        for skip, wanted in ((True, "a"), (False, "<tool_call>a")):
            assert chat(client, extra={**spelt, "skip_special_tokens": skip}).choices[0].message.content == wanted
    assert served.stop() == 0


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameter": {}}}]}, "tools[0].function.parameter"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ({"tools": [TOOLS[0]] * 129}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
    ({"tools": TOOLS, "guided_regex": "a", "parallel_tool_calls": False}, "guided_regex"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "object", "properties": 5}}}],
      "tool_choice": "required"}, "tool_choice"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages"),
)  # fmt: skip


@pytest.mark.parametrize(("body", "param"), BAD, ids=lambda value: f"{value!r:.60}")
def test_wrong_tools_are_refused_by_name(agents: Served, body: dict[str, Any], param: str) -> None:
    given = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **body}
    answer = httpx.post(f"{agents.url}/v1/chat/completions", json=given, timeout=20)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
