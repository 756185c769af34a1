"""Load on a started server: many clients that stream, each held against the offline text; and what log probabilities cost.

    python bench/serve_load.py --clients 200 --seconds 60            # writes bench/results/serving.json
    python bench/serve_load.py --logprob-cost                        # adds the rows of log probabilities

The clients are coroutines of one process beside the server's two. Reported: errors, texts that differ from the offline run, the
time to the first token, the time between pieces, tokens a second, and the memory of both processes in the middle and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "bench" / "results" / "serving.json"
PROMPTS = [f"def function_{i}(x):\n    " for i in range(16)]
TOKENS = 24


def rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def offline(tokens: int) -> dict[str, str]:
    from polydraft import LLM, SamplingParams

    llm = LLM(backend="reference", invariant=True, max_num_seqs=16)
    outputs = llm.generate(PROMPTS, SamplingParams(max_new_tokens=tokens))
    return {prompt: output.text for prompt, output in zip(PROMPTS, outputs, strict=True)}


class Load:
    def __init__(self, url: str, wanted: dict[str, str], tokens: int) -> None:
        self.url, self.wanted, self.tokens = url, wanted, tokens
        self.texts = self.wrong = self.errors = 0
        self.ttft: list[float] = []
        self.gaps: list[float] = []
        self.memory: list[tuple[float, float, float]] = []

    async def client(self, number: int, until: float) -> None:
        import httpx

        async with httpx.AsyncClient(timeout=120) as session:
            while time.monotonic() < until:
                await self.text(session, PROMPTS[number % len(PROMPTS)])
                number += 1

    async def text(self, session: Any, prompt: str) -> None:
        import httpx

        body = {"prompt": prompt, "max_tokens": self.tokens, "temperature": 0, "stream": True}
        start = last = time.monotonic()
        text, done = "", False
        try:
            async with session.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    self.errors += 1
                    return
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: {"):
                        now = time.monotonic()
                        (self.gaps if text else self.ttft).append(now - last)
                        last = now
                        text += json.loads(line[6:])["choices"][0]["text"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            print(f"{type(error).__name__}: {error} after {time.monotonic() - start:.1f} s", file=sys.stderr)
            self.errors += 1
            return
        self.texts += 1
        self.wrong += not done or text != self.wanted[prompt]

    async def watch(self, pids: tuple[int, int], until: float) -> None:
        begin = time.monotonic()
        while time.monotonic() < until:
            self.memory.append((time.monotonic() - begin, rss_mib(pids[0]), rss_mib(pids[1])))
            await asyncio.sleep(1)

    async def run(self, clients: int, seconds: float, pids: tuple[int, int]) -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(self.watch(pids, until), *(self.client(i, until) for i in range(clients)))


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else float("nan")


def load(clients: int, seconds: float) -> dict[str, Any]:
    wanted = offline(TOKENS)
    command = [
        sys.executable, "-c", "from polydraft.cli import main; main()", "serve", "--port", "0", "--json",
        "--backend", "reference", "--invariant", "--max-num-seqs", "32", "--max-requests", str(2 * clients),
        "--queue-timeout", "300", "--log-file", os.devnull,
    ]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        tasks = Path(f"/proc/{server.pid}/task").iterdir()
        worker = int(next(child for task in tasks for child in (task / "children").read_text().split()))
        run = Load(url, wanted, TOKENS)
        begin = time.monotonic()
        asyncio.run(run.run(clients, seconds, (server.pid, worker)))
        took = time.monotonic() - begin
    finally:
        server.terminate()
        server.wait(60)
    middle, end = run.memory[len(run.memory) // 2], run.memory[-1]
    return {
        "what": "load", "shape": "demo", "draft_tokens": 3, "batch": 32,
        "clients": clients, "seconds": round(took, 1), "backend": "reference", "invariant": True,
        "new_tokens": TOKENS, "texts": run.texts, "errors": run.errors, "texts_that_differ": run.wrong,
        "tokens_per_s": round(run.texts * TOKENS / took, 1), "ttft_ms": round(1e3 * percentile(run.ttft, 0.5), 1),
        "ttft_p99_ms": round(1e3 * percentile(run.ttft, 0.99), 1), "itl_p50_ms": round(1e3 * percentile(run.gaps, 0.5), 1),
        "itl_p99_ms": round(1e3 * percentile(run.gaps, 0.99), 1),
        "http_rss_mib": [round(middle[1], 1), round(end[1], 1)], "engine_rss_mib": [round(middle[2], 1), round(end[2], 1)],
    }  # fmt: skip


def logprob_cost(batch: int = 64, steps: int = 150, repeats: int = 7) -> list[dict[str, Any]]:
    """Host time of a step on the null backend, and bytes that come back, by what every request of the batch asks for. The
    variants take turns, so that a slow minute hits all of them."""
    from polydraft import LLM, SamplingParams

    wishes = {"engine without": None, "none": None, "emitted only": 0, "5": 5, "20": 20}
    engines = {}
    for name, wish in wishes.items():
        most = None if name == "engine without" else 20
        engine = LLM(backend="null", max_num_seqs=batch, draft_tokens=3, max_model_len=2048, logprobs=most).engine
        for i in range(batch):
            engine.add((5, i + 1), SamplingParams(max_new_tokens=2000, ignore_eos=True, logprobs=wish))
        for _ in range(20):
            engine.step()
        engines[name] = engine
    times: dict[str, list[float]] = {name: [] for name in wishes}
    bytes_of = {}
    for _ in range(repeats):
        for name, engine in engines.items():
            before, kernel = engine.device.counters.bytes_downloaded, engine.device.counters.extra["kernel_ns"]
            start = time.perf_counter()
            for _ in range(steps // 10):
                engine.step()
            took = time.perf_counter() - start - (engine.device.counters.extra["kernel_ns"] - kernel) / 1e9
            times[name].append(1e6 * took / (steps // 10))
            bytes_of[name] = (engine.device.counters.bytes_downloaded - before) // (steps // 10)
    from polydraft.contracts.layout import record_words

    return [
        {
            "what": "log probabilities", "shape": "demo", "batch": batch, "draft_tokens": 3, "asked": name, "backend": "null",
            "host_us_per_step": round(statistics.median(values), 1),
            "spread": [round(min(values), 1), round(max(values), 1)], "bytes_per_step": bytes_of[name],
            "bytes_of_a_fixed_21_columns": 4 * record_words(batch, 4, 21), "repeats": repeats,
        }
        for name, values in times.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--logprob-cost", action="store_true")
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args()
    rows = logprob_cost() if options.logprob_cost else [load(options.clients, options.seconds)]
    kept = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    rows = [row for row in kept if row["what"] != rows[0]["what"]] + rows
    import numpy as np

    from polydraft import __version__

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    content = {
        "schema": "polydraft.bench/1", "date": datetime.now(timezone.utc).date().isoformat(), "commit": commit,
        "device": f"CPU, {os.cpu_count()} cores", "driver": "none",
        "versions": {"polydraft": __version__, "numpy": np.__version__, "python": platform.python_version()},
        "method": (__doc__ or "").strip(), "rows": rows,
    }  # fmt: skip
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
