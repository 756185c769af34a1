"""How long a device waits for the host, by overlap depth: a modelled device under the real scheduler, runner and commit.

The emulator runs with a latency model on a virtual clock: host time is the processor time of the engine's thread without the
emulator's own work, device time follows from it and from a fixed cost per kernel. So the figures say what overlap hides of *our*
host time on a device with such kernels; they are modelled, and say nothing of any real device's speed. Needs the emulator
plugin (plugins/emulator), and matplotlib to plot. Prints a table; fails where a device waits longer than it may.

    python bench/overlap_idle.py --out bench/results/overlap_idle.json --plot docs/images/overlap_idle.png --page docs/overlap.md
    python bench/overlap_idle.py --read bench/results/overlap_idle.json --plot docs/images/overlap_idle.png --page docs/overlap.md
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from polydraft_emulator import Emulator

from polydraft import LLM, Engine, SamplingParams
from polydraft.bench import report

Row = dict[str, Any]

FIGURES = "bench/results/overlap_idle.json"
WORKLOADS = ("decode", "mixed")
GRAPHS = ("off", "decode")
KERNEL_US = (10, 20, 40)
"""Modelled microseconds of every kernel."""
DEPTHS = (0, 1, 2)
BATCH, DRAFTS = 4, 1
WARM_UP, STEPS = 8, 40
MOST = {"decode": 0.01, "mixed": 0.05}
"""Idle share that a device may have at depth 1 where the host's time of a step is below that of its kernels."""
METHOD = (
    "modelled: the emulator's virtual clock, every kernel takes the given time, copies 5 us, a call of the device 2 us; host "
    "time is the processor time of the engine's thread without the emulator's work; "
    f"{BATCH} requests with K = {DRAFTS}; decode: they run on and on, mixed: short ones, and a new one every fourth step; "
    f"{STEPS} steps after {WARM_UP}; median over the repeats, depths alternate; spread is the smallest and the largest"
)


class Measured(NamedTuple):
    """One run: idle share of the device, and microseconds a step of the host without its waits and of the device's kernels."""

    idle_share: float
    host_us: float
    kernel_us: float


def build(kernel_us: int, depth: int, graph: str) -> Engine:
    """An engine on the modelled device."""
    latency = f"kernel:{kernel_us},upload:5,download:5,issue:2"
    return LLM(
        plugin=Emulator(f"emulator:0?policy=fifo&latency={latency}"),
        draft_tokens=DRAFTS,
        max_num_seqs=BATCH,
        overlap=depth,
        graph=graph,
        graph_sizes=(1, 2, BATCH) if graph != "off" else (),
    ).engine


def run(engine: Engine, workload: str, rng: np.random.Generator) -> Measured:
    """The steps behind the first few. The engine is idle before and afterwards."""

    def ask(tokens: int) -> None:
        prompt = rng.integers(4, 4000, int(rng.integers(4, 40))).tolist()
        engine.add(prompt, SamplingParams(max_new_tokens=tokens, ignore_eos=True))

    def step() -> None:
        engine.step()
        engine.poll()

    for _ in range(BATCH):
        ask(400 if workload == "decode" else int(rng.integers(10, 60)))
    for _ in range(WARM_UP):
        step()
    device: Any = engine.device
    begin, before = device.now_s(), device.timeline()
    since = max(span.end_s for span in before.spans)
    for number in range(STEPS):
        if workload == "mixed" and number % 4 == 0:
            ask(int(rng.integers(10, 60)))
        step()
    end, after = device.now_s(), device.timeline()
    for request_id in list(engine.requests):
        engine.abort(request_id)
    while engine.has_work:
        step()
    kernels = [span for span in after.spans[len(before.spans) :] if span.kind == "kernel"]
    return Measured(
        float(after.idle_share(since=since)),
        1e6 * (end - begin - (after.blocked_s - before.blocked_s)) / STEPS,
        1e6 * sum(span.end_s - span.start_s for span in kernels) / STEPS,
    )


def measure(repeats: int) -> Iterator[Row]:
    """Every combination in turn; one engine for each depth serves all runs of a kernel time."""
    for graph, kernel_us in itertools.product(GRAPHS, KERNEL_US):
        engines = {depth: build(kernel_us, depth, graph) for depth in DEPTHS}
        for workload in WORKLOADS:
            found: dict[int, list[Measured]] = {depth: [] for depth in DEPTHS}
            for repeat, depth in itertools.product(range(repeats), DEPTHS):
                found[depth].append(run(engines[depth], workload, np.random.default_rng(repeat)))
            print(f"\r{graph} {kernel_us} us {workload:<20}", end="", file=sys.stderr)
            yield from (row(graph, workload, kernel_us, depth, runs) for depth, runs in found.items())
        for engine in engines.values():
            engine.close()
    print(file=sys.stderr)


