"""Host inputs: pinned arrays that features fill on the host, when they are filled, and their upload into a step.

A feature (a proposer that drafts on the host, the masks of a grammar) says what it `needs` to know and fills its arrays when the
engine calls it; the runner uploads them. Nothing here waits for the device or decides who runs.

A step meets its host inputs in one of two places. Those that need no result of the previous step are filled before the launch and
go up with the plan. Those that need the tokens of the previous step meet a step in its middle: the target's pass is launched, the
snapshot of the previous step is applied while it runs, the arrays are filled and go up on a separate stream, and the second half
of the step, from the processing of logits on, is launched after an event. Drafts for the next step are made after that.

| `needs` | filled | knows | costs |
|---|---|---|---|
| `none` | before the launch | the plan | nothing |
| `upper_bound_lengths` | before the launch | the plan, and how long each text is at most | nothing |
| `previous_tokens` | after the target's launch | every earlier step | a step is launched in two halves, at most one is ahead |
| `exact_lengths` | before the launch | every earlier step | all overlap: no step is launched before the last was applied |

A feature that serves bound requests alone (`for_bound`) takes part in steps that have one, and no other step is split for it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from polydraft.device import Array, Staging, Stream, further_stream

if TYPE_CHECKING:
    from polydraft.host.slots import SlotTable
    from polydraft.program.declare import StepBuffer
    from polydraft.program.plan import StepPlan
    from polydraft.program.program import Memory, ProgramBuilder
    from polydraft.proposers.base import ProposerContext

Needs = Literal["none", "upper_bound_lengths", "previous_tokens", "exact_lengths"]
MIDDLE: Needs = "previous_tokens"
"""What makes a step meet the host in its middle."""
BLOCKING: Needs = "exact_lengths"
"""What makes a step wait for the one before."""


@dataclass(frozen=True)
class HostView:
    """What the host knows when a feature fills its arrays for `plan`. Only `needs` says what of it may be relied on.

    `slots`: with `previous_tokens` and `exact_lengths` every step before has been applied, so `slots.tokens[slot]` and
    `slots.num_known[slot]` are the texts that the step starts from (of a slot that is `draining` nothing counts any more).
    `drafts` [B, K], `draft_len` [B] int32 by slot: drafts that wait, for features that read drafts; to be believed where
    `plan.decode` holds. Of sequence i the step verifies the first `plan.rows[i] - 1` at most. With the lesser needs all of
    these may be as many steps old as the engine overlaps."""

    plan: StepPlan
    slots: SlotTable
    drafts: Array
    draft_len: Array

    @property
    def most_known(self) -> Array:
        """[n] int64, by sequence: tokens that are known at most when the step starts, whatever is in flight."""
        t, plan, ids = self.slots, self.plan, self.plan.slots
        before = t.in_flight_rows[ids] - plan.decode * plan.window  # the step itself counts as in flight already
        first = t.in_flight_tokens[ids] - t.in_flight_decode[ids] - (plan.emits & ~plan.decode)
        most: Array = np.minimum(t.num_known[ids] + before + first, t.max_total[ids])
        return most


class HostFeature(Protocol):
    """Something that brings host data into every step; with an attribute `for_bound` that is true, which needs `previous_tokens`,
    into steps with a request that a grammar binds (`StepPlan.bound`). The drafts that such a feature reads are to be believed of
    requests that are bound."""

    @property
    def name(self) -> str:
        """What `--explain` and errors call it."""

    @property
    def needs(self) -> Needs: ...
    @property
    def reads_drafts(self) -> bool:
        """Whether `HostView.drafts` is wanted: the drafts of every step are then copied to the host, too, and its event stands
        after the draft passes. Only with `previous_tokens` and `exact_lengths`."""

    @property
    def buffers(self) -> Sequence[StepBuffer]:
        """What the feature works in, with defined contents."""

    @property
    def inputs(self) -> Sequence[str]:
        """Names of the buffers to be filled: its own, or slot columns."""

    def fill(self, view: HostView, arrays: Mapping[str, Array]) -> int:
        """Write the first n rows of each array (by the name of its buffer), which are pinned and hold anything before, and
        return n; 0: nothing goes up in this step, and the device keeps what it has. Row i belongs to sequence i of
        `view.plan.slots` unless the feature's kernels read it otherwise. Must not raise because of one request."""

    def append(self, program: ProgramBuilder) -> None:
        """Append launches on the target's logits, after their processing and before tokens are chosen; called once for each
        kind of step. A feature whose buffers are read elsewhere (a proposer's) appends nothing. With `exact_lengths`, `none`
        and `upper_bound_lengths` any launch of the step may read the buffers, with `previous_tokens` those from here on."""

    def reset(self) -> None:
        """The device has failed and serves on: what it was sent may be lost, so nothing that it had counts as there."""


class FeatureFactory(Protocol):
    """Builds a feature for an engine. What it says of itself is asked before anything is built, and holds for the feature."""

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> Needs: ...
    def __call__(self, context: ProposerContext) -> HostFeature:
        """Build the feature, which allocates nothing."""


def _for_bound(feature: HostFeature) -> bool:
    return bool(getattr(feature, "for_bound", False))


class _Staged:
    """A feature with its pinned arrays, one set for every step that can be in flight and the one being filled."""

    def __init__(self, memory: Memory, feature: HostFeature, sets: int) -> None:
        self.feature, self.rows = feature, 0
        self.buffers = {name: memory.buffers[name] for name in feature.inputs}
        self.sets: list[dict[str, Staging]] = [
            {name: memory.device.staging(f"inputs{i}.{name}", b.shape, b.dtype) for name, b in self.buffers.items()}
            for i in range(sets)
        ]


