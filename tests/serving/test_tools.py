"""What a grammar of tools allows is read as calls that keep to their schemas, in every family's format."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest

llguidance = pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="the extra `test` is not installed")
tokenizers = pytest.importorskip("tokenizers")

from llguidance.numpy import fill_next_token_bitmask  # noqa: E402  behind the check for the library

from polydraft.errors import RequestError  # noqa: E402
from polydraft.serving import protocol, tools  # noqa: E402
from polydraft.serving.tool_calls import FORMS, CallReader  # noqa: E402

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["rome", "oslo"]},
        "note": {"type": "string"},
        "day": {"$ref": "#/$defs/day"},
        "at": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
    },
    "required": ["city", "day"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}},
}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "now": NOW}
STEPS = 4000
FORM = protocol.ResponseFormat("json_object")


@cache
def tokenizer(form: str, *, special: bool) -> tuple[Any, Any, dict[str, int]]:
    """One of bytes, and of markers where these are `special`: as grammars have it, as the library has it, and their ids."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"<eos>": 0, **{one: i for i, one in enumerate(alphabet, 1)}}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    markers = FORMS[form].markers if special else ()
    made.add_special_tokens([tokenizers.AddedToken(marker, special=True, normalized=False) for marker in markers])
    ids = {marker: made.token_to_id(marker) for marker in markers}
    return llguidance.LLTokenizer(made.to_str(), eos_token=0), made, ids


