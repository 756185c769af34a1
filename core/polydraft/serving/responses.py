"""OpenAI's responses, in their stateless form: a request becomes a chat, and what the model says becomes items and events.

The service makes a chat of each request (`as_chat`) and feeds a `ResponseAnswer` what is new of it. Nothing is kept: a client
that goes on sends all items again.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from polydraft.errors import RequestError
from polydraft.serving import protocol
from polydraft.serving.answers import Choice, Said, usage
from polydraft.serving.tool_calls import Call

Event = dict[str, Any]
ELSEWHERE: Final = {"max_tokens": "max_output_tokens", "n": "one text", "response_format": "text.format"}
"""Fields of chats that responses have not, and what they have instead."""
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
"""Types of parts that are text."""


def as_chat(body: protocol.ResponsesRequest, kind: type[protocol.ChatRequest]) -> protocol.ChatRequest:
    """The chat that a request stands for, a record of `kind`. Raises `RequestError`."""
    given = next((name for name in ELSEWHERE if getattr(body, name) is not None), None)
    if given is not None:
        raise RequestError(f"{given} is no field of a response, which has {ELSEWHERE[given]}; correct the request", given)
    text, reasoning = body.text or protocol.ResponseText(), body.reasoning or protocol.ResponseReasoning()
    form = text.format
    shared = {name: getattr(body, name) for name in protocol.Sampling.__struct_fields__}
    shared |= {name: getattr(body, name) for name in body.__struct_fields__ if name.startswith(protocol.OF_PLUGINS)}
    shared["response_format"] = None if form is None else _format(form)
    tools = [_tool(tool) for tool in body.tools] if body.tools is not None else None
    choice: Any = body.tool_choice
    if isinstance(choice, protocol.ResponseToolChoice):
        choice = protocol.ToolChoice("function", protocol.FunctionName(choice.name))
    return kind(
        **shared, messages=_messages(body), max_completion_tokens=body.max_output_tokens, tools=tools, tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls, chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=reasoning.effort, verbosity=text.verbosity,
    )  # fmt: skip


def _format(form: protocol.ResponseTextFormat) -> protocol.ResponseFormat:
    schema = {"name": form.name, "schema": form.schema} if form.type == "json_schema" else None
    return protocol.ResponseFormat(form.type, schema)


def _tool(tool: protocol.ResponseTool) -> protocol.Tool:
    return protocol.Tool("function", protocol.Function(tool.name, tool.description, tool.parameters, tool.strict))


# -- items that were sent --------------------------------------------------------------------------
def _messages(body: protocol.ResponsesRequest) -> list[dict[str, Any]]:
    """The items as messages of a chat: what the model said without a pause is one message, as chat templates want it."""
    found: list[dict[str, Any]] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    turn: dict[str, Any] | None = None
    for item in body.input:
        kind = item.get("type", "message")
        role = "assistant" if kind in ("function_call", "reasoning") else item.get("role")
        if role != "assistant":
            turn = None
            found.append(_other(kind, item))
            continue
        if turn is None or _closes(turn, kind):
            turn = {"role": "assistant"}
            found.append(turn)
        _say(turn, kind, item)
    for message in found:
        message.setdefault("content", "" if "tool_calls" not in message else None)
    return found


def _closes(turn: Mapping[str, Any], kind: str) -> bool:
    """Whether an item cannot belong to what the model has said so far in a turn."""
    if kind == "reasoning":
        return len(turn) > 1
    return kind == "message" and ("content" in turn or "tool_calls" in turn)


def _say(turn: dict[str, Any], kind: str, item: Mapping[str, Any]) -> None:
    """Put an item of the model's into its turn."""
    if kind == "reasoning":
        if item.get("encrypted_content") is not None:
            raise RequestError(
                "an item of the input has encrypted_content, which this server cannot read; send content", "messages"
            )
        turn["reasoning_content"] = _text(item.get("content") or item.get("summary") or [])
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        turn.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": function})
    elif kind == "message":
        turn["content"] = _text(item.get("content"))
    else:
        raise _unknown(kind)


def _other(kind: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """The message of an item that is not the model's."""
    if kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise RequestError("a function_call_output has no call_id, wanted that of its function_call; add it", "messages")
        return {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item.get("output"))}
    if kind != "message":
        raise _unknown(kind)
    if not isinstance(item.get("role"), str):
        raise RequestError("a message of the input has no role, wanted user, assistant, system or developer; add it", "messages")
    return {"role": item["role"], "content": _text(item.get("content"))}


def _unknown(kind: Any) -> RequestError:
    wanted = "message, function_call, function_call_output or reasoning"
    return RequestError(f"an item of the input is a {kind!r:.100}, wanted {wanted}; leave it out", "messages")


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(_has_text(part) and part.get("type") in TEXTS for part in parts):
        raise RequestError(
            "an item of the input has content that is no text, and this server reads nothing else; send text", "messages"
        )
    return "".join(part["text"] for part in parts)


def _has_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


