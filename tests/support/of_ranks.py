"""Engines with several ranks for tests of the step, and the requests that they serve.

The requests share beginnings, are aborted, and have too few blocks, so that prefix hits and preemption happen in every run. The
tests of `tests/step/test_ranks*.py` compare what comes out with one rank.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from polydraft import LLM, Engine, RequestOutput, SamplingParams
from polydraft.models.safetensors_file import SafetensorsFile
from tests.support import tiny
from tests.support.emulator import emulated
from tests.support.runs import Ask, drive, engine, essence

OPTIONS: dict[str, Any] = {"max_num_seqs": 3, "block_size": 4, "num_blocks": 14, "max_batched_tokens": 20, "invariant": False}
WHOLE_EXPERTS = {("sparse-glm", 2), ("sparse-glm", 4), ("sparse-ernie", 2)}
"""Models and numbers of ranks that may keep experts whole."""


def asks(model: str) -> list[Ask]:
    """Greedy and sampled requests that arrive over time, of which two begin alike and one is aborted."""
    vocab = tiny.CONFIGS[model]["vocab_size"]
    first = tuple((7 * i + 3) % vocab for i in range(18))
    sampled = SamplingParams(max_new_tokens=18, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)
    greedy = SamplingParams(max_new_tokens=24, ignore_eos=True)
    penalised = SamplingParams(max_new_tokens=12, repetition_penalty=1.3, ignore_eos=True)
    return [
        Ask(first, greedy),
        Ask((5, 2, 9), sampled),
        Ask((*first[:13], 1), greedy, arrival=3),
        Ask((8,) * 9, greedy, arrival=4, abort=9),
        Ask((1, 2, 3, 4), penalised, arrival=5),
        Ask((*first[:13], 1), SamplingParams(max_new_tokens=16), arrival=20),
    ]


@contextmanager
def on_one_core(so: bool = True) -> Iterator[None]:
    """Keep this thread, and those that it starts, on one core, if `so` and where the system can. Ranks that are threads share one
    interpreter lock; over several cores they fight for it, and take about twice as long."""
    if not so or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))  # each of them takes another core
    os.sched_setaffinity(0, {sorted(before)[worker % len(before)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def split(model: str, ranks: int, *, emulator: str = "", **options: Any) -> Iterator[Engine]:
    """An engine over several ranks, closed behind the block: threads of the reference, or with `emulator` of an emulator with
    these options; with `backend="cpu"` processes of the CPU backend, with a thread each."""
    options = {**OPTIONS, "tensor_parallel": ranks, **options}
    of_processes = options.get("backend") == "cpu"
    with on_one_core(ranks > 1 and not of_processes):
        if of_processes:
            made = LLM(model=str(tiny.checkpoint(model)), plugins=tiny.PLUGINS, device="cpu?threads=1", **options).engine
        else:
            made = emulated(emulator, model, **options) if emulator else engine(model, **options)
        try:
            yield made
        finally:
            made.close()


def served(running: Engine, model: str) -> list[RequestOutput]:
    """What becomes of the requests."""
    return drive(running, asks(model))


@functools.cache
def on_one_rank(model: str, num_drafts: int, **options: Any) -> list[dict[str, Any]]:
    """What must not depend on the number of ranks; it makes sure that the run is worth comparing."""
    with split(model, 1, draft_tokens=num_drafts, **options) as running:
        found = served(running, model)
        assert running.scheduler.num_preemptions > 0
        assert running.ledger.num_hits > 0
    assert [output.finish_reason for output in found].count("abort") == 1
    return [dict(essence(output)) for output in found]


def pieces_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Name and numbers of each piece that is read of files from now on, as a list that grows."""
    read: list[tuple[str, int]] = []
    piece = SafetensorsFile.piece

    def counted(self: SafetensorsFile, name: str, look: Any) -> Any:
        found = piece(self, name, look)
        read.append((name, found.size))
        return found

    monkeypatch.setattr(SafetensorsFile, "piece", counted)
    return read
