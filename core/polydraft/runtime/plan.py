"""Owns the two records that cross the runner's border: `StepPlan` in, `StepOutcome` out, nothing else.

The scheduler makes plans, the runner turns each into launches and later into an outcome, commit applies outcomes. Both are
plain, frozen and versioned; neither refers to a request object, so a plan could come from another process.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from polydraft.device import Array
from polydraft.runtime.packed import PackedLogprobs

PLAN_VERSION = 1


@dataclass(frozen=True)
class StepPlan:
    """One step as the host knows it. Arrays are int32 and belong to the plan (never rewritten).

    `slots` [n] intp: scheduled slots in launch order, as an index: with int32 NumPy takes three times as long. `rows`, `epochs`
    [n]: the rows each may fill (chunk length, or the window), and the epoch of the request in it. `decode`, `emits` [n] bool:
    runs a window; puts out at least one token unless paused. `flights` [3, B] int64: by slot, what the step adds to those of
    the slot table while it is in flight.
    `slot_updates` [U, F], `token_updates` [T, 3], `block_updates` [M, 3], `bias_updates` [J, 4], `bad_word_updates` [Y, 3]:
    staged writes.
    `num_rows`, `num_logit_rows`: upper bounds of what the device will pack. A plan with the very `slots` of the one before has
    all else that follows from who runs, too, wishes for log probabilities among it.
    """

    step_id: int
    slots: Array
    rows: Array
    epochs: Array
    decode: Array
    emits: Array
    flights: Array
    slot_updates: Array
    token_updates: Array
    block_updates: Array
    num_rows: int
    num_logit_rows: int
    has_prefill: bool
    sampling: bool
    """Some scheduled slot samples (temperature above 0)."""
    drafting: bool = True
    """Some scheduled slot has drafts verified; else nobody needs those that the step would make."""
    processed: bool = False
    """Some scheduled slot has its logits processed; only such a step may bring updates of biases and bad words."""
    bias_updates: Array = field(default_factory=lambda: np.empty((0, 4), np.int32))
    bad_word_updates: Array = field(default_factory=lambda: np.empty((0, 3), np.int32))
    num_top: Array | None = None
    """[B] by slot: most likely tokens wanted beside each emitted one, -1 for none at all; None: no scheduled slot wants any."""
    drawn_top: Array | None = None
    """The same of slots that sample, -1 for the others."""
    prompt_top: Array | None = None
    """Likewise of prompt tokens, of slots that have prompt rows in this step."""
    num_prompt_rows: int = 0
    """Rows of the step that predict a prompt token somebody wants to know of."""
    version: int = PLAN_VERSION

    @property
    def num_seqs(self) -> int:
        return len(self.slots)

    def again(self, step_id: int, block_updates: Array) -> StepPlan:
        """The plan of a step after one without prefill, for the very same slots: all arrays are the same ones, so that staging
        need not send them, and only blocks may be new. Unlike `replace` it costs next to nothing, and most plans are made so."""
        plan = object.__new__(StepPlan)
        vars(plan).update(vars(self), step_id=step_id, block_updates=block_updates)
        return plan


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
    logprobs: PackedLogprobs | None = None
    """Of the tokens, for the sequences whose slot wants them, and of prompt tokens; None where nobody wants any."""
    version: int = PLAN_VERSION

    def of(self, some: Array) -> StepOutcome:
        """What it did to these sequences, [n] bool; log probabilities are those of all."""
        by_sequence = ("slots", "epochs", "num_tokens", "accepted", "drafted", "finish", "phase", "kv_len", "tokens")
        return replace(self, **{name: getattr(self, name)[some] for name in by_sequence})
