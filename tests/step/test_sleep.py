"""An engine that sleeps: memory goes, graphs stay, and texts afterwards are those of before or of the weights that were given."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import polydraft.reference
from polydraft import LLM, Engine, EngineConfig, SamplingParams
from polydraft.errors import CapabilityError, CheckpointError, DeviceError
from tests.step.test_weights_from_memory import MODEL, MOVED, PROMPTS, arrays, drain, served, tokens
from tests.support import runs, tiny

LONG = SamplingParams(max_new_tokens=24, ignore_eos=True)


def engine(device: str = "reference", **options: Any) -> Engine:
    return runs.engine(MODEL, device=device, draft_tokens=3, enable_sleep_mode=True, logprobs=0, **options)


def resident(pages: Any) -> int:
    """Bytes of an anonymous mapping that are in memory, by the kernel's own word."""
    import ctypes

    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
            inside = begin <= address < end
        elif inside and head == "Rss:":
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(("device", "graph"), [("reference", "off"), ("lazy-2", "decode")])
def test_texts_after_waking_are_those_of_before(device: str, graph: str, level: Any):
    with closing(engine(device, graph=graph)) as slept:
        before = tokens(served(slept))
        captured = slept.device.counters.copy()
        for _ in range(2):
            slept.sleep(level)
            assert slept.sleep_level == level
            slept.wake_up()
            assert tokens(served(slept)) == before
        if graph == "decode":
            assert slept.device.counters.graph_replays > captured.graph_replays
        assert slept.device.counters.allocations == captured.allocations, "nothing is allocated anew"


def test_weights_and_caches_are_gone_while_it_sleeps():
    with closing(engine()) as slept:
        wanted = tokens(served(slept))
        pages: Any = slept.device.pages  # type: ignore[attr-defined]
        of_all = [array for _, _, array in pages._arrays]
        assert {kind for kind, _, _ in pages._arrays} == {"weight", "cache"}
        slept.sleep(2)
        assert not any(array.any() for array in of_all)
        slept.wake_up()
        assert tokens(served(slept)) == wanted


def test_pages_leave_memory():
    from polydraft.reference.sleeping import SleepingPages

    pages = SleepingPages()
    array = pages.empty("weight", (1 << 24,), "f32")
    array.fill(1.0)
    before = resident(pages._arrays[0][1])
    pages.sleep(keep_weights=False)
    assert before - resident(pages._arrays[0][1]) >= array.nbytes * 3 // 4, "neighbours may share the mapping"
    pages.wake()
    assert not array.any()


@pytest.mark.parametrize("running", ["finish", "recompute"])
def test_requests_end_first_or_go_on_afterwards(running: Any):
    prompts = [*PROMPTS, *PROMPTS]
    with closing(engine(max_num_seqs=2)) as plain:
        wanted = tokens(served(plain, prompts, LONG))
    with closing(engine(max_num_seqs=2)) as slept:
        ids = [slept.add(prompt, LONG) for prompt in prompts]
        for _ in range(3):
            slept.step()
        slept.sleep(running=running)
        done = {one.id: one for one in slept.poll() if one.finished}
        assert len(done) == (2 if running == "finish" else 0)
        assert not slept.has_work
        assert not slept.step()
        slept.wake_up()
        done |= drain(slept)
        assert [done[i].token_ids for i in ids] == wanted


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("source", ["directory", "arrays"])
def test_it_wakes_with_other_weights(level: Any, source: str):
    with closing(runs.engine(MOVED, draft_tokens=3, logprobs=0)) as other:
        wanted = tokens(served(other))
    with closing(engine()) as slept:
        served(slept)
        slept.sleep(level)
        slept.wake_up(arrays() if source == "arrays" else tiny.checkpoint(MOVED))
        assert tokens(served(slept)) == wanted
        slept.sleep(2)
        if source == "arrays":
            with pytest.raises(CheckpointError, match="came from memory, and source is missing; give it"):
                slept.wake_up()
            assert slept.sleep_level == 2
            slept.wake_up(arrays())
        else:
            slept.wake_up()
        assert tokens(served(slept)) == wanted


