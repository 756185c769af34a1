"""Calls of tools are read the same way however a text is cut, in the formats that families of models were trained on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polydraft.serving.markers import choose
from polydraft.serving.tool_calls import FORMS, CallReader

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "at": {}}}
SCHEMAS = {"get_weather": WEATHER, "now": {"type": "object", "properties": {}}}
Read = tuple[str, list[tuple[str, str]]]


def read(form: str, parts: list[str], most: int | None = None) -> Read:
    reader, content = CallReader(FORMS[form], SCHEMAS, most=most), ""
    calls: dict[int, list[str]] = {}
    ids = set()
    for place, part in enumerate(parts, 1):
        new, found = reader.feed(part, last=place == len(parts))
        content += new
        for call in found:
            assert bool(call.id) == bool(call.name) == (call.index not in calls), "a call begins with its id and name"
            ids.add(call.id)
            calls.setdefault(call.index, ["", ""])
            calls[call.index][0] += call.name
            calls[call.index][1] += call.arguments
    assert list(calls) == list(range(len(calls)))
    assert len(ids - {""}) == len(calls)
    return content, [(name, arguments) for name, arguments in calls.values()]


QUOTED = 'a "b"'
CITY = '{"city": "Hangzhou"}'
ODD = '{"city": "a</tool_call>}\\" {", "days": [1, {"x": "\\\\"}]}'
BEGIN, END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
ONE, SEP, STOP = (f"<\uff5ctool\u2581{name}\uff5c>" for name in ("call\u2581begin", "sep", "call\u2581end"))


def deepseek(arguments: str) -> str:
    return f"{ONE}function{SEP}get_weather\n```json\n{arguments}\n```{STOP}"


def glm(**arguments: str) -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>get_weather\n{pairs}</tool_call>"


def hermes(arguments: str, name: str = "get_weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


TEXTS: tuple[tuple[str, str, str, list[tuple[str, str]]], ...] = (
    ("hermes", hermes(CITY), "", [("get_weather", CITY)]),
    ("hermes", f"Let me see.\n{hermes(CITY)}\n{hermes('{}', 'now')}", "Let me see.", [("get_weather", CITY), ("now", "{}")]),
    ("hermes", hermes(ODD), "", [("get_weather", ODD)]),
    ("hermes", '<tool_call>{"arguments":{"a":[1]},"name":"now"}</tool_call>', "", [("now", '{"a":[1]}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("now", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\":\n1}"}</tool_call>', "", [("now", '{"a":\n1}')]),
    ("hermes", '<tool_call>{"arguments": "a\\x", "name": "now"}</tool_call>', "", [("now", '"a\\x"')]),
    ("hermes", '<tool_call>{"arguments": "\\ud83d", "name": "now"}</tool_call>', "", [("now", '"\\ud83d"')]),
    ("hermes", f"{hermes(CITY)}\nDone.\n", "\nDone.\n", [("get_weather", CITY)]),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n<tool_call>{"name": "now", "arguments": {}}', "",
     [("now", "{}"), ("now", "{}")]),
    ("hermes", "No <tool> here: {}\n", "No <tool> here: {}\n", []),
    ("hermes", "a <tool_call>what?</tool_call>", "a <tool_call>what?</tool_call>", []),
    ("hermes", f"<tool_call> no <tool_call>\n{hermes(CITY)}", "<tool_call> no <tool_call>", [("get_weather", CITY)]),
    ("hermes", '<tool_call>\n{"x": 1}\n</tool_call>', '<tool_call>\n{"x": 1}\n</tool_call>', []),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a', "", [("now", '{"a')]),
    ("hermes", '<tool_call>\n{"name": "no', '<tool_call>\n{"name": "no', []),
    ("hermes", "  ", "  ", []),
    ("ernie45", f"\n\n\n{hermes(CITY)}\n", "", [("get_weather", CITY)]),
    ("glm45", f"So:\n{glm(city=QUOTED, days='3', at='x y')}\n{glm(days='[1]')}", "So:",
     [("get_weather", '{"city": "a \\"b\\"", "days": 3, "at": "x y"}'), ("get_weather", '{"days": [1]}')]),
    ("glm45", "<tool_call>now\n</tool_call>", "", [("now", "{}")]),
    ("glm45", "<tool_call>now<arg_key>k</arg_key><arg_value>1</arg_value></tool_call>", "", [("now", '{"k": 1}')]),
    ("glm45", glm(city="5\n<b> </arg"), "", [("get_weather", '{"city": "5\\n<b> </arg"}')]),
    ("glm45", "<tool_call>\n</tool_call>", "<tool_call>\n</tool_call>", []),
    ("glm45", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Hang", "", [("get_weather", '{"city": "Hang')]),
    ("deepseek_v3", f"{BEGIN}{deepseek(CITY)}\n{deepseek(ODD)}{END}", "", [("get_weather", CITY), ("get_weather", ODD)]),
    ("deepseek_v3", f"Well.{BEGIN}{deepseek(CITY)}{END}", "Well.", [("get_weather", CITY)]),
    ("deepseek_v3", f"{BEGIN}{ONE}function{SEP}{STOP}{END}", f"{ONE}function{SEP}{STOP}", []),
    ("deepseek_v31", f"{BEGIN}{ONE}get_weather{SEP}{CITY}{STOP}{ONE}now{SEP}{{}}{STOP}{END}", "",
     [("get_weather", CITY), ("now", "{}")]),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {CITY}}}', "", [("get_weather", CITY)]),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; {"name": "get_weather", "arguments": {}}',
        "", [("now", "{}"), ("get_weather", "{}")],
    ),
    ("llama3_json", '{"answer": {"a": 1}} ', '{"answer": {"a": 1}} ', []),
    ("llama3_json", " plain {", " plain {", []),
    ("llama3_json", "<|python", "<|python", []),
    ("llama3_json", '{"name": 5}', '{"name": 5}', []),
    ("llama3_json", '{"name": "Alice", "age": 30}', '{"name": "Alice", "age": 30}', []),  # an answer: no tool is called so
    ("llama3_json", '{"parameters": {"a": 1}, "name": "Bob"}', '{"parameters": {"a": 1}, "name": "Bob"}', []),
    ("llama3_json", '{"name": "now"}', "", [("now", "{}")]),
    ("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>', "", [("now", "{}")]),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": ""}\n</tool_call>', "", [("now", "{}")]),
)  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS, ids=[f"{row[0]}-{row[1]!r:.60}" for row in TEXTS])
def test_a_text_in_pieces_is_the_whole_one(form: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(form, [text]) == (content, calls)
    assert read(form, [*text, ""]) == (content, calls)
    for place in range(len(text) + 1):
        assert read(form, [text[:place], text[place:]]) == (content, calls)
        assert read(form, [text[:place], text[place : place + 3], text[place + 3 :]]) == (content, calls)


def test_arguments_are_valid_json_where_the_call_is_whole() -> None:
    for _, text, _, calls in TEXTS:
        for _, arguments in calls:
            if text.endswith((">", "\n", "}")) and "a\\x" not in text:
                json.loads(arguments)


def test_arguments_are_streamed_as_they_are_written() -> None:
    for form, text in (("hermes", hermes(CITY)), ("deepseek_v3", BEGIN + deepseek(CITY)), ("glm45", glm(city="Hangzhou"))):
        reader = CallReader(FORMS[form], SCHEMAS)
        pieces = [call for letter in text for call in reader.feed(letter)[1]]
        assert pieces[0].name == "get_weather"
        assert not pieces[0].arguments
        assert sum(bool(piece.arguments) for piece in pieces) >= len("Hangzhou"), form


def test_calls_beyond_what_was_asked_for_are_left_out() -> None:
    text = f"{hermes(CITY)}\n{hermes('{}', 'now')}"
    assert read("hermes", [text], most=1) == read("hermes", [*text], most=1) == ("", [("get_weather", CITY)])


def test_a_key_that_does_not_end_is_no_call() -> None:
    text = '<tool_call>{"' + "x" * 1000
    assert read("hermes", [text]) == read("hermes", [*text]) == (text, [])


def test_a_name_that_nests_without_end_is_no_call() -> None:
    text = '<tool_call>{"name": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert read("hermes", [text]) == (text, [])


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ('{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><tool_call>', "hermes"),
        ("<tool_call>{name}\n<arg_key>", "glm45"),
        ("<response><tool_call>", "ernie45"),
        (f"{BEGIN}{ONE}{SEP}```json", "deepseek_v3"),
        (f"{BEGIN}{ONE}{SEP}", "deepseek_v31"),
        ('<|start_header_id|>{"name": function name, "parameters": }', "llama3_json"),
        ("<tool_call><function=", None),
        ("", None),
    ],
)
def test_a_template_says_the_form_where_it_is_certain(template: str, wanted: Any) -> None:
    form, _ = choose("auto", FORMS, template)
    assert (form.name if form else None) == wanted
