"""Random programs of requests: what arrives when, is aborted, stops, is preempted, and how it is served; one number makes one.

It has the generator, the run of a program on an emulator, and the expected result of its requests: each alone, on the synchronous
reference, step by step and without graphs. The tests of `tests/step` whose names begin with `test_emulator` use it; `differences`
reports what is not bit-equal.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from polydraft import Engine, RequestOutput, SamplingParams
from polydraft.contracts.packing import MADE, PARTS
from tests.support import tiny
from tests.support.emulator import SCHEDULES, emulated
from tests.support.poison import poison_free_blocks
from tests.support.runs import Ask, drive, engine, essence

DEPTHS = (0, 1, 2)
WAYS = tuple((depth, graph) for depth in DEPTHS for graph in ("off", "decode"))
"""Depth of overlap and graphs: every program can be served each way."""
RULES = ("logprobs", "draft_logprobs", "proposer", "verify", "draft_vocab", "weights", "weights_ignore")
"""Options that the result of a request alone depends on."""
MAX_LOGPROBS = 3
MODEL_LEN = 96


@dataclass(frozen=True)
class Program:
    """Requests and how they are served. `query`: options of the emulator."""

    seed: int
    model: str
    num_drafts: int
    query: str
    options: Mapping[str, Any]
    asks: tuple[Ask, ...]

    def build(self, depth: int, graph: str, query: str = "") -> Engine:
        """The engine that is to serve it, on an emulator with the further options `query`."""
        sizes = {"graph": "decode", "graph_sizes": self._buckets()} if graph == "decode" else {"graph": "off"}
        options = {**self.options, **sizes, "draft_tokens": self.num_drafts, "overlap": depth}
        return emulated("&".join(filter(None, (self.query, query))), self.model, **options)

    def serve(self, served_by: Engine) -> list[RequestOutput]:
        """Run all of it; results in order. The ledger is audited in every step, and free blocks are poisoned unless somebody
        watches who writes them."""
        return drive(served_by, self.asks, each_step=None if served_by.config.sanitize else poison_free_blocks)

    def _buckets(self) -> tuple[int, ...]:
        """The batch, and one smaller; sometimes only smaller ones, so that a full batch runs eagerly."""
        slots = self.options["max_num_seqs"]
        return ((1,), (1, slots), (slots,), (max(slots // 2, 1),))[0 if slots == 1 else 1 + self.seed % 3]

    def differences(self, outputs: list[RequestOutput]) -> list[str]:
        """What differs from each request alone, in words; of a request that was aborted only its beginning is looked at."""
        return [
            f"request {i}: {word}"
            for i, (ask, output) in enumerate(zip(self.asks, outputs, strict=True))
            for word in unlike(output, self._alone(ask))
        ]

    def _alone(self, ask: Ask) -> RequestOutput:
        """The request alone, under the options that a result does depend on."""
        rules = tuple((name, self.options[name]) for name in RULES if name in self.options)
        return alone(self.model, self.num_drafts, ask.prompt_ids, ask.params, rules)


def unlike(output: RequestOutput, wanted: RequestOutput) -> Iterator[str]:
    """In which fields two results differ. This is the one place that says what is compared."""
    if output.finish_reason in ("abort", "error"):
        count, rounds = len(output.token_ids), len(output.rounds)
        pairs = {
            "token_ids": (output.token_ids, wanted.token_ids[:count]),
            "rounds": (output.rounds[:-1], wanted.rounds[: max(rounds - 1, 0)]),
            "logprobs": (bits(output), bits(wanted)[:count]),
        }
    else:
        mine, theirs = essence(output), essence(wanted)
        pairs = {name: (mine[name], theirs[name]) for name in mine}
        pairs["logprobs"] = (bits(output), bits(wanted))
        pairs["logprobs of drafts"] = (of_drafts(output), of_drafts(wanted))
    for name, (got, right) in pairs.items():
        if got != right:
            yield f"{name} {got}, wanted {right}"


def bits(output: RequestOutput) -> list[Any]:
    """Log probabilities of the output's tokens, exactly as they were reported; none where none were asked for."""
    return [(record.token_id, record.logprob, record.rank, record.top) for record in output.tokens]


def of_drafts(output: RequestOutput) -> list[Any]:
    """Log probabilities of drafts by step."""
    return list(output.drafts)


