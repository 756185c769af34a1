"""Load on a started server: many clients that stream, each held against the offline text.

    python bench/serve_load.py --clients 200 --seconds 60 --page docs/serving.md
    python bench/serve_load.py --clients 200 --seconds 60 --page docs/serving.md --backend cpu

Writes the row of a backend into bench/results/serving.json. The clients are coroutines of one process beside the server's two.
Reported: errors, texts that differ from the offline run (on row-invariant arithmetic, so that none may), the time to the first
token, the time between pieces, tokens a second, and the memory of both processes in the middle and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from polydraft.bench import report

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "bench" / "results" / "serving.json"
PROMPTS = [f"def function_{i}(x):\n    " for i in range(16)]
TOKENS = 24
FIGURES = "bench/results/serving.json"
ORDER = ("cpu", "reference")


def rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def offline(tokens: int, backend: str) -> dict[str, str]:
    from polydraft import LLM, SamplingParams

    llm = LLM(backend=backend, invariant=True, max_num_seqs=16)
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


def load(clients: int, seconds: float, backend: str) -> dict[str, Any]:
    wanted = offline(TOKENS, backend)
    command = [
        sys.executable, "-c", "from polydraft.cli import main; main()", "serve", "--port", "0", "--json",
        "--backend", backend, "--draft-tokens", "3", "--invariant", "--max-num-seqs", "32", "--max-requests", str(2 * clients),
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
        "clients": clients, "seconds": round(took, 1), "backend": backend, "invariant": True,
        "new_tokens": TOKENS, "texts": run.texts, "errors": run.errors, "texts_that_differ": run.wrong,
        "tokens_per_s": round(run.texts * TOKENS / took, 1), "ttft_ms": round(1e3 * percentile(run.ttft, 0.5), 1),
        "ttft_p99_ms": round(1e3 * percentile(run.ttft, 0.99), 1), "itl_p50_ms": round(1e3 * percentile(run.gaps, 0.5), 1),
        "itl_p99_ms": round(1e3 * percentile(run.gaps, 0.99), 1),
        "http_rss_mib": [round(middle[1], 1), round(end[1], 1)], "engine_rss_mib": [round(middle[2], 1), round(end[2], 1)],
    }  # fmt: skip


COLUMNS = (
    "backend", "clients", "seconds", "texts", "errors", "texts that differ", "tokens/s", "first token, ms", "p99",
    "between pieces, ms", "p99", "HTTP, MiB", "engine, MiB",
)  # fmt: skip


def markdown(rows: list[dict[str, Any]]) -> str:
    """One line a backend."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        rates = (f"{row[name]:,.0f}" for name in ("tokens_per_s", "ttft_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"))
        memory = (f"{row[name][0]:.0f}, {row[name][1]:.0f}" for name in ("http_rss_mib", "engine_rss_mib"))
        counts = (f"{row[name]:,}" for name in ("texts", "errors", "texts_that_differ"))
        seconds = f"{row['seconds']:.0f}"
        name = f"{row['backend']}{', invariant' if row['invariant'] else ''}"
        lines.append(f"| {' | '.join((name, str(row['clients']), seconds, *counts, *rates, *memory))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--out", type=Path, default=TARGET)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    row = load(options.clients, options.seconds, options.backend)
    kept = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    rows = [old for old in kept if old["what"] == "load" and old["backend"] != row["backend"]] + [row]
    rows.sort(key=lambda r: -ORDER.index(r["backend"]))
    report.write(options.out, report.document(rows, method=(__doc__ or "").strip()))
    if options.page:
        report.renew(options.page, FIGURES, markdown(rows))
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
