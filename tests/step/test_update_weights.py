"""Replacing weights while an engine serves: in place, drained first, with the prefix cache dropped, and all or nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft import LLM, Engine, RequestOutput, SamplingParams
from polydraft.errors import CapabilityError, CheckpointError, DeviceError
from polydraft.host.request import Status
from polydraft.reference.table import NumpyTable
from tests.support import runs, tiny
from tests.support.emulator import EmulatorTable, emulated

MODEL = "narrow"
PARAMS = SamplingParams(max_new_tokens=20, ignore_eos=True)
PROMPTS = [(5, 9, 11, 3, 9, 2, 7), (5, 9, 11, 3, 9, 2, 8), (1, 2, 3)]


def drain(engine: Engine) -> dict[str, RequestOutput]:
    done: dict[str, RequestOutput] = {}
    for _ in range(2000):
        if not engine.has_work:
            break
        engine.step()
        engine.ledger.audit()
        done |= {o.id: o for o in engine.poll() if o.finished}
    assert not engine.has_work, "the engine hangs"
    return done | {o.id: o for o in engine.poll()}


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """The same model with other weights: every floating tensor moved a little."""
    return Path(shutil.copytree(tiny.checkpoint(tiny.moved(MODEL)), tmp_path / "changed"))


def write(directory: Path, tensors: dict[str, Any]) -> None:
    from safetensors.numpy import save_file

    for old in directory.glob("*.safetensors*"):
        old.unlink()
    save_file({name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}, directory / "model.safetensors")


def texts(model: Path, **options: Any) -> list[tuple[int, ...]]:
    engine = LLM(
        **{"model": str(model), "backend": "reference", "plugins": tiny.PLUGINS, "invariant": True, "draft_tokens": 3, **options}
    ).engine
    ids = [engine.add(p, PARAMS) for p in PROMPTS]
    done = drain(engine)
    engine.close()
    return [done[i].token_ids for i in ids]


@pytest.mark.parametrize("device", ["reference", "lazy-1", "lazy-2"])
def test_requests_after_an_update_see_the_new_weights_alone(device: str, changed: Path) -> None:
    engine = runs.engine(MODEL, device=device, draft_tokens=3, block_size=2)
    first = [engine.add(p, PARAMS) for p in PROMPTS]
    before = drain(engine)
    engine.update_weights(changed)
    second = [engine.add(p, PARAMS) for p in PROMPTS]
    after = drain(engine)
    assert [before[i].token_ids for i in first] == texts(tiny.checkpoint(MODEL))
    assert [after[i].token_ids for i in second] == texts(changed)
    assert [before[i].token_ids for i in first] != [after[i].token_ids for i in second]


@pytest.mark.parametrize("device", ["reference", "lazy-1"])
def test_running_requests_finish_on_the_old_weights(device: str, changed: Path) -> None:
    engine = runs.engine(MODEL, device=device, draft_tokens=3)
    ids = [engine.add(p, PARAMS) for p in PROMPTS]
    for _ in range(3):
        engine.step()
    engine.update_weights(changed, running="finish")
    done = drain(engine)
    assert [done[i].token_ids for i in ids] == texts(tiny.checkpoint(MODEL))


@pytest.mark.parametrize("device", ["reference", "lazy-1"])
def test_requests_that_run_short_of_blocks_finish_on_the_old_weights_too(device: str, changed: Path) -> None:
    """They are preempted before the update or while it waits, and had begun all the same; one that had not is left waiting."""
    engine = runs.engine(MODEL, device=device, draft_tokens=0, max_num_seqs=3, block_size=2, num_blocks=40, prefix_cache=False)
    prompts = [(5, 9, 11, 3, 9, 2, 7 + i) for i in range(4)]
    asks = [runs.Ask(p, SamplingParams(max_new_tokens=30, ignore_eos=True)) for p in prompts]
    for waited in (4, 26):  # of which the second is behind the first preemption
        ids = [engine.add(ask.prompt_ids, ask.params) for ask in asks]
        before = engine.scheduler.num_preemptions
        for _ in range(waited):
            engine.step()
        assert (engine.scheduler.num_preemptions > before) == (waited == 26)
        engine.update_weights(changed, running="finish")
        assert engine.scheduler.num_preemptions > before
        assert [len(r.token_ids) for r in engine.requests.values() if r.status is Status.WAITING] == [0]
        done = drain(engine)
        for i, ask in zip(ids, asks, strict=True):
            model = tiny.moved(MODEL) if i == ids[3] else MODEL
            assert done[i].token_ids == runs.solo(model, 0, ask.prompt_ids, ask.params).token_ids, i
        engine.update_weights(tiny.checkpoint(MODEL))


def test_a_request_that_was_preempted_behind_an_older_one_that_never_began_finishes_too(changed: Path) -> None:
    """The older one waited for its grammar, say, while the younger one was served, and then for a slot."""
    engine = runs.engine(MODEL, draft_tokens=0, max_num_seqs=1)
    first, second = (engine.add(prompt, PARAMS) for prompt in PROMPTS[:2])
    older = engine.requests[first]
    engine.scheduler.leave(older)
    for _ in range(4):
        engine.step()
    engine.scheduler.queue(older)
    engine.scheduler.preempt_all()
    engine.scheduler.admits = "none"
    while engine.requests[second].status is not Status.WAITING:
        engine.step()
    assert engine.requests[second].begun
    assert [request.id for request in engine.scheduler.waiting] == [first, second]
    engine.update_weights(changed, running="finish")
    assert older.status is Status.WAITING, "it has not begun"
    done = drain(engine)
    assert done[second].token_ids == texts(tiny.checkpoint(MODEL))[1]
    assert done[first].token_ids == texts(changed)[0]


def test_steps_go_on_without_graphs_where_they_cannot_be_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = runs.engine(MODEL, device="lazy-1", draft_tokens=3, graph="decode", max_num_seqs=4)
    assert engine.runner.graphs is not None
    capture, done = engine.runner.graphs.capture, []
    whole = type(capture).capture

    def fails_later(self: Any, stream: Any, fn: Any) -> Any:
        done.append(stream)
        if len(done) > 1:
            raise DeviceError("no memory is left")
        return whole(self, stream, fn)

    with monkeypatch.context() as patched:
        patched.setattr(type(capture), "capture", fails_later)
        with pytest.raises(DeviceError, match="no memory is left"):
            engine.runner.rebind()
    ids = [engine.add(p, PARAMS) for p in PROMPTS]
    found = drain(engine)
    assert [found[i].token_ids for i in ids] == texts(tiny.checkpoint(MODEL))


@pytest.mark.parametrize("device", ["reference", "lazy-1"])
def test_running_requests_recompute_and_go_on_with_the_new_weights(device: str, changed: Path) -> None:
    engine = runs.engine(MODEL, device=device, draft_tokens=3)
    ids = [engine.add(p, PARAMS) for p in PROMPTS]
    for _ in range(3):
        engine.step()
    known = {i: tuple(engine.requests[i].token_ids) for i in ids}
    engine.update_weights(changed, running="recompute")
    known = {i: tuple(engine.requests[i].token_ids) or known[i] for i in ids}
    done = drain(engine)
    for i, prompt in zip(ids, PROMPTS, strict=True):
        kept = known[i]
        assert kept, "the request had begun"
        assert done[i].token_ids[: len(kept)] == kept
        continued = LLM(model=str(changed), backend="reference", plugins=tiny.PLUGINS, invariant=True, draft_tokens=0).engine
        left = SamplingParams(max_new_tokens=20 - len(kept), ignore_eos=True)
        other = continued.add((*prompt, *kept), left)
        assert done[i].token_ids[len(kept) :] == drain(continued)[other].token_ids


def test_nothing_moves_and_nothing_is_allocated(changed: Path) -> None:
    engine = runs.engine(MODEL, draft_tokens=3)
    programs, allocations = engine.runner.programs, engine.device.counters.allocations
    engine.update_weights(changed)
    assert engine.runner.programs is programs
    assert engine.device.counters.allocations == allocations


def test_the_offline_interface_replaces_weights_between_calls(changed: Path) -> None:
    """A stream that is under way goes on with the new ones, or has ended with the old ones when it is read on."""
    for running in ("finish", "recompute"):
        llm = LLM(model=str(tiny.checkpoint(MODEL)), plugins=tiny.PLUGINS, backend="reference", invariant=True, draft_tokens=2)
        stream = llm.stream([PROMPTS[0]], PARAMS)
        begun = next(stream).token_ids
        llm.update_weights(changed, running=running)  # type: ignore[arg-type]
        (whole,) = (output.token_ids for output in stream if output.finished)
        old, new = (runs.solo(model, 0, PROMPTS[0], PARAMS).token_ids for model in (MODEL, tiny.moved(MODEL)))
        assert whole == old if running == "finish" else whole[: len(begun)] == begun != whole != old
        assert [output.token_ids for output in llm.generate([PROMPTS[0]], PARAMS)] == [new]


def moving(table_class: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the backend of this table never refills a weight: the new values lie elsewhere, and the old ones are spoilt."""
    prepare = table_class.prepare_weight  # type: ignore[attr-defined]

    def elsewhere(self: Any, role: str, value: Any, dtype: str, previous: Any = None) -> Any:
        if previous is not None:
            prepare(self, role, np.full_like(value, np.nan), dtype, previous)
        return prepare(self, role, value, dtype)

    monkeypatch.setattr(table_class, "prepare_weight", elsewhere)


