"""Short random programs over several ranks, by number: what requests are told is what one rank tells them, whatever happens.

A number makes a program: some requests that begin alike, come, stop and are aborted, and sometimes new weights in the middle. The
programs of a cell (backend, model, number of ranks, number of drafts) are served one after the other by the same two engines, one
over one rank and one over more; prefixes and weights that one program leaves are there in the next. Too few blocks have requests
preempted.

What fails is named by its cell and number. Run alone it begins with new engines; `-k` with the name of the cell runs those before
it, too. Long programs, whose requests are compared with themselves alone, are in `test_ranks_programs.py`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import pytest

from polydraft import Engine, SamplingParams
from polydraft.models import Checkpoint
from tests.support import tiny
from tests.support.cpu import needs_kernels
from tests.support.emulator import SCHEDULES
from tests.support.of_ranks import WHOLE_EXPERTS, split
from tests.support.poison import poison_free_blocks
from tests.support.programs import bits
from tests.support.runs import Ask, drive, essence


class Cell(NamedTuple):
    """What programs are served by."""

    backend: str
    model: str
    ranks: int
    drafts: int

    def __str__(self) -> str:
        return "-".join(map(str, self))


EVERY = [
    Cell(backend, model, ranks, drafts)
    for backend in ("emulator", "cpu")
    for model in ("narrow", "sparse-glm", "sparse-ernie")
    for ranks in (2, 4)
    for drafts in (0, 3, 5)
]
TAKEN = {
    Cell("emulator", "narrow", 2, 0): 12, Cell("emulator", "narrow", 2, 3): 12, Cell("emulator", "narrow", 4, 5): 8,
    Cell("emulator", "sparse-glm", 2, 0): 12, Cell("emulator", "sparse-glm", 2, 5): 6, Cell("emulator", "sparse-glm", 4, 3): 8,
    Cell("emulator", "sparse-ernie", 2, 3): 10, Cell("emulator", "sparse-ernie", 4, 0): 8,
    Cell("cpu", "narrow", 4, 3): 8, Cell("cpu", "sparse-glm", 2, 3): 60, Cell("cpu", "sparse-ernie", 2, 5): 56,
}  # fmt: skip
"""Of each cell that `make test` takes, how many programs: steps of four threads take longest, and processes are long to start."""
IN_DEEP = 60
"""Programs of each cell, those that are among all tests."""
DRAW = 197
"""With this one the cells that `make test` takes have every policy of the emulator and every depth of overlap, and on either
backend graphs and none, whole experts, `--invariant` and not."""


def cases() -> Iterator[Any]:
    """Cells and numbers, one cell after the other."""
    for cell in EVERY:
        for number in range(IN_DEEP):
            marks = [pytest.mark.deep] if number >= TAKEN.get(cell, 0) else []
            yield pytest.param(
                cell, number, marks=[*marks, *([needs_kernels] if cell.backend == "cpu" else [])], id=f"{cell}-{number}"
            )


@dataclass(frozen=True)
class Update:
    """Behind a step, the others of two sets of weights."""

    step: int
    running: Literal["finish", "recompute"]
    in_memory: bool


@dataclass(frozen=True)
class Program:
    """Requests, and what happens meanwhile."""

    asks: tuple[Ask, ...]
    update: Update | None


def program(cell: Cell, number: int, *, logprobs: bool) -> Program:
    """The program of a number."""
    rng, vocab = random.Random(f"{cell} {number}"), tiny.CONFIGS[cell.model]["vocab_size"]
    asks, crowded = [], rng.random() < 0.16
    for _ in range(rng.randint(2, 3)):
        start = rng.randrange(3)  # of all programs of a cell
        prompt = [(7 * i + 5 * start + 3) % vocab for i in range(rng.randint(3, 8))]
        prompt += [rng.randrange(vocab) for _ in range(rng.randrange(3))]
        most = 3 * cell.drafts + rng.randint(5, 8) if crowded else rng.randint(2, 5)
        params = SamplingParams(max_new_tokens=most, ignore_eos=crowded or rng.random() < 0.7)
        if rng.random() < 0.3:
            params = replace(
                params, temperature=rng.choice((0.7, 1.2)), top_p=rng.choice((1.0, 0.9)), seed=rng.randrange(1 << 40)
            )
        if not crowded and rng.random() < 0.3:
            params = replace(params, stop_token_ids=tuple(rng.randrange(1, vocab) for _ in range(vocab // 8)))
        if rng.random() < 0.2:
            params = replace(params, repetition_penalty=1.2)
        if logprobs and rng.random() < 0.5:
            params = replace(params, logprobs=2)
        arrival = 0 if crowded else rng.randrange(2)
        asks.append(Ask(tuple(prompt), params, arrival, arrival + rng.randint(1, 3) if rng.random() < 0.15 else None))
    update = Update(rng.randint(1, 4), rng.choice(("finish", "recompute")), rng.random() < 0.5) if rng.random() < 0.2 else None
    return Program(tuple(asks), update)


class Served:
    """An engine that serves programs of a cell, and which weights it has."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.engine, self._model, self._moved = engine, model, False

    def serve(self, one: Program) -> tuple[list[dict[str, Any]], Counter[str]]:
        """What becomes of the requests, with the bits of log probabilities, and what happened meanwhile, by name."""
        engine, happened, step = self.engine, Counter[str](), 0
        preempted, shared = engine.scheduler.num_preemptions, engine.ledger.num_hits
        graphs = engine.runner.graphs
        replayed = graphs.counters.replayed_steps if graphs else 0

        def each_step(_: Engine) -> None:
            nonlocal step
            poison_free_blocks(engine)
            step += 1
            if one.update is not None and step == one.update.step:
                happened[one.update.running] += any(request.slot >= 0 for request in engine.requests.values())
                self._toggle(one.update)

        outputs = drive(engine, one.asks, each_step=each_step)
        happened += Counter(steps=step)
        happened += Counter(str(output.finish_reason) for output in outputs)
        happened += Counter(
            preempted=engine.scheduler.num_preemptions - preempted,
            shared=engine.ledger.num_hits - shared,
            accepted=sum(output.accepted for output in outputs),
            replayed=graphs.counters.replayed_steps - replayed if graphs else 0,
            logprobs=sum(len(output.logprobs) for output in outputs),
        )
        return [{**essence(output), "logprobs": bits(output)} for output in outputs], happened

    def _toggle(self, update: Update) -> None:
        self._moved = not self._moved
        with Checkpoint(tiny.checkpoint(tiny.moved(self._model) if self._moved else self._model)) as opened:
            arrays = {name: opened.tensor(name) for name in opened.names()} if update.in_memory else None
            self.engine.update_weights(opened.path if arrays is None else arrays, running=update.running)


