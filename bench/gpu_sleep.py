"""Sleep, waking and new weights on an NVIDIA GPU: seconds, memory by the driver's count, and whether texts are those of before;
writes bench/results/cuda_sleep.json.

    python bench/gpu_sleep.py --shape mimo-7b

Weights are random bfloat16 in PyTorch's tensors, on the host and, in a process of its own, on the same GPU (shared by handles).
Each turn updates, sleeps at level 1 and wakes, sleeps at level 2 and wakes with the arrays; a plain copy of the arrays to the GPU
stands beside.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from polydraft.bench import report
from polydraft.bench.shapes import RandomCheckpoint
from polydraft.config import EngineConfig
from polydraft.engine import Engine
from polydraft.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parent
GIB = 1 << 30
POOL = (1 << 22) + 4093
"""Numbers that are drawn; their count is prime to the sizes of matrices, so that rows differ."""
PROMPTS = [[7 * i + j + 1 for j in range(64)] for i in range(8)]
PARAMS = SamplingParams(max_new_tokens=32, ignore_eos=True)


def tensors(shape: str, seed: int, device: str) -> dict[str, torch.Tensor]:
    """Every tensor that the shape stores, drawn over and over from one pool of numbers."""
    torch.manual_seed(seed)
    pool, found, begin = torch.randn(POOL, dtype=torch.float32).bfloat16().to(device), {}, 0
    with closing(RandomCheckpoint(ROOT / "shapes" / f"{shape}.json")) as random:
        for name in random.names():
            size = random.shape(name)
            count, begin = math.prod(size), (begin + 9973) % (POOL // 2)
            value = pool[begin:].repeat(-(-count // (POOL - begin)))[:count].reshape(size)
            found[name] = value * (size[-1] ** -0.5) if len(size) > 1 else value * 0.02 + float("norm" in name)
    return found


def trainer(shape: str) -> None:
    """The other process: tensors on the GPU, until standard input ends."""
    from polydraft_cuda.ipc import share

    kept = tensors(shape, 1, "cuda")
    torch.cuda.synchronize()
    print(json.dumps(share(kept)), flush=True)
    sys.stdin.read()


def texts(engine: Engine) -> list[tuple[int, ...]]:
    """Of eight requests."""
    ids = [engine.add(prompt, PARAMS) for prompt in PROMPTS]
    done: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        engine.step()
        done |= {one.id: one.token_ids for one in engine.poll() if one.finished}
    return [done[i] for i in ids]


def measured(shape: str, repeats: int) -> dict[str, Any]:
    """The row."""
    config = EngineConfig.from_mapping(
        {"backend": "cuda", "draft_tokens": 3, "max_num_seqs": 8, "max_model_len": 4096, "enable_sleep_mode": True}
    )
    given = tensors(shape, 0, "cpu")
    size = sum(one.numel() * 2 for one in given.values())
    times: dict[str, list[float]] = {}
    memory: dict[str, int] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        begin = time.perf_counter()
        call()
        times.setdefault(name, []).append(time.perf_counter() - begin)

    command = [sys.executable, __file__, "--shape", shape, "--trainer"]
    with closing(Engine(config, checkpoint=RandomCheckpoint(ROOT / "shapes" / f"{shape}.json"))) as engine:
        before = texts(engine)
        taken: Callable[[], int] = engine.device.memory_taken  # type: ignore[attr-defined]
        for _ in range(repeats):
            timed("update_from_host_s", lambda: engine.update_weights(given))
            before = texts(engine)
            for level in (1, 2):
                memory["awake"] = taken()
                timed(f"sleep_{level}_s", lambda level=level: engine.sleep(level))  # type: ignore[misc]
                memory[f"asleep_{level}"] = taken()
                timed(f"wake_up_{level}_s", lambda level=level: engine.wake_up(given if level == 2 else None))  # type: ignore[misc]
                if texts(engine) != before:
                    raise SystemExit(f"texts after sleep at level {level} are others")
            timed("copy_s", lambda: [one.cuda() for one in given.values()] and torch.cuda.synchronize())
            torch.cuda.empty_cache()
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            handles = json.loads(other.stdout.readline())
            for _ in range(repeats):
                with engine.shared(handles) as shared:
                    timed("update_from_gpu_s", lambda: engine.update_weights(shared))
            if texts(engine) == before:
                raise SystemExit("weights of the other process changed no text")
            other.communicate("")
    row: dict[str, Any] = {"shape": shape, "backend": "cuda", "dtype": "bf16", "weights": "random", "repeats": repeats}
    row |= {"draft_tokens": 3, "batch": len(PROMPTS)}
    row["given_gib"] = round(size / GIB, 3)
    row |= {name: round(statistics.median(of), 3) for name, of in times.items()}
    row |= {f"{name}_gib": round(of / GIB, 3) for name, of in memory.items()}
    row["spread"] = {name: [round(min(of), 3), round(max(of), 3)] for name, of in times.items()}
    return row


def main() -> int:
    """Measure each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(ROOT / "results" / "cuda_sleep.json"))
    parser.add_argument("--shape", action="append")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trainer", action="store_true", help="be the other process")
    options = parser.parse_args()
    shapes = options.shape or ["mimo-7b"]
    if options.trainer:
        trainer(shapes[0])
        return 0
    from polydraft_cuda.device import device_name, driver_version

    rows = [measured(shape, options.repeats) for shape in shapes]
    for row in rows:
        print(json.dumps(row), file=sys.stderr)
    said = {"device": device_name(0), "driver": str(driver_version())}
    method = "medians over the repeats; weights given in bfloat16; memory as the driver counts it, all processes together"
    report.write(options.out, report.document(rows, method=method, **said))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
