"""Time of `linear` on an NVIDIA GPU at the sizes of a published model, in bf16 and packed, beside the time that its weights take.

    python bench/linear_kernel.py --packings bf16,fp8-channel,fp8-channel-a8 --rows 4,32,128,256

Launches of one projection follow each other in a captured graph, each with a copy of the weight of its own, so that none is found
in the second cache: together they are of 256 MB at least. The floor is the bytes of the numbers over the rate of a plain copy on
the same device (read and written bytes counted). A figure is the median over repeats of the mean launch of a replay; rounding of
rows, where a packing has it, is part of it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.gpu_rounds import copy_rate
from polydraft.backend import DeviceOptions
from polydraft.bench import report
from polydraft.contracts.base import Limits
from polydraft.contracts.compare import to_host
from polydraft.contracts.kernels.linear import LinearV1
from polydraft.contracts.packing import PACKINGS, PackedWeight

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (22016, 4096), "down": (4096, 11008), "head": (151680, 4096)}
"""Outputs and inputs, as mimo-7b has them; outputs of the head are float32."""
APART, REPEATS = 256 << 20, 7
METHOD = (
    "launches of one projection in a captured graph, each with a copy of the weight of its own, of 256 MB at least together; "
    "bytes are those of the numbers; share is of the copy rate of the same run"
)


def weight(packing: str, outputs: int, inputs: int) -> Any:
    """A matrix whose rows overlap in memory, so that it is made quickly."""
    rng, step = np.random.default_rng(0), 61
    size = step * (outputs - 1) + inputs
    if packing == "bf16":
        pool: Any = rng.standard_normal(size, np.float32) * np.float32(inputs**-0.5)
        return np.lib.stride_tricks.as_strided(pool, (outputs, inputs), (4 * step, 4), writeable=False)
    kind = PACKINGS[packing]
    number = rng.integers(0, 120, size, np.uint8) | rng.integers(0, 2, size, np.uint8) << 7
    width = inputs // 2 if kind.number == "int4" else inputs
    numbers = np.lib.stride_tricks.as_strided(number, (outputs, width), (step, 1), writeable=False)
    scales = np.full(kind.scales_of((outputs, inputs)), inputs**-0.5 / 100, np.float32)
    zeros = np.full(scales.shape, 8, np.uint8) if kind.zeros else None
    return PackedWeight(kind, (outputs, inputs), numbers.view(np.int8) if kind.number == "int8" else numbers, scales, zeros)


def seconds(device: Any, launches: list[Any], rows: int) -> float:
    """Median over repeats of the mean time of a launch."""
    from polydraft_cuda import polydraft_graph_capture

    def all_of_them() -> None:
        for launch in launches:
            launch(device.stream, rows)

    all_of_them()  # the library's plans
    graph, found = polydraft_graph_capture(device).capture(device.stream, all_of_them), []
    for _ in range(REPEATS + 2):
        begin, end = device.timer(), device.timer()
        begin.record(device.stream)
        graph.replay(device.stream)
        end.record(device.stream)
        end.synchronize()
        found.append(1e-3 * end.since(begin) / len(launches))
    return statistics.median(found[2:])


def main() -> None:
    """Print a line a cell, and write them as JSON."""
    from polydraft_cuda import polydraft_kernels, polydraft_open_device
    from polydraft_cuda.device import device_name, driver_version

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packings", default="bf16,fp8-channel,fp8-channel-a8")
    parser.add_argument("--rows", default="4,32,128,256")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rate, found = copy_rate(), []
    print(f"copy: {rate / 1e12:.2f} TB/s")
    for packing in options.packings.split(","):
        device = polydraft_open_device("", DeviceOptions("bf16"))
        table: Any = polydraft_kernels(device)
        for name in options.shapes.split(","):
            outputs, inputs = SHAPES[name]
            value = weight(packing, outputs, inputs)
            nbytes = 2 * outputs * inputs if packing == "bf16" else value.packing.nbytes(value.shape)
            weights = [table.prepare_weight("linear", value, "bf16") for _ in range(-(-APART // nbytes))]
            for rows in map(int, options.rows.split(",")):
                x, out = (
                    device.empty("x", (rows, inputs), "bf16"),
                    device.empty("out", (rows, outputs), "bf16" if name != "head" else "f32"),
                )
                device.load(x, to_host(np.random.default_rng(rows).standard_normal((rows, inputs)), "bf16"))
                records = [LinearV1(x=x, weight=one, bias=None, out=out) for one in weights]
                limits = Limits(rows, 0, rows, rows, 16, 16, 1, 1, 1, 16)
                need = table.providers["linear"].workspace_bytes(records[0], limits)
                scratch: Any = SimpleNamespace(buffer=device.empty("workspace", (max(need, 1),), "u8"), nbytes=need)
                took = seconds(device, [table.providers["linear"].bind(a, limits, scratch) for a in records], rows)
                share, rate_f = nbytes / rate / took, 2 * rows * outputs * inputs / took
                figures = {"us": round(1e6 * took, 2), "copy_rate_share": round(share, 3), "copy_bytes_per_s": round(rate)}
                cell = {"shape": f"mimo-7b {name}", "backend": "cuda", "packing": packing, "draft_tokens": 0, "batch": rows}
                found.append({**cell, **figures})
                said = f"{1e6 * took:8.2f} us, {share:4.0%} of the copy rate, {rate_f / 1e12:6.1f} TFLOP/s"
                print(f"{packing:16} {name:8} {rows:4d} rows: {said}", flush=True)
        device.close()
    if options.json:
        result = report.document(
            found, device=device_name(0), driver=str(driver_version()), method=METHOD, estimator="median of means"
        )
        report.write(options.json, result)


if __name__ == "__main__":
    main()
