"""Constraints that nothing satisfies, that fail in the middle, that are slow, or that end the process of their library: each
harms its own request alone.

The texts of neighbours and of late requests are compared with those of an engine that nobody harms.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polydraft import LLM, Engine, RequestOutput, SamplingParams
from polydraft.errors import RequestError
from polydraft.sampling import constraints, grammars
from polydraft.sampling.automaton import Automaton
from polydraft.sampling.constraints import Constraints
from polydraft.sampling.grammar_process import GrammarProcess, Text
from polydraft.sampling.grammars import Binding
from tests.support.depth import among
from tests.support.letters import CHARACTERS, checkpoint
from tests.support.runs import Ask, drive

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="grammars need processes that fork")

NEIGHBOUR = SamplingParams(max_new_tokens=24, ignore_eos=True)
WIDE = "start: " + " | ".join(f'"a" r{i}' for i in range(3000)) + "\n" + "\n".join(f'r{i}: "a"* "b{i}"' for i in range(3000))
"""Behind an `a` its parser is in 3000 branches at once, more than it may be."""
DEEP = "start: a0\n" + "\n".join(f'a{i}: a{i + 1} | "a" a{i + 1} | ' for i in range(20_000)) + '\na20000: "b"'
"""Its library overflows the stack."""


def served(**options: Any) -> Engine:
    return LLM(**{"backend": "reference", "model": checkpoint(), "invariant": True, "constraints": True, **options}).engine


def bound(kind: str, text: str, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 40, "constraint": {kind: text}, **more})


def texts(engine: Engine, asks: Sequence[Ask]) -> list[str]:
    return [output.text for output in drive(engine, asks)]


@functools.cache
def alone(params: SamplingParams = NEIGHBOUR) -> str:
    return texts(served(max_num_seqs=1), [Ask((5, 9), params)])[0]


# -- what nothing satisfies ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "text"),
    [("regex", r"[^\s\S]"), ("json_schema", '{"$ref": "#"}'), ("lark", "start: start"), ("lark", 'start: start "a"')],
)
def test_a_constraint_that_allows_no_text_is_refused(kind: str, text: str) -> None:
    with pytest.raises(RequestError, match=f"^the {kind} of the request allows no text at all; correct it$"):
        served().add((5, 9), bound(kind, text))


def test_one_that_allows_the_empty_text_alone_is_none_of_those() -> None:
    output = drive(served(), [Ask((5, 9), bound("regex", ""))])[0]
    assert (output.text, output.finish_reason) == ("", "stop")


# -- what fails ---------------------------------------------------------------------------------------------------------
def test_a_matcher_that_fails_in_the_middle_ends_its_request_with_an_error() -> None:
    bad, neighbour = drive(served(), [Ask((5, 9), bound("lark", WIDE)), Ask((5, 9), NEIGHBOUR)])
    assert (bad.finish_reason, bad.text) == ("refused", "a")
    assert "the lark of the request cannot be followed: Parser Error: Current row has" in bad.error
    assert neighbour.text == alone()


def test_a_grammar_that_ends_its_process_is_refused_and_others_are_served() -> None:
    engine = served()
    with pytest.raises(RequestError, match=r"^the process of the lark of the request ended while it worked it out: "):
        engine.add((5, 9), bound("lark", DEEP))
    assert texts(engine, [Ask((5, 9), bound("regex", "[0-9]{4}"))])[0].isdigit()


def test_a_process_that_ends_in_the_middle_ends_its_requests_alone() -> None:
    engine = served(max_num_seqs=4)
    ids = [engine.add((5, 9), bound("regex", text, ignore_eos=True)) for text in ("[0-9]{30}", "[0-9]{30}", "[a-z]{30}")]
    engine.step()
    (doomed,) = {engine.requests[one].binding._grammar for one in ids[:2]}  # type: ignore[union-attr]
    doomed.stream.shutdown(2)
    done: dict[str, RequestOutput] = {}
    while len(done) < len(ids):
        engine.step()
        done |= {output.id: output for output in engine.poll() if output.finished}
    assert [done[one].finish_reason for one in ids] == ["refused", "refused", "length"]
    assert done[ids[0]].error.startswith("the process of the regex of the request ended while it worked a window of it out")
    assert texts(engine, [Ask((5, 9), bound("regex", "[0-9]{30}"))])[0].isdigit(), "the grammar has a new process"


def test_an_ended_fork_server_is_started_again() -> None:
    engine = served()
    assert texts(engine, [Ask((5, 9), bound("regex", "a"))]) == ["a"]
    assert engine._constraints is not None
    first = engine._constraints._grammars._server()
    first.shutdown(2)
    assert texts(engine, [Ask((5, 9), bound("regex", "b")), Ask((5, 9), bound("regex", "a"))]) == ["b", "a"]
    engine.close()


# -- what is late -------------------------------------------------------------------------------------------------------
REGEX = r"return [a-z]{2,9}\([0-9]{2}\)"


HARMS: dict[str, list[tuple[Any, str, Any]]] = {
    "no step waits": [(constraints, "MOST_WAIT_S", 0.0)],
    "again and again": [(constraints, "MOST_WAIT_S", 0.0), (grammars, "MOST_LATE", 10**6)],
    "none is quick": [(grammars, "QUICK_S", 0.0)],
}
ON: dict[str, dict[str, Any]] = {"reference": {}, "overlap": {"device": "queued", "graph": "off", "overlap": 1}}


@pytest.mark.parametrize(
    ("device", "harm"), among([("reference", "none is quick"), ("overlap", "again and again")], itertools.product(ON, HARMS))
)
def test_late_masks_change_no_text(monkeypatch: pytest.MonkeyPatch, device: str, harm: str) -> None:
    ask = bound("regex", REGEX)
    wanted, free = alone(ask), alone()
    for module, name, value in HARMS[harm]:
        monkeypatch.setattr(module, name, value)
    engine = served(max_num_seqs=4, draft_tokens=3, **ON[device])
    asks = [
        Ask((5, 9), ask),
        Ask((5, 9), NEIGHBOUR),
        Ask((5, 9), bound("regex", REGEX, temperature=0.8, seed=3)),
        Ask((5, 9), ask),
    ]
    found = texts(engine, asks)
    assert [found[0], found[1], found[3]] == [wanted, free, wanted]
    if harm != "none is quick":
        assert engine.scheduler.num_preemptions > 0


def test_a_neighbour_is_served_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar whose answers nobody lets in yet: what waits for it holds nobody up."""
    engine = served()
    assert engine._constraints is not None
    poll = engine._constraints._grammars.poll
    monkeypatch.setattr(engine._constraints._grammars, "poll", lambda timeout: [])
    awaited = engine.add((5, 9), bound("regex", REGEX), compiled=False)
    neighbour = engine.add((5, 9), NEIGHBOUR)
    done: list[str] = []
    while not done:
        assert engine.step()
        done = [output.text for output in engine.poll() if output.finished and output.id == neighbour]
    assert done == [alone()]
    monkeypatch.setattr(engine._constraints._grammars, "poll", poll)
    while engine.has_work:
        engine.step()
    assert [(output.id, output.text) for output in engine.poll()] == [(awaited, alone(bound("regex", REGEX)))]


