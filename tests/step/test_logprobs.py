"""Log probabilities: the oracle's numbers, the same bits whatever serves them, and of exactly what was asked for.

The recomputing oracle gives the numbers. In row-invariant arithmetic a request has the bits that it has alone, for every number
of drafts, depth, batch, order of rows and captured graph; draft numbers stay with the round that verifies the draft.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polydraft import Engine, RequestOutput, SamplingParams
from polydraft.contracts.layout import LogprobHeader
from polydraft.errors import CapabilityError, RequestError
from polydraft.output.output_processor import OutputProcessor
from polydraft.output.request_delta import pack, unpack
from polydraft.output.request_output import draft_top
from polydraft.reference.logprobs import top_logprobs
from polydraft.sampling.logprobs import CONTRACTS, FILTERS
from tests.support.depth import crossed, deep
from tests.support.emulator import SCHEDULES, emulated
from tests.support.kernel_doubles import backend_with
from tests.support.plugin_doubles import backend_without
from tests.support.runs import DEVICES, ORDERS, Ask, drive, engine, oracle, solo

MODEL, TOP = "narrow", 4
GREEDY = SamplingParams(max_new_tokens=14, ignore_eos=True, logprobs=TOP)
PROMPTS = ((5, 9, 33), (7, 7, 12, 40, 2, 61), (1,), tuple(range(3, 24)))
ASKS = [
    Ask(PROMPTS[0], GREEDY),
    Ask(PROMPTS[1], replace(GREEDY, logprobs=0, max_new_tokens=5)),
    Ask(PROMPTS[2], replace(GREEDY, logprobs=None, max_new_tokens=9), arrival=2),
    Ask(PROMPTS[3], replace(GREEDY, logprobs=2, temperature=0.8, seed=4), arrival=3),
    Ask(PROMPTS[1], replace(GREEDY, logprobs=1, repetition_penalty=1.3), arrival=5),
]
"""Requests that want different things, and come and go while the others run."""


def logits_of(ids: Sequence[int]) -> Any:
    model = oracle(MODEL)
    return model.target_logits(model.target_states(ids))


def log_softmax(row: Any) -> Any:
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def bits(output: RequestOutput) -> list[Any]:
    """Everything that is reported of the target's tokens."""
    return [(r.token_id, r.logprob, r.rank, r.top) for r in output.tokens]


def of_drafts(output: RequestOutput) -> list[Any]:
    return list(output.drafts)


@functools.cache
def by_itself(num_drafts: int, **options: Any) -> Engine:
    """The engine of requests that are served one by one, none of which leaves anything to another."""
    return engine(MODEL, **{"draft_tokens": num_drafts, "max_num_seqs": 1, "logprobs": TOP, "prefix_cache": False, **options})


@functools.cache
def alone(ask: Ask, num_drafts: int = 3, **options: Any) -> RequestOutput:
    """The request alone on the reference."""
    return drive(by_itself(num_drafts, **options), [replace(ask, arrival=0)])[0]


# -- the numbers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_numbers_are_the_oracles(device: str, num_drafts: int) -> None:
    output = drive(engine(MODEL, device=device, draft_tokens=num_drafts, logprobs=TOP), [ASKS[0]])[0]
    rows = logits_of([*output.prompt_ids, *output.token_ids])[len(output.prompt_ids) - 1 :]
    assert len(output.tokens) == 14
    for record, row in zip(output.tokens, rows, strict=False):
        wanted = log_softmax(row)
        order = np.lexsort((np.arange(len(row)), -row))
        assert record.logprob == pytest.approx(wanted[record.token_id], abs=1e-4)
        assert record.rank == 1 + order.tolist().index(record.token_id)
        assert [token for token, _ in record.top] == order[:TOP].tolist()
        assert [value for _, value in record.top] == pytest.approx(wanted[order[:TOP]], abs=1e-4)


