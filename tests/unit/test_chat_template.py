"""Chats: the template of the model decides, in a sandbox, and the result equals what transformers renders."""

import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from polydraft.demo import demo_model_path
from polydraft.errors import CheckpointError, RequestError
from polydraft.models import Tokenizer
from polydraft.models.chat_template import ChatTemplate

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.content is string %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.tool_calls is defined %}
        {{- '<|im_start|>call ' + message.tool_calls[0].name + '\\n' }}
    {%- else %}
        {{- raise_exception('no content from ' ~ message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
BLOCKS = """{{ bos_token }}
{% set ns = namespace(last='') %}
  {% for message in messages %}
    {% if message['role'] == 'assistant' %}
    {% generation %}{% set inner = message['content'] %}{{ inner | trim }}{{ eos_token }}{% endgeneration %}
    {% else %}
{{ message['role'] | upper }}: {{ message['content'] }}
    {% endif %}
    {% set ns.last = message['role'] %}
    {% if loop.index > 3 %}{% break %}{% endif %}
  {% endfor %}
{% generation %}{% set outer = 1 %}{{ outer }}{% endgeneration %}
{{ inner is defined }} {{ outer is defined }} {{ ns.last }}
{{ {'z': 'é<b>', 'a': [1, None, true]} | tojson }} {{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}
"""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b>&amp; é 你 ' \" "}],
    [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "2 + 2?", "name": None},
        {"role": "assistant", "content": " 4\n"},
        {"role": "skip", "content": "x"},
        {"role": "user", "content": "Sure?"},
    ],
    [{"role": "assistant", "content": None, "tool_calls": [{"name": "look", "arguments": {"q": "é"}}]}],
]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "<it's>", "parameters": {}}}]


