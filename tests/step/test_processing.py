"""Processed logits: with every feature, any K, proposer, batch and device give the text of plain decoding, bit for bit.

Plain decoding itself is held against a float64 oracle with a few naive lines of processing. Kernels that forget the drafts of
a window, or the rows of the draft, are shown to be noticed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polydraft import Engine, RequestOutput, SamplingParams
from polydraft.errors import RequestError
from polydraft.program.plan import StepPlan
from polydraft.reference.processing import forbid_tokens, penalise_logits
from polydraft.sampling.processing import STAGES
from polydraft.sampling_params import MAX_BAD_WORDS, MAX_BIASES
from polydraft.step.runner import InFlightStep
from tests.oracle.processing import processed
from tests.support.depth import among
from tests.support.kernel_doubles import backend_with
from tests.support.plugin_doubles import backend_without
from tests.support.runs import Ask, drive, engine, essence, oracle, solo

MODELS = ("narrow", "mirrored")
PROMPTS = ((3, 5, 9), (7, 7, 2, 11, 3), (20,))
FEATURES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "repetition that invites": {"repetition_penalty": 0.8},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "rewards": {"presence_penalty": -0.7, "frequency_penalty": -0.4},
    "bias": {"logit_bias": {5: 2.5, 13: -3.0, 57: -100}},
    "bad tokens": {"bad_words": ["w13", (57,), (5,)]},
    "bad runs": {"bad_words": [(18, 3), (56, 40), (57, 62), (62, 24), (13, 38, 5), (36, 10)]},
    "late stop": {"min_tokens": 8, "stop_token_ids": (13, 56, 40, 57, 62), "ignore_eos": False},
    "everything": {
        "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.3, "logit_bias": {5: 1.0, 40: -1.0},
        "bad_words": [(56,), (18, 3), (57, 62, 24)], "min_tokens": 5, "stop_token_ids": (3, 24), "ignore_eos": False,
    },
}  # fmt: skip
"""What one request may ask for, by name."""
RULES: dict[str, dict[str, Any]] = {"greedy": {}, "coupled": {"temperature": 0.9, "top_p": 0.95}}


def params(feature: str, rule: str = "greedy", seed: int = 0, **more: Any) -> SamplingParams:
    given = {"max_new_tokens": 24, "ignore_eos": True, "seed": seed, **RULES[rule], **FEATURES.get(feature, {}), **more}
    return SamplingParams(**given)


def asks(rule: str) -> list[Ask]:
    """Every feature on its prompt, and requests between them that ask for nothing; arrivals mix prompts and windows."""
    features = list(FEATURES)
    wanted = [*features[:3], "nothing", *features[3:7], "nothing", *features[7:]]
    return [Ask(PROMPTS[i % 3], params(name, rule, i), arrival=i // 3) for i, name in enumerate(wanted)]


@functools.cache
def plainly(model: str, rule: str) -> tuple[RequestOutput, ...]:
    """Each request alone, without drafts."""
    return tuple(solo(model, 0, ask.prompt_ids, ask.params) for ask in asks(rule))


def check(served_by: Engine, model: str, rule: str) -> None:
    wanted = plainly(model, rule)
    for ask, got, want in zip(asks(rule), drive(served_by, asks(rule)), wanted, strict=True):
        assert (got.token_ids, got.text, got.finish_reason) == (want.token_ids, want.text, want.finish_reason), ask


@pytest.mark.parametrize(
    ("rule", "model", "num_drafts"),
    among(
        [("greedy", "mirrored", 2), ("coupled", "narrow", 5)],
        itertools.product(RULES, MODELS, range(6)),
    ),
)
def test_texts_do_not_depend_on_drafts_or_batch(model: str, rule: str, num_drafts: int) -> None:
    slots = (12, 7, 2, 16, 4, 3)[num_drafts]
    check(engine(model, draft_tokens=num_drafts, max_num_seqs=slots, block_size=4, max_batched_tokens=80), model, rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("num_drafts", "proposer"), [(1, "ngram"), (4, "ngram"), (0, "none")])
def test_texts_do_not_depend_on_the_proposer(rule: str, num_drafts: int, proposer: str) -> None:
    check(engine("narrow", draft_tokens=num_drafts, proposer=proposer, max_num_seqs=4), "narrow", rule)


@pytest.mark.parametrize(
    "options",
    [
        {"device": "lazy-1", "max_num_seqs": 4},
        {"device": "lazy-2", "max_num_seqs": 16, "max_batched_tokens": 64},
        {"device": "lazy-seeded", "max_num_seqs": 5, "block_size": 2, "num_blocks": 40},  # requests are preempted
    ],
    ids=lambda options: options["device"],
)
def test_texts_do_not_depend_on_the_device(options: dict[str, Any]) -> None:
    served_by = engine("narrow", draft_tokens=3, **options)
    check(served_by, "narrow", "coupled")
    assert (served_by.scheduler.num_preemptions > 0) == ("num_blocks" in options)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_changes_a_text(model: str, feature: str) -> None:
    changed = [solo(model, 0, p, params(feature)).token_ids != solo(model, 0, p, params("nothing")).token_ids for p in PROMPTS]
    assert any(changed)


def test_drafts_are_accepted_as_often_as_without_processing() -> None:
    """Penalties make a text less predictable; a bias that changes nothing must not cost a single draft."""
    free = solo("narrow", 3, PROMPTS[0], params("nothing"))
    assert essence(solo("narrow", 3, PROMPTS[0], params("nothing", logit_bias={1: 1e-9}))) == essence(free)
    assert sum(free.rounds) > 5


# -- plain decoding against an oracle ----------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("model", MODELS)
def test_plain_decoding_is_what_the_oracle_finds(model: str, rule: str) -> None:
    compared, table = 0, oracle(model)
    for ask, got in zip(asks(rule), plainly(model, rule), strict=True):
        out: list[int] = []
        for token in got.token_ids:
            logits = table.target_logits(table.target_states([*ask.prompt_ids, *out])[-1:])[0]
            position = len(ask.prompt_ids) + len(out)
            chosen, clear = ask.sampling.choose(processed(logits, ask.prompt_ids, out, ask.params), position)
            assert chosen == token or not clear, (ask, len(out))
            compared += clear
            out.append(token)
    assert compared > 200


# -- mutants -----------------------------------------------------------------------------------------------

Kernel = Callable[[Any, int], None]


def without_drafts(kernel: Kernel) -> Kernel:
    """The history ends where the window begins: what FastDeploy's penalties do."""

    def forgetful(a: Any, n: int) -> None:
        known = (a.prompt_len + a.num_generated)[np.maximum(a.row_slot[:n], 0)]
        positions = a.positions.copy()
        positions[:n] = known - a.ahead
        kernel(SimpleNamespace(**{**vars(a), "positions": positions}), n)

    return forgetful


