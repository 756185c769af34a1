"""`--draft-tokens auto:5` beside fixed numbers of drafts, on shapes of large models on an NVIDIA GPU; acceptance synthetic.

    python bench/draft_policy_shapes.py --shape mimo-7b --trace
    python bench/draft_policy_shapes.py --read mimo-7b,ernie21 --page docs/how_many_drafts.md --plot docs/images/draft_policy.png

One engine of 64 slots serves all of a shape: fixed numbers are the same policy, told what to answer, so that they have its
graphs; `none` is an engine without a drafter. Weights are random and made on the device, experts drawn uniformly. `steady`: so
many requests at once for half a second, with acceptance 0.8 / 0.6 / 0.45 or 0.5 / 0.2 / 0.05 of rounds (at least one, two, three
drafts). `trace`: 64 requests of 512 prompt tokens at once, request i ends after 64 + 16 i tokens, no others arrive; the
acceptance of odd requests falls from 0.8 / 0.75 / 0.75, each given the one before, to 0.3 at their 128th token.

Tokens a second are those from the step on in which all requests decode, as the host sees it: what the device still has to do of
the prompts by then is in the time (31 ms of half a second with `mimo-7b` at batch 32, 69 at 64), for all contenders alike.
Which drafts are right is drawn anew in each turn, by request and position, for all contenders alike. In the first turn of each
work all contenders run (`auto` twice where it is steady, of which the second time counts), in later ones `auto` and those that
were at most 3 % behind the best fixed number. What `auto` has learned it keeps, as a server does. Reported: the median of
the turns, and by how much `auto` is faster or slower than each: the median of the ratios of the same turn, with an interval
that has it in 95 of 100 cases (of fewer than six turns the smallest and the largest ratio).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))
from bench.draft_policy import MOST, Told, interval  # as for bench/draft_vocab.py
from polydraft.bench import report
from polydraft.bench.shapes import RandomCheckpoint
from polydraft.config import EngineConfig
from polydraft.device import Array
from polydraft.engine import Engine
from polydraft.host.draft_policy import DraftView
from polydraft.sampling_params import SamplingParams
from polydraft.sentinels import Phase

ROOT = Path(__file__).resolve().parent
FIGURES = "bench/results/draft_policy_{}.json"
"""Where the result of a shape is."""
FIXED = (0, 1, 3, 5)
SLOTS = 64
HIGH, LOW = (0.8, 0.75, 0.75, 0.75, 0.75), (0.5, 0.4, 0.25, 0.2, 0.2)
"""Chances by place, given those before."""
NEAR = 0.97
"""Part of the first turn's best speed of a fixed number that a contender must have to run again."""
FALLEN, FALLS = 0.3, 128
"""What the chances of odd requests of the trace become, and the token at which they do."""
PROMPT, TRACE_PROMPT = 64, 512
TOKENS, STEADY_S = 512, 0.5
"""Of a request of steady work at most, and seconds after which it ends in any case."""


class Logged(Told):
    """The policy, or the number that it is told; and what it answered."""

    def __init__(self) -> None:
        super().__init__(SLOTS)
        self.log: list[tuple[float, int, int]] = []
        """Of each step without prompts: its time, requests, and drafts."""

    def choose(self, view: DraftView) -> int:
        """As told."""
        answer = super().choose(view)
        if not view.has_prefill:
            self.log.append((time.perf_counter(), len(view.decode), answer))
        return answer