def test_a_refusal_that_comes_later_is_told_as_the_end_of_the_request() -> None:
    engine = served()
    engine.add((5, 9), bound("regex", "(["), compiled=False)
    while engine.has_work:
        engine.step()
    (output,) = engine.poll()
    assert output.finish_reason == "refused"
    assert output.error.startswith("the regex of the request cannot be used: ")


def test_a_request_whose_grammar_is_awaited_can_be_aborted() -> None:
    engine = served()
    engine.abort(engine.add((5, 9), bound("lark", WIDE), compiled=False))
    assert not engine.has_work
    assert engine.poll()[0].finish_reason == "abort"


# -- drafts that a matcher cannot follow --------------------------------------------------------------------------------
class _Fails:
    """A matcher of the letters a, that fails once it has met three of them."""

    def __init__(self, met: int = 0) -> None:
        self.met = met

    def deep_copy(self) -> _Fails:
        return _Fails(self.met)

    def consume_token(self, token: int) -> bool:
        assert CHARACTERS[token - 1] == "a"
        self.met += 1
        return True

    def rollback(self, count: int) -> None:
        self.met -= count

    def is_stopped(self) -> bool:
        return self.met >= 3

    is_error = is_stopped

    def stop_reason(self) -> str:
        return "ParserTooComplex"

    def get_error(self) -> str:
        return "too many"


