"""Reads calls of tools out of what a model writes, in the format of the model's family.

`FORMS` has the families as data. A `CallReader` follows one text, whole or in pieces of any size, and gives the same for both:
content, and calls whose arguments grow as they are written. What turns out to be no call is content.
"""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from polydraft.json_text import parsed
from polydraft.serving.markers import cut


@dataclass(frozen=True)
class CallForm:
    """One family. A call is `begin`, its body and `end`; all calls of a text together may stand between the `around` markers.
    Bodies: an `object` {"name": ..., "arguments": {...}}; `named`, the name, `neck`, and the arguments as JSON; `pairs`, the name
    and a marked key and value for each argument."""

    name: str
    body: Literal["object", "named", "pairs"]
    begin: str
    """"" where a text that begins with an object is a call."""
    end: str
    signs: tuple[str, ...] = ()
    """Texts in a chat template that are certain signs of the family."""
    around: tuple[str, str] = ("", "")
    between: str = "\n"
    head: str = "\n"
    """Written behind `begin`; of a `named` body, what stands before the name."""
    neck: str = ""
    tail: str = "\n"
    """Written before `end`."""
    arguments: str = "arguments"
    """Key of the arguments in an `object`."""
    skipped: str = ""
    """May stand before a call that has no `begin`."""
    text_arguments: bool = False
    """Whether chat templates of the family want the arguments of earlier calls as a text of JSON, not as an object."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All that a text may have of it."""
        pairs = PAIRS if self.body == "pairs" else ()
        return tuple(one for one in (*self.around, self.begin, self.end, self.skipped, *pairs) if one)


KEY, END_KEY, VALUE, END_VALUE = PAIRS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_CALL, _END = "<tool_call>", "</tool_call>"
_DEEPSEEK = ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>")
_BEGIN, _SEP, _STOP = (f"<\uff5ctool\u2581{what}\uff5c>" for what in ("call\u2581begin", "sep", "call\u2581end"))
FORMS: Final[Mapping[str, CallForm]] = {
    form.name: form
    for form in (
        # The first whose signs a template has is taken, so the more special ones come first.
        CallForm("glm45", "pairs", _CALL, _END, signs=(_CALL, KEY), head="", neck="\n", tail=""),
        CallForm("ernie45", "object", _CALL, _END, signs=(_CALL, "<response>")),
        CallForm("hermes", "object", _CALL, _END, signs=(_CALL, "</tool_call>", '"arguments"')),
        CallForm(
            "deepseek_v3", "named", _BEGIN, _STOP, signs=(_BEGIN, "```json"), around=_DEEPSEEK, head=f"function{_SEP}",
            neck="\n```json\n", tail="\n```", text_arguments=True,
        ),
        CallForm(
            "deepseek_v31", "named", _BEGIN, _STOP, signs=(_BEGIN, _SEP), around=_DEEPSEEK, between="", head="", neck=_SEP,
            tail="", text_arguments=True,
        ),
        CallForm(
            "llama3_json", "object", "", "", signs=("<|start_header_id|>", '"parameters"'), between="; ", head="", tail="",
            arguments="parameters", skipped="<|python_tag|>",
        ),
    )
}  # fmt: skip
"""The names are vLLM's."""


