"""A decode step of the demo model on the Paddle backend's CPU place beside one of the reference backend, in one process.

Two live engines decode the same requests with K = 3 and take turns of a few steps, with the same number of threads each (OpenMP
of Paddle, OpenBLAS of NumPy), which is fixed before either is imported: one process for each number of threads. What counts is
the ratio of the two times of one turn, in the median of all turns: what slows the machine down for longer meets both. Before each
turn the process rests until the threads of the other engine have gone to sleep, which spin for a while when they have nothing to
do, and the first step of a turn wakes one's own. Prints a table; --out writes a file, --page puts the table into a page behind
its marker.

    python bench/paddle_vs_reference.py --out bench/results/paddle_vs_reference.json --page docs/backends/paddle.md
    python bench/paddle_vs_reference.py --read bench/results/paddle_vs_reference.json --page docs/backends/paddle.md
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FIGURES = "bench/results/paddle_vs_reference.json"
BACKENDS = ("reference", "paddle")
ASKED = 8
"""From this batch on the Paddle backend is to be no slower."""
PROMPT_TOKENS, NEW_TOKENS, DRAFTS, TURN = 32, 96, 3, 6
REST_S = 0.25
"""Longer than a thread of either library spins for work."""
METHOD = (
    "the demo model, K = 3, greedy, end of text ignored, prompts of 32 tokens and texts of 96; two engines in one process, in "
    "turns of 6 steps in which every request has a round, the other first in every second turn, after a rest and a step that "
    "does not count; a turn's figure is the median of its steps, a row's that of its turns, as spread the quartiles; ratio: "
    "reference's time over Paddle's in the same turn, above 1 where Paddle is faster"
)


# -- one process a number of threads ------------------------------------------------------------------
class Decoding:
    """One engine in the middle of the texts of `batch` requests; new ones follow when they end."""

    def __init__(self, name: str, batch: int) -> None:
        from polydraft.bench.measure import Load
        from polydraft.bench.suite import Suite
        from polydraft.config import EngineConfig

        self.load = Load(batch, PROMPT_TOKENS, NEW_TOKENS)
        self.engine = Suite(EngineConfig(backend=name)).engine(self.load, DRAFTS, {})
        self._running = 0
        self.turns: list[float] = []

    def step(self) -> float:
        """Milliseconds of the next step in which every request has a round."""
        while True:
            if not self._running:
                self.load.add(self.engine)
                self._running = self.load.batch
            rounds, start = self.engine.totals.rounds, time.perf_counter()
            self.engine.step()
            self._running -= len(self.engine.poll())
            if self.engine.totals.rounds - rounds == self.load.batch:
                return 1e3 * (time.perf_counter() - start)

    def turn(self) -> None:
        """Some steps, of which the median is kept."""
        time.sleep(REST_S)
        self.step()
        self.turns.append(statistics.median(self.step() for _ in range(TURN)))


def measure(threads: int, batches: list[int], turns: int) -> list[dict[str, Any]]:
    """Rows of all batch sizes; both engines of one are alive together."""
    rows = []
    for batch in batches:
        engines = {name: Decoding(name, batch) for name in BACKENDS}
        for one in engines.values():
            for _ in range(NEW_TOKENS // 2):
                one.step()
        gc.collect()
        gc.freeze()
        for turn in range(turns):
            print(f"\r{threads} threads, batch {batch}, turn {turn + 1} of {turns} ", end="", file=sys.stderr)
            for name in BACKENDS if turn % 2 else BACKENDS[::-1]:
                engines[name].turn()
        reference, paddle = (engines[name].turns for name in BACKENDS)
        rows += [row(one, threads) for one in engines.values()]
        rows[-1] |= summary("ratio", [own / other for own, other in zip(reference, paddle, strict=True)], rows[-1]["spread"])
        gc.unfreeze()
        for one in engines.values():
            one.engine.close()
    print(file=sys.stderr)
    return rows


def row(one: Decoding, threads: int) -> dict[str, Any]:
    """What was measured of one engine."""
    resolved = one.engine.resolved
    spread: dict[str, list[float]] = {}
    return {
        "shape": one.engine.model.name, "backend": resolved.backend, "evidence": one.engine.info.evidence,
        "device": one.engine.device.spec, "threads": threads, "batch": one.load.batch, "draft_tokens": DRAFTS,
        **summary("ms_per_round", one.turns, spread), "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS,
        "dtype": resolved.dtype, "graph": resolved.graph, "overlap": resolved.overlap, "repeats": len(one.turns),
        "spread": spread,
    }  # fmt: skip


def summary(name: str, values: list[float], spread: dict[str, list[float]]) -> dict[str, float]:
    """The median by name; the quartiles go into `spread`."""
    low, median, high = statistics.quantiles(values, n=4)
    spread[name] = [round(low, 4), round(high, 4)]
    return {name: round(median, 4)}


def in_a_process(threads: int, batches: list[int], turns: int) -> list[dict[str, Any]]:
    """`measure` where nothing has been imported yet."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    command = [sys.executable, __file__, f"--threads={threads}", "--rows", f"--batches={','.join(map(str, batches))}"]
    done = subprocess.run(
        [*command, f"--turns={turns}"],
        env={**os.environ, **dict.fromkeys(names, str(threads))}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


# -- the table -----------------------------------------------------------------------------------------
def table(rows: list[dict[str, Any]]) -> str:
    """One line a batch size and number of threads, in Markdown."""
    lines = [
        "| threads | batch | reference, ms a round | paddle, ms a round | reference / paddle | its quartiles |",
        "|---" * 6 + "|",
    ]
    for reference, paddle in zip(rows[::2], rows[1::2], strict=True):
        low, high = paddle["spread"]["ratio"]
        times = f"{reference['ms_per_round']:.1f} | {paddle['ms_per_round']:.1f}"
        lines.append(f"| {paddle['threads']} | {paddle['batch']} | {times} | {paddle['ratio']:.2f} | {low:.2f} to {high:.2f} |")
    return "\n".join(lines)


def paragraphs(result: dict[str, Any]) -> tuple[str, str]:
    """What the page says: when and where, and the table."""
    versions = ", ".join(f"{name} {result['versions'][name.lower()]}" for name in ("Python", "NumPy", "Paddle"))
    return f"Measured on {result['date']} on {result['device']}, {versions}:", table(result["rows"])


def main() -> None:
    """Run and print; fails where Paddle is slower than asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--batches", default="1,8,16,32")
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--rows", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--read", type=Path, help="make the table of this result instead of measuring")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path, help="put the table into this page")
    args = parser.parse_args()
    threads, batches = ([int(part) for part in text.split(",")] for text in (args.threads, args.batches))
    if args.rows:
        print(json.dumps(measure(threads[0], batches, args.turns)))
        return
    from importlib.metadata import version

    from polydraft.bench import report

    if args.read:
        result = json.loads(args.read.read_text())
    else:
        rows = [row for count in threads for row in in_a_process(count, batches, args.turns)]
        result = report.document(rows, method=METHOD)
        result["versions"]["paddle"] = version("paddlepaddle")
    print(table(result["rows"]))
    if args.out:
        report.write(args.out, result)
    if args.page:
        report.renew(args.page, FIGURES, *paragraphs(result))
    slow = [row for row in result["rows"] if row["batch"] >= ASKED and row.get("ratio", 1.0) < 1.0]
    if slow:
        sys.exit("slower than the reference: " + ", ".join(f"batch {r['batch']} with {r['threads']} threads" for r in slow))


if __name__ == "__main__":
    main()
