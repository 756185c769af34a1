"""What tests of agents share: a chat template with reasoning and tools, and requests whose texts are bound to such.

The fixture `agents` (`conftest.py`) is a server with that template, on the model of letters.
"""

from __future__ import annotations

from typing import Any

from tests.support.letters import CHARACTERS

CALL = '<tool_call>\\n{"name": "\' ~ c.function.name ~ \'", "arguments": '
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }} {{ m.reasoning_content }} {{ m.content }}"
    "{% for c in m.tool_calls %}{{ '" + CALL + "' }}{{ c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
    "{{ m.tool_call_id }}\n{% endfor %}"
    "{% if reasoning_effort %}{{ reasoning_effort }}\n{% endif %}"
    "{% if add_generation_prompt %}<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}{% endif %}"
)


def ids(text: str) -> str:
    """Token ids of the model of letters, as an option has them."""
    return ",".join(str(1 + CHARACTERS.index(letter)) for letter in text)


def bound(pattern: str, thinking: int = 6) -> dict[str, Any]:
    return {"guided_regex": pattern, "thinking_limit": thinking, "logit_bias": {"0": -100}}


def tool(name: str, strict: bool | None = None, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    function = {"name": name, "description": f"about {name}", "parameters": schema}
    return {"type": "function", "function": function | ({} if strict is None else {"strict": strict})}


CITY = {"type": "string", "enum": ["rome", "oslo"]}
DAYS = {"type": "integer", "minimum": 10, "maximum": 99}
PLAIN: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
