"""Device time of a decode round by region of its graph, beside what memory allows; writes bench/results/cuda_regions.json.

An engine of random weights is built, its row buffers are set to `batch` slots that all stand at the same position, and the
launches of one region of the step, of all layers, are captured and replayed by themselves: the target pass, its projections,
attention (with the turn and the store of new rows), norms and head, the draft passes and the choice of tokens. Launches that
only keep books are left out: they need slots that move on. Regions overlap in a step, so they add up to more than the pass. "a
round" is everything else as one graph; "sustained" is the same behind a second of it, when the board may have reached its
power limit and lowered its clock. `floor_bytes` is what a region cannot do without reading: weights once, keys and values of the
context; `copy_rate_share` is the time of those bytes at the measured rate of a device-to-device copy over the time of the region.
Prompts are timed as the launches of one prefill step, and the rate of their arithmetic is set beside that of one large product.

    python bench/gpu_regions.py --out bench/results/cuda_regions.json
    python bench/gpu_page.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.bench import report
from polydraft.bench.measure import Load
from polydraft.bench.suite import Suite
from polydraft.config import EngineConfig
from polydraft.engine import Engine
from polydraft.models import Attention
from polydraft.program.program import Bound, Lengths, Program, lengths

sys.path.append(str(Path(__file__).resolve().parent.parent))
from bench.gpu_rounds import BATCHED_TOKENS, BATCHES, ROOT, SCHEDULE, byte_heads, copy_rate, device_says

METHOD = (
    "launches of a region of all layers, captured and replayed by themselves; all slots at the same position, caches filled with "
    "small numbers; the median of the replays, by events; weights random; floor_bytes as bench/gpu_regions.py defines them"
)
SHOWN = ("target pass", "projections", "attention", "norms", "head")
"""Regions of the picture and the table, besides draft passes."""
WHOLE = ("choosing", "a round", "sustained")
"""Regions of the table behind them; no picture, and no floor of their own."""
KEEPS_BOOKS = frozenset({
    "reserve_blocks", "pack_rows", "pack_logit_rows", "commit_window", "snapshot_output", "pack_draft_rows", "begin_draft",
    "advance_draft",
})  # fmt: skip
"""Contracts that move the state of slots on: replayed, they would not find the same rows again."""
PROJECTIONS = ("qkv", "o", "gate and up", "down")


# -- what is run -----------------------------------------------------------------------------------
def stand(engine: Engine, batch: int, width: int, context: int) -> None:
    """Set the rows of a pass: `width` rows of each of `batch` slots, the last at position `context`; blocks in no order."""
    runner, load = engine.runner, engine.device.load
    buffers, size = runner.memory.buffers, runner.limits.block_size
    slots, positions = np.repeat(np.arange(batch), width), np.tile(np.arange(width), batch) + context + 1 - width

    def padded(name: str, values: Any, rest: int) -> None:
        buffer = buffers[name]
        whole = np.full(buffer.shape, rest, np.int32)
        whole[tuple(slice(n) for n in np.shape(values))] = values
        load(buffer, whole)

    needed = context // size + 2
    ids = np.random.default_rng(1).integers(0, engine.model.vocab_size, batch * width)
    padded("row_slot", slots, -1)
    padded("positions", positions, 0)
    padded("logit_slot", slots[: buffers["logit_slot"].shape[0]], -1)
    padded("logit_position", positions[: buffers["logit_position"].shape[0]], 0)
    padded("ids", ids, 0)
    padded("logit_row", np.arange(min(batch * width, buffers["logit_row"].shape[0])), -1)
    padded("block_table", np.random.default_rng(0).permutation(needed * batch).reshape(batch, needed), -1)
    if runner.limits.num_drafts:
        for name, values, rest in (
            ("draft_row_slot", slots, -1), ("draft_ids", ids, 0), ("draft_slot", np.arange(batch), -1),
            ("draft_position", np.full(batch, context + 1), 0), ("next_ids", np.ones(batch, np.int32), 0),
        ):  # fmt: skip
            padded(name, values, rest)


def regions(target: Sequence[Bound], draft: Sequence[Bound]) -> dict[str, list[Bound]]:
    """Entries of the programs by region; the projections of a block also one by one."""
    passed = [entry for entry in target if entry.stage == "target"]
    head = next(i for i, entry in enumerate(passed) if entry.contract == "gather_rows")
    body = [entry for entry in passed[:head] if entry.contract not in ("embed", "forward_meta")]
    products = [entry for entry in body if entry.contract == "linear"]
    found = {
        "target pass": passed,
        "projections": [entry for entry in body if entry.contract in ("linear", "swiglu")],
        "attention": [entry for entry in body if entry.contract in ("rope_kv_write", "paged_attention")],
        "norms": [entry for entry in body if "norm" in entry.contract],
        "head": passed[head:],
    }
    for place, name in enumerate(PROJECTIONS):
        found[name] = products[place::4]
    gate_up = {id(entry) for entry in found["gate and up"]}
    found["gate and up"] = [entry for entry in body if id(entry) in gate_up or entry.contract == "swiglu"]
    stages = dict.fromkeys(entry.stage for entry in draft if entry.stage.startswith("draft "))
    for stage in stages:
        found[stage.replace("draft", "draft pass")] = [entry for entry in draft if entry.stage == stage]
    every = (*target, *draft)
    kept = {id(entry) for entry in every if not KEEPS_BOOKS.isdisjoint(entry.contract.split("+"))}
    found["choosing"] = [entry for entry in every if entry.stage == "verify" and id(entry) not in kept]
    found["a round"] = [entry for entry in every if id(entry) not in kept]
    return found


def floors(model: Any, batch: int, context: int, size: int = 2) -> dict[str, int]:
    """Bytes that each region has to read, elements of `size` bytes; none for norms."""
    hidden, block = model.hidden_size, model.blocks[0]
    attention, wide, layers = block.mixer, block.feed_forward.intermediate_size, len(model.blocks)
    weights = {
        "qkv": hidden * (attention.q_size + 2 * attention.kv_size),
        "o": hidden * attention.q_size,
        "gate and up": 2 * hidden * wide,
        "down": hidden * wide,
    }
    cached, head = 2 * attention.kv_size * batch * context, model.vocab_size * hidden
    found = {name: layers * count for name, count in weights.items()}
    found |= {"projections": layers * sum(weights.values()), "attention": layers * cached, "head": head}
    found["target pass"] = found["projections"] + found["attention"] + head
    found["draft pass"] = sum(weights.values()) + 2 * hidden * hidden + cached + head
    return {name: size * count for name, count in found.items()}


def together(programs: Sequence[Program], entries: Sequence[Bound]) -> list[Bound]:
    """These launches of programs as graphs have them: joined where all that becomes one launch is among them."""
    wanted = {id(entry) for entry in entries}
    found: list[Bound] = []
    for program in programs:
        apart = iter(program.entries)
        for entry in program.captured or program.entries:
            parts = list(itertools.islice(apart, entry.spans if program.captured else 1))
            mine = [part for part in parts if id(part) in wanted]
            found += [entry] if len(mine) == len(parts) else mine
    return found


def captured(engine: Engine, capture: Any, entries: Sequence[Bound], size: Lengths) -> Callable[[], None]:
    """These launches of the greedy programs as a graph; what enqueues it."""
    device: Any = engine.device
    programs = engine.runner.programs["greedy"]
    joined = together((programs["target"], programs["draft"]), entries)

    def run() -> None:
        for entry in joined:
            entry.launch(device.stream, size[entry.unit])

    run()
    device.synchronize()
    graph = capture.capture(device.stream, run)
    return lambda: graph.replay(device.stream)


def sustained(device: Any, run: Callable[[], None], us: float, seconds: float) -> dict[str, Any]:
    """Microseconds of a replay at the end of `seconds` of them, and the clock and the power that the driver's tool tells then."""
    replays = int(1e6 * seconds / us) + 2
    marks = [device.timer() for _ in range(replays + 1)]
    marks[0].record(device.stream)
    for mark in marks[1:]:
        run()
        mark.record(device.stream)
    time.sleep(seconds / 2)
    told = clocks()
    marks[-1].synchronize()
    times = [1e3 * after.since(before) for before, after in itertools.pairwise(marks)]
    return {"us": float(statistics.median(times[-max(replays // 3, 1) :])), "replays": replays, **told}


def clocks() -> dict[str, float]:
    """Clock in MHz and power in watts of the device at work; empty where nvidia-smi does not say."""
    return dict(zip(("clock_mhz", "power_w"), device_says("clocks.sm", "power.draw"), strict=False))


def timed(device: Any, run: Callable[[], None], repeats: int) -> float:
    """Microseconds of what `run` enqueues, by events."""
    run()
    times = []
    for _ in range(repeats):
        begin, end = device.timer(), device.timer()
        begin.record(device.stream)
        run()
        end.record(device.stream)
        end.synchronize()
        times.append(1e3 * end.since(begin))
    return float(statistics.median(times))


def measure(options: argparse.Namespace, rate: float) -> list[dict[str, Any]]:
    """Rows of all regions of every batch, with no draft and with K of them, and of a prefill step."""
    import polydraft_cuda

    own = {"backend": "cuda", "dtype": "bf16", "prefix_cache": False, "graph": "off", "max_batched_tokens": BATCHED_TOKENS}
    config = EngineConfig.from_mapping({**own, "accept_schedule": SCHEDULE})
    drafts, context = len(SCHEDULE), options.context
    suite = Suite(config, ROOT / "shapes" / f"{options.shape}.json", prompt_tokens=options.prompt)
    engine = suite.engine(Load(max(options.batches), options.prompt, 100), drafts, {})
    runner, device = engine.runner, engine.device
    for cache in runner.memory.caches.values():
        device.fill_bytes(cache.buffer, 0x3C)  # type: ignore[attr-defined]
    capture = polydraft_cuda.polydraft_graph_capture(device)  # type: ignore[arg-type]
    programs, rows = runner.programs["greedy"], []
    parts = regions(programs["target"].entries, programs["draft"].entries)
    state = runner.context
    common = {"shape": options.shape, "weights": "random", "backend": "cuda", "dtype": "bf16", "repeats": options.repeats}
    for width in (1, 1 + drafts):
        for batch in options.batches:
            size = lengths(rows=batch * width, logit_rows=batch * width, seqs=batch)
            state.real_slots, state.has_prefill = batch, False
            stand(engine, batch, width, context)
            for name, entries in parts.items():
                used = [entry for entry in entries if width > 1 or "draft" not in entry.stage]
                if not used:
                    continue
                run = captured(engine, capture, used, size)
                us = timed(device, run, options.repeats)
                floor = floors(engine.model, batch, context).get(name.rstrip(" 0123456789"))
                if floor and name.startswith("draft pass") and byte_heads(engine, batch)[1]:
                    floor -= engine.model.vocab_size * engine.model.hidden_size  # a byte of two
                place = {**common, "draft_tokens": width - 1, "batch": batch, "context": context}
                rows.append(place | figures(name, us, floor, rate))
                print(f"batch {batch} K={width - 1} {name}: {us:.1f} us", file=sys.stderr, flush=True)
                if name == "a round" and options.sustain:
                    long = sustained(device, run, us, options.sustain)
                    rows.append(place | figures("sustained", long["us"], None, rate) | long)
                    print(f"batch {batch} K={width - 1} sustained: {long}", file=sys.stderr, flush=True)
    rows += [{**common, "draft_tokens": 0, **row} for row in prefill(engine, parts, options.prompt, options.repeats)]
    engine.close()
    return rows


def figures(name: str, us: float, floor: int | None, rate: float) -> dict[str, Any]:
    """A region's time beside its floor."""
    share = None if floor is None else floor / rate / (1e-6 * us)
    return {"region": name, "us": us, "floor_bytes": floor, "copy_bytes_per_s": rate, "copy_rate_share": share}


def prefill(engine: Engine, parts: dict[str, list[Bound]], prompt: int, repeats: int) -> list[dict[str, Any]]:
    """One row: the blocks of a step of whole prompts, `BATCHED_TOKENS` rows, and the rate of their arithmetic beside that of the
    largest product in them."""
    runner, device, model = engine.runner, engine.device, engine.model
    batch = BATCHED_TOKENS // prompt
    size, state = lengths(rows=batch * prompt, logit_rows=batch, seqs=batch), runner.context
    state.real_slots, state.has_prefill = batch, True
    stand(engine, batch, prompt, prompt - 1)

    def run(entries: Sequence[Bound]) -> Callable[[], None]:
        def enqueue() -> None:
            for entry in entries:
                entry.launch(device.stream, size[entry.unit])

        return enqueue

    body = [entry for entry in parts["target pass"] if entry.stage == "target"][: -len(parts["head"])]
    us, product = timed(device, run(body), repeats), timed(device, run(parts["gate and up"][::2]), repeats)
    mixer, layers = model.blocks[0].mixer, len(model.blocks)
    assert isinstance(mixer, Attention)
    weights = floors(model, 1, 0, 1)
    attended = 2 * batch * prompt**2 * mixer.q_size * layers
    operations = 2 * batch * prompt * weights["projections"] + attended
    matrix = 2 * batch * prompt * weights["gate and up"] / (1e-6 * product)
    achieved = operations / (1e-6 * us)
    return [{
        "batch": batch, "context": prompt, "region": "prefill", "us": us, "operations_per_s": achieved,
        "matrix_operations_per_s": matrix, "matrix_rate_share": achieved / matrix,
    }]  # fmt: skip


# -- what is shown ---------------------------------------------------------------------------------
def cells(result: dict[str, Any]) -> dict[tuple[int, int], dict[str, dict[str, Any]]]:
    """(drafts, batch) to region to row."""
    found: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["region"] != "prefill":
            found.setdefault((row["draft_tokens"], row["batch"]), {})[row["region"]] = row
    return found


def markdown(result: dict[str, Any]) -> str:
    """One line a batch and number of drafts: milliseconds of each region, with the share of the copy rate."""
    measured = {row["region"] for row in result["rows"]}
    whole = [name for name in WHOLE if name in measured]
    names = (*SHOWN, "a draft pass", *whole)
    lines = ["| drafts | batch | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for (drafts, batch), found in cells(result).items():
        passes = [row for name, row in found.items() if name.startswith("draft pass")]
        shown = [_cell(found[name]) for name in SHOWN]
        shown.append(_cell(min(passes, key=lambda row: float(row["us"]))) if passes else "-")
        shown += [_cell(found[name]) for name in whole]
        lines.append(f"| {drafts} | {batch} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    share = "" if row["copy_rate_share"] is None else f" ({row['copy_rate_share']:.0%})"
    share += f" at {row['clock_mhz']:.0f} MHz, {row['power_w']:.0f} W" if "clock_mhz" in row else ""
    return f"{1e-3 * row['us']:.2f}{share}"


def draw(result: dict[str, Any], path: str) -> None:
    """Bars of the regions of a target pass, each with its floor."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    found = cells(result)
    figure, every = plt.subplots(1, len(found), figsize=(1.9 * len(found), 3.6), sharey=True, layout="constrained")
    for axes, ((drafts, batch), rows) in zip(np.atleast_1d(every), found.items(), strict=True):
        names = [name for name in SHOWN if name in rows]
        axes.bar(names, [1e-3 * rows[name]["us"] for name in names], color="#3572a5", label="measured")
        floor = [1e3 * (rows[name]["floor_bytes"] or 0) / rows[name]["copy_bytes_per_s"] for name in names]
        axes.bar(names, floor, color="#f2b134", width=0.5, label="its bytes at the copy rate")
        axes.set_title(f"K = {drafts}, batch {batch}", fontsize=9)
        axes.tick_params(axis="x", rotation=90, labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    first = np.atleast_1d(every)[0]
    first.set_ylabel("milliseconds")
    first.legend(fontsize=7, frameon=False)
    figure.suptitle(f"Device time by region, {result['rows'][0]['shape']}, {result['device']}, {result['date']}", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    """Measure or read, then write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path, help="show this result instead of measuring")
    parser.add_argument("--plot", help="draw a picture into this file")
    parser.add_argument("--shape", default="mimo-7b")
    parser.add_argument("--batches", type=lambda text: tuple(int(part) for part in text.split(",")), default=BATCHES)
    parser.add_argument("--context", type=int, default=639)
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of each prompt of the prefill step")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sustain", type=float, default=1.5, help="seconds of rounds behind which one is timed; 0: none")
    options = parser.parse_args()
    if options.read:
        result = json.loads(options.read.read_text(encoding="utf-8"))
    else:
        from polydraft_cuda.device import device_name, driver_version

        rows = measure(options, copy_rate())
        result = report.document(rows, device=device_name(0), driver=str(driver_version()), method=METHOD)
    print(markdown(result))
    if options.out:
        report.write(options.out, result)
    if options.plot:
        draw(result, options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
