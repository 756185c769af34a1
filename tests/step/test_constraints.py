"""Constraints: what they forbid never comes, and with drafts the text is the one without, whatever serves it.

Grammars need the package llguidance. Texts are compared in row-invariant arithmetic with plain decoding under the same
constraint.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from polydraft import LLM, Engine, RequestOutput, SamplingParams
from polydraft.errors import CapabilityError, RequestError
from polydraft.output.output_processor import OutputProcessor
from polydraft.sampling.automaton import Automaton, allows
from polydraft.sampling.constraints import Constraints
from polydraft.sampling.thinking import Markers, Thinking
from polydraft.step.runner import InFlightStep
from tests.support.cpu import needs_kernels
from tests.support.depth import among
from tests.support.emulator import Emulator
from tests.support.letters import checkpoint
from tests.support.plugin_doubles import backend_without
from tests.support.runs import DEVICES, ORDERS, Ask, drive, engine

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["name", "n", "more"],
    "x-guidance": {"whitespace_flexible": False},
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"}, "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "more": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
}  # fmt: skip
REGEX = r"return [a-z]{2,9}\([0-9]{2}\)"
LARK = 'start: "yes" | "no" | "maybe " /[a-c]{3}/'
EBNF = 'root ::= answer | "maybe " letter letter letter\nanswer ::= "yes" | "no"\nletter ::= [a-c]'
CASES: dict[str, dict[str, Any]] = {
    "schema": {"constraint": {"json_schema": SCHEMA}},
    "regex": {"constraint": {"regex": REGEX}},
    "lark": {"constraint": {"lark": LARK}},
    "ebnf": {"constraint": {"ebnf": EBNF}},
    "sampled schema": {"constraint": {"json_schema": SCHEMA}, "temperature": 0.9, "seed": 4},
    "processed regex": {"constraint": {"regex": REGEX}, "repetition_penalty": 1.2},
}
PROMPTS = ((5, 9, 33), (7, 7, 12), (1, 30), (1, 30), (44, 2, 2, 8), (21,))


def prompt_of(name: str) -> tuple[int, ...]:
    return PROMPTS[list(CASES).index(name)]


def params(name: str, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 64, **CASES[name], **more})


def letters(device: str = "reference", **options: Any) -> Engine:
    """An engine on that model."""
    return LLM(**{**(DEVICES | ORDERS)[device], "model": checkpoint(), "invariant": True, **options}).engine


def emulated(query: str, **options: Any) -> Engine:
    plugin = Emulator(f"emulator:0?{query}")
    return LLM(**{"plugin": plugin, "model": checkpoint(), "invariant": True, "graph": "off", **options}).engine


@functools.cache
def plain(name: str) -> RequestOutput:
    """Plain decoding under the same constraint."""
    served = letters(draft_tokens=0, constraints=True, max_num_seqs=1)
    return drive(served, [Ask(prompt_of(name), params(name))])[0]


def holds(name: str, text: str) -> bool:
    """Whether a text is what its constraint says, by another judge than the grammar."""
    if "regex" in name:
        return re.fullmatch(REGEX, text) is not None
    if name in ("lark", "ebnf"):
        return re.fullmatch("yes|no|maybe [a-c]{3}", text) is not None
    import jsonschema

    jsonschema.validate(json.loads(text), SCHEMA)
    return True


SERVED = {
    "reference": letters,
    "lazy-1": lambda **o: letters(device="lazy-1", **o),
    "lazy-2": lambda **o: letters(device="lazy-2", **o),
    "lazy-seeded": lambda **o: letters(device="lazy-seeded", **o),
    "emulator": lambda **o: emulated("seed=5&policy=reversed", overlap=1, **o),
    "graphs": lambda **o: emulated("seed=6", overlap=1, graph="decode", graph_sizes=(4,), **o),
}


@pytest.mark.parametrize("served_by", among(("lazy-2", "graphs"), SERVED))
def test_the_text_is_the_one_of_plain_decoding_and_what_was_asked_for(served_by: str) -> None:
    """All constraints at once, beside a request without any."""
    running: Engine = SERVED[served_by](draft_tokens=3, constraints=True, max_num_seqs=4)
    free = SamplingParams(max_new_tokens=20)
    asks = [Ask(prompt_of(name), params(name), arrival=i) for i, name in enumerate(CASES)]
    outputs = drive(running, [*asks, Ask(PROMPTS[0], free)])
    for name, output in zip(CASES, outputs, strict=False):
        assert output.text == plain(name).text, name
        assert output.finish_reason == "stop"
        assert holds(name, output.text)
    unbound = letters(draft_tokens=3, max_num_seqs=1)
    assert outputs[-1].token_ids == drive(unbound, [Ask(PROMPTS[0], free)])[0].token_ids
    assert sum(output.accepted for output in outputs[:-1]) > 0, "drafts are accepted within constraints"


def test_rejection_verification_keeps_constraints_too() -> None:
    served = letters(draft_tokens=3, constraints=True, verify="rejection")
    for seed in range(3):
        output = drive(served, [Ask(PROMPTS[0], params("sampled schema", seed=seed))])[0]
        assert holds("schema", output.text)


@pytest.mark.parametrize("name", ["regex", "sampled schema", "processed regex"])
def test_raw_log_probabilities_do_not_know_constraints(name: str) -> None:
    """They are those that the same tokens have in a prompt, of a request alone as beside one that has its logits processed."""
    alone, beside = (letters(draft_tokens=3, constraints=True, logprobs=2) for _ in range(2))
    ask = Ask(prompt_of(name), params(name, logprobs=2))
    output = drive(alone, [ask])[0]
    read = SamplingParams(max_new_tokens=1, logprobs=2, prompt_logprobs=2)
    text = drive(alone, [Ask((*output.prompt_ids, *output.token_ids), read)])[0]
    assert text.prompt_logprobs is not None
    wanted = text.prompt_logprobs[len(output.prompt_ids) :]
    assert [(one.token_id, one.logprob, one.top) for one in output.tokens] == [
        (one.token_id, one.logprob, one.top) for one in wanted if one is not None
    ]
    neighbour = Ask(PROMPTS[1], SamplingParams(max_new_tokens=64, ignore_eos=True, repetition_penalty=1.4))
    again = drive(beside, [ask, neighbour])[0]
    assert [(one.token_id, one.logprob, one.top) for one in again.tokens] == [
        (one.token_id, one.logprob, one.top) for one in output.tokens
    ]


def test_forced_tokens_say_so_with_drafts_and_without() -> None:
    output = drive(letters(draft_tokens=3, constraints=True), [Ask(prompt_of("regex"), params("regex"))])[0]
    assert {t.source for t in output.tokens} >= {"forced", "draft"}
    assert output.forced == plain("regex").forced
    assert output.forced == tuple(place for place, token in enumerate(output.tokens) if token.source == "forced")


def test_each_forced_place_is_told_once_with_its_token() -> None:
    served, told, num_tokens = letters(draft_tokens=3, constraints=True), list[int](), 0
    served.add(prompt_of("regex"), params("regex"), id="7", stream=True)
    processor = OutputProcessor(served.tokenizer)
    while served.has_work:
        served.step()
        for delta in processor.deltas(served.take()):
            assert all(num_tokens <= place < num_tokens + len(delta.token_ids) for place in delta.forced.tolist())
            told, num_tokens = told + delta.forced.tolist(), num_tokens + len(delta.token_ids)
    assert tuple(told) == plain("regex").forced


def test_a_preempted_request_goes_on_where_it_was() -> None:
    asks = [Ask(prompt_of(name), params(name)) for name in CASES]
    asks += [Ask(prompt, SamplingParams(max_new_tokens=80, ignore_eos=True)) for prompt in PROMPTS[:2]]
    roomy = letters(draft_tokens=2, constraints=True, max_num_seqs=7)
    tight = letters(draft_tokens=2, constraints=True, max_num_seqs=7, block_size=4, num_blocks=24, prefix_cache=False)
    wanted = [output.text for output in drive(roomy, asks)]
    assert [output.text for output in drive(tight, asks)] == wanted
    assert tight.scheduler.num_preemptions > 0


# -- thinking -----------------------------------------------------------------------------------------------------------
AROUND: dict[str, Any] = {"think_start_ids": (7,), "think_end_ids": (11, 12)}
"""Token ids of the letters' model around thinking."""


