"""Time of an update of all weights from memory, beside a plain copy of the bytes that the trainer gives; writes
bench/results/update_weights.json.

    python bench/update_weights.py

The `cpu` backend with random weights of a shape; the trainer's arrays are float32. Update and copy take turns in one process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.bench import report
from polydraft.bench.shapes import RandomCheckpoint
from polydraft.config import EngineConfig
from polydraft.engine import Engine

ROOT = Path(__file__).resolve().parent
OUT = ROOT / "results" / "update_weights.json"
GIB = 1 << 30


def measured(shape: str, dtype: str, repeats: int) -> dict[str, Any]:
    """One row: seconds of an update and of a copy, medians and extremes."""
    with closing(RandomCheckpoint(ROOT / "shapes" / f"{shape}.json")) as random:
        arrays = {name: random.tensor(name) for name in random.names()}
    config = EngineConfig(backend="cpu", dtype=dtype, max_num_seqs=1, max_model_len=64)
    with closing(Engine(config, checkpoint=RandomCheckpoint(ROOT / "shapes" / f"{shape}.json"))) as engine:
        target = {name: np.empty_like(value) for name, value in arrays.items()}
        updates, copies = [], []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            engine.update_weights(arrays)
            middle = time.perf_counter()
            for name, value in arrays.items():
                np.copyto(target[name], value)
            copies.append(time.perf_counter() - middle)
            updates.append(middle - begin)
    size = sum(value.nbytes for value in arrays.values())
    update, copy = (statistics.median(times[1:]) for times in (updates, copies))  # the first touches new memory
    return {
        "shape": shape, "backend": "cpu", "draft_tokens": 0, "batch": 1, "dtype": dtype, "weights": "random", "repeats": repeats,
        "given_gib": round(size / GIB, 3), "update_s": round(update, 4), "copy_s": round(copy, 4),
        "against_copy": round(update / copy, 2), "spread": {
            "update_s": [round(min(updates[1:]), 4), round(max(updates[1:]), 4)],
            "copy_s": [round(min(copies[1:]), 4), round(max(copies[1:]), 4)],
        },
    }  # fmt: skip


def main() -> int:
    """Measure each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(OUT))
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    rows = []
    for shape, dtype in (("tiny", "f32"), ("small", "f32"), ("small", "bf16"), ("qwen2-0.5b", "bf16")):
        rows.append(measured(shape, dtype, options.repeats))
        print(rows[-1], file=sys.stderr, flush=True)
    method = "all weights given as float32 arrays; median of the repeats behind a first one, update and copy in turn"
    report.write(options.out, report.document(rows, method=method))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
