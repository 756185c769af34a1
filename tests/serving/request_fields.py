"""What OpenAI, vLLM and this server do with fields of a request: one row a field, with values that are taken and refused.

`test_request_fields.py` sends the values, and compares the table of docs/serving.md, which `python -m
tests.serving.request_fields` writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from polydraft.bench.report import renew
from tests.support.project import ROOT

PAGE: Final = ROOT / "docs" / "serving.md"
MARKER: Final = "tests/serving/request_fields.py"
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BOTH = (COMPLETIONS, CHAT)


@dataclass(frozen=True)
class Field:
    """One field. `beside`: what else a request has that sends one of its values; `bound`: whether values that are `taken` need
    an engine with constraints."""

    name: str
    openai: str
    vllm: str
    ours: str
    taken: tuple[Any, ...] = ()
    refused: tuple[Any, ...] = ()
    paths: tuple[str, ...] = BOTH
    beside: tuple[tuple[str, Any], ...] = ()
    bound: bool = False


NONE, LEFT_OUT = "unknown", "ignored"
TOOL = {"type": "function", "function": {"name": "now"}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"], "additionalProperties": False}
FIELDS: Final = (
    Field("user", "tells end users apart", LEFT_OUT, "taken, changes nothing", ("u",), (5,)),
    Field("safety_identifier", "tells end users apart", LEFT_OUT, "taken, changes nothing", ("u",), (5,)),
    Field("prompt_cache_key", "routes to a cache", LEFT_OUT, "taken, changes nothing: all share one cache", ("k",), (5,)),
    Field("metadata", "kept with a stored answer", LEFT_OUT, "taken, changes nothing", ({"a": "b"},), ({"a": 1}, 5)),
    Field("store", "keeps the answer", LEFT_OUT, "`false`", (False,), (True, 1)),
    Field("service_tier", "class of service", LEFT_OUT, "`auto`, `default`", ("auto", "default"), ("flex", "priority", 1)),
    Field("verbosity", "length of answers", LEFT_OUT, "`medium`", ("medium",), ("low", "high", 1), (CHAT,)),
    Field(
        "modalities", "text, audio", LEFT_OUT, '`["text"]`', (["text"],), (["text", "audio"], [], "text"), (CHAT,)
    ),
    Field(
        "stream_options.include_obfuscation", "pads events of a stream; its default", LEFT_OUT, "`false`", (False,), (True, 1),
        beside=(("stream", True),),
    ),
    Field(
        "stream_options.continuous_usage_stats", NONE, "with `include_usage`: usage of the choice in every event", "the same",
        (True, False), (1,), beside=(("stream", True), ("stream_options.include_usage", True)),
    ),
    Field("best_of", "best of so many texts", "refused or ignored, by version", "as many as `n`", (1,), (2, 0), (COMPLETIONS,)),
    Field("suffix", "text behind the insertion", "refused", "the empty text", ("",), ("x",), (COMPLETIONS,)),
    Field(
        "tools", "functions, and tools of its own", "functions", "functions, where the model's format is known", ([],),
        (5, [TOOL]), (CHAT,)
    ),
    Field("tool_choice", "which tool", "which tool", "the same; needs `tools`, but for `none`", ("none",),
        ("auto", "required", "any"), (CHAT,)),
    Field("parallel_tool_calls", "several calls at once", "the first call alone with `false`", "one call at most with `false`",
        (True, False), (1,), (CHAT,)),
    Field("top_k", NONE, "most likely tokens; 0 and -1 are no limit", "the same", (-1, 0, 3), (-2, 1.5)),
    Field("add_special_tokens", NONE, "BOS and the like; true for prompts, false for chats", "the same", (True, False), (1,)),
    Field(
        "add_generation_prompt", NONE, "header of an answer behind the messages", "the same", (True, False), ("x",), (CHAT,)
    ),
    Field(
        "continue_final_message", NONE, "goes on with the last message; needs `add_generation_prompt: false`",
        "the same, without that", (True, False), ("x",), (CHAT,)
    ),
    Field(
        "truncate_prompt_tokens", NONE, "keeps the last so many tokens", "the same", (1, 99),
        (0, -1),
    ),
    Field("return_token_ids", NONE, "`token_ids`, `prompt_token_ids`", "the same", (True, False), ("x",)),
    Field("request_id", NONE, "end of the answer's `id`, unless a header `X-Request-Id` is there", "the same", ("r-1",),
        ("", "a b", "a\n", "x" * 129)),
    Field("skip_special_tokens", NONE, "`false` shows special tokens", "the same, without the text's end", (True, False), (1,)),
    Field("include_stop_str_in_output", NONE, "`true` keeps the stop text", "`false`", (False,), (True,)),
    Field("allowed_token_ids", NONE, "no other tokens", "none", (), ([1, 2],)),
    Field("prompt_logprobs", NONE, "of the prompt's tokens", "none; `echo` with `logprobs` has them", (), (0, 1)),
    Field("priority", NONE, "order of scheduling; refused without priority scheduling, but for 0", "`0`", (0,), (1, -1)),
    Field(
        "structured_outputs", NONE, "`json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`",
        "the same but `structural_tag`",
        ({"json": SCHEMA}, {"regex": "[0-9]{2}"}, {"choice": ["ab", "cd"]}, {"grammar": 'start: "ab"'}, {"json_object": True}),
        ({}, {"structural_tag": "x"}, {"choice": []}, {"json_object": False}, {"regex": "a", "choice": ["b"]}), bound=True,
    ),
    Field("guided_json", NONE, "older name of `json`", "the same", (SCHEMA,), (5,), bound=True),
    Field("guided_regex", NONE, "older name of `regex`", "the same", ("[0-9]{2}",), (5, "("), bound=True),
    Field("guided_choice", NONE, "older name of `choice`", "the same", (["ab", "cd"],), ([], [""], "ab"), bound=True),
    Field("guided_grammar", NONE, "older name of `grammar`", "the same", ('root ::= "ab"',), (5, "root ::= ("), bound=True),
    Field(
        "reasoning_effort", "length of thinking", "to the chat template", "the same where it reads it; `none` where it reads "
        "`enable_thinking` or `thinking`", (), ("none", "low", "x"), (CHAT,)
    ),
    Field("previous_response_id", "goes on with a kept one", "goes on with a kept one", "none", (), ("r",), (RESPONSES,)),
    Field("conversation", "goes on with a kept one", LEFT_OUT, "none", (), ("c", {"id": "c"}), (RESPONSES,)),
    Field("background", "answers later", "answers later", "`false`", (False,), (True,), (RESPONSES,)),
    Field("truncation", "leaves items out", LEFT_OUT, "`disabled`", ("disabled",), ("auto",), (RESPONSES,)),
    Field("include", "more in the answer", "logprobs", "nothing", ([],), (["reasoning.encrypted_content"],), (RESPONSES,)),
    Field("max_tool_calls", "limits tools of its own", "limits tools of its own", "none", (), (1,), (RESPONSES,)),
    Field(
        "reasoning", "effort, summary", "effort", "`effort` as `reasoning_effort`; `summary` `auto`, though there is none",
        ({"summary": "auto"}, {}), (5, {"effort": "low"}), (RESPONSES,)
    ),
    Field("chat_template_kwargs", NONE, "variables of the chat template", "those that it reads", ({},), ({"x": 1}, 5), (CHAT,)),
)  # fmt: skip


def table() -> str:
    """The rows as the page has them."""
    head = "| field | OpenAI | vLLM | polydraft takes |\n|---|---|---|---|\n"
    return head + "\n".join(f"| `{row.name}` | {row.openai} | {row.vllm} | {row.ours} |" for row in FIELDS)


if __name__ == "__main__":
    renew(PAGE, MARKER, table())