def test_columns_for_fewer_tokens_are_the_first_of_those_for_more() -> None:
    texts = {k: alone(Ask(PROMPTS[0], replace(GREEDY, logprobs=k))) for k in range(TOP + 1)}
    for k, output in texts.items():
        assert [r.top for r in output.tokens] == [r.top[:k] for r in texts[TOP].tokens]
        assert [(r.logprob, r.rank) for r in output.tokens] == [(r.logprob, r.rank) for r in texts[TOP].tokens]


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_raw_numbers_do_not_know_penalties_and_temperature(verify: str) -> None:
    params = replace(GREEDY, temperature=0.7, seed=8, repetition_penalty=1.8, top_k=9)
    output = alone(Ask(PROMPTS[1], params), verify=verify)
    rows = logits_of([*output.prompt_ids, *output.token_ids])[len(output.prompt_ids) - 1 :]
    for record, row in zip(output.tokens, rows, strict=False):
        assert record.logprob == pytest.approx(log_softmax(row)[record.token_id], abs=1e-4)
    assert any(record.rank != 1 for record in output.tokens), "a sampled text has other tokens than the likeliest"


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 9}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 12, "top_p": 0.9, "min_p": 0.01}]
)
@pytest.mark.parametrize(("verify", "num_drafts"), [("coupled", 0), ("coupled", 3), ("rejection", 3)])
def test_processed_numbers_are_of_what_could_come(verify: str, num_drafts: int, filters: dict[str, Any]) -> None:
    """As vLLM has them: behind biases, temperature and filters, which cut a token to -inf."""
    params = replace(GREEDY, temperature=0.5, seed=8, logit_bias={3: 4.0, 5: -50.0}, logprobs=64, **filters)
    running = engine(MODEL, draft_tokens=num_drafts, logprobs=64, logprobs_mode="processed_logprobs", verify=verify)
    output = drive(running, [Ask(PROMPTS[1], params)])[0]
    rows = logits_of([*output.prompt_ids, *output.token_ids])[len(output.prompt_ids) - 1 :].copy()
    rows[:, 3] += 4.0
    rows[:, 5] -= 50.0
    cut = 0
    for record, row in zip(output.tokens, rows, strict=False):
        shares = np.exp(log_softmax(row / 0.5))
        order = np.argsort(-shares, kind="stable")
        kept: Any = order[: filters.get("top_k", len(order))]
        shares = shares / shares[kept].sum()
        kept = [v for i, v in enumerate(kept) if shares[kept[:i]].sum() < filters.get("top_p", 2.0)]
        kept = [v for v in kept if shares[v] >= filters.get("min_p", 0.0) * shares.max()]
        shown = {token: value for token, value in record.top if value > -math.inf}
        assert set(shown) == {int(v) for v in kept}
        wanted = np.full(len(row), -math.inf)
        wanted[kept] = log_softmax(row[kept] / 0.5)
        for token, value in shown.items():
            assert value == pytest.approx(wanted[token], abs=2e-4)
        assert record.logprob == pytest.approx(wanted[record.token_id], abs=2e-4)
        cut += 64 - len(kept)
    assert (cut > 0) == bool(filters)


def test_a_greedy_neighbour_is_not_filtered() -> None:
    asks = [Ask(PROMPTS[0], replace(GREEDY, logprobs=64)), Ask(PROMPTS[1], replace(GREEDY, temperature=1.0, top_k=3, seed=1))]
    running = engine(MODEL, draft_tokens=2, logprobs=64, logprobs_mode="processed_logprobs")
    other = engine(MODEL, draft_tokens=2, logprobs=64, logprobs_mode="processed_logprobs")
    beside, by_itself = drive(running, asks)[0], drive(other, asks[:1])[0]
    assert [record.top for record in beside.tokens] == [record.top for record in by_itself.tokens]


def test_a_forbidden_token_is_minus_infinity_when_processed() -> None:
    params = replace(GREEDY, logprobs=64, bad_words=((5,), (6,)), max_new_tokens=3)
    running = engine(MODEL, draft_tokens=2, logprobs=64, logprobs_mode="processed_logprobs")
    record = drive(running, [Ask(PROMPTS[0], params)])[0].tokens[0]
    assert {token for token, value in record.top if value == -math.inf} == {5, 6}
    assert len(record.top) == 64, "the whole vocabulary, the impossible last"


# -- the same bits ------------------------------------------------------------------------------------------------------
def served() -> Iterator[tuple[str, Any]]:
    for name in DEVICES | ORDERS:
        yield name, lambda k, name=name, **o: engine(MODEL, device=name, draft_tokens=k, **o)
    for i, depth in enumerate((0, 1, 2)):
        yield (
            f"emulator-{depth}",
            lambda k, i=i, depth=depth, **o: emulated(
                f"seed={i}&{SCHEDULES[5 * i % len(SCHEDULES)]}", MODEL, draft_tokens=k, overlap=depth, **o
            ),
        )
    yield "graphs", lambda k, **o: emulated("seed=9", MODEL, draft_tokens=k, overlap=1, graph="decode", **o)
    yield "prefill graphs", lambda k, **o: emulated("seed=9", MODEL, draft_tokens=k, graph="prefill", graph_sizes=(40,), **o)


