"""Faults in core rather than in a backend: planning, lengths, buckets, the ledger.

`--prove` applies one while a check that should detect it runs, on whatever backend is being proved. Checks have to detect these
as well, since a kit that only detects a backend's faults would vouch for a broken core. Each fault is one function replaced while
its block lasts.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from polydraft import engine, engine_weights
from polydraft.engine import Engine
from polydraft.host import commit
from polydraft.host.kv_blocks import BlockLedger
from polydraft.host.scheduler import Scheduler
from polydraft.host.slots import SlotTable
from polydraft.models.block import Norm
from polydraft.models.decoder import EVERY_ROW, HIDDEN, Target
from polydraft.models.ranks import of_ranks
from polydraft.plugins import kernel_table
from polydraft.program.host_inputs import HostInputs
from polydraft.program.plan import StepOutcome, StepPlan
from polydraft.program.plan_bytes import PlanReader
from polydraft.proposers.mtp import MtpProposer
from polydraft.ranks import exchange
from polydraft.resolve import resolve
from polydraft.sampling import draft_vocab
from polydraft.step.graphs import CapturedSteps, GraphPolicy, Shape
from polydraft.step.runner import Runner

SKIPPED = 6
"""The step in which a rank does something else than the others."""
Fault = Callable[[], Any]
"""Makes a context manager in which core is broken."""


@contextmanager
def logit_rows_for_one_token_a_slot() -> Iterator[None]:
    """The capacity of logit rows counts slots, not slots times window."""

    def short(*args: Any, **options: Any) -> Any:
        found = resolve(*args, **options)
        return dataclasses.replace(found, limits=dataclasses.replace(found.limits, max_logit_rows=found.limits.max_seqs))

    with mock.patch.object(engine, "resolve", short):
        yield


@contextmanager
def a_leaf_a_rank() -> Iterator[None]:
    """Sums have as many leaves as there are ranks, whatever their number."""

    def one_leaf(model: Any, num_ranks: int, **options: Any) -> Any:
        share: Any = of_ranks(model, num_ranks, **options)
        change = dataclasses.replace
        halves = [(change(block.mixer, leaves=1), change(block.feed_forward, leaves=1)) for block in share.blocks]
        pairs = zip(share.blocks, halves, strict=True)
        return change(share, blocks=tuple(change(block, mixer=mixer, feed_forward=half) for block, (mixer, half) in pairs))

    with mock.patch.object(engine, "of_ranks", one_leaf):
        yield


@contextmanager
def scores_tokens_of_rank_0() -> Iterator[None]:
    """Where drafts are chosen among few tokens, every rank finds the scores of its own where rank 0 has those of its own."""
    places = draft_vocab.places_of
    with mock.patch.object(draft_vocab, "places_of", lambda ids, share, rank: places(ids, share)):
        yield


@contextmanager
def next_smaller_bucket() -> Iterator[None]:
    """A step is replayed in the largest bucket that is not larger than it."""

    def bucket(self: GraphPolicy, plan: StepPlan) -> int | None:
        size = plan.num_seqs if self.mode == "decode" and not plan.has_prefill else 0
        return next((b for b in reversed(self.buckets) if b <= size), self.buckets[0]) if size else None

    with mock.patch.object(GraphPolicy, "bucket", bucket):
        yield


@contextmanager
def lengths_stay_optimistic() -> Iterator[None]:
    """A step in flight counts as a whole window; what its drafts did not bring is never taken back."""
    advance, apply = Scheduler._advance, commit.apply

    def hopeful(self: Scheduler, plan: StepPlan) -> None:
        advance(self, plan)
        self.slots.in_flight_tokens[plan.slots] += np.where(plan.decode, self.limits.num_drafts, 0)

    def uncorrected(slots: SlotTable, ledger: BlockLedger, plan: StepPlan, outcome: StepOutcome, *rest: Any) -> Any:
        ended = apply(slots, ledger, plan, outcome, *rest)
        slots.in_flight_tokens[plan.slots] -= np.where(plan.decode, outcome.accepted, 0)
        return ended

    with mock.patch.object(Scheduler, "_advance", hopeful), mock.patch.object(engine, "apply", uncorrected):
        yield


@contextmanager
def freed_when_it_ends_and_again_when_drained() -> Iterator[None]:
    """A request's blocks are free as soon as it has ended, while steps of it are in flight, and once more behind them."""
    finished = Engine._finished

    def early(self: Engine, request: Any) -> None:
        finished(self, request)
        if request.slot >= 0 and self.slots.in_flight[request.slot]:
            held = int(self.ledger.num_granted[request.slot])
            for block in self.ledger.table[request.slot, :held].tolist():
                self.ledger._push(block)

    with mock.patch.object(Engine, "_finished", early):
        yield


