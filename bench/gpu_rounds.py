"""Decode rounds of large shapes on an NVIDIA GPU, beside what its memory allows; writes bench/results/cuda.json.

Weights are random, made on the device; acceptance is synthetic, by a schedule, and labelled so in every row. `floor_bytes` of a
row counts what a round cannot do without reading (of several GPUs that share a model, what one of them reads): every weight of
the target once, of the draft layer once a pass, the head once for the target and once a pass (a byte a weight where its outputs
are looked at by bytes first), and the keys and values of the mean context. `copy_rate_share` is the time of those bytes at the
measured rate of a device-to-device copy (bytes read and written), over the time of a round.

A round's time is the median of the repeats, each the median of the rounds in which all requests take part, as that of the
engine that it is set beside; `spread` has the extremes. With `--cool` the device is left alone before each cell until it is
as cool as when an engine has just been started: a board at its power limit is slower by some percent when minutes of other cells
have warmed it. `temperature_c` is what it had then.

    python bench/gpu_rounds.py --out bench/results/cuda.json
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polydraft.bench import report
from polydraft.bench.measure import Load
from polydraft.bench.suite import VARIANTS, Contender, Suite
from polydraft.config import EngineConfig
from polydraft.engine import Engine
from polydraft.models.feed_forward import SparseMoe
from polydraft.models.weights import DRAFT_HEAD

ROOT = Path(__file__).resolve().parent
SCHEDULE = (0.8, 0.75, 0.75)
"""Chance of a draft whose predecessors were accepted: 0.8, 0.6, 0.45 of all rounds accept one, two, three."""
BATCHED_TOKENS = 8192
"""Rows of a prefill step."""
GIB = 1 << 30
ESTIMATOR = "median over the repeats of the median round in which all requests of the batch take part"
BATCHES = (1, 8, 32, 64)


def peer() -> dict[str, Any]:
    """What vLLM takes on one H200: `bench/peers/vllm_h200.json`."""
    found: dict[str, Any] = json.loads((ROOT / "peers" / "vllm_h200.json").read_text(encoding="utf-8"))
    return found


def peer_ms() -> dict[tuple[str, int], tuple[float, ...]]:
    """Its milliseconds a round by shape and drafts, for `BATCHES`, in bf16 on one GPU. A peer's figure is estimated as ours is:
    rounds in which all requests take part."""
    found: dict[tuple[str, int], tuple[float, ...]] = {}
    for row in peer()["rows"]:
        if (row["gpus"], row["weights"]) == (1, "bf16"):
            cell = row["shape"], row["draft_tokens"]
            found[cell] = (*found.get(cell, ()), row["ms_per_round"])
    return found


def copy_rate(nbytes: int = 4 * GIB, repeats: int = 10) -> float:
    """Bytes read and written by a device-to-device copy, a second: the median of `repeats`."""
    from polydraft_cuda.device import CudaDevice

    device, times = CudaDevice(0), []
    source, target = device.empty("copy.from", (nbytes,), "u8"), device.empty("copy.to", (nbytes,), "u8")
    for _ in range(repeats + 2):
        begin, end = device.timer(), device.timer()
        begin.record(device.stream)
        device.call("cuMemcpyDtoDAsync", target.pointer, source.pointer, nbytes, device.stream.handle)
        end.record(device.stream)
        end.synchronize()
        times.append(1e-3 * end.since(begin))
    device.close()
    return 2 * nbytes / statistics.median(times[2:])


def device_says(*questions: str) -> list[float]:
    """What the driver's tool says of the device, a number a question; empty where it does not say."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={','.join(questions)}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    values = lines[0].split(",") if lines else []
    with contextlib.suppress(ValueError):  # a word in place of a number
        return [float(value) for value in values] if len(values) == len(questions) else []
    return []


def temperature() -> float | None:
    """Degrees Celsius of the device; None where the driver's tool does not say."""
    return next(iter(device_says("temperature.gpu")), None)


def cooled(most: float, patience_s: float = 20.0) -> float | None:
    """The temperature, once it is at most `most` or nobody waits any longer."""
    start, found = time.monotonic(), temperature()
    while found is not None and found > most and time.monotonic() - start < patience_s:
        time.sleep(1.0)
        found = temperature()
    return found


def byte_heads(engine: Engine, batch: int) -> tuple[bool, bool]:
    """Whether the greedy choices of the target's rows, and of the drafts', look at their head by its bytes first while they
    are captured: the target's do where nobody wants its logits."""
    from polydraft_cuda.kernels import screen

    limits = engine.resolved.limits
    weights: Mapping[str, Any] = engine.runner.memory.weights
    heads = weights["lm_head"], weights.get(DRAFT_HEAD, weights["lm_head"])
    rows = batch * limits.window, batch
    target, drafts = (
        getattr(head, "screen", None) is not None and n <= screen.MOST_ROWS for head, n in zip(heads, rows, strict=True)
    )
    return target and limits.max_logprobs < 0, drafts


