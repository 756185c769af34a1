"""How long a device waits for the host, by overlap depth: a modelled device under the real scheduler, runner and commit.

The emulator runs with a latency model on a virtual clock: host time is measured without the emulator's own work, device time
follows from it and from a fixed cost per kernel. So the figures say what overlap hides of *our* host time on a device with such
kernels; they are modelled, and say nothing of any real device's speed. Needs the emulator plugin (plugins/emulator).

    python bench/overlap_idle.py --out bench/results/overlap_idle.json --plot docs/images/overlap_idle.png
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from polydraft_emulator import Emulator

from polydraft import LLM, Engine, SamplingParams, __version__

WORKLOADS = ("decode", "mixed")
KERNEL_US = (10, 20, 40)
"""Modelled microseconds of every kernel; a step of the demo model has about 160."""


def build(kernel_us: int, depth: int, graph: str) -> Engine:
    """An engine on the modelled device."""
    latency = f"kernel:{kernel_us},upload:5,download:5,issue:2"
    return LLM(
        plugin=Emulator(f"emulator:0?policy=fifo&latency={latency}"),
        draft_tokens=3,
        max_num_seqs=4,
        overlap=depth,
        graph=graph,
        graph_sizes=(1, 2, 4) if graph != "off" else (),
    ).engine


def run(engine: Engine, workload: str, rng: np.random.Generator) -> float:
    """Idle share of the device over the steps behind the first few."""

    def ask(tokens: int) -> None:
        prompt = rng.integers(4, 4000, int(rng.integers(4, 40))).tolist()
        engine.add(prompt, SamplingParams(max_new_tokens=tokens, ignore_eos=True))

    for _ in range(4):
        ask(400 if workload == "decode" else int(rng.integers(10, 60)))
    for _ in range(8):
        engine.step()
        engine.poll()
    device: Any = engine.device
    since = max(span.end_s for span in device.timeline().spans)
    for step in range(60):
        if workload == "mixed" and step % 4 == 0:
            ask(int(rng.integers(10, 60)))
        engine.step()
        engine.poll()
    share = float(device.timeline().idle_share(since=since))
    engine.close()
    return share


def main() -> None:
    """Measure every combination in turn, print a table, write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    rows = []
    for graph in ("off", "decode"):
        for workload in WORKLOADS:
            for kernel_us in KERNEL_US:
                shares: dict[int, list[float]] = {0: [], 1: [], 2: []}
                for repeat in range(args.repeats):
                    for depth, found in shares.items():
                        found.append(run(build(kernel_us, depth, graph), workload, np.random.default_rng(repeat)))
                rows += [row(graph, workload, kernel_us, depth, found) for depth, found in shares.items()]
                print(
                    *(f"{key}={value}" for key, value in rows[-3].items() if key in ("graph", "workload", "kernel_us")), end=": "
                )
                print(", ".join(f"depth {r['overlap']} idle {r['idle_share']:.2%}" for r in rows[-3:]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(report(rows), indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)


def row(graph: str, workload: str, kernel_us: int, depth: int, shares: list[float]) -> dict[str, Any]:
    """One committed row."""
    return {
        "shape": "demo",
        "backend": "emulator",
        "workload": workload,
        "kernel_us": kernel_us,
        "draft_tokens": 3,
        "batch": 4,
        "graph": graph,
        "overlap": depth,
        "idle_share": statistics.median(shares),
        "spread": [min(shares), max(shares)],
        "repeats": len(shares),
        "label": "modelled",
    }


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The committed form."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "schema": "polydraft.bench/1",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit,
        "device": f"modelled accelerator; host {platform.machine()}, {os.cpu_count()} cores",
        "driver": "",
        "versions": {"polydraft": __version__, "numpy": np.__version__, "python": platform.python_version()},
        "method": "median over repeats of the modelled idle share of 60 steps after 8; depths alternate; spread is the extremes",
        "rows": rows,
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Idle share by kernel time, one panel a workload."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, workload in zip(figure.subplots(1, 2, sharey=True), WORKLOADS, strict=True):
        for depth, style in ((0, "o-"), (1, "s-"), (2, "^--")):
            mine = [r for r in rows if r["workload"] == workload and r["overlap"] == depth and r["graph"] == "off"]
            axes.plot([r["kernel_us"] for r in mine], [100 * r["idle_share"] for r in mine], style, label=f"overlap {depth}")
        axes.set_title(f"{workload} (modelled)")
        axes.set_xlabel("microseconds a kernel")
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.axes[0].set_ylabel("device idle, % of the time")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
