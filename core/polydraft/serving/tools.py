"""The tools of a request: what is refused, what the chat template gets, and the grammar of the calls that are bound.

A call is bound to its tool's schema where `tool_choice` wants a call, where the tool is `strict`, and beside a `response_format`,
since a grammar then binds the whole text. The service asks for it; the grammar is in the format that the model writes and
`CallReader` reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from polydraft.errors import RequestError
from polydraft.json_text import parsed
from polydraft.serving import protocol
from polydraft.serving.tool_calls import END_KEY, END_VALUE, FORMS, KEY, VALUE, CallForm

OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
SPACING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As templates write JSON."""


def offered(body: protocol.ChatRequest, form: CallForm | None, variables: Collection[str]) -> list[protocol.Tool]:
    """The tools that a model is shown, checked: none with `tool_choice` "none". `variables`: those that the chat template reads.
    Raises `RequestError`."""
    tools, choice = body.tools or [], body.tool_choice or "auto"
    if not tools and body.tool_choice not in (None, "none"):
        raise RequestError("tool_choice was given without tools; add tools, or leave it out", "tool_choice")
    names = [tool.function.name for tool in tools]
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise RequestError(f"tools has two functions called {twice!r}, wanted names that differ; rename one", "tools")
    for tool in tools:
        parameters = tool.function.parameters
        if parameters and parameters.get("type", "object") != "object":
            raise RequestError(
                f"the parameters of the function {tool.function.name!r} have the type {parameters['type']!r}, wanted object; "
                "correct the request",
                "tools",
            )
    if not tools or choice == "none":
        return []
    if "tools" not in variables:
        raise RequestError(
            "the model's chat template has no place for tools, so it would not know them; leave them out, or start the server "
            "with another --chat-template",
            "tools",
        )
    if form is None:
        raise RequestError(
            "the server does not know how this model writes calls of tools; start it with --tool-call-parser, one of "
            f"{', '.join(FORMS)}",
            "tools",
        )
    if isinstance(choice, protocol.ToolChoice) and choice.function.name not in names:
        raise RequestError(
            f"tool_choice names {choice.function.name!r}, wanted one of the tools: {', '.join(names)}; correct the request",
            "tool_choice",
        )
    return tools


def shown(tools: Sequence[protocol.Tool]) -> list[dict[str, Any]] | None:
    """The tools as chat templates get them: without `strict`, which is for the server. None without any."""
    plain = [{"type": "function", "function": _plain(tool.function)} for tool in tools]
    return plain or None


def _plain(function: protocol.Function) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(function)
    return {name: value for name, value in fields.items() if value is not None and name != "strict"}


def schemas(tools: Sequence[protocol.Tool]) -> dict[str, Any]:
    """What parameters each tool takes, by its name."""
    return {tool.function.name: tool.function.parameters or {} for tool in tools}


def with_calls(message: Mapping[str, Any], form: CallForm | None) -> dict[str, Any]:
    """A message of an earlier call, with its arguments as the model's chat template wants them: an object, or their text."""
    calls = message["tool_calls"]
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise RequestError(
            "tool_calls of a message are no calls, wanted a list of objects with a function, which has a name and arguments as a "
            "text; correct the messages",
            "messages",
        )
    changed = []
    for call in calls:
        function = dict(call["function"])
        arguments = function.get("arguments") or "{}"
        try:
            value = parsed(arguments)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise RequestError(
                f"the arguments of a call of {function['name']!r} are {arguments!r:.200}, wanted the text of a JSON object; "
                "correct the messages",
                "messages",
            )
        function["arguments"] = arguments if form is not None and form.text_arguments else value
        changed.append({**call, "function": function})
    return {**message, "tool_calls": changed}


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    return function.get("arguments") is None or isinstance(function["arguments"], str)


def bound(
    body: protocol.ChatRequest, tools: Sequence[protocol.Tool], form: CallForm, token: Callable[[str], int | None],
    answer: Mapping[str, Any] | None,
) -> str | None:  # fmt: skip
    """The grammar, in Lark's notation as llguidance reads it, of a text that may or must call tools; None where it is free.
    `token`: the id of a marker that is an added token, which the library never spells, None for others; `answer`: the constraint
    of a text that calls none."""
    choice = body.tool_choice or "auto"
    named = choice.function.name if isinstance(choice, protocol.ToolChoice) else None
    called = [tool for tool in tools if named in (None, tool.function.name)]
    forced = choice != "auto"
    given = answer or {}
    schema = given.get("json_schema", json.dumps(OBJECT) if "json_object" in given else None)
    if answer is not None and (body.response_format is None or schema is None or body.response_format.type == "text"):
        raise RequestError(
            "tools and another constraint bind one text, wanted one of them, or a response_format beside tools; leave one out",
            "constraint",
        )
    if not (forced or schema is not None or any(tool.function.strict for tool in tools)):
        return None
    several = named is None and body.parallel_tool_calls is not False
    grammar = _Grammar(form, called, token, exact=forced, several=several)
    if schema is not None and not forced:
        return grammar.text(f"GAP? {grammar.calls} | GAP? {_schema(parsed(schema))}")
    return grammar.text(f"GAP? {grammar.calls}" if forced else grammar.between_text())


