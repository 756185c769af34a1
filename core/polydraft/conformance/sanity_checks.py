"""Level L6: speculation is on, and a step costs the host no more than it should. No check measures speed.

Counts are taken over the steps of a steady batch. They are the device's own, which L1 has checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from polydraft.conformance.check import Check, Tally
from polydraft.conformance.lossless_checks import K, run, working_dtype
from polydraft.conformance.probe import NUM_TOKENS, prompts
from polydraft.conformance.serving import Ask, as_expected, serve
from polydraft.conformance.target import Target
from polydraft.device import Launch, Stream
from polydraft.engine import Engine
from polydraft.instruments.allocations import Allocations
from polydraft.instruments.base import Instrument
from polydraft.plugins.kernel_table import Binding

BATCH = 3


def checks() -> Iterator[Check]:
    """Every check of L6."""
    yield Check("L6/one-wait-a-step", _waits)
    yield Check("L6/no-allocation-after-warm-up", _allocations)
    yield Check("L6/launches-constant", _launches)
    yield Check("L6/copies-of-a-steady-step", _copies)
    yield Check("L6/tokens-a-step", _tokens)
    yield Check("L6/replays", _replays, ("graph_capture",))


def _asks() -> list[Ask]:
    return [Ask(prompt) for prompt in prompts(BATCH)]


def _steady(target: Target, tally: Tally, count: Callable[[Engine], int], **options: Any) -> list[int]:
    """What a count grew by in each step in which the same batch decodes and nothing is staged."""
    seen: list[tuple[bool, int]] = []

    def note(engine: Engine, step: int) -> None:
        del step
        last = engine.scheduler._last
        quiet = last is not None and not last.has_prefill and last.num_seqs == BATCH and not last.writes
        seen.append((quiet and engine.has_work, count(engine)))

    run(target, tally, _asks(), each_step=note, max_num_seqs=BATCH, block_size=16, overlap=0, **options)
    return [after - before for (_, before), (quiet, after) in itertools.pairwise(seen) if quiet]


def _waits(target: Target, tally: Tally) -> None:
    """The host waits for the device once a step: for its snapshot."""
    steps = _steady(target, tally, lambda engine: engine.device.counters.host_syncs)
    tally.equal("waits in each steady step", sorted(set(steps)), [1])


def _allocations(target: Target, tally: Tally) -> None:
    """Nothing is allocated once the engine is built."""
    steps = _steady(target, tally, lambda engine: engine.instruments[Allocations].total.number, instruments=(Allocations(),))
    tally.equal("allocations in each steady step", sorted(set(steps)), [0])


class _Launches(Instrument):
    """Counts launches, whoever's kernel they run: the table's, or one that only its program pass can choose."""

    name = "launches"

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def bind(self, binding: Binding, launch: Launch) -> Launch:
        """Metadata fills are no launches."""
        if binding.contract == "forward_meta":
            return launch

        def counted(stream: Stream, n: int) -> None:
            self.number += 1
            launch(stream, n)

        return counted


def _launches(target: Target, tally: Tally) -> None:
    """Every steady step launches the same: the lengths of the target's and the draft's program."""
    counting, steps, dtype = _Launches(), [], working_dtype(target)

    def note(engine: Engine, step: int) -> None:
        del step
        last = engine.scheduler._last
        steps.append((last is not None and not last.has_prefill and not last.writes, counting.number))

    options: dict[str, Any] = {
        "draft_tokens": K,
        "max_num_seqs": BATCH,
        "block_size": 16,
        "overlap": 0,
        "graph": "off",
        "dtype": dtype,
    }
    with target.engine(instruments=(counting,), **options) as engine:
        outputs = serve(engine, _asks(), tally, each_step=note)
        program = engine.runner.programs["greedy"]
        wanted = sum(e.contract != "forward_meta" for part in ("target", "draft") for e in program[part].entries)
    as_expected(tally, _asks(), outputs, K, target.rounding(dtype))
    grown = {after - before for (_, before), (quiet, after) in itertools.pairwise(steps) if quiet and after > before}
    tally.equal("launches of the steady steps", sorted(grown), [wanted])


def _copies(target: Target, tally: Tally) -> None:
    """A steady step brings one record down, and nothing up that did not change."""
    down = _steady(target, tally, lambda engine: engine.device.counters.downloads)
    up = _steady(target, tally, lambda engine: engine.device.counters.bytes_uploaded)
    tally.equal("downloads in each steady step", sorted(set(down)), [1])
    tally.equal("the same bytes go up in every steady step", len(set(up[1:])), 1)


def _tokens(target: Target, tally: Tally) -> None:
    """Tokens for each target forward are what the oracle's rounds give: drafting is on, and drafts are as good as they are."""
    engine = run(target, tally, _asks(), max_num_seqs=BATCH)
    rounds = [accepted for ask in _asks() for accepted in ask.expected(K).rounds]
    if target.rounding(working_dtype(target)) == "f32":
        tally.equal("accepted drafts", engine.totals.accepted, sum(rounds))
        tally.equal("rounds", engine.totals.rounds, len(rounds))
    mean = 1 + engine.totals.accepted / max(engine.totals.rounds, 1)
    tally.true(f"between 1 and {K + 1} tokens a round, and more than 1, got {mean:.2f}", 1 < mean <= K + 1)
    tally.equal("tokens", engine.totals.new_tokens, BATCH * NUM_TOKENS)


def _replays(target: Target, tally: Tally) -> None:
    """With graphs, steady steps are replayed, each of them."""
    steps = _steady(target, tally, lambda engine: engine.device.counters.graph_replays, graph="decode", graph_sizes=(BATCH,))
    tally.true(f"a replay or more in each steady step, got {sorted(set(steps))}", bool(steps) and min(steps) >= 1)
