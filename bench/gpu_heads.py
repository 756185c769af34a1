"""Decode rounds by what a head's weights are distributed like, on an NVIDIA GPU: heads that are first looked at by a byte a
weight beside heads that are read whole; writes bench/results/cuda_heads.json and a plot.

Both engines of a batch are alive at once and take turns, repeat by repeat; before each distribution both heads are overwritten.
How often outputs reach the bound of a look depends on the distribution alone: hidden states are those of random layers. Otherwise
as bench/gpu_rounds.py measures; a round's time is the median of the repeats here.

    python bench/gpu_heads.py --out bench/results/cuda_heads.json --plot docs/images/cuda_heads.png
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.bench import report
from polydraft.bench.measure import Load
from polydraft.bench.suite import Contender, Suite
from polydraft.config import EngineConfig
from polydraft.contracts.compare import from_host, to_host
from polydraft.demo import demo_model_path

ROOT = Path(__file__).resolve().parent
sys.path.append(str(ROOT.parent))
from bench import gpu_rounds  # noqa: E402  as for bench/draft_vocab.py

Array = Any
SHAPE = ROOT / "shapes" / "mimo-7b.json"
DRAFTS = 3
POOL = 1 << 24
"""Numbers of a distribution; rows of a head begin anywhere among them."""
WAYS = ("whole", "bytes")


# -- heads ---------------------------------------------------------------------------------------------
def rows_of(pool: Array, outputs: int, inputs: int, rng: Any) -> Array:
    """A head of bfloat16 bits, [outputs, inputs], each row a stretch of a pool of numbers as long as normal ones."""
    bits = to_host((pool / (np.std(pool) * np.sqrt(inputs))).astype(np.float32), "bf16")
    stretches = np.lib.stride_tricks.sliding_window_view(bits, inputs)
    return stretches[rng.integers(0, len(stretches), outputs)]


def with_columns(count: int, outputs: int, inputs: int, rng: Any) -> Array:
    """Normal numbers, some columns 8 times as large."""
    head = rows_of(rng.standard_normal(POOL), outputs, inputs, rng)
    columns = rng.permutation(inputs)[:count]
    head[:, columns] = to_host(8 * from_host(head[:, columns], "bf16").astype(np.float32), "bf16")
    return head


def trained(outputs: int, inputs: int, rng: Any) -> Array:
    """The head of the demo checkpoint, side by side and one below the other, of signs of its own each time."""
    (file,) = [f for f in Path(demo_model_path()).glob("*.safetensors") if b'"lm_head.weight"' in f.read_bytes()[: 1 << 16]]
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    said = json.loads(data[8 : 8 + length])["lm_head.weight"]
    begin, end = (8 + length + at for at in said["data_offsets"])
    bits, (rows, columns) = np.frombuffer(data[begin:end], np.uint16), said["shape"]
    tall, wide = -(-outputs // rows), -(-inputs // columns)
    head = np.tile(bits.reshape(rows, columns), (tall, wide))[:outputs, :inputs]
    signs = (rng.integers(0, 2, (tall, wide)) << 15).astype(np.uint16).repeat(rows, 0).repeat(columns, 1)[:outputs, :inputs]
    return head ^ signs


def one_dominating(outputs: int, inputs: int, rng: Any) -> Array:
    """Normal numbers, one row 64 times as large."""
    head = rows_of(rng.standard_normal(POOL), outputs, inputs, rng)
    head[outputs // 2] = to_host(64 * from_host(head[outputs // 2], "bf16").astype(np.float32), "bf16")
    return head


def alike(outputs: int, inputs: int, rng: Any) -> Array:
    """Rows that have most in common: more outputs may be the highest than are worth a look."""
    head = rows_of(rng.standard_normal(POOL) / 64, outputs, inputs, rng)
    common = from_host(head[:1], "bf16").astype(np.float32)
    for start in range(0, outputs, 8192):
        part = slice(start, start + 8192)
        head[part] = to_host(8 * common + from_host(head[part], "bf16").astype(np.float32), "bf16")
    return head


def drawn(of: Callable[[Any], Array]) -> Callable[[int, int, Any], Array]:
    """A head of independent numbers."""
    return lambda outputs, inputs, rng: rows_of(of(rng), outputs, inputs, rng)


FAMILIES: dict[str, Callable[[int, int, Any], Array]] = {
    "normal": drawn(lambda rng: rng.standard_normal(POOL)),
    "t(5)": drawn(lambda rng: rng.standard_t(5, POOL)),
    "t(3)": drawn(lambda rng: rng.standard_t(3, POOL)),
    "8 columns x 8": lambda outputs, inputs, rng: with_columns(8, outputs, inputs, rng),
    "64 columns x 8": lambda outputs, inputs, rng: with_columns(64, outputs, inputs, rng),
    "demo head": trained,
    "one row x 64": one_dominating,
    "rows alike": alike,
}
"""Heads by name: (outputs, inputs, random numbers) to bits."""


def overwrite(engine: Any, bits: Array) -> None:
    """Another head for an engine, and the bytes of it where it looks at them."""
    weight = engine.runner.memory.weights["lm_head"]
    engine.device.write(weight.pointer, bits)
    weight.screen.pack(weight)


# -- rounds --------------------------------------------------------------------------------------------
def engine_of(way: str, batch: int, options: argparse.Namespace) -> tuple[Any, Load]:
    """An engine whose heads are read this way."""
    config = EngineConfig.from_mapping({**gpu_rounds.common(DRAFTS), "dtype": "bf16"})
    sizes = {"prompt_tokens": options.prompt_tokens, "new_tokens": options.new_tokens, "repeats": options.repeats}
    load = Load(batch, options.prompt_tokens, options.new_tokens)
    with gpu_rounds.heads_read(way):
        return Suite(config, SHAPE, (batch,), (DRAFTS,), **sizes).engine(load, DRAFTS, {}), load


def measured(batch: int, options: argparse.Namespace, rate: float, heads: dict[str, Array]) -> Iterator[dict[str, Any]]:
    """A row for each distribution and way."""
    engines = {way: engine_of(way, batch, options) for way in WAYS}
    try:
        for name in options.families:
            if name not in heads:
                outputs, inputs = engines["whole"][0].runner.memory.weights["lm_head"].shape
                heads[name] = FAMILIES[name](outputs, inputs, np.random.default_rng(1))
            for engine, _ in engines.values():
                overwrite(engine, heads[name])
            cells = {way: Contender(engine, load) for way, (engine, load) in engines.items()}
            for turn in range(options.repeats + 1):
                for cell in cells.values():
                    cell.measure(keep=turn > 0, host=False)
            for way, cell in cells.items():
                yield row_of(cell, name, way, rate, options)
            ms = {way: statistics.median(cell.figures["ms_per_round"]) for way, cell in cells.items()}
            against = ms["bytes"] / ms["whole"] - 1
            shown = f"batch {batch}, {name}: whole {ms['whole']:.3f} ms, by bytes {ms['bytes']:.3f} ms ({against:+.1%})"
            print(shown, file=sys.stderr, flush=True)
    finally:
        for engine, _ in engines.values():
            engine.close()


def row_of(cell: Contender, name: str, way: str, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    engine, batch = cell.engine, cell.load.batch
    looked = gpu_rounds.byte_heads(engine, batch) if way == "bytes" else (False, False)
    floor = gpu_rounds.floor_bytes(engine, batch, options.prompt_tokens + options.new_tokens / 2, looked)
    row = cell.row(SHAPE) | {"head": way, "head_weights": name, "floor_bytes": floor, "copy_bytes_per_s": rate}
    return row | {"copy_rate_share": floor / rate / (1e-3 * row["ms_per_round"])}


def draw(result: dict[str, Any], path: Path) -> None:
    """A group of bars for each distribution: rounds by bytes over those that read the head whole."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shares = compared(result)
    batches = sorted({batch for batch, _ in shares})
    names = list(dict.fromkeys(name for _, name in shares))
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for i, batch in enumerate(batches):
        places = [at + (i - (len(batches) - 1) / 2) * 0.8 / len(batches) for at in range(len(names))]
        axes.bar(places, [100 * (shares[batch, name][2] - 1) for name in names], width=0.8 / len(batches), label=f"batch {batch}")
    axes.axhline(0, color="#404040", linewidth=0.8)
    axes.axhline(3, color="#b03030", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_ylabel("against a head read whole, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.suptitle(f"Rounds with heads looked at by bytes, K = {DRAFTS}, {result['device']}, {result['date']}", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def compared(result: dict[str, Any]) -> dict[tuple[int, str], tuple[float, float, float]]:
    """Batch and distribution to milliseconds of a round read whole, by bytes, and the share of the second in the first."""
    ms = {(row["batch"], row["head_weights"], row["head"]): row["ms_per_round"] for row in result["rows"]}
    found = {}
    for batch, name, _ in ms:
        whole, by_bytes = (ms[batch, name, way] for way in WAYS)
        found[batch, name] = whole, by_bytes, by_bytes / whole
    return found


def main() -> int:
    """Measure, write what there is after every batch, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(ROOT / "results" / "cuda_heads.json"))
    parser.add_argument("--plot", type=Path, help="draw the result there")
    parser.add_argument("--draw-only", action="store_true", help="draw the result that --out names and measure nothing")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--families", default=",".join(FAMILIES), help="distributions, by name")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()
    options.families = options.families.split(",")
    if not options.draw_only:
        from polydraft_cuda.device import device_name, driver_version

        rate, rows, heads = gpu_rounds.copy_rate(), list[dict[str, Any]](), dict[str, Array]()
        said = {"device": device_name(0), "driver": str(driver_version()), "estimator": gpu_rounds.ESTIMATOR}
        said["method"] = f"{report.METHOD}; weights random, acceptance synthetic by {gpu_rounds.SCHEDULE}"
        for batch in map(int, options.batch.split(",")):
            for row in measured(batch, options, rate, heads):
                rows.append(row)
                report.write(options.out, report.document(rows, **said))
    if options.plot:
        draw(json.loads(Path(options.out).read_text(encoding="utf-8")), options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