@contextmanager
def tail_never_released() -> Iterator[None]:
    """The last block of a request, which a rejected window may have had to itself, is not given back."""
    release = BlockLedger.release

    def all_but_one(self: BlockLedger, slot: int) -> None:
        free = self._num_free
        release(self, slot)
        self._num_free = max(free, self._num_free - 1)

    with mock.patch.object(BlockLedger, "release", all_but_one):
        yield


@contextmanager
def draft_replays_another_bucket() -> Iterator[None]:
    """Target and draft do not follow one decision: the draft's passes are captured as for the smallest bucket."""
    capture = CapturedSteps._capture

    def at(launch: Any, n: int) -> Any:
        return lambda stream, longer: launch(stream, n)

    def other(self: CapturedSteps, parts: Any, shape: Shape) -> Any:
        short = self.policy.lengths(self.policy.buckets[0], self.limits)
        calls = tuple((at(launch, short[unit]), unit) for launch, unit in parts["draft"].calls) if "draft" in parts else ()
        return capture(self, {**parts, **({"draft": dataclasses.replace(parts["draft"], calls=calls)} if calls else {})}, shape)

    with mock.patch.object(CapturedSteps, "_capture", other):
        yield


@contextmanager
def arguments_unchecked() -> Iterator[None]:
    """Records go to providers as they are."""
    with mock.patch.object(kernel_table, "check_records", return_value=None):
        yield


@contextmanager
def host_inputs_go_up_once() -> Iterator[None]:
    """What the host works out in the middle of a step reaches the device in the first step alone."""
    upload, done = HostInputs.upload_middle, set[int]()

    def first(self: HostInputs, stream: Any, step_id: int, *, bound: bool) -> None:
        if id(self) not in done:
            done.add(id(self))
            upload(self, stream, step_id, bound=bound)

    with mock.patch.object(HostInputs, "upload_middle", first):
        yield


@contextmanager
def preempted_go_on_with_new_weights() -> Iterator[None]:
    """Before weights are replaced, only those requests end that hold a slot."""
    quiesce = Engine._quiesce

    def hasty(self: Engine, running: Any, step: Any) -> None:
        with mock.patch.object(Scheduler, "admissible", return_value=None):
            quiesce(self, running, step)

    with mock.patch.object(Engine, "_quiesce", hasty):
        yield


@contextmanager
def another_launch_order() -> Iterator[None]:
    """Steps are laid out in an order that the backend does not declare."""
    create = Scheduler.__init__

    def misled(self: Scheduler, *args: Any, **options: Any) -> None:
        create(self, *args, **options)
        self.row_order = "prefill_first" if self.row_order == "slot" else "slot"

    with mock.patch.object(Scheduler, "__init__", misled):
        yield


@contextmanager
def blocks_in_another_order() -> Iterator[None]:
    """No fault: blocks are handed out in an order of no meaning, as any ledger may."""
    create = BlockLedger.__init__

    def shuffled(self: BlockLedger, **sizes: Any) -> None:
        create(self, **sizes)
        np.random.default_rng(5).shuffle(self._free)

    with mock.patch.object(BlockLedger, "__init__", shuffled):
        yield


@contextmanager
def no_keep_part() -> Iterator[None]:
    """Steps without drafts leave the proposer's keys and values unwritten."""
    append = MtpProposer.append

    def silent(self: MtpProposer, program: Any, num_drafts: int) -> None:
        if num_drafts:
            append(self, program, num_drafts)
        else:
            program.add("begin_draft", "seqs", "begin_draft", num_drafts=0)

    with mock.patch.object(MtpProposer, "append", silent):
        yield