@pytest.mark.parametrize("level", [1, 2])
def test_weights_that_do_not_fit_leave_it_asleep(level: Any):
    with closing(engine()) as slept:
        wanted = tokens(served(slept))
        slept.sleep(level)
        with pytest.raises(CheckpointError):
            slept.wake_up({"model.norm.weight": arrays()["model.norm.weight"]})
        assert slept.sleep_level == level
        slept.wake_up()
        assert tokens(served(slept)) == wanted


def test_what_an_asleep_engine_refuses():
    with closing(engine()) as slept:
        slept.sleep()
        for call in (lambda: slept.add((1, 2)), lambda: slept.update_weights(tiny.checkpoint(MOVED))):
            with pytest.raises(DeviceError, match="this engine is asleep, wanted one that is awake; wake it up first"):
                call()
        slept.wake_up()
        slept.wake_up()
        with pytest.raises(CapabilityError, match="level is 3, wanted 1 or 2"):
            slept.sleep(3)  # type: ignore[arg-type]
        slept.update_weights(arrays())
        with pytest.raises(CheckpointError, match="weights in use came from memory"):
            slept.wake_up(draft=arrays())


def test_from_the_first_level_it_goes_down_to_the_second_and_not_up():
    with closing(engine()) as slept:
        wanted = tokens(served(slept))
        pages: Any = slept.device.pages  # type: ignore[attr-defined]
        slept.sleep()
        assert pages._kept
        for level in (2, 1):
            slept.sleep(level)  # type: ignore[arg-type]
            assert slept.sleep_level == 2
            assert not pages._kept, "what level 1 keeps is dropped"
        slept.wake_up()
        assert tokens(served(slept)) == wanted, "read anew"


def test_who_cannot_sleep_says_so():
    with closing(runs.engine(MODEL)) as awake, pytest.raises(CapabilityError, match="built without --enable-sleep-mode"):
        awake.sleep()
    with pytest.raises(CapabilityError, match="--enable-sleep-mode: backend cpu does not declare sleep; leave it out"):
        Engine(EngineConfig(backend="cpu", model=str(tiny.checkpoint(MODEL)), enable_sleep_mode=True))


def test_memory_that_is_missing_at_waking_leaves_it_asleep(monkeypatch: pytest.MonkeyPatch):
    with closing(engine()) as slept:
        wanted = tokens(served(slept))
        slept.sleep()
        with monkeypatch.context() as patch:

            def short() -> None:
                raise DeviceError("no memory")

            patch.setattr(slept.device, "wake", short)
            with pytest.raises(DeviceError, match="no memory"):
                slept.wake_up()
        assert slept.sleep_level == 1
        slept.wake_up()
        assert tokens(served(slept)) == wanted


def test_one_call_of_the_library_sleeps_too():
    with LLM(model=str(tiny.checkpoint(MODEL)), backend="reference", enable_sleep_mode=True) as llm:
        wanted = llm.generate([PROMPTS[0]], LONG)[0].token_ids
        llm.sleep(2, running="recompute")
        with pytest.raises(DeviceError, match="asleep"):
            llm.generate([PROMPTS[0]], LONG)
        llm.wake_up()
        assert llm.generate([PROMPTS[0]], LONG)[0].token_ids == wanted


def test_a_stream_of_an_engine_that_falls_asleep_ends_with_an_error():
    with LLM(model=str(tiny.checkpoint(MODEL)), backend="reference", enable_sleep_mode=True) as llm:
        stream = llm.stream([PROMPTS[0]], LONG)
        next(stream)
        llm.sleep(running="recompute")
        with pytest.raises(DeviceError, match="asleep"):
            next(stream)
        llm.wake_up()
        assert not llm.engine.requests


def test_the_reference_declares_it():
    for spec in polydraft.reference.DEVICES:
        capabilities = polydraft.reference.polydraft_backend_info(spec).capabilities
        assert dataclasses.asdict(capabilities)["sleep"]
