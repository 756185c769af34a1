"""Too few KV blocks for everybody: pausing, preemption and aborts change nothing but the time that a request takes.

Free blocks are filled with NaN after every step, so that reading one that is no longer owned ends a request with an error.
Random programs under pressure are in `test_lossless.py`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polydraft import Engine, RequestOutput, SamplingParams
from polydraft.errors import RequestError
from polydraft.sentinels import Phase
from tests.support.depth import among, crossed
from tests.support.poison import poison_free_blocks
from tests.support.runs import DEVICES, Ask, come_to_rest, drive, engine, essence, solo


def count_pauses(running: Engine) -> Counter[str]:
    """From now on count the sequences that the device paused."""
    counts: Counter[str] = Counter()
    collect = running.runner.collect

    def counting(flight: Any) -> Any:
        outcome = collect(flight)
        counts["paused"] += int((outcome.phase == Phase.PAUSED).sum())
        return outcome

    running.runner.collect = counting  # type: ignore[method-assign]
    return counts


def serve(
    model: str, device: str, num_drafts: int, asks: Sequence[Ask], **options: Any
) -> tuple[Engine, list[RequestOutput], Counter[str]]:
    running = engine(model, device=device, draft_tokens=num_drafts, **options)
    counts = count_pauses(running)
    outputs = drive(running, asks, each_step=poison_free_blocks)
    counts["preempted"] = running.scheduler.num_preemptions
    counts["shared"] = running.ledger.num_hits
    return running, outputs, counts


def check(model: str, num_drafts: int, asks: Sequence[Ask], outputs: Sequence[RequestOutput]) -> None:
    """As if each request were alone; what an abort left is the beginning of that."""
    for ask, output in zip(asks, outputs, strict=True):
        alone = solo(model, num_drafts, ask.prompt_ids, ask.params)
        if output.finish_reason == "abort":
            assert ask.abort is not None
            assert output.token_ids == alone.token_ids[: len(output.token_ids)]
            assert output.rounds == alone.rounds[: len(output.rounds)]
            assert len(output.token_ids) in {0, 1 + len(output.rounds) + output.accepted}
        else:
            assert essence(output) == essence(alone), ask


def equals(count: int, length: int, num_tokens: int) -> list[Ask]:
    """Requests of one size that arrive together, greedy and sampled."""
    kinds = (SamplingParams(), SamplingParams(temperature=0.9, seed=4))
    prompts = [tuple((11 * i + 5 * j) % 64 for j in range(length)) for i in range(count)]
    return [Ask(p, replace(kinds[i % 2], max_new_tokens=num_tokens, ignore_eos=True)) for i, p in enumerate(prompts)]


@pytest.mark.parametrize(("device", "num_drafts"), crossed(6, DEVICES, [0, 1, 3, 5]))
def test_requests_that_grow_together_are_preempted_and_resumed(device: str, num_drafts: int) -> None:
    asks = equals(4, 6, 30)
    _, outputs, counts = serve(
        "narrow", device, num_drafts, asks, max_num_seqs=4, block_size=2, num_blocks=40, prefix_cache=False
    )
    assert counts["preempted"] > 0
    check("narrow", num_drafts, asks, outputs)


def test_a_preemption_takes_no_step_of_its_own() -> None:
    """When the last request that could run is preempted, the same step plans again with what that freed.

    It once returned False, "nothing to do", and whoever loops `while engine.step()` left requests behind."""
    running = engine("narrow", draft_tokens=0, max_num_seqs=4, block_size=2, num_blocks=40, prefix_cache=False)
    for ask in equals(4, 6, 30):
        running.add(ask.prompt_ids, ask.params)
    while running.step():
        pass
    assert running.scheduler.num_preemptions > 0
    assert not running.has_work
    assert len(running.poll()) == 4


def test_a_preempted_request_finds_its_custom_blocks_again() -> None:
    asks = equals(3, 12, 30)
    _, outputs, counts = serve("narrow", "lazy-1", 2, asks, max_num_seqs=3, block_size=2, num_blocks=44)
    assert counts["preempted"] > 0
    assert counts["shared"] > 0
    check("narrow", 2, asks, outputs)


@pytest.mark.parametrize("device", ["lazy-1", "lazy-2"])
def test_the_device_pauses_what_the_host_could_not_foresee(device: str) -> None:
    """With steps in flight the host counts on the fewest tokens; a slot that ran ahead waits on the device."""
    asks = equals(5, 4, 40)
    running, outputs, counts = serve("shared", device, 3, asks, max_num_seqs=5, block_size=1, num_blocks=120)
    assert 0 < running.totals.paused <= counts["paused"]  # rounds of requests that ended meanwhile are nobody's
    check("shared", 3, asks, outputs)


@pytest.mark.parametrize("device", DEVICES)
def test_the_pool_that_holds_exactly_one_request_serves_all_one_by_one(device: str) -> None:
    asks = equals(4, 9, 21)
    running, outputs, _ = serve("deep", device, 4, asks, max_num_seqs=4, block_size=3, num_blocks=10)
    check("deep", 4, asks, outputs)
    with pytest.raises(RequestError, match="KV blocks"):
        running.add((1,) * 10, SamplingParams(max_new_tokens=21))


@pytest.mark.parametrize(("device", "num_drafts"), among([("lazy-2", 2)], itertools.product(DEVICES, [0, 2])))
def test_an_abort_at_every_moment(device: str, num_drafts: int) -> None:
    """One engine, one neighbour that runs on, and a request aborted before its 0th, 1st, 2nd ... step."""
    model, long, short = "mirrored", *equals(2, 7, 20)
    rows = 2 * num_drafts + 4
    running = engine(model, device=device, draft_tokens=num_drafts, max_num_seqs=2, block_size=2, max_batched_tokens=rows)
    neighbour = replace(long, params=SamplingParams(max_new_tokens=40, ignore_eos=True))
    for moment in range(0, 18, 2):
        asks = [neighbour, replace(short, arrival=1, abort=1 + moment)]
        outputs = drive(running, asks, each_step=poison_free_blocks)
        assert outputs[0].finish_reason == "length"
        check(model, num_drafts, asks, outputs)


@pytest.mark.parametrize("device", DEVICES)
def test_aborting_everything_at_any_moment_leaves_nothing(device: str) -> None:
    rng = np.random.default_rng(3)
    running = engine("narrow", device=device, draft_tokens=2, max_num_seqs=3, block_size=2, num_blocks=45)
    for moment in range(0, 30, 5):
        names = [running.add(ask.prompt_ids, ask.params) for ask in equals(5, 8, 30)]
        for _ in range(moment):
            running.step()
            running.ledger.audit()
        rng.shuffle(names)
        for name in names:
            if name in running.requests:
                running.abort(name)
                running.abort(name)  # a second time changes nothing
        assert {output.id for output in running.poll()} == set(names)
        come_to_rest(running)
