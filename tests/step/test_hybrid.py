"""The hybrid proposer: texts are those of plain decoding whoever drafts, and provenance says who did.

Texts of the tiny models repeat themselves soon, so that the lookup finds much; half of the drafts of the model are wrong.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polydraft import Engine
from polydraft.conformance.lossless_checks import Listed
from polydraft.proposers.hybrid import EVERY, HybridGuesses, ModelDrafts
from polydraft.sentinels import NO_TOKEN
from tests.step.test_drafts_per_step import MODEL, PARAMS, PROMPTS, is_consistent, never_paused, same_text
from tests.support.cpu import needs_kernels
from tests.support.depth import crossed, first
from tests.support.drafting import deciding, drawing
from tests.support.programs import WAYS, program
from tests.support.runs import DEVICES, Ask, drive, engine, solo

HYBRID: dict[str, Any] = {"proposer": "hybrid", "proposer_options": ("min_token_prob=0",)}
FEW: dict[str, Any] = {"proposer": "hybrid", "proposer_options": ("model_drafts=2", "min_token_prob=0")}
LONG = replace(PARAMS, max_new_tokens=60)
ASKS = [
    Ask(
        prompt, replace(PARAMS, max_new_tokens=60, temperature=0.3 * (i % 2), seed=i, max_drafts=(None, 2)[i == 1]), arrival=2 * i
    )
    for i, prompt in enumerate((*PROMPTS, PROMPTS[0]))
]


# -- texts --------------------------------------------------------------------------------------------------------------------
HAPPENED: Counter[str] = Counter()


@pytest.mark.parametrize("seed", first(6, [seed for seed in range(900, 990) if program(seed).num_drafts]))
def test_a_program(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an emulator, twice in a row, so that the lookup knows the texts. How many drafts each step makes, and what has to agree
    with what was found, is drawn."""

    def drawn(self: HybridGuesses) -> None:
        shape = self._index.gains.shape[:2]
        self._agree = np.random.default_rng(seed + self._steps).choice((0, 0, 1, of.num_drafts), shape)

    monkeypatch.setattr(HybridGuesses, "_weigh", drawn)
    of = program(seed)
    again = tuple(replace(ask, arrival=ask.arrival + 50, abort=None) for ask in of.asks[:3])
    of = replace(of, options={**of.options, **(HYBRID, FEW)[seed % 2]}, asks=of.asks + again)
    with drawing(seed):
        served_by = of.build(*WAYS[seed % len(WAYS)])
    outputs = of.serve(served_by)
    plain = replace(of, options={**of.options, "proposer": "auto", "draft_vocab": ""})
    for i, (ask, output) in enumerate(zip(of.asks, outputs, strict=True)):
        if of.options["verify"] != "rejection" or ask.params.temperature == 0:
            assert same_text(output, plain._alone(ask)), f"seed {seed}, request {i}"
        assert output.finish_reason != "error"
        assert all(looked <= drafted for looked, drafted in zip(output.round_lookups, output.round_drafts, strict=True))
        HAPPENED.update(record.source for record in output.tokens)
        HAPPENED["verified lookups"] += sum(output.round_lookups)
    is_consistent(served_by, outputs)
    assert served_by.hazards == ()
    served_by.close()


def test_both_have_drafted_in_the_programs() -> None:
    """Behind all of the ones above, in the same process."""
    if HAPPENED.total() < 300:
        pytest.skip("not all programs ran in this process")
    assert HAPPENED["lookup"] > 5
    assert HAPPENED["draft"] > 5
    assert HAPPENED["verified lookups"] > 10


@pytest.mark.parametrize(("by", "options"), crossed(4, DEVICES, [HYBRID, FEW]))
def test_texts_on_a_device(by: str, options: dict[str, Any]) -> None:
    if by == "lazy-2":
        by = "lazy-1"  # a step meets its guesses in its middle, so at most one is ahead
    with drawing(7):
        served_by = engine(MODEL, device=by, draft_tokens=5, max_num_seqs=3, block_size=4, **options)
    outputs = drive(served_by, ASKS)
    for ask, output in zip(ASKS, outputs, strict=True):
        assert same_text(output, solo(MODEL, 3, ask.prompt_ids, replace(ask.params, max_drafts=None)))
    assert sum(sum(output.round_lookups) for output in outputs) > 10
    is_consistent(served_by, outputs)
    served_by.close()


@needs_kernels
@pytest.mark.parametrize("num_drafts", [1, 2, 5])
def test_texts_on_compiled_kernels(num_drafts: int) -> None:
    from tests.step.test_cpu_backend import cpu_engine

    found = []
    for options in ({}, HYBRID, FEW):
        served_by = cpu_engine(MODEL, num_drafts, max_num_seqs=3, block_size=4, **options)
        found.append(drive(served_by, ASKS))
        served_by.close()
    for outputs in found[1:]:
        assert all(same_text(one, plain) for plain, one in zip(found[0], outputs, strict=True))
        assert any(sum(output.round_lookups) for output in outputs)


def test_log_probabilities_of_drafts_that_no_model_drew_are_those_of_certain_ones() -> None:
    params = replace(PARAMS, logprobs=0)
    asks = [Ask(PROMPTS[0], params), Ask(PROMPTS[0], params)]
    *_, output = drive(engine(MODEL, draft_tokens=5, max_num_seqs=1, logprobs=1, draft_logprobs=True, **FEW), asks)
    drawn = {source: [one.draft_logprob for one in output.tokens if one.source == source] for source in ("draft", "lookup")}
    assert len(drawn["lookup"]) > 3
    assert set(drawn["lookup"]) == {0.0}
    assert 0.0 not in drawn["draft"]


