"""Requests that would cost more than they are worth are refused before they do, and wrong ones in few words."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from polydraft.errors import RequestError
from polydraft.serving import protocol
from polydraft.serving.answers import MOST_SAID
from tests.serving.conftest import Served
from tests.serving.test_limits import SHORT, post
from tests.support.tiny import CONFIGS

LENGTH = CONFIGS["narrow"].get("max_position_embeddings", 96)


def refused(data: dict[str, Any], kind: Any = protocol.CompletionRequest) -> str:
    with pytest.raises(RequestError) as raised:
        protocol.decode(json.dumps(data).encode(), kind)
    return str(raised.value)


def test_a_long_name_is_compared_with_nothing_and_not_sent_back(server: Served) -> None:
    begin = time.monotonic()
    said = refused({"prompt": "w1", "y" * 2_000_000: 1})
    assert time.monotonic() - begin < 0.2
    assert len(said) < 2000
    assert "(2000000 characters)" in said
    assert "did you mean 'prompt'? " in refused({"promt": "w1"})


@pytest.mark.parametrize(
    "ask",
    [{"model": "m" * 100_000}, {"structured_outputs": {"x" * 100_000: 1}}, {"y" * 100_000: 1}],
    ids=lambda ask: next(iter(ask))[:20],
)  # fmt: skip
def test_what_was_sent_is_not_sent_back_whole(server: Served, ask: dict[str, Any]) -> None:
    answer = post(server, **{**SHORT, **ask})
    assert answer.status_code in (400, 404)
    assert len(answer.json()["error"]["message"]) < MOST_SAID + 50


@pytest.mark.parametrize(
    ("ask", "known"),
    [
        ({"stream_options": {"include_usag": True}}, "of stream_options; did you mean 'include_usage'? known: include_usage"),
        (
            {"response_format": {"type": "text", "schema": {}}},
            "of response_format; did you mean 'json_schema'? known: type",
        ),
    ],
    ids=["stream_options", "response_format"],
)
def test_an_unknown_field_is_told_with_those_beside_it(ask: dict[str, Any], known: str) -> None:
    assert known in refused({"prompt": "w1", **ask})


@pytest.mark.parametrize(
    ("text", "alone"),
    [
        (r"\ud800", r"\ud800"), (r"\udc00", r"\udc00"), (r"a\uDBFFb", r"\uDBFF"), (r"\ud83d\ude00\ud83d", r"\ud83d"),
        (r"\\\ud800", r"\ud800"), (r"\ud800\ud83d\ude00", r"\ud800"), (r"\ud83d\ude00\ude01", r"\ude01"),
    ],
)  # fmt: skip
def test_half_a_character_is_told_as_that(text: str, alone: str) -> None:
    with pytest.raises(RequestError) as raised:
        protocol.decode(f'{{"prompt": "{text}"}}'.encode(), protocol.CompletionRequest)
    assert f"the lone surrogate {alone}, which is half of a character" in str(raised.value)


@pytest.mark.parametrize("text", [r"\ud83d\ude00", r"\\ud800", r"\uD83D\uDE00\\ude00"])
def test_whole_characters_are_no_halves(text: str) -> None:
    assert protocol.decode(f'{{"prompt": "{text}"}}'.encode(), protocol.CompletionRequest).prompt
    with pytest.raises(RequestError, match="is no JSON: "):
        protocol.decode(f'{{"prompt": "{text}"'.encode(), protocol.CompletionRequest)


def test_many_prompts_are_counted_before_they_become_tokens(server: Served) -> None:
    begin = time.monotonic()
    answer = post(server, prompt=["w1 w2"] * 300_000)
    assert answer.status_code == 400
    assert "asks for 300000 texts" in answer.json()["error"]["message"]
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize("key", ["1_0", "\u0661", " 1", "01", "+1", "1.0", "-0"])
def test_a_token_id_is_written_in_one_way(server: Served, key: str) -> None:
    answer = post(server, **SHORT, logit_bias={key: 1})
    assert answer.status_code == 400
    assert "logit_bias" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "ask",
    [
        {"logit_bias": {str(token): 1 for token in range(10_000)}},
        {"bad_words": ["w1"] * 10_000},
        {"stop_token_ids": [1] * 10_000},
    ],
    ids=lambda ask: next(iter(ask)),
)
def test_tables_that_no_slot_holds_never_reach_the_engine(ask: dict[str, Any]) -> None:
    assert "of length <= " in refused({"prompt": "w1", **ask})


def test_bad_words_that_take_long_to_become_tokens_never_reach_the_engine() -> None:
    body = protocol.decode(json.dumps({"prompt": "w1", "bad_words": ["w1 " * 2000] * 500}).encode(), protocol.CompletionRequest)
    with pytest.raises(RequestError, match=r"^bad_words have 3000000 characters, wanted at most 16384; name fewer$"):
        protocol.sampling_params(body, default_max=16, most=0)


def test_a_role_is_a_text(server: Served) -> None:
    answer = post(server, "/v1/chat/completions", messages=[{"role": 5, "content": "w1"}])
    assert answer.status_code == 400
    assert "with a role and a content" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "prompt",
    ["w1 " * 1_000_000, [1] * 1_000_000, "w1 " * LENGTH, [1] * LENGTH],
    ids=["a long text", "many tokens", "a text of the model's length", "tokens of it"],
)
def test_a_prompt_that_is_too_long_is_refused_at_once(server: Served, prompt: Any) -> None:
    begin = time.monotonic()
    answer = post(server, prompt=prompt, n=8)
    assert time.monotonic() - begin < 2, "its beginning says enough"
    assert answer.status_code == 400
    assert "shorten it" in answer.json()["error"]["message"]
    chat = post(
        server, "/v1/chat/completions", messages=[{"role": "user", "content": prompt if isinstance(prompt, str) else "w1"}]
    )
    assert chat.status_code == (400 if isinstance(prompt, str) else 200)


def test_no_answer_leads_to_where_a_client_says(server: Served) -> None:
    answer = httpx.get(f"{server.url}/health/", headers={"Host": "evil.example"}, timeout=20)
    assert answer.status_code == 404
    assert "evil" not in answer.text + str(answer.headers)
