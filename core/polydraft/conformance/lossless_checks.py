"""Level L5: whole engines on the probe model produce the tokens of plain decoding and the rounds of a recomputing oracle.

Token equality alone does not detect faults of the draft side, which verification corrects; hence every check also compares the
acceptance trace of every request and round. Nothing is averaged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from polydraft.backend import RowOrder
from polydraft.conformance.check import Check, Tally, Unsupported
from polydraft.conformance.collective_checks import look_for_ranks
from polydraft.conformance.oracle.coupled import plain
from polydraft.conformance.probe import NUM_TOKENS, VOCAB, prompts
from polydraft.conformance.serving import Ask, as_chosen, as_expected, serve
from polydraft.conformance.target import Target
from polydraft.contracts.kv_quant import KV_DTYPES, Kv
from polydraft.contracts.packing import MADE
from polydraft.device import Array
from polydraft.engine import Engine
from polydraft.host.draft_policy import DraftView
from polydraft.output.request_output import RequestOutput
from polydraft.program.plan import StepOutcome, StepPlan
from polydraft.sampling_params import SamplingParams

DRAFTS: Final = (0, 1, 2, 3, 5)
BATCHES: Final = (1, 3, 8)
"""Requests at once; 8 is a bucket of every graph policy."""
K: Final = 3
"""Drafts a round of the checks that are not about K."""
SAMPLINGS: Final = ({"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.0, "top_k": 20}, {"temperature": 1.3, "min_p": 0.05})


THINK_END: Final = (3,)
THINK_FORCED: Final = (9, 3, 11)
"""What ends thinking in the checks of its limits, and what is spelt out there."""
THINKING: Final[tuple[dict[str, Any], ...]] = (
    {"thinking_limit": 0, "reply_budget": 4},
    {"thinking_limit": 3, "reply_start_token_ids": (7, 20, 41)},
    {"thinking_limit": 30, "reply_budget": 5, "logit_bias": {3: 9.0}},
    {"thinking_limit": 8, "reply_budget": 0},
    {"reply_start_token_ids": (5,), "logit_bias": {3: 9.0}},
    {"logit_bias": {3: 9.0}},
)
"""Limits of requests beside each other: at once, with a choice of first tokens, behind an end that the model writes itself. The
last one has none."""
RANKS: Final = (2, 4)
"""Ranks that the probe is split over: its two key-value heads are one a rank, or one for two of them."""
DEGREES: Final[dict[str, dict[str, Any]]] = {
    "same-bits": {"model": "dense"},
    "same-bits-experts": {"model": "experts"},
    "same-bits-whole-experts": {"model": "experts", "expert_parallel": True},
}
"""Models, and what ranks keep whole of them, whose texts are those of one rank to the bit."""
NUMBERS: Final = (3, 0, 0, 2, 5, 1, 0, 0, 0, 5, 3)
"""Drafts of one step after the other where they change: up, down, and pauses of several steps."""


def checks() -> Iterator[Check]:
    """Every check of L5."""
    for drafts in DRAFTS:
        for batch in BATCHES:
            yield Check(f"L5/greedy/K{drafts}-B{batch}", partial(_greedy, drafts, batch))
    for place in range(K + 1):
        yield Check(f"L5/stop-token/place-{place}", partial(_stop, place))
    yield Check("L5/length-limit/every-place", _length)
    for size in (1, 2, 3, 5):
        yield Check(f"L5/block-border/size-{size}", partial(_border, size))
    yield Check("L5/full-model/last-position", _full_model)
    yield Check("L5/prefix-hit", _prefix_hit)
    yield Check("L5/chunked-prefill", _chunks)
    yield Check("L5/preempt-and-resume", _preempt)
    yield Check("L5/full-batch", _full_batch)
    yield Check("L5/late-arrivals", _late)
    yield Check("L5/drafts-per-step", _drafts_per_step)
    yield Check("L5/defaults", _defaults)
    for drafts in (0, K):
        yield Check(f"L5/experts/K{drafts}", partial(_experts, drafts), features=("experts",))
    for kv in KV_DTYPES:
        yield Check(f"L5/kv-{kv}/with-and-without-drafts", partial(_quantised, kv), needs=("kv_dtypes",))
    for made in (made for made, one in MADE.items() if not one.packing.activations):  # the oracle rounds no rows
        yield Check(f"L5/weights-{made}/with-and-without-drafts", partial(_packed, made), needs=("weight_packings",))
    yield from _checks_of_ranks()
    for drafts in (0, K):
        yield Check(f"L5/thinking/K{drafts}", partial(_thinking, drafts), features=("thinking", "processing"))
    for number, options in enumerate(SAMPLINGS):
        yield Check(f"L5/sampled/{number}", partial(_sampled, options), features=("sampling",))


def _checks_of_ranks() -> Iterator[Check]:
    """Those of whole engines over several ranks."""
    for ranks in RANKS:
        for drafts in (0, K):
            yield Check(f"L5/ranks/N{ranks}-K{drafts}", partial(_ranks, ranks, drafts), needs=("ranks",), features=())
    yield Check("L5/ranks/experts", _experts_of_ranks, needs=("ranks",), features=())
    needs = ("ranks", "ordered_sums", "row_invariant")
    for name, options in DEGREES.items():
        yield Check(f"L5/ranks/{name}", partial(_degrees, options), needs=needs, features=(), basic=False)
    yield Check("L5/ranks/draft-vocabulary", _few_drafted, needs=needs, features=("drafting",), basic=False)


def run(target: Target, tally: Tally, asks: Sequence[Ask], *, drafts: int = K, each_step: Any = None, **options: Any) -> Engine:
    """Serve `asks` on a fresh engine and compare with the oracle; returns the engine, closed, for its counts."""
    dtype = options.pop("dtype", "") or working_dtype(target)
    options = {"max_num_seqs": 4, "block_size": 4, "graph": "off", **options}
    with target.engine(draft_tokens=drafts, dtype=dtype, **options) as engine:
        engine._observers.append(LaunchOrder(engine.info.capabilities.row_order, tally))
        outputs = serve(engine, asks, tally, each_step=each_step)
        drafts = engine.resolved.limits.num_drafts
    if drafts and not any(output.error for output in outputs):
        tally.true(f"drafts are made, with K={drafts}", any(engine.totals.drafted_at))
    as_expected(tally, asks, outputs, drafts, target.rounding(dtype))
    return engine


def _defaults(target: Target, tally: Tally) -> None:
    """In every dtype what an engine does that is told the number of drafts alone: no arithmetic of its own, graphs, overlap and
    sizes as they come. Most other checks ask for row-invariant kernels and for one dtype."""
    asks = [Ask(prompt, arrival=i // 2) for i, prompt in enumerate(prompts(6))]
    for dtype in target.info.capabilities.dtypes:
        with target.engine(dtype=dtype, invariant=False) as engine:
            outputs = serve(engine, asks, tally)
            drafts = engine.resolved.limits.num_drafts
        as_expected(tally, asks, outputs, drafts, target.rounding(dtype))


class Listed:
    """A draft policy that follows a list again and again; what it chose is in `chosen`."""

    def __init__(self, numbers: Sequence[int], most: int) -> None:
        self.rungs = tuple(sorted({*numbers, most}))
        self._numbers, self.chosen = numbers, list[int]()

    def choose(self, view: DraftView) -> int:
        """The next of the list."""
        del view
        self.chosen.append(self._numbers[len(self.chosen) % len(self._numbers)])
        return self.chosen[-1]


def _drafts_per_step(target: Target, tally: Tally) -> None:
    """One step after the other, and steps in flight where the backend has them."""
    drafts_per_step(target, tally, graph="off")


def drafts_per_step(target: Target, tally: Tally, **options: Any) -> Engine:
    """Another number of drafts in every step: tokens as ever, and of each round's drafts as many accepted as of a run that never
    paused, which takes keys and values of the steps without drafts, too. A prompt that was computed in such steps is shared."""
    base = prompts(10)[9]
    asks = [*(Ask(prompt, arrival=3 * i) for i, prompt in enumerate(prompts(6))), Ask(base, arrival=1), Ask(base, arrival=12)]
    bound, dtype = target.info.capabilities.max_window - 1, working_dtype(target)
    numbers = [min(number, bound) for number in NUMBERS]
    most = max(numbers)
    options = {"max_num_seqs": 4, "block_size": 4, "max_batched_tokens": 4 * (most + 1) + 1, **options}
    with target.engine(draft_tokens=most, dtype=dtype, draft_policy=Listed(numbers, most), **options) as engine:
        outputs = serve(engine, asks, tally)
    as_expected(tally, asks, outputs, None, target.rounding(dtype))
    seen = {drafts for output in outputs for drafts in output.round_drafts}
    tally.true(f"rounds verified different numbers of drafts, got {sorted(seen)}", seen >= set(numbers))
    tally.true("drafts were accepted", bool(engine.totals.accepted))
    return engine


class LaunchOrder:
    """A step observer that holds every plan to the order in which the backend declares to pack sequences. Kernels that follow
    whatever order they are given do not notice another one; a chip's attention does."""

    def __init__(self, row_order: RowOrder, tally: Tally) -> None:
        self._row_order, self._tally = row_order, tally

    def step_finished(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Look at the slots of one step."""
        del outcome
        slots, decode = plan.slots.tolist(), plan.decode.astype(int).tolist()
        if self._row_order == "slot":
            self._tally.equal("launch order, which is declared to be that of slots", slots, sorted(slots))
        elif self._row_order == "prefill_first":
            self._tally.equal("decode behind prefill in the launch order, as declared", decode, sorted(decode))


def _ranks(ranks: int, drafts: int, target: Target, tally: Tally, **options: Any) -> None:
    """A model over several ranks writes what the oracle writes, with few blocks, shared beginnings, and a request that is
    aborted."""
    declared = target.info.capabilities
    look_for_ranks(target, ranks)
    base = prompts(10)[9]
    model = options.get("model", "dense")
    asks = [
        *(Ask(prompt, arrival=i, model=model) for i, prompt in enumerate(prompts(4))),
        Ask(base, arrival=1, model=model), Ask(base, arrival=5, abort=9, model=model), Ask(base, arrival=14, model=model),
    ]  # fmt: skip
    engine = run(
        target, tally, asks, drafts=drafts, tensor_parallel=ranks, num_blocks=26, dtype="f32",
        invariant=declared.row_invariant and declared.ordered_sums, graph="auto" if ranks > RANKS[0] else "off", **options,
    )  # fmt: skip
    tally.true("some request began with blocks of another one", engine.ledger.num_hits > 0)
    tally.true("some request was preempted", engine.scheduler.num_preemptions > 0)


def _experts_of_ranks(target: Target, tally: Tally) -> None:
    """Experts that ranks keep whole."""
    _ranks(2, K, target, tally, model="experts", expert_parallel=True)


class Told(Ask):
    """One that samples where its prompt is of an odd length, and is told log probabilities."""

    @property
    def params(self) -> SamplingParams:
        """As the request has it."""
        sampled: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 5} if len(self.prompt) % 2 else {}
        return SamplingParams(max_new_tokens=14, ignore_eos=True, logprobs=2, **sampled)


def _degrees(options: dict[str, Any], target: Target, tally: Tally) -> None:
    """With `--invariant`, tokens and log probabilities are the same to the bit over 1, 2 and 4 ranks, with drafts and without,
    and rounds are those of as many drafts. At 2 alone this would show little, for addition commutes."""
    look_for_ranks(target, 4)
    if "top_logprobs" not in target.offered:
        raise Unsupported("log probabilities, by whose bits runs are compared, are not offered")
    model, base = options["model"], prompts(10)[9]
    asks = [Told(prompt, arrival=i, model=model) for i, prompt in enumerate((*prompts(4), base))]
    asks += [Told(base, arrival=5, abort=9, model=model), Told(base, arrival=14, model=model)]
    shared: dict[str, Any] = {"max_num_seqs": 4, "block_size": 4, "num_blocks": 14, "dtype": "f32", "logprobs": 2, "graph": "off"}
    known: list[RequestOutput] = []
    for ranks, drafts in ((1, K), (2, 0), (4, K)):
        given = {**shared, **options, "tensor_parallel": ranks, "draft_tokens": drafts, "invariant": True}
        with target.engine(**given) as engine:
            found = [output for output in serve(engine, asks, tally) if output.finish_reason != "abort"]
        known = known or found
        tally.true("some request was preempted", engine.scheduler.num_preemptions > 0)
        tally.true("some request began with blocks of another one", engine.ledger.num_hits > 0)
        for number, (mine, theirs) in enumerate(zip(found, known, strict=True)):
            what = f"of request {number} over {ranks} ranks, K={drafts}"
            tally.equal(f"tokens {what}", mine.token_ids, theirs.token_ids)
            tally.same_bits(f"log probabilities {what}", *(_told(output) for output in (mine, theirs)))
            if drafts:
                tally.equal(f"rounds {what}", mine.rounds, theirs.rounds)


def _few_drafted(target: Target, tally: Tally) -> None:
    """Where drafts are chosen among few tokens, each rank scores those that are its own: rounds over 2 ranks are those of one. No
    text shows it."""
    look_for_ranks(target, 2)
    asks, rounds = [Ask(prompt, arrival=i) for i, prompt in enumerate(prompts(6))], list[list[tuple[int, ...]]]()
    drafted = np.random.default_rng(9).permutation(VOCAB)[: 2 * VOCAB // 3].tolist()  # some ranks have more of them than others
    shared: dict[str, Any] = {"max_num_seqs": 4, "block_size": 4, "dtype": "f32", "graph": "off", "invariant": True}
    with TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.json"
        counts.write_text(json.dumps(dict.fromkeys(map(str, drafted), 1)), encoding="utf-8")
        for ranks in (1, 2):
            with target.engine(**shared, tensor_parallel=ranks, draft_tokens=K, draft_vocab=str(counts)) as engine:
                outputs = serve(engine, asks, tally)
            for number, (ask, output) in enumerate(zip(asks, outputs, strict=True)):
                tally.equal(f"tokens of request {number} over {ranks} ranks", output.token_ids, tuple(ask.expected(0).token_ids))
            rounds.append([output.rounds for output in outputs])
            tally.true(f"drafts were accepted over {ranks} ranks", bool(engine.totals.accepted))
    for number, (theirs, mine) in enumerate(zip(*rounds, strict=True)):
        tally.equal(f"rounds of request {number} over 2 ranks", mine, theirs)


def _told(output: RequestOutput) -> Array:
    """The log probabilities that a request was told, in order: of its tokens, and the most likely in their places."""
    return np.array([value for one in output.tokens for value in (one.logprob, *(top for _, top in one.top))], np.float32)


def working_dtype(target: Target) -> str:
    """f32 where it is declared, since there every text is compared to its end; else the backend's first."""
    dtypes = target.info.capabilities.dtypes
    return "f32" if "f32" in dtypes else dtypes[0]


def _greedy(drafts: int, batch: int, target: Target, tally: Tally) -> None:
    """K drafts a round, a batch of requests of different lengths."""
    engine = run(target, tally, [Ask(prompt) for prompt in prompts(batch)], drafts=drafts, max_num_seqs=batch)
    tally.true("drafts were accepted" if drafts else "nothing was drafted", bool(engine.totals.accepted) == bool(drafts))


def _experts(drafts: int, target: Target, tally: Tally) -> None:
    """A mixture of experts in target and head, prompts in chunks beside windows; graphs where the backend has them."""
    asks = [Ask(prompt, arrival=i, model="experts") for i, prompt in enumerate(prompts(5, model="experts"))]
    options: dict[str, Any] = {"drafts": drafts, "model": "experts", "max_num_seqs": 3}
    engine = run(target, tally, asks, **options, max_batched_tokens=3 * (K + 1) + 1)
    tally.true("drafts were accepted" if drafts else "nothing was drafted", bool(engine.totals.accepted) == bool(drafts))
    if target.info.capabilities.graph_capture:
        run(target, tally, asks, **options, graph="decode")


def at_place(place: int, count: int = 3) -> list[Ask]:
    """Requests whose stop token lies at `place` of the window that it ends."""
    found = []
    for prompt in prompts(10):
        text, begin = Ask(prompt).expected(K), 1
        for accepted in text.rounds:
            at = begin + place
            if place <= accepted and at < len(text.token_ids) and text.token_ids[at] not in text.token_ids[:at]:
                found.append(Ask(prompt, stop=(text.token_ids[at],)))
                break
            begin += accepted + 1
        if len(found) == count:
            break
    return found


def _stop(place: int, target: Target, tally: Tally) -> None:
    """The stop token is draft `place` of a window (behind the drafts: the target's own): nothing behind it comes out."""
    asks = at_place(place)
    tally.true("the probe has such texts", bool(asks))
    run(target, tally, asks)


def _length(target: Target, tally: Tally) -> None:
    """The limit of tokens falls on every place of a window."""
    run(target, tally, [Ask(prompt, max_new=1 + i) for i, prompt in enumerate([*prompts(6), *prompts(6)])])


def _border(size: int, target: Target, tally: Tally) -> None:
    """Blocks so small that their border lies inside nearly every window."""
    run(target, tally, [Ask(prompt) for prompt in prompts(4)], block_size=size)


def _full_model(target: Target, tally: Tally) -> None:
    """Texts that fill the model's length to its last position; only the last tokens' places matter, so ties are left out."""
    asks = [Ask(prompt, max_new=200) for prompt in prompts(3)]
    for drafts in (0, K):
        limit = max(len(ask.prompt) for ask in asks) + 12
        engine = run(target, tally, [Ask(a.prompt, max_new=min(NUM_TOKENS, limit - len(a.prompt))) for a in asks],
                     drafts=drafts, max_model_len=limit)  # fmt: skip
        tally.equal("max_model_len", engine.resolved.limits.max_len, limit)


def _prefix_hit(target: Target, tally: Tally) -> None:
    """Requests whose texts begin alike share blocks that were committed by the first one."""
    base = prompts(10)[9]
    asks = [Ask(base), *(Ask(base, arrival=4 + i) for i in range(3))]
    engine = run(target, tally, asks)
    tally.true(f"tokens were found in the prefix cache, got {engine.ledger.num_hits}", engine.ledger.num_hits > 0)


def _chunks(target: Target, tally: Tally) -> None:
    """Prompts are prefilled in chunks of a few tokens, beside windows that decode."""
    asks = [Ask(prompt, arrival=2 * i) for i, prompt in enumerate(prompts(10)[5:])]
    for spare in (0, 1, 6):
        run(target, tally, asks, max_num_seqs=2, max_batched_tokens=2 * (K + 1) + spare)


def _preempt(target: Target, tally: Tally) -> None:
    """Blocks run out: the youngest request gives way and is resumed, and its rounds go on as if nothing had been."""
    asks = [Ask(prompt, arrival=i) for i, prompt in enumerate(prompts(10)[4:])]
    engine = run(target, tally, asks, max_num_seqs=4, num_blocks=26, block_size=4, prefix_cache=False)
    tally.true("a request was preempted", engine.scheduler.num_preemptions > 0)


def _full_batch(target: Target, tally: Tally) -> None:
    """Every slot taken, and as many rows as all windows together."""
    asks = [Ask(prompt) for prompt in prompts(10)[:8]]
    run(target, tally, asks, drafts=5, max_num_seqs=8, max_batched_tokens=8 * 6)


def _late(target: Target, tally: Tally) -> None:
    """More requests than slots, one by one, so that slots are used again."""
    run(target, tally, [Ask(prompt, max_new=6 + 3 * i, arrival=2 * i) for i, prompt in enumerate(prompts(8))], max_num_seqs=2)


def _quantised(kv: Kv, target: Target, tally: Tally) -> None:
    """Over quantised KV rows texts are those of the oracle with such rows, whatever is drafted, shared or prefilled in chunks."""
    if kv not in target.info.capabilities.kv_dtypes:
        raise Unsupported(f"KV rows in {kv} are not declared")
    asks = [Ask(prompt, kv=kv) for prompt in prompts(5, kv)[1:]]
    run(target, tally, asks, drafts=0, kv_dtype=kv)
    engine = run(target, tally, asks, kv_dtype=kv)
    tally.true("drafts were accepted", bool(engine.totals.accepted))
    again = [*asks[-2:], *(replace(ask, arrival=4) for ask in asks[-2:])]
    run(target, tally, again, kv_dtype=kv, max_num_seqs=2, max_batched_tokens=2 * (K + 1) + 1)


def _packed(made: str, target: Target, tally: Tally) -> None:
    """With matrices that were packed when they were loaded, texts are those of the oracle with such matrices."""
    packing = MADE[made].packing
    if packing.name not in target.info.capabilities.weight_packings:
        raise Unsupported(f"weights packed as {packing.name} are not declared")
    asks = [Ask(prompt, packed=made) for prompt in prompts(5, packed=made)[1:]]
    run(target, tally, asks, drafts=0, weights=made)
    engine = run(target, tally, asks, weights=made)
    tally.true("drafts were accepted", bool(engine.totals.accepted))
    run(target, tally, asks[-2:], weights=made, max_num_seqs=2, max_batched_tokens=2 * (K + 1) + 1)


def _sampled(options: dict[str, Any], target: Target, tally: Tally) -> None:
    """Sampled texts with the shared noise of each position, exactly as the oracle samples them, where no choice is close."""
    params = [SamplingParams(max_new_tokens=14, ignore_eos=True, seed=7 + i, **options) for i in range(4)]
    dtype = working_dtype(target)
    with target.engine(draft_tokens=K, max_num_seqs=4, block_size=4, dtype=dtype, graph="off") as engine:
        outputs, most = _served(engine, params), engine.resolved.limits.num_drafts
    as_chosen(tally, "that samples", params, outputs, most, target.rounding(dtype), [plain] * len(params))


def _thinking(drafts: int, target: Target, tally: Tally) -> None:
    """Limits of thinking and reply, judged row by row of every window: greedy texts as the oracle writes them under the same
    rules, where no choice is close."""
    params = [SamplingParams(max_new_tokens=20, stop_token_ids=(0,), **options) for options in THINKING]
    dtype = working_dtype(target)
    options: dict[str, Any] = {"think_end_ids": THINK_END, "think_forced_ids": THINK_FORCED, "dtype": dtype}
    with target.engine(draft_tokens=drafts, max_num_seqs=4, block_size=4, **options) as engine:
        outputs, most = _served(engine, params), engine.resolved.limits.num_drafts
    rules = [partial(_limited, one, len(output.prompt_ids)) for one, output in zip(params, outputs, strict=True)]
    as_chosen(tally, "under limits of thinking", params, outputs, most, target.rounding(dtype), rules)


def _served(engine: Engine, params: Sequence[SamplingParams]) -> list[RequestOutput]:
    """The results of a prompt each, in their order."""
    ids = [engine.add(prompt, one) for prompt, one in zip(prompts(len(params)), params, strict=True)]
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        engine.step()
        outputs |= {output.id: output for output in engine.poll() if output.finished}
    return [outputs[request_id] for request_id in ids]


def _limited(params: SamplingParams, begin: int, logits: Array, known: Sequence[int]) -> Array:
    """Logits of the token behind a text, of which `begin` tokens are its prompt, under the limits of its request."""
    text, limit, place = tuple(known[begin:]), params.thinking_limit, 0
    z = np.array(logits, np.float64)
    for token, bias in params.biases:
        z[token] += bias
    if not params.limits_thinking:
        return z
    while place < len(text) and place != limit and text[max(place - len(THINK_END), 0) : place] != THINK_END:
        place += 1
    may: tuple[int, ...] = ()
    if text[max(place - len(THINK_END), 0) : place] != THINK_END:
        if place != limit:
            return z
        if len(text) < limit + len(THINK_FORCED):
            may = (THINK_FORCED[len(text) - limit],)
        place = limit + len(THINK_FORCED)
    if not may and params.reply_budget is not None and len(text) - place >= params.reply_budget:
        may = (0,)
    elif not may and len(text) == place:
        may = params.reply_start_token_ids
    return np.where(np.isin(np.arange(len(z)), may), z, -np.inf) if may else z