@pytest.mark.parametrize("served_by", ["reference", "lazy-2", "graphs"])
def test_a_grammar_binds_the_reply_behind_the_thinking(served_by: str) -> None:
    """Behind an end that is forced at different places, with a limit of its own and without."""
    limits: list[dict[str, Any]] = [{"thinking_limit": 0}, {"thinking_limit": 5}, {"thinking_limit": 9, "reply_budget": 6}]
    asks = [
        Ask((5, 7, 9 + i), params("regex", max_new_tokens=40, logit_bias={0: -100}, **given)) for i, given in enumerate(limits)
    ]
    plainly = drive(letters(draft_tokens=0, constraints=True, max_num_seqs=1, **AROUND), asks)
    outputs = drive(SERVED[served_by](draft_tokens=3, constraints=True, max_num_seqs=4, **AROUND), asks)
    served = letters(draft_tokens=0)
    for ask, output, given, plain_one in zip(asks, outputs, limits, plainly, strict=True):
        limit, ids = given["thinking_limit"], output.token_ids
        assert (ids, output.forced) == (plain_one.token_ids, plain_one.forced), ask
        assert ids[limit : limit + 2] == (11, 12)
        reply = served.tokenizer.decode(ids[limit + 2 : -1])
        assert re.fullmatch(REGEX, reply) or (given.get("reply_budget") == len(ids) - limit - 3), reply
        assert {limit, limit + 1} <= set(output.forced)


