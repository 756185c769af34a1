"""Random programs over several ranks with `--invariant`: whatever requests ask for and however they are served, on an emulator
in any legal order of each rank's operations, texts, rounds and log probabilities are those of the request alone on one device, to
the bit. Some are given new weights in the middle, some draft by what the host looks up, some with a draft model.

The generator is that of the emulator's programs (`tests/support/programs.py`), less what ranks refuse. They are long, and for
`make deep`; short ones, many of which the same engines serve, are in `test_ranks_seeds.py`.
"""

from __future__ import annotations

import dataclasses
import random
from contextlib import closing
from typing import Any, Literal

import pytest

from polydraft import Engine, RequestOutput
from polydraft.errors import CapabilityError
from polydraft.models import Checkpoint, FamilyRegistry
from polydraft.models.ranks import has_experts, of_ranks
from tests.support import tiny, tiny_families
from tests.support.eagle3 import pair
from tests.support.of_ranks import on_one_core
from tests.support.poison import poison_free_blocks
from tests.support.programs import Program, alone, bits, program
from tests.support.runs import Ask, drive, essence, solo_moved
from tools.make_eagle3 import LAYOUTS, V

SEEDS = range(200)
LOOKING = ("suffix", "hybrid")
REFUSED: dict[str, Any] = {"verify": "auto", "weights": "auto", "weights_ignore": ()}


def split(seed: int) -> tuple[Program, dict[str, Any]]:
    """A program that ranks can serve, and how many of them and what they keep whole."""
    made = program(7000 + seed)
    rng, registry = random.Random(seed), FamilyRegistry()
    for family in tiny_families.polydraft_models():
        registry.register(family, plugin="tiny_families")
    with Checkpoint(tiny.checkpoint(made.model)) as checkpoint:
        model, _ = registry.describe(checkpoint)
    for ranks in rng.sample((2, 4), 2):
        for whole in rng.sample((False, True), 2) if has_experts(model) else (False,):
            try:
                of_ranks(model, ranks, whole_experts=whole)
            except CapabilityError:
                continue
            return made, {"tensor_parallel": ranks, "expert_parallel": whole}
    return made, {"tensor_parallel": 1}


class Change:
    """New weights in the middle of a program. It knows which ones the tokens of each request come from."""

    def __init__(self, seed: int, model: str) -> None:
        rng = random.Random(f"weights {seed}")
        self._step, self._model = rng.choice((2, 4, 7, 12, 20)), model
        self._way: Literal["finish", "recompute"] = rng.choice(("finish", "recompute"))
        self._in_memory, self._count = rng.random() < 0.5, 0
        self._kept: dict[str, int | None] = {}

    def each_step(self, running: Engine) -> None:
        """Behind one of them, take the other weights."""
        poison_free_blocks(running)
        self._count += 1
        if self._count != self._step:
            return
        there = dict(running.requests)
        begun = {name for name, one in there.items() if one.begun or one.slot >= 0 or one.finish_reason}
        with Checkpoint(tiny.checkpoint(tiny.moved(self._model))) as opened:
            arrays = {name: opened.tensor(name) for name in opened.names()}
            running.update_weights(arrays if self._in_memory else opened.path, running=self._way)
        for name, one in there.items():
            ends = one.finish_reason or (self._way == "finish" and name in begun)
            self._kept[name] = None if ends else len(one.token_ids)

    def wanted(self, number: int, ask: Ask, rules: Any, num_drafts: int) -> RequestOutput:
        """What a request is to be."""
        here = ask.prompt_ids, ask.params
        kept = self._kept.get(f"ask-{number}", None if ask.arrival < self._step <= self._count else 0)
        if kept is None or self._count < self._step:
            return alone(self._model, num_drafts, *here, rules)
        if kept == 0:
            return alone(tiny.moved(self._model), num_drafts, *here, rules)
        return solo_moved(self._model, num_drafts, *here, kept, rules)


@pytest.mark.deep
@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs(seed: int):
    made, over = split(seed)
    if over["tensor_parallel"] == 1:
        over["tensor_parallel"] = 2
        made = _fitting(made, "narrow", tiny.CONFIGS["narrow"]["vocab_size"])
    drafting = _drafting(seed, made)
    if "draft_model" in drafting:
        over = {"tensor_parallel": over["tensor_parallel"]}
        made = _fitting(made, "", V)
    made = dataclasses.replace(made, options={**made.options, **REFUSED, **drafting, **over})
    depth, graph = seed % 3, ("off", "decode")[seed % 2]
    change = Change(seed, made.model) if seed % 4 in (1, 2) and "draft_model" not in drafting else None
    with on_one_core(), closing(made.build(depth, graph)) as running:
        outputs = made.serve(running) if change is None else drive(running, made.asks, each_step=change.each_step)
    looks = made.options["proposer"] in LOOKING  # drafts are then what other texts say, too: the request alone makes none
    num_drafts = 0 if looks else made.num_drafts
    rules = tuple((name, made.options[name]) for name in ("logprobs", "verify"))
    rules += tuple((name, made.options[name]) for name in ("model", "draft_model") if name in made.options)
    rules += (("draft_vocab", "" if looks else made.options["draft_vocab"]),)
    rules += (("proposer", "auto" if looks else made.options["proposer"]),)
    rules += (("expert_parallel", made.options.get("expert_parallel", False)),)
    for i, (ask, output) in enumerate(zip(made.asks, outputs, strict=True)):
        if change is None:
            wanted = alone(made.model, num_drafts, ask.prompt_ids, ask.params, rules)
        else:
            wanted = change.wanted(i, ask, rules, num_drafts)
        assert not output.error, (i, output.error)
        if output.finish_reason == "abort":
            assert output.token_ids == wanted.token_ids[: len(output.token_ids)], i
            if not looks:
                assert output.rounds[:-1] == wanted.rounds[: max(len(output.rounds) - 1, 0)], i
        else:
            mine, theirs = (dict(essence(one)) for one in (output, wanted))
            if looks:
                mine |= {name: theirs[name] for name in ("rounds", "drafted")}
            assert mine == theirs, (i, over)
        assert bits(output) == bits(wanted)[: len(output.token_ids)], (i, over)


def _drafting(seed: int, made: Program) -> dict[str, Any]:
    """Some programs draft by what the host of rank 0 looks up, some with a draft model of their own beside its target."""
    rng = random.Random(f"proposer {seed}")
    looks = made.num_drafts > 0 and rng.random() < 0.3
    if looks:
        return {"proposer": rng.choice(LOOKING), "draft_vocab": ""}
    if not made.num_drafts or random.Random(f"draft model {seed}").random() > 0.4:
        return {}
    target, draft_model = pair(rng.choice(sorted(LAYOUTS)), 0.02)
    return {"proposer": "eagle3", "model": str(target), "draft_model": str(draft_model), "draft_vocab": ""}


def _fitting(made: Program, model: str, few: int) -> Program:
    """The same requests of a model with so many tokens."""

    def fitting(ask: Ask) -> Ask:
        params = dataclasses.replace(
            ask.params, stop_token_ids=tuple(token % few for token in ask.params.stop_token_ids),
            bad_words=tuple(tuple(token % few for token in word) for word in ask.params.bad_words if not isinstance(word, str)),
        )  # fmt: skip
        return dataclasses.replace(ask, prompt_ids=tuple(token % few for token in ask.prompt_ids), params=params)

    counts = f"{tiny.token_counts(few)}:{few // 2}" if made.options["draft_vocab"] else ""
    options = {**made.options, "draft_vocab": counts}
    return dataclasses.replace(made, model=model, asks=tuple(map(fitting, made.asks)), options=options)
