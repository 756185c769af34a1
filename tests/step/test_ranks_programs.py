"""Random programs over several ranks with `--invariant`: whatever requests ask for and however they are served, on an emulator
in any legal order of each rank's operations, texts, rounds and log probabilities are those of the request alone on one device, to
the bit.

The generator is that of the emulator's programs (`tests/support/programs.py`), less what ranks refuse.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from polydraft.errors import CapabilityError
from polydraft.models import Checkpoint, FamilyRegistry
from polydraft.models.ranks import has_experts, of_ranks
from tests.support import tiny, tiny_families
from tests.support.depth import first
from tests.support.programs import Program, alone, bits, program
from tests.support.runs import essence

SEEDS = range(200)
REFUSED: dict[str, Any] = {"verify": "auto", "draft_vocab": "", "weights": "auto", "weights_ignore": ()}


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


@pytest.mark.parametrize("seed", first(4, SEEDS))
def test_random_programs(seed: int):
    made, over = split(seed)
    if over["tensor_parallel"] == 1:
        over["tensor_parallel"] = 2
        made = dataclasses.replace(made, model="narrow", asks=tuple(_fitting(ask) for ask in made.asks))
    made = dataclasses.replace(made, options={**made.options, **REFUSED, **over})
    depth, graph = seed % 3, ("off", "decode")[seed % 2]
    running = made.build(depth, graph)
    outputs = made.serve(running)
    running.close()
    rules = tuple((name, made.options[name]) for name in ("logprobs", "proposer", "verify", "draft_vocab"))
    rules += (("expert_parallel", made.options.get("expert_parallel", False)),)
    for i, (ask, output) in enumerate(zip(made.asks, outputs, strict=True)):
        wanted = alone(made.model, made.num_drafts, ask.prompt_ids, ask.params, rules)
        assert not output.error, (i, output.error)
        if output.finish_reason == "abort":
            assert output.token_ids == wanted.token_ids[: len(output.token_ids)], i
            assert output.rounds[:-1] == wanted.rounds[: max(len(output.rounds) - 1, 0)], i
        else:
            assert essence(output) == essence(wanted), (i, over)
        assert bits(output) == bits(wanted)[: len(output.token_ids)], (i, over)


def _fitting(ask: Any) -> Any:
    """The same request with tokens of the smallest vocabulary."""
    few = tiny.CONFIGS["narrow"]["vocab_size"]
    params = dataclasses.replace(
        ask.params, stop_token_ids=tuple(token % few for token in ask.params.stop_token_ids),
        bad_words=tuple(tuple(token % few for token in word) for word in ask.params.bad_words if not isinstance(word, str)),
    )  # fmt: skip
    return dataclasses.replace(ask, prompt_ids=tuple(token % few for token in ask.prompt_ids), params=params)
