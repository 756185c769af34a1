"""The records that the host and the runner exchange: `StepPlan` goes in, `StepOutcome` comes out, `StepWidth` is kept of a plan.

The scheduler makes plans, the runner turns each into launches and later into an outcome, commit applies outcomes. Both are plain
and frozen; neither refers to a request object, so a plan could come from another process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from polydraft.device import Array
from polydraft.program.columns import Writes
from polydraft.program.packed import PackedLogprobs


class StepWidth(NamedTuple):
    """How much a step verifies and drafts: `window` (its W), rows that it verifies for a slot at most, and `num_drafts` (its K),
    drafts that it makes for one at most."""

    window: int
    num_drafts: int


@dataclass(frozen=True)
class StepPlan:
    """One step as the host knows it. Arrays are int32 and belong to the plan (never rewritten).

    `slots` [n] intp: scheduled slots in launch order, as an index: with int32 NumPy takes three times as long. `rows`, `epochs`
    [n]: the rows each may fill (chunk length, or the window), and the epoch of the request in it. `decode`, `emits` [n] bool:
    runs a window; puts out at least one token unless paused. `in_flight_counts` [4, B] int64: by slot, what the step adds to
    those of the slot table while it is in flight.
    `window`: rows that a decoding slot verifies at most, those that the step before drafted and one. `num_drafts`: drafts that
    the step makes for a slot at most. A request may allow fewer, and the device has what it has: both are upper bounds.
    `writes`: what the step stages for slot columns.
    `num_rows`, `num_logit_rows`: upper bounds of what the device will pack. A plan with the same `slots` object as
    the previous one also has everything else that follows from which requests run, such as the requested log probabilities.
    """

    step_id: int
    slots: Array
    rows: Array
    epochs: Array
    decode: Array
    emits: Array
    in_flight_counts: Array
    writes: Writes
    num_rows: int
    num_logit_rows: int
    window: int
    num_drafts: int
    has_prefill: bool
    sampling: bool
    """Some scheduled slot samples (temperature above 0)."""
    drafting: bool = True
    """Some scheduled slot may have drafts verified (in this step or a later one). Otherwise nobody needs the drafts that the
    step would make, nor the rows of the proposer's cache."""
    processed: bool = False
    """Some scheduled slot has its logits processed."""
    bound: bool = False
    """A grammar binds the output of some scheduled slot."""
    num_top: Array | None = None
    """[B] by slot: most likely tokens wanted beside each emitted one, -1 for none at all; None: no scheduled slot wants any."""
    prompt_top: Array | None = None
    """Likewise of prompt tokens, of slots that have prompt rows in this step."""
    num_prompt_rows: int = 0
    """Rows of the step that predict a prompt token whose log probability is requested."""

    @property
    def num_seqs(self) -> int:
        return len(self.slots)

    @property
    def num_made(self) -> int:
        """Drafts that the step makes for a slot at most, counted for statistics: 0 if no scheduled slot may have drafts verified.
        The runner then enqueues no draft passes; those inside a graph of the whole step are replayed, and not counted."""
        return self.num_drafts if self.drafting else 0

    @property
    def width(self) -> StepWidth:
        """How much of it is for a slot."""
        return StepWidth(self.window, self.num_made)

    def again(self, step_id: int, writes: Writes, num_drafts: int) -> StepPlan:
        """The plan of a step after one without prefill, for the very same slots and windows: all arrays are the same ones, so
        that staging need not send them, and only blocks may be new, and the number of drafts another. Unlike `replace` it costs
        next to nothing, and most plans are made so."""
        plan = object.__new__(StepPlan)
        vars(plan).update(vars(self), step_id=step_id, writes=writes, num_drafts=num_drafts)
        return plan


class Drafted(NamedTuple):
    """What a step has drafted for one slot: the drafts [n] int32 that a model made, and the bits of the state that it fed back
    last, b"" where that is not of all the step's drafts."""

    drafts: Array
    state: bytes


@dataclass(frozen=True)
class StepOutcome:
    """What one step did, by sequence in launch order; int32 arrays [n] and `tokens` [n, W] (NO_TOKEN beyond `num_tokens`).
    `slots` are those of the plan.

    `accepted`: drafts of this round that became output. `drafted`: drafts that were verified, -1 where the sequence had no
    decode round (a prefill chunk, a finished or paused slot).
    """

    step_id: int
    slots: Array
    epochs: Array
    num_tokens: Array
    accepted: Array
    drafted: Array
    finish: Array
    phase: Array
    kv_len: Array
    tokens: Array
    looked_up: Array | None = None
    """[n] of the drafts verified those, the last ones, that were looked up; None: no proposer does so beside a model."""
    logprobs: PackedLogprobs | None = None
    """Of the tokens, for the sequences whose slot wants them, and of prompt tokens; None if none are requested."""

    def of(self, some: Array) -> StepOutcome:
        """What it did to these sequences, [n] bool; log probabilities are those of all."""
        by_sequence = ("slots", "epochs", "num_tokens", "accepted", "drafted", "finish", "phase", "kv_len", "tokens")
        looked_up = None if self.looked_up is None else self.looked_up[some]
        return replace(self, **{name: getattr(self, name)[some] for name in by_sequence}, looked_up=looked_up)
