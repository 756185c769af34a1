"""Chunked prefill: whatever the chunks, the draft's row at a border embeds the true next prompt token.

A border that looked at anything else would show in the MTP cache at once and in the rounds that follow, never in the text.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from polydraft import Engine, SamplingParams
from polydraft.reference import state_kernels
from polydraft.reference.queued import QueuedDevice
from polydraft.sentinels import NO_TOKEN, PAD_SLOT, Phase
from tests.support.depth import among
from tests.support.runs import DEVICES, Ask, drive, engine, essence, solo

PROMPT = tuple((17 * i * i + 5 * i + 3) % 64 for i in range(25))
LENGTHS = (1, 2, 9, 16, 25)


def asks(length: int) -> list[Ask]:
    kinds = (SamplingParams(max_new_tokens=8), SamplingParams(max_new_tokens=8, temperature=1.0, seed=length))
    return [Ask(PROMPT[-length:], kind) for kind in kinds]


def in_chunks(running: Engine, largest: int) -> Engine:
    """Let no chunk be longer than `largest`, below what a step has room for."""
    take = running.scheduler._take_chunk

    def small(slot: int, budget: int, chunks: list[tuple[int, int]]) -> int:
        return take(slot, min(budget, largest), chunks)

    running.scheduler._take_chunk = small  # type: ignore[method-assign]
    return running


@pytest.mark.parametrize(
    ("drafting", "device"),
    among(
        [(("shared", 2), "lazy-2")],
        itertools.product([("narrow", 1), ("shared", 2), ("narrow", 3), ("deep", 5)], DEVICES),
    ),
    ids=str,
)
def test_rounds_do_not_depend_on_the_chunks(drafting: tuple[str, int], device: str) -> None:
    model, num_drafts = drafting
    for largest in (1, 2, 5, 8):
        running = in_chunks(engine(model, device=device, draft_tokens=num_drafts, max_num_seqs=4, block_size=4), largest)
        many = [ask for length in LENGTHS for ask in asks(length)]
        alone = [essence(solo(model, num_drafts, ask.prompt_ids, ask.params)) for ask in many]
        assert [essence(output) for output in drive(running, many)] == alone, largest


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_the_smallest_steps_that_are_allowed(num_drafts: int, slots: int) -> None:
    """As many rows as all windows together: chunks of one token at K = 0, and of what running windows leave otherwise."""
    running = engine("narrow", draft_tokens=num_drafts, max_num_seqs=slots, max_batched_tokens=slots * (num_drafts + 1))
    longest: list[int] = []
    launch = running.runner.launch

    def recording(plan: Any) -> Any:
        longest.extend(plan.rows[~plan.decode].tolist())
        return launch(plan)

    running.runner.launch = recording  # type: ignore[method-assign]
    many = [ask for length in LENGTHS for ask in asks(length)]
    outputs = drive(running, many)
    assert [essence(o) for o in outputs] == [essence(solo("narrow", num_drafts, a.prompt_ids, a.params)) for a in many]
    assert max(longest) <= slots * (num_drafts + 1)
    assert min(longest) == 1


def draft_cache(running: Engine, prompt: tuple[int, ...]) -> Any:
    """Keys and values of the MTP rows of a prompt, once its first token is known: [2, heads, length, dim]."""
    running.add(prompt, SamplingParams(max_new_tokens=8, ignore_eos=True))
    while running.slots.phase[0] != Phase.DECODE or running.slots.in_flight[0]:
        running.step()
    if isinstance(running.device, QueuedDevice):
        running.device.synchronize()
    positions = np.arange(len(prompt))
    size = running.ledger.block_size
    rows = running.ledger.table[0, positions // size] * size + positions % size
    return running.runner.memory.caches["mtp.0"].kv[:, :, rows]  # type: ignore[attr-defined]


def finish(running: Engine) -> None:
    while running.has_work:
        running.step()
    running.poll()


@pytest.mark.parametrize("device", ["reference", "lazy-0"])
@pytest.mark.parametrize("model", ["narrow", "mirrored", "shared"])
def test_mtp_rows_are_the_same_bits_whatever_the_chunks(model: str, device: str) -> None:
    whole = draft_cache(engine(model, device=device, draft_tokens=2), PROMPT)
    assert np.isfinite(whole).all()
    for largest in (1, 2, 5, 7, 24):
        chunked = draft_cache(in_chunks(engine(model, device=device, draft_tokens=2, block_size=3), largest), PROMPT)
        assert np.array_equal(whole, chunked), largest


@pytest.mark.parametrize("block_size", [4, 8])
def test_a_shared_block_ends_where_the_next_token_differs(block_size: int) -> None:
    """The MTP row at the end of a block embeds the token behind it: texts that part there share the blocks before it alone."""
    running = engine("narrow", draft_tokens=2, max_num_seqs=1, block_size=block_size)
    parting = (*PROMPT[:16], 63 - PROMPT[16], *PROMPT[17:])
    for prompt, shared in ((PROMPT, 0), (parting, 16 - block_size), (PROMPT, 24), (parting, 24)):
        alone = draft_cache(engine("narrow", draft_tokens=2, prefix_cache=False), prompt)
        before = running.ledger.num_hits
        assert np.array_equal(draft_cache(running, prompt), alone)
        assert running.ledger.num_hits - before == shared
        finish(running)


def test_a_conversation_that_goes_on_shares_only_rows_that_the_draft_has_seen() -> None:
    """Nobody drafts behind the last window of a request that ends, so the MTP rows of that window do not exist."""
    running = engine("narrow", draft_tokens=3, max_num_seqs=1, block_size=2)
    apart = engine("narrow", draft_tokens=3, max_num_seqs=1, prefix_cache=False)
    for num_tokens in range(2, 14):
        (first,) = drive(running, [Ask(PROMPT[num_tokens : num_tokens + 5], SamplingParams(max_new_tokens=num_tokens))])
        longer = (*first.prompt_ids, *first.token_ids, 1, 2, 3)
        before = running.ledger.num_hits
        alone = draft_cache(apart, longer)
        finish(apart)
        assert np.array_equal(draft_cache(running, longer), alone), num_tokens
        assert running.ledger.num_hits > before
        finish(running)


def test_a_border_that_sees_no_further_than_its_chunk_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that this file is about: the row at a border drops out, since the token behind it counts as unknown."""
    pack = state_kernels.KERNELS["pack_draft_rows"]

    def blind(a: Any, limits: Any) -> Any:
        run = pack(a, limits)

        def shortened(n: int) -> None:
            run(n)
            for row in np.flatnonzero((a.draft_row_slot[:n] >= 0) & (a.phase[a.row_slot[:n]] == Phase.PREFILL)):
                if row + 1 == n or a.row_slot[row + 1] != a.row_slot[row]:
                    a.draft_ids[row], a.draft_row_slot[row] = NO_TOKEN, PAD_SLOT

        return shortened

    whole = draft_cache(engine("narrow", draft_tokens=2), PROMPT)
    monkeypatch.setitem(state_kernels.KERNELS, "pack_draft_rows", blind)
    assert np.array_equal(whole, draft_cache(engine("narrow", draft_tokens=2), PROMPT))
    chunked = draft_cache(in_chunks(engine("narrow", draft_tokens=2), 7), PROMPT)
    assert np.isnan(chunked[:, :, [6, 13, 20]]).all()
    assert not np.array_equal(whole, chunked)