def test_a_failure_behind_drafts_counts_only_for_a_text_that_gets_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance.numpy

    a, b = CHARACTERS.index("a") + 1, CHARACTERS.index("b") + 1
    monkeypatch.setattr(llguidance.numpy, "fill_next_token_bitmask", lambda matcher, mask, index: mask[index].fill(-1))
    process = GrammarProcess(None, None, 64, [0])  # type: ignore[arg-type]
    process._matcher = _Fails()
    text, rows = Text([], None), np.empty((5, 2), np.uint32)
    assert process._masks(text, [a], [a, a, a], rows) == ([False, False], ""), "two places have masks, the third has none"
    assert process._masks(text, [a], [], rows) == ([False], ""), "the drafts were not taken"
    assert process._masks(text, [], [a, b], rows) == ([False], "")
    assert process._masks(text, [a, b], [], rows) == ([], "too many"), "a token came that had no mask"


def test_an_automaton_reports_a_failure_at_its_first_place() -> None:
    assert Automaton(_Fails(3), None, (), (0,)).fill((), np.empty((1, 2), np.uint32)) == ([], "too many")


# -- limits -------------------------------------------------------------------------------------------------------------
def test_unused_grammars_are_dropped_beyond_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MOST_KEPT", 2)
    engine = served()
    for letter in "abcd":
        assert texts(engine, [Ask((5, 9), bound("regex", letter))]) == [letter]
    assert engine._constraints is not None
    assert [text for _, text in engine._constraints._grammars._grammars] == ["c", "d"]


def test_grammars_beyond_a_number_are_compiled_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MOST_COMPILING", 1)
    engine = served(max_num_seqs=4)
    ids = [engine.add((5, 9), bound("regex", letter * 3), compiled=False) for letter in "abcd"]
    done: dict[str, str] = {}
    while engine.has_work:
        engine.step()
        done |= {output.id: output.text for output in engine.poll() if output.finished}
    assert [done[one] for one in ids] == ["aaa", "bbb", "ccc", "ddd"]


class _Never(Binding):
    """Masks that do not come."""

    ready = False

    def __init__(self) -> None:
        """No process works on them."""


@pytest.mark.parametrize("step_s", [0.0, 0.001, 0.01])
def test_steps_wait_for_masks_a_bounded_share_of_the_time(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    waits = Constraints(SimpleNamespace(directory=Path()), vocab=64, eos=(0,))  # type: ignore[arg-type]
    now = waited = 0.0

    def poll(timeout: float) -> list[Any]:
        nonlocal now, waited
        now, waited = now + timeout, waited + timeout
        return []

    monkeypatch.setattr(waits._grammars, "poll", poll)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    waits._since = now
    for _ in range(500):
        waits.wait([_Never()])
        now += step_s
    assert waited <= constraints.MOST_WAIT_S + constraints.WAIT_SHARE * now + 1e-9
    assert waited >= constraints.MOST_WAIT_S


def test_a_question_larger_than_a_sockets_buffer_arrives() -> None:
    words = "|".join(f"{number:0400}" for number in range(2000))
    (text,) = texts(served(), [Ask((5, 9), bound("regex", f"x({words})?", max_new_tokens=3, ignore_eos=True))])
    assert text.startswith("x")
