"""Limits of thinking and reply: the text is the one of plain decoding under the same limits, in whole steps, whatever serves it.

Plain decoding is held against a float64 oracle with a few naive lines. Kernels that forget the drafts of a window, or what a step
has committed, are shown to be noticed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polydraft import LLM, Engine, RequestOutput, SamplingParams
from polydraft.conformance.oracle.coupled import coupled_rounds
from polydraft.errors import CapabilityError, RequestError
from polydraft.output.output_processor import OutputProcessor
from polydraft.reference.thinking import commit_thinking, limit_thinking
from polydraft.sampling.thinking import ForcedPlaces, Markers, Thinking
from tests.oracle.processing import processed
from tests.oracle.thinking import allowed, limited
from tests.support import tiny
from tests.support.cpu import needs_kernels
from tests.support.depth import crossed
from tests.support.emulator import Emulator
from tests.support.kernel_doubles import backend_with
from tests.support.of_ranks import on_one_core
from tests.support.plugin_doubles import backend_without
from tests.support.runs import Ask, drive, engine, oracle, solo

START, END, SPELT = (7,), (11, 12), (9, 11, 12, 30)
AROUND: dict[str, Any] = {"think_start_ids": START, "think_end_ids": END, "think_forced_ids": SPELT}
OFTEN = {11: 6.0, 12: 7.0, 0: -100.0}
"""A bias with which thinking ends of its own accord, and the text does not."""
NEVER = {0: -100.0, 11: -100.0}
"""And one with which it does not, and the end has to be forced against it."""
CASES: dict[str, dict[str, Any]] = {
    "at once": {"thinking_limit": 0, "reply_budget": 4, "logit_bias": NEVER},
    "forced": {"thinking_limit": 5, "reply_budget": 7, "logit_bias": NEVER},
    "natural": {"thinking_limit": 30, "reply_budget": 3, "logit_bias": OFTEN},
    "start": {"thinking_limit": 6, "reply_start_token_ids": (40, 13, 57), "logit_bias": NEVER},
    "natural start": {"reply_start_token_ids": (13,), "reply_budget": 9, "logit_bias": OFTEN},
    "no reply": {"thinking_limit": 8, "reply_budget": 0, "stop_token_ids": (33,), "ignore_eos": True},
    "processed": {
        "thinking_limit": 9,
        "reply_budget": 5,
        "repetition_penalty": 1.3,
        "bad_words": ["w9", (11, 12)],
        "min_tokens": 24,
    },
    "sampled": {"thinking_limit": 7, "reply_budget": 6, "temperature": 0.9, "seed": 4, "logit_bias": NEVER},
    "sampled natural": {
        "thinking_limit": 25,
        "reply_start_token_ids": (3, 4, 5),
        "temperature": 1.2,
        "seed": 8,
        "logit_bias": OFTEN,
    },
    "one of many": {"thinking_limit": 3, "reply_start_token_ids": tuple(range(1, 33)), "temperature": 2.0, "seed": 2},
}
PROMPTS = ((5, *START, 9), (*START, 3, 20), (*START, 11, 12, 4, *START), (44, *START))


def prompt_of(name: str) -> tuple[int, ...]:
    return PROMPTS[list(CASES).index(name) % len(PROMPTS)]


def params(name: str, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 32, **CASES[name], **more})


def thinking(device: str = "reference", **options: Any) -> Engine:
    return engine("narrow", device=device, **{**AROUND, **options})


def emulated(query: str, **options: Any) -> Engine:
    given = {"model": str(tiny.checkpoint("narrow")), "plugins": tiny.PLUGINS, "invariant": True, **AROUND, **options}
    return LLM(plugin=Emulator(f"emulator:0?{query}"), **given).engine


@functools.cache
def plain(name: str) -> RequestOutput:
    """Plain decoding under the same limits."""
    return drive(thinking(draft_tokens=0, max_num_seqs=1), [Ask(prompt_of(name), params(name))])[0]


# -- texts --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_drafts", [0, 3, 5])
@pytest.mark.parametrize("name", CASES)
def test_texts_and_rounds_are_those_of_the_recomputing_oracle(name: str, num_drafts: int) -> None:
    p, begin = params(name), len(prompt_of(name))
    stops = (*(() if p.ignore_eos else (0,)), *p.stop_token_ids)

    def process(logits: Any, known: Any) -> Any:
        may = allowed(known[:begin], known[begin:], p, start=START, end=END, spelt=SPELT, stop=stops[0])
        return limited(processed(logits, known[:begin], known[begin:], p), may)

    ask = Ask(prompt_of(name), p)
    wanted = coupled_rounds(oracle("narrow"), ask.prompt_ids, ask.sampling, num_drafts, p.max_new_tokens, stops, process)
    assert wanted.clear
    output = drive(thinking(draft_tokens=num_drafts), [ask])[0]
    assert (list(output.token_ids), list(output.rounds)) == (wanted.token_ids, wanted.rounds)
    assert output.error == ""


SERVED: dict[str, Callable[..., Engine]] = {
    "reference": thinking,
    "lazy-1": functools.partial(thinking, "lazy-1"),
    "lazy-2": functools.partial(thinking, "lazy-2"),
    "lazy-seeded": functools.partial(thinking, "lazy-seeded"),
    "emulator": functools.partial(emulated, "seed=5&policy=reversed", overlap=1, graph="off"),
    "graphs": functools.partial(emulated, "seed=6", overlap=1, graph="decode"),
}


@pytest.mark.parametrize(("served_by", "num_drafts"), crossed(3, SERVED, (3, 5, 0)))
def test_the_text_is_the_one_of_plain_decoding(served_by: str, num_drafts: int) -> None:
    """All limits at once, beside requests without any, some of them again with their prompt's blocks shared."""
    running = SERVED[served_by](draft_tokens=num_drafts, max_num_seqs=4, block_size=4)
    free = SamplingParams(max_new_tokens=20, ignore_eos=True)
    asks = [Ask(prompt_of(name), params(name), arrival=i) for i, name in enumerate(CASES)]
    outputs = drive(running, [*asks, Ask(PROMPTS[0], free), *asks[:4]])
    for name, output in zip([*CASES, "", *list(CASES)[:4]], outputs, strict=True):
        if name:
            assert (output.token_ids, output.forced) == (plain(name).token_ids, plain(name).forced), name
    assert outputs[len(CASES)].token_ids == solo("narrow", 0, PROMPTS[0], free).token_ids
    assert not num_drafts or sum(output.accepted for output in outputs) > 10