class Work(NamedTuple):
    """What is served."""

    kind: str
    batch: int
    accepted: tuple[float, ...]

    @property
    def steady(self) -> bool:
        """Whether all requests are alike, and served for a while."""
        return self.kind == "steady"

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request at most."""
        return [TOKENS] * self.batch if self.steady else [64 + 16 * i for i in range(self.batch)]


class Contenders:
    """The engines of one shape, and how fast they are."""

    def __init__(self, shape: str, *, none: bool) -> None:
        self.shape, self.policy = shape, Logged()
        self._options = {
            "backend": "cuda", "plugins": (str(ROOT / "uniform_routing.py"), str(ROOT / "changing_acceptance.py")),
            "dtype": "bf16", "prefix_cache": False, "verify": "greedy", "max_num_seqs": SLOTS, "max_batched_tokens": 8192,
            "max_model_len": TRACE_PROMPT + 64 + 16 * SLOTS, "num_blocks": SLOTS * (TRACE_PROMPT + 64 + 16 * SLOTS) // 16,
        }  # fmt: skip
        self.engine = self._engine(draft_tokens=MOST, accept_schedule=HIGH, policy=self.policy)
        self.without = self._engine(draft_tokens=0, policy=None) if none else None
        self.rehearsed = self.policy.report()

    def _engine(self, *, policy: Logged | None, **options: Any) -> Engine:
        begun = time.monotonic()
        config = EngineConfig.from_mapping({**self._options, **options})
        engine = Engine(config, checkpoint=RandomCheckpoint(ROOT / "shapes" / f"{self.shape}.json"), draft_policy=policy)
        print(f"{self.shape}, {options}: built in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        return engine

    def served(self, work: Work, who: int | str, turn: int) -> float:
        """Tokens a second."""
        engine = self.without if who == "none" else self.engine
        assert engine is not None, "asked for"
        self.policy.told = who if isinstance(who, int) else None
        self.policy.log.clear()
        chances = np.tile(np.array(work.accepted, np.float32), (SLOTS, 1))
        self._accept(chances)
        vocab, t = engine.model.vocab_size, engine.slots
        running = set()
        for i, length in enumerate(work.lengths):
            prompt = np.random.default_rng(i).integers(1, vocab, PROMPT if work.steady else TRACE_PROMPT).tolist()
            params = SamplingParams(max_new_tokens=length, ignore_eos=True, seed=turn * SLOTS + i)
            running.add(engine.add(prompt, params))
        begun, before, odd, fallen = 0.0, 0, np.zeros(SLOTS, bool), np.zeros(SLOTS, bool)
        gc.collect()
        while running and not (work.steady and begun and time.perf_counter() - begun > STEADY_S):
            engine.step()
            for output in engine.poll():
                assert output.finish_reason == "length", output.error
                running.discard(output.id)
            if not begun and int((t.phase == Phase.DECODE).sum()) == work.batch:
                begun, before = time.perf_counter(), engine.totals.new_tokens
                odd = np.array([request is not None and (request.params.seed or 0) % 2 == 1 for request in t.request])
            if not work.steady and (falls := odd & ~fallen & (t.num_known - t.prompt_len >= FALLS)).any():
                fallen |= falls
                chances[fallen] = FALLEN
                self._accept(chances)
        seconds, tokens = time.perf_counter() - begun, engine.totals.new_tokens - before
        for request in running:
            engine.abort(request)
        while engine.has_work:
            engine.step()
        engine.poll()
        return tokens / seconds

    def _accept(self, chances: Array) -> None:
        """Chances [slots, drafts] from the next step on."""
        device: Any = self.engine.device
        device.load(device.chances, chances)

    def close(self) -> None:
        """Free the device."""
        for engine in (self.engine, self.without):
            if engine is not None:
                engine.close()


def relative(log: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """With milliseconds from the first one."""
    return [(round(1e3 * (at - log[0][0]), 3), count, k) for at, count, k in log]


class Cell:
    """A work and what was measured of it."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.turns: list[dict[int | str, float]] = []
        self.drafts: Array = np.zeros(MOST + 1, np.int64)
        """Steps of `auto` by what it chose, in all turns."""
        self.log: list[list[tuple[float, int, int]]] = []
        self.fixed: dict[str, Any] = {}

    def turn(self, contenders: Contenders) -> None:
        """The next turn."""
        others: list[int | str] = [*(["none"] if contenders.without is not None else []), *FIXED]
        if self.turns:
            first = self.turns[0]
            others = [who for who in others if first[who] > NEAR * max(first[k] for k in FIXED)]
        elif self.work.steady:
            contenders.served(self.work, "auto", 0)
            self.log.append(relative(contenders.policy.log))
        order = [*others, "auto"]
        found: dict[int | str, float] = {}
        for who in order if len(self.turns) % 2 else order[::-1]:
            found[who] = contenders.served(self.work, who, len(self.turns) + 1)
            log = contenders.policy.log
            if who == "auto":
                self.log.append(relative(log))
                self.drafts += np.bincount([k for *_, k in log], minlength=MOST + 1)
            elif who != "none":
                self.fixed[str(who)] = relative(log)
        self.turns.append(found)

    def rows(self, shape: str) -> list[dict[str, Any]]:
        """A row a contender."""
        rows = []
        for who in self.turns[0]:
            speeds = [turn[who] for turn in self.turns if who in turn]
            ratios = [turn["auto"] / turn[who] for turn in self.turns if who in turn]
            row = {
                "shape": shape, "backend": "cuda", "dtype": "bf16", "weights": "random", "acceptance": "synthetic",
                "work": self.work.kind, "batch": self.work.batch, "accept_schedule": list(self.work.accepted),
                "policy": who if isinstance(who, str) else "fixed",
                "draft_tokens": who if isinstance(who, int) else {"none": 0, "auto": MOST}[who],
                "turns": len(speeds), "tokens_per_s": round(statistics.median(speeds), 1),
                "spread": [round(min(speeds), 1), round(max(speeds), 1)],
            }  # fmt: skip
            if who == "auto":
                row["drafts_per_step"] = self.drafts.tolist()
            else:
                row["auto_over_this"] = round(statistics.median(ratios), 3)
                row["auto_over_this_interval"] = [round(each, 3) for each in interval(ratios)]
            rows.append(row)
        return rows


