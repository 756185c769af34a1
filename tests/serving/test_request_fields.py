"""Fields that clients of OpenAI and vLLM send: taken where this server does what they ask, refused by name where not."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from polydraft.bench.report import renewed
from polydraft.serving import protocol
from tests.serving.conftest import MODEL, Served
from tests.serving.request_fields import CHAT, COMPLETIONS, FIELDS, MARKER, PAGE, RESPONSES, Field, table
from tests.support.letters import checkpoint as letters

PROMPTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "w5 w9 w33"},
    CHAT: {"messages": [{"role": "user", "content": "w5 w9"}, {"role": "assistant", "content": "w33"}]},
    RESPONSES: {"input": "w5 w9"},
}
ID = "x-request-id"


def post(server: Served, path: str = COMPLETIONS, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    length = "max_output_tokens" if path == RESPONSES else "max_tokens"
    given = {**PROMPTS[path], length: 4, "temperature": 0, **body}
    return httpx.post(server.url + path, json=given, headers=headers, timeout=60)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Those of a stream, without its last line."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def nested(name: str, value: Any) -> dict[str, Any]:
    outer, _, inner = name.partition(".")
    return {outer: {inner: value}} if inner else {outer: value}


def with_field(row: Field, value: Any) -> dict[str, Any]:
    """A body's part for a value of a row's field."""
    parts: dict[str, Any] = {}
    for name, one in (*row.beside, (row.name, value)):
        for outer, inner in nested(name, one).items():
            parts[outer] = {**parts[outer], **inner} if isinstance(parts.get(outer), dict) else inner
    return parts


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with constraints, whose model spells letters."""
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    served = Served(tmp_path_factory.mktemp("bound"), "--constraints", model=letters())
    yield served
    assert served.stop() == 0


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert renewed(page, MARKER, table()) == page


@pytest.mark.parametrize("row", FIELDS, ids=lambda row: row.name)
def test_a_field_is_taken_or_refused_by_name(server: Served, row: Field, request: pytest.FixtureRequest) -> None:
    serving = request.getfixturevalue("bound") if row.bound else server
    for path in row.paths:
        for value in row.taken:
            answer = post(serving, path, **with_field(row, value))
            assert answer.status_code == 200, (value, answer.text)
        for value in row.refused:
            answer = post(serving, path, **with_field(row, value))
            assert answer.status_code == 400, (value, answer.text)
            error = answer.json()["error"]
            assert error["param"] == row.name, error


BODIES: dict[str, type[msgspec.Struct]] = {
    COMPLETIONS: protocol.CompletionRequest,
    CHAT: protocol.ChatRequest,
    RESPONSES: protocol.ResponsesRequest,
}


@pytest.mark.parametrize("row", FIELDS, ids=lambda row: row.name)
def test_null_is_as_good_as_nothing(server: Served, row: Field) -> None:
    for path in row.paths:
        known = [field.encode_name for field in msgspec.structs.fields(BODIES[path])]
        answer = post(server, path, **with_field(row, None))
        assert answer.status_code == (200 if row.name.partition(".")[0] in known else 400), answer.text


def test_whatever_is_known_by_name_alone_has_a_row() -> None:
    assert set(protocol.NEUTRAL) <= {row.name for row in FIELDS}


