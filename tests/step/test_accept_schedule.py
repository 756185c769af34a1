"""Synthetic acceptance in whole runs: rounds follow the schedule and nothing else, and every place that shows them says so."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from polydraft import LLM, SamplingParams
from polydraft.config import EngineConfig
from polydraft.errors import CapabilityError, ConfigError
from polydraft.reference.sampling import threefry
from polydraft.sentinels import Draw
from tests.support import tiny
from tests.support.emulator import Emulator
from tests.support.runs import DEVICES

NARROW: dict[str, Any] = {"model": str(tiny.checkpoint("narrow")), "backend": "reference", "plugins": tiny.PLUGINS}
SCHEDULE = (0.8, 0.5, 0.25)


def rounds(seed: int, prompt: int, total: int, schedule: tuple[float, ...] = SCHEDULE) -> list[int]:
    """What the schedule says of a request, from its seed and positions alone."""
    found, known, drawn = [], prompt + 1, uniforms(seed, total)
    while known < total:
        most = min(len(schedule), total - known - 1)
        accepted = 0
        while accepted < most and drawn[known + accepted] < np.float32(schedule[accepted]):
            accepted += 1
        found.append(accepted)
        known += accepted + 1
    return found


def uniforms(seed: int, total: int) -> list[float]:
    """What is drawn at each position of a request."""
    key = np.array([seed], np.uint32), np.array([0], np.uint32)
    with np.errstate(over="ignore"):
        words, _ = threefry(key, (np.arange(total, dtype=np.uint32), np.full(total, int(Draw.ACCEPT) << 20, np.uint32)))
    return [int(word >> 8) * 2.0**-24 for word in words]


ENGINES: dict[str, dict[str, Any]] = {
    "reference": {},
    "lazy-2": DEVICES["lazy-2"],
    "emulator": {"plugin": Emulator("emulator:0?seed=5&rows=seeded"), "overlap": 1},
    "ngram": {"proposer": "ngram"},
    "greedy": {"verify": "greedy"},
}


@pytest.mark.parametrize("name", ENGINES)
def test_rounds_follow_the_schedule(name: str) -> None:
    """Whatever the model, the proposer, the batch or the device: seed and position decide. (A proposer that finds fewer drafts
    has fewer to accept.)"""
    llm = LLM(**{**NARROW, "draft_tokens": 3, "accept_schedule": SCHEDULE, "max_num_seqs": 2, **ENGINES[name]})
    params = [SamplingParams(max_new_tokens=40, ignore_eos=True, seed=i) for i in range(3)]
    outputs = llm.generate([[1, 2, 3 + i] for i in range(3)], params)
    for seed, output in enumerate(outputs):
        wanted = rounds(seed, 3, 43)
        if name == "ngram":
            assert sum(output.rounds) <= sum(wanted)
        else:
            assert list(output.rounds) == wanted
    llm.close()


def test_the_share_of_accepted_drafts_is_the_chance() -> None:
    """Some 14,000 rounds: within four standard deviations of the chance, place by place, given that those before were accepted.
    The last rounds of a text have fewer places."""
    found = [accepted for seed in range(100) for accepted in rounds(seed, 3, 300)[:-3]]
    for place, chance in enumerate(SCHEDULE):
        tried = sum(accepted >= place for accepted in found)
        share = sum(accepted > place for accepted in found) / tried
        assert abs(share - chance) < 4 * math.sqrt(chance * (1 - chance) / tried), place


@pytest.mark.parametrize(("schedule", "accepted"), [((0.0, 0.0), {0}), ((1.0, 1.0), {2}), ((1.0, 0.0), {1})])
def test_certain_schedules(schedule: tuple[float, ...], accepted: set[int]) -> None:
    llm = LLM(**NARROW, draft_tokens=2, accept_schedule=schedule)
    (output,) = llm.generate([1, 2, 3], SamplingParams(max_new_tokens=31, ignore_eos=True))
    assert set(output.rounds[:-1]) == accepted
    assert len(output.token_ids) == 31


def test_sampling_requests_follow_it_too() -> None:
    llm = LLM(**NARROW, draft_tokens=2, accept_schedule=(1.0, 1.0))
    (output,) = llm.generate([1, 2, 3], SamplingParams(max_new_tokens=31, ignore_eos=True, temperature=1.0, seed=3))
    assert set(output.rounds) == {2}


def test_without_a_schedule_nothing_is_launched_for_it() -> None:
    llm = LLM(**NARROW, draft_tokens=2)
    launched = {name for part in llm.engine.runner.programs["greedy"].values() for name in part.describe()}
    assert not {"force_choices", "uniform_noise"} & launched
    assert llm.engine.resolved.accept_schedule == ()


def test_it_says_that_it_is_synthetic() -> None:
    llm = LLM(**NARROW, draft_tokens=1, accept_schedule=SCHEDULE)
    (decision,) = [d for d in llm.engine.resolved.decisions if d.name == "accept_schedule"]
    assert decision.chosen == SCHEDULE[:1] == llm.engine.resolved.accept_schedule
    assert "synthetic" in decision.reason
    assert "the text means nothing" in decision.reason


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"verify": "rejection"}, "forces choices, which --verify rejection does not make"),
        ({"draft_tokens": 5}, "--draft-tokens 5: the synthetic acceptance schedule has 3 chances"),
        ({"backend": "null"}, "backend null has no synthetic acceptance"),
    ],
)
def test_what_cannot_follow_a_schedule_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(CapabilityError, match=said):
        LLM(**{**NARROW, "draft_tokens": 3, "accept_schedule": SCHEDULE, **options})


@pytest.mark.parametrize(
    ("chance", "wanted"),
    [(-0.1, "chances from 0 to 1"), (1.5, "chances from 0 to 1"), *((one, "a list of numbers") for one in ("half", True, None))],
)
def test_chances_are_numbers_from_0_to_1(chance: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"accept_schedule has .*, wanted {wanted}"):
        EngineConfig(accept_schedule=(0.5, chance))