@dataclass
class Call:
    """One call, or what is new of it: `id` and `name` come first and once."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


MOST_KEY: Final = 1000
"""Characters of a key of an object at most: it is looked for anew whenever there is more of the text."""
Emit = Callable[[str, str], None]
"""Takes a name ("" behind the first time) and new text of the arguments."""


class JsonValue:
    """Where a value of JSON ends in a text that comes in pieces; it begins with the first of them."""

    def __init__(self) -> None:
        self._depth = 0
        self._string = self._escaped = self._begun = False
        self.done = False

    def take(self, text: str) -> int:
        """How many of these characters belong to it."""
        for place, character in enumerate(text):
            size = self._next(character)
            if self.done:
                return place + size
        return len(text)

    def _next(self, character: str) -> int:
        """Take a character; 0 where the value has ended before it."""
        self._begun, begun = True, self._begun
        if self._string:
            self._string = self._escaped or character != '"'
            self._escaped = not self._escaped and character == "\\"
            self.done = not self._string and not self._depth
        elif character == '"':
            self._string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            if not self._depth:
                self.done = True
                return 0
            self._depth -= 1
            self.done = not self._depth
        elif not self._depth and begun and (character in ", \t\r\n"):
            self.done = True
            return 0
        return 1


class Body(ABC):
    """What stands between the markers of a call. `failed`: it is no call; `done`: it has ended, and `rest` is behind it."""

    def __init__(self, form: CallForm, schemas: Mapping[str, Any], emit: Emit) -> None:
        self._form, self._schemas, self._emit = form, schemas, emit
        self.rest = ""
        self.failed = self.done = False

    def feed(self, text: str) -> None:
        """More of the text."""
        self.rest += text
        while not (self.done or self.failed) and self._step():
            pass

    @abstractmethod
    def _step(self) -> bool:
        """Go on by one part; False where more text is needed."""


class ObjectBody(Body):
    """{"name": ..., "arguments": ...}, in either order; a call without arguments has empty ones. Where nothing marks a call it
    is one only if a tool is called so: an answer may be such an object as well."""

    _member = re.compile(r'\s*,?\s*"((?:[^"\\]|\\.)*)"\s*:\s*(?=\S)')
    _known: Final = frozenset({"name", "arguments", "parameters", "type"})

    def __init__(self, form: CallForm, schemas: Mapping[str, Any], emit: Emit) -> None:
        super().__init__(form, schemas, emit)
        self._opened = False
        self._key = ""
        self._value: JsonValue | None = None
        self._text = ""
        self._name = ""
        self._early = ""
        """Arguments that came before the name."""
        self._argued = False
        """Whether some have come."""

    def _step(self) -> bool:
        if not self._opened:
            self.rest = self.rest.lstrip()
            self._opened, self.failed = self.rest.startswith("{"), bool(self.rest) and not self.rest.startswith("{")
            self.rest = self.rest[self._opened :]
            return self._opened
        return self._members() if self._value is None else self._go_on(self._value)

    def _members(self) -> bool:
        """The next key, or the end."""
        ahead = self.rest.lstrip()
        found = self._member.match(self.rest)
        if ahead.startswith("}"):
            self.rest, self.done, self.failed = ahead[1:], bool(self._name), not self._name
            if self.done and not self._argued:
                self._emit("", "{}")
        elif found is None:
            self.failed = (bool(ahead) and ahead[0] not in ',"') or len(ahead) > MOST_KEY
        else:
            self._key, self._value, self._text = found[1], JsonValue(), ""
            self.rest = self.rest[found.end() :]
            self.failed = not self._form.begin and not self._name and self._key not in self._known
        return found is not None

    def _go_on(self, value: JsonValue) -> bool:
        """Within the value of a key."""
        size = value.take(self.rest)
        new, self.rest = self.rest[:size], self.rest[size:]
        self._text += new
        if self._key in ("arguments", "parameters") and not self._text.startswith('"'):
            self._argue(new)
        if value.done:
            self._value = None
            self._ended()
        return value.done

    def _ended(self) -> None:
        """A value is there as a whole."""
        if self._key == "name":
            name = _json(self._text)
            self.failed = not isinstance(name, str) or not name or not (self._form.begin or name in self._schemas)
            if not self.failed:
                self._name = name
                self._emit(name, self._early)
        elif self._key in ("arguments", "parameters") and self._text.startswith('"'):
            self._argue(_within(self._text))  # JSON within JSON

    def _argue(self, text: str) -> None:
        """More of the arguments."""
        self._argued = self._argued or bool(text)
        if self._name:
            self._emit("", text)
        else:
            self._early += text


class NamedBody(Body):
    """The name and the arguments as JSON."""

    def __init__(self, form: CallForm, schemas: Mapping[str, Any], emit: Emit) -> None:
        super().__init__(form, schemas, emit)
        self._value: JsonValue | None = None
        self._begun = False
        """Whether the arguments have."""

    def _step(self) -> bool:
        if self._value is not None:
            text = self.rest if self._begun else self.rest.lstrip()
            size, self._begun = self._value.take(text), self._begun or bool(text)
            if size:
                self._emit("", text[:size])
            self.rest, self.done = text[size:], self._value.done
            return False
        before, found, behind = cut(self.rest, (self._form.neck, self._form.end))
        if not found:
            return False
        name = before.removeprefix(self._form.head).strip()
        self.failed = found == self._form.end or not name
        if not self.failed:
            self.rest, self._value = behind, JsonValue()
            self._emit(name, "")
        return not self.failed


class PairsBody(Body):
    """The name, and keys and values between markers of their own. Values are texts where the tool wants texts, else JSON, and
    texts where they are none."""

    def __init__(self, form: CallForm, schemas: Mapping[str, Any], emit: Emit) -> None:
        super().__init__(form, schemas, emit)
        self._at: Literal["name", "key", "gap", "value", "next"] = "name"
        self._name = self._key = ""
        self._opening = "{"
        self._plain = False
        """Whether the value is a text for certain, and goes out as it comes."""

    def _step(self) -> bool:
        wanted = {"key": (END_KEY,), "gap": (VALUE,), "value": (END_VALUE,)}.get(self._at, (KEY, self._form.end))
        before, found, behind = cut(self.rest, wanted)
        if self._at == "value" and self._plain and before:
            self._emit("", _escaped(before))
            self.rest = before = self.rest[len(before) :]
        if not found:
            return False
        if self._at == "name":
            self._name = before.strip()
            self.failed = not self._name
            if self.failed:
                return False
            self._emit(self._name, "")
        elif self._at == "key":
            self._key = before.strip()
            self._plain = _is_text(self._schemas.get(self._name), self._key)
            self._emit("", f"{self._opening}{json.dumps(self._key, ensure_ascii=False)}: " + '"' * self._plain)
            self._opening = ", "
        elif self._at == "value":
            self._emit("", '"' if self._plain else _as_json(before))
        if found == self._form.end:
            self._emit("", "}" if self._opening == ", " else "{}")
            self.rest, self.done = found + behind, True
            return False
        self.rest, self._at = behind, {KEY: "key", END_KEY: "gap", VALUE: "value", END_VALUE: "next"}[found]  # type: ignore[assignment]
        return True


BODIES: Final[Mapping[str, type[Body]]] = {"object": ObjectBody, "named": NamedBody, "pairs": PairsBody}


class CallReader:
    """Follows one text. `schemas`: what each tool's parameters are, by its name; `most`: calls at most, None: as many as come."""

    def __init__(self, form: CallForm, schemas: Mapping[str, Any], *, most: int | None = None) -> None:
        self._form, self._schemas, self._most = form, schemas, most
        self._held = ""
        self._raw = ""
        """The call that is being read, from its marker on, while it may turn out to be none."""
        self._body: Body | None = None
        self._at: Literal["text", "body", "end", "plain"] = "text"
        self._count = self._begun = 0
        """Calls so far, and before the one that is being read."""
        self._new: dict[int, Call] = {}
        self._fresh = True
        """Whether nothing but calls and blanks have come since the beginning, or since the last call."""

    def feed(self, text: str, *, last: bool = False) -> tuple[str, list[Call]]:
        """More of the text, `last` with its end; returns new content and what is new of calls."""
        self._held += text
        content = ""
        while True:
            before = self._at, len(self._held), self._raw
            content += self._go_on(last=last)
            if (self._at, len(self._held), self._raw) == before:
                break
        new, self._new = list(self._new.values()), {}
        return content, new

    def _go_on(self, *, last: bool) -> str:
        """The new content of the state, which the text may leave with it."""
        if self._at == "body" and self._body is not None:
            return self._in_body(self._body, last=last)
        if self._at == "end":
            return self._behind()
        if self._at == "plain":
            content, self._held = self._held, ""
            return content
        return self._text(last=last) if self._form.begin else self._beginning(last=last)

    def _text(self, *, last: bool) -> str:
        """Content up to a call. Blanks beside calls belong to them."""
        form = self._form
        before, found, rest = cut(self._held, [mark for mark in (*form.around, form.begin) if mark])
        part = before.rstrip()
        blanks, self._held = before[len(part) :], rest
        self._fresh = self._fresh and not part and not (rest and not found)
        if found == form.begin:
            self._open(blanks + found)
        elif not found:
            self._held = blanks + rest
            if last:
                left, self._held = self._held, ""
                return part if self._count and not left.strip() and self._fresh else part + left
        return part

    def _open(self, raw: str) -> None:
        """A call begins with this."""
        self._at, self._raw, self._begun = "body", raw, self._count
        self._body = BODIES[self._form.body](self._form, self._schemas, self._emit)

    def _emit(self, name: str, arguments: str) -> None:
        self._count += bool(name)
        if self._most is None or self._count <= self._most:
            index = self._count - 1
            new = self._new.setdefault(index, Call(index))
            if name:
                new.id, new.name = f"call_{uuid.uuid4().hex[:24]}", name
            new.arguments += arguments

    def _in_body(self, body: Body, *, last: bool) -> str:
        """A call goes on, or turns out to be none."""
        text, self._held = self._held, ""
        body.feed(text)
        known = self._count > self._begun
        self._raw = "" if known else self._raw + text
        if body.done or (body.failed and known):
            self._at, self._held, self._body, self._raw = "end", body.rest, None, ""
            return ""
        if not (body.failed or last):
            return ""
        raw, self._raw, self._body = self._raw, "", None
        begin = self._form.begin
        if not (body.failed and begin):
            self._at = "plain"
            return raw
        size = raw.index(begin) + len(begin)
        self._at, self._fresh, self._held = "text", False, raw[size:]
        return raw[:size]

    def _behind(self) -> str:
        """Up to the end of a call, which some texts leave out."""
        form = self._form
        if not form.begin:
            self._held = self._held.lstrip(" \t\r\n;")
            if self._held.startswith("{"):
                self._open("")
            elif self._held:
                self._at = "plain"
            return ""
        _, found, rest = cut(self._held, (form.end, form.begin))
        self._held = found + rest if found == form.begin else rest
        if found:
            self._at, self._fresh = "text", True
        return ""

    def _beginning(self, *, last: bool) -> str:
        """Whether a text that needs no marker begins with a call."""
        text = self._held.lstrip()
        if text.startswith(self._form.skipped):
            text = text[len(self._form.skipped) :].lstrip()
        elif self._form.skipped.startswith(text) and not last:
            return ""
        if text.startswith("{"):
            raw = self._held[: len(self._held) - len(text)]
            self._open(raw)
            self._held = text
        elif text or last:
            self._at = "plain"
        return ""


_NONE: Final = object()


def _json(text: str) -> Any:
    """A value of JSON that an answer can have, which excludes NaN and half of a character; `_NONE` for what is none."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return _NONE


def _within(text: str) -> str:
    """What a string of JSON says, line ends as they are among what it may have; one that is none as it was written."""
    try:
        said = str(parsed(text, strict=False))
        said.encode()
    except ValueError:  # or half a character, which no answer can have
        return text
    return said


def _as_json(text: str) -> str:
    """A value as it is where it is JSON, else as a text."""
    return json.dumps(text, ensure_ascii=False) if _json(text) is _NONE else text.strip()


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _is_text(schema: Any, key: str) -> bool:
    """Whether a tool wants a text for an argument, and nothing else."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    wanted = properties.get(key) if isinstance(properties, Mapping) else None
    return isinstance(wanted, Mapping) and wanted.get("type") == "string"
