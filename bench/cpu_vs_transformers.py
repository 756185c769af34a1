"""Tokens per second of greedy decoding on the CPU: polydraft at several K beside every peer that is there, in one run.

All decode the same prompts of the demo model for the same number of tokens (end of text ignored), taking turns, so that a
change of the machine's speed meets everybody. The peers are transformers' `generate` and, with --vllm, vLLM's CPU build in an
interpreter that has it, under each of `VLLM`. A second part reads a model that fits into no cache (random weights of a real
shape) and holds the bytes it reads each second against a copy by the same threads, measured between the runs. Prints tables;
--out writes a file.

    python bench/cpu_vs_transformers.py --vllm path/to/python --out bench/results/cpu.json --page docs/backends/cpu.md
    python bench/cpu_vs_transformers.py --read bench/results/cpu.json --page docs/backends/cpu.md

A model with experts, on the same random weights as transformers' own class, is a run of its own:

    python bench/cpu_vs_transformers.py --experts --new-tokens 64 --out bench/results/cpu_experts.json --page docs/performance.md
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import polydraft_cpu
from polydraft import LLM, Engine, SamplingParams
from polydraft.bench import report
from polydraft.bench.shapes import RandomCheckpoint
from polydraft.config import EngineConfig
from polydraft.contracts.packing import MADE
from polydraft.demo import demo_model_path
from polydraft_cpu.options import usable_processors

ROOT = Path(__file__).resolve().parent
METHOD = (
    "median of runs that take turns in one process (vLLM in one of its own) after one warm-up each, with a pause before each, so "
    "that nobody's threads still spin; tokens/s with prefill; spread is the slowest and the fastest run; the cpu backend "
    "captures every number of running sequences. The large model: milliseconds of a decode step; copy_rate_share is the weights "
    "read a second over the bytes that a copy by the same threads reads and writes a second."
)
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
Prompts = list[list[int]]
Timed = Callable[[Prompts, int], tuple[float, Any]]
"""Decodes prompts for a number of tokens: seconds, and the outputs where they have rounds."""


# -- contenders ------------------------------------------------------------------------------------
def transformers_peer() -> Timed:
    """The demo model's target as the library's Qwen2 class, float32, without its MTP layer; prompts are padded on the left."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from polydraft.models.checkpoint import Checkpoint

    path = demo_model_path()
    config = json.loads((path / "config.json").read_text())
    model = Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in config.items() if k not in ("architectures", "model_type")}))
    with Checkpoint(path) as checkpoint:
        names = [n for n in checkpoint.names() if "mtp_layers" not in n]
        model.load_state_dict({n: torch.from_numpy(checkpoint.tensor(n)) for n in names})
    model.eval()

    def run(prompts: Prompts, new_tokens: int) -> tuple[float, Any]:
        width = max(map(len, prompts))
        ids = torch.tensor([[1] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=1
            )
        return time.perf_counter() - start, None

    return run


def own(llm: LLM) -> Timed:
    """One of polydraft's engines."""

    def run(prompts: Prompts, new_tokens: int) -> tuple[float, Any]:
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        return time.perf_counter() - start, outputs

    return run


class Peer:
    """Another engine in a process of its own, which loads once, says what it is (`told`), and then answers line by line."""

    def __init__(self, command: list[str], **env: str) -> None:
        self._command, pipe = command, subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **env},
            start_new_session=True,
        )  # fmt: skip
        atexit.register(self.close)
        self.told = self._answer()
        self.version = str(self.told["version"])
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        """Its worker always looks for work, which takes a processor from whoever has the turn: it sleeps in between."""
        os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._command[1]} ended with {self._process.wait()} before it answered; run it by itself")
        return dict(json.loads(line))

    def ask(self, **what: Any) -> dict[str, Any]:
        """One question and its answer."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """End the process and those that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


VLLM = {
    "vllm": ([], {"VLLM_CPU_OMP_THREADS_BIND": f"0-{usable_processors() - 1}"}),  # or it keeps one processor for itself
    "vllm eager": (
        ["eager"],
        {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(usable_processors()),
        },
    ),
}
"""How vLLM runs: a process of its own for the engine, compiled, with threads bound to processors; or all in one process, nothing
compiled, and threads that are not bound."""