class HostInputs:
    """All features of an engine. What a step needs of them depends on whether it is bound (`StepPlan.bound`)."""

    def __init__(self, memory: Memory, features: Sequence[HostFeature], depth: int) -> None:
        device, drafts = memory.device, (memory.buffers["drafts"], memory.buffers["draft_len"])
        self._device, self._depth = device, depth
        staged = [_Staged(memory, feature, depth + 1) for feature in features]
        self._first = [one for one in staged if one.feature.needs != MIDDLE]
        self._middle = {
            bound: [one for one in staged if one.feature.needs == MIDDLE and (bound or not _for_bound(one.feature))]
            for bound in (False, True)
        }
        self.features = tuple(features)
        self.fills_first = bool(self._first)
        """Whether some arrays are filled before a launch."""
        self.tells_bound = any(_for_bound(feature) for feature in features)
        """Whether bound steps have programs of their own."""
        self._reads_drafts = {bound: any(feature.reads_drafts for feature in self.of(bound=bound)) for bound in (False, True)}
        self.drafts, self.draft_len = (np.zeros(buffer.shape, np.int32) for buffer in drafts)
        self._sources = drafts
        self._landing = [
            tuple(device.staging(f"{buffer.name}{i}", buffer.shape, "i32") for buffer in drafts)
            for i in range(depth + 1 if self.reads_drafts(bound=True) else 0)
        ]
        self._in_use = False
        """Whether a step that was enqueued may still read the buffers."""
        if self.splits(bound=True):
            self._stream = further_stream(device, "inputs")
            self._uploaded, self._consumed = device.event(), device.event()

    @property
    def always(self) -> bool:
        """Whether features take part in every step."""
        return self.fills_first or bool(self.of(bound=False))

    def of(self, *, bound: bool) -> list[HostFeature]:
        """The features that take part in a step."""
        return [feature for feature in self.features if bound or not _for_bound(feature)]

    def splits(self, *, bound: bool) -> bool:
        """Whether a step is launched in two halves."""
        return bool(self._middle[bound])

    def reads_drafts(self, *, bound: bool) -> bool:
        """Whether the drafts of a step are copied to the host."""
        return self._reads_drafts[bound]

    # -- down --------------------------------------------------------------------------------------
    def fill(self, view: HostView, *, middle: bool) -> None:
        """Have the features of one place fill their arrays for a step."""
        index = view.plan.step_id % (self._depth + 1)
        for one in self._middle[view.plan.bound] if middle else self._first:
            one.rows = one.feature.fill(view, {name: staging.array for name, staging in one.sets[index].items()})

    def filled(self, plan: StepPlan, *, middle: bool) -> tuple[bytes, list[memoryview]]:
        """What was filled for a step, for an engine that fills nothing itself (`take`): rows of each feature, and of its arrays
        these."""
        index, some = plan.step_id % (self._depth + 1), self._middle[plan.bound] if middle else self._first
        rows = struct.pack(f"={len(some)}q", *(one.rows for one in some))
        arrays = [(staging.array, one.rows) for one in some if one.rows for staging in one.sets[index].values()]
        return rows, [array[:count].reshape(-1).view(np.uint8).data for array, count in arrays]

    def take(self, filled: memoryview, step_id: int, *, bound: bool, middle: bool) -> None:
        """Fill as another engine has filled for this step; `filled`: what `filled` of that one has told, joined."""
        some = self._middle[bound] if middle else self._first
        rows, begin = struct.unpack_from(f"={len(some)}q", filled), 8 * len(some)
        for one, count in zip(some, rows, strict=True):
            one.rows = count
            for staging in one.sets[step_id % (self._depth + 1)].values() if count else ():
                into: Array = staging.array[:count].reshape(-1).view(np.uint8)
                into[:] = np.frombuffer(filled, np.uint8, into.size, begin)
                begin += into.size

    def upload_first(self, stream: Stream, step_id: int) -> None:
        """Enqueue what was filled before the launch."""
        self._upload(self._first, stream, step_id)

    def upload_middle(self, stream: Stream, step_id: int, *, bound: bool) -> None:
        """Enqueue what was filled for a launched step on the stream of inputs, after whatever read the buffers in the step
        before, and let `stream` wait for it. Never blocks the host."""
        if self._in_use:
            self._stream.wait(self._consumed)
        self._upload(self._middle[bound], self._stream, step_id)
        self._uploaded.record(self._stream)
        stream.wait(self._uploaded)

    def _upload(self, some: Iterable[_Staged], stream: Stream, step_id: int) -> None:
        for one in some:
            for name, staging in one.sets[step_id % (self._depth + 1)].items() if one.rows else ():
                self._device.upload(stream, one.buffers[name], staging, one.rows)

    def consumed(self, stream: Stream) -> None:
        """A whole step in two halves is enqueued: after this point of its stream the buffers may be overwritten."""
        self._consumed.record(stream)
        self._in_use = True

    def reset(self) -> None:
        """Everything in flight is void, and the device is idle: there is nothing left to wait for."""
        self._in_use = False
        for feature in self.features:
            feature.reset()

    # -- up ----------------------------------------------------------------------------------------
    def download_drafts(self, stream: Stream, step_id: int) -> None:
        """Enqueue the copy of the drafts that a step has made."""
        for staging, source in zip(self._landing[step_id % (self._depth + 1)], self._sources, strict=True):
            self._device.download(stream, staging, source, source.shape[0])

    def collect_drafts(self, step_id: int) -> None:
        """Take over the drafts of a step whose event has completed."""
        drafts, lens = self._landing[step_id % (self._depth + 1)]
        self.drafts, self.draft_len = drafts.array.copy(), lens.array.copy()
