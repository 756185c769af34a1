"""What the host of rank 0 brings into a step, lookups and masks of grammars, reaches every rank with the step: texts and rounds
are those of one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polydraft import LLM, Engine, SamplingParams
from polydraft.config import EngineConfig
from polydraft.conformance.host_checks import OtherRemainder
from polydraft.errors import CapabilityError
from polydraft.program.host_inputs import FeatureFactory, HostInputs, HostView
from tests.step.test_constraints import params, prompt_of
from tests.support import tiny
from tests.support.cpu import needs_kernels
from tests.support.depth import among
from tests.support.letters import checkpoint
from tests.support.of_ranks import served, split
from tests.support.runs import LAZY, Ask, drive, essence

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ahead": {"device": "lazy-2"},
    "graphs": {"device": "lazy-1", "graph": "decode"},
    "cpu": {"backend": "cpu"},
}
PROPOSERS = [
    (proposer, model, ranks, way)
    for proposer in ("suffix", "hybrid")
    for model, ranks in (("narrow", 2), ("narrow", 4), ("sparse-glm", 2))
    for way in WAYS
]


@needs_kernels
@pytest.mark.parametrize(("proposer", "model", "ranks", "way"), among([("hybrid", "narrow", 2, "ahead")], PROPOSERS))
def test_lookups(proposer: str, model: str, ranks: int, way: str):
    options: dict[str, Any] = {"proposer": proposer, "draft_tokens": 3, **WAYS[way]}
    with split(model, ranks, **options) as running, split(model, 1, **options) as alone:
        outputs = served(running, model)
        assert [dict(essence(one)) for one in outputs] == [dict(essence(one)) for one in served(alone, model)]
        assert sum(sum(one.rounds) for one in outputs) > 5, "drafts are accepted"


def constrained(way: str, **options: Any) -> Engine:
    """An engine on the model of single characters."""
    ways: dict[str, dict[str, Any]] = {
        "plain": {"backend": "reference"},
        "ahead": {**LAZY, "overlap": 2},
        "graphs": {**LAZY, "overlap": 1, "graph": "decode"},
        "cpu": {"backend": "cpu", "device": "cpu?threads=1"},
    }
    given = {**ways[way], "model": checkpoint(), "invariant": way != "cpu", "constraints": True, "max_num_seqs": 4, **options}
    return LLM(**given).engine


@needs_kernels
@pytest.mark.parametrize(("way", "ranks"), among([], [(way, ranks) for way in WAYS for ranks in (2, 4)]))
def test_grammars(way: str, ranks: int):
    """Beside a request without one, and steps that have no other. With `--invariant` texts are those of one device to the bit."""
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    names = ("regex", "sampled schema")
    asks = [Ask(prompt_of(name), params(name), arrival=4 * i) for i, name in enumerate(names)]
    asks.append(Ask((3, 4), SamplingParams(max_new_tokens=50, ignore_eos=True)))
    found = []
    for size in (ranks, 1):
        running = constrained(way, draft_tokens=3, tensor_parallel=size)
        found.append([dict(essence(one)) for one in drive(running, asks)])
        running.close()
    assert found[0] == found[1]
    assert [one["finish_reason"] for one in found[0]] == ["stop", "stop", "length"]


class Early(OtherRemainder):
    """Fills before a launch, as one does that needs exact lengths."""

    needs = "exact_lengths"


def built(feature: FeatureFactory, **options: Any) -> Engine:
    config = EngineConfig(model=str(tiny.checkpoint("narrow")), backend="reference", draft_tokens=0, **options)
    return Engine(config, features=[feature])


@pytest.mark.parametrize("middle", [False, True])
def test_what_was_filled_arrives(middle: bool, monkeypatch: pytest.MonkeyPatch):
    """In pinned arrays of another engine, of the same step."""
    feature: Any = OtherRemainder if middle else Early
    one, other = (built(feature, device="queued" if middle else "", graph="off") for _ in range(2))
    sets = [inputs._middle[False] + inputs._first for inputs in (one.runner.inputs, other.runner.inputs)]
    fill, counts = HostInputs.fill, list[int]()

    def filling(self: HostInputs, view: HostView, *, middle: bool) -> None:
        fill(self, view, middle=middle)
        rows, arrays = self.filled(view.plan, middle=middle)
        filled, step_id = memoryview(rows + b"".join(arrays)), view.plan.step_id
        other.runner.inputs.take(filled, step_id, bound=view.plan.bound, middle=middle)
        ((mine,), (its,)) = sets
        counts.append(its.rows)
        for name, staging in mine.sets[step_id % len(mine.sets)].items():
            got = its.sets[step_id % len(its.sets)][name].array
            np.testing.assert_array_equal(got[: mine.rows], staging.array[: mine.rows])

    monkeypatch.setattr(HostInputs, "fill", filling)
    drive(one, [Ask((1, 2, 3)), Ask((4, 5))])
    assert set(counts) == {one.resolved.limits.max_seqs}
    one.close()
    other.close()


def test_what_reaches_rank_0_alone_is_refused():
    with pytest.raises(CapabilityError, match="another remainder with --tensor-parallel 2: what is given to an engine as"):
        built(OtherRemainder, tensor_parallel=2)
