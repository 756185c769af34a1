"""Serving as it is lived: requests that arrive one by one, long and short, sampled, sent to any server of OpenAI's interface.

    python bench/serve_trace.py --text bench/texts/agent_tickets.txt \\
        --server 'K = 0' 'polydraft serve --port {port} --draft-tokens 0' \\
        --server 'K = 3' 'polydraft serve --port {port} --draft-tokens 3'
    python bench/serve_trace.py --url http://127.0.0.1:8000 --vocab 32000 --rates 2,4,8 --model NAME

Each `--server NAME COMMAND` is started, measured and ended in turn; `--url` measures one that runs already, such as vLLM's or
SGLang's. All get the same trace: prompts of token ids, cut out of a text at places drawn from `--seed` (with `--text`, which the
server's `/tokenize` turns into ids) or ids drawn below `--vocab`; lengths of prompts and texts drawn evenly on a logarithmic
scale; `ignore_eos`, so that lengths are kept. Gaps between arrivals are exponential (a Poisson process). `--rates` are requests a
second; without them, `SHARES` of the rate that the first server reaches when all requests come at once.

Prints a table; --out writes a file, --plot a picture, --page puts the table into a page.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from polydraft.bench import report
from polydraft.device import Array

METHOD = (
    "a Poisson process of requests, the same for each server and rate but for the scale of its gaps; tokens/s is all new tokens "
    "over the time from the first arrival to the last token; first token and time between tokens (of a request: from its first "
    "token to its last, by the tokens between) as median and 99th percentile over the requests; the clients are coroutines of "
    "one process on the server's machine; `burst` sends all requests at once, after one request to warm up"
)
SHARES = (0.5, 0.8, 1.0)
"""Rates that are tried without --rates, of that of the burst."""
BURST = "burst"
START_S, ANSWER_S = 1800.0, 3600.0
"""Seconds that a server may take to load, and a request to be answered."""
COLUMNS = (
    "server", "requests/s", "tokens/s", "first token, ms", "p99", "between tokens, ms", "p99", "errors",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What is asked for: token ids, new tokens, a seed; and `gap`, of mean 1, to the request before."""

    prompt: tuple[int, ...]
    new_tokens: int
    seed: int
    gap: float


@dataclass(frozen=True)
class Answer:
    """Seconds since the start of the run at which a request was sent, had its first token and its last; `tokens` as the server
    counted them; `error` in place of all but `sent`, else ""."""

    sent: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    error: str = ""


# -- the trace -------------------------------------------------------------------------------------
def trace(ids: Array | int, count: int, prompt: tuple[int, int], new: tuple[int, int], seed: int) -> list[Request]:
    """`count` requests: prompts are stretches of `ids`, or drawn below it where it is a number; lengths lie within `prompt` and
    `new`, ends included. Raises `ValueError` where the text is shorter than a prompt may be."""
    if not isinstance(ids, int) and len(ids) < prompt[1]:
        raise ValueError(f"the text has {len(ids)} tokens, prompts up to {prompt[1]} were asked for; give a longer --text")
    rng, found = np.random.default_rng(seed), []
    for number in range(count):
        length, tokens = (round(float(np.exp(rng.uniform(np.log(low), np.log(high))))) for low, high in (prompt, new))
        if isinstance(ids, int):
            drawn = rng.integers(0, ids, length)
        else:
            begin = int(rng.integers(0, len(ids) - length + 1))
            drawn = ids[begin : begin + length]
        found.append(Request(tuple(drawn.tolist()), tokens, seed + number, float(rng.exponential())))
    return found


