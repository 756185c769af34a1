"""Tokens per second of greedy decoding on the CPU: polydraft at several K beside transformers' `generate`, in one run.

Both sides decode the same prompts of the demo model for the same number of tokens (end-of-text ignored), alternating, so that
a change of the machine's speed meets both. Prints a table and, with --out, writes a `polydraft.bench/1` JSON file.

    python bench/cpu_vs_transformers.py --repeats 5 --out bench/results/cpu_vs_transformers.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from polydraft import LLM, SamplingParams, __version__
from polydraft.demo import demo_model_path

PROMPTS = (
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\ndef main():\n",
    "for i in range(10):\n    print(",
    "def read_file(path):\n    with open(path) as f:\n",
    "class Node:\n    def __init__(self, value):\n",
    "def test_add():\n    assert ",
    "if __name__ == '__main__':\n",
)


def load_transformers() -> Any:
    """The demo model's target as the library's Qwen2 class, float32, without its MTP layer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from polydraft.models.checkpoint import Checkpoint

    path = demo_model_path()
    config = json.loads((path / "config.json").read_text())
    model = Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in config.items() if k not in ("architectures", "model_type")}))
    with Checkpoint(path) as checkpoint:
        names = [n for n in checkpoint.names() if "mtp_layers" not in n]
        model.load_state_dict({n: torch.from_numpy(checkpoint.tensor(n)) for n in names})
    return model.eval()


def time_transformers(model: Any, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds of one `generate` over left-padded prompts, and the new tokens."""
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[1] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=1
        )
    return time.perf_counter() - start, out[:, width:].tolist()


def time_polydraft(llm: LLM, prompts: list[list[int]], new_tokens: int) -> tuple[float, Any]:
    """Seconds of one `generate`, and its outputs."""
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return time.perf_counter() - start, outputs


def spread(values: list[float]) -> list[float]:
    """Smallest and largest."""
    return [min(values), max(values)]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[0, 1, 3, 5])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    hf = None if args.no_transformers else load_transformers()
    engines = {k: LLM(draft_tokens=k, max_num_seqs=max(args.batch)) for k in args.draft_tokens}
    tokenizer = next(iter(engines.values())).engine.tokenizer
    rows = []
    for batch in args.batch:
        prompts = [tokenizer.encode(p) for p in PROMPTS[:batch]]
        rows += measure(args, hf, engines, prompts)
    print_table(rows)
    if args.out:
        args.out.write_text(json.dumps(report(rows), indent=1) + "\n")


def measure(args: argparse.Namespace, hf: Any, engines: dict[int, LLM], prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Rows of one batch size: every contender once per repeat, in turn, after one warm-up each."""
    seconds: dict[str, list[float]] = {}
    per_round: dict[str, float] = {}
    for repeat in range(args.repeats + 1):
        if hf is not None:
            took, _ = time_transformers(hf, prompts, args.new_tokens)
            if repeat:
                seconds.setdefault("transformers", []).append(took)
        for k, llm in engines.items():
            took, outputs = time_polydraft(llm, prompts, args.new_tokens)
            if repeat:
                seconds.setdefault(f"polydraft K={k}", []).append(took)
            rounds = sum(len(o.rounds) for o in outputs)
            per_round[f"polydraft K={k}"] = (sum(len(o.token_ids) - 1 for o in outputs)) / rounds
    total = len(prompts) * args.new_tokens
    base = statistics.median(seconds["transformers"]) if "transformers" in seconds else None
    return [
        {
            "shape": "demo",
            "backend": name.split()[0] if name == "transformers" else "reference",
            "name": name,
            "draft_tokens": int(name.split("=")[1]) if "=" in name else 0,
            "batch": len(prompts),
            "tokens_per_s": total / statistics.median(values),
            "spread": [total / v for v in reversed(spread(values))],
            "tokens_per_round": per_round.get(name, 1.0),
            "speedup_vs_transformers": None if base is None else base / statistics.median(values),
            "new_tokens": args.new_tokens,
            "prompt_tokens": max(map(len, prompts)),
            "repeats": len(values),
            "dtype": "f32",
        }
        for name, values in seconds.items()
    ]


def print_table(rows: list[dict[str, Any]]) -> None:
    """Plain text, one line a row."""
    print(f"{'contender':<18}{'batch':>6}{'tokens/s':>10}{'min':>8}{'max':>8}{'tok/round':>11}{'vs HF':>7}")
    for r in rows:
        versus = "" if r["speedup_vs_transformers"] is None else f"{r['speedup_vs_transformers']:.2f}x"
        low, high = r["spread"]
        print(
            f"{r['name']:<18}{r['batch']:>6}{r['tokens_per_s']:>10.0f}{low:>8.0f}{high:>8.0f}{r['tokens_per_round']:>11.2f}{versus:>7}"
        )


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The committed form."""
    import torch
    import transformers

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "schema": "polydraft.bench/1",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit,
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "driver": "",
        "versions": {
            "polydraft": __version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "method": "median of alternating runs in one process after one warm-up each; spread is the slowest and fastest run",
        "rows": rows,
    }


if __name__ == "__main__":
    main()