SERVED = dict(served())


@pytest.mark.parametrize(("num_drafts", "served_by"), [deep((1, "reference")), *crossed(2, (0, 3), SERVED)])
def test_every_request_has_the_bits_that_it_has_alone(served_by: str, num_drafts: int) -> None:
    """Draft numbers likewise: a neighbour that ends, or wants nothing, takes none of them along."""
    running: Engine = SERVED[served_by](num_drafts, max_num_seqs=3, logprobs=TOP, max_batched_tokens=40, draft_logprobs=True)
    outputs = drive(running, ASKS)
    for ask, output in zip(ASKS, outputs, strict=True):
        wanted = alone(ask, num_drafts, draft_logprobs=True)
        assert output.token_ids == wanted.token_ids
        assert output.rounds == wanted.rounds
        assert bits(output) == bits(wanted), f"{served_by}, K={num_drafts}"
        assert of_drafts(output) == of_drafts(wanted), f"{served_by}, K={num_drafts}"
    if "graphs" in served_by:
        assert running.device.counters.graph_replays > 0
    assert bits(outputs[0]) == bits(alone(ASKS[0], 0)), "drafts change no number of the target"


def test_a_request_that_was_preempted_has_every_number_once() -> None:
    asks = [Ask(p, replace(GREEDY, max_new_tokens=30, prompt_logprobs=1)) for p in PROMPTS]
    running = engine(MODEL, draft_tokens=3, max_num_seqs=4, block_size=4, num_blocks=24, logprobs=TOP, prefix_cache=False)
    outputs = drive(running, asks)
    assert running.scheduler.num_preemptions > 0
    for ask, output in zip(asks, outputs, strict=True):
        wanted = alone(ask)
        assert bits(output) == bits(wanted)
        assert output.prompt_logprobs == wanted.prompt_logprobs


def test_numbers_end_where_a_stop_string_cuts() -> None:
    whole = alone(Ask(PROMPTS[0], GREEDY))
    words = whole.text.split()
    cut = alone(Ask(PROMPTS[0], replace(GREEDY, stop=(words[5],))))
    assert 0 < len(cut.token_ids) < len(whole.token_ids)
    assert bits(cut) == bits(whole)[: len(cut.token_ids)]


def test_news_of_a_stream_are_the_numbers_of_the_whole() -> None:
    running = engine(MODEL, draft_tokens=3, logprobs=TOP)
    running.add(PROMPTS[0], GREEDY, stream=True)
    news: list[Any] = []
    last: RequestOutput | None = None
    while running.has_work:
        running.step()
        for last in running.poll():
            news += last.new_tokens
    assert last is not None
    assert tuple(news) == last.tokens
    assert len(news) == 14


# -- prompts ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("served_by", ["reference", "lazy-2", "lazy-prefill-first", "emulator-1", "graphs", "prefill graphs"])
def test_prompt_numbers_are_the_oracles_in_chunks_of_any_size(served_by: str) -> None:
    params = replace(GREEDY, logprobs=None, prompt_logprobs=2, max_new_tokens=3)
    asks = [Ask(p, params) for p in PROMPTS] + [Ask(PROMPTS[3], replace(params, prompt_logprobs=None))]
    running: Engine = SERVED[served_by](2, max_num_seqs=2, logprobs=TOP, max_batched_tokens=40)
    for ask, output in zip(asks, drive(running, asks), strict=True):
        if ask.params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            continue
        assert output.logprobs == ()
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(ask.prompt_ids)
        rows = logits_of(ask.prompt_ids)
        for token, row, found in zip(ask.prompt_ids[1:], rows, output.prompt_logprobs[1:], strict=False):
            order = np.lexsort((np.arange(len(row)), -row)).tolist()
            assert found is not None
            assert found.token_id == token
            assert found.logprob == pytest.approx(log_softmax(row)[token], abs=1e-4)
            assert found.rank == 1 + order.index(token)
            assert [t for t, _ in found.top] == order[:2]