# -- what is answered ------------------------------------------------------------------------------
@dataclass
class ResponseAnswer:
    """The answer of one request while it is written: its items, and the events of a stream. `chat`: what the request became."""

    body: protocol.ResponsesRequest
    chat: protocol.ChatRequest
    id: str
    model: str
    created: int
    output: list[dict[str, Any]] = field(default_factory=list)
    _number: int = 0
    _open: bool = False
    """Whether the last item is still being written."""

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def begin(self) -> Iterator[Event]:
        """The events before any text."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self.response("in_progress"))

    def feed(self, said: Said) -> Iterator[Event]:
        """What is new becomes items, and events about them."""
        last = self.output[-1] if self.output else {}
        first = [call for call in said.calls if not call.id and last.get("type") == "function_call"]
        yield from self._written("reasoning", said.reasoning)
        for call in first:
            yield from self._called(call)
        yield from self._written("message", said.content)
        for call in said.calls:
            if call not in first:
                yield from self._called(call)

    def take(self, said: Said) -> None:
        """What is new becomes items; nobody is told."""
        for _ in self.feed(said):
            pass

    def whole(self, choice: Choice) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        *_, last = self.end(choice)
        answer: dict[str, Any] = last["response"]
        return answer

    def end(self, choice: Choice) -> Iterator[Event]:
        """The events behind the text."""
        cut_off = choice.finish_reason == "length"
        yield from self._close("incomplete" if cut_off else "completed")
        kind = "incomplete" if cut_off else "completed"
        yield self._event(f"response.{kind}", response=self.response(kind, choice))

    def error(self, failure: Mapping[str, Any]) -> Event:
        """The last event of a stream that broke; `failure`: OpenAI's object of the error."""
        told = {name: failure[name] for name in ("message", "param")}
        return self._event("error", code=str(failure["code"]), **told)

    def response(self, status: str, choice: Choice | None = None) -> dict[str, Any]:
        """The whole object; without `choice` it has no text yet."""
        body, chat = self.body, self.chat
        cut_off = {"reason": "max_output_tokens"} if status == "incomplete" else None
        text: dict[str, Any] = msgspec.to_builtins(body.text.format) if body.text and body.text.format else {"type": "text"}
        effort = body.reasoning.effort if body.reasoning else None
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "error": None,
            "incomplete_details": cut_off, "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "model": self.model, "output": list(self.output) if choice is not None else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False, "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None}, "store": False,
            "temperature": 1.0 if chat.temperature is None else chat.temperature,
            "text": {"format": {name: value for name, value in text.items() if value is not None}},
            "tool_choice": "auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice),
            "tools": [msgspec.to_builtins(tool) for tool in body.tools or ()], "top_p": 1.0 if chat.top_p is None else chat.top_p,
            "truncation": "disabled", "usage": None if choice is None else _usage(choice), "user": body.user,
            "metadata": body.metadata or {},
        }  # fmt: skip

    # -- items -------------------------------------------------------------------------------------
    def _written(self, kind: str, new: str) -> Iterator[Event]:
        """New text of a message, or of reasoning."""
        if not new:
            return
        if not self._open or self.output[-1]["type"] != kind:
            yield from self._begin(_item(kind))
            place = self._place()
            yield self._event("response.content_part.added", **place, content_index=0, part=dict(self.output[-1]["content"][0]))
        self.output[-1]["content"][0]["text"] += new
        name, more = ("reasoning_text", {}) if kind == "reasoning" else ("output_text", {"logprobs": list[Any]()})
        yield self._event(f"response.{name}.delta", **self._place(), content_index=0, delta=new, **more)

    def _called(self, call: Call) -> Iterator[Event]:
        """A new call, or more of its arguments."""
        if call.id:
            item = {"type": "function_call", "id": _new_id("fc"), "status": "in_progress", "call_id": call.id}
            yield from self._begin({**item, "name": call.name, "arguments": ""})
        if call.arguments:
            self.output[-1]["arguments"] += call.arguments
            yield self._event("response.function_call_arguments.delta", **self._place(), delta=call.arguments)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed")
        self.output.append(item)
        self._open = True
        fresh = {**item, "content": []} if "content" in item else dict(item)
        yield self._event("response.output_item.added", output_index=len(self.output) - 1, item=fresh)

    def _close(self, status: str) -> Iterator[Event]:
        """End the item that is being written."""
        if not self._open:
            return
        self._open = False
        item, place = self.output[-1], self._place()
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **place, **done)
        else:
            part = item["content"][0]
            name, more = ("reasoning_text", {}) if item["type"] == "reasoning" else ("output_text", {"logprobs": list[Any]()})
            yield self._event(f"response.{name}.done", **place, content_index=0, text=part["text"], **more)
            yield self._event("response.content_part.done", **place, content_index=0, part=dict(part))
        yield self._event("response.output_item.done", output_index=len(self.output) - 1, item=_copied(item))


def _item(kind: str) -> dict[str, Any]:
    """A message, or reasoning, without any text yet."""
    if kind == "reasoning":
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        return {"type": kind, "id": _new_id("rs"), "status": "in_progress", "summary": [], "content": [part]}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"type": kind, "id": _new_id("msg"), "status": "in_progress", "role": "assistant", "content": [part]}


def _copied(item: Mapping[str, Any]) -> dict[str, Any]:
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _usage(choice: Choice) -> dict[str, Any]:
    """Tokens by the names that responses have. Which of them came out of the prefix cache is not known of a request."""
    counts = usage([choice], 1)
    return {
        "input_tokens": counts["prompt_tokens"], "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"], "total_tokens": counts["total_tokens"],
        "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
    }  # fmt: skip
