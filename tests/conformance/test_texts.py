"""How texts are compared with the oracle's: whole ones, aborted ones, and those of few bits up to their first close choice.

Quick like `test_judgement.py`, and for the same reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from polydraft import reference
from polydraft.conformance import serving
from polydraft.conformance.check import Tally
from polydraft.conformance.probe import NUM_TOKENS, certain, prompts
from polydraft.conformance.serving import Ask, as_expected
from polydraft.conformance.target import Target, wrap
from polydraft.output.request_output import RequestOutput

PROMPT = (3, 5, 9)


@dataclasses.dataclass
class Expected:
    token_ids: list[int]
    rounds: list[int]


def output(tokens: Any, rounds: Any, finish_reason: str = "length", error: str = "") -> RequestOutput:
    fields: dict[str, Any] = {field.name: None for field in dataclasses.fields(RequestOutput)}
    given = {"prompt_ids": PROMPT, "token_ids": tuple(tokens), "rounds": tuple(rounds)}
    return RequestOutput(**{**fields, **given, "finish_reason": finish_reason, "error": error})


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tally]:
    """Compare an output with an expected text of ten tokens in the rounds 2, 0, 3, 1, all of it certain for `sure` tokens."""
    text, rounds = list(range(10, 20)), [2, 0, 3, 1]
    monkeypatch.setattr(serving, "_expected", lambda *of: Expected(text, rounds))

    def call(out: RequestOutput, *, dtype: str = "f32", sure: int = 99) -> Tally:
        monkeypatch.setattr(serving, "certain", lambda *of: sure)
        tally = Tally()
        as_expected(tally, [Ask(PROMPT)], [out], 3, dtype)
        return tally

    return call


TEXT, ROUNDS = tuple(range(10, 20)), (2, 0, 3, 1)
WHO = "request 0 (prompt of 3, K=3)"


def test_a_text_is_compared_to_its_end(tell: Callable[..., Tally]):
    right = tell(output(TEXT, ROUNDS))
    assert (right.failures, right.comparisons, right.near_ties) == ([], 14, 0)
    assert tell(output((*TEXT[:9], 99), ROUNDS)).failures == [f"tokens of {WHO}[9] is 99, wanted 19"]
    assert tell(output(TEXT, (2, 0, 3, 0))).failures == [f"acceptance trace of {WHO}[3] is 0, wanted 1"]
    assert tell(output((10, 12), ROUNDS)).failures == [f"tokens of {WHO}[1] is 12, wanted 11 (2 entries, wanted 10)"]
    assert len(tell(output(TEXT[:9], ROUNDS)).failures) == 1
    assert len(tell(output((*TEXT, 20), ROUNDS)).failures) == 1
    f32 = tell(output((*TEXT[:9], 99), ROUNDS), sure=3)
    assert (len(f32.failures), f32.near_ties) == (1, 0), "in float32 no choice is too close"


def test_an_error_is_told_and_nothing_else(tell: Callable[..., Tally]):
    assert tell(output((), (), "error", "lost")).failures == [f"{WHO} ended in an error: lost"]


def test_an_aborted_text_is_a_beginning(tell: Callable[..., Tally]):
    assert tell(output(TEXT[:4], ROUNDS[:1], "abort")).failures == []
    assert tell(output(TEXT[:4], ROUNDS[:1], "length")).failures != []
    assert tell(output((10, 11, 99), ROUNDS[:1], "abort")).failures == [f"tokens of {WHO}[2] is 99, wanted 12"]
    assert tell(output(TEXT[:4], (1,), "abort")).failures == [f"acceptance trace of {WHO}[0] is 1, wanted 2"]


@pytest.mark.parametrize(
    ("sure", "whole"), [(1, 0), (3, 0), (4, 1), (5, 2), (8, 2), (9, 3), (10, 3)]
)  # the prefill's token, then 3, 1, 4 and 2 tokens a round: rounds end behind 4, 5, 9 and 11 tokens
def test_rounds_within_the_certain_part(tell: Callable[..., Tally], sure: int, whole: int):
    """Only rounds that end within the certain tokens are compared, and every one of those is."""
    tokens = (*TEXT[:sure], *(99 for _ in TEXT[sure:]))
    wrong_behind = (*ROUNDS[:whole], *(9 for _ in ROUNDS[whole:]))
    seen = tell(output(tokens, wrong_behind), dtype="bf16", sure=sure)
    if sure < len(TEXT):
        assert (seen.failures, seen.near_ties) == ([], 1)
        assert seen.comparisons == sure + max(whole, 1)
    if 0 < whole and sure < len(TEXT):
        wrong = (*ROUNDS[: whole - 1], 9, *ROUNDS[whole:])
        assert tell(output(tokens, wrong), dtype="bf16", sure=sure).failures != []
    assert tell(output((99, *TEXT[1:]), ROUNDS), dtype="bf16", sure=sure).failures != []


def test_factors_rounded_to_tf32_make_close_choices_close(tell: Callable[..., Tally]):
    other = (*TEXT[:9], 99)
    assert (tell(output(other, ROUNDS), dtype="tf32", sure=9).failures, len(tell(output(other, ROUNDS)).failures)) == ([], 1)

    def declaring(info: Any) -> Any:
        return dataclasses.replace(info, capabilities=dataclasses.replace(info.capabilities, f32_matmul="tf32"))

    target, coarse = Target("reference"), Target(wrap(reference, polydraft_backend_info=declaring))
    assert [one.rounding(dtype) for one in (target, coarse) for dtype in ("f32", "bf16")] == ["f32", "bf16", "tf32", "bf16"]
    prompt = max(prompts(10), key=lambda one: certain(one, "f32") - certain(one, "tf32"))
    assert certain(prompt, "tf32") < certain(prompt, "f32") == NUM_TOKENS


def test_a_certain_text_in_few_bits_has_no_near_tie(tell: Callable[..., Tally]):
    assert tell(output(TEXT, ROUNDS), dtype="bf16", sure=10).near_ties == 0
    assert tell(output(TEXT, ROUNDS), dtype="bf16", sure=4).near_ties == 0
    assert serving._rounds_within((), 5) == 0
    assert serving._rounds_within((0, 0, 0), 3) == 2
    assert serving._rounds_within((0, 0), 99) == 2


def test_every_request_is_compared(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "_expected", lambda *of: Expected([1], []))
    tally = Tally()
    as_expected(tally, [Ask(PROMPT), Ask((1,))], [output((1,), ()), output((2,), ())], 0, "f32")
    assert tally.failures == ["tokens of request 1 (prompt of 1, K=0)[0] is 2, wanted 1"]
    with pytest.raises(ValueError, match="zip"):
        as_expected(Tally(), [Ask(PROMPT)], [], 0, "f32")


def test_rounds_of_drawn_numbers_are_compared_with_those_that_were_verified(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def expected(prompt: Any, drafts: Any, *of: Any) -> Expected:
        asked.append(drafts)
        return Expected([1, 2], [0])

    monkeypatch.setattr(serving, "_expected", expected)
    tally, got = Tally(), dataclasses.replace(output((1, 3), (0,)), round_drafts=(2, 1))
    as_expected(tally, [Ask(PROMPT)], [got], None, "f32")
    as_expected(Tally(), [Ask(PROMPT)], [got], 3, "f32")
    assert asked == [(2, 1), 3]
    assert tally.failures == ["tokens of request 0 (prompt of 3, K=drawn)[1] is 3, wanted 2"]
