"""What one client's attack costs another one: a neighbour's latency with and without it, in one run.

    python bench/serve_attacks.py --page docs/serving.md
    python bench/serve_attacks.py --attacks field,prompt --seconds 3 --out /tmp/attacks.json

The neighbour asks for 16 tokens again and again; attackers are in a process of their own. Before each attack the neighbour is
timed alone for as long, since other work on the machine comes and goes. Reported: its median and its longest time, and what the
attackers were answered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from polydraft.bench import report

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "bench" / "results" / "serve_attacks.json"
FIGURES = "bench/results/serve_attacks.json"
NEIGHBOUR = {"prompt": "def f(x):\n    ", "max_tokens": 16, "temperature": 0}
DRAFT_TOKENS = 3
GRAMMAR = 'start: s "b"\ns: s s s | s s | "a" | \n'
LONG = {"max_tokens": 600, "ignore_eos": True, "logit_bias": {"66": 100}}
"""The demo model then writes one `a` after the other, until there are too many parses."""
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "grammar": ("a grammar of 45 bytes that has many parses", {**LONG, "structured_outputs": {"grammar": GRAMMAR}}),
    "stops": ("50,000 stop strings", {"max_tokens": 64, "stop": [f"s{number}" for number in range(50_000)]}),
    "field": ("a field name of 4 MB", {"y" * 4_000_000: 1}),
    "prompt": ("a prompt of 3 MB", {"prompt": "def f(x): return x + 1\n" * 130_000}),
    "word": ("a prompt of 3 MB that is one word", {"prompt": "a" * 3_000_000}),
    "biases": ("10,000 logit biases", {"logit_bias": {str(token): 1 for token in range(10_000)}}),
}
OTHERS = {
    "grammars": "8 such grammars at once",
    "deep": "grammars that crash their library",
    "heads": "300 half heads",
    "reader": "8 streams that nobody reads",
}


async def sent(url: str, data: bytes, answers: Counter[str]) -> None:
    """One request on a connection of its own."""
    where = urlsplit(url)
    try:
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(data) + data
        )
        answer = await reader.read()
        answers[answer[9:12].decode() or "nothing"] += 1
        writer.close()
    except OSError as error:
        answers[type(error).__name__] += 1


async def again_and_again(name: str, url: str, answers: Counter[str]) -> None:
    data = json.dumps({**NEIGHBOUR, **BODIES[name][1]}).encode()
    while True:
        await sent(url, data, answers)


async def grammars(url: str, answers: Counter[str]) -> None:
    """Each another one, so that none is compiled already."""

    async def one(number: int) -> None:
        grammar = f"// {number}\n{GRAMMAR}"
        data = json.dumps({**NEIGHBOUR, **LONG, "structured_outputs": {"grammar": grammar}}).encode()
        while True:
            await sent(url, data, answers)

    await asyncio.gather(*(one(number) for number in range(8)))


async def deep(url: str, answers: Counter[str]) -> None:
    """Chains of so many rules that the stack overflows."""
    for number in itertools.count():
        rules = "\n".join(f'a{i}: a{i + 1} | "a" a{i + 1} | ' for i in range(20_000))
        grammar = f'// {number}\nstart: a0\n{rules}\na20000: "b"'
        await sent(url, json.dumps({**NEIGHBOUR, "structured_outputs": {"grammar": grammar}}).encode(), answers)


async def heads(url: str, answers: Counter[str]) -> None:
    """Half a head on each of 300 connections, which are opened again when they end."""
    where = urlsplit(url)

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(where.hostname, where.port)
                writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX-")
                answers["held"] += 1
                answer = await reader.read()
                answers[answer[9:12].decode() or "ended"] += 1
                writer.close()

    await asyncio.gather(*(one() for _ in range(300)))


async def reader(url: str, answers: Counter[str]) -> None:
    """Streams of many log probabilities that fill every buffer."""
    where = urlsplit(url)
    body = {**NEIGHBOUR, "max_tokens": 2000, "ignore_eos": True, "stream": True, "logprobs": 20, "provenance": True}
    data = json.dumps(body).encode()
    for _ in range(8):
        _, writer = await asyncio.open_connection(where.hostname, where.port, limit=1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        answers["held"] += 1
    await asyncio.Event().wait()


async def attack(name: str, url: str, seconds: float) -> None:
    """What the process of the attackers does; prints what it was answered."""
    answers: Counter[str] = Counter()
    others: dict[str, Callable[[str, Counter[str]], Awaitable[None]]] = {
        "grammars": grammars, "deep": deep, "heads": heads, "reader": reader,
    }  # fmt: skip
    work = others[name](url, answers) if name in others else again_and_again(name, url, answers)
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(work, seconds)
    print(json.dumps(answers))


def neighbour(url: str, seconds: float) -> list[float]:
    """How long each of its requests took, in milliseconds."""
    import httpx

    times, until = [], time.monotonic() + seconds
    with httpx.Client(timeout=120) as session:
        while time.monotonic() < until:
            begin = time.perf_counter()
            session.post(f"{url}/v1/completions", json=NEIGHBOUR).raise_for_status()
            times.append(1e3 * (time.perf_counter() - begin))
    return times


def measured(name: str, url: str, seconds: float, backend: str) -> dict[str, Any]:
    alone = neighbour(url, seconds)
    command = [sys.executable, __file__, "--attack", name, "--url", url, "--seconds", str(seconds + 1)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attackers:
        time.sleep(1)  # they have begun
        during = neighbour(url, seconds)
        answers = json.loads(attackers.communicate(timeout=seconds + 60)[0])
    what = BODIES[name][0] if name in BODIES else OTHERS[name]
    return {
        "shape": "demo", "backend": backend, "draft_tokens": DRAFT_TOKENS, "batch": 1, "attack": what,
        "median_alone_ms": round(statistics.median(alone), 1), "median_ms": round(statistics.median(during), 1),
        "longest_ms": round(max(during), 1), "ratio": round(statistics.median(during) / statistics.median(alone), 2),
        "answers": answers,
    }  # fmt: skip


def markdown(rows: list[dict[str, Any]]) -> str:
    """One line an attack."""
    lines = [
        "| attack | neighbour's median alone, ms | with it, ms | ratio | longest, ms | attackers were answered |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        answers = ", ".join(f"{count:,} {answer}" for answer, count in sorted(row["answers"].items())) or "nothing yet"
        times = f"{row['median_alone_ms']:.0f} | {row['median_ms']:.0f} | {row['ratio']:.2f} | {row['longest_ms']:.0f}"
        lines.append(f"| {row['attack']} | {times} | {answers} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--attacks", default=",".join((*BODIES, *OTHERS)))
    parser.add_argument("--out", type=Path, default=TARGET)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--attack", help="be the attackers")
    parser.add_argument("--url")
    options = parser.parse_args()
    if options.attack:
        asyncio.run(attack(options.attack, options.url, options.seconds))
        return
    command = [
        sys.executable, "-c", "from polydraft.cli import main; main()", "serve", "--port", "0", "--json", "--constraints",
        "--backend", options.backend, "--draft-tokens", str(DRAFT_TOKENS), "--log-file", os.devnull,
    ]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        rows = [measured(name, url, options.seconds, options.backend) for name in options.attacks.split(",")]
    finally:
        server.terminate()
        server.wait(60)
    report.write(options.out, report.document(rows, method=(__doc__ or "").strip()))
    if options.page:
        report.renew(options.page, FIGURES, markdown(rows))
    print(markdown(rows))


if __name__ == "__main__":
    main()
