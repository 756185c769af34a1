"""`--draft-tokens auto:5` beside fixed numbers of drafts, simulated: the real policy, over steps whose times come from a table.

    python bench/draft_policy_traces.py --page docs/how_many_drafts.md
    python bench/draft_policy_traces.py --machine mimo-7b,steep --seeds 2 --out traces.json

Nothing is computed and nothing is timed (`tests/support/simulated_steps.py`). A machine is a table of milliseconds by requests
and drafts: measured ones of this folder, linear between what was measured and beyond it, and invented ones of other shapes. Where
it replays graphs at full size, a step takes as long as the larger of the drafts that it verifies and those that it makes;
elsewhere rows that nobody verifies save their part of what drafts cost. Times have noise, and the machine's speed wanders;
outcomes are known a step late where there is a queue.

Work: `steady`, as many requests of 512 tokens at once; `drain`, as many of 128 to 640 tokens, none of which arrives later;
`trace`, 64 requests of which request i ends after 64 + 16 i tokens and the acceptance of every other one falls from
0.8 / 0.75 / 0.75 to 0.3 at its 128th token. Prompts take no time. Each contender serves the same texts three times over;
`auto` begins with the times of a rehearsal, as an engine has one (`polydraft/host/rehearsal.py`), and knows nothing of the texts.
Reported: tokens a second of the second and third time; by how much `auto` is faster or slower than each fixed number there, mean
over the seeds, smallest and largest, and in the first time; and the same of `known`, a policy without windows that is told times
and chances and takes the number with the best pace in every step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polydraft.bench import report
from polydraft.device import Array
from polydraft.host.adaptive_drafts import FAR, shares
from polydraft.host.draft_policy import Always, DraftPolicy, DraftView, ladder
from polydraft.step.graphs import default_buckets

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.support.simulated_steps import Chances, Cost, Step, World  # noqa: E402  tests of the policy use the same worlds

TARGET = ROOT / "bench" / "results" / "draft_policy_traces.json"
FIGURES = "bench/results/draft_policy_traces.json"
FIXED, MOST, TURNS, TOKENS = (0, 1, 3, 5), 5, 3, 512
HIGH, LOW = (0.8, 0.75, 0.75, 0.75, 0.75), (0.5, 0.4, 0.25, 0.2, 0.2)
"""Chances by place, given those before: 0.8 / 0.6 / 0.45 and 0.5 / 0.2 / 0.05 of rounds accept at least 1 / 2 / 3 drafts."""
DEMO = (0.92, 0.87, 0.85, 0.9, 0.9)
"""As the demo model's tokens a round are (`cpu.json`)."""
FALLEN = 0.3
BUCKETS = default_buckets(64)


class Machine(NamedTuple):
    """What a step costs, batches and chances that are tried, spread and drift of times, and steps that outcomes are late."""

    cost: Cost
    batches: tuple[int, ...]
    accepted: tuple[tuple[float, ...], ...]
    noise: float
    drift: float
    late: int


def measured(name: str, shape: str, backend: str, dtype: str) -> dict[int, dict[int, float]]:
    """{requests: {drafts: milliseconds}} of a result of this folder, as a step of full batch has them."""
    table: dict[int, dict[int, float]] = {}
    for row in json.loads((ROOT / "bench" / "results" / name).read_text(encoding="utf-8"))["rows"]:
        known = row["shape"], row["backend"], row.get("dtype", dtype), row.get("work", "steady"), row.get("policy", "fixed")
        if known == (shape, backend, dtype, "steady", "fixed"):
            batch, drafts = row["batch"], row["draft_tokens"]
            tokens = row.get("tokens_per_round") or 1.0 + float(np.cumprod(DEMO[:drafts]).sum())
            table.setdefault(batch, {})[drafts] = row.get("ms_per_round") or 1e3 * batch * tokens / row["tokens_per_s"]
    return table


def between(table: dict[int, dict[int, float]]) -> Callable[[int, int], float]:
    """Milliseconds by requests and drafts: linear between those of the table, and beyond them."""

    def line(x: float, points: dict[int, float]) -> float:
        known = sorted(points)
        low = max((k for k in known[:-1] if k <= x), default=known[0])
        high = known[known.index(low) + 1]
        return points[low] + (points[high] - points[low]) * (x - low) / (high - low)

    by_drafts = {batch: {k: line(k, row) for k in range(MOST + 1)} for batch, row in table.items()}
    return lambda count, drafts: line(count, {batch: row[drafts] for batch, row in by_drafts.items()})


