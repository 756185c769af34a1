"""Faults on the emulator: a request ends well or with one sentence, no block leaks, and the engine serves on or says why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polydraft import Engine, RequestOutput, SamplingParams
from polydraft.errors import DeviceError
from polydraft.llm import LLM
from tests.support.depth import crossed
from tests.support.emulator import SCHEDULES, emulated
from tests.support.poison import poison_free_blocks
from tests.support.runs import Ask, drive, essence, solo

DEPTHS = (0, 1, 2)
each_depth = pytest.mark.parametrize("depth", DEPTHS)
GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)
ASKS = [Ask((1, 2, 3 + i), replace(GREEDY, max_new_tokens=10 + 3 * i), 2 * i) for i in range(5)]
"""Two run at a time, so that some are running, some waiting and some not there yet when something fails."""
LATER = Ask((9, 8, 7), GREEDY)


def narrow(query: str, depth: int, **options: Any) -> Engine:
    options = {"draft_tokens": 2, "max_num_seqs": 2, "block_size": 4, **options}
    return emulated(query, "narrow", overlap=depth, **options)


def is_right(ask: Ask, output: RequestOutput) -> bool:
    return essence(output) == essence(solo("narrow", 2, ask.prompt_ids, ask.params))


def sort_out(served_by: Engine, asks: list[Ask], outputs: list[RequestOutput]) -> tuple[int, int]:
    """How many requests ended well and how many with an error that names the device; there is nothing else."""
    good = failed = 0
    for ask, output in zip(asks, outputs, strict=True):
        if output.finish_reason != "error":
            assert is_right(ask, output), served_by.device.spec
            good += 1
            continue
        failed += 1
        assert served_by.device.spec in output.error
        assert "\n" not in output.error
        alone = solo("narrow", 2, ask.prompt_ids, ask.params)
        assert output.token_ids == alone.token_ids[: len(output.token_ids)], "what was said before the failure was right"
    return good, failed


def serve(query: str, depth: int, **options: Any) -> tuple[Engine, int, int]:
    """Serve `ASKS` with a fault, then one more request without; `drive` audits the ledger after every step. All of them come at
    once where the device is to be lost, since an engine without one takes none."""
    served_by = narrow(query, depth, **options)
    asks = [replace(ask, arrival=0) for ask in ASKS] if "lost" in query else ASKS
    good, failed = sort_out(served_by, asks, drive(served_by, asks, each_step=poison_free_blocks))
    if not served_by.failure:
        (output,) = drive(served_by, [LATER], each_step=poison_free_blocks)
        assert is_right(LATER, output), "an engine that serves on serves well"
    return served_by, good, failed


# -- one fault -------------------------------------------------------------------------------------
FAULTS = ("upload@9", "download@4", "kernel@300", "linear@60", "rope_kv_write@9", "forward_meta@7", "scatter@2",
          "verify_match+commit_window@5")  # fmt: skip


@pytest.mark.parametrize(("fault", "depth"), crossed(3, FAULTS, DEPTHS))
def test_requests_that_were_running_end_with_the_sentence_and_the_others_are_served(fault: str, depth: int) -> None:
    served_by, good, failed = serve(f"seed={depth}&fault={fault}", depth)
    assert 1 <= failed <= 2
    assert good == len(ASKS) - failed
    assert not served_by.failure
    served_by.close()


@pytest.mark.parametrize(("how", "depth"), crossed(3, ["fail", "oom", "lost"], DEPTHS))
def test_a_fault_anywhere(how: str, depth: int) -> None:
    """The n-th operation of a run, for many n, in changing schedules; every depth takes operations of its own."""
    anywhere(how, depth, range(1 + 87 * depth, 1400, 262), least=4)


@pytest.mark.deep
@each_depth
@pytest.mark.parametrize("how", ["fail", "oom", "lost"])
def test_a_fault_anywhere_deep(how: str, depth: int) -> None:
    anywhere(how, depth, range(1, 1400, 43), least=20)


def anywhere(how: str, depth: int, operations: range, least: int) -> None:
    reached = 0
    for seed, n in enumerate(operations):
        schedule = SCHEDULES[seed % len(SCHEDULES)]
        served_by, good, failed = serve(f"seed={seed}&{schedule}&fault=op@{n}:{how}", depth)
        reached += failed > 0 or bool(served_by.failure)
        if how == "lost":
            assert bool(served_by.failure) == (failed > 0)
        else:
            assert good > 0
            assert not served_by.failure
        served_by.close()
    assert reached >= least


@each_depth
def test_faults_one_after_the_other(depth: int) -> None:
    served_by, good, failed = serve("seed=4&fault=kernel@60,kernel@160,copy@13,linear@60:oom", depth)
    assert failed >= 2, "what is issued behind a failure is void, and a fault in it with it"
    assert good + failed == len(ASKS)
    assert not served_by.failure
    served_by.close()


@each_depth
def test_a_fault_in_a_replay(depth: int) -> None:
    for fault in ("replay@3", "replay@8:oom", "download@5"):
        served_by = narrow(f"seed=2&fault={fault}", depth, graph="decode", graph_sizes=(2,))
        good, failed = sort_out(served_by, ASKS, drive(served_by, ASKS, each_step=poison_free_blocks))
        assert good > 0
        assert failed > 0
        served_by.close()


# -- what is kept and what is dropped ------------------------------------------------------------------
def test_a_preempted_request_that_was_draining_is_served_again() -> None:
    """It was to be prefilled anew in any case, so a failure on its way out costs it nothing."""
    served_by = narrow("policy=lazy", 1, num_blocks=12, max_num_seqs=2)
    asks = [Ask((1, 2, 3), replace(GREEDY, max_new_tokens=40)), Ask((4, 5, 6), replace(GREEDY, max_new_tokens=40))]
    ids = [served_by.add(ask.prompt_ids, ask.params) for ask in asks]
    while not served_by.slots.draining.any():
        served_by.step()
    assert served_by.scheduler.num_preemptions == 1
    device: Any = served_by.device
    device.enqueue(device.stream, lambda: 1 // 0, "breaks")
    outputs: dict[str, RequestOutput] = {}
    while served_by.has_work:
        served_by.step()
        served_by.ledger.audit()
        outputs |= {output.id: output for output in served_by.poll() if output.finished}
    first, second = (outputs[i] for i in ids)
    assert (first.finish_reason, second.finish_reason) == ("error", "length")
    assert "'breaks' failed" in first.error
    assert is_right(asks[1], second)
    served_by.close()


def test_no_block_is_shared_with_what_came_before_a_failure() -> None:
    """A failed kernel may have spoilt any row, and the emulator does: the whole cache that it was writing to."""
    served_by = narrow("policy=lazy&fault=rope_kv_write@24", 0, max_num_seqs=1, num_blocks=60)
    prompt = tuple(range(1, 14))
    drive(served_by, [Ask(prompt, replace(GREEDY, max_new_tokens=2))])
    hits = served_by.ledger.num_hits
    outputs = drive(served_by, [Ask((7, 7), GREEDY), Ask(prompt, GREEDY, 20)])
    assert [output.finish_reason for output in outputs] == ["error", "length"]
    assert is_right(Ask(prompt, GREEDY), outputs[1])
    assert served_by.ledger.num_hits == hits
    served_by.close()


# -- the end -----------------------------------------------------------------------------------------
@each_depth
def test_an_engine_that_lost_its_device_says_why_and_takes_nothing_more(depth: int) -> None:
    served_by, _, failed = serve("seed=1&fault=op@200:lost", depth)
    assert failed == len(ASKS)
    assert "lost the device" in served_by.failure
    assert "open a new engine" in served_by.failure
    with pytest.raises(DeviceError, match="lost the device"):
        served_by.add((1, 2))
    assert not served_by.step()
    served_by.close()


def test_offline_use_ends_with_errors_and_not_with_a_hang() -> None:
    from tests.support import tiny
    from tests.support.emulator import Emulator

    options: dict[str, Any] = {
        "model": str(tiny.checkpoint("narrow")),
        "plugins": tiny.PLUGINS,
        "draft_tokens": 3,
        "max_num_seqs": 2,
        "graph": "off",
        "overlap": 1,
    }
    llm = LLM(plugin=Emulator("?fault=op@300:lost"), **options)
    outputs = llm.generate([[1, 2, 3]] * 5, GREEDY)
    assert [output.finish_reason for output in outputs] == ["error"] * 5
    assert all("lost the device" in output.error for output in outputs)
    with pytest.raises(DeviceError, match="lost the device"):
        llm.generate([[1, 2, 3]], GREEDY)
    llm.close()


def test_a_device_without_room_is_an_error_while_the_engine_is_built() -> None:
    with pytest.raises(DeviceError, match=r"could not allocate .* for .*; lower --num-blocks"):
        narrow("memory=1", 0, num_blocks=3000)
    with pytest.raises(DeviceError, match="could not allocate"):
        narrow("fault=alloc@20", 0)