# -- drafts -------------------------------------------------------------------------------------------------------------
def test_draft_numbers_are_the_heads_own() -> None:
    output = alone(ASKS[0], draft_logprobs=True)
    model, known = oracle(MODEL), [*output.prompt_ids]
    records = iter(output.tokens)
    known.append(next(records).token_id)
    for step, accepted in zip(output.drafts, output.rounds, strict=True):
        drafts, logits = model.draft(known, model.target_states(known)[:-1], len(step))
        assert [token for token, _ in step] == drafts
        wanted = [log_softmax(row)[token] for row, token in zip(logits, drafts, strict=True)]
        assert [value for _, value in step] == pytest.approx(wanted, abs=1e-4)
        known += [next(records).token_id for _ in range(min(accepted + 1, len(output.prompt_ids) + 14 - len(known)))]


def test_the_likely_tokens_of_every_draft_are_the_heads_own() -> None:
    """Of each place of every round, accepted or not, and what the records of tokens say of it."""
    output = alone(ASKS[0], num_drafts=3, draft_logprobs=True)
    model, known = oracle(MODEL), [*PROMPTS[0], output.token_ids[0]]
    assert bits(output) == bits(alone(ASKS[0])), "the target's own are the same"
    for drafts, tops, accepted in zip(output.drafts, output.draft_tops, output.rounds, strict=True):
        _, logits = model.draft(known, model.target_states(known)[:-1], len(drafts))
        for top, row in zip(tops, logits, strict=True):
            wanted = log_softmax(row)
            assert [token for token, _ in top] == np.argsort(-wanted, kind="stable")[:TOP].tolist()
            np.testing.assert_allclose([value for _, value in top], np.sort(wanted)[::-1][:TOP], atol=1e-4)
        place = len(known) - len(PROMPTS[0])
        records = output.tokens[place : place + accepted + 1]
        assert [record.draft_top for record in records] == [*tops, ()][: len(records)]
        known = [*PROMPTS[0], *output.token_ids[: place + accepted + 1]]


@pytest.mark.parametrize("served_by", ["lazy-2", "lazy-seeded", "emulator-1", "graphs"])
def test_the_likely_tokens_of_drafts_have_the_bits_that_they_have_alone(served_by: str) -> None:
    running: Engine = SERVED[served_by](3, max_num_seqs=3, logprobs=TOP, max_batched_tokens=40, draft_logprobs=True)
    for ask, output in zip(ASKS, drive(running, ASKS), strict=True):
        wanted = alone(ask, draft_logprobs=True)
        assert (bits(output), of_drafts(output), output.draft_tops) == (bits(wanted), of_drafts(wanted), wanted.draft_tops)
        assert all(len(top) == ask.params.logprobs for tops in output.draft_tops for top in tops)


@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"temperature": 0.9, "top_k": 5}, {"temperature": 0.7, "min_p": 0.05}])
def test_under_rejection_they_are_of_what_the_draft_was_drawn_from(given: dict[str, Any]) -> None:
    params = replace(GREEDY, logprobs=63, seed=3, **given)
    running = engine(MODEL, draft_tokens=3, verify="rejection", logprobs=63, draft_logprobs=True)
    output = drive(running, [Ask(PROMPTS[0], params), Ask(PROMPTS[1], GREEDY)])[0]
    seen = 0
    for drafts, tops in zip(output.drafts, output.draft_tops, strict=True):
        for (token, logprob), top in zip(drafts, tops, strict=True):
            shares = dict(top)
            assert shares[token] == logprob
            assert sum(map(math.exp, shares.values())) == pytest.approx(1.0, abs=1e-3)
            assert sum(value > -math.inf for value in shares.values()) <= given.get("top_k", 63)
            seen += 1
    assert seen > 10


def test_a_draft_that_no_model_chose_has_none() -> None:
    running = engine(MODEL, draft_tokens=3, proposer="ngram", logprobs=TOP, draft_logprobs=True)
    output = drive(running, [Ask((5, 9, 33, 5, 9, 33, 5, 9), replace(GREEDY, max_new_tokens=30))])[0]
    assert any(output.drafts)
    assert all(top == () for tops in output.draft_tops for top in tops)
    assert all(record.draft_top == () for record in output.tokens)


