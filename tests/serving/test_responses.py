"""OpenAI's responses in their stateless form, with the official client: items, events in their order, tools, reasoning, schemas.

Events and answers are read as the client's own types, so a field that it wants and does not find is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")
pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402  behind the check for the client

from tests.serving.agents import CITY, DAYS, PLAIN, bound, tool  # noqa: E402
from tests.serving.conftest import Served  # noqa: E402

EVENT = pydantic.TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", **tool("weather", strict=True, city=CITY, days=DAYS)["function"]}


@pytest.fixture(scope="module")
def client(agents: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{agents.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: Any, extra: dict[str, Any] | None = None, **options: Any) -> Any:
    given = {"model": "letters", "input": "hi", "temperature": 1, **options}
    answer = client.responses.create(**given, extra_body={"seed": 5, **(extra or {})})
    if not options.get("stream"):
        Response.model_validate(answer.to_dict(mode="json"))
    return answer


def told(events: list[Any]) -> list[str]:
    """Types of events, each run of equal ones once."""
    kinds = [event.type.removeprefix("response.") for event in events]
    return [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]


def checked(stream: Any) -> list[Any]:
    """The events of a stream, which are valid and numbered."""
    events = list(stream)
    for number, event in enumerate(events):
        EVENT.validate_python(event.to_dict(mode="json"))
        assert event.sequence_number == number
    return events


def without_ids(item: Any) -> Any:
    return {name: value for name, value in item.to_dict().items() if name not in ("id", "call_id")}


def test_a_text_comes_as_a_message(client: Any) -> None:
    answer = ask(client, {**PLAIN, "guided_regex": "[a-f]{9}"}, instructions="be brief", metadata={"a": "b"})
    assert re.fullmatch("[a-f]{9}", answer.output_text)
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (answer.status, answer.store, answer.instructions, answer.metadata) == ("completed", False, "be brief", {"a": "b"})
    assert answer.id.startswith("resp_")
    assert answer.usage.output_tokens == 10
    assert answer.usage.total_tokens == answer.usage.input_tokens + 10


@pytest.mark.parametrize("kind", ["text", "reasoning", "call", "cut off"])
def test_events_tell_what_the_whole_answer_has(client: Any, kind: str) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "text": {"extra": {**PLAIN, "guided_regex": "[a-f]{30}"}},
        "reasoning": {"extra": bound("[a-f]{30}", 20)},
        "call": {"extra": PLAIN, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        "cut off": {"extra": {**PLAIN, "guided_regex": "[a-f]{30}"}, "max_output_tokens": 7},
    }
    options = kinds[kind]
    whole = ask(client, **options)
    events = checked(ask(client, stream=True, **options))
    final = events[-1].response
    assert [without_ids(item) for item in final.output] == [without_ids(item) for item in whole.output]
    assert final.usage == whole.usage
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in final.output]
    part = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    message = ["output_item.added", *part, "output_item.done"]
    reasoning = [name.replace("output_text", "reasoning_text") for name in message]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    items = {"text": message, "reasoning": reasoning + message, "call": call, "cut off": message}[kind]
    assert told(events) == ["created", "in_progress", *items, "incomplete" if kind == "cut off" else "completed"]
    deltas = [event for event in events if event.type.endswith(".delta")]
    assert len(deltas) > 3, "a stream comes in pieces"
    texts: dict[int, str] = {}
    for event in deltas:
        assert event.item_id == final.output[event.output_index].id
        texts[event.output_index] = texts.get(event.output_index, "") + event.delta
    for place, item in enumerate(final.output):
        assert texts[place] == (item.arguments if item.type == "function_call" else item.content[0].text)
    if kind == "cut off":
        assert (final.status, final.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert final.output[0].status == "incomplete"


def test_reasoning_is_an_item_of_its_own(client: Any) -> None:
    answer = ask(client, bound("[a-f]{4}"))
    reasoning, message = answer.output
    assert (reasoning.type, reasoning.summary, message.type) == ("reasoning", [], "message")
    assert len(reasoning.content[0].text) <= 6
    assert answer.usage.output_tokens_details.reasoning_tokens == 6


def test_a_schema_binds_a_text(client: Any) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    answer = ask(client, PLAIN, text={"format": form})
    assert json.loads(answer.output_text).keys() == {"ok"}
    assert answer.text.format.to_dict()["schema"] == schema


def test_an_agents_loop_goes_on_with_what_it_was_told(client: Any, agents: Served) -> None:
    """Call, result and next call, all items sent again, as the client writes them."""
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "rome"}]}]
    for turn in range(3):
        extra = {"thinking_limit": 4, "logit_bias": {"0": -100}, "seed": turn}
        answer = ask(client, extra, input=items, tools=[TOOL], tool_choice={"type": "function", "name": "weather"})
        items += [item.to_dict(mode="json") for item in answer.output]
        (call,) = [item for item in answer.output if item.type == "function_call"]
        assert json.loads(call.arguments)["city"] in CITY["enum"]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sun"})
    answer = ask(client, {**PLAIN, "guided_regex": "[a-f]{3}", "return_token_ids": None}, input=items)
    assert len(answer.output_text) == 3


def test_items_become_the_messages_that_templates_want() -> None:
    from polydraft.serving import protocol, responses

    said: list[dict[str, Any]] = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
        {"type": "function_call", "call_id": "d", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]},
        {"type": "function_call_output", "call_id": "d", "output": "2"},
        {"type": "message", "role": "assistant", "content": "one"},
        {"type": "message", "role": "assistant", "content": "two"},
    ]
    body = protocol.ResponsesRequest(input=said, instructions="do")
    calls = [{"id": name, "type": "function", "function": {"name": "now", "arguments": "{}"}} for name in "cd"]
    assert responses.as_chat(body, protocol.ChatRequest).messages == [
        {"role": "system", "content": "do"},
        {"role": "developer", "content": "be"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "reasoning_content": "hm", "content": "so", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "tool", "tool_call_id": "d", "content": "2"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]


def test_parameters_of_plugins_reach_the_chat() -> None:
    from polydraft.serving import protocol, responses, wire

    given = [wire.Parameter("logit-scale", "d", "w")]
    kind, chat = (
        protocol.with_parameters(protocol.ResponsesRequest, given), protocol.with_parameters(protocol.ChatRequest, given)
    )  # fmt: skip
    body = protocol.decode(b'{"input": "hi", "logit-scale": 2.5, "top_k": 4, "max_output_tokens": 9}', kind)
    params = protocol.sampling_params(responses.as_chat(body, chat), default_max=1, most=0)
    assert (params["extra"], params["top_k"], params["max_new_tokens"]) == ({"logit-scale": 2.5}, 4, 9)


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a", "output_schema": {}}]}, "tools[0].output_schema"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "a", "arguments": "{"}]}, "input"),
    ({"input": [{"content": "x"}]}, "input"),
    ({"input": [{"type": "reasoning", "summary": [], "content": -1}]}, "input"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input"),
    ({"input": "w " * 9000}, "input"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
    ({"text": {"verbosity": "low"}}, "text"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"top_p": 7}, "top_p"),
)


@pytest.mark.parametrize(("body", "param"), BAD, ids=lambda value: f"{value!r:.60}")
def test_what_is_not_done_is_refused_by_name(agents: Served, body: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        given = {"input": "hi", "max_output_tokens": 4, "stream": stream, **body}
        answer = httpx.post(f"{agents.url}/v1/responses", json=given, timeout=20)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_stream_that_breaks_says_so_as_its_last_event(agents: Served) -> None:
    body = {"input": "hi", "stream": True, "guided_regex": "(", **PLAIN}
    answer = httpx.post(f"{agents.url}/v1/responses", json=body, timeout=20)
    if answer.status_code == 200:
        event = json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))
        assert (event["type"], event["param"]) == ("error", "guided_regex")
    else:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_regex")


def test_events_are_named_and_end_without_a_mark(agents: Served) -> None:
    body = {"input": "hi", "stream": True, "guided_regex": "a", **PLAIN}
    lines = httpx.post(f"{agents.url}/v1/responses", json=body, timeout=20).text.strip().split("\n\n")
    for block in lines:
        name, data = block.splitlines()
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert json.loads(lines[-1].splitlines()[1].removeprefix("data: "))["type"] == "response.completed"