def test_steps_without_a_grammar_are_whole() -> None:
    """An engine with constraints replays a step as one graph, as soon and as long as nobody in it has a grammar."""
    served = emulated("seed=6", overlap=1, graph="decode", graph_sizes=(2,), draft_tokens=3, constraints=True, max_num_seqs=2)
    seen: list[tuple[bool, str]] = []
    run = served.runner._run

    def seeing(piece: Any, flight: InFlightStep) -> None:
        seen.append((flight.plan.bound, piece))
        run(piece, flight)

    served.runner._run = seeing  # type: ignore[method-assign]
    free = SamplingParams(max_new_tokens=60, ignore_eos=True)
    outputs = drive(served, [Ask((3, 4), free), Ask(prompt_of("regex"), params("regex"), arrival=4)])
    assert outputs[0].token_ids == drive(letters(draft_tokens=0), [Ask((3, 4), free)])[0].token_ids
    assert outputs[1].text == plain("regex").text
    decoding = seen[[piece for _, piece in seen].index("step") :]
    assert {piece for bound, piece in decoding if bound} == {"target", "verify", "draft"}
    whole = [piece for bound, piece in decoding if not bound]
    assert whole.count("step") == len(whole) > 6
    assert not decoding[0][0]
    assert not decoding[-1][0]


