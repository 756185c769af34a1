"""Time of `expert_mlp` on a device at the sizes of published models, beside the time that reading its weights takes.

    python bench/experts_kernel.py --backend cuda --json bench/results/experts-kernel.json
    python bench/experts_kernel.py --shape glm12 --packing fp8-channel --packing none

Each row draws its experts uniformly without replacement. Bytes are those of every expert that some row chose, with its scales,
read once; the floor is bytes over the rate of a plain copy on the same device, measured in the same run (read and written bytes
counted). A figure is the median over repeats of the mean of consecutive launches that differ in their choices.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.gpu_rounds import copy_rate
from polydraft.backend import DeviceOptions
from polydraft.bench import report
from polydraft.contracts.base import Limits
from polydraft.contracts.compare import to_host
from polydraft.contracts.kernels.expert_mlp import ExpertMlpV1
from polydraft.contracts.packing import PACKINGS, PackedWeight
from polydraft.plugins.plugins import Plugins

SHAPES = {"ernie21": (2560, 1536, 64, 6), "glm12": (4096, 1408, 128, 8), "qwen3-30b": (2048, 768, 128, 8)}
"""Hidden size, width of an expert, experts, experts of a row."""
ROWS = (1, 4, 8, 32, 64, 128, 256)
METHOD = (
    "one layer's routed experts, launched one after another with choices in turn; each row draws its experts uniformly without "
    "replacement; bytes are those of every expert that some row chose, with its scales; share is of the copy rate of the same run"
)
LAUNCHES, REPEATS, CHOICES = 24, 7, 8


class Scratch:
    """Workspace of a kernel."""

    def __init__(self, device: Any, nbytes: int) -> None:
        self.buffer, self.nbytes = device.empty("workspace", (max(nbytes, 1),), "u8"), nbytes


def seconds(device: Any, launch: Any) -> float:
    """Median over repeats of the mean time of a launch."""
    found = []
    for _ in range(REPEATS + 1):
        device.synchronize()
        start = time.perf_counter()
        for number in range(LAUNCHES):
            launch(number)
        device.synchronize()
        found.append((time.perf_counter() - start) / LAUNCHES)
    return statistics.median(found[1:])


def weight(rng: np.random.Generator, experts: int, rows: int, columns: int, packing: str) -> Any:
    """A stack of matrices whose rows overlap in memory, so that it is made quickly; packed unless the packing is "none"."""
    if packing != "none":
        kind, width = PACKINGS[packing], columns // 2 if "int4" in packing else columns
        bits = rng.integers(0, 120, 61 * experts * rows + width, np.uint8)  # of numbers of E4M3
        numbers = np.lib.stride_tricks.as_strided(bits, (experts, rows, width), (61 * rows, 61, 1), writeable=False)
        places = kind.scales_of((experts, rows, columns))
        zeros = np.full(places, 8, np.uint8) if kind.zeros else None
        numbers = numbers.view(np.int8) if kind.number == "int8" else numbers
        return PackedWeight(kind, (experts, rows, columns), numbers, np.full(places, 1e-4, np.float32), zeros)
    pool = rng.standard_normal(61 * experts * rows + columns, np.float32) * np.float32(columns**-0.5)
    return np.lib.stride_tricks.as_strided(pool, (experts, rows, columns), (61 * rows * 4, 61 * 4, 4), writeable=False)


def main() -> None:
    """Print a table, and write it as JSON."""
    from polydraft_cuda.device import device_name, driver_version

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--packing", choices=("none", *PACKINGS), action="append", help="of weights; each in turn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    plugins, rng = Plugins.load(options.backend), np.random.default_rng(0)
    device = plugins.open_device("", DeviceOptions(options.dtype, False))
    table = plugins.kernels(device)
    provider, rate = table.providers["expert_mlp"], copy_rate()
    print(f"copy: {rate / 1e12:.2f} TB/s")
    rows_found = []
    for shape, packing in itertools.product(options.shape or SHAPES, options.packing or ("none",)):
        hidden, width, experts, chosen = SHAPES[shape]
        stacks = (experts, 2 * width, hidden), (experts, hidden, width)
        gate_up, down = (table.prepare_weight("experts", weight(rng, *stack, packing), options.dtype) for stack in stacks)
        each = (gate_up.nbytes + down.nbytes) / experts
        for n in ROWS:
            x, out = (device.empty(name, (n, hidden), options.dtype) for name in ("x", "out"))
            device.load(x, to_host(rng.standard_normal((n, hidden)), options.dtype))
            launches, touched = [], []
            for _ in range(CHOICES):
                ids = np.array([rng.permutation(experts)[:chosen] for _ in range(n)], np.int32)
                places, weights = device.empty("ids", ids.shape, "i32"), device.empty("weights", ids.shape, "f32")
                device.load(places, ids)
                device.load(weights, np.full(ids.shape, 1 / chosen, np.float32))
                a = ExpertMlpV1(
                    x=x, expert_ids=places, expert_weights=weights, gate_up=gate_up, down=down, shared=None, shared_gate=None,
                    out=out,
                )  # fmt: skip
                limits = Limits(n, 0, n, n, 16, 16, 1, 1, 1, 16)
                launches.append(provider.bind(a, limits, Scratch(device, provider.workspace_bytes(a, limits))))
                touched.append(len(np.unique(ids)) * each)
            took = seconds(device, lambda number, those=launches, n=n: those[number % CHOICES](device.stream, n))
            floor = statistics.mean(touched) / rate
            figures = {"us": round(took * 1e6, 1), "copy_rate_share": round(floor / took, 3), "copy_bytes_per_s": round(rate)}
            cell = {"shape": shape, "backend": options.backend, "packing": packing, "draft_tokens": 0, "batch": n}
            rows_found.append({**cell, **figures})
            print(f"{shape} {packing} {n:4d} rows: {took * 1e6:8.1f} us, {floor / took:.0%} of the copy rate", flush=True)
    if options.json:
        result = report.document(
            rows_found, device=device_name(0), driver=str(driver_version()), method=METHOD, estimator="median of means"
        )
        report.write(options.json, result)


if __name__ == "__main__":
    main()