# -- one run ---------------------------------------------------------------------------------------
async def send(client: httpx.AsyncClient, url: str, request: Request, options: argparse.Namespace, begin: float) -> Answer:
    """One request, streamed."""
    body = {
        "prompt": list(request.prompt), "max_tokens": request.new_tokens, "temperature": options.temperature,
        "top_p": options.top_p, "seed": request.seed, "stream": True, "stream_options": {"include_usage": True},
        "ignore_eos": True, **({"model": options.model} if options.model else {}),
    }  # fmt: skip
    sent, first, last, tokens = time.monotonic() - begin, 0.0, 0.0, 0
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return Answer(sent, error=f"status {answer.status_code}: {(await answer.aread()).decode()[:300]}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[len("data: ") :])
                if "error" in event:
                    return Answer(sent, error=str(event["error"])[:300])
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                if event["choices"]:
                    last = time.monotonic() - begin
                    first = first or last
    except httpx.HTTPError as error:
        return Answer(sent, error=f"{type(error).__name__}: {error}")
    if tokens != request.new_tokens:
        return Answer(sent, error=f"{tokens} tokens came, {request.new_tokens} were asked for")
    return Answer(sent, first, last, tokens)


async def run(url: str, requests: Sequence[Request], rate: float | None, options: argparse.Namespace) -> list[Answer]:
    """All requests at `rate` a second, or at once."""
    begin, due, tasks = time.monotonic(), 0.0, []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=ANSWER_S, limits=limits) as client:
        for request in requests:
            due += request.gap / rate if rate else 0.0
            await asyncio.sleep(max(0.0, begin + due - time.monotonic()))
            tasks.append(asyncio.create_task(send(client, url, request, options, begin)))
        return list(await asyncio.gather(*tasks))


def summary(name: str, rate: float | None, answers: Sequence[Answer]) -> dict[str, Any]:
    """The row of a run. Raises `ValueError` where nothing came back."""
    good = [answer for answer in answers if not answer.error]
    if not good:
        raise ValueError(f"{name} answered none of {len(answers)} requests: {answers[0].error}")
    took = max(answer.last for answer in good) - min(answer.sent for answer in answers)
    waits = [1e3 * (answer.first - answer.sent) for answer in good]
    between = [1e3 * (answer.last - answer.first) / (answer.tokens - 1) for answer in good if answer.tokens > 1]
    figures = {
        f"{what}_{which}_ms": float(np.percentile(values, share)) if values else None
        for what, values in (("first_token", waits), ("between_tokens", between))
        for which, share in (("p50", 50), ("p99", 99))
    }
    return {
        "server": name, "requests_per_s": rate or BURST, "requests": len(answers), "errors": len(answers) - len(good),
        "requests_done_per_s": len(good) / took, "tokens_per_s": sum(answer.tokens for answer in good) / took, **figures,
        "first_error": next((answer.error for answer in answers if answer.error), ""),
    }  # fmt: skip


# -- servers ---------------------------------------------------------------------------------------
@contextmanager
def started(command: str) -> Iterator[str]:
    """The address of a server that this command starts, with a free port in the place of {port}. Raises `RuntimeError` where it
    ends, or takes too long, before it serves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(shlex.split(command.format(port=port)), stdout=subprocess.DEVNULL)
    try:
        url, begin = f"http://127.0.0.1:{port}", time.monotonic()
        while not serves(url):
            if process.poll() is not None or time.monotonic() - begin > START_S:
                raise RuntimeError(f"{command!r} does not serve: status {process.poll()}; start it by hand to see why")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def serves(url: str) -> bool:
    """Whether it lists its models, which servers do once they can be asked."""
    try:
        return httpx.get(f"{url}/v1/models", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def tokens_of(url: str, text: str, model: str) -> Array:
    """The ids of a text, as the server cuts it. Raises `RuntimeError` where it cannot say."""
    answer = httpx.post(f"{url}/tokenize", json={"prompt": text, **({"model": model} if model else {})}, timeout=ANSWER_S)
    if answer.status_code != 200:
        raise RuntimeError(f"{url}/tokenize answers {answer.status_code}; give --vocab in the place of --text")
    return np.array(answer.json()["tokens"], np.int64)


def measured(
    name: str, url: str, options: argparse.Namespace, rates: list[float], requests: list[Request]
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows of a server. The first one fills `requests` and, where there are none, `rates`, for the others."""
    if not requests:
        ids = tokens_of(url, options.text.read_text(encoding="utf-8"), options.model) if options.text else options.vocab
        requests += trace(ids, options.requests, options.prompt_tokens, options.new_tokens, options.seed)
    asyncio.run(run(url, requests[:1], None, options))
    rows: list[dict[str, Any]] = []

    def at(rate: float | None) -> None:
        rows.append(summary(name, rate, asyncio.run(run(url, requests, rate, options))))
        print(line(rows[-1]), file=sys.stderr, flush=True)

    at(None)
    rates += [] if rates else [share * rows[0]["requests_done_per_s"] for share in SHARES]
    for rate in rates:
        at(rate)
    return rows


