"""Time to the first token on an NVIDIA GPU, and the rate of a prefill's arithmetic; writes bench/results/cuda_prompts.json.

`ttft_ms` is the median over the requests of a batch that come at once, `prefill_ms` the time until the last of them has its
first token: prompts go through in steps of 8192 tokens, with the draft layer's own prefill behind each where drafts are made.
`operations` are those of the target's blocks, two a weight and token, and causal attention, and among them `draft_operations`,
those of the draft layer over prompts, but for the last step's, which come behind the time; heads and windows are left out.
Weights are random, made on the device. `matrix_operations_per_s` is the rate of one large product (8192 rows through gate and up
of the first shape).

    python bench/gpu_prompts.py --out bench/results/cuda_prompts.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from polydraft.bench import report
from polydraft.bench.measure import Load, run
from polydraft.bench.shapes import RandomCheckpoint
from polydraft.config import EngineConfig
from polydraft.engine import Engine

ROOT = Path(__file__).resolve().parent
BATCHED_TOKENS, NEW_TOKENS = 8192, 8


def operations(weights: int, attention: Any, rows: int, tokens: int) -> int:
    """Of the first `rows` of prompts of `tokens` each, one after the other, through so many weights and causal attention."""
    prompts, rest = divmod(rows, tokens)
    return int(2 * rows * weights + 2 * (prompts * tokens**2 + rest**2) * attention.q_size)


def target_operations(model: Any, batch: int, tokens: int) -> int:
    """Of the prompts through the target's blocks."""
    total, h = 0, model.hidden_size
    for block in model.blocks:
        a = block.mixer
        weights = h * (2 * a.q_size + 2 * a.kv_size) + 3 * h * block.feed_forward.intermediate_size
        total += operations(weights, a, batch * tokens, tokens)
    return total


def draft_operations(model: Any, batch: int, tokens: int, drafts: int) -> int:
    """Of the prompts through the draft layer until the last of them has its first token, which comes before the last step's: up
    to its attention, behind which only the last row of each prompt goes on."""
    if not drafts or model.mtp is None:
        return 0
    h, a = model.hidden_size, model.mtp.blocks[0].mixer
    return operations(2 * h * h + h * (a.q_size + 2 * a.kv_size), a, sum(prefill_rows(batch, tokens, drafts)[:-1]), tokens)


def prefill_rows(batch: int, tokens: int, drafts: int) -> list[int]:
    """Rows of the prompts in each step: requests that have their first token decode meanwhile, which takes a window of each."""
    left, steps = batch * tokens, list[int]()
    while left:
        begun = (batch * tokens - left) // tokens
        steps.append(min(left, BATCHED_TOKENS - begun * (drafts + 1)))
        left -= steps[-1]
    return steps


def matrix_rate(shape: Path, rows: int = BATCHED_TOKENS, repeats: int = 9) -> float:
    """Operations a second of the gate and up projection of a shape over `rows` rows of random numbers, by the device's events."""
    import numpy as np

    import polydraft_cuda
    from polydraft.backend import DeviceOptions
    from polydraft.contracts.base import Limits
    from polydraft.contracts.compare import to_host
    from polydraft.contracts.kernels.linear import LinearV1

    checkpoint = RandomCheckpoint(shape)
    sizes = checkpoint.config["hidden_size"], 2 * checkpoint.config["intermediate_size"]
    checkpoint.close()
    device = polydraft_cuda.polydraft_open_device("", DeviceOptions("bf16"))
    table, rng = polydraft_cuda.polydraft_kernels(device), np.random.default_rng(0)
    x, out = device.empty("x", (rows, sizes[0]), "bf16"), device.empty("out", (rows, sizes[1]), "bf16")
    device.load(x, to_host(rng.standard_normal(x.shape, np.float32), "bf16"))
    weight = table.prepare_weight("linear", 0.02 * rng.standard_normal((sizes[1], sizes[0]), np.float32), "bf16")
    limits = Limits(64, 3, rows, rows, 4096, 16, 64, 64, 4, 32000)
    args, provider = LinearV1(x=x, weight=weight, bias=None, out=out), table.providers["linear"]
    nbytes = provider.workspace_bytes(args, limits)
    launch = provider.bind(args, limits, _workspace(device, nbytes))
    times = []
    for _ in range(repeats + 2):
        begin, end = device.timer(), device.timer()
        begin.record(device.stream)
        launch(device.stream, rows)
        end.record(device.stream)
        end.synchronize()
        times.append(1e-3 * end.since(begin))
    device.close()
    return float(2 * rows * sizes[0] * sizes[1] / statistics.median(times[2:]))