@needs_kernels
@pytest.mark.parametrize("num_drafts", [0, 3, 5])
def test_compiled_kernels_write_what_the_reference_writes(num_drafts: int) -> None:
    asks = [(prompt_of(name), params(name)) for name in CASES]
    served = LLM(backend="cpu", model=str(tiny.checkpoint("narrow")), plugins=tiny.PLUGINS, draft_tokens=num_drafts, **AROUND)
    outputs = served.generate([prompt for prompt, _ in asks], [given for _, given in asks])
    assert [output.token_ids for output in outputs] == [plain(name).token_ids for name in CASES]
    served.close()


@functools.lru_cache(maxsize=4096)
def plainly(prompt: tuple[int, ...], asked: SamplingParams) -> RequestOutput:
    """A request alone, decoded plainly."""
    return drive(_alone(), [Ask(prompt, asked)])[0]


@functools.cache
def _alone() -> Engine:
    return thinking(draft_tokens=0, max_num_seqs=1, prefix_cache=False)


def drawn(rng: np.random.Generator) -> Ask:
    """A request with limits or without, whose thinking may end of its own accord or be made to."""

    def maybe(chance: float, value: Any) -> Any:
        return value if rng.random() < chance else None

    bias: dict[int, float] = [OFTEN, NEVER, {0: -100.0}, {}][rng.integers(0, 4)]
    wish: dict[str, Any] = {
        "max_new_tokens": int(rng.integers(1, 40)), "logit_bias": bias, "thinking_limit": maybe(0.7, int(rng.integers(0, 16))),
        "reply_budget": maybe(0.5, int(rng.integers(0, 9))), "temperature": float(rng.choice([0.0, 0.0, 0.9])),
        "reply_start_token_ids": maybe(0.4, tuple(rng.integers(1, 64, rng.integers(1, 5)).tolist())) or (),
        "seed": int(rng.integers(0, 99)), "repetition_penalty": maybe(0.2, 1.3) or 1.0,
        "max_drafts": maybe(0.2, int(rng.integers(0, 4))),
    }  # fmt: skip
    prompt = (*rng.integers(1, 64, rng.integers(1, 12)).tolist(), *([*START] if rng.random() < 0.8 else []))
    return Ask(prompt, SamplingParams(**wish), arrival=int(rng.integers(0, 16)))