class Pair:
    """The two engines of a cell. How they serve is drawn from its name."""

    def __init__(self, cell: Cell) -> None:
        rng = random.Random(f"{cell} {DRAW}")
        self.cell, self.invariant = cell, rng.random() < 0.5
        graph = rng.choice(("off", "decode"))
        options: dict[str, Any] = {
            "draft_tokens": cell.drafts, "max_batched_tokens": 3 * (cell.drafts + 1) + rng.choice((0, 4)),
            "block_size": 2, "num_blocks": 18 + 2 * cell.drafts, "invariant": self.invariant,
            "logprobs": 2 if self.invariant else None, "graph": graph, "graph_sizes": (3,) if graph == "decode" else (),
            "overlap": rng.randrange(3),
        }  # fmt: skip
        if cell.backend == "emulator":
            options["emulator"] = f"seed={cell.drafts}&{rng.choice(SCHEDULES)}"
        else:
            options["backend"] = cell.backend
        whole = (cell.model, cell.ranks) in WHOLE_EXPERTS and rng.random() < 0.5
        self._open, found = ExitStack(), []
        for ranks in (1, cell.ranks):
            by_experts = whole and (ranks > 1 or self.invariant)  # it changes the sums of one rank where these are by leaf
            found.append(self._open.enter_context(split(cell.model, ranks, expert_parallel=by_experts, **options)))
        self.one, self.more = (Served(engine, cell.model) for engine in found)

    def close(self) -> None:
        self._open.close()


class Pairs:
    """The pair of the cell whose programs are being served."""

    def __init__(self) -> None:
        self._pair: Pair | None = None

    def of(self, cell: Cell) -> Pair:
        if self._pair is None or self._pair.cell != cell:
            self.close()
            self._pair = Pair(cell)
        return self._pair

    def close(self) -> None:
        if self._pair is not None:
            self._pair.close()
        self._pair = None


@pytest.fixture(scope="module")
def pairs() -> Iterator[Pairs]:
    made = Pairs()
    yield made
    made.close()


HAPPENED: Counter[str] = Counter()


@pytest.mark.parametrize(("cell", "number"), [*cases()])
def test_a_program(cell: Cell, number: int, pairs: Pairs):
    pair = pairs.of(cell)
    one = program(cell, number, logprobs=pair.invariant)
    try:
        (wanted, on_one), (found, happened) = pair.one.serve(one), pair.more.serve(one)
        assert found == wanted
        assert happened == on_one
    except BaseException:
        pairs.close()  # the next program begins with new ones
        raise
    HAPPENED.update(happened, programs=1)


def test_the_programs_do_what_they_are_for():
    """Behind all of the ones above, in the same process."""
    if HAPPENED["programs"] < sum(TAKEN.values()):
        pytest.skip("not all programs ran in this process")
    for name in ("stop", "length", "abort", "preempted", "shared", "accepted", "replayed", "logprobs", "finish", "recompute"):
        assert HAPPENED[name] >= 10, name
    assert not HAPPENED["error"]
