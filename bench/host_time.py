"""Host time of one decode step: how it grows with the batch, on the backend whose kernels cost nothing.

K = 3 and every draft accepted, so each request gains four tokens a step. The times are those of `Engine.step` and `poll`
together, without what the null backend's few kernels and its copies take; the split by stage comes from a second, recorded run.
Prints a table and, where asked, writes a `polydraft.bench/1` JSON file, draws it (needs matplotlib), and puts the table into a
page, behind the comment that names the result.

    python bench/host_time.py --out bench/results/host_time.json --plot docs/images/host_time.png --page docs/performance.md
    python bench/host_time.py --read bench/results/host_time.json --plot docs/images/host_time.png --page docs/performance.md
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from polydraft.bench import report
from polydraft.bench.suite import Suite
from polydraft.config import EngineConfig

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WANTED = {1: 150, 64: 250, 256: 400}
"""Microseconds that a step may take at most."""
FIGURES = "bench/results/host_time.json"
METHOD = (
    "the null backend, K = 3, all drafts accepted; Engine.step and poll without the time of the null kernels and copies; median "
    "over the steps in which every request has a round, of that the median over the repeats, as spread the smallest and the "
    "largest; by stage: median over the steps of a second, recorded run, whose clock reading is part of it; one warm-up run"
)


def measure(repeats: int, new_tokens: int) -> list[dict[str, Any]]:
    """With and without prefix cache, whose keys the host computes."""
    rows = []
    for prefix_cache in (True, False):
        config = EngineConfig(backend="null", prefix_cache=prefix_cache)
        suite = Suite(config, batches=BATCHES, draft_tokens=(3,), prompt_tokens=16, new_tokens=new_tokens, repeats=repeats)
        rows += list(suite.run(lambda text: print(f"\r{text:<60}", end="", file=sys.stderr)))
    print(file=sys.stderr)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """One line a row, in Markdown."""
    stages = [stage for stage in rows[0]["host_us_by_stage"] if stage != "wait"]
    lines = [
        "| batch | prefix cache | us a step | smallest-largest | " + " | ".join(stages) + " |",
        "|---" * (4 + len(stages)) + "|",
    ]
    for row in rows:
        low, high = row["spread"]["host_us_per_step"]
        split = " | ".join(f"{row['host_us_by_stage'][stage]:.0f}" for stage in stages)
        cache = "on" if row["prefix_cache"] else "off"
        lines.append(f"| {row['batch']} | {cache} | {row['host_us_per_step']:.0f} | {low:.0f}-{high:.0f} | {split} |")
    return "\n".join(lines)


def paragraphs(result: dict[str, Any]) -> tuple[str, str]:
    """What the page says: when and where, and the table."""
    versions = f"Python {result['versions']['python']}, NumPy {result['versions']['numpy']}"
    return f"Measured on {result['date']} on {result['device']}, {versions}:", table(result["rows"])


def draw(result: dict[str, Any], path: Path) -> None:
    """Stacked stages with the prefix cache, the bare totals, and what is asked."""
    from matplotlib.figure import Figure

    from polydraft.instruments.trace_view import COLOURS

    rows = [row for row in result["rows"] if row["prefix_cache"]]
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    below = [0.0] * len(rows)
    for stage in (r for r in rows[0]["host_us_by_stage"] if r != "wait"):
        heights = [row["host_us_by_stage"][stage] for row in rows]
        axes.bar(places, heights, bottom=below, width=0.55, label=stage, color=COLOURS.get(stage, "#bbbbbb"))
        below = [b + h for b, h in zip(below, heights, strict=True)]
    for cache, style in ((True, "o-"), (False, "s--")):
        totals = [row["host_us_per_step"] for row in result["rows"] if row["prefix_cache"] == cache]
        axes.plot(
            places,
            totals,
            style,
            color="#222222",
            markersize=4,
            lw=1,
            label=f"whole step, prefix cache {'on' if cache else 'off'}",
        )
    batches = [row["batch"] for row in rows]
    for batch, most in WANTED.items():
        axes.hlines(most, batches.index(batch) - 0.45, batches.index(batch) + 0.45, color="#c0392b", lw=2)
        axes.annotate(
            f"at most {most}", (batches.index(batch), most), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=8
        )
    axes.set_xticks(places, [str(batch) for batch in batches])
    axes.set_xlabel("requests decoded together")
    axes.set_ylabel("host microseconds a step")
    axes.set_title(
        f"Host time of a decode step on the null backend, K = 3, every draft accepted\n{result['device']}, {result['date']}",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper left")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run and print; fails where a step takes longer than asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=400)
    parser.add_argument("--read", type=Path, help="draw this result instead of measuring")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--page", type=Path, help="put the table into this page")
    args = parser.parse_args()
    if args.read:
        result = json.loads(args.read.read_text())
    else:
        result = report.document(measure(args.repeats, args.new_tokens), method=METHOD)
    print(table(result["rows"]))
    if args.out:
        report.write(args.out, result)
    if args.plot:
        draw(result, args.plot)
    if args.page:
        report.renew(args.page, FIGURES, *paragraphs(result))
    late = [row for row in result["rows"] if row["host_us_per_step"] > WANTED.get(row["batch"], float("inf"))]
    if late:
        sys.exit("too slow: " + ", ".join(f"batch {row['batch']} with {row['host_us_per_step']:.0f} us" for row in late))


if __name__ == "__main__":
    main()