def _workspace(device: Any, nbytes: int) -> Any:
    from polydraft.conformance.harness import DeviceWorkspace

    return DeviceWorkspace(device.empty("workspace", (max(nbytes, 1),), "u8"), nbytes)


def measure(shape: Path, drafts: int, options: argparse.Namespace, matrix: float) -> list[dict[str, Any]]:
    """Rows of one engine, for every number of prompts and length."""
    longest, most = max(options.prompt_tokens), max(options.batch)
    length = longest + NEW_TOKENS
    config = EngineConfig(
        backend="cuda", dtype="bf16", draft_tokens=drafts, prefix_cache=False, max_batched_tokens=BATCHED_TOKENS,
        max_num_seqs=most, max_model_len=length, num_blocks=most * -(-length // 16),
    )  # fmt: skip
    engine, rows = Engine(config, checkpoint=RandomCheckpoint(shape)), []
    for tokens in options.prompt_tokens:
        for batch in options.batch:
            first, last = [], []
            for turn in range(options.repeats + 1):
                waited = [1e3 * (output.ttft_s or 0.0) for output in run(engine, Load(batch, tokens, NEW_TOKENS))[1]]
                if turn:
                    first.append(statistics.median(waited))
                    last.append(max(waited))
            drafting = draft_operations(engine.model, batch, tokens, drafts)
            total = target_operations(engine.model, batch, tokens) + drafting
            rate = total / (1e-3 * statistics.median(last))
            rows.append({
                "shape": shape.stem, "weights": "random", "backend": "cuda", "dtype": "bf16", "draft_tokens": drafts,
                "batch": batch, "acceptance": "measured", "accept_schedule": None, "prompt_tokens": tokens,
                "new_tokens": NEW_TOKENS,
                "ttft_ms": statistics.median(first), "prefill_ms": statistics.median(last), "operations": total,
                "draft_operations": drafting,
                "operations_per_s": rate, "matrix_operations_per_s": matrix, "matrix_rate_share": rate / matrix,
                "memory_bytes": engine.device.memory(), "repeats": options.repeats,
                "spread": {"ttft_ms": [min(first), max(first)], "prefill_ms": [min(last), max(last)]},
            })  # fmt: skip
            told = f"{rows[-1]['ttft_ms']:.2f} ms to the first token, {1e-12 * rate:.0f} TFLOP/s"
            print(f"{shape.stem} K={drafts} {batch} x {tokens}: {told}", file=sys.stderr, flush=True)
    engine.close()
    return rows


def numbers(text: str) -> tuple[int, ...]:
    """What stands between commas."""
    return tuple(int(part) for part in text.split(","))


def main() -> int:
    """Measure every shape, an engine each for every number of drafts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(ROOT / "results" / "cuda_prompts.json"))
    parser.add_argument("--cells", default="mimo-7b:0,3", help="shape:K,...;shape:K,...")
    parser.add_argument("--prompt-tokens", type=numbers, default=(512,))
    parser.add_argument("--batch", type=numbers, default=(1, 8, 32, 64))
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    from polydraft_cuda.device import device_name, driver_version

    parts = [part.partition(":") for part in options.cells.split(";")]
    matrix, rows = matrix_rate(ROOT / "shapes" / f"{parts[0][0]}.json"), []
    print(f"matrix rate {1e-12 * matrix:.0f} TFLOP/s", file=sys.stderr, flush=True)
    method = "requests that come at once; wall clock; medians over the repeats; operations as bench/gpu_prompts.py defines them"
    for name, _, drafts in parts:
        for k in numbers(drafts):
            rows += measure(ROOT / "shapes" / f"{name}.json", k, options, matrix)
            result = report.document(rows, device=device_name(0), driver=str(driver_version()), method=method)
            report.write(options.out, result)
    return 0


def markdown(result: dict[str, Any]) -> str:
    """One line a cell."""
    lines = [
        "| shape | drafts | prompts | ms to the first token | all prompts, ms | TFLOP/s | of a large product's | memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['shape']} | {row['draft_tokens']} | {row['batch']} x {row['prompt_tokens']} | {row['ttft_ms']:.2f} | "
        f"{row['prefill_ms']:.2f} | {1e-12 * row['operations_per_s']:.0f} | {row['matrix_rate_share']:.0%} | "
        f"{row['memory_bytes'] / 2**30:.1f} GiB |"
        for row in result["rows"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
