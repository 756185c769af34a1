"""Who runs: first come, first served, within the budgets; and what every plan says is what the device has."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polydraft.contracts.kernels.scatter import Run
from polydraft.host.request import Status
from polydraft.host.scheduler import PREALLOCATED_STEPS, Admits
from polydraft.host.slots import SlotTable
from polydraft.program.columns import HISTORY, max_staged_tokens
from polydraft.sampling_params import SamplingParams
from polydraft.sentinels import NO_TOKEN, Phase
from tests.support.host_loop import COLUMNS, HostLoop, limits, request, text
from tests.support.slot_columns import SlotColumns


def complete(loop: HostLoop, requests: list[Any]) -> None:
    """Run to the end; every request has its whole text, whatever happened on the way."""
    loop.run()
    for one in requests:
        assert one.status is Status.FINISHED
        assert one.token_ids == [text(one.number, p) for p in range(len(one.prompt_ids), one.max_total)]
        assert sum(accepted + 1 for accepted in one.rounds) == len(one.token_ids) - 1
        assert one.drafted >= sum(one.rounds)
    assert (loop.slots.phase == Phase.IDLE).all()
    assert loop.ledger.num_free == loop.limits.num_blocks


def running(loop: HostLoop) -> set[int]:
    return {one.number for one in loop.slots.request if one is not None and one.status is Status.RUNNING}


# -- first come, first served ------------------------------------------------------------------------
def test_requests_are_admitted_in_order_of_arrival():
    loop = HostLoop(limits())
    requests = [request(n, prompt=3 + n % 4) for n in range(7)]
    loop.add(*requests)
    complete(loop, requests)
    assert loop.admitted == list(range(7))


def test_waiting_request_is_not_overtaken_by_a_smaller_one():
    loop = HostLoop(limits(num_blocks=10, max_len=40))
    first, large, small = request(0, prompt=4, new=12), request(1, prompt=30, new=4), request(2, prompt=2, new=2)
    loop.add(first, large, small)
    loop.launch()
    assert running(loop) == {0}
    assert loop.ledger.num_free >= 2, "the small one would have fitted"
    complete(loop, [first, large, small])
    assert loop.admitted == [0, 1, 2]


def test_the_tokens_of_a_request_that_waits_for_blocks_are_laid_out_once():
    loop = HostLoop(limits(num_blocks=10, max_len=40))
    first, large = request(0, prompt=4, new=12), request(1, prompt=30, new=4)
    loop.add(first, large)
    seen = []
    for _ in range(3):
        loop.launch()
        seen.append(loop.scheduler._tokens_of(large))
    assert running(loop) == {0}
    assert len({id(tokens) for tokens in seen}) == 1
    assert seen[0].tolist() == list(large.prompt_ids)
    loop.collect()
    complete(loop, [first, large])
    assert len(loop.scheduler._tokens_of(large)) == large.num_known > 30


def test_decoding_comes_before_prefill_and_chunks_take_what_is_left():
    loop = HostLoop(limits(max_rows=10))
    decoding, prefilling, waiting = request(0, prompt=4), request(1, prompt=20), request(2, prompt=9)
    loop.add(decoding, prefilling, waiting)
    plans = [loop.launch(), loop.launch(), loop.launch()]
    rows = [dict(zip(p.slots.tolist(), p.rows.tolist(), strict=True)) for p in plans if p]
    assert rows == [{0: 4, 1: 6}, {0: 3, 1: 7}, {0: 3, 1: 7}]
    loop.collect()
    complete(loop, [decoding, prefilling, waiting])


def test_older_prefill_is_served_before_a_younger_one():
    loop = HostLoop(limits(max_rows=9))
    requests = [request(0, prompt=12), request(1, prompt=12), request(2, prompt=2)]
    loop.add(*requests)
    first, second = loop.launch(), loop.launch()
    assert first is not None
    assert (first.slots.tolist(), first.rows.tolist()) == ([0], [9])
    assert second is not None
    assert (second.slots.tolist(), second.rows.tolist()) == ([0, 1], [3, 6])
    loop.collect()
    complete(loop, requests)


def test_younger_request_is_not_admitted_into_blocks_that_an_older_one_lacks():
    """With blocks of one token, two requests hold 15 each; 2 of 32 are free when the older one asks for 3 more."""
    loop = HostLoop(limits(num_blocks=32, block_size=1, num_drafts=3))
    loop.device.accept = lambda number, drafted: {0: 2, 1: 0}[number]  # type: ignore[method-assign]
    old, young, small = request(0, prompt=5, new=20), request(1, prompt=5, new=20), request(2, prompt=1, new=1)
    loop.add(old, young)
    loop.step()
    loop.step()
    assert (loop.slots.kv_len[:2].tolist(), loop.ledger.num_free) == ([8, 6], 2)
    loop.add(small)
    plan = loop.launch()
    assert plan is not None
    assert plan.slots.tolist() == [0, 1], "both have the blocks of their next window"
    assert small.status is Status.WAITING, "a younger request took blocks that an older one lacks"
    del loop.device.accept
    loop.collect()
    complete(loop, [old, young, small])


# -- running out of blocks -----------------------------------------------------------------------------
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_youngest_is_preempted_keeps_its_tokens_and_comes_back_first(depth: int):
    loop = HostLoop(limits(num_blocks=11), depth=depth)
    requests = [request(n, prompt=6, new=20) for n in range(4)]
    loop.add(*requests)
    victims = []
    for _ in range(300):
        before = {one.number: one.num_preemptions for one in requests}
        alive = running(loop)
        more = loop.step()
        for one in requests:
            if one.num_preemptions > before[one.number]:
                victims.append(one.number)
                assert one.number == max(alive), "somebody else than the youngest was preempted"
        waiting = [one.number for one in loop.scheduler.waiting]
        assert waiting == sorted(waiting), "the queue is out of order"
        if not more and not loop.scheduler.waiting:
            break
    assert victims
    assert loop.scheduler.num_preemptions == len(victims)
    assert 0 not in victims
    complete(loop, requests)


def test_preempted_request_prefills_all_it_knows_but_the_last_token():
    loop = HostLoop(limits(num_blocks=8, max_seqs=2))
    requests = [request(0, prompt=6, new=20), request(1, prompt=6, new=12)]
    loop.add(*requests)
    while not loop.scheduler.num_preemptions:
        loop.step()
    while requests[1].status is Status.RUNNING:
        loop.step()
    kept = list(requests[1].token_ids)
    assert 0 < len(kept) < 12
    while requests[1].status is Status.WAITING:
        loop.step()
    slot = requests[1].slot
    assert loop.slots.prefill_len[slot] == 6 + len(kept) - 1
    complete(loop, requests)
    assert requests[1].token_ids[: len(kept)] == kept


def test_one_request_may_use_every_block():
    loop = HostLoop(limits(num_blocks=7, max_len=28))
    only = request(0, prompt=9, new=19)
    loop.add(only)
    complete(loop, [only])
    assert loop.scheduler.num_preemptions == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_comes_in_while_a_preempted_request_drains(depth: int):
    loop = HostLoop(limits(num_blocks=11), depth=depth)
    requests = [request(n, prompt=6, new=20) for n in range(2)]
    loop.add(*requests)
    while not loop.scheduler.num_preemptions:
        loop.step()
    small = request(2, prompt=1, new=1)
    loop.add(small)
    victim = requests[1]
    while victim.status is Status.RUNNING and loop.slots.draining[victim.slot] and loop.slots.in_flight[victim.slot]:
        loop.step()
        assert small.status is Status.WAITING
        assert loop.scheduler.num_preemptions == 1, "one victim at a time"
    complete(loop, [*requests, small])
    assert loop.admitted.index(2) > loop.admitted.index(1)


@pytest.mark.parametrize("depth", [1, 2])
def test_request_that_ended_does_not_hold_up_the_next_while_it_drains(depth: int):
    """Its end has been applied, but younger steps still hold the slot: another slot is free, so the next request comes in."""
    loop = HostLoop(limits(), depth=depth)
    loop.device.accept = lambda number, drafted: drafted  # type: ignore[method-assign]
    short, long, waiting = request(0, prompt=2, new=4), request(1, prompt=2, new=24), request(2)
    loop.add(short, long)
    while short.status is not Status.FINISHED:
        loop.step()
    assert loop.slots.in_flight[0], "nothing is left to drain"
    loop.add(waiting)
    loop.launch()
    assert waiting.status is Status.RUNNING
    complete(loop, [short, long, waiting])


def test_prefilling_request_can_be_the_youngest():
    loop = HostLoop(limits(num_blocks=12, max_rows=7, max_len=40))
    old, young = request(0, prompt=4, new=36), request(1, prompt=22, new=4)
    loop.device.accept = lambda number, drafted: drafted  # type: ignore[method-assign]
    loop.add(old)
    while loop.ledger.num_granted[0] < 5:
        loop.step()
    loop.add(young)
    phases: list[int] = []
    while not loop.scheduler.num_preemptions:
        phases.append(int(loop.slots.phase[1]))
        loop.step()
    assert phases[-1] == Phase.PREFILL
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    complete(loop, [old, young])


def test_slot_of_a_younger_request_that_has_ended_is_no_victim():
    loop = HostLoop(limits(num_blocks=12))
    old, young, ended = request(0, prompt=4, new=24), request(1, prompt=4, new=24), request(2, prompt=2, new=2)
    loop.add(old, young, ended)
    while ended.status is not Status.FINISHED:
        loop.step()
    assert loop.scheduler.num_preemptions == 0
    complete(loop, [old, young, ended])
    assert young.num_preemptions > old.num_preemptions == 0


def test_everybody_can_be_preempted_and_comes_back_in_order():
    loop = HostLoop(limits(), depth=1)
    requests = [request(n, prompt=4, new=12) for n in range(3)]
    loop.add(*requests)
    for _ in range(3):
        loop.step()
    loop.scheduler.preempt_all()
    assert [one.num_preemptions for one in requests] == [1, 1, 1]
    assert loop.scheduler.num_preemptions == 3
    complete(loop, requests)
    assert loop.admitted == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("admits", ["none", "begun"])
def test_a_scheduler_that_admits_nobody_new_brings_the_others_to_their_end(admits: Admits):
    loop = HostLoop(limits())
    first, second = request(0), request(1)
    loop.add(first)
    loop.step()
    loop.add(second)
    loop.scheduler.admits = admits
    for _ in range(20):
        loop.step()
    assert (first.status, second.status) == (Status.FINISHED, Status.WAITING)
    loop.scheduler.admits = "all"
    complete(loop, [first, second])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_blocks_reach_as_far_as_steps_in_flight_may_write_and_no_further(depth: int):
    loop = HostLoop(limits(block_size=1, num_blocks=120, num_drafts=3), depth=depth)
    loop.device.accept = lambda number, drafted: drafted  # type: ignore[method-assign]
    loop.add(*[request(n, prompt=3, new=30) for n in range(3)])
    t, k = loop.slots, loop.limits
    while loop.scheduler.waiting or loop.in_flight or (t.phase != Phase.IDLE).any():
        loop.step()
        decode = np.flatnonzero((t.phase == Phase.DECODE) & (t.in_flight_decode > 0) & ~t.draining)
        ahead = (PREALLOCATED_STEPS + t.in_flight_decode[decode]) * k.window + 2 * k.num_drafts
        most = np.minimum(np.maximum(t.kv_len[decode], t.prefill_len[decode]) + ahead, t.max_total[decode])
        assert (loop.ledger.num_granted[decode] <= most).all()
    assert loop.device.num_pauses == 0, "a slot was paused although there were blocks for everybody"
    complete(loop, [])


@pytest.mark.parametrize(("num_blocks", "waits", "company"), [(400, False, True), (400, True, False), (80, False, False)])
def test_who_lacks_a_block_brings_some_to_all_while_they_are_plenty(num_blocks: int, waits: bool, company: bool):
    """Blocks of one token, and one to three tokens a round, so that somebody lacks blocks in every round."""
    loop = HostLoop(limits(block_size=1, num_blocks=num_blocks, num_drafts=3, max_len=120), depth=1)
    loop.device.accept = min  # type: ignore[method-assign, assignment]
    loop.add(*[request(n, prompt=3, new=100) for n in range(3)])
    loop.step()
    loop.step()
    if waits:
        loop.scheduler.admits = "none"
        loop.add(request(3))
    granted = []
    for _ in range(2 * PREALLOCATED_STEPS):
        loop.step()
        writes = loop.plans[-1].writes
        assert not writes.admits
        granted.append(len({*writes.runs[:, Run.SLOT].tolist()}))
    if company:
        assert {*granted} == {0, 3}, "nobody or all"
        assert sum(count > 0 for count in granted) <= 3
        assert loop.device.num_pauses == 0
    else:
        assert sum(count > 0 for count in granted) > PREALLOCATED_STEPS, "each round what it needs"


def test_host_that_knows_everything_leaves_out_what_the_device_would_pause():
    loop = HostLoop(limits(num_blocks=34, block_size=1, num_drafts=3))
    requests = [request(n, prompt=6, new=20) for n in range(4)]
    loop.add(*requests)
    complete(loop, requests)
    assert loop.scheduler.num_preemptions > 0
    assert loop.device.num_pauses == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_no_window_is_launched_behind_a_certain_end(depth: int):
    loop = HostLoop(limits(num_drafts=0), depth=depth)
    loop.add(request(0, prompt=3, new=6))
    complete(loop, [])
    assert len(loop.plans) == 6


# -- order and repetition --------------------------------------------------------------------------------
def test_launch_order_of_slots():
    loop = HostLoop(limits(max_rows=10), row_order="slot")
    loop.add(request(0, prompt=4), request(1, prompt=20), request(2, prompt=4))
    complete(loop, [])
    assert all((np.diff(plan.slots) > 0).all() for plan in loop.plans)


def test_launch_order_with_prefill_first():
    loop = HostLoop(limits(max_rows=10), row_order="prefill_first")
    loop.add(request(0, prompt=4), request(1, prompt=20), request(2, prompt=4))
    complete(loop, [])
    mixed = [plan for plan in loop.plans if plan.has_prefill and plan.decode.any()]
    assert mixed
    assert all((np.diff(plan.decode.astype(int)) >= 0).all() for plan in loop.plans)


def test_seeded_launch_order_differs_and_repeats():
    orders = []
    for _ in range(2):
        loop = HostLoop(limits(), row_order="seeded")
        loop.add(*[request(n, new=20) for n in range(3)])
        complete(loop, [])
        orders.append([plan.slots.tolist() for plan in loop.plans])
    assert orders[0] == orders[1]
    assert any(order != sorted(order) for order in orders[0])


def test_order_changes_nothing_but_the_order():
    texts = []
    for order in ("slot", "prefill_first", "seeded"):
        loop = HostLoop(limits(num_blocks=12), row_order=order, depth=1)
        requests = [request(n, prompt=4 + 3 * n, new=14) for n in range(4)]
        loop.add(*requests)
        complete(loop, requests)
        texts.append([one.token_ids for one in requests])
    assert texts[0] == texts[1] == texts[2]


def test_steady_state_repeats_the_very_same_arrays():
    loop = HostLoop(limits(block_size=40, num_blocks=3))
    loop.add(*[request(n, prompt=2, new=30) for n in range(3)])
    loop.step()
    first, second = loop.launch(), loop.launch()
    assert first is not None
    assert second is not None
    for name in ("slots", "rows", "epochs", "decode", "emits"):
        assert getattr(first, name) is getattr(second, name), name
    assert not second.writes
    assert len(second.writes.payload) == 0
    assert second.step_id == first.step_id + 1
    before = {name: getattr(first, name).copy() for name in ("slots", "rows", "epochs", "decode", "emits")}
    complete(loop, [])
    assert all(np.array_equal(before[name], getattr(first, name)) for name in before), "a plan was rewritten"


def test_plans_are_frozen():
    loop = HostLoop(limits())
    loop.add(request(0))
    plan = loop.launch()
    assert plan is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.num_rows = 3  # type: ignore[misc]


# -- staged writes -----------------------------------------------------------------------------------------
def test_every_known_token_is_staged_once_for_each_admission():
    loop = HostLoop(limits(num_blocks=13, max_rows=9), depth=1)
    requests = [request(n, prompt=14, new=20) for n in range(3)]
    loop.add(*requests)
    staged: dict[tuple[int, int], tuple[int, int]] = {}
    for _ in range(300):
        more = loop.step()
        staged |= {(slot.number, slot.epoch): (slot.uploads, len(slot.tokens)) for slot in loop.device.slots if slot.number >= 0}
        if not more and not loop.scheduler.waiting:
            break
    complete(loop, requests)
    assert len(staged) == len(loop.admitted) > 3
    assert all(uploads == tokens for uploads, tokens in staged.values()), "a token was staged twice"


def test_requests_that_begin_alike_share_rows_and_others_do_not():
    for second, hits in ((3, 12), (1, 0)):  # request 3 has the text of request 0
        loop = HostLoop(limits())
        requests = [request(0, prompt=9, new=8), request(second, prompt=13, new=3)]
        loop.add(requests[0])
        complete(loop, requests[:1])
        loop.add(requests[1])
        complete(loop, requests)
        assert loop.ledger.num_hits == hits
    apart = HostLoop(limits(), shares=False)
    apart.add(request(0, prompt=9), request(3, prompt=9))
    complete(apart, [])
    assert apart.ledger.num_hits == 0


def test_no_more_text_is_staged_in_a_step_than_there_is_room_for():
    """Shared rows cost nothing, so several long texts could come in at once; each brings all of its tokens."""
    loop = HostLoop(limits(num_blocks=80, max_len=40, max_rows=24))
    first = request(0, prompt=37, new=2)
    loop.add(first)
    complete(loop, [first])
    twins = [request(n, prompt=37, new=2) for n in (3, 6, 9)]
    loop.add(*twins)
    complete(loop, twins)
    most, history = max_staged_tokens(loop.limits), [column.name for column in COLUMNS].index(HISTORY)
    runs = [plan.writes.runs for plan in loop.plans if plan.writes.admits]
    assert [int(some[some[:, Run.COLUMN] == history, Run.COUNT].sum()) for some in runs] == [37, 37, 37, 37]
    assert 37 < most < 2 * 37


def test_an_admission_carries_what_was_asked_for():
    loop = HostLoop(limits())
    asked = request(0, prompt=4, new=5, temperature=0.5)
    params = SamplingParams(max_new_tokens=5, temperature=0.5, top_p=0.25, min_p=0.125, top_k=7)
    asked = dataclasses.replace(asked, params=params, seed=(2**32 - 1, 5), stop_token_ids=(9,))
    loop.add(asked)
    plan = loop.launch()
    assert plan is not None
    held = SlotColumns(COLUMNS, loop.limits)
    held.write(plan.writes)
    wanted = {
        "phase": Phase.PREFILL, "prompt_len": 4, "num_generated": 0, "kv_len": 0, "prefill_len": 4, "max_total": 9, "epoch": 1,
        "top_k": 7, "seed": [-1, 5], "temperature": 0.5, "top_p": 0.25, "min_p": 0.125, "stop_tokens": [9, NO_TOKEN],
    }  # fmt: skip
    assert {name: held[name][0] for name in wanted} == wanted
    assert held["tokens"][0][:4] == [text(0, place) for place in range(4)]
    assert {slot for _, slot, *_ in plan.writes.runs.tolist()} == {0}


def test_slot_columns_hold_every_text_and_every_table_throughout():
    """What plans stage, and nothing else, gives each slot the blocks that the ledger has for it, shared and granted ones, and the
    text that its request had when it came."""
    loop = HostLoop(limits(num_blocks=13, max_rows=9), depth=1)
    requests = [request(n, prompt=14, new=20) for n in range(4)]
    loop.add(*requests)
    held, seen = SlotColumns(COLUMNS, loop.limits), 0
    for _ in range(300):
        more = loop.step()
        for plan in loop.plans[seen:]:
            held.write(plan.writes)
        seen = len(loop.plans)
        for slot, one in enumerate(loop.slots.request):
            if one is not None:
                assert held["block_table"][slot] == loop.ledger.table[slot].tolist()
                known = held["prompt_len"][slot] + held["num_generated"][slot]
                assert held["tokens"][slot][:known] == loop.slots.tokens[slot, :known].tolist()
        if not more and not loop.scheduler.waiting:
            break
    complete(loop, requests)
    assert loop.scheduler.num_preemptions


def test_sampling_is_said_of_the_step():
    loop = HostLoop(limits())
    loop.add(request(0, new=2), request(1, new=9, temperature=0.5))
    complete(loop, [])
    assert [plan.sampling for plan in loop.plans] == [True] * len(loop.plans)
    greedy = HostLoop(limits())
    greedy.add(request(0), request(1))
    complete(greedy, [])
    assert not any(plan.sampling for plan in greedy.plans)


def test_nothing_to_do_is_no_plan():
    loop = HostLoop(limits())
    assert loop.launch() is None
    assert not loop.step()


# -- slots -------------------------------------------------------------------------------------------------
def test_slot_of_steps_in_flight_cannot_be_vacated():
    table = SlotTable(limits())
    table.in_flight[1] = 1
    with pytest.raises(AssertionError, match="while a step that holds it is in flight"):
        table.vacate(1)


def test_epoch_tells_a_late_snapshot_from_the_next_request():
    loop = HostLoop(limits(max_seqs=1), depth=2)
    first, second = request(0, prompt=2, new=4), request(1, prompt=2, new=6)
    loop.add(first, second)
    complete(loop, [first, second])
    epochs = {int(epoch) for plan in loop.plans for epoch in plan.epochs}
    assert epochs == {1, 2}


# -- anything at all -----------------------------------------------------------------------------------------
@settings(max_examples=40)
@given(data=st.data())
def test_any_arrival_abort_and_pressure_ends_well(data: st.DataObject):
    """Every plan keeps its budgets and stages what the device needs (`HostLoop` checks that), nobody is overtaken, no block is
    lost, and every text is complete."""
    k = data.draw(st.integers(0, 3), "num_drafts")
    seqs = data.draw(st.integers(1, 4), "max_seqs")
    block = data.draw(st.sampled_from((1, 3, 4, 8)), "block_size")
    rows = data.draw(st.integers(seqs * (k + 1), 30), "max_rows")
    smallest = -(-24 // block)
    blocks = data.draw(st.integers(smallest, 3 * smallest), "num_blocks")
    capacities = limits(max_seqs=seqs, num_drafts=k, block_size=block, max_rows=rows, num_blocks=blocks, max_len=24)
    order = data.draw(st.sampled_from(("slot", "prefill_first", "seeded")), "row_order")
    loop = HostLoop(capacities, depth=data.draw(st.integers(0, 2), "depth"), seed=data.draw(st.integers(0, 9)), row_order=order)
    requests: list[Any] = []
    for number in range(data.draw(st.integers(1, 6), "requests")):
        prompt = data.draw(st.integers(1, 23), "prompt")
        requests.append(request(number, prompt=prompt, new=data.draw(st.integers(1, 24 - prompt), "new")))
    aborted: set[int] = set()
    for one in requests:
        loop.add(one)
        for _ in range(data.draw(st.integers(0, 4), "steps before the next")):
            loop.step()
        if data.draw(st.integers(0, 5)) == 0:
            victim = requests[data.draw(st.integers(0, one.number), "aborted")]
            aborted |= {victim.number} if victim.status is not Status.FINISHED else set()
            loop.abort(victim)
    complete(loop, [one for one in requests if one.number not in aborted])
    first_time = list(dict.fromkeys(loop.admitted))
    assert first_time == sorted(first_time)