# -- what is shown ---------------------------------------------------------------------------------
def line(row: dict[str, Any]) -> str:
    """A line of the table."""
    rate = row["requests_per_s"]
    shown = rate if rate == BURST else f"{rate:.2f}"
    keys = ("first_token_p50_ms", "first_token_p99_ms", "between_tokens_p50_ms", "between_tokens_p99_ms")
    times = ("" if row[key] is None else f"{row[key]:,.{0 if 'first' in key else 1}f}" for key in keys)
    return f"| {' | '.join((row['server'], shown, format(row['tokens_per_s'], ',.0f'), *times, str(row['errors'])))} |"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a server and rate."""
    return "\n".join([f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *map(line, rows)]) + "\n"


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """What a user waits for, over the load: medians as lines, 99th percentiles dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, what, title in zip(panels, ("first_token", "between_tokens"), ("first token", "between tokens"), strict=True):
        for number, name in enumerate(dict.fromkeys(row["server"] for row in rows)):
            own = sorted((row for row in rows if row["server"] == name and row["requests_per_s"] != BURST), key=rate_of)
            for which, style in (("p50", "-"), ("p99", "--")):
                values = [row[f"{what}_{which}_ms"] for row in own]
                label = name if which == "p50" else None
                axes.plot([*map(rate_of, own)], values, style, color=f"C{number}", marker="o", markersize=3, label=label)
        axes.set(title=f"{title}, ms (median; dashed: p99)", xlabel="requests a second", yscale="log")
        axes.grid(alpha=0.3, which="both")
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=130)


def rate_of(row: dict[str, Any]) -> float:
    """Requests a second of a row that is no burst."""
    return float(row["requests_per_s"])


def bounds(text: str) -> tuple[int, int]:
    """`LOW:HIGH`, both above 0."""
    low, _, high = text.partition(":")
    found = int(low), int(high or low)
    if not 0 < found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"got {text}, wanted LOW:HIGH with 0 < LOW <= HIGH")
    return found


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--server", nargs=2, action="append", metavar=("NAME", "COMMAND"), help="start this one; may be repeated")
    where.add_argument("--url", help="measure this one, which runs already")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", type=Path, help="prompts are stretches of this text")
    what.add_argument("--vocab", type=int, help="prompts are random ids below this")
    parser.add_argument("--model", default="", help="name that the server has for its model, where it wants one")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=bounds, default=(128, 8192), metavar="LOW:HIGH")
    parser.add_argument("--new-tokens", type=bounds, default=(16, 1024), metavar="LOW:HIGH")
    parser.add_argument("--rates", type=lambda text: [float(one) for one in text.split(",")], default=[], metavar="R,...")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="", help="what the figures are of, where it is not this machine's processor")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--page", type=Path, help="write the table into this page, behind its marker")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    rates, requests = list(options.rates), list[Request]()
    if options.url:
        rows += measured(options.url, options.url.removesuffix("/"), options, rates, requests)
    for name, command in options.server or ():
        with started(command) as url:
            rows += measured(name, url, options, rates, requests)
    print(table(rows))
    prompts, texts = (
        statistics.mean(sizes) for sizes in zip(*((len(one.prompt), one.new_tokens) for one in requests), strict=True)
    )
    sampled = f"seed {options.seed}, temperature {options.temperature}, top-p {options.top_p}"
    said = f"{METHOD}; {prompts:.0f} prompt tokens and {texts:.0f} new ones in the mean, {sampled}"
    if options.out:
        report.write(options.out, report.document(rows, device=options.device, method=said))
    if options.plot:
        plot(rows, options.plot)
    if options.page:
        report.renew(options.page, "serve_trace", table(rows))


if __name__ == "__main__":
    main()
