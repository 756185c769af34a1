"""Runs a benchmark's comparison: the engines of every requested combination in turn, and the rows they give.

All engines of one batch size are alive together and take turns within each repeat, so that a change of the machine's speed
affects all of them. `measure` does the timing.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from polydraft.bench.measure import Load, Watch, instruments, profiled, timed
from polydraft.bench.shapes import RandomCheckpoint
from polydraft.config import EngineConfig
from polydraft.engine import Engine
from polydraft.errors import CapabilityError
from polydraft.instruments.timeline import keeps_timeline
from polydraft.proposers.base import built_in

Compare = Literal["off", "graph", "overlap", "all"]
VARIANTS: dict[Compare, tuple[dict[str, Any], ...]] = {
    "off": ({},),
    "graph": ({"graph": "off"}, {"graph": "decode"}),
    "overlap": ({"overlap": 0}, {"overlap": 1}),
    "all": tuple({"graph": graph, "overlap": overlap} for overlap in (0, 1) for graph in ("off", "decode")),
}
"""Options of the contenders that a comparison sets side by side."""
PLAIN = {"proposer": "auto", "draft_model": "", "draft_vocab": "", "proposer_options": ()}
"""Options of a contender that decodes plainly beside others that draft."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Suite:
    """What to measure. `config` is shared by all engines, what it says of drafts by those that draft; batch, drafts, capacities
    and the compared option come on top. `shape` is a file of `RandomCheckpoint`, instead of `config.model`."""

    config: EngineConfig
    shape: Path | None = None
    batches: tuple[int, ...] = (1,)
    draft_tokens: tuple[int, ...] = (0, 3)
    compare: Compare = "off"
    prompt_tokens: int = 32
    new_tokens: int = 128
    repeats: int = 5

    def run(self, progress: Progress) -> Iterator[dict[str, Any]]:
        """Measure; one row a combination. Errors are those of `Engine` and of `measure`."""
        for batch in self.batches:
            load = Load(batch, self.prompt_tokens, self.new_tokens)
            cells: list[Contender] = []
            try:
                for drafts, variant in itertools.product(self.draft_tokens, VARIANTS[self.compare]):
                    progress(f"batch {batch}: loading the engine of K = {drafts}")
                    cells.append(Contender(self.engine(load, drafts, variant), load))
                for cell in cells:
                    cell.measure(keep=False, watch=_telling(cell, progress))
                for turn, cell in itertools.product(range(1, self.repeats + 1), cells):
                    progress(f"{cell.name}: run {turn} of {self.repeats}")
                    cell.measure(keep=True)
                yield from (cell.row(self.shape) for cell in cells)
            finally:
                for cell in cells:
                    cell.engine.close()

    def engine(self, load: Load, drafts: int, variant: dict[str, Any]) -> Engine:
        """An engine that holds the whole load, so that nobody waits, is preempted, or finds a prefix or an earlier text."""
        length = load.prompt_tokens + load.new_tokens
        block = 16 if self.config.block_size == "auto" else int(self.config.block_size)
        own: dict[str, Any] = {
            "draft_tokens": drafts,
            "max_num_seqs": load.batch,
            "max_model_len": length,
            "num_blocks": load.batch * -(-length // block),
            "accept_schedule": self.config.accept_schedule if drafts else (),
        }
        if "cached_tokens" in built_in().options(self.config.proposer):
            own["proposer_options"] = (*self.config.proposer_options, "cached_tokens=0")
        if not drafts and any(self.draft_tokens):
            own |= PLAIN
        config = dataclasses.replace(self.config, **own, **variant)
        try:
            checkpoint = RandomCheckpoint(self.shape) if self.shape else None
            return Engine(config, checkpoint=checkpoint, instruments=instruments())
        except CapabilityError as error:  # nobody gave that length: it follows from the load
            asked = f"--prompt-tokens {load.prompt_tokens} --new-tokens {load.new_tokens}"
            raise CapabilityError(str(error).replace(f"--max-model-len {length}", asked)) from error


def _telling(cell: Contender, progress: Progress) -> Watch:
    """Tells how far a warm-up is: the first run on a device may take minutes, and how long the others take shows in it."""
    made, wanted = 0, cell.load.batch * cell.load.new_tokens
    progress(f"{cell.name}: warm-up")

    def watch(tokens: int) -> None:
        nonlocal made
        made += tokens
        progress(f"{cell.name}: warm-up, {made} of {wanted} tokens")

    return watch


@dataclass
class Contender:
    """One engine and what was measured of it so far, one entry a repeat."""

    engine: Engine
    load: Load
    figures: dict[str, list[float]] = field(default_factory=dict)
    stages: dict[str, list[float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For people who wait."""
        r = self.engine.resolved
        return f"batch {self.load.batch}, K = {r.limits.num_drafts}, graph {r.graph}, overlap {r.overlap}"

    def measure(self, *, keep: bool, host: bool = True, watch: Watch | None = None) -> None:
        """A bare run, then a recorded one unless nobody asks what the host spends; to warm up, a bare one alone, which `watch`
        may follow."""
        figures: dict[str, float | None] = dict(timed(self.engine, self.load, watch))
        if not keep:
            return
        host_figures, stages = profiled(self.engine, self.load) if host else ({}, {})
        for name, value in {**figures, **host_figures}.items():
            if value is not None:
                self.figures.setdefault(name, []).append(value)
        for name, value in stages.items():
            self.stages.setdefault(name, []).append(value)

    def row(self, shape: Path | None) -> dict[str, Any]:
        """The medians, with the smallest and largest value of each as its spread."""
        r, schedule, evidence = self.engine.resolved, self.engine.resolved.accept_schedule, self.engine.info.evidence
        names = ("ms_per_round", "tokens_per_round", "tokens_per_s", "ttft_ms", "host_us_per_step", "idle_share")
        medians = {name: statistics.median(self.figures[name]) if name in self.figures else None for name in names}
        return {
            "shape": shape.stem if shape else self.engine.model.name,
            "weights": "random" if shape else "checkpoint",
            "backend": r.backend,
            "evidence": evidence,
            "device": self.engine.device.spec,
            "clock": "the device's own" if keeps_timeline(self.engine.device) else "wall",
            "draft_tokens": r.limits.num_drafts,
            "batch": self.load.batch,
            "acceptance": "synthetic" if schedule or evidence == "double only" else "measured",
            "accept_schedule": list(schedule) or None,
            **medians,
            "host_us_by_stage": {stage: statistics.median(values) for stage, values in self.stages.items()},
            "memory_bytes": self.engine.device.memory(),
            "prompt_tokens": self.load.prompt_tokens,
            "new_tokens": self.load.new_tokens,
            "dtype": r.dtype,
            "kv_dtype": r.kv or r.dtype,
            "weight_packing": r.packing.name if r.packing else ", ".join(r.packed_as) or r.dtype,
            "invariant": r.invariant,
            "prefix_cache": self.engine.config.prefix_cache,
            "proposer": r.proposer,
            "draft_model": r.describe()["draft_model"],
            "draft_vocab": r.describe()["draft_vocab"],
            "verify": r.verify,
            "graph": r.graph,
            "overlap": r.overlap,
            "repeats": len(self.figures["ms_per_round"]),
            "spread": {name: [min(values), max(values)] for name, values in self.figures.items()},
        }
