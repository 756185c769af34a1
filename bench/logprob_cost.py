"""What log probabilities cost the host of a step, and how long their record is, on the backend whose kernels cost nothing.

64 streaming requests, K = 3, every draft accepted; engines whose requests want different things take turns of eight steps,
three of each kind, since where one's memory lies is worth a few per cent, and each time in another order, drawn by chance,
since each leaves the caches to the next; texts that are nearly as long as the model allows are begun anew, which is not
measured. `host`: what the engine's own thread spends on a step and on handing its outputs over (`Engine.step`, `Engine.take`),
without what the null device's kernels and copies take. `ratio`: of the turns of a kind to those of the engines that may report
log probabilities and whose requests want none, each turn by the median of its steps; median and quartiles over the turns.
`convert`: what another thread spends to make one message of the outputs (`OutputProcessor`, `pack`). `pack`: the reference's
kernel that packs the record, by itself: the null device leaves a record that would be the same where it is, and copies it whole.
The fixed record has 21 columns for every place of every window, as a record of fixed size would have, asked for or not: it is
computed, copied and kept as if every request had asked for 20.

    python bench/logprob_cost.py --out bench/results/logprobs.json --page docs/serving.md
    python bench/logprob_cost.py --read bench/results/logprobs.json --page docs/serving.md
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from polydraft.bench import report

FIGURES = "bench/results/logprobs.json"
WISHES = {"no engine option": None, "nothing": None, "top 0": 0, "top 5": 5, "fixed 21 columns": 20}
BASE = "nothing"
BATCH, DRAFTS, TURN, WARM_UP, NEW_TOKENS, INSTANCES = 64, 3, 8, 4, 2000, 3


class Engine:
    """One engine of the comparison, in the middle of long texts."""

    def __init__(self, name: str) -> None:
        from polydraft import LLM, SamplingParams
        from polydraft.output.output_processor import OutputProcessor

        most = None if name == "no engine option" else 20
        options: Any = {"max_num_seqs": BATCH, "draft_tokens": DRAFTS, "max_model_len": 2048, "logprobs": most}
        self.engine = LLM(backend="null", **options).engine
        self.processor = OutputProcessor(self.engine.tokenizer)
        self.params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, logprobs=WISHES[name])
        self.begin()
        self.host: list[float] = []
        self.convert: list[float] = []
        self.words: list[int] = []
        self.pack = self._timed_pack()

    def begin(self) -> None:
        """Begin the texts, and come to the middle of them."""
        for i in range(BATCH):
            self.engine.add((5, i + 1), self.params, id=str(i), stream=True)
        self.turns_left = (NEW_TOKENS - 1) // (DRAFTS + 1) // TURN - 1  # the first steps prefill
        for _ in range(WARM_UP):
            self.turn()

    def renew(self) -> None:
        """Give up the texts and begin others."""
        for i in range(BATCH):
            self.engine.abort(str(i))
        while self.engine.has_work:
            self.engine.step()
        self.processor.deltas(self.engine.take())
        self.begin()

    def turn(self) -> tuple[float, float, int]:
        """Some steps: median host and mean converting microseconds of a step, and bytes that came back in each."""
        from polydraft.output.request_delta import pack

        self.turns_left -= 1
        counters, taken = self.engine.device.counters, []
        before, host = counters.bytes_downloaded, []
        for _ in range(TURN):
            kernels, start = counters.extra["kernel_ns"], time.perf_counter_ns()
            self.engine.step()
            taken.append(self.engine.take())
            host.append(time.perf_counter_ns() - start - (counters.extra["kernel_ns"] - kernels))
        start = time.perf_counter_ns()
        for one in taken:
            pack(self.processor.deltas(one))
        convert = time.perf_counter_ns() - start
        return statistics.median(host) / 1e3, convert / TURN / 1e3, (counters.bytes_downloaded - before) // TURN

    def note(self) -> None:
        if self.turns_left < 1:
            self.renew()
        host, convert, words = self.turn()
        self.host.append(host)
        self.convert.append(convert)
        self.words.append(words)

    def _timed_pack(self) -> float:
        """Microseconds of the packing kernel, median of some launches; 0 where nobody wants a record."""
        from polydraft.reference.logprobs import KERNELS
        from polydraft.reference.provider import arrays_of

        times = []
        programs = self.engine.runner.programs
        if "greedy.logprobs" not in programs or self.engine.slots.num_top.max() < 0:
            return 0.0
        args: Any = next(e.args for e in programs["greedy.logprobs"]["target"].entries if e.contract == "pack_logprobs")
        kernel = KERNELS["pack_logprobs"](arrays_of(args), self.engine.resolved.limits)
        for _ in range(50):
            start = time.perf_counter_ns()
            kernel(BATCH)
            times.append((time.perf_counter_ns() - start) / 1e3)
        return statistics.median(times)


def measure(turns: int) -> list[dict[str, Any]]:
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
    ratios = sorted(own / other for own, other in zip(host, base, strict=True))
    return {
        "what": "log probabilities", "shape": "demo", "backend": "null", "batch": BATCH, "draft_tokens": DRAFTS, "asked": name,
        "host_us_per_step": round(statistics.median(host), 1), "spread": [round(v, 1) for v in _quartiles(host)],
        "ratio": round(statistics.median(ratios), 4), "ratio_spread": [round(v, 4) for v in _quartiles(ratios)],
        "convert_us_per_step": round(statistics.median(v for one in same for v in one.convert), 1),
        "pack_us": round(statistics.median(one.pack for one in same), 1),
        "bytes_per_step": same[0].words[-1], "repeats": len(host),
    }  # fmt: skip


def _quartiles(values: list[float]) -> tuple[float, float]:
    first, _, third = statistics.quantiles(values, n=4)
    return first, third


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| each of 64 asks for | host, us a step | ratio | its quartiles | packing kernel, us | other thread, us | bytes up |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["ratio_spread"]
        lines.append(
            f"| {row['asked']} | {row['host_us_per_step']:.0f} | {row['ratio']:.3f} | {low:.3f} to {high:.3f} | "
            f"{row['pack_us']:.0f} | {row['convert_us_per_step']:.0f} | {row['bytes_per_step']:,} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=400)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.read:
        found = json.loads(options.read.read_text(encoding="utf-8"))
    else:
        found = report.document(measure(options.turns), method=(__doc__ or "").strip())
    if options.out:
        report.write(options.out, found)
    if options.page:
        report.renew(options.page, FIGURES, markdown(found["rows"]))
    print(markdown(found["rows"]))


if __name__ == "__main__":
    main()
