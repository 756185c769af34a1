"""Owns graph policy: which steps are replayed, in which buckets, how they are captured, and what that costs.

The runner asks it once a step whether to replay, and target and draft follow the same answer. A backend only captures and
replays (`polydraft_graph_capture`): buckets, order, warm-up, splitting and refusals are decided here, for every backend alike.

A captured step is a pure function of fixed buffers. Its launch lengths are those of its bucket; rows beyond the real ones carry
negative slots, which every kernel skips, so nothing has to be padded or truncated besides the launch order. Shapes do not
depend on how many drafts are accepted (the draft's first pass runs over the target's rows), so the warm-up needs no
requests: it runs the very launches that are captured, over an empty launch order.

A decode step is one graph, from packing to the last draft pass, with its snapshot's copy behind it, wherever the host reads a
snapshot a step late anyway. It is captured in parts where something stands between them: host inputs, or, without overlap, a
host that waits for the snapshot while the drafts are still being made.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from polydraft.contracts.base import Limits
from polydraft.device import Device, GraphCapture, Launch, Stream
from polydraft.runtime.plan import StepPlan
from polydraft.runtime.program import Lengths, Program, StepContext, lengths

Mode = Literal["off", "decode", "prefill"]
Part = Literal["update", "target", "verify", "draft"]
"""What a step's programs are called, in their order; staged writes ("update") are never captured. Only a step that meets host
inputs in its middle has a part "verify": elsewhere it is one with "target"."""
Piece = Part | Literal["step"]
"""What is captured by itself: a part, or all parts of a step together."""
WARM_UPS = 2
"""Eager runs of a bucket before it is captured: run-time compilers and library handles settle there."""


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

    def lengths(self, bucket: int, limits: Limits) -> Lengths:
        """Launch lengths of a bucket."""
        if self.mode == "decode":
            rows = bucket * limits.window
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
class CapturedSteps:
    """Captured programs by (kind, piece, bucket), each a list of calls: graph replays, and eager launches between them where
    a backend declares contracts that cannot be captured."""

    device: Device
    capture: GraphCapture
    policy: GraphPolicy
    limits: Limits
    context: StepContext
    uncapturable: frozenset[str] = frozenset()
    whole: bool = False
    """Whether the parts of a step are captured together, as piece "step"."""
    counters: GraphCounters = field(default_factory=GraphCounters)
    _calls: dict[tuple[str, Piece, int], tuple[Callable[[Stream], None], ...]] = field(default_factory=dict)

    def capture_all(self, programs: dict[str, dict[Part, Program]], progress: Callable[[int, int], None] | None = None) -> None:
        """Capture every bucket of every kind, largest first, so that later ones fit into the pool of the first.

        The launch order on the device must be empty. Called before the first step and after a weight update that moved an
        address; earlier captures are dropped."""
        self._calls.clear()
        self.counters.captured = 0
        todo = [
            (bucket, kind, piece, captured)
            for bucket in reversed(self.policy.buckets)
            for kind, parts in programs.items()
            for piece, captured in self._pieces(parts).items()
        ]
        self.context.use_graph, self.context.dummy, self.context.has_prefill = True, True, self.policy.mode == "prefill"
        try:
            for done, (bucket, kind, piece, captured) in enumerate(todo):
                self._calls[kind, piece, bucket] = self._capture(captured, bucket)
                if progress:
                    progress(done + 1, len(todo))
        finally:
            self.context.use_graph, self.context.dummy, self.context.has_prefill = False, False, False

    def _pieces(self, parts: dict[Part, Program]) -> dict[Piece, dict[Part, Program]]:
        """What is captured by itself of one kind of step, and the parts it is made of."""
        captured: dict[Part, Program] = {part: program for part, program in parts.items() if part != "update"}
        if self.whole:
            return {"step": captured}
        return {part: {part: program} for part, program in captured.items()}

    def lengths(self, part: Part, bucket: int) -> Lengths:
        """Launch lengths of a part in a bucket: those of the bucket, for every part of a step alike."""
        del part
        return self.policy.lengths(bucket, self.limits)

    def _capture(self, parts: dict[Part, Program], bucket: int) -> tuple[Callable[[Stream], None], ...]:
        stream = self.device.stream
        self.context.real_slots = bucket
        calls = [
            (entry.contract not in self.uncapturable, _at(launch, self.lengths(part, bucket)[unit]))
            for part, program in parts.items()
            for entry, (launch, unit) in zip(program.entries, program.calls, strict=True)
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

    def choose(self, plan: StepPlan) -> int | None:
        """The bucket to replay this step with, or None for an eager step; counted. The one decision of a step."""
        bucket = self.policy.bucket(plan)
        if bucket is not None:
            self.counters.replayed_steps += 1
            return bucket
        self.counters.eager_steps += 1
        if self.policy.mode == "decode" and not plan.has_prefill:
            self.counters.too_large += 1
        return None

    def replay(self, kind: str, piece: Piece, bucket: int) -> None:
        """Enqueue a captured piece of the step."""
        stream = self.device.stream
        for call in self._calls[kind, piece, bucket]:
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