@contextlib.contextmanager
def heads_read(way: str) -> Iterator[None]:
    """Heads of engines that are built meanwhile: looked at by their "bytes" first, or read "whole" as if they had none."""
    from polydraft_cuda.kernels import screen

    most = screen.MOST_ROWS
    screen.MOST_ROWS = {"bytes": most, "whole": 0}[way]
    try:
        yield
    finally:
        screen.MOST_ROWS = most


def floor_bytes(
    engine: Engine, batch: int, context: float, looked: tuple[bool, bool] = (False, False), tokens_per_round: float = 1.0
) -> int:
    """Bytes that a round has to read. `looked`: `byte_heads`. Of experts those count that uniform draws are expected to touch:
    by every row of the windows in the target, by the rows that were committed (`tokens_per_round` each) in the first draft pass,
    by one row a request in the others."""
    model, resolved = engine.model, engine.resolved
    drafts, size = resolved.limits.num_drafts, 4 if resolved.dtype == "f32" else 2
    packing, ignored = resolved.packing, engine.config.weights_ignore

    def each(part: str = "") -> float:
        """Bytes of a weight of a matrix in some part of the model (`PARTS`), of one with many inputs."""
        return size if packing is None or part in ignored else packing.nbytes((1024, 4096)) / (1024 * 4096)

    def block(b: Any, rows: float, part: str = "") -> float:
        a, f, h = b.mixer, b.feed_forward, model.hidden_size
        width = f.intermediate_size
        if isinstance(f, SparseMoe):
            experts, chosen = f.routing.num_experts, f.routing.top_k
            width = f.shared_size + experts * (1 - (1 - chosen / experts) ** rows) * f.intermediate_size
        return float(each(part) * h * (2 * a.q_size + 2 * a.kv_size + 3 * width))

    def cached(b: Any) -> float:
        a = b.mixer
        return float(2 * batch * context * (a.num_kv_heads * (a.head_dim + 1) if resolved.kv else size * a.kv_size))

    def head(tokens: int, by_bytes: bool) -> float:
        return (1 if by_bytes else each("head")) * tokens * model.hidden_size

    total = sum(block(b, batch * (drafts + 1)) + cached(b) for b in model.blocks) + head(model.vocab_size, looked[0])
    if drafts and model.mtp is not None:
        joined = each("mtp") * 2 * model.hidden_size**2
        scored = head(resolved.describe()["draft_vocab"], looked[1])
        own = model.mtp.blocks[0]
        total += block(own, batch * tokens_per_round, "mtp") + (drafts - 1) * block(own, batch, "mtp")
        total += drafts * (cached(own) + joined + scored)
    return int(total)