@pytest.mark.parametrize("graph", ["", "off", "decode"])
def test_weights_that_move_are_bound_and_captured_anew(graph: str, changed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the reference, and on the emulator with and without graphs; running requests go on in the new programs."""
    moving(EmulatorTable if graph else NumpyTable, monkeypatch)
    options: dict[str, Any] = {"draft_tokens": 3, "max_num_seqs": 3}
    engine = emulated("policy=lazy", MODEL, graph=graph, **options) if graph else runs.engine(MODEL, **options)
    before, graphs = engine.runner.programs, engine.runner.graphs
    ids = [engine.add(p, PARAMS) for p in PROMPTS]
    for _ in range(4):
        engine.step()
    replays = engine.device.counters.graph_replays
    engine.update_weights(changed, running="recompute")
    kept = {i: len(engine.requests[i].token_ids) for i in ids}
    assert engine.runner.programs is not before
    assert (engine.runner.graphs is graphs) == (graphs is None)
    done = drain(engine)
    for i, prompt in zip(ids, PROMPTS, strict=True):
        assert kept[i] > 0
        assert done[i].token_ids == runs.solo_moved(MODEL, 0, prompt, PARAMS, kept[i]).token_ids
        assert not done[i].error
    assert (engine.device.counters.graph_replays > replays) == (graph == "decode")


def test_a_bad_tensor_leaves_the_old_weights_whole(changed: Path) -> None:
    broken = dict(tiny.weights(MODEL))
    name = max(broken)
    broken[name] = np.full_like(broken[name], np.nan)
    write(changed, broken)
    engine = runs.engine(MODEL, draft_tokens=3)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        engine.update_weights(changed)
    ids = [engine.add(p, PARAMS) for p in PROMPTS]
    done = drain(engine)
    assert [done[i].token_ids for i in ids] == texts(tiny.checkpoint(MODEL))


WRONG_SOURCES: Any = [5, None, b"x", ["w"], object()]


@pytest.mark.parametrize("wrong", WRONG_SOURCES, ids=lambda one: type(one).__name__)
def test_what_is_neither_a_directory_nor_arrays(changed: Path, wrong: Any) -> None:
    engine = runs.engine(MODEL)
    with pytest.raises(
        CheckpointError, match=r"^update_weights: source is \w+, wanted a checkpoint directory, or arrays by name"
    ):
        engine.update_weights(wrong)
    if wrong is not None:
        with pytest.raises(CheckpointError, match=r"^update_weights: draft is \w+, wanted a checkpoint directory, or arrays"):
            engine.update_weights(changed, draft=wrong)
    with pytest.raises(CheckpointError, match=r"^model '' is no directory"):
        engine.update_weights("")
    with pytest.raises(CapabilityError, match=r"^update_weights: running is .*, wanted finish or recompute; correct the call"):
        engine.update_weights(changed, running=wrong)


def test_another_model_is_refused(changed: Path) -> None:
    config = json.loads((changed / "config.json").read_text())
    config["rope_theta"] = 123.0
    (changed / "config.json").write_text(json.dumps(config))
    engine = runs.engine(MODEL, draft_tokens=3)
    with pytest.raises(CheckpointError, match="do not fit the running"):
        engine.update_weights(changed)
