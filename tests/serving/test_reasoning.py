"""Reasoning is told from the reply the same way however a text is cut, by the markers that families of models write."""

from __future__ import annotations

import pytest

from polydraft.errors import ConfigError
from polydraft.serving.markers import check_name, choose, cut
from polydraft.serving.reasoning import FORMS, ReasoningReader, begun

THINK = "<think>"


def read(form: str, parts: list[str], *, begun: bool) -> tuple[str, str]:
    reader, said = ReasoningReader(FORMS[form], begun=begun), []
    for place, part in enumerate(parts, 1):
        said.append(reader.feed(part, last=place == len(parts)))
    return "".join(one for one, _ in said), "".join(other for _, other in said)


# In the forms that vLLM documents for these families.
TEXTS = (
    ("qwen3", False, "<think>\nhm, <b> </x>\n\nso\n</think>\n\nHello\n", "hm, <b> </x>\n\nso", "Hello\n"),
    ("qwen3", True, "hm\n</think>\n\n    code", "hm", "    code"),
    ("qwen3", True, "<think>hm</think>Hello", "hm", "Hello"),
    ("qwen3", True, "cut off\n", "cut off", ""),
    ("qwen3", True, "cut off</thi", "cut off</thi", ""),
    ("qwen3", False, "a reply about <think> and </think>", "", "a reply about <think> and </think>"),
    ("qwen3", False, "<thin", "", "<thin"),
    ("qwen3", False, " \n", "", " \n"),
    ("qwen3", False, "<think>\n\n</think>\n\n", "", ""),
    ("glm45", False, "\n<think>hm</think>\nHello", "hm", "Hello"),
    ("deepseek_r1", True, "hm\n</think>\n\nHello </think>", "hm", "Hello </think>"),
    ("ernie45", True, "abc\n</think>\n\n\n<response>\ndef\n\nghi\n</response>\n", "abc", "def\n\nghi"),
    ("ernie45", True, "abc\n</think>\n<response>\ndef</response>\n\nghi\n\njkl\n", "abc", "defghi\n\njkl\n"),
    ("ernie45", True, "abc\n</think>\ndef", "abc", "def"),
    ("ernie45", True, "abc\n</think>\n\n<resp", "abc", "<resp"),
    ("ernie45", True, "abc\n</think>\n\n\n<tool_call>\n{}\n</tool_call>\n", "abc", "<tool_call>\n{}\n</tool_call>\n"),
)


@pytest.mark.parametrize(("form", "open_", "text", "reasoning", "reply"), TEXTS, ids=[repr(row[2]) for row in TEXTS])
def test_a_text_in_pieces_is_the_whole_one(form: str, open_: bool, text: str, reasoning: str, reply: str) -> None:
    assert read(form, [text], begun=open_) == (reasoning, reply)
    assert read(form, [*text, ""], begun=open_) == (reasoning, reply)
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            assert read(form, [text[:first], text[first:second], text[second:]], begun=open_) == (reasoning, reply)


def test_nothing_is_held_back_that_cannot_become_a_marker() -> None:
    reader = ReasoningReader(FORMS["qwen3"], begun=True)
    assert reader.feed("one ") == ("one ", "")
    assert reader.feed("two </thin") == ("two ", "")
    assert reader.feed("g </think>re") == ("</thing ", "re")
    assert reader.feed("ply</think>") == ("", "ply</think>")


@pytest.mark.parametrize(
    ("form", "prompt", "continued", "wanted"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n", False, True),
        ("qwen3", "<|im_start|>assistant\n", False, False),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False, False),
        ("qwen3", "what does <think> mean?<|im_end|>\n<|im_start|>assistant\n", False, False),
        ("deepseek_v3", "<\uff5cAssistant\uff5c></think>", False, False),
        ("deepseek_v3", "<\uff5cAssistant\uff5c><think>", False, True),
        ("deepseek_r1", "<\uff5cAssistant\uff5c>", False, True),
        ("ernie45", "<think>\n\n</think>\n\n", False, False),
        ("qwen3", "<think>\nhm, so", True, True),
        ("deepseek_r1", "<think>\nhm\n</think>\nSo", True, False),
    ],
)
def test_the_prompts_end_says_whether_a_text_begins_with_reasoning(form: str, prompt: str, continued: bool, wanted: bool) -> None:
    assert begun(FORMS[form], prompt, continued=continued) is wanted


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{% if x %}<think>\n</think>{% endif %}<|im_start|>", "qwen3"),
        ("[gMASK]<sop><think></think>", "glm45"),
        ("<\uff5cAssistant\uff5c><think>{{ content.split('</think>') }}", "deepseek_v3"),
        ("<think></think><response>", "ernie45"),
        ("{{ content.split('</think>')[-1] }}", None),
        ("", None),
    ],
)
def test_a_template_says_the_form_where_it_is_certain(template: str, wanted: str | None) -> None:
    form, why = choose("auto", FORMS, template)
    assert (form.name if form else None) == wanted
    assert why.startswith(f"{wanted} (the chat template has <think> and </think>" if wanted else "none (the chat template has no")
    assert choose("none", FORMS, template)[0] is None
    assert choose("mimo", FORMS, template) == (FORMS["mimo"], "mimo (asked for)")


def test_a_form_that_is_unknown_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--reasoning-parser is 'x', wanted one of auto, none, ernie45"):
        check_name("--reasoning-parser", "x", FORMS)


def test_the_first_of_several_markers_cuts() -> None:
    assert cut("a<b>c<d>", ("<d>", "<b>")) == ("a", "<b>", "c<d>")
    assert cut("a<b", ("<d>", "<b>")) == ("a", "", "<b")
    assert cut("abc", ("<d>",)) == ("abc", "", "")
