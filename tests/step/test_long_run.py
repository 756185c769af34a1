"""A hundred thousand steps of arrivals, aborts and preemption on the null backend: no block leaks and no slot is lost.

The ledger is audited after every step.
"""

from __future__ import annotations

import numpy as np
import pytest

from polydraft import LLM, SamplingParams, null
from polydraft.sentinels import Phase
from tests.support.depth import deep
from tests.support.progress import Progress


@pytest.mark.parametrize("num_steps", [1_000, pytest.param(100_000, marks=pytest.mark.deep)])
@pytest.mark.parametrize("overlap", [deep(0), 2])
def test_no_block_leaks(num_steps: int, overlap: int) -> None:
    rng = np.random.default_rng(overlap)
    # Few blocks of few tokens: requests wait, share beginnings, run short of blocks and are preempted all the time.
    engine = LLM(
        plugin=null, draft_tokens=3, max_num_seqs=6, block_size=4, num_blocks=64, max_model_len=128, max_batched_tokens=1024,
        overlap=overlap,
    ).engine  # fmt: skip
    alive: list[str] = []
    ended = 0
    progress = Progress(f"no block leaks, overlap {overlap}", num_steps)
    for _ in range(num_steps):
        if len(alive) < 10 and rng.random() < 0.2:
            prompt = [1, 2, 3, 4, *rng.integers(1, 3, rng.integers(1, 30)).tolist()]
            alive.append(engine.add(prompt, SamplingParams(max_new_tokens=int(rng.integers(1, 90)), ignore_eos=True)))
        if alive and rng.random() < 0.02:
            engine.abort(alive[int(rng.integers(len(alive)))])
        engine.step()
        for output in engine.poll():
            alive.remove(output.id)
            ended += 1
        engine.ledger.audit()
        progress.tick()
    while engine.has_work:
        engine.step()
        ended += len(engine.poll())
    engine.ledger.audit()
    assert engine.ledger.num_free == 64
    assert (engine.slots.phase == Phase.IDLE).all()
    assert not engine.requests
    assert ended > num_steps / 40
    assert engine.scheduler.num_preemptions > num_steps / 1000
    assert engine.ledger.num_hits > num_steps / 10
