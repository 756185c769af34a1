"""Whatever takes the place of a part of an agent's request, the server answers it, or refuses it and says which field is wrong.

Takes a minute.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serving.agents import PLAIN, tool
from tests.serving.conftest import Served

pytestmark = pytest.mark.deep
CALL = {"id": "a", "type": "function", "function": {"name": "n", "arguments": "{}"}}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "reasoning": "x", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
        ],
        "tools": [tool("n", strict=True, a={"type": "string"})],
        "parallel_tool_calls": True,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        "max_tokens": 6,
        **PLAIN,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
            {"type": "function_call", "call_id": "c", "name": "n", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "instructions": "be",
        "tools": [{"type": "function", "name": "n", "parameters": {"type": "object"}, "strict": False}],
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "max_output_tokens": 6,
        **PLAIN,
    },
}
VALUES: tuple[Any, ...] = (
    None, 0, -1, 1.5, True, "", "x", "\u00e9\n", [], {}, [[]], [{}], {"a": 1}, ["x"], {"type": "function"}, {"type": "object"},
    10**30, {"$ref": "#"}, {"properties": []}, {"required": 5}, ...,
)  # fmt: skip
"""The last one stands for leaving the part out."""


def places(part: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where all parts of a request are."""
    if here:
        yield here
    for key in part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ():
        yield from places(part[key], (*here, key))


@pytest.mark.parametrize("path", REQUESTS)
def test_no_part_of_a_request_breaks_the_server(agents: Served, path: str) -> None:
    drawn = random.Random(1)
    with httpx.Client(base_url=agents.url, timeout=30) as client:
        for place in places(REQUESTS[path]):
            for value in VALUES:
                body = copy.deepcopy(REQUESTS[path])
                *outer, last = place
                holder: Any = body
                for key in outer:
                    holder = holder[key]
                if value is ...:
                    del holder[last]
                else:
                    holder[last] = value
                body["tool_choice"] = drawn.choice(["auto", "required", "none"])
                body["stream"] = drawn.random() < 0.3
                answer = client.post(path, content=json.dumps(body))
                assert answer.status_code in (200, 400), (place, value, answer.text)
                assert answer.status_code == 200 or answer.json()["error"]["param"], (place, value, answer.text)
    assert not [event for event in agents.events() if event.get("status") == 500]
