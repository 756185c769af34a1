"""Runs requests on an engine for L3 to L6: arrivals, aborts, an audit per step, and what the oracle expects.

Checks describe requests as `Ask`s and compare the results. A run that hangs, loses a block or does not come to rest fails here.
The options of the engine are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from polydraft.conformance.check import Tally, Wrong
from polydraft.conformance.oracle import GreedyRounds, greedy_rounds
from polydraft.conformance.oracle.coupled import Process, Sampling, coupled_along
from polydraft.conformance.probe import MARGIN, NUM_TOKENS, Model, certain, oracle
from polydraft.engine import Engine
from polydraft.output.request_output import RequestOutput
from polydraft.sampling_params import SamplingParams
from polydraft.sentinels import Phase

MOST_STEPS = 2000
"""A run that takes more is taken to hang; the longest here takes a hundred."""
CLEAR = 1e-4
"""What a choice has to lead by in float32 where no margin is enforced, in logits."""


@dataclass(frozen=True)
class Ask:
    """One greedy request: it arrives before step `arrival`, and is aborted before step `abort` if that comes in time."""

    prompt: tuple[int, ...]
    max_new: int = NUM_TOKENS
    stop: tuple[int, ...] = ()
    arrival: int = 0
    abort: int | None = None
    kv: str = ""
    """How the engine keeps KV rows, which makes another model of it."""
    model: Model = "dense"
    """The probe that is served."""
    packed: str = ""
    """How the engine packs its matrices (`--weights`), which makes another model of it, too."""

    @property
    def params(self) -> SamplingParams:
        """The end of text is left out, so that texts have the length that a check wants."""
        return SamplingParams(max_new_tokens=self.max_new, stop_token_ids=self.stop, ignore_eos=True)

    def expected(self, num_drafts: int | tuple[int, ...]) -> GreedyRounds:
        """Tokens and rounds by full recomputation; a tuple has the drafts of each round."""
        return _expected(self.prompt, num_drafts, self.max_new, self.stop, self.kv, self.model, self.packed)


@lru_cache(maxsize=8192)
def _expected(
    prompt: tuple[int, ...],
    num_drafts: int | tuple[int, ...],
    max_new: int,
    stop: tuple[int, ...],
    kv: str,
    model: Model,
    packed: str,
) -> GreedyRounds:
    return greedy_rounds(oracle(kv=kv, model=model, packed=packed), prompt, num_drafts, max_new, stop)


def serve(
    engine: Engine, asks: Sequence[Ask], tally: Tally, *, each_step: Callable[[Engine, int], None] | None = None
) -> list[RequestOutput]:
    """Serve `asks` to their ends; results in their order. Audits the ledger after every step and the engine at the end."""
    (outputs,) = serve_in_turn([(engine, asks)], tally, each_step=each_step)
    return outputs


def serve_in_turn(
    runs: Sequence[tuple[Engine, Sequence[Ask]]], tally: Tally, *, each_step: Callable[[Engine, int], None] | None = None
) -> list[list[RequestOutput]]:
    """Serve several engines at once, a step of one, then a step of the next; as `serve` each."""
    going = {place: _serving(engine, asks, tally, each_step) for place, (engine, asks) in enumerate(runs)}
    outputs: dict[int, list[RequestOutput]] = {}
    while going:
        for place, run in list(going.items()):
            try:
                next(run)
            except StopIteration as end:
                outputs[place] = end.value
                del going[place]
    return [outputs[place] for place in range(len(runs))]


def _serving(
    engine: Engine, asks: Sequence[Ask], tally: Tally, each_step: Callable[[Engine, int], None] | None
) -> Generator[None, None, list[RequestOutput]]:
    """Serve and come back behind every step."""
    done: dict[str, RequestOutput] = {}
    ids: dict[int, str] = {}
    step = 0
    while len(done) < len(asks):
        for index, ask in enumerate(asks):
            if ask.arrival == step:
                ids[index] = engine.add(ask.prompt, ask.params)
            if ask.abort == step and index in ids and ids[index] not in done:
                engine.abort(ids[index])
        engine.step()
        engine.ledger.audit()
        if each_step is not None:
            each_step(engine, step)
        done |= {output.id: output for output in engine.poll() if output.finished}
        step += 1
        if step >= MOST_STEPS:
            raise Wrong(f"{len(asks) - len(done)} of {len(asks)} requests have not ended after {step} steps; the run hangs")
        yield
    for _ in range(2 * engine.resolved.overlap + 2):
        engine.step()
    engine.ledger.audit()
    tally.equal("slots held by an engine at rest", int((engine.slots.phase != Phase.IDLE).sum()), 0)
    tally.equal("free blocks of an engine at rest", engine.ledger.num_free, engine.ledger.num_blocks)
    return [done[ids[index]] for index in range(len(asks))]


def as_expected(
    tally: Tally, asks: Sequence[Ask], outputs: Sequence[RequestOutput], num_drafts: int | None, rounding: str
) -> None:  # fmt: skip
    """Tokens and the acceptance trace, request by request and round by round, are the oracle's. `num_drafts` None: of as many
    drafts a round as the result says that it verified.

    `rounding`: `Target.rounding`. But for float32 throughout, a text is compared up to its first close choice
    (`probe.certain`), since rounding may decide that one.
    A request that was aborted has the beginning of its text."""
    for number, (ask, output) in enumerate(zip(asks, outputs, strict=True)):
        wanted = ask.expected(output.round_drafts if num_drafts is None else num_drafts)
        who = f"request {number} (prompt of {len(ask.prompt)}, K={'drawn' if num_drafts is None else num_drafts})"
        tokens, rounds, got_rounds = tuple(wanted.token_ids), tuple(wanted.rounds), output.rounds
        got = output.token_ids
        if output.finish_reason == "error":
            tally.no_error(who, output.error)
            continue
        if output.finish_reason == "abort":
            tokens, rounds = tokens[: len(got)], rounds[: len(got_rounds)]
        sure = len(tokens) if rounding == "f32" else certain(ask.prompt, rounding, ask.kv, ask.model, ask.packed)
        if sure < len(tokens):
            tally.near_ties += got[sure:] != tokens[sure:]
            tokens, got = tokens[:sure], got[:sure]
            whole = _rounds_within(rounds, sure)
            rounds, got_rounds = rounds[:whole], got_rounds[:whole]
        tally.equal(f"tokens of {who}", got, tokens)
        tally.equal(f"acceptance trace of {who}", got_rounds, rounds)


def as_chosen(
    tally: Tally, what: str, params: Sequence[SamplingParams], outputs: Sequence[RequestOutput], num_drafts: int, rounding: str,
    processes: Sequence[Process],
) -> None:  # fmt: skip
    """Tokens and the acceptance trace of texts that are sampled, or whose logits are processed, are what the oracle chooses. A
    choice that `rounding` may decide has to be one of those that it may bring about, and what is behind it is compared, too."""
    clear = total = 0
    for number, (one, output, process) in enumerate(zip(params, outputs, processes, strict=True)):
        who = f"request {number} {what}"
        tally.no_error(who, output.error)
        if output.error:
            continue
        sampling = Sampling(one.temperature, one.top_p, one.top_k, one.min_p, one.seed or 0)
        wanted = coupled_along(
            oracle(), output.prompt_ids, (output.token_ids, output.rounds), sampling, num_drafts, one.max_new_tokens,
            one.stop_token_ids, process, CLEAR if rounding == "f32" else MARGIN[rounding],
        )  # fmt: skip
        tally.equal(f"tokens of {who}", output.token_ids, tuple(wanted.token_ids))
        tally.equal(f"acceptance trace of {who}", output.rounds, tuple(wanted.rounds))
        tally.near_ties += wanted.differs
        clear, total = clear + wanted.clear, total + len(wanted.token_ids)
    tally.true(f"most choices are clear, got {clear} of {total}", 2 * clear > total or not total)


def _rounds_within(rounds: Sequence[int], num_tokens: int) -> int:
    """How many rounds end within the first `num_tokens` tokens; the first token is the prefill's."""
    produced, count = 1, 0
    for accepted in rounds:
        produced += accepted + 1
        if produced > num_tokens:
            break
        count += 1
    return count
