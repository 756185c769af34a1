"""Decode rounds of Paddle on an NVIDIA GPU, alone and with the kernel pack paddle/cuda, beside the CUDA backend.

Writes bench/results/paddle_nvidia.json. Weights are random, made on the device; acceptance is synthetic, by the schedule of
bench/gpu_rounds.py. Each contender runs in a process of its own, one after the other; within one, the engine of a shape and K
serves both batch sizes. Paddle alone computes attention of prompt rows one by one, so prompts are short and all contenders take
the same. A cell that has taken --cell-seconds is not repeated again (its row has the number of repeats), and one that a
contender does not reach within --seconds has a row without a figure. Cells that --out has and that are not measured this time
are kept, each with its own day and commit.

    python bench/paddle_nvidia.py --out bench/results/paddle_nvidia.json
    python bench/paddle_nvidia.py --page docs/backends/paddle-nvidia.md
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polydraft.bench import report
from polydraft.bench.measure import Load
from polydraft.bench.suite import Contender, Suite
from polydraft.config import EngineConfig
from polydraft.engine import Engine

ROOT = Path(__file__).resolve().parent
SCHEDULE = (0.8, 0.75, 0.75)
CONTENDERS: dict[str, dict[str, Any]] = {
    "cuda": {"backend": "cuda"},
    "paddle, pack": {"backend": "paddle", "device": "polycuda:0", "kernels": ("paddle/cuda",)},
    "paddle": {"backend": "paddle", "device": "polycuda:0"},
}
FIGURES = "bench/results/paddle_nvidia.json"
METHOD = (
    "requests of equal length, greedy, end of text ignored; one process a contender, one after the other; in each one engine a "
    "shape and K, one warm-up run a batch size; a round's figures are medians over the steps in which every request has a round, "
    "of each figure the median over the repeats, as spread the smallest and the largest; weights random, acceptance synthetic by "
    f"{SCHEDULE}; bench/paddle_nvidia.py says what a contender is"
)


Cell = tuple[str, int, int]
"""Shape, K and batch size."""


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """In the order in which every contender takes them."""
    drafts, batches = ([int(number) for number in text.split(",")] for text in (options.draft_tokens, options.batch))
    return [(shape, k, batch) for shape in options.shapes.split(",") for k in drafts for batch in batches]


def rows_of(contender: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure one contender: a row a cell, as soon as there is one."""
    for (name, drafts), cells in itertools.groupby(cells_of(options), key=lambda cell: cell[:2]):
        batches = [batch for _, _, batch in cells]
        shape, began = ROOT / "shapes" / f"{name}.json", time.monotonic()
        engine = engine_of(contender, shape, drafts, batches, options)
        print(f"{contender}: {name} K={drafts} built in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        for batch in batches:
            yield {**row_of(engine, shape, batch, options), "contender": contender}
        engine.close()
        del engine
        gc.collect()  # Paddle's tensors go with their last reference


def row_of(engine: Engine, shape: Path, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one cell."""
    cell, began = Contender(engine, Load(batch, options.prompt_tokens, options.new_tokens)), time.monotonic()
    for turn in range(options.repeats + 1):
        cell.measure(keep=turn > 0)
        if turn and time.monotonic() - began > options.cell_seconds:
            break
    row = cell.row(shape)
    figures = f"{row['ms_per_round']:.3f} ms a round, {row['tokens_per_round']:.2f} tokens"
    print(f"  batch {batch}: {figures}, {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return row


def engine_of(contender: str, shape: Path, drafts: int, batches: list[int], options: argparse.Namespace) -> Engine:
    """The engine of a contender that serves these batch sizes, each from a graph of its own."""
    config = EngineConfig.from_mapping(
        {
            "dtype": options.dtype, "prefix_cache": False, "accept_schedule": SCHEDULE[:drafts], "max_batched_tokens": 512,
            "graph_sizes": batches, **CONTENDERS[contender],
        }
    )  # fmt: skip
    suite = Suite(config, shape, prompt_tokens=options.prompt_tokens, new_tokens=options.new_tokens)
    return suite.engine(Load(max(batches), options.prompt_tokens, options.new_tokens), drafts, {})


def main() -> int:
    """Measure every contender; one that does not end in time leaves the rows of the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(ROOT / "results" / "paddle_nvidia.json"))
    parser.add_argument("--shapes", default="mimo-7b,small")
    parser.add_argument("--draft-tokens", default="0,3")
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--contenders", default=";".join(CONTENDERS), help="which to measure")
    parser.add_argument("--only", help=f"one of {'; '.join(CONTENDERS)}, its rows printed as JSON")
    parser.add_argument("--seconds", type=float, default=600, help="that one contender may take")
    parser.add_argument("--cell-seconds", type=float, default=60, help="after which a cell is not repeated again")
    parser.add_argument("--page", help="only renew the table of this page from --out")
    options = parser.parse_args()
    if options.page:
        result = json.loads(Path(options.out).read_text(encoding="utf-8"))
        report.renew(Path(options.page), FIGURES, markdown(result))
    elif options.only:
        for row in rows_of(options.only, options):
            print(json.dumps(row), flush=True)
    else:
        measure_all(options)
    return 0


def measure_all(options: argparse.Namespace) -> None:
    """Every contender in a process of its own; what is measured is written after each."""
    from polydraft_cuda.device import device_name, driver_version

    rows: list[dict[str, Any]] = []
    before = kept(Path(options.out))
    for contender in options.contenders.split(";"):
        rows += measured_apart(contender, options)
        again = {key_of(row) for row in rows}
        every = sorted([*rows, *(row for key, row in before.items() if key not in again)], key=place_of)
        report.write(options.out, report.document(every, device=device_name(0), driver=str(driver_version()), method=METHOD))


def key_of(row: dict[str, Any]) -> tuple[str, Cell]:
    """Contender and cell of a row."""
    return row["contender"], (row["shape"], row["draft_tokens"], row["batch"])


def place_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Where a row stands: by contender, large shapes first."""
    return list(CONTENDERS).index(row["contender"]), row["shape"] != "mimo-7b", *key_of(row)[1]


def kept(path: Path) -> dict[tuple[str, Cell], dict[str, Any]]:
    """Rows with figures of an earlier result; those of another day or commit tell both."""
    if not path.is_file():
        return {}
    result, now = json.loads(path.read_text(encoding="utf-8")), report.document([])
    told = {key: result[key] for key in ("date", "commit")}
    told = {} if told == {key: now[key] for key in told} else told
    return {key_of(row): {**told, **row} for row in result["rows"] if row["ms_per_round"] is not None}


def measured_apart(contender: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one contender: those that it measured in time, and for the others why there is no figure."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed:
        command = [sys.executable, __file__, *sys.argv[1:], "--only", contender]
        try:
            subprocess.run(command, stdout=printed, check=True, timeout=options.seconds)
            why = ""
        except subprocess.TimeoutExpired:
            why = f"not reached within {options.seconds:g} s"
        except subprocess.CalledProcessError as error:
            why = f"failed with status {error.returncode}"
        printed.seek(0)
        rows = [json.loads(line) for line in printed if line.startswith("{")]
    cells = cells_of(options)
    if why:
        print(f"{contender}: {len(rows)} of {len(cells)} cells, {why}", file=sys.stderr, flush=True)
    for shape, drafts, batch in cells[len(rows) :]:
        backend = CONTENDERS[contender]["backend"]
        rows.append(
            {
                "shape": shape, "backend": backend, "draft_tokens": drafts, "batch": batch, "ms_per_round": None,
                "contender": contender, "cut": why,
            }
        )  # fmt: skip
    return rows


def markdown(result: dict[str, Any]) -> str:
    """A line a shape, K and batch: milliseconds a round of each contender, and the pack's over the CUDA backend's."""
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in result["rows"]:
        cells.setdefault((row["shape"], row["draft_tokens"], row["batch"]), {})[row["contender"]] = row["ms_per_round"]
    lines = [
        "| shape | drafts | batch | paddle alone, ms a round | with the pack | cuda | pack / cuda |",
        "|---|---|---|---|---|---|---|",
    ]
    for (shape, drafts, batch), found in cells.items():
        text = [f"{found[name]:.3f}" if found.get(name) else "-" for name in ("paddle", "paddle, pack", "cuda")]
        ratio = f"{found['paddle, pack'] / found['cuda']:.3f}" if found.get("paddle, pack") and found.get("cuda") else "-"
        lines.append(f"| {shape} | {drafts} | {batch} | {' | '.join(text)} | {ratio} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
