"""Decode rounds of Paddle on an NVIDIA GPU, alone and with the kernel pack paddle/cuda, beside the CUDA backend.

Writes bench/results/paddle_nvidia.json. Weights are random, made on the device; acceptance is synthetic, by the schedule of
bench/gpu_rounds.py. Each contender runs in a process of its own, one after the other; within one, the engine of a shape and K
serves both batch sizes. Paddle alone computes attention of prompt rows one by one, so prompts are short and all contenders take
the same.

    python bench/paddle_nvidia.py --out bench/results/paddle_nvidia.json
    python bench/paddle_nvidia.py --page docs/backends/paddle-nvidia.md
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from polydraft.bench import report
from polydraft.bench.measure import Load
from polydraft.bench.suite import Contender, Suite
from polydraft.config import EngineConfig

ROOT = Path(__file__).resolve().parent
SCHEDULE = (0.8, 0.75, 0.75)
CONTENDERS: dict[str, dict[str, Any]] = {
    "cuda": {"backend": "cuda"},
    "paddle, pack": {"backend": "paddle", "device": "polycuda:0", "kernels": ("paddle/cuda",)},
    "paddle": {"backend": "paddle", "device": "polycuda:0"},
}
FIGURES = "bench/results/paddle_nvidia.json"


def rows_of(contender: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one contender: a row a shape, K and batch size."""
    rows, batches = [], [int(batch) for batch in options.batch.split(",")]
    for name in options.shapes.split(","):
        for drafts in (int(k) for k in options.draft_tokens.split(",")):
            shape, told = ROOT / "shapes" / f"{name}.json", time.monotonic()
            config = EngineConfig.from_mapping(
                {
                    "dtype": options.dtype, "prefix_cache": False, "accept_schedule": SCHEDULE[:drafts],
                    "max_batched_tokens": 512, "graph_sizes": batches, **CONTENDERS[contender],
                }
            )  # fmt: skip
            suite = Suite(config, shape, prompt_tokens=options.prompt_tokens, new_tokens=options.new_tokens)
            engine = suite.engine(Load(max(batches), options.prompt_tokens, options.new_tokens), drafts, {})
            built = time.monotonic() - told
            for batch in batches:
                cell = Contender(engine, Load(batch, options.prompt_tokens, options.new_tokens))
                for turn in range(options.repeats + 1):
                    cell.measure(keep=turn > 0)
                rows.append({**cell.row(shape), "contender": contender})
                figures = f"{rows[-1]['ms_per_round']:.3f} ms a round, {rows[-1]['tokens_per_round']:.2f} tokens"
                print(f"{contender}: {name} K={drafts} batch {batch}: {figures}", file=sys.stderr, flush=True)
            engine.close()
            print(f"  built in {built:.1f} s, all in {time.monotonic() - told:.1f} s", file=sys.stderr, flush=True)
            del engine, cell
            gc.collect()  # Paddle's tensors go with their last reference
    return rows


def main() -> int:
    """Measure every contender; one that does not end in time leaves the rows of the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(ROOT / "results" / "paddle_nvidia.json"))
    parser.add_argument("--shapes", default="mimo-7b,small")
    parser.add_argument("--draft-tokens", default="0,3")
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--only", help=f"one of {'; '.join(CONTENDERS)}, printed as JSON")
    parser.add_argument("--seconds", type=float, default=600, help="that one contender may take")
    parser.add_argument("--page", help="only renew the table of this page from --out")
    options = parser.parse_args()
    if options.page:
        result = json.loads(Path(options.out).read_text(encoding="utf-8"))
        report.renew(Path(options.page), FIGURES, markdown(result))
    elif options.only:
        print(json.dumps(rows_of(options.only, options)))
    else:
        measure_all(options)
    return 0


def measure_all(options: argparse.Namespace) -> None:
    """Every contender in a process of its own."""
    from polydraft_cuda.device import device_name, driver_version

    rows: list[dict[str, Any]] = []
    for contender in CONTENDERS:
        command = [sys.executable, __file__, *sys.argv[1:], "--only", contender]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=options.seconds)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{contender}: {error}", file=sys.stderr, flush=True)
            continue
        rows += json.loads(done.stdout.splitlines()[-1])
        how = f"weights random, acceptance synthetic by {SCHEDULE}; bench/paddle_nvidia.py says what a contender is"
        result = report.document(rows, device=device_name(0), driver=str(driver_version()), method=f"{report.METHOD}; {how}")
        report.write(options.out, result)


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
        text = [f"{found[name]:.3f}" if name in found else "-" for name in ("paddle", "paddle, pack", "cuda")]
        ratio = f"{found['paddle, pack'] / found['cuda']:.3f}" if {"paddle, pack", "cuda"} <= set(found) else "-"
        lines.append(f"| {shape} | {drafts} | {batch} | {' | '.join(text)} | {ratio} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
