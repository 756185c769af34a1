"""With `--invariant`, a text is the same to the bit over 1, 2 and 4 ranks, however it is served: tokens, rounds and every log
probability that a request is told.

The requests are those of `test_ranks.py`: in every run some share beginnings, one is aborted and one is preempted. At N = 2
alone little would be shown, for addition commutes, so what `make test` takes has four ranks.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polydraft import Engine, RequestOutput
from polydraft.device import Array
from polydraft.errors import CapabilityError
from polydraft.models import Checkpoint, FamilyRegistry, load_weights
from polydraft.models.ranks import LEAVES, OfRank, in_leaves, of_ranks, shares_of, without_leaves
from polydraft.models.weights import InLeaves
from polydraft.plugins.default_backend import default_backend
from tests.support import tiny
from tests.support.depth import among
from tests.support.emulator import SCHEDULES
from tests.support.of_ranks import asks, split
from tests.support.runs import drive, engine

NATIVE = pytest.mark.skipif(default_backend().name != "cpu", reason="the CPU backend is not built here")
EVERY = [
    (model, whole, ranks, drafts)
    for model in ("narrow", "deep", "sparse-glm", "sparse-ernie", "with-biases", "with-windows")
    for whole in ((False, True) if model.startswith("sparse") else (False,))
    for ranks in ((2,) if model == "sparse-ernie" and whole else (2, 4))  # it has six experts
    for drafts in (0, 3, 5)
]


def told(running: Engine, model: str) -> list[tuple[Any, ...]]:
    """What requests are told: tokens, rounds, log probabilities to the bit; of one that is aborted nothing, since how far it
    comes is a matter of time."""
    given = [replace(ask, params=replace(ask.params, logprobs=3)) for ask in asks(model)]
    outputs = drive(running, given)
    assert running.scheduler.num_preemptions > 0
    assert running.ledger.num_hits > 0
    assert [output.finish_reason for output in outputs].count("abort") == 1
    return [
        (output.token_ids, tuple(output.rounds), bits(output).tobytes()) for output in outputs if output.finish_reason != "abort"
    ]


def bits(output: RequestOutput) -> Array:
    """The log probabilities of tokens, and of the most likely in their places."""
    return np.array([value for one in output.tokens for value in (one.logprob, *(top for _, top in one.top))], np.float64)


def over(model: str, ranks: int, drafts: int, **options: Any) -> list[tuple[Any, ...]]:
    with split(model, ranks, **{"draft_tokens": drafts, "invariant": True, "logprobs": 3, **options}) as running:
        assert running.resolved.leaves == bool(running.resolved.invariant)
        return told(running, model)


@functools.cache
def alone(model: str, drafts: int, whole: bool, backend: str = "reference") -> list[tuple[Any, ...]]:
    """Over one rank; with experts in runs where more ranks would keep them whole."""
    return over(model, 1, drafts, expert_parallel=whole, backend=backend)


def tokens(found: list[tuple[Any, ...]]) -> list[Any]:
    return [one[0] for one in found]


@pytest.mark.parametrize(
    ("model", "whole", "ranks", "drafts"),
    among([("sparse-ernie", False, 2, 3)], EVERY),
)
def test_bits_do_not_depend_on_the_number_of_ranks(model: str, whole: bool, ranks: int, drafts: int):
    found = over(model, ranks, drafts, expert_parallel=whole)
    assert found == alone(model, drafts, whole)
    assert tokens(found) == tokens(alone(model, 0, whole))


@pytest.mark.deep
@NATIVE
@pytest.mark.parametrize(("model", "whole", "ranks", "drafts"), among([("sparse-glm", True, 4, 3)], EVERY))
def test_nor_do_those_of_processes(model: str, whole: bool, ranks: int, drafts: int):
    found = over(model, ranks, drafts, expert_parallel=whole, backend="cpu")
    assert found == alone(model, drafts, whole, "cpu")
    assert tokens(found) == tokens(alone(model, 0, whole, "cpu"))


@pytest.mark.parametrize(("schedule", "graph"), [(s, g) for s in SCHEDULES for g in ("off", "decode")])
@pytest.mark.parametrize("model", among([], ["narrow", "sparse-glm", "sparse-ernie"]))
def test_nor_do_those_of_the_emulator(model: str, schedule: str, graph: str):
    """Each rank's operations in an order of their own, and ranks that come late."""
    options: dict[str, Any] = {"invariant": True, "overlap": 1, "graph": graph, "logprobs": 3, "draft_tokens": 3}
    options["graph_sizes"] = (1, 3) if graph == "decode" else ()
    found = []
    for ranks in (1, 4):
        with split(model, ranks, emulator=f"seed=5&ranks=late&{schedule}", **options) as running:
            found.append(told(running, model))
    assert found[0] == found[1]