@functools.lru_cache(maxsize=128)
def _alone(model: str, num_drafts: int, rules: tuple[tuple[str, Any], ...]) -> Engine:
    return engine(model, draft_tokens=num_drafts, max_num_seqs=1, prefix_cache=False, **dict(rules))


@functools.lru_cache(maxsize=4096)
def alone(
    model: str, num_drafts: int, prompt_ids: tuple[int, ...], params: SamplingParams, rules: tuple[tuple[str, Any], ...]
) -> RequestOutput:
    """A request alone on the reference: synchronous, eager, nothing shared."""
    return drive(_alone(model, num_drafts, rules), [Ask(prompt_ids, params)])[0]


# -- the generator ------------------------------------------------------------------------------------------------------
def program(seed: int) -> Program:
    """The program of a number."""
    rng = random.Random(seed)
    model, num_drafts = rng.choice(sorted(tiny.CONFIGS)), rng.choice((0, 1, 2, 3, 5))
    slots, block_size = rng.choice((1, 2, 3, 4)), rng.choice((1, 3, 4, 16))
    logprobs = rng.choice((None, None, MAX_LOGPROBS))
    crowded = rng.random() < 0.5
    asks = _asks(rng, tiny.CONFIGS[model]["vocab_size"], logprobs, crowded=crowded)
    options: dict[str, Any] = {
        "max_num_seqs": slots,
        "block_size": block_size,
        "max_batched_tokens": slots * (num_drafts + 1) + rng.choice((0, 3, 30)),
        "prefix_cache": rng.random() < 0.7,
        "logprobs": logprobs,
        "draft_logprobs": logprobs is not None,
    }
    if crowded:
        most = max(min(len(ask.prompt_ids) + ask.params.max_new_tokens, MODEL_LEN) for ask in asks)
        options["num_blocks"] = -(-most // block_size) + rng.randint(0, 3)
    query = f"seed={seed}&{rng.choice(SCHEDULES)}"
    options["proposer"] = rng.choice(("auto", "auto", "ngram")) if num_drafts else "auto"
    options["verify"] = rng.choice(("auto", "auto", "rejection"))
    vocab = tiny.CONFIGS[model]["vocab_size"]
    narrow = rng.random() < 0.3 and num_drafts > 0 and options["proposer"] == "auto"
    options["draft_vocab"] = f"{tiny.token_counts(vocab)}:{rng.choice((1, vocab // 4, vocab // 2, vocab))}" if narrow else ""
    packing = random.Random(f"packing {seed}")
    if packing.random() < 0.4:
        options["weights"] = packing.choice(sorted(MADE))
        options["weights_ignore"] = tuple(part for part in PARTS if packing.random() < 0.3)
    return Program(seed, model, num_drafts, query, options, tuple(asks))


def _asks(rng: random.Random, vocab_size: int, logprobs: int | None, *, crowded: bool) -> list[Ask]:
    """Requests that arrive over time, of which some begin alike; a crowd comes at once and writes more."""
    asks: list[Ask] = []
    for _ in range(rng.randint(3, 6)):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.choice((1, 3, 9, 17, 40)))]
        if asks and rng.random() < 0.4:
            prompt = [*rng.choice(asks).prompt_ids[:20], *prompt[:4]]
        arrival = rng.randint(0, 3 if crowded else 10)
        abort = arrival + rng.randint(1, 9) if rng.random() < 0.15 else None
        asks.append(Ask(tuple(prompt), _params(rng, vocab_size, logprobs, crowded=crowded), arrival, abort))
    return asks


def _params(rng: random.Random, vocab_size: int, logprobs: int | None, *, crowded: bool) -> SamplingParams:
    params = SamplingParams(max_new_tokens=rng.randint(8, 20) if crowded else rng.randint(1, 16), ignore_eos=rng.random() < 0.7)
    if rng.random() < 0.4:
        params = replace(params, temperature=rng.choice((0.7, 1.2)), top_p=rng.choice((1.0, 0.9)), seed=rng.randrange(1 << 40))
    if rng.random() < 0.25:
        params = replace(params, stop_token_ids=tuple(rng.randrange(1, vocab_size) for _ in range(6)))
    if rng.random() < 0.25:
        params = replace(params, stop=tuple(f"w{rng.randrange(10)}" for _ in range(2)))
    if rng.random() < 0.2:
        params = replace(params, repetition_penalty=1.2, bad_words=((rng.randrange(1, vocab_size),),))
    return replace(params, logprobs=rng.choice((None, 0, logprobs)) if logprobs else None)
