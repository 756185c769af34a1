"""Host time of one decode step: how it grows with the batch, on the backend whose kernels cost nothing.

K = 3 and every draft accepted, so each request gains four tokens a step. The times are those of `Engine.step` and `poll`
together, without what the null backend's few kernels and its copies take; the split by stage comes from a second, recorded run.
Prints a table and, where asked, writes a `polydraft.bench/1` JSON file, draws it (needs matplotlib), and puts the table into a
page, behind the comment that names the result.

    python bench/host_time.py --out bench/results/host_time.json --plot docs/images/host_time.png --page docs/performance.md
    python bench/host_time.py --read bench/results/host_time.json --plot docs/images/host_time.png --page docs/performance.md

With `--tensor-parallel N`: what it takes rank 0 more than an engine that is one rank, on a backend that has ranks. Both are
open at once and take turns in an order drawn by chance, so each turn has a difference.

    python bench/host_time.py --tensor-parallel 2 --out bench/results/ranks_host_time.json
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polydraft.bench import report
from polydraft.bench.measure import Load
from polydraft.bench.suite import Contender, Suite
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
OF_RANKS = "bench/results/ranks_host_time.json"
SHAPE = Path(__file__).parent / "shapes" / "small.json"
METHOD_OF_RANKS = (
    "one engine of one rank and one of several, both open, greedy requests of equal length, synthetic acceptance of 0.8, 0.75, "
    "0.75; in each turn, behind one to warm up, a bare run of both, of whose rounds the time is, and a recorded one, of which "
    "host time is: that of rank 0, without its waits; the two in an order drawn by chance; a run's figure is the median over the "
    "steps in which every request has a round; of that median and quartiles over the turns, as those of the differences in a turn"
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


def measure_ranks(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each number of drafts and batch."""
    backend = {"backend": options.backend, "dtype": options.dtype, "prefix_cache": False}
    chance = random.Random(0)
    for drafts, batch in itertools.product(options.drafts, options.batch):
        config = EngineConfig.from_mapping({**backend, "accept_schedule": (0.8, 0.75, 0.75)[:drafts]})
        suite = Suite(config, options.shape, prompt_tokens=options.prompt_tokens, new_tokens=options.new_tokens)
        load, cells = Load(batch, options.prompt_tokens, options.new_tokens), list[Contender]()
        try:
            for ranks in (1, options.tensor_parallel):
                cells.append(Contender(suite.engine(load, drafts, {"tensor_parallel": ranks}), load))
            gc.collect()
            gc.freeze()
            for turn in range(options.repeats + 1):
                for cell in chance.sample(cells, len(cells)):
                    cell.measure(keep=turn > 0)
            yield _row_of_ranks(options, *cells)
        finally:
            for cell in cells:
                cell.engine.close()
            gc.unfreeze()


def _row_of_ranks(options: argparse.Namespace, alone: Contender, first: Contender) -> dict[str, Any]:
    """What both took, and the difference, whole and by stage."""
    more: dict[str, list[float]] = {"whole": _less(first.figures["host_us_per_step"], alone.figures["host_us_per_step"])}
    more |= {stage: _less(values, alone.stages[stage]) for stage, values in first.stages.items() if stage != "wait"}
    row, kept = (
        first.row(options.shape),
        ("shape", "weights", "backend", "device", "draft_tokens", "batch", "graph", "overlap", "dtype"),
    )
    return {
        **{name: row[name] for name in kept},
        "tensor_parallel": options.tensor_parallel,
        "repeats": len(more["whole"]),
        **{
            f"{name}_by_ranks": {
                str(ranks): [statistics.median(cell.figures[name]), *_quartiles(cell.figures[name])]
                for ranks, cell in ((1, alone), (options.tensor_parallel, first))
            }
            for name in ("host_us_per_step", "ms_per_round")
        },
        "more_us": {stage: [statistics.median(values), *_quartiles(values)] for stage, values in more.items()},
    }


def _less(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(some, others, strict=True)]


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    first, _, third = statistics.quantiles(values, n=4)
    return first, third


def table_of_ranks(rows: list[dict[str, Any]]) -> str:
    """One line a row, in Markdown: host time of one rank, of rank 0 of several, and what that is more, whole and by stage."""
    most = rows[0]["tensor_parallel"]
    stages = [stage for stage in rows[0]["more_us"] if stage != "whole"]
    heads = ["K", "batch", "one rank, us", f"rank 0 of {most}", "more", "its quartiles", *stages, "ms a round, one", f"of {most}"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        host, rounds, more = (row[name] for name in ("host_us_per_step_by_ranks", "ms_per_round_by_ranks", "more_us"))
        whole, low, high = more["whole"]
        cells = [str(row["draft_tokens"]), str(row["batch"]), *(f"{host[str(ranks)][0]:.0f}" for ranks in (1, most))]
        cells += [f"{whole:+.0f}", f"{low:+.0f} to {high:+.0f}", *(f"{more[stage][0]:+.0f}" for stage in stages)]
        cells += [f"{rounds[str(ranks)][0]:.3f}" for ranks in (1, most)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ranks_main(options: argparse.Namespace) -> None:
    """Measure and print what several ranks cost the host."""
    result = json.loads(options.read.read_text()) if options.read else _measured_ranks(options)
    print(table_of_ranks(result["rows"]))
    if options.page:
        report.renew(options.page, OF_RANKS, table_of_ranks(result["rows"]))


def _measured_ranks(options: argparse.Namespace) -> dict[str, Any]:
    """The result, which is written row by row: a run that is cut short leaves what it has."""
    result, rows = dict[str, Any](), list[dict[str, Any]]()
    for row in measure_ranks(options):
        rows.append(row)
        result = report.document(rows, device=_device(options.backend), method=METHOD_OF_RANKS)
        if options.out:
            report.write(options.out, result)
        print(table_of_ranks(rows).splitlines()[-1], file=sys.stderr, flush=True)
    return result


def _device(backend: str) -> str:
    """By name where it is a GPU; "": the processor."""
    if backend != "cuda":
        return ""
    from polydraft_cuda.device import device_name

    return device_name(0)


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


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main() -> None:
    """Run and print; fails where a step takes longer than asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=400)
    several = parser.add_argument_group("several ranks")
    several.add_argument("--tensor-parallel", type=int, default=1, help="ranks that are set beside one")
    several.add_argument("--backend", default="cuda")
    several.add_argument("--dtype", default="bf16")
    several.add_argument("--shape", type=Path, default=SHAPE)
    several.add_argument("--prompt-tokens", type=int, default=64)
    several.add_argument("--batch", type=_numbers, default=(1, 8, 64), help="each in turn: 1,8,64")
    several.add_argument("--drafts", type=_numbers, default=(0, 3), help="each in turn: 0,3")
    parser.add_argument("--read", type=Path, help="draw this result instead of measuring")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--page", type=Path, help="put the table into this page")
    args = parser.parse_args()
    if args.tensor_parallel > 1:
        ranks_main(args)
        return
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
