"""What limits of thinking cost the host of a step, on the backend whose kernels cost nothing.

64 streaming requests, K = 3, every draft accepted; engines whose requests want different things take turns of eight steps,
three of each kind, each time in another order, drawn by chance; texts that are nearly as long as the model allows are begun
anew, which is not measured. `host`: what the engine's own thread spends on a step and on handing its outputs over
(`Engine.step`, `Engine.take`), without what the null device's kernels and copies take. `ratio`: of the turns of a kind to those
of the engines that know nothing of thinking, each turn by the median of its steps; median and quartiles over the turns.
`convert`: what another thread spends to make the outputs' deltas. The null device captures nothing: launches are calls here, of
which a captured step has none.

    python bench/thinking_cost.py --page docs/serving.md
    python bench/thinking_cost.py --read bench/results/thinking_cost.json --page docs/serving.md
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import statistics
import time
from pathlib import Path
from typing import Any

from polydraft.bench import report

FIGURES = "bench/results/thinking_cost.json"
AROUND = {"think_start_ids": (7,), "think_end_ids": (11,), "think_forced_ids": (9, 11)}
LIMITS = {"thinking_limit": 900, "reply_budget": 800, "reply_start_token_ids": (3, 4), "stop_token_ids": (2,)}
WISHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "nothing, of an engine that knows thinking": (AROUND, {}),
    "limits of thinking and reply": (AROUND, LIMITS),
    "a penalty": ({}, {"presence_penalty": 0.5}),
    "nothing, of an engine that takes grammars": ({"constraints": True}, {}),
}
"""Options of the engine and of its requests."""
BASE = "nothing"
BATCH, DRAFTS, TURN, WARM_UP, NEW_TOKENS, INSTANCES = 64, 3, 8, 4, 2000, 3


class Engine:
    """One engine of the comparison, in the middle of long texts."""

    def __init__(self, name: str) -> None:
        from polydraft import LLM, SamplingParams
        from polydraft.output.output_processor import OutputProcessor

        options, asked = WISHES[name]
        self.engine = LLM(backend="null", max_num_seqs=BATCH, draft_tokens=DRAFTS, max_model_len=2048, **options).engine
        self.processor = OutputProcessor(self.engine.tokenizer)
        self.params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, **asked)
        self.begin()
        self.host: list[float] = []
        self.convert: list[float] = []

    def begin(self) -> None:
        """Begin the texts, and come to the middle of them."""
        for i in range(BATCH):
            self.engine.add((5, i + 1, 7), self.params, id=str(i), stream=True)
        self.turns_left = (NEW_TOKENS - 1) // (DRAFTS + 1) // TURN - 1  # the first steps prefill
        for _ in range(WARM_UP):
            self.turn()

    def turn(self) -> tuple[float, float]:
        """Some steps: median host and mean converting microseconds of a step."""
        self.turns_left -= 1
        counters, taken, host = self.engine.device.counters, [], []
        for _ in range(TURN):
            kernels, start = counters.extra["kernel_ns"], time.perf_counter_ns()
            self.engine.step()
            taken.append(self.engine.take())
            host.append(time.perf_counter_ns() - start - (counters.extra["kernel_ns"] - kernels))
        start = time.perf_counter_ns()
        for one in taken:
            self.processor.deltas(one)
        return statistics.median(host) / 1e3, (time.perf_counter_ns() - start) / TURN / 1e3

    def note(self) -> None:
        """A turn that counts."""
        if self.turns_left < 1:
            for i in range(BATCH):
                self.engine.abort(str(i))
            while self.engine.has_work:
                self.engine.step()
            self.processor.deltas(self.engine.take())
            self.begin()
        host, convert = self.turn()
        self.host.append(host)
        self.convert.append(convert)


def measure(turns: int) -> list[dict[str, Any]]:
    """A row a wish."""
    logging.disable(logging.WARNING)  # of texts that repeat one token, as all of this device do
    engines = {name: [Engine(name) for _ in range(INSTANCES)] for name in WISHES}
    order, chance = [engine for same in engines.values() for engine in same], random.Random(0)
    gc.collect()
    gc.freeze()
    for _ in range(turns):
        chance.shuffle(order)
        for engine in order:
            engine.note()
    return [_row(name, same, engines[BASE]) for name, same in engines.items()]


def _row(name: str, same: list[Engine], bases: list[Engine]) -> dict[str, Any]:
    host, base = ([statistics.mean(turn) for turn in zip(*(one.host for one in some), strict=True)] for some in (same, bases))
    ratios = [own / other for own, other in zip(host, base, strict=True)]
    return {
        "what": "limits of thinking", "shape": "demo", "backend": "null", "batch": BATCH, "draft_tokens": DRAFTS, "asked": name,
        "host_us_per_step": round(statistics.median(host), 1), "spread": [round(v, 1) for v in _quartiles(host)],
        "ratio": round(statistics.median(ratios), 4), "ratio_spread": [round(v, 4) for v in _quartiles(ratios)],
        "convert_us_per_step": round(statistics.median(v for one in same for v in one.convert), 1),
        "repeats": len(host),
    }  # fmt: skip


def _quartiles(values: list[float]) -> tuple[float, float]:
    first, _, third = statistics.quantiles(values, n=4)
    return first, third


def markdown(rows: list[dict[str, Any]]) -> str:
    """A line a wish."""
    lines = ["| each of 64 asks for | host, us a step | ratio | its quartiles | other thread, us |", "|---|---|---|---|---|"]
    for row in rows:
        low, high = row["ratio_spread"]
        lines.append(
            f"| {row['asked']} | {row['host_us_per_step']:.0f} | {row['ratio']:.3f} | {low:.3f} to {high:.3f} | "
            f"{row['convert_us_per_step']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, or read, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path(FIGURES))
    parser.add_argument("--read", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.read:
        found = json.loads(options.read.read_text(encoding="utf-8"))
    else:
        found = report.document(measure(options.turns), method=(__doc__ or "").strip())
        report.write(options.out, found)
    if options.page:
        report.renew(options.page, FIGURES, markdown(found["rows"]))
    print(markdown(found["rows"]))


if __name__ == "__main__":
    main()
