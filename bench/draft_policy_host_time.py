"""Host time a step of the draft policy behind `--draft-tokens auto:5`; writes bench/results/draft_policy_host_time.json.

    python bench/draft_policy_host_time.py --page docs/how_many_drafts.md

The policy alone, without an engine: it chooses for steps of a simulated machine that mostly reads weights
(`tests/support/simulated_steps.py`), over a batch that stays as it is. Timed is `choose`, in CPU time of its thread, less what
reading that clock takes. Most calls only keep the time of a step; those that decide fold in what was seen since the last one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.bench import report
from polydraft.contracts.base import Limits
from polydraft.host.adaptive_drafts import AdaptiveDrafts
from polydraft.host.draft_policy import DraftView

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.support.simulated_steps import Step, World  # noqa: E402  as tests of the policy have them

OUT = ROOT / "bench" / "results" / "draft_policy_host_time.json"
FIGURES = "bench/results/draft_policy_host_time.json"
ACCEPTED = np.array([0.8, 0.75, 0.75, 0.7, 0.7])
MOST, BEGINNING = 5, 1000
"""Drafts at most; and steps before those that are reported."""


class Timed(AdaptiveDrafts):
    """The policy, which keeps the nanoseconds of each of its answers, and which of them it decided about."""

    def __init__(self, limits: Limits, *, clock: Callable[[], float]) -> None:
        super().__init__(limits, clock=clock)
        self.took: list[int] = []
        self.decided: list[int] = []

    def choose(self, view: DraftView) -> int:
        """What the policy answers."""
        begin = time.thread_time_ns()
        rung = super().choose(view)
        self.took.append(time.thread_time_ns() - begin)
        return rung

    def _decide(self, view: DraftView) -> None:
        self.decided.append(len(self.took))
        super()._decide(view)


def cost(step: Step) -> float:
    """Milliseconds of a step."""
    return 5.0 + 0.4 * step.drafts + 0.02 * step.rows


def clock_ns() -> float:
    """What reading the clock twice takes."""
    took = []
    for _ in range(2000):
        begin = time.thread_time_ns()
        took.append(time.thread_time_ns() - begin)
    return statistics.median(took)


def timed(batch: int, steps: int, seed: int) -> tuple[float, float, float, float]:
    """Microseconds a step: on average, where nothing is decided, and of a decision; and steps from one to the next."""
    world = World(batch, cost, lambda world, slots: ACCEPTED, most=MOST, noise=0.03, seed=seed)
    policy = world.adaptive(Timed)
    assert isinstance(policy, Timed), "as asked for"
    world.run(policy, batch, BEGINNING + steps)
    took, decided = (np.array(policy.took) - clock_ns()) / 1e3, np.zeros(BEGINNING + steps, bool)
    decided[policy.decided] = True
    took, decided = took[BEGINNING:], decided[BEGINNING:]
    return float(took.mean()), float(np.median(took[~decided])), float(np.median(took[decided])), steps / int(decided.sum())


def measured(batch: int, steps: int, repeats: int) -> dict[str, Any]:
    """One row: the medians of the runs, each with texts and noise of its own, and of the first the smallest and the largest."""
    runs = [timed(batch, steps, seed) for seed in range(repeats)]
    step, plain, decision, apart = (statistics.median(found) for found in zip(*runs, strict=True))
    return {
        "shape": "steady batch", "backend": "host", "draft_tokens": MOST, "batch": batch, "repeats": repeats, "steps": steps,
        "us_per_step": round(step, 1), "us_per_step_spread": [round(min(runs)[0], 1), round(max(runs)[0], 1)],
        "us_without_decision": round(plain, 1), "us_of_a_decision": round(decision), "steps_a_decision": round(apart),
    }  # fmt: skip


def markdown(rows: list[dict[str, Any]]) -> str:
    """One line a batch."""
    lines = ["| batch | us a step | without a decision | a decision | steps from one to the next |", "|---" * 5 + "|"]
    for row in rows:
        shown = (row["us_per_step"], row["us_without_decision"], row["us_of_a_decision"], row["steps_a_decision"])
        lines.append(f"| {row['batch']} | " + " | ".join(f"{figure:g}" for figure in shown) + " |")
    return "\n".join(lines) + "\n"


def about(result: dict[str, Any]) -> str:
    """What the table says, before it."""
    first = result["rows"][0]
    return f"Microseconds of the host ({result['device']}), medians of {first['repeats']} runs of {first['steps']:,} steps."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    rows = []
    for batch in (1, 8, 64):
        rows.append(measured(batch, options.steps, options.repeats))
        print(rows[-1], file=sys.stderr, flush=True)
    result = report.document(rows, method=(__doc__ or "").strip())
    report.write(options.out, result)
    if options.page:
        report.renew(options.page, FIGURES, about(result), markdown(rows))


if __name__ == "__main__":
    main()
