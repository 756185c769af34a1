"""`--draft-tokens auto:K` beside fixed numbers of drafts, on the demo model.

    python bench/draft_policy.py --page docs/how_many_drafts.md
    python bench/draft_policy.py --backend reference --batch 1,8 --repeats 3 --out /tmp/policy.json
    python bench/draft_policy.py --backend cpu --one-engine --builds 9 --out bench/results/draft_policy_one_engine.json

Two kinds of work: `steady`, so many requests of equal length at once; and `drain`, as many requests whose lengths grow from one
to the next, none of which arrives later, so that the batch shrinks from all to one. All contenders of one work are engines in one
process, which take turns after one warm-up run each; what `auto` learned in the warm-up it keeps, as a server does. Greedy, end
of text ignored. Two engines that are alike differ by three or four parts in a hundred for as long as they live, by where their
memory came to lie, and `auto` goes on with what it has learned; so engines are built anew several times, in an order drawn by
chance. With `--one-engine` all contenders of a build are one engine, whose policy is told the fixed numbers: their pairs tell
what choosing brings and costs, and not what memory for the most drafts costs who makes fewer. Reported: tokens a second (median
of the turns, smallest and largest), and of each fixed number by how much `auto` is faster or slower: the median over the
builds of the median of the ratios of the same turn, with an interval that has it in 95 of 100 cases (of fewer than six builds the
smallest and the largest ratio).
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polydraft import LLM, Engine, SamplingParams
from polydraft.bench import report
from polydraft.config import EngineConfig
from polydraft.contracts.base import Limits
from polydraft.host.adaptive_drafts import AdaptiveDrafts
from polydraft.host.draft_policy import DraftView

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "bench" / "results" / "draft_policy.json"
FIGURES, OF_ONE = "bench/results/draft_policy.json", "bench/results/draft_policy_one_engine.json"
"""Where results are: of an engine for each contender, and of one for all."""
MOST, AUTO = 5, "auto:5"
CONTENDERS: tuple[int | str, ...] = (0, 1, 3, 5, AUTO)
WORDS = ("def add", "class Stack:", "import os", "for i in", "x = [1, 2", "while True:", "def read", "return")


class Told(AdaptiveDrafts):
    """The policy of an engine with so many slots, or the number that it is told."""

    told: int | None = None

    def __init__(self, slots: int) -> None:
        super().__init__(Limits(slots, MOST, 64, 64, 64, 16, 64, 4, 1, 100))

    def choose(self, view: DraftView) -> int:
        """As told."""
        return super().choose(view) if self.told is None else self.told


class Contender(LLM):
    """An engine that makes so many drafts a step, or as its policy is told before each run."""

    def __init__(self, drafts: int | str, backend: str, slots: int, policy: Told | None = None) -> None:
        config = EngineConfig(backend=backend, draft_tokens=drafts, max_num_seqs=slots)
        self._drafts, self._policy = drafts, policy
        self._serve_from(Engine(config, draft_policy=policy))

    def timed(self, asked: tuple[list[str], list[SamplingParams]], drafts: int | str) -> float:
        """Tokens a second with so many drafts."""
        if self._policy is not None:
            self._policy.told = None if drafts == AUTO else int(drafts)
        begin = time.perf_counter()
        outputs = self.generate(*asked)
        return sum(len(output.token_ids) for output in outputs) / (time.perf_counter() - begin)


def contenders(backend: str, slots: int, order: Sequence[int | str], *, one: bool) -> dict[int | str, Contender]:
    """By number of drafts; one engine for all, or one each, built in this order."""
    if one:
        return dict.fromkeys(order, Contender(AUTO, backend, slots, Told(slots)))
    return {k: Contender(k, backend, slots) for k in order}


def work(kind: str, batch: int, tokens: int) -> tuple[list[str], list[SamplingParams]]:
    """Prompts and parameters."""
    lengths = [tokens] * batch if kind == "steady" else [tokens // 4 + tokens * i // batch for i in range(batch)]
    prompts = [f"# {i}\n{WORDS[i % len(WORDS)]}" for i in range(batch)]
    return prompts, [SamplingParams(max_new_tokens=length, ignore_eos=True) for length in lengths]


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Where the median of such ratios lies with a chance of 0.95 at least, whatever their distribution: as many of them are left
    out at both ends as may be (the sign test). The smallest and the largest of fewer than six."""
    ordered, n, left = sorted(ratios), len(ratios), 0
    while sum(math.comb(n, i) for i in range(left + 1)) <= 0.025 * 2**n:
        left += 1
    left = max(left - 1, 0)
    return ordered[left], ordered[n - 1 - left]