@contextmanager
def replays_the_rung_below() -> Iterator[None]:
    """A step is replayed by graphs that make fewer drafts than it was planned to, where there are such."""
    choose = CapturedSteps.choose

    def below(self: CapturedSteps, plan: StepPlan) -> Shape | None:
        shape = choose(self, plan)
        if shape is None:
            return None
        rungs = sorted({other.num_drafts for _, _, other in self._calls})
        return shape._replace(num_drafts=rungs[max(rungs.index(shape.num_drafts) - 1, 0)])

    with mock.patch.object(CapturedSteps, "choose", below):
        yield


@contextmanager
def _on_rank_1(place: Any, name: str, change: Callable[..., Any]) -> Iterator[None]:
    """A method, or a function of a module, is another one on the thread of rank 1, and ranks do not wait long: `change(real,
    argument, ...)`, of which the first is `self`."""
    real = getattr(place, name)

    def changed(*given: Any, **named: Any) -> Any:
        return change(real, *given, **named) if threading.current_thread().name == "rank 1" else real(*given, **named)

    with mock.patch.object(place, name, changed), mock.patch.object(exchange, "PATIENCE_S", 1.0):
        yield


def skips_a_draft_pass() -> Any:
    """A rank makes no drafts in one step in which the others do."""

    def run(real: Any, runner: Runner, piece: Any, flight: Any) -> None:
        if piece != "draft" or flight.plan.step_id != SKIPPED:
            real(runner, piece, flight)

    return _on_rank_1(Runner, "_run", run)


def runs_a_stale_plan() -> Any:
    """A rank runs the plan of the step before once more, where the others have got another one."""
    plans: list[StepPlan] = []

    def read(real: Any, reader: PlanReader, message: bytes | int) -> StepPlan:
        plans.append(real(reader, message))
        return plans[-2] if plans[-1].writes and not plans[-1].has_prefill else plans[-1]

    return _on_rank_1(PlanReader, "read", read)


def keeps_its_old_weights() -> Any:
    """A rank says that it has put its share of new weights in place, and has not."""

    def refill(real: Any, table: Any, updates: Any, *, dtype: str) -> bool:
        del real, table, updates, dtype
        return False

    return _on_rank_1(engine_weights, "refill", refill)


# -- taps ----------------------------------------------------------------------------------------------
@contextmanager
def taps_of_the_layer_before() -> Iterator[None]:
    """What a tap of layer i hands over is what enters the layer: its number is taken for that of its input."""
    tap = Target._tap

    def early(self: Target, program: Any, here: str) -> None:
        if here == "embedding":
            tap(self, program, here)
        tap(self, program, "layer 0" if here == "embedding" else f"layer {int(here.split()[1]) + 1}")

    with mock.patch.object(Target, "_tap", early):
        yield


@contextmanager
def taps_in_front_of_the_norm() -> Iterator[None]:
    """The tap behind the final norm has the rows in front of it."""
    emit = Norm.emit

    def raw(self: Norm, program: Any, weight: str, *, x: str, out: str, **where: Any) -> None:
        if weight == "norm" and x == HIDDEN and not out.startswith("draft."):
            program.add("gather_rows", where["unit"], where["stage"], x=x, index=EVERY_ROW, out=out)
        else:
            emit(self, program, weight, x=x, out=out, **where)

    with mock.patch.object(Norm, "emit", raw):
        yield


@contextmanager
def taps_of_other_rows() -> Iterator[None]:
    """Row i of a tap is row i - 1 of the target: the first of a sequence has that of another one, or padding."""
    made = Target.__init__

    def shifted(self: Target, *args: Any) -> None:
        made(self, *args)
        self.buffers = [
            dataclasses.replace(one, initial=np.asarray(one.initial) - 1) if one.name == EVERY_ROW else one
            for one in self.buffers
        ]

    with mock.patch.object(Target, "__init__", shifted):
        yield


@contextmanager
def taps_that_go_on() -> Iterator[None]:
    """A tap is no copy: it has the residual stream as it is in the end, which went on behind the point."""
    tap = Target._tap

    def late(self: Target, program: Any, here: str) -> None:
        if here == f"layer {len(self.blocks) - 1}":
            for point in sorted({*self._taps.values()} - {"final"}):
                tap(self, program, point)

    with mock.patch.object(Target, "_tap", late):
        yield