def template(source: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate(source, Path("model/chat_template.jinja"), special_tokens)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("source", [CHATML, BLOCKS])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("generate", [False, True])
def test_renders_as_transformers_does(chat: list, source: str, tools: Any, generate: bool) -> None:
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    present = [{key: value for key, value in message.items() if value is not None} for message in chat]
    (expected,), _ = render_jinja_template(
        [present],
        tools=tools,
        chat_template=source,
        add_generation_prompt=generate,
        enable_thinking=False,
        **special,
    )
    rendered = template(source, **special).render(
        chat, tools=tools, add_generation_prompt=generate, variables={"enable_thinking": False}
    )
    assert rendered == expected


def test_literal_rendering() -> None:
    """What the comparison above relies on, written out."""
    chat = template(CHATML)
    assert chat.render(CHATS[1]) == (
        "<|im_start|>system\nBe brief.\n<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n 4\n<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.render(CHATS[2], add_generation_prompt=False) == "<|im_start|>call look\n"
    assert '"description": "<it\'s>"' in chat.render(CHATS[0], tools=TOOLS)
    assert template("{{ [1, 'é'] | tojson }}").render(CHATS[0]) == '[1, "é"]'


def test_local_time() -> None:
    rendered = template("{{ strftime_now('%Y-%m-%d') }}").render(CHATS[0])
    today = datetime.datetime.now().date()  # noqa: DTZ005  the template function is defined in local time
    assert rendered in {str(today), str(today - datetime.timedelta(days=1))}


# --- where the template comes from ------------------------------------------------------------------------------------


def test_file_comes_before_configuration(tmp_path: Path) -> None:
    assert ChatTemplate.from_dir(tmp_path) is None
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text("{}")
    assert ChatTemplate.from_dir(tmp_path) is None
    for value in ("configured", [{"name": "rag", "template": "no"}, {"name": "default", "template": "configured"}]):
        settings.write_text(json.dumps({"chat_template": value}))
        found = ChatTemplate.from_dir(tmp_path)
        assert found is not None
        assert (found.source, found.file) == ("configured", settings)
    (tmp_path / "chat_template.jinja").write_text("é file")
    found = ChatTemplate.from_dir(tmp_path)
    assert found is not None
    assert (found.source, found.file.name) == ("é file", "chat_template.jinja")


def test_special_tokens_in_every_spelling(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}")
    settings = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "old", "unk_token": {"content": "<unk>"}}')
    found = ChatTemplate.from_dir(tmp_path)
    assert found is not None
    assert found.render(CHATS[0]) == "<s>|</s>||<unk>"
    assert found.render(CHATS[0], variables={"bos_token": "mine"}) == "mine|</s>||<unk>"


@pytest.mark.parametrize("value", [[], [{"name": "rag", "template": "x"}], {"default": "x"}, 3, [{"name": ["default"]}]])
def test_no_default_template(tmp_path: Path, value: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template has no default"):
        ChatTemplate.from_dir(tmp_path)


def test_malformed_files(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read"):
        ChatTemplate.from_dir(tmp_path)
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja.* does not compile, got .*\(line 2\)"):
        template("a\n{% for %}").render(CHATS[0])


@pytest.mark.parametrize("source", ["{{ f(x=1, x=2) }}", "{{ " + "9" * 5000 + " }}", "{{ " + "(" * 3000 + ")" * 3000 + " }}"])
def test_templates_that_python_cannot_compile(source: str) -> None:
    """Jinja lets what Python says of its code through as it is."""
    with pytest.raises(CheckpointError, match=r"^here: the chat template does not compile, got .*, wanted Jinja"):
        ChatTemplate(source, Path("here"), {}).compile()


# --- requests ---------------------------------------------------------------------------------------------------------


NO_CONTENT: list[list[Any]] = [[{"role": "user"}], [{"role": "user", "content": None}], [{"role": "assistant", "tool_calls": []}]]


@pytest.mark.parametrize("messages", [[], [{"content": "x"}], ["user"], [{"role": "user", "content": "x"}, 3], *NO_CONTENT])
def test_malformed_conversation(messages: list[Any]) -> None:
    with pytest.raises(RequestError, match=r"messages is .*, wanted one or more objects with a role"):
        template(CHATML).render(messages)


def test_refusals_of_the_template_are_errors_of_the_request() -> None:
    with pytest.raises(RequestError, match=r"chat_template\.jinja refuses the conversation: no content from tool"):
        template(CHATML).render([{"role": "tool", "content": 5}])
    with pytest.raises(RequestError, match="refuses the conversation"):
        template("{{ messages[0].absent.field }}").render(CHATS[0])
    with pytest.raises(RequestError, match=r"chat_template\.jinja fails with TypeError"):
        template("{{ messages[0].content + 1 }}").render(CHATS[0])
    with pytest.raises(RequestError, match="what JSON does not know"):
        template(CHATML).render([{"role": "user", "content": b"bytes"}])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{% set _ = messages.append(1) %}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% for i in range(1000000000) %}{% endfor %}",
    ],
)
def test_sandbox(attack: str) -> None:
    with pytest.raises(RequestError, match=r"refuses the conversation|fails with OverflowError"):
        template(attack).render([dict(message) for message in CHATS[0]])


def test_the_caller_keeps_its_messages() -> None:
    messages = [{"role": "user", "content": {"a": [1]}}]
    with pytest.raises(RequestError):
        template("{% set _ = messages[0].content.a.append(2) %}").render(messages)
    assert messages == [{"role": "user", "content": {"a": [1]}}]


# --- with a tokenizer -------------------------------------------------------------------------------------------------


def test_encode_chat_adds_no_special_tokens(tmp_path: Path) -> None:
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $0", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ add_generation_prompt }}")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<|endoftext|>"}')
    tokenizer = Tokenizer.from_dir(tmp_path)
    ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}], add_generation_prompt=False)
    assert ids == tokenizer.encode("helloFalse")
    assert ids.count(0) == 1


def test_a_model_without_a_template(tmp_path: Path) -> None:
    shutil.copy(demo_model_path() / "tokenizer.json", tmp_path)
    with pytest.raises(RequestError, match=r"has no chat template, wanted .*; send a plain prompt"):
        Tokenizer.from_dir(tmp_path).encode_chat(CHATS[0])
