"""Device time of decode rounds by kernel, as the device itself records its launches; writes bench/results/cuda_launches.json.

Launches of a step overlap: each is on the device while the one in front ends. So a launch is given the time by which its end lies
behind the ends of all in front of it, and the device the time in which none runs; together they are the round. Steps are those in
which all requests have a round. `floor_us` is the time of the bytes that a round has to read, at the measured rate of a copy, as
bench/gpu_rounds.py counts them. Weights are random, acceptance synthetic. The record is that of PyTorch's profiler, which has to
be installed; the engine does not use it.

    python bench/gpu_launches.py --out bench/results/cuda_launches.json
    python bench/gpu_page.py
"""

from __future__ import annotations

import argparse
import gc
import itertools
import operator
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from polydraft.bench import report
from polydraft.bench.measure import Load, run
from polydraft.bench.suite import Suite
from polydraft.config import EngineConfig
from polydraft.engine import Engine
from polydraft.errors import DeviceError

sys.path.append(str(Path(__file__).resolve().parent.parent))
from bench.gpu_rounds import ROOT, SCHEDULE, byte_heads, common, copy_rate, floor_bytes

METHOD: Final = (
    "launches of some full decode rounds as the device records them; a launch counts by how far its end lies behind the ends of "
    "all in front of it; weights random, acceptance synthetic; floor_us: the bytes of bench/gpu_rounds.py at the copy rate"
)
ONCE: Final = "reserve_blocks"
"""A kernel that each step launches once: with it a round begins here."""
SETTLING: Final = 3
"""Full rounds in front of those that are recorded."""
KINDS: Final[Mapping[str, str]] = {
    "projections": r"linear_(rows|pair|split|parts|stream|plain)|nvjet|cublas|gemm|swiglu",
    "attention": r"attention|rope",
    "experts": r"expert|router|sum_and_add",
    "norms": r"rms_norm|residual|combine_draft_inputs",
    "heads": r"linear_(tile|screen)|screen_|argmax",
}
"""Kernels by name; a large head is what `linear_tile` serves. All others keep books: they move slots, rows and tokens on."""
COLORS: Final = "#3572a5", "#5fa55a", "#b4637a", "#e0a030", "#8172b3", "#999999", "#dddddd"
"""Of the kinds, of all others and of none."""
OTHERS: Final = "the rest of a step"
IDLE: Final = "none"


class Launched(NamedTuple):
    """A launch on the device: microseconds, and the name of its kernel."""

    begin: float
    end: float
    kernel: str


def rounds_of(launches: Iterable[Launched]) -> list[list[Launched]]:
    """Launches in the order of their beginning, by round; what lies in front of the first whole one, and behind the last, is left
    out. Raises `DeviceError` where there is none."""
    ordered = sorted(launches)
    begins = [i for i, one in enumerate(ordered) if one.kernel == ONCE]
    if len(begins) < 2:
        raise DeviceError(
            f"no whole round was recorded: got {len(ordered)} launches, {len(begins)} of them of {ONCE}, wanted two or more of "
            "that; raise --steps"
        )
    return [ordered[begin:end] for begin, end in itertools.pairwise(begins)]


def by_kernel(rounds: Sequence[Sequence[Launched]]) -> dict[str, dict[str, float]]:
    """Of each kernel, and of none, the microseconds of a round and its launches, in the mean."""
    found: dict[str, dict[str, float]] = {}
    front = rounds[0][0].begin
    for one in (one for launches in rounds for one in launches):
        for kernel, until in (IDLE, one.begin), (one.kernel, one.end):
            row = found.setdefault(kernel, {"us": 0.0, "launches": 0.0})
            row["us"] += max(until - front, 0.0) / len(rounds)
            row["launches"] += (kernel != IDLE) / len(rounds)
            front = max(front, until)
    return found


def kind_of(kernel: str) -> str:
    """The kind of a kernel."""
    return next((kind for kind, names in KINDS.items() if re.search(names, kernel)), IDLE if kernel == IDLE else OTHERS)