class _Digits:
    """A matcher that allows tokens 0 to 9, three times."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def consume_token(self, token: int) -> bool:
        assert token < 10
        self.taken.append(token)
        return True

    def rollback(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]

    def is_stopped(self) -> bool:
        return len(self.taken) == 3

    def is_error(self) -> bool:
        return False


def masks(automaton: Automaton, drafts: Sequence[int], width: int = 5) -> list[list[int]]:
    rows = np.zeros((width, 2), np.uint32)
    automaton.fill(drafts, rows)
    return [[t for t in range(64) if allows(row, t)] for row in rows[: len(drafts) + 1]]


def test_an_automaton_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance.numpy

    def digits(matcher: Any, mask: Any, index: int) -> None:
        mask[index] = 0
        mask[index, 0] = 0x3FF

    monkeypatch.setattr(llguidance.numpy, "fill_next_token_bitmask", digits)
    matcher = _Digits()
    automaton = Automaton(matcher, None, (), eos=(60,))
    automaton.follow([4])
    everything = list(range(64))
    assert masks(automaton, [5, 6, 9]) == [list(range(10)), list(range(10)), [60], everything]
    assert matcher.taken == [4]
    assert masks(automaton, [5, 33, 2]) == [list(range(10)), list(range(10)), everything, everything], "behind a forbidden draft"
    assert matcher.taken == [4]
    automaton.follow([1, 2])
    assert masks(automaton, []) == [[60]]


def test_an_automaton_allows_all_where_the_device_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance.numpy

    def digits(matcher: Any, mask: Any, index: int) -> None:
        mask[index] = 0
        mask[index, 0] = 0x3FF

    monkeypatch.setattr(llguidance.numpy, "fill_next_token_bitmask", digits)
    around, matcher, everything = Markers((30,), (11, 12), (9, 11, 12)), _Digits(), list(range(64))
    automaton = Automaton(matcher, Thinking(around, limit=3, reply=2), (5, 30), eos=(60,))
    allowed = list(range(10))
    assert masks(automaton, [11, 12, 4, 5]) == [everything, everything, allowed, allowed, everything], "an end, and a reply"
    assert matcher.taken == []
    automaton.follow([1, 11, 13])
    assert masks(automaton, [9, 11, 12, 4]) == [everything] * 3 + [allowed] * 2, "what is spelt out at the limit"
    assert masks(Automaton(matcher, Thinking(around), (5,), eos=(60,)), [3]) == [allowed, allowed], "no thinking at all"


# -- refusals -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"constraint": {"regex": "(["}}, "the regex of the request cannot be used"),
        ({"constraint": {"json_schema": {"type": "nonsense"}}}, "the json_schema of the request cannot be used"),
        ({"constraint": {"lark": "start: )"}}, "the lark of the request cannot be used"),
        ({"constraint": {"ebnf": "root ::= ("}}, "the ebnf of the request cannot be used"),
        ({"constraint": {"grammar": "neither"}}, "the grammar of the request cannot be used"),
    ],
)
def test_a_constraint_that_is_none_is_refused(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        letters(constraints=True).add((1, 2), SamplingParams(**wish))


def test_a_tokenizer_that_grammars_do_not_know_is_told() -> None:
    with pytest.raises(RequestError, match="grammars cannot be used with the tokenizer"):
        engine("narrow", constraints=True).add((1, 2), SamplingParams(constraint={"regex": "a"}))


@pytest.mark.parametrize("wish", [{"constraint": "x"}, {"constraint": {"bnf": "x"}}, {"constraint": {"regex": 5}}])
def test_a_malformed_wish_is_refused(wish: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="correct the request"):
        SamplingParams(**wish)


def test_an_engine_that_was_not_built_for_it_says_so() -> None:
    with pytest.raises(RequestError, match="build it with constraints=True"):
        engine("narrow").add((1, 2), SamplingParams(constraint={"regex": "a"}))
    with pytest.raises(CapabilityError, match="mask_logits"):
        engine("narrow", constraints=True, plugin=backend_without("mask_logits"))
    reasons = {d.name: d.reason for d in engine("narrow", device="lazy-1", constraints=True).resolved.decisions}
    assert "two halves" in reasons["overlap"]
    assert Constraints.needs == "previous_tokens"


def test_steps_without_constrained_requests_upload_nothing() -> None:
    served = engine("narrow", draft_tokens=2, constraints=True)
    served.add((3, 4), SamplingParams(max_new_tokens=30, ignore_eos=True))
    for _ in range(4):
        served.step()
    before = served.device.counters.copy()
    served.step()
    assert served.device.counters.uploads == before.uploads


def test_a_grammar_is_taken_in_either_notation() -> None:
    served = letters(draft_tokens=3, constraints=True)
    asks = [Ask(prompt_of("lark"), params("lark", constraint={"grammar": text})) for text in (LARK, EBNF)]
    assert [output.text for output in drive(served, asks)] == [plain("lark").text, plain("ebnf").text]


def test_properties_are_written_in_the_order_of_their_schema() -> None:
    """Such as the reasoning in front of the answer."""
    value = {"type": "string", "pattern": "^x$"}
    schema = {"type": "object", "properties": {"r": value, "a": value}, "required": ["r", "a"], "additionalProperties": False}
    for given in (schema, json.dumps(schema)):
        ask = Ask(prompt_of("regex"), params("regex", constraint={"json_schema": given}, max_new_tokens=60))
        (output,) = drive(letters(draft_tokens=3, constraints=True), [ask])
        assert re.sub(r"\s", "", output.text) == '{"r":"x","a":"x"}'


def test_a_stream_may_be_left_once_its_engine_is_closed() -> None:
    llm = LLM(backend="reference", constraints=True, draft_tokens=0)
    stream = llm.stream("x = ", SamplingParams(max_new_tokens=20, constraint={"regex": "a+"}))
    next(stream)
    llm.close()
    stream.close()  # type: ignore[attr-defined]


# -- the end of a process -----------------------------------------------------------------------------------------------
UNCLOSED = """
from polydraft import LLM, SamplingParams

llm = LLM(backend="cpu", constraints=True)
print([one.text for one in llm.generate(["x = "], SamplingParams(max_new_tokens=20, constraint={"regex": "a"}))])
"""


@needs_kernels
def test_a_process_ends_in_order_without_a_close() -> None:
    """What is in flight of the cpu backend, and whatever works out masks, ends with it."""
    ran = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", UNCLOSED], capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
    )  # fmt: skip
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", "['a']\n")