def vllm_peer(python: str, settings: str, drafts: int) -> Peer:
    """vLLM with an interpreter that has it."""
    arguments, env = VLLM[settings]
    command = [python, str(ROOT / "vllm_peer.py"), str(demo_model_path()), str(drafts), *arguments]
    return Peer(command, VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", **env)


def asked(peer: Peer) -> Timed:
    """A peer as a contender."""
    return lambda prompts, new_tokens: (float(peer.ask(prompts=prompts, new_tokens=new_tokens)["seconds"]), None)


# -- the demo model --------------------------------------------------------------------------------
PAUSE = 0.05
"""Seconds between two runs: idle threads of the one before have stopped looking for work by then."""


def measure(contenders: dict[str, Timed], prompts: Prompts, *, new_tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Rows of one batch size: every contender once a repeat, in turn, after one warm-up each."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    per_round: dict[str, float] = {}
    for repeat in range(repeats + 1):
        for name, run in contenders.items():
            time.sleep(PAUSE)
            took, outputs = run(prompts, new_tokens)
            if repeat:
                seconds[name].append(took)
            if outputs is not None:
                per_round[name] = sum(len(o.token_ids) - 1 for o in outputs) / sum(len(o.rounds) for o in outputs)
    total = len(prompts) * new_tokens
    base = statistics.median(seconds["transformers"]) if "transformers" in seconds else None
    return [
        {
            "shape": "demo",
            "backend": name.split()[0],
            "name": name,
            "draft_tokens": int(name.split("=")[1]) if "=" in name else 0,
            "batch": len(prompts),
            "tokens_per_s": total / statistics.median(values),
            "spread": [total / max(values), total / min(values)],
            "tokens_per_round": per_round.get(name),
            "speedup_vs_transformers": None if base is None else base / statistics.median(values),
            "new_tokens": new_tokens,
            "prompt_tokens": max(map(len, prompts)),
            "repeats": len(values),
            "dtype": "bf16" if name.startswith("vllm") or " bf16 " in name else "f32",
        }
        for name, values in seconds.items()
    ]


def print_table(rows: list[dict[str, Any]]) -> None:
    """Plain text, one line a row."""
    print(f"{'contender':<18}{'batch':>6}{'tokens/s':>10}{'min':>8}{'max':>8}{'tok/round':>11}{'vs HF':>7}")
    for r in rows:
        versus = "" if r["speedup_vs_transformers"] is None else f"{r['speedup_vs_transformers']:.1f}x"
        rounds = "" if r["tokens_per_round"] is None else f"{r['tokens_per_round']:.2f}"
        low, high = r["spread"]
        print(f"{r['name']:<18}{r['batch']:>6}{r['tokens_per_s']:>10.0f}{low:>8.0f}{high:>8.0f}{rounds:>11}{versus:>7}")


# -- a model that fits into no cache -----------------------------------------------------------------
def copy_rate(device: Any, *, nbytes: int = 1 << 28, repeats: int = 3) -> float:
    """Bytes a second that a copy by the device's threads reads and writes together; the best of some."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        device.library.pd_copy(device.context, target.ctypes.data, source.ctypes.data, nbytes)
        best = min(best, time.perf_counter() - start)
    return 2 * nbytes / best


def bytes_read(engine: Engine) -> int:
    """Bytes of weights that one pass of the target reads: every matrix; of the embedding only a few rows."""
    return sum(weight.nbytes for name, weight in engine.runner.memory.weights.items() if name != "embed")


def beside_copy(row: dict[str, Any], engine: Engine) -> None:
    """Say of a row of one token a round how many bytes of weights it reads a second, beside a copy by the same threads."""
    nbytes, copied = bytes_read(engine), copy_rate(engine.device)
    row |= {
        "bytes_per_round": nbytes,
        "bytes_per_s": nbytes * row["tokens_per_s"],
        "copy_bytes_per_s": copied,
        "copy_rate_share": nbytes * row["tokens_per_s"] / copied,
    }


def large(shape: Path, weights: str, *, new_tokens: int, repeats: int) -> dict[str, Any]:
    """Batch 1 without drafts on random weights: milliseconds a token, and the share of the copy's rate."""
    kept: dict[str, Any] = {"weights": weights} if weights in MADE else {"device": f"cpu?weights={weights}"}
    config = EngineConfig(backend="cpu", draft_tokens=0, max_num_seqs=1, max_model_len=512, graph_sizes=(1,), **kept)
    llm = LLM.__new__(LLM)
    llm.engine = Engine(config, checkpoint=RandomCheckpoint(shape))
    engine, prompt = llm.engine, [list(range(10, 42))]
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    llm.generate(prompt, params)
    ms, copies = [], []
    for _ in range(repeats):
        copies.append(copy_rate(engine.device))
        before, steps = engine.totals.decode_s, engine.totals.steps
        llm.generate(prompt, params)
        ms.append((engine.totals.decode_s - before) / (engine.totals.steps - steps - 1) * 1e3)
    nbytes, took, copied = bytes_read(engine), statistics.median(ms), statistics.median(copies)
    llm.close()
    return {
        "shape": shape.stem,
        "backend": "cpu",
        "name": f"cpu, weights {weights}",
        "draft_tokens": 0,
        "batch": 1,
        "ms_per_round": took,
        "tokens_per_s": 1e3 / took,
        "spread": [min(ms), max(ms)],
        "tokens_per_round": 1.0,
        "bytes_per_round": nbytes,
        "bytes_per_s": nbytes / took * 1e3,
        "copy_bytes_per_s": copied,
        "copy_rate_share": nbytes / took * 1e3 / copied,
        "new_tokens": new_tokens,
        "prompt_tokens": len(prompt[0]),
        "repeats": repeats,
        "dtype": "f32",
    }


def print_large(row: dict[str, Any]) -> None:
    """One line."""
    print(
        f"{row['shape']}, {row['name']}: {row['ms_per_round']:.1f} ms a token, {row['bytes_per_s'] / 1e9:.1f} GB/s of weights, "
        f"{row['copy_rate_share']:.0%} of a copy's {row['copy_bytes_per_s'] / 1e9:.1f} GB/s (read and written)"
    )


# -- a model with experts ----------------------------------------------------------------------------
EXPERTS_METHOD = (
    "A random checkpoint (tools/make_checkpoint.py, seed 0) that both read. Transformers runs its Glm4MoeForCausalLM, without "
    "drafts, with sdpa attention, the experts_implementation of the row's name and as many torch threads as the cpu backend has. "
    "Contenders take turns after one warm-up each, with a pause before each: tokens/s with prefill is the median of the turns, "
    "spread the slowest and the fastest one. A speedup is the median over turns of transformers' seconds by the contender's of "
    "the same turn: of the implementation with the best median in the same dtype (speedup_vs_transformers, whose least and "
    "greatest are speedup_spread) and in both (speedup_vs_best). same_tokens is the share of tokens before the first one that "
    "differs from transformers' in float32. Other work ran on the machine, so the turns are what to trust."
)
EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "eager")
"""What transformers computes experts with. Its batched_mm was slower than the better of these in every trial."""
EXPERTS_PROMPT = 16


def experts_peer(path: Path, dtype: str) -> Callable[[str], Timed]:
    """Transformers' class on a checkpoint, by the name of what computes its experts."""
    import torch
    from transformers import Glm4MoeForCausalLM

    torch.set_num_threads(usable_processors())
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model = Glm4MoeForCausalLM.from_pretrained(path, dtype=kind, attn_implementation="sdpa").eval()

    def by(implementation: str) -> Timed:
        def run(prompts: Prompts, new_tokens: int) -> tuple[float, Any]:
            model.set_experts_implementation(implementation)
            ids = torch.tensor(prompts)
            start = time.perf_counter()
            with torch.inference_mode():
                texts = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
                    do_sample=False, pad_token_id=0,
                )  # fmt: skip
            return time.perf_counter() - start, texts[:, ids.shape[1] :].tolist()

        return run

    return by