# -- `param` ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"temperatur": 1}, "temperatur"),
        (COMPLETIONS, {"stream_options": {"x": 1}}, "stream_options.x"),
        (COMPLETIONS, {"prompt": 5}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": [1, 99999]}, "prompt"),
        (COMPLETIONS, {"prompt": ["w1"] * 65}, "prompt"),
        (COMPLETIONS, {"n": 65}, "n"),
        (COMPLETIONS, {"temperature": -1}, "temperature"),
        (COMPLETIONS, {"temperature": "x"}, "temperature"),
        (COMPLETIONS, {"stop": [""]}, "stop"),
        (COMPLETIONS, {"stop": ["x"] * 1001}, "stop"),
        (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"99999": 1}}, "logit_bias"),
        (COMPLETIONS, {"bad_words": [""]}, "bad_words"),
        (COMPLETIONS, {"stop_token_ids": [99999]}, "stop_token_ids"),
        (COMPLETIONS, {"seed": 2**64}, "seed"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"echo": True, "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"max_drafts": 1, "num_speculative_tokens": 2}, "num_speculative_tokens"),
        (COMPLETIONS, {"response_format": {"type": "json_object"}}, "response_format"),
        (COMPLETIONS, {"response_format": {"type": "x"}}, "response_format.type"),
        (COMPLETIONS, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (COMPLETIONS, {"guided_regex": "a"}, "guided_regex"),
        (COMPLETIONS, {"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
        (COMPLETIONS, {"thinking_limit": 3}, "thinking_limit"),
        (COMPLETIONS, {"thinking_token_budget": 3}, "thinking_token_budget"),
        (COMPLETIONS, {"thinking_limit": 3, "thinking_token_budget": 4}, "thinking_token_budget"),
        (COMPLETIONS, {"reply_start_token_ids": [3]}, "reply_start_token_ids"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "w1 " * 9000}]}, "messages"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
    ids=str,
)  # fmt: skip
def test_an_error_names_its_field(server: Served, path: str, body: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        answer = post(server, path, **{**body, "stream": stream})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_body_without_its_prompt_names_it_and_one_that_is_no_json_names_nothing(server: Served) -> None:
    for data, param in ((b"{}", "prompt"), (b"{", None), (b"[]", None)):
        answer = httpx.post(server.url + COMPLETIONS, content=data, timeout=20)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    answer = post(server, model="org/other")
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


def test_options_of_a_stream_need_one(server: Served) -> None:
    answer = post(server, stream_options={"include_usage": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")
    assert post(server, stream_options={"include_usage": True}, stream=True).status_code == 200


def test_a_grammar_that_is_none_names_its_field_in_a_stream_too(bound: Served) -> None:
    wrong: tuple[dict[str, Any], ...] = ({"guided_regex": "("}, {"structured_outputs": {"regex": "("}})
    for body in wrong:
        (name,) = body
        for stream in (False, True):
            answer = post(bound, stream=stream, **body)
            error = events(answer)[-1]["error"] if answer.status_code == 200 else answer.json()["error"]
            assert (error["code"], error["param"]) == (400, name)


# -- ids of requests -------------------------------------------------------------------------------
@pytest.mark.parametrize("given", ["mine-1", "x" * 128])
def test_an_answer_has_its_requests_id(server: Served, given: str) -> None:
    headers = {"X-Request-Id": given}
    for answer in (
        post(server, headers=headers), post(server, headers=headers, stream=True), post(server, headers=headers, n=0),
        httpx.get(f"{server.url}/health", headers=headers), httpx.get(f"{server.url}/nothing", headers=headers),
        httpx.post(f"{server.url}/health", headers=headers),
    ):  # fmt: skip
        assert answer.headers[ID] == given
    assert post(server, headers=headers).json()["id"] == f"cmpl-{given}"
    assert {event["id"] for event in events(post(server, CHAT, headers, stream=True))} == {f"chatcmpl-{given}"}


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "\u00e9".encode("latin-1")])
def test_whoever_names_none_that_fits_has_a_new_one(server: Served, given: Any) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    ids = [post(server, headers=headers).headers[ID] for _ in range(2)]
    assert ids[0] != ids[1]
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)


def test_a_body_may_name_the_id_and_the_header_wins(server: Served) -> None:
    answer = post(server, request_id="body")
    assert (answer.headers[ID], answer.json()["id"]) == ("body", "cmpl-body")
    answer = post(server, headers={"X-Request-Id": "head"}, request_id="body")
    assert (answer.headers[ID], answer.json()["id"]) == ("head", "cmpl-head")


def test_what_is_no_http_and_another_http_have_an_id_too(server: Served) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    for sent in (b"nonsense\r\n\r\n", b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n"):
        with socket.create_connection((host, int(port)), 20) as client:
            client.sendall(sent)
            assert b"\r\nx-request-id: " in client.recv(1 << 16).lower()


# -- what the others mean --------------------------------------------------------------------------
def test_no_limit_of_tokens_is_no_limit(server: Served) -> None:
    asked: dict[str, Any] = {"temperature": 1, "seed": 3, "max_tokens": 12}
    assert text(post(server, **asked, top_k=-1)) == text(post(server, **asked, top_k=0)) == text(post(server, **asked))
    assert text(post(server, **asked, top_k=1)) == text(post(server, **{**asked, "temperature": 0}))


def test_the_last_tokens_of_a_prompt_are_kept(server: Served) -> None:
    ids = server_ids(server, "w5 w9 w33")
    cut = post(server, truncate_prompt_tokens=2, return_token_ids=True, max_tokens=8)
    assert cut.json()["choices"][0]["prompt_token_ids"] == ids[-2:]
    assert cut.json()["usage"]["prompt_tokens"] == 2
    assert text(cut) == text(post(server, prompt=ids[-2:], max_tokens=8))
    long = post(server, CHAT, messages=[{"role": "user", "content": "w1 " * 9000}], truncate_prompt_tokens=3)
    assert (long.status_code, long.json()["usage"]["prompt_tokens"]) == (200, 3)


def server_ids(server: Served, prompt: str) -> list[int]:
    found: list[int] = httpx.post(f"{server.url}/tokenize", json={"prompt": prompt}, timeout=20).json()["tokens"]
    return found


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_token_ids_are_given_whole_and_in_pieces(server: Served, path: str) -> None:
    whole = post(server, path, return_token_ids=True, n=2, max_tokens=9, temperature=1, seed=5).json()
    pieces = events(post(server, path, return_token_ids=True, n=2, max_tokens=9, temperature=1, seed=5, stream=True))
    for choice in whole["choices"]:
        mine = [event["choices"][0] for event in pieces if event["choices"][0]["index"] == choice["index"]]
        assert choice["token_ids"] == [token for piece in mine for token in piece["token_ids"]]
    assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]
    holder, first = (whole, pieces[0]) if path == CHAT else (whole["choices"][0], pieces[0]["choices"][0])
    assert len(holder["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert holder["prompt_token_ids"] == first["prompt_token_ids"]
    assert "token_ids" not in post(server, path).text


def test_every_event_has_the_usage_so_far(server: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *pieces, last = events(post(server, stream=True, stream_options=options, max_tokens=9, max_drafts=0, ignore_eos=True))
    counts = [piece["usage"]["completion_tokens"] for piece in pieces]
    assert counts == sorted(counts)
    assert counts[-1] == 9
    assert pieces[-1]["usage"] == last["usage"]


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose chat template writes messages twice, and behind them words that they may have."""
    folder = tmp_path_factory.mktemp("marked")
    template = folder / "marked.jinja"
    said = (
        "{% for m in messages %}{{ m.content }} {{ m.content | trim }} w2 {% endfor %}{% if add_generation_prompt %}w3{% endif %}"
    )
    template.write_text(said)
    served = Served(folder, "--chat-template", str(template), "--served-model-name", "a/name", "--max-new-tokens", "40")
    yield served
    assert served.stop() == 0


@pytest.mark.parametrize(
    ("options", "rendered"),
    [
        ({}, "w9 w9 w2 w2 w2 w2 w3"),
        ({"add_generation_prompt": False}, "w9 w9 w2 w2 w2 w2 "),
        ({"continue_final_message": True}, "w9 w9 w2 w2 w2"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "w9 w9 w2 w2 w2"),
    ],
    ids=str,
)
def test_where_a_conversation_ends(marked: Served, options: dict[str, Any], rendered: str) -> None:
    messages = [{"role": "user", "content": "w9"}, {"role": "assistant", "content": "w2"}]
    answer = post(marked, CHAT, messages=messages, return_token_ids=True, **options)
    asked = {"prompt": rendered, "add_special_tokens": False}
    wanted = httpx.post(f"{marked.url}/tokenize", json=asked, timeout=20).json()["tokens"]
    assert answer.json()["prompt_token_ids"] == wanted


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_length_that_is_not_served_names_its_field(marked: Served, name: str) -> None:
    asked: dict[str, Any] = {"max_tokens": None, name: 41}
    answer = post(marked, CHAT, **asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_a_model_has_the_name_that_it_is_served_by(marked: Served) -> None:
    assert [model["id"] for model in marked.get("/v1/models")["data"]] == ["a/name"]
    assert post(marked, model="a/name").json()["model"] == "a/name"
    assert post(marked, model=MODEL).status_code == 404


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_choice": ["ab|cd", 'e"f', "a\\b"]}, r'ab\|cd|e"f|a\\b'),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_grammar": 'root ::= "ab" [0-9]'}, "ab[0-9]"),
        ({"guided_json": {"enum": ["b", "c"]}}, '"[bc]"'),
        ({"guided_json": '{"enum": ["b", "c"]}'}, '"[bc]"'),
    ],
    ids=str,
)
def test_a_text_keeps_to_what_binds_it(bound: Served, options: dict[str, Any], wanted: str) -> None:
    for seed in range(3):
        answer = post(bound, prompt="a", temperature=1, seed=seed, max_tokens=20, **options)
        assert re.fullmatch(wanted, text(answer)), text(answer)