def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The fixed number that `auto` is furthest behind, or least ahead of: not all have had the same turns."""
    return min((row for row in rows if row["policy"] == "fixed"), key=lambda row: float(row["auto_over_this"]))


def line(rows: list[dict[str, Any]]) -> str:
    """Of one work, in the table."""
    by = {row["policy"] if row["policy"] != "fixed" else row["draft_tokens"]: row for row in rows}
    ahead = best(rows)
    low, high = ahead["auto_over_this_interval"]
    cells = " | ".join(f"{by[k]['tokens_per_s']:,.0f}" if k in by else "" for k in ("none", *FIXED, "auto"))
    return (
        f"| {ahead['shape']} | {ahead['work']} | {ahead['accept_schedule'][0]:g} | {ahead['batch']} | {cells} "
        f"| {ahead['auto_over_this']:.3f} ({low:.3f} to {high:.3f}), K = {ahead['draft_tokens']} |"
    )


COLUMNS = "shape", "work", "first draft accepted", "batch", "none", "K = 0", "K = 1", "K = 3", "K = 5", "auto:5", "auto over best"


def markdown(rows: list[dict[str, Any]]) -> str:
    """One line a work."""
    works: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        works.setdefault((row["shape"], row["work"], row["accept_schedule"][0], row["batch"]), []).append(row)
    return "\n".join([f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *map(line, works.values())]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="mimo-7b")
    parser.add_argument("--batch", default="1,8,32,64")
    parser.add_argument("--accepted", default="high,low")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--none", action="store_true", help="an engine without a drafter, too")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further turn so long after the engines are built")
    parser.add_argument("--out", type=Path, help="by default among the results of this folder")
    parser.add_argument("--log", type=Path, help="what auto chose in each step of its runs")
    parser.add_argument("--read", help="measure nothing, but show the results of these shapes")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.read:
        show(options.read.split(","), options.page, options.plot)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """The works of one shape in turns."""
    contenders = Contenders(options.shape, none=options.none)
    begun = time.monotonic()
    schedules = [{"high": HIGH, "low": LOW}[name] for name in options.accepted.split(",")]
    cells = [Cell(Work("steady", batch, a)) for a in schedules for batch in map(int, options.batch.split(","))]
    cells += [Cell(Work("trace", SLOTS, HIGH))] if options.trace else []
    for turn in range(options.turns):
        for cell in cells:
            if time.monotonic() - begun < options.seconds and len(cell.turns) == turn:
                cell.turn(contenders)
                print(line(cell.rows(options.shape)), f"{time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        write(options, contenders, cells)
    contenders.close()
    print(markdown(measured(options.shape, cells)))


def measured(shape: str, cells: list[Cell]) -> list[dict[str, Any]]:
    """The rows of all works that had their turn."""
    return [row for cell in cells if cell.turns for row in cell.rows(shape)]


def write(options: argparse.Namespace, contenders: Contenders, cells: list[Cell]) -> None:
    """What there is so far."""
    from polydraft_cuda.device import device_name, driver_version

    rows = measured(options.shape, cells)
    said = {"device": device_name(0), "driver": str(driver_version()), "method": (__doc__ or "").strip()}
    report.write(options.out or ROOT.parent / FIGURES.format(options.shape), report.document(rows, **said))
    if options.log:
        logs = [{"work": cell.work._asdict(), "runs": cell.log, "fixed": cell.fixed} for cell in cells]
        told = {"rehearsed": contenders.rehearsed, "now": contenders.policy.report(), "logs": logs}
        options.log.write_text(json.dumps(told))


def about(result: dict[str, Any]) -> str:
    """What the table says, before it."""
    turns = sorted({row["turns"] for row in result["rows"] if row["policy"] == "auto"})
    many = f"{turns[0]}" if len(turns) == 1 else f"{turns[0]} to {turns[-1]}"
    return (
        f"Tokens a second of `{result['rows'][0]['shape']}` on one {result['device']}, {result['date']}, {many} turns, "
        "and `auto:5` over the fixed number that it is furthest behind, with the interval of the pairs."
    )


def show(shapes: list[str], page: Path | None, plot: Path | None) -> None:
    """Renew the tables of a page, and draw."""
    results = {shape: json.loads((ROOT.parent / FIGURES.format(shape)).read_text(encoding="utf-8")) for shape in shapes}
    for shape, result in results.items():
        if page:
            report.renew(page, FIGURES.format(shape), about(result), markdown(result["rows"]))
    if plot:
        draw(list(results.values()), plot)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """By work, `auto` over each fixed number, with the intervals of the pairs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2 * len(results)), layout="constrained")
    for axes, result in zip(np.ravel(figure.subplots(len(results), 1)), results, strict=True):
        fixed = [row for row in result["rows"] if row["policy"] == "fixed"]
        names = [f"{row['work']} {row['accept_schedule'][0]:g}\nbatch {row['batch']}" for row in fixed]
        places = {name: place for place, name in enumerate(dict.fromkeys(names))}
        for k, colour in zip(FIXED, ("#8c8c8c", "#f2b134", "#3572a5", "#b5482e"), strict=True):
            of = [(places[name] + 0.12 * (FIXED.index(k) - 1.5), row) for name, row in zip(names, fixed, strict=True)]
            of = [(x, row) for x, row in of if row["draft_tokens"] == k]
            ratios = np.array([[row["auto_over_this"], *row["auto_over_this_interval"]] for _, row in of]).T
            axes.errorbar([x for x, _ in of], ratios[0], np.abs(ratios[1:] - ratios[0]), fmt="o", color=colour, label=f"K = {k}")
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.axhline(0.97, color="black", linewidth=0.8, linestyle=":")
        axes.set_xticks(list(places.values()), list(places), fontsize=8)
        axes.set_title(f"{fixed[0]['shape']}, {result['device']}, {result['date']}", fontsize=10)
        axes.set_ylabel("auto:5 over K")
        axes.set_yscale("log")
        axes.set_yticks([0.9, 1.0, 1.2, 1.5, 2.0, 3.0], ["0.9", "1", "1.2", "1.5", "2", "3"])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False, ncols=4, loc="upper right")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