def is_as_alone(seed: int) -> None:
    """Requests beside each other on any device, with few blocks, arrivals in the middle, and weights replaced by the same."""
    rng = np.random.default_rng(seed)
    asks = [drawn(rng) for _ in range(int(rng.integers(3, 9)))]
    most = max(-(-(len(ask.prompt_ids) + ask.params.max_new_tokens) // 4) for ask in asks)
    served = SERVED[[*SERVED][rng.integers(0, len(SERVED))]](
        draft_tokens=int(rng.integers(0, 6)), max_num_seqs=int(rng.integers(1, 6)), block_size=4,
        num_blocks=most + int(rng.integers(0, 24)), prefix_cache=bool(rng.random() < 0.5),
    )  # fmt: skip
    update, steps = int(rng.integers(1, 60)), 0

    def each_step(running: Engine) -> None:
        nonlocal steps
        steps += 1
        if steps == update:
            running.update_weights(tiny.checkpoint("narrow"), running="recompute")

    for ask, output in zip(asks, drive(served, asks, each_step=each_step), strict=True):
        wanted = plainly(ask.prompt_ids, ask.params)
        assert (output.token_ids, output.forced, output.error) == (wanted.token_ids, wanted.forced, ""), ask


@settings(max_examples=1)
@given(st.integers(0, 2**32 - 1))
def test_limits_hold_however_requests_are_served(seed: int) -> None:
    is_as_alone(seed)


@pytest.mark.deep
@given(st.integers(0, 2**32 - 1))
def test_limits_hold_however_requests_are_served_deep(seed: int) -> None:
    is_as_alone(seed)


@pytest.mark.parametrize("device", ["reference", "lazy-1"])
def test_a_preempted_request_goes_on_where_it_was(device: str) -> None:
    asks = [Ask(prompt_of(name), params(name)) for name in CASES]
    asks += [Ask(prompt, SamplingParams(max_new_tokens=60, ignore_eos=True)) for prompt in PROMPTS]
    tight = thinking(device, draft_tokens=3, max_num_seqs=7, block_size=4, num_blocks=26, prefix_cache=False)
    for name, output in zip(CASES, drive(tight, asks), strict=False):
        assert output.token_ids == plain(name).token_ids, name
    assert tight.scheduler.num_preemptions > 2


def test_a_shared_prefix_is_hit_by_texts_that_think() -> None:
    long = (*range(1, 7), *range(20, 34), *START)
    served = thinking(draft_tokens=3, block_size=4)
    first, second = (drive(served, [Ask(long, params("forced"))])[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert served.ledger.num_hits > 0


def test_ranks_keep_to_the_same_limits() -> None:
    asks = [(prompt_of(name), params(name)) for name in CASES]
    options: dict[str, Any] = {"model": str(tiny.checkpoint("narrow")), "plugins": tiny.PLUGINS, "draft_tokens": 3, **AROUND}
    with on_one_core():
        split = LLM(backend="reference", tensor_parallel=2, **options)
        outputs = split.generate([prompt for prompt, _ in asks], [given for _, given in asks])
        split.close()
    assert [output.token_ids for output in outputs] == [plain(name).token_ids for name in CASES]


def test_rejection_verification_keeps_limits_too() -> None:
    served = thinking(draft_tokens=3, verify="rejection")
    for seed in range(6):
        out = drive(served, [Ask(PROMPTS[0], params("sampled", seed=seed))])[0].token_ids
        assert out[7:11] == SPELT
        assert (len(out), out[-1]) == (7 + 4 + 6 + 1, 0)


@pytest.mark.parametrize("limit", [0, 3, 9])
def test_a_prompt_that_does_not_think_is_not_bound_by_the_limit(limit: int) -> None:
    for prompt in ((5, 9), (*START, 3, *END, 9)):
        free = drive(engine("narrow", draft_tokens=3), [Ask(prompt, SamplingParams(max_new_tokens=12, ignore_eos=True))])[0]
        ask = Ask(prompt, SamplingParams(max_new_tokens=12, ignore_eos=True, thinking_limit=limit))
        assert drive(thinking(draft_tokens=3), [ask])[0].token_ids == free.token_ids


def test_without_a_beginning_every_text_thinks() -> None:
    out = drive(thinking(draft_tokens=3, think_start_ids=()), [Ask((5, 9), params("forced"))])[0].token_ids
    assert out[5:9] == SPELT


# -- kernels that are wrong ---------------------------------------------------------------------------------------------
def forgets_drafts(a: Any, n: int) -> None:
    """Every row of a window stands where the committed text ends."""
    known = a.prompt_len[a.row_slot[:n]] + a.num_generated[a.row_slot[:n]]
    limit_thinking(
        replace_fields(a, positions=np.minimum(a.positions, known[: len(a.positions)].max(initial=0) - 1 - a.ahead)), n
    )


def replace_fields(a: Any, **fields: Any) -> Any:
    """The arguments with some fields replaced."""
    return type("Fields", (), {name: getattr(a, name) for name in dir(a) if not name.startswith("__")} | fields)


def commits_nothing(a: Any, n: int) -> None:
    """Where thinking has ended is never noted."""


def commits_late(a: Any, n: int) -> None:
    """The last token of a window is not looked at."""
    commit_thinking(replace_fields(a, out_len=np.maximum(a.out_len - 1, 0), num_generated=a.num_generated - 1), n)


@pytest.mark.parametrize(
    ("contract", "wrong"),
    [("limit_thinking", forgets_drafts), ("commit_thinking", commits_nothing), ("commit_thinking", commits_late)],
)
def test_a_wrong_kernel_is_noticed(contract: str, wrong: Callable[[Any, int], None]) -> None:
    served = thinking(draft_tokens=3, max_num_seqs=1, plugin=backend_with(**{contract: wrong}))
    different = 0
    for name in CASES:
        served.add(prompt_of(name), params(name))
        try:
            while served.has_work:
                served.step()
            different += served.poll()[0].token_ids != plain(name).token_ids
        except IndexError:  # a text behind all that is to be spelt
            different += 1
    assert different


# -- steps --------------------------------------------------------------------------------------------------------------
def test_steps_are_whole_graphs_and_upload_nothing() -> None:
    served = emulated("seed=6", overlap=1, graph="decode", draft_tokens=3)
    served.add(PROMPTS[0], params("forced", thinking_limit=40, reply_budget=None, max_new_tokens=60))
    for _ in range(4):
        served.step()
    before = served.device.counters.copy()
    for _ in range(3):
        served.step()
    assert served.device.counters.uploads == before.uploads
    graphs = served.runner.graphs
    assert graphs is not None
    assert graphs.whole
    assert (graphs.counters.eager_steps, graphs.counters.replayed_steps) == (1, 6)


def test_steps_in_which_nobody_thinks_launch_nothing_of_it() -> None:
    served = thinking(draft_tokens=3)
    for name, programs in served.runner.programs.items():
        counts = {
            part: tuple(program.describe().count(one) for one in ("limit_thinking", "commit_thinking"))
            for part, program in programs.items()
        }
        assert counts == ({"target": (1, 1), "draft": (3, 0)} if ".processed" in name else {"target": (0, 0), "draft": (0, 0)})
    assert "limit_thinking" not in {
        one
        for programs in engine("narrow").runner.programs.values()
        for program in programs.values()
        for one in program.describe()
    }


# -- results ------------------------------------------------------------------------------------------------------------
def test_forced_tokens_say_so_and_each_place_is_told_once() -> None:
    served, told, num_tokens = thinking(draft_tokens=3), list[int](), 0
    served.add(prompt_of("forced"), params("forced"), id="7", stream=True)
    processor = OutputProcessor(served.tokenizer)
    while served.has_work:
        served.step()
        for delta in processor.deltas(served.take()):
            assert all(num_tokens <= place < num_tokens + len(delta.token_ids) for place in delta.forced.tolist())
            told, num_tokens = told + delta.forced.tolist(), num_tokens + len(delta.token_ids)
    assert tuple(told) == plain("forced").forced == (*range(5, 9), 16)
    assert plain("natural start").forced[0] == plain("natural start").token_ids.index(12) + 1
    assert [t.source for t in plain("forced").tokens].count("forced") == 5


def test_forced_places_of_a_growing_text_are_those_of_the_whole() -> None:
    rng = np.random.default_rng(3)
    for _ in range(300):
        limit, reply = (None if rng.random() < 0.3 else int(rng.integers(0, 9)) for _ in range(2))
        starts = tuple(int(token) for token in rng.integers(0, 3, rng.integers(0, 3)))
        given = Thinking(Markers((7,), (1, 2), (0, 1, 2)), limit, reply, starts)
        prompt, text = [(7,), (7, 1, 2), (5,), (1, 2, 7)][rng.integers(0, 4)], rng.integers(0, 3, 14).tolist()
        p = SamplingParams(thinking_limit=limit, reply_budget=reply, reply_start_token_ids=starts)
        for place in range(len(text)):  # a text that keeps to its limits
            may = allowed(prompt, text[:place], p, start=(7,), end=(1, 2), spelt=(0, 1, 2), stop=0)
            if may is not None and text[place] not in may:
                text[place] = min(may)
        wanted = [
            place for place in range(len(text))
            if len(allowed(prompt, text[:place], p, start=(7,), end=(1, 2), spelt=(0, 1, 2), stop=0) or (0, 0)) == 1
        ]  # fmt: skip
        places, size = ForcedPlaces(given, prompt), 0
        while size < len(text):
            size = min(size + int(rng.integers(1, 5)), len(text))
            assert places.of(text[:size]) == [place for place in wanted if place < size]
        array = np.array(text, np.int32)
        for size in range(len(text) + 1):
            reply_from = given.reply_from(prompt, array[:size])
            assert given.forced(reply_from, size) == [place for place in wanted if place < size]


# -- refusals -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"thinking_limit": 3}, "does not know what ends thinking"),
        ({"reply_budget": 3}, "reply_budget was given, but the engine does not know what ends thinking"),
        ({"reply_start_token_ids": (3,)}, "reply_start_token_ids was given, but the engine does not know"),
    ],
)
def test_an_engine_that_knows_no_end_says_so(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine("narrow").add((1, 2), SamplingParams(**wish))


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"reply_budget": 3, "ignore_eos": True}, "no token ends the request"),
        ({"reply_start_token_ids": (3, 64)}, "reply_start_token_ids names token id 64, wanted at most 63"),
    ],
)
def test_a_limit_that_cannot_be_kept_is_refused(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        thinking().add(PROMPTS[0], SamplingParams(**wish))


@pytest.mark.parametrize(
    "wish", [{"thinking_limit": -1}, {"reply_budget": 1.5}, {"reply_start_token_ids": (-1,)}, {"reply_start_token_ids": "5"}]
)
def test_a_malformed_wish_is_refused(wish: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="correct the request"):
        SamplingParams(**wish)
    with pytest.raises(RequestError, match="reply_start_token_ids has 33 token ids, wanted at most 32"):
        SamplingParams(reply_start_token_ids=tuple(range(33)))


def test_tokens_that_do_not_end_thinking_are_refused() -> None:
    for options in ({"think_end_ids": (64,)}, {"think_end_ids": (1, 2), "think_forced_ids": (2, 1)}, {"think_forced_ids": (2,)}):
        with pytest.raises(CapabilityError, match="think_end_ids"):
            engine("narrow", **options)


def test_a_backend_without_the_contracts_serves_all_others() -> None:
    served = thinking(plugin=backend_without("limit_thinking", "commit_thinking"))
    with pytest.raises(RequestError, match="the request wants thinking limits, but this backend has no limit_thinking"):
        served.add(PROMPTS[0], params("forced"))
    assert drive(served, [Ask((5, 9), SamplingParams(max_new_tokens=5, presence_penalty=1))])[0].token_ids