def experts(shape: Path, batches: list[int], *, new_tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Rows of every contender on the random checkpoint of `shape`, at every batch size."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made"
        maker = [sys.executable, str(ROOT.parent / "tools" / "make_checkpoint.py"), "glm4-moe", str(path)]
        subprocess.run([*maker, "--config", str(shape)], check=True)
        peers = {dtype: experts_peer(path, dtype) for dtype in ("f32", "bf16")}
        contenders = {
            (f"transformers {dtype} {name}", dtype): peer(name)
            for dtype, peer in peers.items()
            for name in EXPERTS_IMPLEMENTATIONS
        }
        sizes = tuple(range(1, max(batches) + 1))
        llms = {
            (f"cpu {dtype} K={k}", dtype): LLM(
                model=str(path),
                backend="cpu",
                draft_tokens=k,
                max_num_seqs=max(batches),
                max_model_len=512,
                dtype=dtype,
                graph_sizes=sizes,
            )
            for dtype in peers
            for k in (0, 3)
        }
        contenders |= {key: own(llm) for key, llm in llms.items()}
        rng, rows = np.random.default_rng(0), []
        for batch in batches:
            vocab = json.loads(shape.read_text())["vocab_size"]
            prompts = rng.integers(1, vocab, (batch, EXPERTS_PROMPT)).tolist()
            rows += experts_rows(contenders, prompts, shape=shape.stem, new_tokens=new_tokens, repeats=repeats)
        for llm in llms.values():
            llm.close()
    return rows


def experts_rows(
    contenders: dict[tuple[str, str], Timed], prompts: Prompts, *, shape: str, new_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """Rows of one batch size: contenders, by name and dtype, take turns."""
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in contenders}
    texts: dict[tuple[str, str], list[list[int]]] = {}
    per_round: dict[tuple[str, str], float] = {}
    for repeat in range(repeats + 1):
        for key, run in contenders.items():
            time.sleep(PAUSE)
            took, outputs = run(prompts, new_tokens)
            if repeat:
                seconds[key].append(took)
            if isinstance(outputs[0], list):
                texts[key] = outputs
            else:
                texts[key] = [list(output.token_ids) for output in outputs]
                per_round[key] = sum(len(o.token_ids) - 1 for o in outputs) / sum(len(o.rounds) for o in outputs)
    peers = sorted((statistics.median(values), key) for key, values in seconds.items() if key[0].startswith("transformers"))
    best = {dtype: next(key for _, key in peers if key[1] == dtype) for _, (_, dtype) in peers}
    total, truth = len(prompts) * new_tokens, texts[best["f32"]]
    rows = []
    for key, values in seconds.items():
        name, dtype = key
        ratios = [theirs / ours for theirs, ours in zip(seconds[best[dtype]], values, strict=True)]
        overall = [theirs / ours for theirs, ours in zip(seconds[peers[0][1]], values, strict=True)]
        rows.append(
            {
                "shape": shape,
                "backend": name.split()[0],
                "name": name,
                "draft_tokens": int(name.split("=")[1]) if "=" in name else 0,
                "batch": len(prompts),
                "dtype": dtype,
                "tokens_per_s": total / statistics.median(values),
                "spread": [total / max(values), total / min(values)],
                "tokens_per_round": per_round.get(key),
                "speedup_vs_transformers": statistics.median(ratios),
                "speedup_spread": [min(ratios), max(ratios)],
                "speedup_vs_best": statistics.median(overall),
                "best_of_transformers": peers[0][1][0],
                "same_tokens": sum(map(same_tokens, texts[key], truth)) / total,
                "new_tokens": new_tokens,
                "prompt_tokens": len(prompts[0]),
                "repeats": repeats,
            }
        )
    return rows


def same_tokens(ours: list[int], theirs: list[int]) -> int:
    """Tokens before the first one that differs."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


def experts_table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    head = [
        "contender",
        "batch",
        "tokens/s",
        "spread",
        "tokens a round",
        "against the same dtype",
        "against the fastest",
        "same tokens",
    ]
    lines = [
        [f"`{r['name']}`", str(r["batch"]), f"{r['tokens_per_s']:,.0f}", "{:,.0f}-{:,.0f}".format(*r["spread"]),
         f"{r['tokens_per_round'] or 1:.2f}", f"{r['speedup_vs_transformers']:.2f} x", f"{r['speedup_vs_best']:.2f} x",
         f"{r['same_tokens']:.0%}"]
        for r in rows
    ]  # fmt: skip
    return markdown(head, lines)


# -- products by themselves --------------------------------------------------------------------------
PRODUCTS = ((1, "a token"), (4, "a window of K = 3"), (32, "eight windows"), (256, "a prefill"))
"""Rows of a product, and what has as many."""
SHAPE = (9728, 896)
"""Outputs and inputs: gate and up of the large model."""


def products(repeats: int) -> list[dict[str, Any]]:
    """One thread's products at every instruction level: floating-point operations a second."""
    from polydraft.backend import DeviceOptions
    from polydraft.contracts.base import Limits
    from polydraft.contracts.kernels.linear import LinearV1
    from polydraft.contracts.packing import PACKINGS, pack
    from polydraft.plugins.kernel_table import DeviceWorkspace
    from polydraft_cpu import library

    rng, rows = np.random.default_rng(0), []
    values = (rng.standard_normal(SHAPE, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    kinds = (("f32", "f32"), ("f32", "bf16"), ("f32", "int8"), ("bf16", "bf16"))
    own = {"avx512vnni": (("f32", "int8-channel-a8"), ("f32", "int4-group32-a8")), "avx512bf16": kinds[-1:]}
    for level in library.levels():
        for dtype, weights in own.get(level, kinds):  # these levels have no others of their own
            packing = PACKINGS.get(weights)
            spec = f"cpu?threads=1&queue=0&isa={level}&weights={'exact' if packing else weights}"
            device = polydraft_cpu.polydraft_open_device(spec, DeviceOptions(dtype))
            table = polydraft_cpu.polydraft_kernels(device)
            weight = table.prepare_weight("linear", pack(values, packing) if packing else values, dtype)
            for n, what in PRODUCTS:
                x, out = device.empty("x", (n, SHAPE[1]), dtype), device.empty("out", (n, SHAPE[0]), "f32")
                args = LinearV1(x=x, weight=weight, bias=None, out=out)
                provider, limits = table.providers["linear"], Limits(1, 0, n, n, 2, 1, 1, 1, 1, 1)
                nbytes = provider.workspace_bytes(args, limits)
                workspace = DeviceWorkspace(device.empty("scratch", (nbytes,), "u8"), nbytes) if nbytes else None
                launch = provider.bind(args, limits, workspace)
                took = min(timed(functools.partial(launch, device.stream, n)) for _ in range(repeats + 1))
                rows.append(
                    {
                        "shape": f"product {SHAPE[0]} x {SHAPE[1]}",
                        "backend": "cpu",
                        "name": level,
                        "draft_tokens": 0,
                        "batch": n,
                        "rows_are": what,
                        "dtype": dtype,
                        "weights_kept": weights,
                        "us": took * 1e6,
                        "gflops": 2 * n * SHAPE[0] * SHAPE[1] / took / 1e9,
                        "weight_bytes_per_s": weight.nbytes / took,
                        "repeats": repeats,
                    }
                )
            device.close()
    return rows


def timed(call: Callable[[], object]) -> float:
    """Seconds of one of a few calls in a row."""
    start = time.perf_counter()
    for _ in range(5):
        call()
    return (time.perf_counter() - start) / 5


# -- the page ----------------------------------------------------------------------------------------
def markdown(head: list[str], lines: list[list[str]]) -> str:
    """A table."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, ["---"] * len(head), *lines])


def tables(rows: list[dict[str, Any]]) -> dict[str, str]:
    """The tables of the page, by the name in their marker."""
    demo = [r for r in rows if r["shape"] == "demo"]
    rates = {(r["name"], r["batch"]): r for r in demo}
    batches = sorted({r["batch"] for r in demo})
    lines = [[f"`{n}`", *(_rate(rates.get((n, b))) for b in batches)] for n in dict.fromkeys(r["name"] for r in demo)]
    found = {"demo": markdown(["", *(f"tokens/s, batch {b}" for b in batches)], lines)}
    big = [r for r in rows if "copy_rate_share" in r]
    lines = [
        ["demo model, which fits" if r["shape"] == "demo" else f"0.5 B Qwen2: {r['name']}", f"{1e3 / r['tokens_per_s']:.2f}",
         f"{r['bytes_per_s'] / 1e9:.1f}", f"{r['copy_bytes_per_s'] / 1e9:.1f}", f"{r['copy_rate_share']:.0%}"]
        for r in big
    ]  # fmt: skip
    head = ["batch 1, K = 0", "ms a token", "GB/s of weights", "GB/s of a copy", "share"]
    found["large"] = markdown(head, lines)
    own_rows = [r for r in rows if r["shape"].startswith("product")]
    speed = {(r["name"], r["dtype"], r["weights_kept"], r["batch"]): r["gflops"] for r in own_rows}
    kinds = dict.fromkeys((r["name"], r["dtype"], r["weights_kept"]) for r in own_rows)
    head = ["level", "activations", "weights", *(f"{n} row{'s' if n > 1 else ''}" for n, _ in PRODUCTS)]
    found["products"] = markdown(head, [[*kind, *(f"{speed[(*kind, n)]:.0f}" for n, _ in PRODUCTS)] for kind in kinds])
    return found


def _rate(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{row['tokens_per_s']:,.0f} ({row['spread'][0]:,.0f} to {row['spread'][1]:,.0f})"


def renew_page(page: Path, rows: list[dict[str, Any]]) -> None:
    """Put each table into its place."""
    for name, table in tables(rows).items():
        report.renew(page, name, table)


# -- all of it ---------------------------------------------------------------------------------------
def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[0, 1, 3, 5])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vllm-cpu")
    parser.add_argument("--large", type=Path, default=ROOT / "shapes" / "qwen2-0.5b.json", help="shape of the large model")
    parser.add_argument("--large-weights", nargs="*", default=["bf16", "int8", "int4"], help="none: leave the large model out")
    parser.add_argument("--experts", action="store_true", help="measure the model with experts, and nothing else")
    parser.add_argument("--experts-shape", type=Path, default=ROOT / "shapes" / "moe-cpu.json")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path, help="write the tables into this page, behind their markers")
    parser.add_argument("--read", type=Path, help="measure nothing: take the rows of this result")
    args = parser.parse_args()
    if args.read:
        renew_page(args.page, json.loads(args.read.read_text())["rows"])
        return
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    versions: dict[str, str] = {}
    if args.experts:
        experts_alone(args)
        return
    contenders: dict[str, Timed] = {}
    if not args.no_transformers:
        import torch
        import transformers

        contenders["transformers"] = transformers_peer()
        versions |= {"torch": torch.__version__, "transformers": transformers.__version__}
    peers = {f"{how} K={k}": vllm_peer(args.vllm, how, k) for how in VLLM for k in (0, 3)} if args.vllm else {}
    for name, peer in peers.items():
        contenders[name] = asked(peer)
        versions["vllm-cpu"] = peer.version
    load, most = os.getloadavg()[0], max(args.batch)
    sizes = tuple(range(1, most + 1))
    llms = {f"cpu K={k}": LLM(backend="cpu", draft_tokens=k, max_num_seqs=most, graph_sizes=sizes) for k in args.draft_tokens}
    llms["cpu bf16 K=3"] = LLM(backend="cpu", draft_tokens=3, max_num_seqs=most, graph_sizes=sizes, dtype="bf16")
    if not args.no_reference:
        llms["reference K=3"] = LLM(backend="reference", draft_tokens=3, max_num_seqs=most)
    contenders |= {name: own(llm) for name, llm in llms.items()}
    tokenizer = next(iter(llms.values())).engine.tokenizer
    rows: list[dict[str, Any]] = []
    for batch in args.batch:
        prompts = [tokenizer.encode(p) for p in PROMPTS[:batch]]
        rows += measure(contenders, prompts, new_tokens=args.new_tokens, repeats=args.repeats)
    for row in rows:
        if (row["name"], row["batch"]) == ("cpu K=0", 1):
            beside_copy(row, llms["cpu K=0"].engine)
    for peer in peers.values():
        peer.close()
    print_table(rows)
    for weights in args.large_weights:
        rows.append(large(args.large, weights, new_tokens=32, repeats=args.repeats))
        print_large(rows[-1])
    rows += products(args.repeats)
    keep(args, rows, versions, load)


def keep(args: argparse.Namespace, rows: list[dict[str, Any]], versions: dict[str, str], load: float) -> None:
    """Write the tables and the result where the command line says."""
    if args.page:
        renew_page(args.page, rows)
    if args.out:
        report.write(args.out, result(rows, versions, load))


def experts_alone(args: argparse.Namespace) -> None:
    """The run with --experts."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    load = os.getloadavg()[0]
    rows = experts(args.experts_shape, args.batch, new_tokens=args.new_tokens, repeats=args.repeats)
    print(experts_table(rows))
    if args.out:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        report.write(args.out, result(rows, versions, load, EXPERTS_METHOD))
    if args.page:
        report.renew(args.page, "bench/results/cpu_experts.json", experts_table(rows))


def result(rows: list[dict[str, Any]], versions: dict[str, str], load: float, method: str = METHOD) -> dict[str, Any]:
    """The committed form; `versions` are those of the peers, `load` is what else the machine was doing when it began."""
    device = f"{report.processor()}; {polydraft_cpu.polydraft_backend_info('').summary}"
    found = report.document(rows, device=device, method=f"{method} Load average of the machine before the first run: {load:.2f}")
    found["versions"] |= versions
    return found


if __name__ == "__main__":
    main()