def of_target_rows(kernel: Kernel) -> Kernel:
    """Draft rows go unprocessed."""
    return lambda a, n: kernel(a, n) if a.ahead == 0 else None


def notices(model: str, plugin: object, wanted: Sequence[Ask]) -> bool:
    """Whether some text at K = 3 differs from plain decoding; without drafts there is nothing to forget."""
    mutant, alone = (engine(model, draft_tokens=k, plugin=plugin) for k in (3, 0))
    texts = [solo(model, 0, ask.prompt_ids, ask.params).token_ids for ask in wanted]
    assert [out.token_ids for out in drive(alone, wanted)] == texts
    assert [solo(model, 3, ask.prompt_ids, ask.params).token_ids for ask in wanted] == texts
    return [out.token_ids for out in drive(mutant, wanted)] != texts


@pytest.mark.parametrize(
    ("penalty", "rule"),
    among(
        [({"repetition_penalty": 1.4}, "coupled")],
        itertools.product([{"repetition_penalty": 1.4}, {"presence_penalty": 2}, {"frequency_penalty": 2}], RULES),
    ),
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_penalties_that_forget_the_drafts_of_the_window_write_another_text(penalty: dict[str, float], rule: str) -> None:
    wanted = [Ask(PROMPTS[seed % 3], params("nothing", rule, seed, **penalty)) for seed in range(6)]
    assert notices("mirrored", backend_with(penalise_logits=without_drafts(penalise_logits)), wanted)


def test_rules_that_forget_the_drafts_of_the_window_write_another_text() -> None:
    """Runs of bad tokens go through where they begin in the window; stop tokens wait longer than they should."""
    plugin = backend_with(forbid_tokens=without_drafts(forbid_tokens))
    assert notices("narrow", plugin, [Ask(prompt, params("bad runs")) for prompt in PROMPTS])
    free = {prompt: solo("narrow", 0, prompt, params("nothing")).token_ids for prompt in PROMPTS}
    first = [(prompt, at) for prompt, ids in free.items() for at in range(4, 8) if ids.index(ids[at]) == at]
    stops = {at: params("nothing", stop_token_ids=(free[prompt][at],), min_tokens=at) for prompt, at in first}
    assert notices("narrow", plugin, [Ask(prompt, stops[at]) for prompt, at in first])


def test_drafts_that_go_unprocessed_cost_acceptance_but_no_token() -> None:
    fewer = engine("narrow", draft_tokens=3, plugin=backend_with(penalise_logits=of_target_rows(penalise_logits)))
    wanted = [Ask(prompt, params("frequency", max_new_tokens=60)) for prompt in PROMPTS]
    right = [solo("narrow", 3, ask.prompt_ids, ask.params) for ask in wanted]
    got = drive(fewer, wanted)
    assert [out.token_ids for out in got] == [out.token_ids for out in right]
    assert sum(out.accepted for out in got) < sum(out.accepted for out in right)


# -- what it costs -----------------------------------------------------------------------------------------


def test_a_step_without_processing_launches_nothing_of_it() -> None:
    served_by = engine("narrow", draft_tokens=2, max_num_seqs=2)
    programs, processing = served_by.runner.programs, {contract for stage in STAGES for contract in stage.contracts}
    assert list(programs) == ["greedy", "sampling", "greedy.processed", "sampling.processed"]
    for name in ("greedy", "sampling"):
        extra = {part: programs[f"{name}.processed"][part].describe() for part in programs[name]}
        for part, program in programs[name].items():
            rest = [contract for contract in extra[part] if contract not in processing]
            assert rest == program.describe()
            assert len(extra[part]) - len(rest) == {"target": 3, "draft": 6}[part]


def test_the_processed_program_runs_while_some_slot_asks_for_it() -> None:
    served_by = engine("narrow", draft_tokens=2, max_num_seqs=2)
    served_by.add(PROMPTS[0], params("nothing", max_new_tokens=60))
    served_by.add(PROMPTS[1], params("frequency", max_new_tokens=12))
    plans: list[StepPlan] = []
    launch = served_by.runner.launch

    def watched(plan: StepPlan) -> InFlightStep:
        plans.append(plan)
        return launch(plan)

    served_by.runner.launch = watched  # type: ignore[method-assign]
    while served_by.has_work:
        served_by.step()
    kinds = [plan.processed for plan in plans]
    assert kinds == sorted(kinds, reverse=True)
    assert set(kinds) == {True, False}


def test_a_slot_keeps_nothing_of_the_request_before() -> None:
    """One slot: biases and bad words of the first request must not reach the second, though a neighbour keeps the kind of step
    processed."""
    served_by = engine("narrow", draft_tokens=3, max_num_seqs=2)
    first = [Ask(PROMPTS[0], params("everything", max_new_tokens=5)), Ask(PROMPTS[1], params("presence", max_new_tokens=60))]
    second = [Ask(PROMPTS[0], params("nothing"), arrival=4), Ask(PROMPTS[0], params("bad tokens"), arrival=4)]
    for ask, got in zip((*first, *second), drive(served_by, (*first, *second)), strict=True):
        assert got.token_ids == solo("narrow", 0, ask.prompt_ids, ask.params).token_ids, ask


# -- stops -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_no_stop_takes_effect_before_its_time(num_drafts: int) -> None:
    """Tokens 4 to 6 of a text as the stop: as a text it is let through until then, as a token it is never chosen."""
    free = solo("narrow", 0, PROMPTS[0], params("nothing"))
    for place in (3, 4, 5):
        token = free.token_ids[place]
        first = free.token_ids.index(token)
        for least in (0, first, first + 1, 12):
            text = solo("narrow", num_drafts, PROMPTS[0], params("nothing", stop=f"w{token} ", min_tokens=least))
            # The space behind a word comes with the next token.
            ends = [i + 2 for i in range(23) if free.token_ids[i] == token and i + 2 > least]
            assert text.token_ids == free.token_ids[: ends[0] if ends else 24]
            ids = solo("narrow", num_drafts, PROMPTS[0], params("nothing", stop_token_ids=(token,), min_tokens=least))
            assert token not in ids.token_ids[:least]
            assert ids.finish_reason == "length" or len(ids.token_ids) > least
            assert (ids.token_ids == free.token_ids[: first + 1]) == (least <= first)


# -- bad requests ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1.0)}, f"logit_bias has {MAX_BIASES + 1} token ids, wanted at most"),
        ({"logit_bias": {64: 1.0}}, "logit_bias names token id 64, wanted at most 63"),
        ({"bad_words": [(1,)] * MAX_BAD_WORDS}, None),  # each word counts once
        ({"bad_words": [(1, 2, 3, i % 60, i // 60) for i in range(86)]}, f"bad_words take 516 places .* at most {MAX_BAD_WORDS}"),
        ({"bad_words": ["x" * 100] * 200}, "bad_words have 20000 characters, wanted at most 16384; name fewer"),
        ({"bad_words": [(3, 64)]}, "bad_words names token id 64, wanted at most 63"),
        ({"logit_bias": {"7": 1, 8: -1}, "bad_words": "w7 w8", "min_tokens": 3}, None),
    ],
)
def test_what_does_not_fit_a_slot_is_refused(given: dict[str, Any], message: str | None) -> None:
    served_by = engine("narrow", draft_tokens=1, max_num_seqs=1)
    if message is None:
        served_by.add(PROMPTS[0], SamplingParams(max_new_tokens=4, **given))
        return
    with pytest.raises(RequestError, match=message):
        served_by.add(PROMPTS[0], SamplingParams(**given))
    assert not served_by.requests


WANTING = {"penalise_logits": "presence", "bias_logits": "bias", "forbid_tokens": "late stop"}
"""Contract to what nobody is served without it."""


@pytest.mark.parametrize("lacking", [("penalise_logits",), ("bias_logits",), ("forbid_tokens",), tuple(WANTING)], ids="+".join)
def test_a_backend_without_the_contracts_serves_everybody_else(lacking: tuple[str, ...]) -> None:
    served_by = engine("narrow", draft_tokens=2, plugin=backend_without(*lacking))
    for name in lacking:
        for feature in (WANTING[name], "everything"):
            with pytest.raises(RequestError, match=rf"this backend has no ({'|'.join(lacking)}); leave it out"):
                served_by.add(PROMPTS[0], params(feature))
    assert not served_by.requests
    wanted = ["nothing", *(feature for name, feature in WANTING.items() if name not in lacking)]
    for feature, got in zip(wanted, drive(served_by, [Ask(PROMPTS[0], params(feature)) for feature in wanted]), strict=True):
        assert got.token_ids == solo("narrow", 0, PROMPTS[0], params(feature)).token_ids, feature
