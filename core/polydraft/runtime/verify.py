"""Owns the launches between logits and windows: processing, the choice of a token, verification; for each kind of step.

The runner appends those of target rows, proposers those of draft rows through `choose`, so that a draft is chosen by the very
rules that it is later held against. It never decides which kind of step runs: the plan does.

With `coupled` verification (kind "sampling") a draft shares the noise of the position it stands for. With `rejection` it has
noise of its own, and the distribution it was drawn from is kept until the target has judged it. Randomness is keyed by (seed,
position, draw), and a position is judged once: a draft that was dropped before that may be drawn again with the same noise,
since nothing that was put out depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from polydraft.contracts.argmax import ArgmaxV1
from polydraft.contracts.base import Limits, Unit
from polydraft.contracts.bias_logits import BiasLogitsV1
from polydraft.contracts.draw_draft import DrawDraftV1
from polydraft.contracts.filter_probs import FilterProbsV1
from polydraft.contracts.forbid_tokens import ForbidTokensV1
from polydraft.contracts.force_choices import ForceChoicesV1
from polydraft.contracts.gumbel_noise import GumbelNoiseV1
from polydraft.contracts.penalise_logits import PenaliseLogitsV1
from polydraft.contracts.process_logits import ProcessLogitsV1
from polydraft.contracts.sample import SampleV1
from polydraft.contracts.uniform_noise import UniformNoiseV1
from polydraft.contracts.verify_match import VerifyMatchV1
from polydraft.contracts.verify_rejection import VerifyRejectionV1
from polydraft.device import Buffer, Device
from polydraft.runtime.buffers import SlotState, StepBuffers
from polydraft.runtime.logprobs import Logprobs
from polydraft.runtime.program import ProgramBuilder, Rule
from polydraft.sentinels import Draw

PROCESSING = ("update_biases", "update_bad_words", "penalise_logits", "bias_logits", "forbid_tokens")
"""Contracts that a backend needs for requests whose logits are processed, and for nothing else."""
RULES: dict[str, tuple[Rule, ...]] = {
    "greedy": ("greedy", "sampling"),
    "coupled": ("greedy", "sampling"),
    "rejection": ("greedy", "rejection"),
}
"""Value of `--verify` to the rules of its steps: without, and with, a slot that samples."""


class Verifier:
    """Appends the launches that choose tokens and verify windows. One an engine; `keep_drafts` reserves [B, K, V] float32 for
    the distributions of drafts that come from `choose`; without it rejection takes every draft for certain. `schedule`: chances
    [K] by which drafts are accepted instead (synthetic; () verifies them)."""

    def __init__(
        self, device: Device, limits: Limits, state: SlotState, step: StepBuffers, *, num_valid: int, keep_drafts: bool,
        schedule: tuple[float, ...] = (), logprobs: Logprobs | None = None,
    ) -> None:  # fmt: skip
        self._state, self._step, self._num_valid, self._logprobs = state, step, num_valid, logprobs
        self._draft_probs: Buffer | None = None
        if keep_drafts:
            shape = limits.max_seqs, limits.num_drafts, limits.vocab_size
            self._draft_probs = device.empty("state.draft_probs", shape, "f32")
            device.load(self._draft_probs, np.zeros(shape, np.float32))  # a greedy slot's is looked up, yet never filed
        self._chances: Buffer | None = None
        if schedule:
            self._chances = device.empty("state.chances", (len(schedule),), "f32")
            device.load(self._chances, np.array(schedule, np.float32))

    def verify(self, program: ProgramBuilder, features: Iterable[Callable[[ProgramBuilder], None]] = ()) -> None:
        """From the target's logits to the window of every sequence. `features` append what they do to processed logits."""
        t = self._step
        rows: dict[str, Any] = {"row_slot": t.logit_slot, "positions": t.logit_position, "ahead": 0}
        self._process(program, t.logits, rows, "logit_rows", "verify", keep=self._logprobs)
        for append in features:
            append(program)
        if self._logprobs is not None:
            self._logprobs.keep(program, t.logits, t.logit_slot, raw=False)
        if program.kind.rule == "rejection":
            self._verify_rejection(program, rows)
            return
        self._choose(program, t.logits, rows, t.choices, t.noise, Draw.TARGET, "logit_rows", "verify")
        if self._chances is not None:
            self._force(program, rows, self._chances)
        verify = VerifyMatchV1(
            choices=t.choices, slot_order=t.slot_order, phase=self._state.phase, logit_start=t.logit_start,
            logit_len=t.logit_len, drafts=self._state.drafts, window=t.window, window_len=t.window_len,
            accepted=t.accepted, drafted=t.drafted,
        )  # fmt: skip
        program.add("verify_match", verify, "seqs", "verify")

    def choose(
        self, program: ProgramBuilder, *, logits: Buffer, row_slot: Buffer, positions: Buffer, ahead: int, tokens: Buffer,
        noise: Buffer, unit: Unit, room: str,
    ) -> None:  # fmt: skip
        """One draft a row, and at most one row a slot; drafts chosen before in this round are in `drafts` and `draft_len`."""
        rows: dict[str, Any] = {"row_slot": row_slot, "positions": positions, "ahead": ahead}
        self._process(program, logits, rows, unit, room)
        report = self._logprobs if program.kind.logprobs else None
        if program.kind.rule != "rejection" or self._draft_probs is None:
            draw = Draw.TARGET if program.kind.rule != "rejection" else Draw.DRAFT
            self._choose(program, logits, rows, tokens, noise, draw, unit, room)
            if report is not None:
                report.append_drafts(program, logits, row_slot, tokens, drawn=False, unit=unit, room=room)
            return
        if report is not None:  # of greedy slots, whose drafts are certain below; a slot that samples files over it
            program.add("argmax", ArgmaxV1(logits=logits, row_slot=row_slot, tokens=tokens), unit, room)
            report.append_drafts(program, logits, row_slot, tokens, drawn=False, unit=unit, room=room)
        self._filter(program, logits, row_slot, unit, room)
        self._noise(program, rows, noise, Draw.DRAFT, unit, room)
        draw_draft = DrawDraftV1(
            probs=logits, noise=noise, row_slot=row_slot, draft_len=self._state.draft_len, tokens=tokens,
            draft_probs=self._draft_probs,
        )  # fmt: skip
        program.add("draw_draft", draw_draft, unit, room)
        if report is not None:
            report.append_drafts(program, logits, row_slot, tokens, drawn=True, unit=unit, room=room)

    def _process(
        self, program: ProgramBuilder, logits: Buffer, rows: dict[str, Any], unit: Unit, room: str, *,
        keep: Logprobs | None = None,
    ) -> None:  # fmt: skip
        """What happens to logits before anything is chosen; the last three only where some slot asks for it."""
        s, row_slot = self._state, rows["row_slot"]
        mask = ProcessLogitsV1(logits=logits, row_slot=row_slot, num_valid=self._num_valid)
        program.add("process_logits", mask, unit, room)
        if keep is not None:
            keep.keep(program, logits, row_slot, raw=True)
        if not program.kind.processed:
            return
        text = {name: getattr(s, name) for name in ("tokens", "drafts", "prompt_len", "num_generated")}
        penalise = PenaliseLogitsV1(
            logits=logits, repetition_penalty=s.repetition_penalty, presence_penalty=s.presence_penalty,
            frequency_penalty=s.frequency_penalty, **rows, **text,
        )  # fmt: skip
        program.add("penalise_logits", penalise, unit, room)
        bias = BiasLogitsV1(logits=logits, row_slot=row_slot, num_biases=s.num_biases, bias_ids=s.bias_ids, biases=s.biases)
        program.add("bias_logits", bias, unit, room)
        forbid = ForbidTokensV1(
            logits=logits, min_tokens=s.min_tokens, stop_tokens=s.stop_tokens, bad_words=s.bad_words, bad_len=s.bad_len,
            **rows, **text,
        )  # fmt: skip
        program.add("forbid_tokens", forbid, unit, room)

    def _choose(
        self, program: ProgramBuilder, logits: Buffer, rows: dict[str, Any], tokens: Buffer, noise: Buffer, draw: Draw,
        unit: Unit, room: str,
    ) -> None:  # fmt: skip
        """Argmax, or noise of the position and sampling."""
        row_slot = rows["row_slot"]
        if program.kind.rule == "greedy":
            program.add("argmax", ArgmaxV1(logits=logits, row_slot=row_slot, tokens=tokens), unit, room)
            return
        self._noise(program, rows, noise, draw, unit, room)
        sample = SampleV1(logits=logits, noise=noise, row_slot=row_slot, tokens=tokens, **self._filters())
        program.add("sample", sample, unit, room)

    def _force(self, program: ProgramBuilder, rows: dict[str, Any], chances: Buffer) -> None:
        """Accept drafts by chance: the same ones for a seed and a position, whatever the batch."""
        s, t = self._state, self._step
        uniform = UniformNoiseV1(seed=s.seed, uniforms=t.uniforms, draw=int(Draw.ACCEPT), **rows)
        program.add("uniform_noise", uniform, "logit_rows", "verify")
        force = ForceChoicesV1(
            slot_order=t.slot_order, logit_start=t.logit_start, logit_len=t.logit_len, drafts=s.drafts, uniforms=t.uniforms,
            chances=chances, choices=t.choices, num_valid=self._num_valid,
        )  # fmt: skip
        program.add("force_choices", force, "seqs", "verify")

    def _verify_rejection(self, program: ProgramBuilder, rows: dict[str, Any]) -> None:
        s, t = self._state, self._step
        self._filter(program, t.logits, t.logit_slot, "logit_rows", "verify")
        uniform = UniformNoiseV1(seed=s.seed, uniforms=t.uniforms, draw=int(Draw.ACCEPT), **rows)
        program.add("uniform_noise", uniform, "logit_rows", "verify")
        self._noise(program, rows, t.noise, Draw.TARGET, "logit_rows", "verify")
        verify = VerifyRejectionV1(
            probs=t.logits, draft_probs=self._draft_probs, uniforms=t.uniforms, noise=t.noise, slot_order=t.slot_order,
            phase=s.phase, logit_start=t.logit_start, logit_len=t.logit_len, drafts=s.drafts, window=t.window,
            window_len=t.window_len, accepted=t.accepted, drafted=t.drafted,
        )  # fmt: skip
        program.add("verify_rejection", verify, "seqs", "verify")

    def _filter(self, program: ProgramBuilder, logits: Buffer, row_slot: Buffer, unit: Unit, room: str) -> None:
        program.add("filter_probs", FilterProbsV1(logits=logits, row_slot=row_slot, **self._filters()), unit, room)

    def _filters(self) -> dict[str, Buffer]:
        return {name: getattr(self._state, name) for name in ("temperature", "top_k", "top_p", "min_p")}

    def _noise(self, program: ProgramBuilder, rows: dict[str, Any], noise: Buffer, draw: Draw, unit: Unit, room: str) -> None:
        s = self._state
        make = GumbelNoiseV1(seed=s.seed, temperature=s.temperature, noise=noise, draw=int(draw), **rows)
        program.add("gumbel_noise", make, unit, room)
