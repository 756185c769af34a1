"""Level L5 where the profile `basic` on the reference does not go: sampled texts, and texts in 16 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import polydraft_cpu
from polydraft import RequestOutput
from polydraft.conformance import fault_injection as by
from polydraft.conformance import host_checks, lossless_checks
from polydraft.conformance.check import Check, Tally
from polydraft.conformance.probe import NUM_TOKENS, certain, prompts
from polydraft.conformance.serving import Ask, as_expected
from polydraft.conformance.target import Target
from polydraft.reference.sampling import process_logits
from tests.support.cpu import needs_kernels
from tests.support.kernel_doubles import backend_with

SAMPLED = [check for check in lossless_checks.checks() if check.id.startswith("L5/sampled/")]
K = 3


@pytest.mark.parametrize("check", SAMPLED, ids=lambda check: check.id)
def test_the_reference_samples_as_the_oracle_does(check: Check) -> None:
    result = check.result(Target("reference"))
    assert (result.outcome, result.message) == ("pass", "")
    assert result.comparisons >= 6
    assert check.features == ("sampling",)


def test_a_filter_that_is_left_out_is_found() -> None:
    def hot(a: Any, n: int) -> None:
        temperature = a.temperature
        a.temperature = temperature * 1.5
        process_logits(a, n)
        a.temperature = temperature

    outcomes = [check.result(Target(backend_with(process_logits=hot))).outcome for check in SAMPLED]
    assert outcomes == ["fail"] * len(SAMPLED)


OF_THEIR_OWN = {
    check.id: check
    for check in (*lossless_checks.checks(), *host_checks.checks())
    if check.id.split("/")[1] in ("sampled", "thinking", "host-inputs")
}
"""Whose texts are not the plain greedy ones."""
ALONE = replace(polydraft_cpu.CAPABILITIES, dtypes=("bf16",))
IN_16_BITS: Any = by.with_info(lambda info: replace(info, capabilities=ALONE))(polydraft_cpu)


def cooled(a: Any, n: int) -> None:
    a.logits[:n] *= 1.5


FAULTS = {
    "sampled": by.spoiled("process_logits", cooled),
    "thinking": by.launched("limit_thinking", lambda launch, device: lambda stream, n: None),
    "host-inputs": by.launched("bias_logits", lambda launch, device: lambda stream, n: None),
}


@needs_kernels
def test_without_float32_texts_of_their_own_are_compared_too() -> None:
    assert {name.split("/")[1] for name in OF_THEIR_OWN} == set(FAULTS)
    for name, check in OF_THEIR_OWN.items():
        result = check.result(Target(IN_16_BITS))
        assert (result.outcome, result.message) == ("pass", ""), name
        assert result.comparisons > 80
        faulty = check.result(Target(FAULTS[name.split("/")[1]](IN_16_BITS)))
        assert faulty.outcome == "fail", name
        assert "tokens of request" in faulty.message


def output(prompt: tuple[int, ...], token_ids: tuple[int, ...], rounds: tuple[int, ...], **changes: Any) -> RequestOutput:
    whole: dict[str, Any] = {
        "id": "0", "prompt_ids": prompt, "token_ids": token_ids, "text": "", "text_delta": "", "new_token_ids": (),
        "rounds": rounds, "new_rounds": (), "drafted": 0, "finished": True, "finish_reason": "length",
    }  # fmt: skip
    return RequestOutput(**{**whole, **changes})


def failures(got: RequestOutput, dtype: str) -> list[str]:
    tally = Tally()
    as_expected(tally, [Ask(got.prompt_ids)], [got], K, dtype)
    return tally.failures


def test_in_16_bits_a_text_counts_up_to_its_first_close_choice() -> None:
    sure, prompt = max((certain(one, "f16"), one) for one in prompts(10) if certain(one, "f16") < NUM_TOKENS)
    assert sure > K + 1, "the probe has a prompt whose text becomes close in 16 bits, and its first round does not"
    wanted = Ask(prompt).expected(K)
    right = output(prompt, tuple(wanted.token_ids), tuple(wanted.rounds))
    assert failures(right, "f16") == failures(right, "f32") == []
    behind = (*right.token_ids[:sure], *(token + 1 for token in right.token_ids[sure:]))
    assert failures(replace(right, token_ids=behind), "f16") == []
    assert failures(replace(right, token_ids=behind), "f32")
    before = (*right.token_ids[: sure - 1], right.token_ids[sure - 1] + 1, *right.token_ids[sure:])
    assert failures(replace(right, token_ids=before), "f16")
    assert failures(replace(right, rounds=(right.rounds[0] + 1, *right.rounds[1:])), "f16"), "the first round is certain"
    last = (*right.rounds[:-1], right.rounds[-1] + 1)
    assert failures(replace(right, rounds=last), "f16") == [], "the last round is not"


def test_of_a_request_that_failed_only_the_error_is_told() -> None:
    prompt = prompts(1)[0]
    found = failures(output(prompt, (), (), finish_reason="error", error="the device is lost"), "f32")
    assert len(found) == 1
    assert "the device is lost" in found[0]