# -- who drafted ----------------------------------------------------------------------------------------------------------------
def watched(served_by: Engine, ask: Ask) -> tuple[dict[int, tuple[list[int], int]], list[tuple[int, int]]]:
    """On a synchronous device, of a request whose text was written before: its drafts and how many the model made, by how many
    tokens were known; and drafts that each round verified and looked up."""
    buffers, found = served_by.runner.memory.buffers, {}

    def look(_: Engine) -> None:
        request = served_by.requests.get("ask-1")
        if request is not None and request.slot >= 0 and served_by.slots.kv_len[request.slot]:
            drafts, lens, kept = (buffers[name].host_array[request.slot] for name in ("drafts", "draft_len", "kept_drafts"))  # type: ignore[attr-defined]
            found[int(served_by.slots.num_known[request.slot])] = drafts[: int(lens)].tolist(), int(kept)

    _, output = drive(served_by, [ask, ask], each_step=look)
    served_by.close()
    return found, list(zip(output.round_drafts, output.round_lookups, strict=True))


@pytest.mark.parametrize("numbers", [(5,), (5, 0, 0, 3, 5, 5)], ids=["always 5", "with pauses"])
@pytest.mark.parametrize("options", [HYBRID, FEW], ids=["all passes", "two passes"])
def test_the_first_drafts_are_the_model_s_and_the_others_are_not(options: dict[str, Any], numbers: tuple[int, ...]) -> None:
    """What the model drafts behind every token comes from a run without lookup."""
    prompt = PROMPTS[3]
    models = never_paused(MODEL, prompt)
    with deciding(lambda limits: Listed(numbers, limits.num_drafts)):
        served_by = engine(MODEL, draft_tokens=5, max_num_seqs=1, block_size=4, max_batched_tokens=13, **options)
    found, rounds = watched(served_by, Ask(prompt, PARAMS))
    passes, looked_up = 2 if options is FEW else 5, 0
    for known, (drafts, kept) in found.items():
        if not drafts:
            continue
        model = models[known][: min(passes, len(models[known]))]
        assert drafts[:kept] == model[:kept], f"behind {known} tokens"
        assert kept == len(drafts) or kept >= len(model) or drafts[kept] != model[kept], "the model had drafted it, too"
        assert NO_TOKEN not in drafts
        looked_up += len(drafts) - kept
    assert looked_up > 10
    waited = [(len(drafts), len(drafts) - kept if drafts else 0) for drafts, kept in found.values()]
    assert rounds == waited[: len(rounds)], "what was verified is what was drafted the step before"


# -- what decides ---------------------------------------------------------------------------------------------------------------
class View:
    """Rounds of two slots that decode, as a step sees them."""

    def __init__(self, accepted: list[int], drafted: list[int], looked_up: list[int]) -> None:
        self.slots, self.plan = self, self
        self.decode = np.array([True, False])
        self.num_rounds = np.full(3, len(accepted))
        self.rounds, self.round_drafts, self.round_lookups = (np.tile(one, (3, 1)) for one in (accepted, drafted, looked_up))

    def __getitem__(self, of: Any) -> Any:
        return np.array([2, 0])[of]


def test_a_model_s_drafts_are_counted_where_something_is_known_of_them() -> None:
    model = ModelDrafts(3)
    model._tried[:], model._right[:] = 0, 0
    # all verified; only the first; the model made one of three and the lookup's second was right, or was not
    model.count(View([3, 0, 2, 1], [3, 3, 3, 3], [0, 0, 2, 2]))  # type: ignore[arg-type]
    assert model._tried.tolist() == [4, 2, 1]
    assert model._right.tolist() == [3, 1, 1]


def trusting(guesses: HybridGuesses, chances: list[float], gains: float) -> list[int]:
    """How many of the model's drafts have to agree, for matches from 1 on, where each token behind a match is right so often."""
    guesses._model._right = guesses._model._tried * chances
    guesses._index.gains[:] = np.cumsum(np.append(0.0, gains ** np.arange(1, guesses._index.gains.shape[2])))
    guesses._weigh()
    return sorted(set(guesses._agree[0, 1:].tolist()))


def test_the_worse_the_lookup_the_more_drafts_have_to_agree() -> None:
    served_by = engine(MODEL, draft_tokens=5, max_num_seqs=1, **HYBRID)
    (guesses,) = served_by.runner.inputs.features
    assert isinstance(guesses, HybridGuesses)
    assert trusting(guesses, [0.8, 0.7, 0.6, 0.5, 0.4], 0.9) == [0]
    assert trusting(guesses, [0.8, 0.7, 0.6, 0.5, 0.4], 0.65) == [1]
    assert trusting(guesses, [0.8, 0.7, 0.6, 0.5, 0.4], 0.45) == [4]
    assert trusting(guesses, [0.8, 0.7, 0.6, 0.5, 0.4], 0.0) == [5]
    assert EVERY > 1
    served_by.close()


def test_the_model_has_as_many_passes_as_were_asked_for() -> None:
    programs = engine(MODEL, draft_tokens=5, graph="off", **FEW).runner.drafts["greedy"]
    names = "+".join(programs[5].describe()).split("+")
    assert names.count("advance_draft") == 2
    assert names.count("splice_drafts") == names.count("align_drafts") == 1