def test_the_likely_tokens_of_drafts_cross_to_another_process() -> None:
    running = engine(MODEL, draft_tokens=3, logprobs=TOP, draft_logprobs=True)
    running.add(PROMPTS[0], GREEDY, id="1", stream=True)
    running.add(PROMPTS[1], replace(GREEDY, logprobs=None), id="2", stream=True)
    processor, parts = OutputProcessor(running.tokenizer), list[Any]()
    while running.has_work:
        running.step()
        parts += [one.logprobs for one in unpack(pack(processor.deltas(running.take()))) if one.handle == 1 and len(one.logprobs)]
    wanted = alone(ASKS[0], draft_logprobs=True)
    assert [draft_top(row) for rows in parts for row in rows] == [record.draft_top for record in wanted.tokens]


def test_they_need_log_probabilities_and_their_contract() -> None:
    with pytest.raises(
        CapabilityError, match="--draft-logprobs reports beside the log probabilities of a request; give --logprobs"
    ):
        engine(MODEL, draft_logprobs=True)
    without = backend_without("draft_logprobs", "draft_top_logprobs")
    with pytest.raises(CapabilityError, match="no draft_logprobs, draft_top_logprobs"):
        engine(MODEL, logprobs=1, draft_logprobs=True, plugin=without)
    assert engine(MODEL, logprobs=1, plugin=without).runner.programs, "nobody else needs those"
    assert engine(MODEL, logprobs=1, draft_logprobs=True, draft_tokens=0).runner.programs, (
        "without drafts there is nothing of them"
    )


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_under_rejection_no_draft_has_a_number_of_its_neighbours(num_drafts: int) -> None:
    """A greedy request's is the head's own beside whoever samples; one that samples has that of the distribution it drew from."""
    greedy, sampled = ASKS[0], Ask(PROMPTS[3], replace(GREEDY, temperature=0.8, top_k=5, seed=4, max_new_tokens=24))
    options: dict[str, Any] = {"draft_tokens": num_drafts, "logprobs": TOP, "draft_logprobs": True, "verify": "rejection"}
    beside = drive(engine(MODEL, **options), [greedy, sampled])
    apart = [drive(engine(MODEL, **options), [ask])[0] for ask in (greedy, sampled)]
    coupled = drive(engine(MODEL, **{**options, "verify": "coupled"}), [greedy])[0]
    assert [of_drafts(output) for output in beside] == [of_drafts(output) for output in apart]
    assert of_drafts(beside[0]) == of_drafts(coupled)
    numbers = [value for step in of_drafts(beside[1]) for _, value in step]
    assert any(value < 0 for value in numbers)
    assert all(value > math.log(1e-6) for value in numbers), "what the filters dropped is not drawn"


def test_what_no_model_drew_is_certain() -> None:
    ask = Ask((5, 9, 5, 9, 5, 9), GREEDY)
    output, untold = (alone(ask, proposer="ngram", draft_logprobs=told) for told in (True, False))
    assert output.drafted > 0
    assert all(value == 0.0 for step in output.drafts for _, value in step)
    assert [[(token, None) for token, _ in step] for step in output.drafts] == [list(step) for step in untold.drafts]
    assert all(record.draft_logprob is None for record in untold.tokens)


def test_provenance_says_who_chose_each_token() -> None:
    output = alone(Ask(PROMPTS[0], replace(GREEDY, logprobs=None)))
    tokens = list(output.tokens)
    assert [t.token_id for t in tokens] == list(output.token_ids)
    assert (tokens[0].source, tokens[0].round) == ("target", -1)
    for number, (accepted, drafted) in enumerate(zip(output.rounds, output.round_drafts, strict=True)):
        mine = [t for t in tokens if t.round == number]
        assert [t.draft_position for t in mine[:accepted]] == list(range(1, accepted + 1))
        assert all(t.source == "draft" for t in mine[:accepted])
        for own in mine[accepted:]:
            assert own.source == ("corrected" if accepted < drafted else "target")
    assert {"draft", "corrected"} <= {t.source for t in tokens}
    assert sum(output.round_drafts) == output.drafted