@dataclass(frozen=True)
class Cell:
    """What a row is about. `asked`: log probabilities that every request wants, None for an engine that reports none; `kv`: how
    keys and values are kept; `weights`: how matrices are; `vocab`: the option of a reduced draft vocabulary; `head`: "bytes"
    where heads are looked at by their bytes first, "whole" where they are read as if there were none; `variant`: graph and
    overlap."""

    shape: Path
    batch: int
    drafts: int
    asked: int | None
    kv: str
    weights: str
    vocab: str
    head: str
    variant: Mapping[str, Any]


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Every one that is asked for, in order."""
    for part in options.cells.split(";"):
        name, _, drafts = part.partition(":")
        shape = ROOT / "shapes" / f"{name}.json"
        for k, batch in itertools.product(map(int, drafts.split(",")), map(int, options.batch.split(","))):
            lists = (
                part.split(",")
                for part in (options.logprobs, options.kv_dtype, options.weights, options.draft_vocab, options.head)
            )
            for asked, kv, weights, vocab, head, variant in itertools.product(*lists, VARIANTS[options.compare]):
                asks, few = None if asked == "off" else int(asked), "" if vocab == "all" else vocab
                yield Cell(shape, batch, k, asks, kv, weights, few, head, variant)


def common(drafts: int) -> dict[str, Any]:
    """What engines whose rounds are timed have in common."""
    return {
        "backend": "cuda", "plugins": (str(ROOT / "uniform_routing.py"),), "prefix_cache": False,
        "accept_schedule": SCHEDULE[:drafts], "max_batched_tokens": BATCHED_TOKENS,
    }  # fmt: skip


def measure(what: Cell, options: argparse.Namespace, rate: float) -> dict[str, Any]:
    """One row."""
    shape, batch, drafts, asked = what.shape, what.batch, what.drafts, what.asked
    config = EngineConfig.from_mapping(
        {
            **common(drafts),
            "dtype": options.dtype,
            "invariant": options.invariant,
            "tensor_parallel": options.tensor_parallel,
            "expert_parallel": options.expert_parallel,
            "kv_dtype": what.kv,
            "weights": what.weights,
            **({"draft_vocab": what.vocab} if drafts and what.vocab else {}),
            **({} if asked is None else {"logprobs": asked}),
        }
    )
    suite = Suite(
        config,
        shape,
        (batch,),
        (drafts,),
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        repeats=options.repeats,
    )
    load, told = Load(batch, options.prompt_tokens, options.new_tokens, asked), time.monotonic()
    cell = Contender(suite.engine(load, drafts, dict(what.variant)), load)
    begun_at = cooled(options.cool) if options.cool else temperature()
    try:
        for turn in range(options.repeats + 1):
            cell.measure(keep=turn > 0, host=not options.bare)
        row = cell.row(shape)
        context = options.prompt_tokens + options.new_tokens / 2
        looked = byte_heads(cell.engine, batch) if cell.engine.resolved.graph != "off" else (False, False)
        floor = floor_bytes(cell.engine, batch, context, looked, row["tokens_per_round"]) // options.tensor_parallel
    finally:
        cell.engine.close()
    row |= {
        "tensor_parallel": options.tensor_parallel,
        "expert_parallel": options.expert_parallel,
        "logprobs": asked,
        "head": what.head,
        "routing": "uniform" if any(isinstance(block.feed_forward, SparseMoe) for block in cell.engine.model.blocks) else None,
        "temperature_c": begun_at,
        "floor_bytes": floor,
        "copy_bytes_per_s": rate,
        "copy_rate_share": floor / rate / (1e-3 * row["ms_per_round"]),
    }
    share = f"{row['copy_rate_share']:.0%} of the copy rate"
    figures = f"{row['ms_per_round']:.3f} ms a round, {share}, {row['tokens_per_round']:.2f} tokens, rows in {row['kv_dtype']}"
    figures += f", weights in {row['weight_packing']}"
    ways = *map(str, what.variant.values()), what.vocab, "heads whole" if what.head == "whole" else ""
    name = " ".join(filter(None, (f"{shape.stem} K={drafts} batch {batch}", *ways)))
    print(f"{name}: {figures}; {time.monotonic() - told:.0f} s", file=sys.stderr, flush=True)
    return row


def main() -> int:
    """Measure every cell; each engine is closed before the next is built."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(ROOT / "results" / "cuda.json"))
    parser.add_argument("--cells", default="mimo-7b:0,3", help="shape:K,...;shape:K,...")
    parser.add_argument("--batch", default="1,8,32,64")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--logprobs", default="off", help="what requests ask for, each in turn: off,0,5,20")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--kv-dtype", default="auto", help="how keys and values are kept, each in turn: auto,fp8,int8")
    parser.add_argument("--weights", default="auto", help="how matrices are kept, each in turn: auto,fp8,int8,int4")
    parser.add_argument("--draft-vocab", default="all", help="tokens that may be drafted, each in turn: all,FILE:N,...")
    parser.add_argument("--head", default="bytes", help="how heads are read, each in turn: bytes,whole")
    parser.add_argument("--compare", choices=list(VARIANTS), default="off", help="every cell with and without, in turn")
    parser.add_argument("--invariant", action="store_true")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share each model")
    parser.add_argument("--expert-parallel", action="store_true", help="they keep whole experts")
    parser.add_argument("--bare", action="store_true", help="do not record what the host spends by stage")
    parser.add_argument(
        "--cool", type=float, default=0.0, help="wait before each cell until the device has at most so many degrees Celsius"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further cell after this time")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    rate, begin = copy_rate(), time.monotonic()
    print(f"copy rate {1e-12 * rate:.2f} TB/s", file=sys.stderr, flush=True)
    for cell in cells(options):
        if time.monotonic() - begin <= options.seconds:
            with heads_read(cell.head):
                rows.append(measure(cell, options, rate))
            gc.collect()  # graphs of an engine that is gone would be freed in the middle of the next one's rounds
            write(rows, options.out)
    return 0


def write(rows: list[dict[str, Any]], out: str) -> None:
    """The result so far: a run that is cut short leaves what it has."""
    from polydraft_cuda.device import device_name, driver_version

    how = f"weights random, acceptance synthetic by {SCHEDULE}; floor_bytes as bench/gpu_rounds.py defines them"
    said = {"device": device_name(0), "driver": str(driver_version()), "estimator": ESTIMATOR}
    result = report.document(rows, method=f"{report.METHOD}; {how}", **said)
    report.write(out, result)


if __name__ == "__main__":
    raise SystemExit(main())
