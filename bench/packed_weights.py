"""A model in 8 and 4 bits on the CPU: a decode step without drafts, and a prompt, beside llama.cpp's Q8_0 and Q4_0.

All have random weights of one shape of bench/shapes and as many threads as there are processors, and take turns in one run:
polydraft with `--weights int8` and `int4` in this process, llama.cpp (bench/llama_peer.py) in processes of an interpreter that
has `llama-cpp-python` and `gguf`, which sleep meanwhile. The bytes of weights that a step reads are held against a copy by the
same threads, measured in each turn. Prints a table; --out writes a file, --page puts the table into a page.

    python bench/packed_weights.py --llama PYTHON --out bench/results/packed_weights.json --page docs/backends/cpu.md
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polydraft_cpu
from polydraft import LLM, Engine, SamplingParams
from polydraft.bench import report
from polydraft.bench.shapes import RandomCheckpoint
from polydraft.config import EngineConfig
from polydraft_cpu.options import usable_processors

sys.path.append(str(Path(__file__).resolve().parents[1]))
from bench.cpu_vs_transformers import PAUSE, ROOT, Peer, bytes_read, copy_rate, markdown

PAGE = "packed"
"""The marker of the table in a page."""
PAIRS = {"int8": "Q8_0", "int8-a8": "Q8_0", "int4": "Q4_0", "int4-a8": "Q4_0"}
"""What --weights makes, beside what llama.cpp calls about as many bits. It rounds activations as the names with a8 do."""
METHOD = (
    "contenders take turns, after one turn each to warm up, with a pause before each; a turn is a text of a prompt of 32 "
    "tokens and some decode steps (their median counts; polydraft's step with host and sampling, llama.cpp's with reading "
    "logits and argmax) and a prompt of 512 tokens in one chunk up to its first token; of each the median over the turns, "
    "as spread the smallest and the largest; ratio is the median over turns of llama.cpp's milliseconds by polydraft's of "
    "the same turn; copy_rate_share is the bytes of weights of a step a second over the bytes that a copy of 256 MB by the "
    "same threads reads and writes a second, the best of three in each turn"
)
Measured = dict[str, float]
"""Milliseconds of a step and of a prompt."""


def own(weights: str, shape: Path, prompt: int, dtype: str) -> tuple[Engine, Callable[[int], Measured]]:
    """One of polydraft's engines, and a turn of it."""
    config = EngineConfig(
        backend="cpu", weights=weights, dtype=dtype, draft_tokens=0, max_num_seqs=1, max_model_len=1024, graph_sizes=(1,),
        max_batched_tokens=prompt, prefix_cache=False,
    )  # fmt: skip
    llm = LLM.__new__(LLM)
    llm.engine = Engine(config, checkpoint=RandomCheckpoint(shape))
    engine = llm.engine

    def turn(tokens: int) -> Measured:
        times = []
        engine.add(list(range(10, 42)), SamplingParams(max_new_tokens=tokens + 1, ignore_eos=True))
        while engine.has_work:
            start = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start)
            engine.poll()
        start = time.perf_counter()
        llm.generate([list(range(10, 10 + prompt))], SamplingParams(max_new_tokens=1, ignore_eos=True))
        return {"step": statistics.median(times[2:-1]) * 1e3, "prompt": (time.perf_counter() - start) * 1e3}

    return engine, turn


def theirs(peer: Peer, prompt: int) -> Callable[[int], Measured]:
    """A turn of llama.cpp."""
    return lambda tokens: {"step": peer.ask(tokens=tokens)["ms"], "prompt": peer.ask(prompt=prompt)["ms"]}


