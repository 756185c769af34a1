"""Renders conversations by a model's own Jinja template, as transformers renders them.

`Tokenizer.encode_chat` and the server call it. Templates are untrusted code: they run in Jinja's immutable sandbox and see plain
JSON data only, and whatever goes wrong in one becomes an error of that request. Text is not encoded here, and `jinja2` is
imported only when a template is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polydraft.errors import CheckpointError, RequestError
from polydraft.json_text import as_json
from polydraft.models.config_file import read_json_object

if TYPE_CHECKING:
    import jinja2

__all__ = ["ChatTemplate"]

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """One template: its source, the file it came from (for errors), and the special token strings it may print."""

    def __init__(self, source: str, file: Path, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.file = file
        self.special_tokens = dict(special_tokens)

    @classmethod
    def from_dir(cls, path: str | Path) -> ChatTemplate | None:
        """Return the template of the directory `path`, None where it has none.

        chat_template.jinja comes first, then `chat_template` of tokenizer_config.json: a string, or a list of
        {name, template} of which "default" is taken. Errors: `CheckpointError` naming the malformed file.
        """
        directory = Path(path)
        settings_file = directory / "tokenizer_config.json"
        settings = read_json_object(settings_file) if settings_file.is_file() else {}
        file = directory / "chat_template.jinja"
        try:
            source = file.read_text("utf-8") if file.is_file() else None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read, got {error}, wanted UTF-8 text; download it again") from error
        if source is None:
            file = settings_file
            source = _configured_template(file, settings.get("chat_template"))
        return None if source is None else cls(source, file, _special_tokens(directory, settings))

    def compile(self) -> None:
        """Compile it now, rather than with the first conversation. Errors: `CheckpointError` where it is no Jinja."""
        _ = self._compiled

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads, so that giving them a value may change what it writes."""
        from jinja2 import nodes

        names = _environment().parse(self.source).find_all(nodes.Name)
        return frozenset(name.name for name in names if name.ctx == "load")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a conversation.

        `messages` are objects with a "role"; keys whose value is None count as absent. `tools` are JSON schemas.
        `add_generation_prompt` asks for the header of the answer to come. `variables` are further names for the
        template, for example {"enable_thinking": False}; they win over the special token strings.

        Errors: `RequestError` for an empty or malformed conversation, for values that JSON does not know, and for
        whatever the template raises; `CheckpointError` where the template does not compile.
        """
        import jinja2

        if not messages or not all(_is_message(message) for message in messages):
            raise RequestError(
                f"messages is {messages!r}, wanted one or more objects with a role and a content; correct the request",
                "messages",
            )
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            data = as_json({"messages": present, "tools": tools, "variables": dict(variables or {})})
        except ValueError as error:
            raise RequestError(f"messages or tools hold what JSON does not know: {error}; send plain data") from error
        names = {**self.special_tokens, **data["variables"]}
        names |= {"messages": data["messages"], "tools": data["tools"], "add_generation_prompt": add_generation_prompt}
        template = self._compiled
        try:
            return template.render(names)
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template of {self.file} refuses the conversation: {error}", "messages") from error
        except Exception as error:  # templates compute: any exception of theirs ends this request only
            failed = f"the chat template of {self.file} fails with {error!r}; correct the messages"
            raise RequestError(failed, "messages") from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        import jinja2

        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{self.file}: the chat template does not compile, got {error} (line {error.lineno}), wanted Jinja; "
                f"correct the template"
            ) from error
        except Exception as error:  # what Python makes of it: names given twice, numbers and nesting without end
            raise CheckpointError(
                f"{self.file}: the chat template does not compile, got {error!r}, wanted Jinja; correct the template"
            ) from error


def _is_message(value: object) -> bool:
    """An answer that called tools may have nothing else to say."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    return value.get("content") is not None or bool(value.get("tool_calls"))


def _configured_template(file: Path, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    named: dict[str, object] = {}
    if isinstance(value, list):
        named = {str(item.get("name")): item.get("template") for item in value if isinstance(item, dict)}
    default = named.get("default")
    if not isinstance(default, str):
        raise CheckpointError(
            f"{file}: chat_template has no default, got {sorted(named)}, wanted a string or a list with a "
            f'{{"name": "default", "template": ...}}; save the template as chat_template.jinja'
        )
    return default


def _special_tokens(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special token strings of tokenizer_config.json, completed by special_tokens_map.json of old."""
    older = directory / "special_tokens_map.json"
    merged = {**(read_json_object(older) if older.is_file() else {}), **settings}
    found = {key: merged.get(key) for key in _SPECIAL}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in found.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _environment() -> jinja2.Environment:
    """Build the environment that chat templates are written for (transformers' `apply_chat_template`)."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}` marks training targets; for inference it is only a scope."""

        tags = {"generation"}  # noqa: RUF012  Jinja's own interface

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes characters for HTML, which a prompt must not contain.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)  # noqa: DTZ005  local time
    return environment
