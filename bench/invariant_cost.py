"""What `--invariant` costs on an NVIDIA GPU: decode rounds of three shapes with and without it, in turn, in one process.

Weights are random, acceptance is synthetic by the schedule of bench/gpu_rounds.py and labelled so. Both engines of a cell are
alive together and take turns, and every cell says how long the device was idle. Writes a JSON file and the table of the page.

    python bench/invariant_cost.py --out bench/results/cuda_invariant.json --page docs/backends/cuda.md
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polydraft.bench import report
from polydraft.bench.measure import Load, instruments, timed
from polydraft.bench.shapes import RandomCheckpoint
from polydraft.config import EngineConfig
from polydraft.engine import Engine

ROOT = Path(__file__).resolve().parent
SCHEDULE, DRAFTS, BLOCK = (0.8, 0.75, 0.75), 3, 16
FIGURES = "bench/results/cuda_invariant.json"


def engine(shape: Path, load: Load, **own: Any) -> Engine:
    """One that holds the whole load."""
    length = load.prompt_tokens + load.new_tokens
    config = EngineConfig(
        backend="cuda", dtype="bf16", draft_tokens=DRAFTS, accept_schedule=SCHEDULE, prefix_cache=False, max_batched_tokens=8192,
        max_num_seqs=load.batch, max_model_len=length, num_blocks=load.batch * -(-length // BLOCK), graph_sizes=(load.batch,),
        **own,
    )  # fmt: skip
    return Engine(config, checkpoint=RandomCheckpoint(shape), instruments=instruments())


def cell(shape: Path, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row: medians of the repeats' medians, milliseconds a round."""
    load = Load(batch, options.prompt_tokens, options.new_tokens)
    makers: dict[str, Callable[[], Engine]] = {
        "default": lambda: engine(shape, load),
        "invariant": lambda: engine(shape, load, invariant=True),
    }
    engines = {name: make() for name, make in makers.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    try:
        for turn in range(options.repeats + 1):
            for name, running in engines.items():
                figures = timed(running, load)
                found[name] += [figures] if turn else []
    finally:
        for running in engines.values():
            running.close()
    rounds = {name: [figures["ms_per_round"] for figures in values] for name, values in found.items()}
    medians = {name: statistics.median(values) for name, values in rounds.items()}
    idle = {name: statistics.median(figures["idle_share"] for figures in values) for name, values in found.items()}
    row = {
        "shape": shape.stem, "weights": "random", "backend": "cuda", "draft_tokens": DRAFTS, "batch": batch,
        "acceptance": "synthetic", "accept_schedule": list(SCHEDULE), "dtype": "bf16", "ms_per_round": medians["default"],
        "ms_by_engine": medians, "idle_share_by_engine": idle, "cost": medians["invariant"] / medians["default"] - 1,
        "prompt_tokens": load.prompt_tokens, "new_tokens": load.new_tokens, "repeats": options.repeats,
        "spread": {name: [min(values), max(values)] for name, values in rounds.items()},
    }  # fmt: skip
    told = ", ".join(f"{name} {ms:.4f} ms" for name, ms in medians.items())
    shares = ", ".join(f"{name} {share:.2%}" for name, share in idle.items())
    print(f"{shape.stem} batch {batch}: {told}; idle {shares}", file=sys.stderr, flush=True)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """For people."""
    lines = ["| shape | batch | ms a round | device idle | `--invariant` | cost |", "|---|---|---|---|---|---|"]
    for r in rows:
        ms = r["ms_by_engine"]
        idle = f"{r['idle_share_by_engine']['default']:.1%}"
        lines.append(f"| {r['shape']} | {r['batch']} | {ms['default']:.3f} | {idle} | {ms['invariant']:.3f} | {r['cost']:+.0%} |")
    return "\n".join(lines)


def main() -> int:
    """Measure every cell, or only renew the page from a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "cuda_invariant.json")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--measured", action="store_true", help="only renew the page from --out")
    parser.add_argument("--cells", default="tiny:1,8,64;small:1,8,64;mimo-7b:1,8,64", help="shape:batch,...;shape:batch,...")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further cell after this time")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(options.out.read_text(encoding="utf-8"))["rows"] if options.measured else []
    begin = time.monotonic()
    for part in () if options.measured else options.cells.split(";"):
        name, _, batches = part.partition(":")
        for batch in batches.split(","):
            if time.monotonic() - begin < options.seconds:
                rows.append(cell(ROOT / "shapes" / f"{name}.json", int(batch), options))
                gc.collect()  # graphs of engines that are gone would be freed in the middle of the next ones' rounds
                write(rows, options.out)
    if options.page:
        report.renew(options.page, FIGURES, table(rows))
    return 0


def write(rows: list[dict[str, Any]], out: Path) -> None:
    """The result so far."""
    from polydraft_cuda.device import device_name, driver_version

    method = f"{report.METHOD}; weights random, acceptance synthetic by {SCHEDULE}; the engines of a row take turns"
    result = report.document(rows, device=device_name(0), driver=str(driver_version()), method=method)
    report.write(out, result)


if __name__ == "__main__":
    raise SystemExit(main())