def replayed(name: str, shape: str, dtype: str) -> Cost:
    """A step that is replayed at full size, in its bucket."""
    at = between(measured(name, shape, "cuda", dtype))

    def cost(step: Step) -> float:
        return at(next(b for b in BUCKETS if b >= step.requests), max(step.window - 1, step.drafts))

    return cost


def by_rows(name: str, shape: str, backend: str, dtype: str, part: float) -> Cost:
    """A step that is faster with fewer rows, which are this part of what drafts cost."""
    at = between(measured(name, shape, backend, dtype))

    def cost(step: Step) -> float:
        none, asked = at(step.requests, 0), step.requests * (step.window - 1)
        verified = (step.rows - step.requests) / asked * (at(step.requests, step.window - 1) - none) if asked else 0.0
        return none + part * verified + (1.0 - part) * (at(step.requests, step.drafts) - none)

    return cost


def machines() -> dict[str, Machine]:
    """By name."""
    few, all_ = (1, 8, 32), (1, 8, 32, 64)

    def growing(step: Step) -> float:
        return 2.0 + 0.3 * step.drafts + 0.15 * step.rows + 0.0006 * step.requests * step.written

    return {
        "demo, 2 cores": Machine(by_rows("cpu.json", "demo", "cpu", "f32", 0.7), few, (DEMO,), 0.15, 0.1, 0),
        "demo, H200": Machine(replayed("draft_policy_cuda.json", "demo", "f32"), few, (DEMO,), 0.05, 0.03, 1),
        "mimo-7b, H200": Machine(replayed("cuda.json", "mimo-7b", "bf16"), all_, (HIGH, LOW), 0.03, 0.02, 1),
        "ernie21, H200": Machine(by_rows("experts.json", "ernie21", "cuda", "bf16", 0.9), all_, (HIGH, LOW), 0.03, 0.02, 1),
        "steep": Machine(lambda step: 2.0 + 0.3 * step.drafts + 0.5 * step.rows, all_, (HIGH, LOW), 0.05, 0.03, 1),
        "flat": Machine(lambda step: 5.0 + 0.1 * step.drafts, all_, (HIGH, LOW), 0.05, 0.03, 1),
        "bumpy": Machine(lambda step: 2.0 + 0.96 * -(-step.rows // 32) + 0.3 * step.drafts, all_, (HIGH, LOW), 0.05, 0.03, 1),
        "growing": Machine(growing, all_, (HIGH, LOW), 0.05, 0.03, 1),
    }


class Known:
    """Takes the number with the best pace by true times and chances."""

    def __init__(self, world: World) -> None:
        self.rungs, self._world, self._now = ladder(MOST), world, 1

    def choose(self, view: DraftView) -> int:
        """The logarithm of the pace, as the adaptive policy has it: a weighted mean over the requests."""
        world, slots, count, now = self._world, view.decode, len(view.decode), self._now
        chances = np.broadcast_to(world.chances(world, slots), (count, MOST))
        tokens = np.log1p(np.concatenate((np.zeros((count, 1)), chances.cumprod(axis=1).cumsum(axis=1)), axis=1))
        steps = (world.slots.max_total[slots] - world.done[slots]).clip(1) / np.exp(tokens[:, now])
        written = float(world.done[slots].mean())

        def cost(requests: int, k: int) -> float:
            return world.cost(Step(requests, k + 1, requests * (k + 1), k, False, written))

        gains = shares(np.minimum(steps, FAR), cost(1, now), cost(count, now)) @ tokens
        self._now = max(self.rungs, key=lambda k: gains[k] - np.log(cost(count, k)))
        return self._now


def lengths(kind: str, batch: int) -> Array:
    """Tokens of each request."""
    if kind == "steady":
        return np.full(batch, TOKENS)
    return TOKENS // 4 + TOKENS * np.arange(batch) // batch if kind == "drain" else 64 + 16 * np.arange(batch)


def accepting(kind: str, accepted: tuple[float, ...]) -> Chances:
    """The chances of a work."""
    if kind != "trace":
        return lambda world, slots: np.array(accepted)
    return lambda world, slots: np.where(((slots % 2 == 1) & (world.done[slots] >= 128))[:, None], FALLEN, np.array(accepted))


def served(machine: Machine, kind: str, batch: int, accepted: tuple[float, ...], policy: int | str, seed: int) -> list[float]:
    """Tokens a second of each turn."""
    world = World(
        batch, machine.cost, accepting(kind, accepted), lengths=lengths(kind, batch), noise=machine.noise, drift=machine.drift,
        late=machine.late, seed=seed,
    )  # fmt: skip
    chosen: DraftPolicy = (
        Always(policy) if isinstance(policy, int) else world.adaptive(rehearsed=True) if policy == "auto" else Known(world)
    )
    speeds = [1e3 * world.drain(chosen)]
    for _ in range(TURNS - 1):
        world.begin(lengths(kind, batch))
        speeds.append(1e3 * world.drain(chosen))
    return speeds


def compared(name: str, machine: Machine, kind: str, batch: int, accepted: tuple[float, ...], seeds: int) -> list[dict[str, Any]]:
    """The rows of one work."""
    contenders: tuple[int | str, ...] = (*FIXED, "known", "auto")
    turns = {k: [served(machine, kind, batch, accepted, k, seed) for seed in range(seeds)] for k in contenders}
    later = {k: [statistics.harmonic_mean(turn[1:]) for turn in turns[k]] for k in contenders}
    rows = []
    for k in contenders:
        row: dict[str, Any] = {
            "shape": name, "backend": "simulated", "work": kind, "batch": batch, "accept_schedule": list(accepted),
            "policy": k if isinstance(k, str) else "fixed", "draft_tokens": k if isinstance(k, int) else MOST, "seeds": seeds,
            "tokens_per_s": round(statistics.mean(later[k]), 1),
        }  # fmt: skip
        if k != "auto":
            ratios = [auto / own for auto, own in zip(later["auto"], later[k], strict=True)]
            row["auto_over_this"] = round(statistics.mean(ratios), 3)
            row["auto_over_this_spread"] = [round(min(ratios), 3), round(max(ratios), 3)]
            firsts = [auto[0] / own[0] for auto, own in zip(turns["auto"], turns[k], strict=True)]
            row["auto_over_this_first"] = round(statistics.mean(firsts), 3)
        rows.append(row)
    return rows


def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The fixed number with most tokens a second."""
    return max((row for row in rows if row["policy"] == "fixed"), key=lambda row: float(row["tokens_per_s"]))


def markdown(rows: list[dict[str, Any]]) -> str:
    """One line a machine, work and acceptance; by batch how `auto` does beside the best fixed number, and which that is."""
    lines: dict[tuple[str, str, float], dict[int, str]] = {}
    for first in range(0, len(rows), len(FIXED) + 2):
        row = best(rows[first : first + len(FIXED) + 2])
        cells = lines.setdefault((row["shape"], row["work"], row["accept_schedule"][0]), {})
        cells[row["batch"]] = f"{row['auto_over_this']:.3f}, K = {row['draft_tokens']}"
    batches = (1, 8, 32, 64)
    head = "| machine | work | first draft accepted | " + " | ".join(f"batch {batch}" for batch in batches) + " |"
    body = [
        f"| {name} | {work} | {accepted:g} | " + " | ".join(cells.get(batch, "") for batch in batches) + " |"
        for (name, work, accepted), cells in lines.items()
    ]
    return "\n".join([head, "|---" * (3 + len(batches)) + "|", *body]) + "\n"


def about(rows: list[dict[str, Any]]) -> str:
    """What the table says, before it."""
    return f"Simulated: tokens a second of `auto:5` over the best fixed number, mean of {rows[0]['seeds']} seeds."


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--machine", default="", help="those whose name begins with one of these, separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=TARGET)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, machine in machines().items():
        if not name.startswith(tuple(options.machine.split(","))):
            continue
        works = [("steady", batch, accepted) for accepted in machine.accepted for batch in machine.batches]
        works += [("drain", batch, machine.accepted[0]) for batch in machine.batches if batch > 1]
        works += [("trace", 64, HIGH)]
        for kind, batch, accepted in works:
            rows += compared(name, machine, kind, batch, accepted, options.seeds)
            row = best(rows[-len(FIXED) - 2 :])
            told = row["auto_over_this"], row["auto_over_this_spread"], row["auto_over_this_first"]
            print(name, kind, batch, accepted[0], *told, "known", rows[-2]["auto_over_this"], flush=True)
    report.write(options.out, report.document(rows, device="none: simulated", method=(__doc__ or "").strip()))
    if options.page:
        report.renew(options.page, FIGURES, about(rows), markdown(rows))


if __name__ == "__main__":
    main()