def measure(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Rows of all contenders, and the versions of the peers."""
    turns: dict[str, Callable[[int], Measured]] = {}
    engines: dict[str, Engine] = {}
    peers: dict[str, Peer] = {}
    for weights, theirs_is in PAIRS.items():
        if args.llama and theirs_is not in peers:
            command = [args.llama, str(ROOT / "llama_peer.py"), str(args.shape), theirs_is, str(usable_processors())]
            peers[theirs_is] = Peer(command)
            turns[f"llama.cpp {theirs_is}"] = theirs(peers[theirs_is], args.prompt)
        name = f"cpu {weights}"
        engines[name], turns[name] = own(weights, args.shape, args.prompt, args.dtype)
    device, found, copies = next(iter(engines.values())).device, {name: list[Measured]() for name in turns}, list[float]()
    for repeat in range(args.repeats + 1):
        rate = copy_rate(device)
        if repeat:
            copies.append(rate)
        for name, turn in turns.items():
            time.sleep(PAUSE)
            measured = turn(args.new_tokens)
            print(f"turn {repeat}, {name}: {measured['step']:.1f} and {measured['prompt']:.0f} ms", file=sys.stderr, flush=True)
            if repeat:
                found[name].append(measured)
    rows = [row(name, values, found, engines.get(name), copies, args) for name, values in found.items()]
    told = {kind: peer.told for kind, peer in peers.items()}
    for kind, what in told.items():
        next(one for one in rows if one["name"] == f"llama.cpp {kind}")["file_bytes"] = what["bytes"]
    for peer in peers.values():
        peer.close()
    first: dict[str, Any] = next(iter(told.values()), {})
    return rows, {"llama-cpp-python": first["version"], "llama.cpp": first["features"]} if first else {}


def row(
    name: str, values: list[Measured], found: dict[str, list[Measured]], engine: Engine | None, copies: list[float],
    args: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """One contender's figures."""

    def of(what: str) -> list[float]:
        return [value[what] for value in values]

    made: dict[str, Any] = {
        "shape": args.shape.stem, "backend": name.split(maxsplit=1)[0], "name": name, "draft_tokens": 0, "batch": 1,
        "dtype": args.dtype if engine else "f32", "ms_per_round": statistics.median(of("step")),
        "spread": [min(of("step")), max(of("step"))], "prompt_ms": statistics.median(of("prompt")),
        "prompt_spread": [min(of("prompt")), max(of("prompt"))], "prompt_tokens": args.prompt, "new_tokens": args.new_tokens,
        "repeats": len(values),
    }  # fmt: skip
    if engine is None:
        return made
    nbytes, copied = bytes_read(engine), statistics.median(copies)
    per_second = nbytes / made["ms_per_round"] * 1e3
    made |= {
        "bytes_per_round": nbytes,
        "bytes_per_s": per_second,
        "copy_bytes_per_s": copied,
        "copy_rate_share": per_second / copied,
    }
    peer = found.get(f"llama.cpp {PAIRS[name.split()[1]]}", [])
    for what in ("step", "prompt") if peer else ():
        made[f"{what}_ratio"] = statistics.median(one[what] / value[what] for one, value in zip(peer, values, strict=True))
    return made


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table of a page."""
    head = ["0.5 B Qwen2, batch 1, K = 0", "ms a step", "GB/s of weights", "share of a copy", "against llama.cpp",
            f"ms a prompt of {rows[0]['prompt_tokens']}", "against llama.cpp"]  # fmt: skip
    lines = [
        [f"`{r['name']}`", "{:.2f} ({:.2f} to {:.2f})".format(r["ms_per_round"], *r["spread"]),
         f"{r['bytes_per_s'] / 1e9:.1f}" if "bytes_per_s" in r else "",
         f"{r['copy_rate_share']:.0%}" if "copy_rate_share" in r else "",
         f"{r['step_ratio']:.2f} x" if "step_ratio" in r else "",
         "{:.0f} ({:.0f} to {:.0f})".format(r["prompt_ms"], *r["prompt_spread"]),
         f"{r['prompt_ratio']:.2f} x" if "prompt_ratio" in r else ""]
        for r in rows
    ]  # fmt: skip
    return markdown(head, lines)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", metavar="PYTHON", help="an interpreter that has llama-cpp-python and gguf")
    parser.add_argument("--shape", type=Path, default=ROOT / "shapes" / "qwen2-0.5b.json")
    parser.add_argument("--dtype", default="f32", help="of polydraft's activations")
    parser.add_argument("--prompt", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path, help="write the table into this page, behind its marker")
    parser.add_argument("--read", type=Path, help="measure nothing: take the rows of this result")
    args = parser.parse_args()
    if args.read:
        rows, versions = json.loads(args.read.read_text(encoding="utf-8"))["rows"], dict[str, str]()
    else:
        rows, versions = measure(args)
    print(table(rows))
    if args.out:
        device = f"{report.processor()}; {polydraft_cpu.polydraft_backend_info('').summary}"
        result = report.document(rows, device=device, method=METHOD)
        result["versions"] |= versions
        report.write(args.out, result)
    if args.page:
        report.renew(args.page, PAGE, table(rows))


if __name__ == "__main__":
    main()
