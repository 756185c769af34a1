"""Graph policy: which steps are replayed, in which buckets, how they are captured, and what that costs.

The runner asks it once per step whether to replay, and target and draft follow the same answer. A backend only captures and
replays (`polydraft_graph_capture`): buckets, order, warm-up, splitting and refusals are decided here, for every backend alike.

A captured step is a pure function of fixed buffers. Its launch lengths are those of its bucket; rows beyond the real ones carry
negative slots, which every kernel skips, so nothing has to be padded or truncated besides the launch order. Shapes do not depend
on how many drafts are accepted (the draft's first pass runs over the target's rows), so the warm-up needs no requests: it runs
the same launches that are captured, over an empty launch order.

A decode step is one graph, from packing to the last draft pass, followed by the copy of its snapshot, wherever the host reads a
snapshot one step late anyway. It is captured in parts where something comes between them: host inputs, or, without overlap, a
host that waits for the snapshot while the drafts are still being made.

Where steps make different numbers of drafts, a bucket is captured once for each number: windows of K + 1 rows, then K drafts. A
step that verifies the drafts of a step with more or fewer drafts is replayed in the larger of the two: its launch order cuts the
rows, and drafts that it makes beyond the plan's are not verified. Graphs for fewer drafts than the maximum have a budget, and
where one is left out the next larger one serves.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from polydraft.contracts.base import Limits
from polydraft.device import Device, GraphCapture, Launch, Stream
from polydraft.loading import Loading, unheard
from polydraft.program.plan import StepPlan
from polydraft.program.program import Lengths, Program, StepContext, lengths

Mode = Literal["off", "decode", "prefill"]
Part = Literal["target", "verify", "draft"]
"""The programs of one step, in launch order. Only a step that takes host inputs in its middle has a part "verify"; elsewhere
"target" includes it."""
Piece = Part | Literal["step"]
"""What one capture covers: a single part, or all parts of a step together ("step")."""
WARM_UPS = 2
"""Eager runs of a bucket before it is captured: run-time compilers and library handles settle there."""
MOST_CAPTURES = 512
"""Number of graphs of an engine beyond which none are captured for fewer drafts than the maximum; those for the maximum are
always captured."""

LEAST_FREE = 1 << 28
"""Bytes of device memory that such graphs leave free, on a device that reports its free memory."""


class Shape(NamedTuple):
    """What a graph was captured for: the bucket, and the drafts that the step makes, which fit the windows that it verifies."""

    bucket: int
    num_drafts: int


def default_buckets(largest: int) -> tuple[int, ...]:
    """Bucket sizes up to `largest`: 1, 2, 4, then every 8, 16 from 144 on, 32 from 288 on, and `largest` itself.

    The spacing is the one FastDeploy and vLLM settled on: waste below an eighth where it matters, few graphs."""
    steps = (1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, 4097, 32))
    return tuple(sorted({size for size in steps if size < largest} | {largest}))


@dataclass(frozen=True)
class GraphPolicy:
    """What is captured. `buckets` count running sequences (mode "decode") or packed rows (mode "prefill"), ascending."""

    mode: Mode
    buckets: tuple[int, ...]
    most_captures: int = MOST_CAPTURES

    def bucket(self, plan: StepPlan) -> int | None:
        """The bucket that replays this plan, or None: not this kind of step, or larger than the largest bucket."""
        if self.mode == "decode":
            size = 0 if plan.has_prefill else plan.num_seqs
        elif self.mode == "prefill":
            size = 0 if bool(plan.decode.any()) else plan.num_rows
        else:
            return None
        place = bisect.bisect_left(self.buckets, size)
        return self.buckets[place] if size and place < len(self.buckets) else None

    def wanted(self, plan: StepPlan) -> int:
        """Drafts that a graph must have room for to replay this plan."""
        if self.mode == "prefill":
            return plan.num_drafts
        return max(plan.window - 1, plan.num_drafts) if plan.drafting else 0

    def lengths(self, bucket: int, limits: Limits, num_drafts: int | None = None) -> Lengths:
        """Launch lengths of a bucket, where steps verify `num_drafts` drafts of each slot (None: the most)."""
        if self.mode == "decode":
            rows = bucket * (limits.window if num_drafts is None else num_drafts + 1)
            return lengths(rows=rows, logit_rows=rows, seqs=bucket)
        return lengths(rows=bucket, logit_rows=min(bucket, limits.max_seqs), seqs=min(bucket, limits.max_seqs))


@dataclass
class GraphCounters:
    """What graphs did: captured pieces, replayed steps, and steps that ran eagerly by kind of reason."""

    captured: int = 0
    replayed_steps: int = 0
    eager_steps: int = 0
    too_large: int = 0
    """Steps of the captured kind that no bucket was large enough for."""


@dataclass
class Held:
    """The graphs for one number of drafts: buckets that were captured, and that the budget left out, ascending; how many graphs,
    and the device memory that they took, in bytes (0 where the device does not report it)."""

    buckets: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()
    graphs: int = 0
    num_bytes: int = 0


@dataclass
class CapturedSteps:
    """Captured programs by (kind, piece, shape), each a list of calls: graph replays, and eager launches between them where
    a backend declares contracts that cannot be captured."""

    device: Device
    capture: GraphCapture
    policy: GraphPolicy
    limits: Limits
    context: StepContext
    uncapturable: frozenset[str] = frozenset()
    whole: bool = False
    """Whether the parts of a step are captured together, as piece "step", unless host inputs come between them."""
    everywhere: Callable[[bool], bool] = bool
    """Whether something is so on all ranks: they capture the same, since they run together what they capture."""
    counters: GraphCounters = field(default_factory=GraphCounters)
    held: dict[int, Held] = field(default_factory=dict)
    """What there is for each number of drafts, the most first."""
    _shapes: dict[int, tuple[Shape, ...]] = field(default_factory=dict)
    """By bucket: what is captured, the fewest drafts first."""
    _calls: dict[tuple[str, Piece, Shape], tuple[Callable[[Stream], None], ...]] = field(default_factory=dict)

    def capture_all(self, programs: dict[str, dict[int, dict[Part, Program]]], loading: Loading = unheard) -> None:
        """Capture the parts of every kind of step, by the number of drafts that it makes, for every bucket: those of the most
        drafts first, and of them those of the largest bucket, so that later ones fit into the pool of the first.

        The launch order on the device must be empty. Called before the first step and after a weight update that moved an
        address; earlier captures are dropped. `loading` is told before the first and after each shape."""
        self._calls.clear()
        self.counters.captured = 0
        rungs = sorted({rung for kind in programs.values() for rung in kind}, reverse=True)
        self.held = {rung: Held() for rung in rungs}
        self._shapes = dict.fromkeys(self.policy.buckets, ())
        self.context.has_prefill = self.policy.mode == "prefill"
        try:
            shapes = [Shape(bucket, rung) for rung in rungs for bucket in reversed(self.policy.buckets)]
            loading("graphs", 0, len(shapes))
            for done, shape in enumerate(shapes, 1):
                pieces = [(k, p, parts) for k, by in programs.items() for p, parts in self._pieces(by[shape.num_drafts]).items()]
                self._capture_shape(shape, pieces, always=shape.num_drafts == rungs[0])
                loading("graphs", done, len(shapes))
        finally:
            self.context.has_prefill = False

    def _capture_shape(self, shape: Shape, pieces: Sequence[tuple[str, Piece, dict[Part, Program]]], *, always: bool) -> None:
        """Capture all kinds of step of one shape, so that whether there is a graph does not depend on the kind; unless the budget
        is used up, on any rank."""
        held, before, ask = self.held[shape.num_drafts], self.counters.captured, getattr(self.device, "free_memory", None)
        free = ask() if ask else 0
        fits = before + len(pieces) <= self.policy.most_captures and (ask is None or free >= LEAST_FREE)
        if not (always or self.everywhere(fits)):
            held.left_out = (shape.bucket, *held.left_out)
            return
        for kind, piece, parts in pieces:
            self._calls[kind, piece, shape] = self._capture(parts, shape)
        held.buckets = (shape.bucket, *held.buckets)
        held.graphs += self.counters.captured - before
        held.num_bytes += max(free - ask(), 0) if ask else 0
        self._shapes[shape.bucket] = (shape, *self._shapes[shape.bucket])

    def _pieces(self, parts: dict[Part, Program]) -> dict[Piece, dict[Part, Program]]:
        """What is captured by itself of one kind of step, and the parts it is made of."""
        if self.whole and "verify" not in parts:
            return {"step": parts}
        return {part: {part: program} for part, program in parts.items()}

    def _capture(self, parts: dict[Part, Program], shape: Shape) -> tuple[Callable[[Stream], None], ...]:
        stream, lengths = self.device.stream, self.policy.lengths(shape.bucket, self.limits, shape.num_drafts)
        self.context.real_slots = shape.bucket
        calls = [
            (self.uncapturable.isdisjoint(contract.split("+")), _at(launch, lengths[unit]))
            for program in parts.values()
            for contract, launch, unit in program.recorded()
        ]
        for _ in range(WARM_UPS):
            _run((call for _, call in calls), stream)
        self.device.synchronize()
        replayed: list[Callable[[Stream], None]] = []
        for capturable, run in runs(calls):
            if capturable:
                replayed.append(self.capture.capture(stream, functools.partial(_run, run, stream)).replay)
                self.counters.captured += 1
            else:
                replayed += run
        return tuple(replayed)

    def choose(self, plan: StepPlan) -> Shape | None:
        """The shape to replay this step in, or None for an eager step; counted. The one decision of a step."""
        bucket = self.policy.bucket(plan)
        if bucket is not None:
            self.counters.replayed_steps += 1
            shapes = self._shapes[bucket]
            if len(shapes) == 1:
                return shapes[0]
            wanted = self.policy.wanted(plan)
            return next(shape for shape in shapes if shape.num_drafts >= wanted)
        self.counters.eager_steps += 1
        if self.policy.mode == "decode" and not plan.has_prefill:
            self.counters.too_large += 1
        return None

    def replay(self, kind: str, piece: Piece, shape: Shape) -> None:
        """Enqueue a captured piece of the step."""
        stream = self.device.stream
        for call in self._calls[kind, piece, shape]:
            call(stream)


Call = Callable[[Stream], None]


def runs(calls: Iterable[tuple[bool, Call]]) -> list[tuple[bool, tuple[Call, ...]]]:
    """Split calls, each with whether it can be captured, where that changes; whole when all can."""
    return [(able, tuple(call for _, call in run)) for able, run in itertools.groupby(calls, key=operator.itemgetter(0))]


def _at(launch: Launch, n: int) -> Call:
    return lambda stream: launch(stream, n)


def _run(calls: Iterable[Call], stream: Stream) -> None:
    for call in calls:
        call(stream)
