"""A decode step of the demo model on the Paddle backend's CPU place beside one of the reference backend, in one process.

Both decode the same requests with K = 3 and take turns within each repeat, with the same number of threads each (OpenMP of
Paddle, OpenBLAS of NumPy), which is fixed before either is imported: one process for each number of threads. What counts is the
ratio of the two times of one repeat. Prints a table; --out writes a file, --page puts the table into a page behind its marker.

    python bench/paddle_vs_reference.py --out bench/results/paddle_vs_reference.json --page docs/backends/paddle.md
    python bench/paddle_vs_reference.py --read bench/results/paddle_vs_reference.json --page docs/backends/paddle.md
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

FIGURES = "bench/results/paddle_vs_reference.json"
BACKENDS = ("reference", "paddle")
ASKED = 8
"""From this batch on the Paddle backend is to be no slower."""
METHOD = (
    "the demo model, K = 3, greedy, end of text ignored; both backends in one process, in turn within each repeat, after one "
    "warm-up run each; a figure is the median over the steps in which every request has a round, of that the median over the "
    "repeats, as spread the smallest and the largest; ratio: reference's time over Paddle's in the same repeat, above 1 where "
    "Paddle is faster"
)


# -- one process a number of threads ------------------------------------------------------------------
def measure(threads: int, batches: list[int], repeats: int, new_tokens: int) -> list[dict[str, Any]]:
    """Rows of all batch sizes; both contenders of one are alive together."""
    from polydraft.bench.measure import Load
    from polydraft.bench.suite import Contender, Suite
    from polydraft.config import EngineConfig

    rows = []
    for batch in batches:
        load = Load(batch, 32, new_tokens)
        suites = {name: Suite(EngineConfig(backend=name)) for name in BACKENDS}
        cells = {name: Contender(suite.engine(load, 3, {}), load) for name, suite in suites.items()}
        for turn in range(repeats + 1):
            for name in BACKENDS if turn % 2 else BACKENDS[::-1]:
                print(f"\r{threads} threads, batch {batch}, run {turn} of {repeats}: {name:<10}", end="", file=sys.stderr)
                cells[name].measure(keep=turn > 0)
        times = [cells[name].figures["ms_per_round"] for name in BACKENDS]
        ratios = [reference / paddle for reference, paddle in zip(*times, strict=True)]
        for name, cell in cells.items():
            row = {**cell.row(None), "threads": threads}
            if name == "paddle":
                row["ratio"], row["spread"]["ratio"] = statistics.median(ratios), [min(ratios), max(ratios)]
            rows.append(row)
            cell.engine.close()
    print(file=sys.stderr)
    return rows


def in_a_process(threads: int, batches: list[int], repeats: int, new_tokens: int) -> list[dict[str, Any]]:
    """`measure` where nothing has been imported yet."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    chosen = [f"--batches={','.join(map(str, batches))}", f"--repeats={repeats}", f"--new-tokens={new_tokens}"]
    command = [sys.executable, __file__, f"--threads={threads}", "--rows", *chosen]
    done = subprocess.run(
        command, env={**os.environ, **dict.fromkeys(names, str(threads))}, stdout=subprocess.PIPE, text=True, check=True
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


# -- the table -----------------------------------------------------------------------------------------
def table(rows: list[dict[str, Any]]) -> str:
    """One line a batch size and number of threads, in Markdown."""
    lines = [
        "| threads | batch | reference, ms a round | paddle, ms a round | reference / paddle | smallest-largest |",
        "|---" * 6 + "|",
    ]
    for reference, paddle in zip(rows[::2], rows[1::2], strict=True):
        low, high = paddle["spread"]["ratio"]
        times = f"{reference['ms_per_round']:.1f} | {paddle['ms_per_round']:.1f}"
        lines.append(f"| {paddle['threads']} | {paddle['batch']} | {times} | {paddle['ratio']:.2f} | {low:.2f}-{high:.2f} |")
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
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rows", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--read", type=Path, help="make the table of this result instead of measuring")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path, help="put the table into this page")
    args = parser.parse_args()
    threads, batches = ([int(part) for part in text.split(",")] for text in (args.threads, args.batches))
    if args.rows:
        print(json.dumps(measure(threads[0], batches, args.repeats, args.new_tokens)))
        return
    from importlib.metadata import version

    from polydraft.bench import report

    if args.read:
        result = json.loads(args.read.read_text())
    else:
        rows = [row for count in threads for row in in_a_process(count, batches, args.repeats, args.new_tokens)]
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
