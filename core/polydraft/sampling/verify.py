"""From logits to windows: processing, the choice of a token, verification; for each kind of step.

The runner appends the launches of target rows, proposers those of draft rows through `choose`, so that a draft is chosen by
the very rules that it is later held against.

With `coupled` verification (kind "sampling") a draft shares the noise of the position it stands for. With `rejection` it has
noise of its own, and the distribution it was drawn from is kept until the target has judged it. Randomness is keyed by (seed,
position, draw), and a position is judged once: a draft that was dropped before that may be drawn again with the same noise,
since nothing that was put out depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from polydraft.contracts import contract_named
from polydraft.contracts.base import Unit
from polydraft.models.decoder import share_of
from polydraft.program.declare import Column, StepBuffer
from polydraft.program.program import ProgramBuilder, Rule
from polydraft.sampling.logprobs import Logprobs
from polydraft.sampling.processing import Processing
from polydraft.sentinels import Draw

RULES: dict[str, tuple[Rule, ...]] = {
    "greedy": ("greedy",),
    "coupled": ("greedy", "sampling"),
    "rejection": ("greedy", "rejection"),
}
"""Value of `--verify` to the rules of its steps: without, and with, a slot that samples, where requests may."""


@dataclass(frozen=True)
class Rows:
    """Rows of logits [N, V] float32, by the names of the buffers that describe them. A row chooses the token `ahead` places
    after its position."""

    program: ProgramBuilder
    logits: str
    row_slot: str
    positions: str
    ahead: int
    unit: Unit
    stage: str

    def add(self, contract: str, **fields: Any) -> None:
        """Append a launch over these rows; fields of the contract that bear the name of one of ours are bound to it."""
        mine = {name: getattr(self, name) for name in ("logits", "row_slot", "positions", "ahead")}
        specs = contract_named(contract).args.specs()
        self.program.add(contract, self.unit, self.stage, **{**{n: v for n, v in mine.items() if n in specs}, **fields})


class Verifier:
    """Appends the launches that choose tokens and verify windows. One an engine.

    `stores_noise`: noise has a buffer of its own, because the backend cannot sample with noise that is never stored, or a rule
    needs it twice. `keep_drafts` reserves [B, K, V] float32 for the distributions of drafts that come from `choose`; without it
    rejection takes every draft for certain. `schedule`: chances [K] by which drafts are accepted instead (synthetic; () verifies
    them)."""

    columns = (
        Column("temperature", "Divides logits; 0: greedy.", dtype="f32", value=lambda a: a.params.temperature),
        Column("top_k", "Tokens kept when sampling; 0: all.", value=lambda a: a.params.top_k),
        Column("top_p", "Probability mass kept when sampling.", dtype="f32", value=lambda a: a.params.top_p),
        Column("min_p", "Smallest probability kept, relative to the largest.", dtype="f32", value=lambda a: a.params.min_p),
    )

    def __init__(
        self, processing: Processing, *, num_valid: int, stores_noise: bool, keep_drafts: bool,
        schedule: tuple[float, ...] = (), logprobs: Logprobs | None = None,
    ) -> None:  # fmt: skip
        self._processing, self._num_valid, self._logprobs = processing, num_valid, logprobs
        self._keeps_drafts, self._forces = keep_drafts, bool(schedule)
        self.buffers = [
            StepBuffer("logits", "NL V", "f32"),
            StepBuffer("noise", "NL V" if stores_noise else "1 V", "f32"),
            StepBuffer("choices", "NL"),
            StepBuffer("uniforms", "NL", "f32"),
            StepBuffer("window", "B W"),
            *(StepBuffer(name, "B") for name in ("window_len", "accepted", "drafted")),
        ]
        if keep_drafts:  # a greedy slot's is looked up, yet never filed
            self.buffers.append(StepBuffer("draft_probs", "B K V", "f32", initial=0))
        if schedule:
            self.buffers.append(StepBuffer("chances", f"{len(schedule)}", "f32", initial=np.array(schedule, np.float32)))

    def verify(self, program: ProgramBuilder, features: Iterable[Callable[[ProgramBuilder], None]] = ()) -> None:
        """From the target's logits to the window of every sequence. `features` append what they do to processed logits."""
        rows = Rows(program, "logits", "logit_slot", "logit_position", 0, "logit_rows", "verify")
        if self._picks(rows, "choices"):
            if self._forces:
                self._force(rows)
            program.add("verify_match", "seqs", "verify")
            return
        raw = self._process(rows)
        for append in features:
            append(program)
        if self._logprobs is not None:
            self._logprobs.keep(program, raw)
        if program.kind.rule == "rejection":
            self._verify_rejection(rows)
            return
        self._choose(rows, "choices", "noise", Draw.TARGET)
        if self._forces:
            self._force(rows)
        program.add("verify_match", "seqs", "verify")

    def choose(
        self, program: ProgramBuilder, *, logits: str, row_slot: str, positions: str, ahead: int, tokens: str, noise: str,
        unit: Unit, stage: str,
    ) -> None:  # fmt: skip
        """One draft a row, and at most one row a slot; drafts chosen before in this round are in `drafts` and `draft_len`."""
        rows = Rows(program, logits, row_slot, positions, ahead, unit, stage)
        if self._picks(rows, tokens):
            return
        self._process(rows)
        report = self._logprobs if program.kind.logprobs and self._logprobs is not None and self._logprobs.drafts else None
        if program.kind.rule != "rejection" or not self._keeps_drafts:
            draw = Draw.TARGET if program.kind.rule != "rejection" else Draw.DRAFT
            self._choose(rows, tokens, noise, draw)
            if report is not None:
                report.append_drafts(rows.add, tokens, drawn=False)
            return
        if report is not None:  # of greedy slots, whose drafts are certain below; a slot that samples files over it
            rows.add("argmax", tokens=tokens)
            report.append_drafts(rows.add, tokens, drawn=False)
        rows.add("filter_probs")
        rows.add("gumbel_noise", noise=noise, draw=int(Draw.DRAFT))
        rows.add("draw_draft", probs=logits, noise=noise, tokens=tokens)
        if report is not None:
            report.append_drafts(rows.add, tokens, drawn=True)

    def _process(self, rows: Rows) -> int:
        """What happens to logits before anything is chosen; the stages only where some slot wants one. Behind how many launches
        logits are the model's own."""
        rows.add("process_logits", num_valid=self._num_valid)
        raw = len(rows.program.nodes)
        if rows.program.kind.processed:
            self._processing.emit(rows)
        return raw

    def _force(self, rows: Rows) -> None:
        """Accept drafts by chance: the same ones for a seed and a position, whatever the batch."""
        rows.add("uniform_noise", draw=int(Draw.ACCEPT))
        rows.program.add("force_choices", "seqs", "verify", num_valid=self._num_valid)

    def _picks(self, rows: Rows, tokens: str) -> bool:
        """Choose by the pairs that ranks exchange, where there are several and nothing but the highest logit is wanted; whether
        that is so."""
        program = rows.program
        if program.memory.ranks == 1 or not program.kind.picks:
            return False
        rows.add("argmax_pair", logits=share_of(rows.logits), num_valid=self._num_valid, tokens=tokens)
        return True

    @staticmethod
    def _choose(rows: Rows, tokens: str, noise: str, draw: Draw) -> None:
        """Argmax, or noise of the position and sampling. Of several ranks, which all do so, the choice of rank 0 counts."""
        if rows.program.kind.rule == "greedy":
            rows.add("argmax", tokens=tokens)
        else:
            rows.add("gumbel_noise", noise=noise, draw=int(draw))
            rows.add("sample", noise=noise, tokens=tokens)
        if rows.program.memory.ranks > 1:
            rows.add("broadcast", x=tokens)

    def _verify_rejection(self, rows: Rows) -> None:
        rows.add("filter_probs")
        rows.add("uniform_noise", draw=int(Draw.ACCEPT))
        rows.add("gumbel_noise", noise="noise", draw=int(Draw.TARGET))
        kept = {"draft_probs": "draft_probs"} if self._keeps_drafts else {}
        rows.program.add("verify_rejection", "seqs", "verify", probs=rows.logits, **kept)