def walk(form: str, grammar: str, seed: int, *, special: bool) -> str:
    """A text that a grammar allows, drawn at random: by tokens, or by markers and signs of JSON as far as they may follow."""
    drawn = random.Random(seed)
    library, made, _ = tokenizer(form, special=special)
    matcher = llguidance.LLMatcher(library, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    mask, tokens = np.zeros((1, -(-library.vocab_size // 32)), np.int32), []
    signs = [made.encode(sign, add_special_tokens=False).ids for sign in (*FORMS[form].markers, '"', "{", "}", "}}")]
    following: list[int] = []
    for _ in range(STEPS):
        if matcher.is_stopped():
            break
        fill_next_token_bitmask(matcher, mask, 0)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        if allowed == [0] or (0 in allowed and drawn.random() < (0.3 if len(allowed) < 9 else 0.03)):
            break
        if not following or following[0] not in allowed:
            fitting = [sign for sign in signs if sign[0] in allowed]
            wanted = fitting and drawn.random() < 0.5
            following = drawn.choice(fitting) if wanted else [drawn.choice([token for token in allowed if token])]
        token, *following = following
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
    else:
        raise AssertionError("the text does not end")
    return str(made.decode(tokens, skip_special_tokens=False))


def offered(strict: bool | None) -> list[protocol.Tool]:
    return [
        protocol.Tool("function", protocol.Function(name, parameters=schema, strict=strict)) for name, schema in SCHEMAS.items()
    ]


def request(strict: bool | None = None, **options: Any) -> protocol.ChatRequest:
    return protocol.ChatRequest(messages=[], tools=offered(strict), **options)


def grammar_of(form: str, body: protocol.ChatRequest, answer: Any = None, *, special: bool) -> str:
    text = tools.bound(body, body.tools or [], FORMS[form], tokenizer(form, special=special)[2].get, answer)
    assert text is not None
    return text


def read(form: str, text: str) -> tuple[str, list[Any]]:
    content, calls = CallReader(FORMS[form], SCHEMAS).feed(text, last=True)
    return content, calls


# Calls of ERNIE are those of Hermes.
ALL = pytest.mark.parametrize("special", [False, True], ids=["spelt", "tokens"])


@ALL
@pytest.mark.parametrize("form", [name for name in FORMS if name != "ernie45"])
def test_calls_that_are_required_keep_to_their_schemas(form: str, special: bool) -> None:
    body = request(tool_choice="required")
    grammar = grammar_of(form, body, special=special)
    counts, names = set(), set()
    for seed in range(12):
        text = walk(form, grammar, seed, special=special)
        content, calls = read(form, text)
        assert not content, text
        assert calls, text
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
            names.add(call.name)
        counts.add(len(calls))
    assert names == set(SCHEMAS)
    assert len(counts) > 1, "several calls at once"


@ALL
@pytest.mark.parametrize("form", [name for name in FORMS if name != "ernie45"])
def test_one_call_is_one(form: str, special: bool) -> None:
    named = protocol.ToolChoice("function", protocol.FunctionName("weather"))
    for options in ({"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": named}):
        grammar = grammar_of(form, request(**options), special=special)
        for seed in range(4):
            _, calls = read(form, walk(form, grammar, seed, special=special))
            assert len(calls) == 1
            assert calls[0].name == "weather" or "parallel_tool_calls" in options


@ALL
@pytest.mark.parametrize("form", [name for name in FORMS if name != "ernie45"])
def test_a_strict_tool_is_bound_within_a_free_text(form: str, special: bool) -> None:
    grammar = grammar_of(form, request(strict=True), special=special)
    called = texts = 0
    for seed in range(16):
        text = walk(form, grammar, seed, special=special)
        content, calls = read(form, text)
        texts += bool(content)
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
            called += 1
    assert texts, "a text without calls"
    assert called, "and calls"


@ALL
@pytest.mark.parametrize("form", [name for name in FORMS if name != "ernie45"])
def test_beside_a_schema_a_text_calls_or_answers(form: str, special: bool) -> None:
    answer = {"json_schema": json.dumps({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})}
    grammar = grammar_of(form, request(parallel_tool_calls=False, response_format=FORM), answer, special=special)
    kinds = set()
    for seed in range(16):
        content, calls = read(form, walk(form, grammar, seed, special=special))
        assert bool(content) != bool(calls)
        kinds.add(bool(calls))
        if content:
            assert isinstance(json.loads(content)["ok"], bool)
    assert kinds == {True, False}


def test_any_object_is_an_answer_too() -> None:
    assert '%json {"type": "object", "x-guidance"' in grammar_of(
        "hermes", request(response_format=FORM), {"json_object": True}, special=False
    )


def test_a_required_call_leaves_no_answer_to_bind() -> None:
    body = request(tool_choice="required")
    free = grammar_of("hermes", body, special=False)
    assert grammar_of("hermes", msgspec.structs.replace(body, response_format=FORM), {"json_object": True}, special=False) == free


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"properties": [1]}, "the properties of tool 'odd' is [1], wanted an object"),
        ({"properties": {"x": {}}, "required": 5}, "the required of tool 'odd' is 5, wanted a list of names"),
        ({"properties": {"x": 5}}, "the schema of 'x' of tool 'odd' is 5, wanted an object or true"),
        ({"properties": {"x": {"type": "string", "enum": 5}}}, "the enum of 'x' of tool 'odd' is 5, wanted a list of values"),
        ({"properties": {"x": {"type": "string", "enum": []}}}, "the enum of 'x' of tool 'odd' is [], wanted a list of values"),
    ],
)
def test_parameters_that_are_no_schema_are_the_clients_fault(parameters: dict[str, Any], said: str) -> None:
    body = request(tool_choice="required")
    body.tools = [protocol.Tool("function", protocol.Function("odd", parameters=parameters))]
    with pytest.raises(RequestError, match=f"^{re.escape(said)}; correct the request$"):
        grammar_of("glm45", body, special=False)


def test_a_property_may_be_anything() -> None:
    body = request(tool_choice="required")
    body.tools = [protocol.Tool("function", protocol.Function("odd", parameters={"properties": {"x": True}, "required": ["x"]}))]
    assert "<arg_key>x</arg_key>" in walk("glm45", grammar_of("glm45", body, special=False), 0, special=False)


def test_a_free_request_is_not_bound() -> None:
    for strict in (None, False):
        body = request(strict)
        assert tools.bound(body, body.tools or [], FORMS["hermes"], dict[str, int]().get, None) is None


def test_a_tool_that_is_not_strict_is_free_beside_one_that_is() -> None:
    body = request()
    body.tools = [*offered(True)[:1], *offered(None)[1:]]
    grammar = tools.bound(body, body.tools, FORMS["glm45"], dict[str, int]().get, None)
    assert re.search(r"rest_1\[lazy\]", grammar or "")