def row(graph: str, workload: str, kernel_us: int, depth: int, runs: Sequence[Measured]) -> Row:
    """One committed row."""
    shares = [run.idle_share for run in runs]
    return {
        "shape": "mimo-tiny-python",
        "backend": "emulator",
        "label": "modelled",
        "workload": workload,
        "kernel_us": kernel_us,
        "draft_tokens": DRAFTS,
        "batch": BATCH,
        "graph": graph,
        "overlap": depth,
        "idle_share": statistics.median(shares),
        "spread": {"idle_share": [min(shares), max(shares)]},
        "host_us_per_step": statistics.median(run.host_us for run in runs),
        "kernel_us_per_step": statistics.median(run.kernel_us for run in runs),
        "repeats": len(runs),
    }


# -- what it comes to --------------------------------------------------------------------------------------------------
def table(rows: Sequence[Row]) -> list[list[str]]:
    """Cells of the table: one line for all depths of a workload, of graphs or none, and of a kernel time."""
    lines = []
    for workload, graph, kernel_us in itertools.product(WORKLOADS, GRAPHS, sorted({r["kernel_us"] for r in rows})):
        mine = {r["overlap"]: r for r in rows if (r["workload"], r["graph"], r["kernel_us"]) == (workload, graph, kernel_us)}
        one = mine[1]
        idle = [f"{mine[depth]['idle_share']:.2%}" for depth in DEPTHS]
        steps = [f"{one['kernel_us_per_step']:.0f}", f"{one['host_us_per_step']:.0f}"]
        lines.append([workload, "off" if graph == "off" else "on", str(kernel_us), *steps, *idle])
    return lines


def markdown(rows: Sequence[Row]) -> str:
    """The table as a page shows it."""
    head = ["requests", "graphs", "us a kernel", "kernels, us a step", "host, us a step", *(f"idle, depth {d}" for d in DEPTHS)]
    lines = [head, ["---"] * len(head), *table(rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def too_idle(rows: Sequence[Row]) -> list[str]:
    """Rows at depth 1 whose device waits longer than it may, in words."""
    return [
        f"{r['workload']}, graphs {r['graph']}, {r['kernel_us']} us a kernel: {r['idle_share']:.2%}"
        for r in rows
        if r["overlap"] == 1 and r["host_us_per_step"] < r["kernel_us_per_step"] and r["idle_share"] >= MOST[r["workload"]]
    ]


def plot(result: dict[str, Any], path: Path) -> None:
    """Idle share by kernel time, one panel a workload; graphs on are dotted. Depth 2 lies broad and pale under depth 1."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    colours = dict(zip(DEPTHS, ("#e15759", "#4e79a7", "#59a14f"), strict=True))
    most = max(100 * r["idle_share"] for r in result["rows"])
    for axes, workload in zip(figure.subplots(1, 2, sharey=True), WORKLOADS, strict=True):
        for depth, graph in itertools.product(DEPTHS, GRAPHS):
            mine = [r for r in result["rows"] if (r["workload"], r["overlap"], r["graph"]) == (workload, depth, graph)]
            xs, ys = [r["kernel_us"] for r in mine], [100 * r["idle_share"] for r in mine]
            width = {"lw": 6, "alpha": 0.35, "zorder": 1, "markersize": 0} if depth == 2 else {"lw": 1.5, "markersize": 5}
            label = f"overlap {depth}, graphs {'off' if graph == 'off' else 'on'}"
            axes.plot(xs, ys, "o-" if graph == "off" else "s:", color=colours[depth], label=label, **width)
        axes.set_title({"decode": "decode alone", "mixed": "with arrivals"}[workload], fontsize=10)
        axes.set_xlabel("microseconds a kernel")
        axes.set_xticks(KERNEL_US)
        axes.set_ylim(0, 1.08 * most)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("device idle, % of the time")
    figure.axes[1].legend(fontsize=8, frameon=False)
    figure.suptitle(f"Modelled: virtual clock, {BATCH} requests, K = {DRAFTS} ({result['date']})", fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure or read, print, write what was asked for; fails where a device waits too long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--read", type=Path, help="show this result instead of measuring")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--page", type=Path, help="write the table into this page, behind its marker")
    args = parser.parse_args()
    if args.read:
        result = json.loads(args.read.read_text(encoding="utf-8"))
    else:
        device = f"modelled accelerator, host {report.processor()}"
        result = report.document(list(measure(args.repeats)), device=device, method=METHOD)
    print(markdown(result["rows"]), end="")
    if args.out:
        report.write(args.out, result)
    if args.plot:
        plot(result, args.plot)
    if args.page:
        report.renew(args.page, FIGURES, markdown(result["rows"]))
    late = too_idle(result["rows"])
    if late:
        sys.exit("the device waits too long: " + "; ".join(late))


if __name__ == "__main__":
    main()
