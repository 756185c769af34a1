"""New weights of a model that is split over ranks: each rank keeps its share of them, all go on with them behind the same step,
and what one of them cannot do changes nothing on any."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft import Engine, SamplingParams, reference
from polydraft.conformance.target import wrap
from polydraft.errors import CheckpointError, DeviceError
from polydraft.host.followers import ProcessChannel
from polydraft.models import Checkpoint
from polydraft.models.safetensors_file import SafetensorsFile
from polydraft.models.weights import read_all
from polydraft.plugins.default_backend import default_backend
from polydraft.ranks import exchange
from polydraft.reference.table import NumpyTable
from polydraft.step.runner import Runner
from tests.support import tiny
from tests.support.depth import among
from tests.support.of_ranks import pieces_read, served, split
from tests.support.runs import essence, solo, solo_moved

MODEL = "narrow"
PROMPT = (3, 1, 4, 1, 5)
PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True)
NATIVE = pytest.mark.skipif(default_backend().name != "cpu", reason="the CPU backend is not built here")


def texts(running: Engine, model: str) -> list[dict[str, Any]]:
    return [dict(essence(output)) for output in served(running, model)]


def source(model: str, kind: str) -> Any:
    """The moved weights of a model, in a directory or as arrays."""
    directory = tiny.checkpoint(tiny.moved(model))
    if kind == "directory":
        return directory
    with Checkpoint(directory) as opened:
        return {name: opened.tensor(name) for name in opened.names()}


def alone(model: str, **options: Any) -> list[dict[str, Any]]:
    """What a fresh engine on one device writes with the moved weights."""
    with split(tiny.moved(model), 1, **options) as fresh:
        return texts(fresh, model)


CASES = [(MODEL, 2, 3, "directory")]
MORE = [
    (model, ranks, drafts, kind)
    for model in (MODEL, "sparse-glm", "with-biases")
    for ranks in (2, 4)
    for drafts in (0, 3)
    for kind in ("directory", "arrays")
]


@pytest.mark.parametrize(("model", "ranks", "drafts", "kind"), among(CASES, MORE))
def test_texts_and_rounds_are_those_of_a_fresh_engine(model: str, ranks: int, drafts: int, kind: str):
    """Behind texts of the old weights, whose blocks are not shared any more."""
    with split(model, ranks, draft_tokens=drafts) as running:
        before = texts(running, model)
        running.update_weights(source(model, kind))
        after = texts(running, model)
        running.update_weights(tiny.checkpoint(model))
        assert texts(running, model) == before
    assert after == alone(model, draft_tokens=drafts) != before


@pytest.mark.parametrize(("graph", "whole"), among([], [("off", True), ("decode", True), ("decode", False)]))
def test_steps_that_are_launched_ahead_and_graphs(graph: str, whole: bool):
    options: dict[str, Any] = {"draft_tokens": 3, "device": "lazy-1", "graph": graph, "expert_parallel": whole}
    with split("sparse-glm", 2, **options) as running:
        running.add(PROMPT, PARAMS)
        for _ in range(4):
            running.step()
        assert running._in_flight, "steps are on their way"
        running.update_weights(source("sparse-glm", "directory"))
        assert running.poll()[-1].finished
        assert texts(running, "sparse-glm") == alone("sparse-glm", draft_tokens=3)


@NATIVE
@pytest.mark.parametrize(("model", "ranks", "drafts", "kind"), among([], MORE))
def test_processes(model: str, ranks: int, drafts: int, kind: str):
    on_cpu: dict[str, Any] = {"backend": "cpu", "draft_tokens": drafts}
    with split(model, ranks, **on_cpu) as running:
        served(running, model)
        running.update_weights(source(model, kind))
        assert texts(running, model) == alone(model, **on_cpu)


@NATIVE
def test_processes_read_a_directory_and_are_given_arrays():
    on_cpu: dict[str, Any] = {"backend": "cpu", "draft_tokens": 3}
    found = []
    with split(MODEL, 2, **on_cpu) as running:
        for given in (None, source(MODEL, "arrays"), tiny.checkpoint(MODEL), source(MODEL, "directory")):
            if given is not None:
                running.update_weights(given)
            found.append(text(running, running.add(PROMPT, PARAMS)))
    with split(tiny.moved(MODEL), 1, **on_cpu) as fresh:
        assert found[1] == found[3] == text(fresh, fresh.add(PROMPT, PARAMS)) != found[0] == found[2]


def begun(running: Engine, count: int = 4) -> str:
    """A request that has some tokens."""
    name = running.add(PROMPT, PARAMS)
    for _ in range(count):
        running.step()
    assert running.requests[name].slot >= 0
    return name


def text(running: Engine, name: str) -> tuple[int, ...]:
    """Its tokens, once it has ended."""
    while running.has_work:
        running.step()
        running.ledger.audit()
    (output,) = (output for output in running.poll() if output.id == name)
    assert not output.error
    return output.token_ids


@pytest.mark.parametrize("way", ["finish", "recompute"])
def test_no_text_is_of_two_policies_unless_asked_for(way: Any):
    """With `--invariant`: texts are those of one device to the bit."""
    with split(MODEL, 2, draft_tokens=3, invariant=True) as running:
        name = begun(running)
        waits = running.add((1, 2, 3), PARAMS)
        running.update_weights(source(MODEL, "directory"), running=way)
        kept = 16 if way == "finish" else len(running.requests[name].token_ids)
        assert kept > 1
        found: dict[str, tuple[int, ...]] = {}
        while len(found) < 2:
            running.step()
            found |= {output.id: output.token_ids for output in running.poll() if output.finished}
    wanted = solo if way == "finish" else solo_moved
    assert found[name] == wanted(MODEL, 3, PROMPT, PARAMS, *([] if way == "finish" else [kept])).token_ids
    assert found[waits] == solo(tiny.moved(MODEL), 3, (1, 2, 3), PARAMS).token_ids


def test_a_rank_reads_no_more_than_it_keeps(monkeypatch: pytest.MonkeyPatch):
    """Twice, to check and to put in place."""
    with split("sparse-glm", 4, draft_tokens=3) as running:
        kept = running.share.weights()
        read = pieces_read(monkeypatch)
        running.update_weights(source("sparse-glm", "directory"))
    experts = kept["layers.1.experts_gate_up"].shape
    of_experts = sum(size for name, size in read if ".mlp.experts." in name and ".layers.1." in name)
    down = kept["layers.1.experts_down"].shape
    assert of_experts == 4 * 2 * (np.prod(experts) + np.prod(down))


# -- what goes wrong -----------------------------------------------------------------------------------------
@contextmanager
def spoilt(model: str, tmp_path: Path, name: str, place: Any) -> Iterator[Path]:
    """The moved weights in a directory, with a NaN in one tensor."""
    from safetensors.numpy import load_file, save_file

    directory = Path(shutil.copytree(tiny.checkpoint(tiny.moved(model)), tmp_path / "spoilt"))
    file = next(directory.glob("*.safetensors"))
    tensors = load_file(file)
    tensors[name][place] = np.nan
    save_file(tensors, file)
    yield directory


def on_rank_1(change: Callable[[], None], after: int) -> Any:
    """The reference, on whose rank 1 a weight is not put in place, but `change` called: that with the number `after`."""

    def table(answer: Any, device: Any) -> Any:
        del device
        if threading.current_thread().name != "rank 1":
            return answer
        prepare, count = answer.prepare_weight, [0]

        def changed(role: Any, value: Any, dtype: str, previous: Any = None) -> Any:
            count[0] += previous is not None
            if count[0] == after and previous is not None:
                change()
            return prepare(role, value, dtype, previous)

        answer.prepare_weight = changed
        return answer

    return wrap(reference, polydraft_kernels=table)


@pytest.mark.parametrize("kind", ["directory", "arrays"])
def test_what_one_rank_cannot_read_leaves_the_old_weights_to_all(kind: str, tmp_path: Path):
    """The columns of rank 1; a text goes on with the old weights, and another update has nothing left of this one."""
    name = "model.layers.0.self_attn.o_proj.weight"
    with spoilt(MODEL, tmp_path, name, (0, -1)) as directory, split(MODEL, 2, draft_tokens=3, invariant=True) as running:
        request = begun(running)
        given: Any = directory
        if kind == "arrays":
            given = source(MODEL, kind)
            given[name][0, -1] = np.nan
        with pytest.raises(CheckpointError, match=f"{'rank 1 failed: .*' if kind == 'directory' else ''}tensor {name} holds nan"):
            running.update_weights(given)
        assert text(running, request) == solo(MODEL, 3, PROMPT, PARAMS).token_ids
        running.update_weights(source(MODEL, "directory"))
        assert text(running, running.add(PROMPT, PARAMS)) == solo(tiny.moved(MODEL), 3, PROMPT, PARAMS).token_ids


def test_a_file_that_one_rank_does_not_find(monkeypatch: pytest.MonkeyPatch):
    opened = SafetensorsFile.__init__

    def missing(self: SafetensorsFile, path: Path) -> None:
        opened(self, path.with_name("gone") if threading.current_thread().name == "rank 1" else path)

    with split(MODEL, 2, draft_tokens=3, invariant=True) as running:
        with monkeypatch.context() as there:
            there.setattr(SafetensorsFile, "__init__", missing)
            with pytest.raises(CheckpointError, match=r"^rank 1 failed: .*gone cannot be opened"):
                running.update_weights(source(MODEL, "directory"))
        assert text(running, running.add(PROMPT, PARAMS)) == solo(MODEL, 3, PROMPT, PARAMS).token_ids


def test_another_model_is_refused_by_rank_0():
    with split(MODEL, 2) as running, pytest.raises(CheckpointError, match="do not fit the running narrow"):
        running.update_weights(tiny.checkpoint("with-biases"))


def test_a_rank_that_fails_half_way_leaves_an_engine_that_rests_until_whole_weights_are_given():
    def fail() -> None:
        raise MemoryError("no room")

    with split(MODEL, 2, plugin=on_rank_1(fail, 5), draft_tokens=3, invariant=True) as running:
        with pytest.raises(CheckpointError, match=r"^rank 1 failed: MemoryError\('no room'\)"):
            running.update_weights(source(MODEL, "directory"))
        with pytest.raises(DeviceError, match=r"failed half-way \(rank 1 failed: .*wanted whole ones; give weights"):
            running.add(PROMPT, PARAMS)
        assert not running.step()
        running.update_weights(source(MODEL, "arrays"))
        assert text(running, running.add(PROMPT, PARAMS)) == solo(tiny.moved(MODEL), 3, PROMPT, PARAMS).token_ids


def test_arrays_that_change_meanwhile():
    """Rank 0 reads them again, the other one has copies."""
    given = source(MODEL, "arrays")

    def step() -> None:
        given["model.norm.weight"][0] += 1
        running.step()

    with split(MODEL, 2, draft_tokens=2) as running:
        begun(running)
        with pytest.raises(CheckpointError, match="have changed since they were checked"):
            running.update_weights(given, step=step)
        assert running.weights.torn
        running.update_weights(source(MODEL, "arrays"))
        assert not running.weights.torn


def test_an_update_that_is_interrupted_is_forgotten_by_all():
    def interrupted() -> None:
        raise KeyboardInterrupt

    with split(MODEL, 2, draft_tokens=3, invariant=True) as running:
        request = begun(running)
        with pytest.raises(KeyboardInterrupt):
            running.update_weights(source(MODEL, "directory"), step=interrupted)
        assert text(running, request) == solo(MODEL, 3, PROMPT, PARAMS).token_ids


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """New weights of rank 1 lie elsewhere."""
    prepare = NumpyTable.prepare_weight

    def elsewhere(self: Any, role: Any, value: Any, dtype: str, previous: Any = None) -> Any:
        moves = threading.current_thread().name == "rank 1"
        return prepare(self, role, value, dtype, None if moves else previous)

    monkeypatch.setattr(NumpyTable, "prepare_weight", elsewhere)


@pytest.mark.usefixtures("moving")
def test_weights_that_move_on_one_rank_are_bound_anew_on_all():
    """Collectives are numbered as they are bound, by all ranks alike."""
    with split(MODEL, 2, draft_tokens=3, invariant=True) as running:
        programs = running.runner.programs
        running.update_weights(source(MODEL, "directory"))
        assert running.runner.programs is not programs
        assert text(running, running.add(PROMPT, PARAMS)) == solo(tiny.moved(MODEL), 3, PROMPT, PARAMS).token_ids


@pytest.mark.usefixtures("moving")
def test_a_rank_that_fails_to_bind_anew_ends_the_engine(monkeypatch: pytest.MonkeyPatch):
    bind = Runner.rebind

    def failing(self: Runner) -> None:
        if threading.current_thread().name == "rank 1":
            raise MemoryError("no room")
        bind(self)

    monkeypatch.setattr(Runner, "rebind", failing)
    with split(MODEL, 2, draft_tokens=2) as running:
        with pytest.raises(DeviceError, match=r"^rank 1 failed: MemoryError\('no room'\); every rank ends here"):
            running.update_weights(source(MODEL, "directory"))
        with pytest.raises(DeviceError, match="every rank ends here"):
            running.add(PROMPT, PARAMS)


@NATIVE
@pytest.mark.parametrize("when", ["requests end", "ranks read"])
def test_a_process_that_dies_meanwhile_ends_the_engine(when: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exchange, "PATIENCE_S", 1.0)
    with split(MODEL, 2, backend="cpu", draft_tokens=2) as running:
        request = begun(running)
        assert running._followers is not None
        (channel,) = running._followers._channels
        assert isinstance(channel, ProcessChannel)
        process = channel._process

        def kill() -> None:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()

        def step() -> None:
            if when == "requests end":
                kill()
            running.step()

        def reading(updates: Any) -> None:
            if when == "ranks read":
                kill()
            read_all(updates)

        monkeypatch.setattr("polydraft.engine_weights.read_all", reading)
        with pytest.raises(DeviceError, match=rf"rank 1 \(process {process.pid}\) ended: SIGKILL.*every rank ends here"):
            running.update_weights(source(MODEL, "directory"), step=step)
        assert not running.weights.torn
        (output,) = running.poll()
        assert (output.id, output.finish_reason) == (request, "error")
        assert output.error == running.failure
        with pytest.raises(DeviceError, match="every rank ends here"):
            running.update_weights(source(MODEL, "directory"))


def test_an_engine_whose_rank_ends_before_it_is_given_its_share_takes_no_requests():
    with split(MODEL, 2, draft_tokens=2) as running:
        request = begun(running)
        assert running._followers is not None
        with suppress(DeviceError):
            running._followers.group.exchange.fail("rank 1 ended")
        with pytest.raises(DeviceError, match=r"^rank 1 ended; every rank ends here"):
            running.update_weights(source(MODEL, "arrays"))
        with pytest.raises(DeviceError, match=r"^rank 1 ended; every rank ends here"):
            running.add(PROMPT, PARAMS)
        assert [(output.id, output.error) for output in running.poll()] == [(request, running.failure)]


def test_what_ends_the_ranks_is_told_in_its_own_words(monkeypatch: pytest.MonkeyPatch):
    """Where a launch meets it while ranks are given new weights."""
    with split(MODEL, 2, draft_tokens=2) as running:
        assert running._followers is not None
        exchange = running._followers.group.exchange

        def fail() -> None:
            with suppress(DeviceError):
                exchange.fail("rank 1 ended")
            raise DeviceError(f"kernel all_reduce failed ({exchange.failure}); ask again")

        monkeypatch.setattr(running.device, "synchronize", fail)
        with pytest.raises(DeviceError, match=r"^rank 1 ended; every rank ends here, start the engine again$"):
            running.update_weights(source(MODEL, "directory"))


@NATIVE
@pytest.mark.deep
def test_a_message_that_is_sent_in_part_ends_the_engine():
    """Ctrl-C while arrays go over: the next message would be taken for the rest of them."""

    class Broken:
        def __init__(self, pipe: Any) -> None:
            self._pipe = pipe
            self.write, self.flush, self.close = pipe.write, pipe.flush, pipe.close

        def writelines(self, parts: Any) -> None:
            for part in parts:
                self._pipe.write(bytes(part)[: len(part) // 2])
                self._pipe.flush()
                raise KeyboardInterrupt

    with split(MODEL, 2, backend="cpu", draft_tokens=2) as running:
        request = begun(running)
        assert running._followers is not None
        (channel,) = running._followers._channels
        assert isinstance(channel, ProcessChannel)
        pipe, channel._pipe = channel._pipe, Broken(channel._pipe)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            running.update_weights(source(MODEL, "arrays"))
        channel._pipe = pipe
        while running.has_work:
            running.step()
        (output,) = running.poll()
        assert (output.id, output.finish_reason) == (request, "error")
        assert "rank 1 was sent a part of a message (KeyboardInterrupt); every rank ends here" in output.error