# -- exactly what was asked for -----------------------------------------------------------------------------------------
def test_only_the_columns_of_the_batch_are_copied() -> None:
    """Bytes of a steady step, by what the one request that wants something wants."""
    taken = {}
    for wanted in (None, 0, 1, 4):
        running = engine(MODEL, draft_tokens=3, max_num_seqs=3, logprobs=20)
        for i, prompt in enumerate(PROMPTS[:3]):
            running.add(prompt, replace(GREEDY, max_new_tokens=60, logprobs=wanted if i == 1 else None))
        for _ in range(4):
            running.step()
        before = running.device.counters.copy()
        running.step()
        after = running.device.counters
        taken[wanted] = after.bytes_downloaded - before.bytes_downloaded, after.launches - before.launches
    words = {k: len(LogprobHeader) + 2 + 4 * (3 + 2 * (k + 1)) for k in (0, 1, 4)}
    assert {k: taken[k][0] - taken[None][0] for k in words} == {k: 4 * size for k, size in words.items()}
    assert {taken[k][1] - taken[None][1] for k in words} == {2}, "two launches for the tokens, none for drafts"


def test_nothing_is_ranked_for_the_emitted_token_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import polydraft.reference.logprobs as module

    ranked: list[int] = []
    real = module.most_likely

    def counted(z: Any, count: int) -> Any:
        ranked.append(count)
        return real(z, count)

    monkeypatch.setattr(module, "most_likely", counted)
    alone.__wrapped__(Ask(PROMPTS[0], replace(GREEDY, logprobs=0)))
    assert ranked == []
    alone.__wrapped__(Ask(PROMPTS[0], replace(GREEDY, logprobs=2)))
    assert set(ranked) == {2}


def test_an_engine_without_them_has_nothing_of_them() -> None:
    plain, able = (engine(MODEL, draft_tokens=3, logprobs=k) for k in (None, 3))
    assert plain.device.counters.allocations < able.device.counters.allocations
    assert all("logprobs" not in name for name in plain.runner.programs)


def test_wishes_that_cannot_be_met_are_refused() -> None:
    with pytest.raises(RequestError, match="build it with logprobs=2 or more"):
        engine(MODEL).add((1, 2), SamplingParams(logprobs=2))
    with pytest.raises(RequestError, match="prompt_logprobs is 5, wanted at most 3"):
        engine(MODEL, logprobs=3).add((1, 2), SamplingParams(prompt_logprobs=5))
    with pytest.raises(RequestError, match="logprobs is -1"):
        SamplingParams(logprobs=-1)
    with pytest.raises(CapabilityError, match="has 64 tokens; ask for at most as many"):
        engine(MODEL, logprobs=65)
    with pytest.raises(CapabilityError, match="this backend has no keep_logits, top_logprobs"):
        engine(MODEL, logprobs=1, plugin=backend_without("keep_logits", "top_logprobs"))
    assert engine(MODEL, plugin=backend_without(*CONTRACTS)).runner.programs, "an engine without them needs none of them"
    plugin = backend_without(*FILTERS)
    with pytest.raises(CapabilityError, match="no filter_probs, forbid_filtered"):
        engine(MODEL, logprobs=1, logprobs_mode="processed_logprobs", plugin=plugin)
    assert engine(MODEL, logprobs=1, plugin=plugin).runner.programs, "raw ones need no filters"


def test_a_broken_record_ends_its_requests_and_nothing_else() -> None:
    """A record whose header says something else than was asked for is refused whole; the engine serves on."""

    def wrong_version(a: Any, n: int) -> None:
        from polydraft.reference import logprobs

        logprobs.pack_logprobs(a, n)
        a.record[LogprobHeader.VERSION] += 1

    running = engine(MODEL, draft_tokens=2, logprobs=2, plugin=backend_with(pack_logprobs=wrong_version))
    running.add(PROMPTS[0], replace(GREEDY, logprobs=1), id="refused")
    while running.has_work:
        running.step()
    (output,) = running.poll()
    assert output.finish_reason == "error"
    assert "version 2" in output.error
    running.add(PROMPTS[0], replace(GREEDY, logprobs=None), id="served")
    while running.has_work:
        running.step()
    (output,) = running.poll()
    assert output.token_ids == solo(MODEL, 2, PROMPTS[0], replace(GREEDY, logprobs=None)).token_ids


def test_a_kernel_that_mixes_rows_up_is_noticed() -> None:
    """The comparison with the request alone sees numbers of another row."""

    def of_the_next_row(a: Any, n: int) -> None:
        a.logit_start = np.maximum(a.logit_start - 1, 0)
        top_logprobs(a, n)

    running = engine(MODEL, draft_tokens=3, logprobs=TOP, plugin=backend_with(top_logprobs=of_the_next_row))
    outputs = drive(running, ASKS[:2])
    assert any(bits(output) != bits(alone(ask)) for ask, output in zip(ASKS, outputs, strict=False))
