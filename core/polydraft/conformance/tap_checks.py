"""Checks of taps (L5): in every step the rows that a tap hands over are those that the target has at that point, and no others.

A proposer with a model of its own, such as EAGLE-3, is fed with them, and no text shows whether they are right. Every row that a
run computes, also that of a draft, is held against the recomputing oracle. What a proposer makes of taps is not examined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np

from polydraft.conformance.check import Check, Tally
from polydraft.conformance.lossless_checks import K, working_dtype
from polydraft.conformance.oracle import OracleModel
from polydraft.conformance.probe import oracle, prompts
from polydraft.conformance.serving import Ask, serve
from polydraft.conformance.target import Target
from polydraft.device import Array
from polydraft.engine import Engine
from polydraft.program.host_inputs import HostView, Needs
from polydraft.program.plan import StepOutcome, StepPlan
from polydraft.program.program import ProgramBuilder

TAPS: Final[Mapping[str, str]] = {"conform.tap0": "embedding", "conform.tap1": "layer 0", "conform.tap2": "final"}
"""The probe has one layer."""
ROWS: Final = ("row_slot", "positions", "ids")
"""Whose rows these are, where they stand, and their tokens."""
CLOSE: Final[Mapping[str, float]] = {"f32": 1e-3, "tf32": 2e-2, "f16": 2e-2, "bf16": 0.15}
"""Parts of the largest element of a row by which it may be off, by `Target.rounding`."""


def checks() -> Iterator[Check]:
    """With launches one by one, and replayed."""
    yield Check("L5/taps/eager", partial(_taps, "off"))
    yield Check("L5/taps/replayed", partial(_taps, "decode"), ("graph_capture",))


class Tapping:
    """A host feature that wants to see the target at every kind of point, and does nothing else."""

    name: ClassVar[str] = "taps"
    needs: ClassVar[Needs] = "none"
    reads_drafts = False
    buffers = ()
    inputs = ()
    taps = TAPS

    def __init__(self, context: Any) -> None:
        del context

    def fill(self, view: HostView, arrays: Mapping[str, Array]) -> int:
        """Nothing goes up."""
        del view, arrays
        return 0

    def append(self, program: ProgramBuilder) -> None:
        """No launch."""

    def reset(self) -> None:
        """It has sent nothing."""


class Rows:
    """A step observer that reads the rows of each step back and holds those of taps against the oracle."""

    def __init__(self, engine: Engine, tally: Tally, dtype: str, close: float) -> None:
        self._engine, self._tally, self._dtype, self._close, self._oracle = engine, tally, dtype, close, oracle()
        buffers = engine.runner.memory.buffers
        self._landing = {
            name: (buffers[name], engine.device.staging(f"conform.{name}", buffers[name].shape, buffers[name].dtype))
            for name in (*ROWS, *TAPS)
        }
        self._event = engine.device.event()
        self._texts: dict[tuple[int, int], list[int]] = {}
        """What the target has computed last at each position, by slot and epoch."""
        self.num_rows = 0

    def step_finished(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Look at the rows of one step."""
        del outcome
        device, epochs = self._engine.device, dict(zip(plan.slots.tolist(), plan.epochs.tolist(), strict=True))
        for buffer, staging in self._landing.values():
            device.download(device.stream, staging, buffer, buffer.shape[0])
        self._event.record(device.stream)
        self._event.synchronize()
        slots, positions, ids = (self._landing[name][1].array[: plan.num_rows] for name in ROWS)
        for slot in sorted({*slots[slots >= 0].tolist()}):
            rows = np.flatnonzero(slots == slot)
            text = self._texts.setdefault((slot, epochs[slot]), [])
            begin = int(positions[rows[0]])
            text[begin:] = ids[rows].tolist()
            for name, wanted in zip(TAPS, states(self._oracle, text), strict=True):
                got = floats(self._landing[name][1].array[rows], self._dtype)
                off = np.abs(got - wanted[begin:]).max(axis=1) / np.abs(wanted[begin:]).max(axis=1)
                far = np.flatnonzero(~(off <= self._close))
                what = f"tap of {TAPS[name]!r} has the target's rows"
                if far.size:
                    what += f", got one off by {off[far[0]]:.3g} of its largest element at position {begin + int(far[0])}"
                self._tally.true(what, not far.size)
        self.num_rows += int((slots >= 0).sum())


def states(model: OracleModel, token_ids: list[int]) -> tuple[Array, Array, Array]:
    """[n, H] at each point of `TAPS`."""
    embedded = np.asarray(model.w["embed"][token_ids])
    last = model.target_states(token_ids)
    return embedded, last, model._norm(last, "norm")


def floats(rows: Array, dtype: str) -> Array:
    """Rows as float64; bfloat16 lies as its bits."""
    wide: Array = (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else rows
    return wide.astype(np.float64)


def _taps(graph: str, target: Target, tally: Tally) -> None:
    """Prompts in chunks, windows with drafts, requests that come and go; no step is in flight while rows are read."""
    dtype = working_dtype(target)
    asks = [Ask(prompt, arrival=2 * i, max_new=12) for i, prompt in enumerate(prompts(6))]
    with target.engine(
        features=(Tapping,), draft_tokens=K, dtype=dtype, graph=graph, max_num_seqs=4, block_size=4, max_batched_tokens=21,
        overlap=0, prefix_cache=False,
    ) as engine:  # fmt: skip
        rows = Rows(engine, tally, dtype, CLOSE[target.rounding(dtype)])
        engine._observers.append(rows)
        serve(engine, asks, tally)
        graphs = engine.runner.graphs
        if graph != "off":
            tally.true("steps are replayed", bool(graphs and graphs.counters.replayed_steps))
    tally.true(
        f"rows of prompts and of drafts are compared, got {rows.num_rows}", rows.num_rows > sum(len(a.prompt) for a in asks)
    )