@pytest.mark.deep
def test_without_it_sums_over_ranks_round_differently():
    """What is compared above does differ where nothing is promised."""
    one, four = (over("narrow", ranks, 3, invariant=False) for ranks in (1, 4))
    assert tokens(one) == tokens(four)
    assert one != four


@pytest.mark.parametrize("ranks", [1, 2])
def test_sums_that_nobody_rounds_later_have_no_place_of_their_own(ranks: int):
    with split("narrow", ranks, invariant=True) as running:
        names = {name for name in running.runner.memory.buffers if name.startswith("scratch.")}
    assert any("leaves" in name for name in names)
    assert not any("total" in name for name in names)


# -- weights -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize("model", ["narrow", "sparse-glm", "with-biases"])
def test_a_rank_has_a_run_of_the_leaves_of_one_device(model: str, whole_experts: bool):
    with Checkpoint(tiny.checkpoint(model)) as checkpoint:
        plain, table = FamilyRegistry().describe(checkpoint)
        weights, description = load_weights(checkpoint, plain, table), in_leaves(plain, whole_experts=whole_experts)
        one = InLeaves(weights, description.weights())
        leaved = [name for name, tensor in description.weights().items() if tensor.leaves]
        assert {"layers.0.o", "mtp.0.o"} <= set(leaved)
        for ranks in (2, 4):
            share = of_ranks(description, ranks, whole_experts=whole_experts)
            kept = [InLeaves(OfRank(weights, shares_of(plain, share, rank)), share.weights()) for rank in range(ranks)]
            for name in leaved:
                stack = description.weights()[name].stack or 1
                pieces = [np.asarray(rank[name]) for rank in kept]
                assert np.shape(one[name])[0] == LEAVES * stack
                joined = np.concatenate([piece.reshape(stack, -1, *piece.shape[1:]) for piece in pieces], axis=1)
                np.testing.assert_array_equal(joined.reshape(np.shape(one[name])), one[name])


def test_a_sum_that_four_do_not_divide_has_fewer_leaves():
    """Six experts, which only two ranks could keep whole."""
    with Checkpoint(tiny.checkpoint("sparse-ernie")) as checkpoint:
        description, _ = FamilyRegistry().describe(checkpoint)
    by_experts, by_features = (in_leaves(description, whole_experts=whole) for whole in (True, False))
    sparse = next(prefix for prefix, block in description.layers.items() if hasattr(block.feed_forward, "routing"))
    of = {name: one.layers[sparse].feed_forward for name, one in (("experts", by_experts), ("features", by_features))}
    assert (of["experts"].leaves, of["features"].leaves) == (2, 4)  # type: ignore[attr-defined]
    assert by_experts.layers[sparse].mixer.leaves == 4  # type: ignore[attr-defined]


# -- where it is refused -----------------------------------------------------------------------------------
def test_three_ranks_cannot_share_four_leaves_out():
    with pytest.raises(CapabilityError, match="--invariant with --tensor-parallel 3: sums have 4 leaves, which as many ranks"):
        engine("narrow", tensor_parallel=3, draft_tokens=2)


def test_kinds_that_do_not_say_how_are_named():
    with Checkpoint(tiny.checkpoint("narrow")) as checkpoint:
        description, _ = FamilyRegistry().describe(checkpoint)
    assert without_leaves(description) == ""
    (block, *_), kind = description.blocks, type("Recurrence", (SimpleNamespace,), {})
    strange = replace(description, blocks=(block, replace(block, mixer=kind())))
    assert without_leaves(strange) == "layers.1 has Recurrence, which does not say how its sum is taken by leaf"


def test_packed_weights_have_no_leaves_for_they_are_not_shared_out():
    assert not engine("narrow", draft_tokens=2, weights="int8").resolved.leaves
