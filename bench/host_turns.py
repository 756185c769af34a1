"""What wishes of requests cost the host of a step, on the backend whose kernels cost nothing.

64 streaming requests, K = 3, every draft accepted; engines whose requests want different things take turns of eight steps,
three of each kind, since where one's memory lies is worth a few per cent, and each time in another order, drawn by chance,
since each leaves the caches to the next; texts that are nearly as long as the model allows are begun anew, which is not
measured. `host`: what the engine's own thread spends on a step and on handing its outputs over (`Engine.step`, `Engine.take`),
without what the null device's kernels and copies take. `ratio`: of the turns of a kind to those of the kind that it is compared
with, each turn by the median of its steps; median and quartiles over the turns. `convert`: what another thread spends to make
one message of the outputs (`OutputProcessor`, `pack`). The null device captures nothing: launches are calls here, of which a
captured step has none. `logprob_cost.py` and `thinking_cost.py` say what is asked for.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from polydraft.bench import report

BATCH, DRAFTS, TURN, WARM_UP, NEW_TOKENS, INSTANCES = 64, 3, 8, 4, 2000, 3


class Wish(NamedTuple):
    """Options of an engine, and what each of its requests asks for."""

    options: Mapping[str, Any]
    params: Mapping[str, Any]


class Engine:
    """One engine of the comparison, in the middle of long texts."""

    def __init__(self, wish: Wish) -> None:
        from polydraft import LLM, SamplingParams
        from polydraft.output.output_processor import OutputProcessor

        self.engine = LLM(backend="null", max_num_seqs=BATCH, draft_tokens=DRAFTS, max_model_len=2048, **wish.options).engine
        self.processor = OutputProcessor(self.engine.tokenizer)
        self.params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, **wish.params)
        self.begin()
        self.host: list[float] = []
        self.convert: list[float] = []
        self.bytes_up: list[int] = []

    def begin(self) -> None:
        """Begin the texts, and come to the middle of them."""
        for i in range(BATCH):
            self.engine.add((5, i + 1, 7), self.params, id=str(i), stream=True)
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
        """A turn that counts."""
        if self.turns_left < 1:
            self.renew()
        host, convert, bytes_up = self.turn()
        self.host.append(host)
        self.convert.append(convert)
        self.bytes_up.append(bytes_up)


def measure(what: str, wishes: Mapping[str, Wish], base: str, turns: int) -> tuple[list[dict[str, Any]], dict[str, list[Engine]]]:
    """A row a wish, compared with that of the name `base`; and the engines of each."""
    logging.disable(logging.WARNING)  # of texts that repeat one token, as all of this device do
    engines = {name: [Engine(wish) for _ in range(INSTANCES)] for name, wish in wishes.items()}
    order, chance = [engine for same in engines.values() for engine in same], random.Random(0)
    gc.collect()
    gc.freeze()
    for _ in range(turns):
        chance.shuffle(order)
        for engine in order:
            engine.note()
    return [{"what": what, "asked": name, **_row(same, engines[base])} for name, same in engines.items()], engines


def _row(same: Sequence[Engine], bases: Sequence[Engine]) -> dict[str, Any]:
    host, base = ([statistics.mean(turn) for turn in zip(*(one.host for one in some), strict=True)] for some in (same, bases))
    ratios = [own / other for own, other in zip(host, base, strict=True)]
    return {
        "shape": "demo", "backend": "null", "batch": BATCH, "draft_tokens": DRAFTS,
        "host_us_per_step": round(statistics.median(host), 1), "spread": [round(v, 1) for v in _quartiles(host)],
        "ratio": round(statistics.median(ratios), 4), "ratio_spread": [round(v, 4) for v in _quartiles(ratios)],
        "convert_us_per_step": round(statistics.median(v for one in same for v in one.convert), 1),
        "bytes_per_step": same[0].bytes_up[-1], "repeats": len(host),
    }  # fmt: skip


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    first, _, third = statistics.quantiles(values, n=4)
    return first, third


def markdown(rows: Sequence[Mapping[str, Any]], more: Mapping[str, Callable[[Any], str]] = MappingProxyType({})) -> str:
    """A line a wish, with further columns."""
    heads = ["each of 64 asks for", "host, us a step", "ratio", "its quartiles", *more, "other thread, us"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        low, high = row["ratio_spread"]
        cells = [row["asked"], f"{row['host_us_per_step']:.0f}", f"{row['ratio']:.3f}", f"{low:.3f} to {high:.3f}"]
        cells += [*(cell(row) for cell in more.values()), f"{row['convert_us_per_step']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(
    doc: str, figures: str, rows: Callable[[int], list[dict[str, Any]]], table_of: Callable[[list[dict[str, Any]]], str]
) -> None:
    """Measure by `rows`, or read, and write; `table_of` the rows goes to a page."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path(figures), help="where what was measured is written")
    parser.add_argument("--read", type=Path, help="measure nothing, read this file")
    parser.add_argument("--page", type=Path, help="the page whose table is renewed")
    options = parser.parse_args()
    if options.read:
        found = json.loads(options.read.read_text(encoding="utf-8"))
    else:
        found = report.document(rows(options.turns), method=f"{doc.strip()}\n\n{(__doc__ or '').strip()}")
        report.write(options.out, found)
    table = table_of(found["rows"])
    if options.page:
        report.renew(options.page, figures, table)
    print(table)
