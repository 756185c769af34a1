"""What agents ask a server for, with the official client: reasoning told from the reply.

The demo model knows nothing of it, so its texts are bound to what such a model would write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

from tests.serving.conftest import Served  # noqa: E402  behind the check for the client
from tests.support.letters import CHARACTERS  # noqa: E402
from tests.support.letters import checkpoint as letters  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.reasoning_content }} {{ m.content }}\n{% endfor %}"
    "{% if reasoning_effort %}{{ reasoning_effort }}\n{% endif %}"
    "{% if add_generation_prompt %}<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}{% endif %}"
)


def ids(text: str) -> str:
    """Token ids of the model of letters, as an option has them."""
    return ",".join(str(1 + CHARACTERS.index(letter)) for letter in text)


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("agents")
    template = folder / "agents.jinja"
    template.write_text(TEMPLATE)
    served = Served(
        folder, "--constraints", "--chat-template", str(template), "--think-start-ids", ids("<think>"),
        "--think-end-ids", ids("</think>"), model=letters(2048),
    )  # fmt: skip
    yield served
    assert served.stop() == 0


@pytest.fixture(scope="module")
def client(agents: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{agents.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: Any, content: str = "hi", extra: dict[str, Any] | None = None, **options: Any) -> Any:
    given = {"model": "letters", "messages": [{"role": "user", "content": content}], "temperature": 1, "seed": 5, **options}
    return client.chat.completions.create(**given, extra_body=extra)


def bound(pattern: str, thinking: int = 6) -> dict[str, Any]:
    return {"guided_regex": pattern, "thinking_limit": thinking, "logit_bias": {"0": -100}}


# -- reasoning -------------------------------------------------------------------------------------
def test_the_start_says_how_reasoning_is_told_from_the_reply(agents: Served) -> None:
    (ready,) = [event for event in agents.events() if event["event"] == "ready"]
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
    options = {"stream": True, "stream_options": {"include_usage": True}}
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
