"""The target's pass: embedding, a sequence of decoder blocks of any kinds, final norm and head, and taps on the way.

The runner appends it to the program of every kind of step. Buffers and passes are declared here by name, and allocated by the
runtime; so are the caches and the scratch of the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from polydraft.contracts.base import Limits, Unit
from polydraft.errors import ConfigError
from polydraft.models.block import Norm, emit_block
from polydraft.models.description import ModelDescription
from polydraft.program.declare import Pass, StepBuffer
from polydraft.program.program import ProgramBuilder

HIDDEN = "target.hidden"
"""[R, H]: the target's residual stream of every packed row, before its final norm."""
EVERY_ROW = "target.every_row"
"""[R] int32: row i at i, for copies of all rows; only if the target is tapped."""


def emit_linear(program: ProgramBuilder, weight: str, *, x: str, out: str, unit: Unit, stage: str) -> None:
    """Project rows."""
    program.add("linear", unit, stage, x=x, weight=weight, bias=None, out=out)


def emit_embedding(program: ProgramBuilder, out: str, *, unit: Unit, stage: str, weight: str = "embed", **ids: str) -> None:
    """Look tokens up. A rank keeps columns of the table, which are then gathered."""
    mine = out if program.memory.ranks == 1 else share_of(out)
    program.add("embed", unit, stage, weight=weight, out=mine, **ids)
    if mine != out:
        program.add("all_gather", unit, stage, x=mine, out=out)


def emit_head(
    program: ProgramBuilder, *, x: str, out: str, unit: Unit, stage: str, weight: str = "lm_head", few: bool = False
) -> None:  # fmt: skip
    """Logits of rows. Of several ranks each computes those of its tokens; they are gathered where somebody needs whole rows.
    `few`: the weight scores some tokens (`few_buffers`), and the others get -inf."""
    mine = out if program.memory.ranks == 1 else share_of(out)
    scored = few_of(out) if few else mine
    emit_linear(program, weight, x=x, out=scored, unit=unit, stage=stage)
    if few:
        program.add("spread_logits", unit, stage, x=scored, places=places_in(out), out=mine)
    if mine != out and not program.kind.picks:
        program.add("all_gather", unit, stage, x=mine, out=out)


def share_of(buffer: str) -> str:
    """The buffer for this rank's columns of another one."""
    return f"{buffer}.share"


def few_of(logits: str) -> str:
    """The buffer for logits of a reduced vocabulary, beside one for those of the whole."""
    return f"{logits}.few"


def places_in(logits: str) -> str:
    """The buffer that says which of them each token has."""
    return f"{logits}.places"


def shares(
    model: ModelDescription, *, embedded: tuple[str, str], logits: tuple[str, str], hidden: int | None = None
) -> list[StepBuffer]:  # fmt: skip
    """The buffers for a rank's columns of what `emit_embedding` and `emit_head` write: name and symbol of rows of each. None
    where there is one rank. `hidden`: elements of an embedding, where these are not the model's."""
    if model.ranks == 1:
        return []
    (rows, count), (scores, of_scores) = embedded, logits
    return [
        StepBuffer(share_of(rows), f"{count} {(hidden or model.hidden_size) // model.ranks}", "act"),
        StepBuffer(share_of(scores), f"{of_scores} {model.vocab_share}", "f32"),
    ]


class Target:
    """The target's pass over packed rows, and its head.

    `taps`: buffer to the point of the target whose rows it gets in every step, [R, H] in the dtype of activations: "embedding",
    "layer I" (the residual stream after decoder block I) or "final" (after all blocks and the final norm). Each costs one
    launch, and between two layers keeps their add and norm from being joined. Raises `ConfigError` for a point that the model
    does not have."""

    def __init__(self, model: ModelDescription, limits: Limits, taps: Mapping[str, str] | None = None) -> None:
        self.model, self._norm = model, Norm(model.eps, model.norm_plus_one)
        hidden = model.hidden_size
        self.blocks = model.layers
        self._taps = dict(taps or {})
        self._check_taps()
        self.buffers = [
            StepBuffer(HIDDEN, f"R {hidden}", "act"),
            StepBuffer("target.last", f"NL {hidden}", "act"),
            StepBuffer("target.last_normed", f"NL {hidden}", "act"),
            *(StepBuffer(name, f"R {hidden}", "act") for name in self._taps),
            *shares(model, embedded=(HIDDEN, "R"), logits=("logits", "NL")),
            *([StepBuffer(EVERY_ROW, "R", initial=np.arange(limits.max_rows, dtype=np.int32))] if self._taps else []),
        ]
        self.passes = (Pass("target", "target", "rows", "row_slot", "positions"),)

    def forward(self, program: ProgramBuilder) -> None:
        """From token ids to the residual stream of every row, and the logits of logit rows."""
        (rows,), stage, hidden = self.passes, "target", self.model.hidden_size
        emit_embedding(program, HIDDEN, unit="rows", stage=stage)
        self._tap(program, "embedding")
        program.fill("target", 0, "rows", stage)
        for index, (prefix, block) in enumerate(self.blocks.items()):
            emit_block(program, block, self._norm, prefix, x=HIDDEN, rows=rows, scratch=block.scratch(hidden), stage=stage)
            self._tap(program, f"layer {index}")
        for name in (name for name, point in self._taps.items() if point == "final"):
            self._norm.emit(program, "norm", x=HIDDEN, out=name, unit="rows", stage=stage)
        self.head(program, "logit_row", "logit_rows")

    def head(self, program: ProgramBuilder, rows: str, unit: Unit) -> None:
        """Logits of the packed rows that are named in `rows`."""
        stage, last, normed = "target", "target.last", "target.last_normed"
        program.add("gather_rows", unit, stage, x=HIDDEN, index=rows, out=last)
        self._norm.emit(program, "norm", x=last, out=normed, unit=unit, stage=stage)
        emit_head(program, x=normed, out="logits", unit=unit, stage=stage)

    def _tap(self, program: ProgramBuilder, here: str) -> None:
        for name in (name for name, point in self._taps.items() if point == here):
            program.add("gather_rows", "rows", "target", x=HIDDEN, index=EVERY_ROW, out=name)

    def _check_taps(self) -> None:
        points = ("embedding", *(f"layer {i}" for i in range(len(self.blocks))), "final")
        for name, point in self._taps.items():
            if point not in points:
                raise ConfigError(
                    f"buffer {name!r} taps the target at {point!r}, wanted 'embedding', 'final' or 'layer 0' to "
                    f"'layer {len(self.blocks) - 1}' of {self.model.name}; correct the point"
                )
