"""Microseconds of a sum over two NVIDIA GPUs, by rows of 4096 in bfloat16; writes bench/results/collectives.json.

    python bench/collectives.py

Two threads of one process, a GPU each, replay a graph of `LAUNCHES` launches at the same time; a figure is the median of the
replays over the launches, which follow each other as in a step. Ranks meet in memory of each other's GPUs and, where it is
installed, over NCCL.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from polydraft.backend import DeviceOptions
from polydraft.bench import report
from polydraft.contracts import COLLECTIVES, ResidualAddV1, RmsNormV1
from polydraft.contracts.base import Limits
from polydraft.contracts.composite import CompositeArgs
from polydraft.ranks import Exchange, Group
from polydraft_cuda import polydraft_collectives, polydraft_open_device
from polydraft_cuda.device import CudaDevice, device_name, driver_version
from polydraft_cuda.graph import CudaCapture
from polydraft_cuda.kernels import norms
from polydraft_cuda.nccl import library
from polydraft_cuda.ranks import WAYS

WIDTH, ROWS, LAUNCHES, REPLAYS = 4096, (1, 8, 32, 64, 128, 256, 1024), 50, 20
LIMITS = Limits(64, 3, max(ROWS), 256, 4096, 16, 64, 256, 4, 4096)
OUT = Path(__file__).resolve().parent / "results" / "collectives.json"


def launches(device: CudaDevice, group: Group) -> dict[str, Any]:
    """What is timed, by name: the sum alone, with the norm behind it, and, over memory, joined with that."""
    found = polydraft_collectives(device, group)
    x, y, out = (device.zeros(name, (max(ROWS), WIDTH), "bf16") for name in ("x", "y", "out"))
    weight: Any = device.zeros("weight", (WIDTH,), "bf16")
    record: Any = COLLECTIVES["all_reduce"].args
    summed = record(x=y, step=device.zeros("step", (1,), "i32"))
    normed = RmsNormV1(x=x, weight=weight, eps=1e-6, plus_one=False, out=out)
    sums, norm = found.providers["all_reduce"].bind(summed, LIMITS, None), norms.norm(device, normed, x, y)
    timed: dict[str, Any] = {
        "all_reduce": sums, "all_reduce, residual_add+rms_norm": lambda s, n: (sums(s, n), norm(s, n)),
    }  # fmt: skip
    if found.program_pass is not None:
        kernels: Any = found.program_pass.kernels
        joined = kernels["norm_of_sum"].provider.bind(CompositeArgs((summed, ResidualAddV1(x=x, y=y), normed)), LIMITS, None)
        timed["all_reduce+residual_add+rms_norm"] = joined
    return timed


def again(launch: Callable[[Any, int], object], stream: Any, rows: int) -> None:
    """As many launches as a graph has."""
    for _ in range(LAUNCHES):
        launch(stream, rows)


def measured(way: str) -> dict[tuple[str, int], float]:
    """Microseconds by name and rows, where ranks meet in this way."""
    exchanges = Exchange.of_threads(2, max(ROWS) * WIDTH * 4, 30.0)
    devices = [
        polydraft_open_device(f"cuda:0?collectives={way}", DeviceOptions("bf16", rank=rank, num_ranks=2)) for rank in (0, 1)
    ]
    barrier, found = threading.Barrier(2), dict[tuple[str, int], float]()

    def run(rank: int) -> None:
        device = devices[rank]
        for name, launch in launches(device, Group(rank, 2, exchanges[rank])).items():
            for rows in ROWS:
                barrier.wait()
                launch(device.stream, rows)
                device.synchronize()
                graph = CudaCapture(device).capture(device.stream, partial(again, launch, device.stream, rows))
                times = []
                for _ in range(REPLAYS):
                    barrier.wait()
                    begin = time.perf_counter()
                    graph.replay(device.stream)
                    device.synchronize()
                    times.append(time.perf_counter() - begin)
                if rank == 0:
                    found[name, rows] = statistics.median(times) / LAUNCHES * 1e6

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for device in devices:
        device.close()
    return found


def main() -> int:
    """Measure, print and write."""
    rows = []
    for way in WAYS if library() else ("peers",):
        found = measured(way)
        for name in dict.fromkeys(name for name, _ in found):
            called = name if way == "peers" else f"{name} over {WAYS[way]}"
            print(f"{called:18s}", *(f"{count}: {found[name, count]:6.2f}" for count in ROWS), "us", file=sys.stderr)
            own = {"shape": f"rows of {WIDTH}", "backend": "cuda", "draft_tokens": 0, "dtype": "bf16", "launches": called}
            rows += [{**own, "batch": count, "us": found[name, count]} for count in ROWS]
    method = f"median of {REPLAYS} replays of a graph of {LAUNCHES} launches, host clock, over the launches"
    report.write(str(OUT), report.document(rows, method=method, device=device_name(0), driver=str(driver_version())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