class _Grammar:
    """Rules for calls of some tools. `exact`: bind tools that are not strict to their schema, too; `several`: allow several."""

    def __init__(
        self, form: CallForm, tools: Sequence[protocol.Tool], token: Callable[[str], int | None], *, exact: bool, several: bool
    ) -> None:
        self._form, self._token, self._several = form, token, several
        self._rules: list[str] = []
        insides = []
        for number, tool in enumerate(tools):
            insides.append(f"inside_{number}")
            parameters = tool.function.parameters or OBJECT if exact or tool.function.strict else None
            self._rules.append(f"inside_{number}: {_joined(self._inside(number, tool.function.name, parameters))}")
        self._rules.append(f"inside: {' | '.join(insides)}")
        self._rules.append(f"one: {_joined((self._marker(form.begin), 'inside'))}")

    @property
    def calls(self) -> str:
        """One call, or as many as are wanted, with what stands around them."""
        return _joined((self._marker(self._form.around[0]), self._ones("one"), self._marker(self._form.around[1])))

    def _ones(self, first: str) -> str:
        return f"{first} ({_joined((_quoted(self._form.between), 'one'))})*" if self._several else first

    def between_text(self) -> str:
        """Calls within a text that is free besides."""
        form = self._form
        if not form.begin:  # what begins with an object is a call
            self._rules.append(f"plain: /\\s*[^{{\\s](.|\\n)*/ | {_quoted(form.skipped)} {self.calls} | {self.calls}")
            return "plain"
        marker = form.around[0] or form.begin
        self._rules.append(self._up_to("opening", marker))
        inside = _joined((self._marker(form.begin), "inside")) if form.around[0] else "inside"
        self._rules.append(
            f"block: opening {_joined((self._ones(inside) if form.around[0] else inside, self._marker(form.around[1])))}"
        )
        return f"block{'*' if self._several else '?'} TEXT"

    def _up_to(self, rule: str, marker: str) -> str:
        """A rule for any text up to a marker, and that."""
        number = self._token(marker)
        return f"{rule}: TEXT <[{number}]>" if number is not None else f"{rule}[lazy]: TEXT {_quoted(marker)}"

    def _inside(self, number: int, name: str, parameters: Mapping[str, Any] | None) -> Iterator[str]:
        """What stands in a call behind its begin."""
        form = self._form
        if form.body == "pairs":
            yield _quoted(name + form.neck)
            if parameters is None:
                self._rules.append(self._up_to(f"rest_{number}", form.end))
                yield f"rest_{number}"
                return
            yield from self._pairs(number, name, parameters)
        else:
            opening = f'"name": {json.dumps(name)}, "{form.arguments}": ' if form.body == "object" else name + form.neck
            yield _quoted(form.head)
            yield _quoted("{" * (form.body == "object"))  # for itself, as an answer may begin with it as well
            yield _quoted(opening)
            yield _schema(OBJECT if parameters is None else parameters)
            yield _quoted("}" * (form.body == "object") + form.tail)
        yield self._marker(form.end)

    def _pairs(self, number: int, name: str, parameters: Mapping[str, Any]) -> Iterator[str]:
        """Keys and values, in the schema's order. Raises `RequestError` for parameters that are no schema."""
        properties, required = parameters.get("properties") or {}, parameters.get("required") or ()
        _check(name, "properties", properties, isinstance(properties, Mapping), "an object")
        _check(name, "required", required, isinstance(required, (list, tuple)), "a list of names")
        shared = {part: parameters[part] for part in ("$defs", "definitions") if part in parameters}
        for place, (key, wanted) in enumerate(properties.items()):
            opening = _joined((self._marker(KEY), _quoted(key), self._marker(END_KEY), _quoted("\n"), self._marker(VALUE)))
            wanted = {} if wanted is True else wanted  # noqa: PLW2901  which is any value
            _check(name, f"schema of {key!r}", wanted, isinstance(wanted, Mapping), "an object or true")
            texts = wanted.get("enum", [""])
            _check(name, f"enum of {key!r}", texts, isinstance(texts, list) and bool(texts), "a list of values")
            is_text = wanted.get("type") == "string"
            if is_text and not {"enum", "const"}.intersection(wanted):
                rule = f"value_{number}_{place}"
                self._rules.append(self._up_to(rule, END_VALUE))
                value = rule
            else:
                value = _joined((_text_schema(wanted) if is_text else _schema({**wanted, **shared}), self._marker(END_VALUE)))
            pair = f"{opening} {value} {_quoted(chr(10))}"
            yield pair if key in required else f"({pair})?"

    def _marker(self, marker: str) -> str:
        number = self._token(marker) if marker else None
        return _quoted(marker) if number is None else f"<[{number}]>"

    def text(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join(("%llguidance {}", f"start: {start}", *self._rules, r"TEXT: /(.|\n)*/", r"GAP: /\n{1,2}/"))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _joined(parts: Sequence[str] | Iterator[str]) -> str:
    return " ".join(part for part in parts if part)


def _schema(schema: Any) -> str:
    spaced = {**schema, "x-guidance": SPACING} if isinstance(schema, Mapping) else schema
    return f"%json {json.dumps(spaced)}"


def _check(tool: str, what: str, value: object, fits: bool, wanted: str) -> None:
    """Refuse a part of a tool's parameters that is something else than a schema has there."""
    if not fits:
        raise RequestError(f"the {what} of tool {tool!r} is {value!r:.200}, wanted {wanted}; correct the request", "tools")


def _text_schema(wanted: Mapping[str, Any]) -> str:
    """A text that is written without quotes, of those that a schema allows."""
    texts = [wanted["const"]] if "const" in wanted else wanted["enum"]
    return f"({' | '.join(_quoted(str(text)) for text in texts)})"