# -- what is run -----------------------------------------------------------------------------------
def recorded(engine: Engine, load: Load, steps: int) -> list[Launched]:
    """Serve the load twice, and record the launches of some full steps of the second time."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.init()
    run(engine, load)
    load.add(engine)
    full, ended = 0, 0

    def step() -> int:
        nonlocal ended
        rounds = engine.totals.rounds
        engine.step()
        ended += len(engine.poll())
        return engine.totals.rounds - rounds

    while full < SETTLING and not ended:
        full += step() == load.batch
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        counts = [step() for _ in range(steps)]
    while ended < load.batch:
        step()
    if set(counts) != {load.batch}:
        raise DeviceError(f"requests ended within {SETTLING + steps} full steps; lower --steps or raise --new-tokens")
    on_device = (event for event in profiler.events() or () if event.device_type.name == "CUDA")
    return [
        Launched(event.time_range.start, event.time_range.end, re.sub(r"^void | ?[<(].*", "", event.name)) for event in on_device
    ]


def measure(shape: str, drafts: int, batch: int, options: argparse.Namespace, rate: float) -> dict[str, Any]:
    """One row."""
    config = EngineConfig.from_mapping({**common(drafts), "dtype": "bf16"})
    prompt, new = options.prompt_tokens, options.new_tokens
    suite = Suite(config, ROOT / "shapes" / f"{shape}.json", (batch,), (drafts,), prompt_tokens=prompt, new_tokens=new)
    load = Load(batch, prompt, new)
    engine = suite.engine(load, drafts, {})
    try:
        rounds = rounds_of(recorded(engine, load, options.steps))
        tokens = 1.0 + sum(itertools.accumulate(SCHEDULE[:drafts], operator.mul))
        floor = floor_bytes(engine, batch, prompt + tokens * (SETTLING + options.steps / 2), byte_heads(engine, batch), tokens)
    finally:
        engine.close()
    kernels = by_kernel(rounds)
    return {
        "shape": shape, "backend": "cuda", "draft_tokens": drafts, "batch": batch, "prompt_tokens": prompt, "rounds": len(rounds),
        "round_us": sum(row["us"] for row in kernels.values()), "floor_us": 1e6 * floor / rate, "copy_bytes_per_s": rate,
        "kernels": dict(sorted(kernels.items(), key=lambda one: -one[1]["us"])),
    }  # fmt: skip


# -- what is shown ---------------------------------------------------------------------------------
def by_kind(row: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds of a round by kind of kernel."""
    found = dict.fromkeys((*KINDS, OTHERS, IDLE), 0.0)
    for kernel, figures in row["kernels"].items():
        found[kind_of(kernel)] += 1e-3 * figures["us"]
    return found


def markdown(result: Mapping[str, Any]) -> str:
    """One line a cell."""
    head = ["shape", "drafts", "batch", "a round, ms", "its bytes at the copy rate", *KINDS, OTHERS, IDLE]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in result["rows"]:
        figures = 1e-3 * row["round_us"], 1e-3 * row["floor_us"], *by_kind(row).values()
        cell = f"| {row['shape']} | {row['draft_tokens']} | {row['batch']} | "
        lines.append(cell + " | ".join(f"{ms:.2f}" if ms >= 0.005 else "-" for ms in figures) + " |")
    return "\n".join(lines)


def draw(result: Mapping[str, Any], path: str | Path) -> None:
    """A bar a cell, in pieces by kind, and what its bytes take."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = result["rows"]
    figure, axes = plt.subplots(figsize=(8, 0.38 * len(rows) + 1.2), layout="constrained")
    names = [f"{row['shape']}, K = {row['draft_tokens']}, batch {row['batch']}" for row in rows]
    left = [0.0] * len(rows)
    for kind, color in zip((*KINDS, OTHERS, IDLE), COLORS, strict=True):
        widths = [by_kind(row)[kind] for row in rows]
        axes.barh(names, widths, left=left, color=color, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, row in enumerate(rows):
        floor, label = 1e-3 * row["floor_us"], None if place else "its bytes at the copy rate"
        axes.plot([floor, floor], [place - 0.45, place + 0.45], color="black", label=label)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a round")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=4)
    figure.suptitle(f"Device time of a decode round by kernel, {result['device']}, {result['date']}", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    """Measure every cell; each engine is closed before the next is built."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(ROOT / "results" / "cuda_launches.json"))
    parser.add_argument("--cells", default="mimo-7b:0,3:1,8,32,64;ernie21:0,3:1,64", help="shape:K,...:batch,...;...")
    parser.add_argument("--steps", type=int, default=12, help="steps that are recorded")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=96)
    options = parser.parse_args()
    from polydraft_cuda.device import device_name, driver_version

    rows, rate = [], copy_rate()
    for part in options.cells.split(";"):
        shape, drafts, batches = part.split(":")
        for k, batch in ((k, batch) for k in map(int, drafts.split(",")) for batch in map(int, batches.split(","))):
            rows.append(measure(shape, k, batch, options, rate))
            said = {"device": device_name(0), "driver": str(driver_version()), "method": METHOD}
            report.write(options.out, report.document(rows, **said))
            print(markdown({"rows": rows[-1:]}).splitlines()[-1], file=sys.stderr, flush=True)
            gc.collect()  # graphs of an engine that is gone would be freed in the middle of the next one's rounds
    print(markdown({"rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