def compared(backend: str, kind: str, batch: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one work."""
    turns: dict[int | str, list[list[float]]] = {k: [] for k in CONTENDERS}
    made, chance = [0] * (MOST + 1), random.Random(0)
    for _ in range(options.builds):
        speeds, counts = built(backend, work(kind, batch, options.tokens), batch, options, chance)
        made = [one + other for one, other in zip(made, counts, strict=True)]
        for k in CONTENDERS:
            turns[k].append(speeds[k])
    rows: list[dict[str, Any]] = []
    for k in CONTENDERS:
        every = [speed for build in turns[k] for speed in build]
        row: dict[str, Any] = {
            "work": kind, "shape": "demo", "backend": backend, "draft_tokens": MOST if k == AUTO else k,
            "policy": "auto" if k == AUTO else "fixed", "batch": batch, "new_tokens": options.tokens, "repeats": len(every),
            "builds": options.builds, "one_engine": options.one_engine, "tokens_per_s": round(statistics.median(every), 1),
            "spread": [round(min(every), 1), round(max(every), 1)],
        }  # fmt: skip
        if k == AUTO:
            row["drafts_per_step"] = made
        else:
            ratios = [
                statistics.median(auto / own for auto, own in zip(*both, strict=True))
                for both in zip(turns[AUTO], turns[k], strict=True)
            ]
            row["auto_over_this"] = round(statistics.median(ratios), 3)
            row["auto_over_this_interval"] = [round(each, 3) for each in interval(ratios)]
        rows.append(row)
    return rows


def built(
    backend: str, asked: tuple[list[str], list[SamplingParams]], batch: int, options: argparse.Namespace, chance: random.Random
) -> tuple[dict[int | str, list[float]], list[int]]:
    """Tokens a second of each turn of engines that are built for it, and how many steps of `auto` made how many drafts."""
    order = chance.sample(CONTENDERS, len(CONTENDERS))
    engines = contenders(backend, batch, order, one=options.one_engine)
    totals, made = engines[AUTO].engine.totals, [0] * (MOST + 1)
    for k, engine in engines.items():
        engine.timed(asked, k)
    speeds: dict[int | str, list[float]] = {k: [] for k in CONTENDERS}
    begun = time.monotonic()
    for turn in range(options.repeats):
        if turn and time.monotonic() - begun > options.seconds:
            break
        for k in chance.sample(CONTENDERS, len(CONTENDERS)):
            before = list(totals.drafts_per_step)
            speeds[k].append(engines[k].timed(asked, k))
            if k == AUTO:
                made = [one + now - then for one, now, then in zip(made, totals.drafts_per_step, before, strict=True)]
    for engine in set(engines.values()):
        engine.close()
    return speeds, made


def markdown(rows: list[dict[str, Any]]) -> str:
    """One line a work."""
    lines = ["| backend | work | batch | K = 0 | K = 1 | K = 3 | K = 5 | auto:5 | auto over the best of them |", "|---" * 9 + "|"]
    for first in range(0, len(rows), len(CONTENDERS)):
        *fixed, auto = rows[first : first + len(CONTENDERS)]
        best = max(fixed, key=lambda row: row["tokens_per_s"])
        low, high = best["auto_over_this_interval"]
        cells = " | ".join(f"{row['tokens_per_s']:,.0f}" for row in (*fixed, auto))
        ratio = f"{best['auto_over_this']:.3f} ({low:.3f} to {high:.3f}), K = {best['draft_tokens']}"
        lines.append(f"| {auto['backend']} | {auto['work']} | {auto['batch']} | {cells} | {ratio} |")
    return "\n".join(lines) + "\n"


def about(rows: list[dict[str, Any]]) -> str:
    """What the table says, before it."""

    def span(what: str) -> str:
        found = sorted({row[what] for row in rows})
        return " to ".join(map(str, dict.fromkeys((found[0], found[-1]))))

    turns = f"median of {span('repeats')} turns of {span('builds')} builds"
    one = ", one engine for all contenders of a build" if rows[0].get("one_engine") else ""
    return f"Tokens a second on 2 cores, {rows[0]['new_tokens']} tokens a request, {turns}{one}."


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="cpu,reference")
    parser.add_argument("--work", default="steady,drain")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--one-engine", action="store_true", help="of each build, for all contenders")
    parser.add_argument("--builds", type=int, default=6, help="how often engines are built anew")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each build")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further turn of a build after this time")
    parser.add_argument("--out", type=Path, default=TARGET)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    rows = []
    for backend in options.backend.split(","):
        for kind in options.work.split(","):
            for batch in map(int, options.batch.split(",")):
                if kind == "steady" or batch > 1:
                    rows += compared(backend, kind, batch, options)
                    print(markdown(rows[-len(CONTENDERS) :]).splitlines()[-1], flush=True)
                    report.write(options.out, report.document(rows, method=(__doc__ or "").strip()))
    if options.page:
        report.renew(options.page, OF_ONE if options.one_engine else FIGURES, about(rows), markdown(rows))


if __name__ == "__main__":
    main()
