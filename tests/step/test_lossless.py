"""Lossless: in `invariant` mode a request's text and rounds do not depend on how it was served, on any kind of device.

The text is that of the request alone at K = 0, the rounds are those of the request alone at its K, and both are what the
recomputing oracles find. Elsewhere a token may differ only where the float64 oracle sees a tie.

Programs are random: requests that ask for everything there is arrive, are aborted, share beginnings, run out of blocks and are
preempted, and see their weights replaced. The ledger is audited after every step, and free blocks are filled with NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, currently_in_test_context, event, given, settings
from hypothesis import strategies as st

from polydraft import Engine, RequestOutput, SamplingParams
from polydraft.engine import Running
from polydraft.host.kv_blocks import BlockLedger
from polydraft.host.request import Status
from polydraft.host.slots import SlotTable
from polydraft.program.declare import Admission
from polydraft.sampling.processing import STAGES, ForbiddenTokens
from tests.oracle import CODE_PROMPTS, STOPPING_PROMPT, greedy_rounds
from tests.oracle.processing import ended_by_text, processed, text_of
from tests.support import tiny
from tests.support.depth import among, crossed, deep
from tests.support.poison import poison_free_blocks
from tests.support.progress import Progress
from tests.support.runs import (
    DEVICES,
    ORDERS,
    Ask,
    demo_prompt,
    drive,
    engine,
    essence,
    oracle,
    replay,
    solo,
    solo_moved,
)

KS = range(6)
SAMPLED = (
    SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    SamplingParams(temperature=1.0, top_k=20, seed=2**63 + 5),
    SamplingParams(temperature=1.3, min_p=0.05, top_p=0.9, seed=2**32 - 1),
)


PROMPTS = (*CODE_PROMPTS, STOPPING_PROMPT)
FEW_PROMPTS = (*CODE_PROMPTS[:2], STOPPING_PROMPT)


def note(what: str) -> None:
    """Count it among the events of a random program; `--hypothesis-show-statistics` shows them."""
    if currently_in_test_context():
        event(what)


@dataclass(frozen=True)
class Update:
    """Weights are replaced by those of `tiny.moved(model)` behind step number `step` (from 1)."""

    step: int
    running: Running


def expected(model: str, num_drafts: int, ask: Ask, kept: int | None = None) -> RequestOutput:
    """The request alone; `kept` is how many of its tokens come from before the update, None where all do."""
    if kept is None:
        return solo(model, num_drafts, ask.prompt_ids, ask.params)
    return solo_moved(model, num_drafts, ask.prompt_ids, ask.params, kept)


def check(model: str, num_drafts: int, ask: Ask, got: RequestOutput, kept: int | None = None) -> None:
    """Text of the request alone without drafts, rounds of the request alone with them, both as the oracle has them; of a
    request that was aborted the beginning of that."""
    context = f"{model or 'demo'} K={num_drafts} {ask} kept={kept}"
    alone, plain = (expected(model, k, ask, kept) for k in (num_drafts, 0))
    if got.finish_reason == "abort":
        assert ask.abort is not None, context
        assert got.token_ids == plain.token_ids[: len(got.token_ids)], context
        assert got.rounds == alone.rounds[: len(got.rounds)], context
        assert len(got.token_ids) in {0, 1 + len(got.rounds) + got.accepted}, context
        assert got.text == text_of(got.token_ids), context
        return
    assert got.token_ids == plain.token_ids, context
    assert (got.text, got.finish_reason) == (plain.text, plain.finish_reason), context
    assert essence(got) == essence(alone), context
    if not kept:
        check_against_oracle(model if kept is None else tiny.moved(model), num_drafts, ask, got)


def check_against_oracle(model: str, num_drafts: int, ask: Ask, got: RequestOutput) -> None:
    replayed = replay(model, num_drafts, ask)
    if not replayed.clear:
        note("left out by the oracle: a choice within 1e-4 of another one")
        return
    token_ids, rounds = replayed.token_ids, replayed.rounds
    if ask.params.stop and (end := ended_by_text(token_ids, ask.params)):
        token_ids, rounds = token_ids[: end[0]], up_to(rounds, end[0])
        assert (got.text, got.finish_reason) == (end[1], "stop"), ask
    found = list(got.token_ids), list(got.rounds)
    assert found == (token_ids, rounds), f"{model or 'demo'} K={num_drafts} {ask}"
    if ask.params.temperature == 0 and not ask.params.stop and not changes_logits(ask.params):
        greedy = greedy_rounds(oracle(model), ask.prompt_ids, num_drafts, ask.params.max_new_tokens, ask.stop_ids)
        assert found == (greedy.token_ids, greedy.rounds), "the two oracles differ"


def changes_logits(params: SamplingParams) -> bool:
    """Whether some stage of logits processing is wanted."""
    return any(stage.wants(params) for stage in STAGES)


def up_to(rounds: Sequence[int], num_tokens: int) -> list[int]:
    """The rounds of the first `num_tokens` tokens; the last counts the drafts among them."""
    first = [1 + sum(rounds[:i]) + i for i in range(len(rounds))]  # tokens before each round
    return [min(accepted, num_tokens - before) for accepted, before in zip(rounds, first, strict=True) if before < num_tokens]


# -- random tiny checkpoints -----------------------------------------------------------------------
@dataclass(frozen=True)
class Scene:
    """How a set of requests is served."""

    model: str
    device: str
    num_drafts: int
    options: dict[str, Any]
    asks: tuple[Ask, ...]
    update: Update | None = None

    def run(self, **options: Any) -> tuple[Engine, list[RequestOutput], list[int | None]]:
        """The engine, results, and of each request how many of its tokens come from before the update."""
        served_by = engine(self.model, device=self.device, draft_tokens=self.num_drafts, **self.options, **options)
        steps, kept = 0, dict.fromkeys(range(len(self.asks)))

        def each_step(running: Engine) -> None:
            nonlocal steps
            steps += 1
            poison_free_blocks(running)
            if self.update is not None and steps == self.update.step:
                running.update_weights(tiny.checkpoint(tiny.moved(self.model)), running=self.update.running)
                running.ledger.audit()
                begun = {name: len(r.token_ids) for name, r in running.requests.items() if r.status is Status.WAITING}
                assert self.update.running == "recompute" or not any(begun.values()), "a request that had begun did not finish"
                late = {i: 0 for i, ask in enumerate(self.asks) if ask.arrival >= steps}
                kept.update({i: begun[f"ask-{i}"] for i in kept if f"ask-{i}" in begun} | late)

        outputs = drive(served_by, self.asks, each_step=each_step)
        return served_by, outputs, list(kept.values())


PENALTIES: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.sampled_from((1.3, 0.8)),
    "presence_penalty": st.sampled_from((1.5, -0.7)),
    "frequency_penalty": st.sampled_from((0.8, -0.4)),
}
"""Strong ones, both ways, so that they change texts."""


@st.composite
def params(draw: st.DrawFn, likely: tuple[int, ...], vocab_size: int, *, crowded: bool) -> SamplingParams:
    """Whatever one request may ask for. What names tokens mostly names `likely` ones: the request would write them freely."""
    token_ids = st.sampled_from(likely) | st.integers(1, vocab_size - 1)
    begins = st.integers(0, max(len(likely) - 3, 0))
    runs = st.builds(lambda begin, length: likely[begin : begin + length], begins, st.integers(2, 3))
    words = token_ids.map(lambda token: (token,)) | token_ids.map("w{}".format) | runs
    texts = runs.map(text_of).filter(bool) | token_ids.map("w{} ".format) | st.sampled_from((" w5", "w1", "9 w"))
    given: dict[str, Any] = {
        "max_new_tokens": draw(st.integers(12, 30) if crowded else st.integers(1, 24)),
        "ignore_eos": draw(st.booleans()),
        "stop_token_ids": draw(st.just(()) | st.lists(token_ids, max_size=3).map(tuple)),
        "stop": draw(st.just(()) | st.lists(texts, max_size=2).map(tuple)),
    }
    if draw(st.booleans()):
        given |= {
            "temperature": draw(st.sampled_from((0.6, 1.0, 1.7))),
            "top_k": draw(st.sampled_from((0, 0, 4, 20, 1000))),
            "top_p": draw(st.sampled_from((1.0, 0.9, 0.5))),
            "min_p": draw(st.sampled_from((0.0, 0.02, 0.3))),
            "seed": draw(st.integers(0, 2**64 - 1)),
        }
    processing = PENALTIES | {
        "logit_bias": st.dictionaries(token_ids, st.sampled_from((-100.0, -3.0, 0.5, 2.5)), max_size=4),
        "bad_words": st.lists(words, max_size=4).map(tuple),
        "min_tokens": st.integers(0, given["max_new_tokens"]),
    }
    wanted = draw(st.just(()) | st.lists(st.sampled_from(sorted(processing)), unique=True, max_size=4))
    return SamplingParams(**given, **{name: draw(processing[name]) for name in wanted})


@st.composite
def prompts(draw: st.DrawFn, vocab_size: int, *, crowded: bool) -> tuple[tuple[int, ...], ...]:
    """Prompts of which some begin like an earlier one, so that blocks are shared and rows differ only late, and some fill
    the model (96 tokens) nearly up; a crowd of them is of about one length."""
    lengths = st.integers(6, 24) if crowded else st.integers(1, 40) | st.integers(1, 9) | st.integers(75, 95)
    found: list[list[int]] = []
    for _ in range(draw(st.integers(3, 7) if crowded else st.integers(1, 7))):
        shares = bool(found) and draw(st.booleans())
        beginning = draw(st.sampled_from(found))[: draw(st.integers(0, 30))] if shares else []
        length = draw(lengths) - len(beginning)
        rng = np.random.default_rng(draw(st.integers(0, 2**16)))
        found.append(beginning + rng.integers(0, vocab_size, max(length, 1)).tolist())
    return tuple(map(tuple, found))


def most_blocks(ask: Ask, block_size: int) -> int:
    """Blocks that the request may grow to."""
    return -(-min(len(ask.prompt_ids) + ask.params.max_new_tokens, 96) // block_size)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    model, crowded = draw(st.sampled_from(sorted(tiny.CONFIGS))), draw(st.booleans())
    vocab_size, num_drafts = tiny.CONFIGS[model]["vocab_size"], draw(st.sampled_from(KS))
    slots = draw(st.integers(2, 8) if crowded else st.integers(1, 16))
    asks: list[Ask] = []
    for prompt in draw(prompts(vocab_size, crowded=crowded)):
        likely = solo(model, 0, prompt, SamplingParams(max_new_tokens=16, ignore_eos=True)).token_ids
        arrival = draw(st.integers(0, 5 if crowded else 25))
        abort = draw(st.none() | st.none() | st.integers(arrival, arrival + 40))
        asks.append(Ask(prompt, draw(params(likely, vocab_size, crowded=crowded)), arrival, abort))
    block_size = draw(st.sampled_from((1, 2, 3, 5, 8, 16)))
    options = {
        "max_num_seqs": slots,
        "block_size": block_size,
        "max_batched_tokens": slots * (num_drafts + 1) + draw(st.sampled_from((0, 1, 2, 7, 60))),
        "prefix_cache": draw(st.booleans()),
    }
    if crowded:
        options["num_blocks"] = max(most_blocks(ask, block_size) for ask in asks) + draw(st.integers(0, 8))
    update = draw(st.none() | st.builds(Update, st.integers(1, 40), st.sampled_from(("finish", "recompute"))))
    return Scene(model, draw(st.sampled_from(sorted(DEVICES | ORDERS))), num_drafts, options, tuple(asks), update)


def is_lossless(scene: Scene) -> None:
    served_by, outputs, kept = scene.run()
    for ask, output, before in zip(scene.asks, outputs, kept, strict=True):
        check(scene.model, scene.num_drafts, ask, output, before)
        note(f"a request ended with {output.finish_reason}")
        if before is not None:
            note("weights were replaced " + ("in the middle of a text" if before else "before a text"))
    if served_by.scheduler.num_preemptions:
        note("a request was preempted")
    if served_by.ledger.num_hits:
        note("a beginning was shared")


@functools.cache
def progress(what: str) -> Progress:
    return Progress(what, settings().max_examples)


few = settings(max_examples=2)
many = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@few
@given(scenes())
def test_text_and_rounds_do_not_depend_on_how_a_request_is_served(scene: Scene) -> None:
    is_lossless(scene)


@pytest.mark.deep
@many
@given(scenes())
def test_text_and_rounds_do_not_depend_on_how_a_request_is_served_deep(scene: Scene) -> None:
    is_lossless(scene)
    progress("lossless").tick()


def mixed_asks(model: str, count: int) -> tuple[Ask, ...]:
    """Greedy and sampled requests of all lengths, one of them arriving with every second step."""
    vocab_size = tiny.CONFIGS[model]["vocab_size"]
    kinds = (SamplingParams(), *SAMPLED)
    prompts = [tuple((7 * i * i + 3 * j + 1) % vocab_size for j in range(1 + 5 * i % 23)) for i in range(count)]
    return tuple(Ask(prompt, replace(kinds[i % 4], max_new_tokens=12), 2 * i) for i, prompt in enumerate(prompts))


@pytest.mark.parametrize(("device", "num_drafts"), crossed(6, DEVICES | ORDERS, KS))
def test_every_k_on_every_kind_of_device(device: str, num_drafts: int) -> None:
    """What the property above draws at random, once for each pair, with a batch that fills up and drains."""
    model = sorted(tiny.CONFIGS)[num_drafts % len(tiny.CONFIGS)]
    asks = mixed_asks(model, 6)
    is_lossless(Scene(model, device, num_drafts, {"max_num_seqs": 4, "block_size": 4}, asks))


@pytest.mark.parametrize("batch", among((1, 8, 9), [1, 2, 3, 7, 8, 9, 15, 16]))
def test_every_batch_size(batch: int) -> None:
    """Around the tile of 8 rows in which the invariant products work."""
    is_lossless(Scene("shared", "reference", 2, {"max_num_seqs": batch}, mixed_asks("shared", batch)))


# -- the demo checkpoint ---------------------------------------------------------------------------
def serve_demo(
    device: str, num_drafts: int, num_tokens: int, prompts: Sequence[str] = PROMPTS, **options: Any
) -> tuple[list[Ask], list[RequestOutput]]:
    """The prompts greedily, and the first of them sampled, arriving one by one."""
    served_by = engine(device=device, draft_tokens=num_drafts, **options)
    kinds = [(prompt, SamplingParams()) for prompt in prompts]
    kinds += [(prompt, kind) for prompt, kind in zip(prompts, SAMPLED, strict=False)]
    asks = [Ask(demo_prompt(text), replace(kind, max_new_tokens=num_tokens), 3 * i) for i, (text, kind) in enumerate(kinds)]
    outputs = drive(served_by, asks)
    served_by.close()
    return asks, outputs


def demo_is_lossless(device: str, num_drafts: int, num_tokens: int, **options: Any) -> None:
    asks, outputs = serve_demo(device, num_drafts, num_tokens, **options)
    for ask, output in zip(asks, outputs, strict=True):
        plain = solo("", 0, ask.prompt_ids, ask.params)
        assert (output.token_ids, output.text) == (plain.token_ids, plain.text)
        if ask.params.temperature == 0:
            greedy = greedy_rounds(oracle(""), ask.prompt_ids, num_drafts, num_tokens, ask.stop_ids)
            assert (output.token_ids, output.rounds) == (tuple(greedy.token_ids), tuple(greedy.rounds))
        elif num_drafts:
            assert output.accepted > 0, "no draft of a sampled request was accepted"


@pytest.mark.parametrize(
    ("device", "num_drafts", "options"),
    [
        deep(("lazy-0", 0, {"max_num_seqs": 3, "max_batched_tokens": 3})),
        deep(("reference", 1, {"max_num_seqs": 16, "block_size": 7})),
        deep(("lazy-1", 2, {"max_num_seqs": 1, "max_batched_tokens": 4})),
        deep(("lazy-2", 3, {"max_num_seqs": 5, "block_size": 1, "max_batched_tokens": 27})),
        deep(("reference", 4, {"max_num_seqs": 2, "prefix_cache": False})),
        deep(("lazy-1", 5, {"max_num_seqs": 9, "block_size": 64})),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_demo_checkpoint(device: str, num_drafts: int, options: dict[str, Any]) -> None:
    demo_is_lossless(device, num_drafts, 8, prompts=FEW_PROMPTS, **options)


@pytest.mark.deep
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_drafts", KS)
def test_demo_checkpoint_deep(device: str, num_drafts: int) -> None:
    """Every K and every device with each batch; all three for each pair would take three times as long and show no more."""
    batches = {"max_num_seqs": 1}, {"max_num_seqs": 4, "block_size": 5, "max_batched_tokens": 29}, {"max_num_seqs": 16}
    demo_is_lossless(device, num_drafts, 128, **batches[(num_drafts + [*DEVICES].index(device)) % 3])


@pytest.mark.parametrize("device", ["lazy-1", deep("reference")])
def test_demo_drafts_of_sampled_requests_are_accepted_as_the_oracle_accepts_them(device: str) -> None:
    asks, outputs = serve_demo(device, 3, 8, FEW_PROMPTS)
    for ask, output in zip(asks[-3:], outputs[-3:], strict=True):
        check_against_oracle("", 3, ask, output)


@pytest.mark.deep
@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_demo_drafts_of_sampled_requests_are_accepted_as_the_oracle_accepts_them_deep(num_drafts: int) -> None:
    for device in DEVICES:
        asks, outputs = serve_demo(device, num_drafts, 64)
        for ask, output in zip(asks[-3:], outputs[-3:], strict=True):
            check_against_oracle("", num_drafts, ask, output)


# -- the default mode ------------------------------------------------------------------------------
TIE = 1e-3


def count_ties(model: str, ask: Ask, output: RequestOutput, kept: int | None = None) -> int:
    """Tokens that differ from the oracle's choice behind the very same prefix; each must be a tie of the oracle's.

    The prefix is the engine's own text, so a comparison goes on behind a tie instead of ending with it."""
    if not output.token_ids:
        return 0
    begin, known = len(ask.prompt_ids), [*ask.prompt_ids, *output.token_ids]
    judges = [oracle(name) for name in ([model] if kept is None else [model, tiny.moved(model)])]
    before, *moved = (judge.target_logits(judge.target_states(known[:-1])[begin - 1 :]) for judge in judges)
    logits = [*before[:kept], *moved[0][kept:]] if moved else before
    ties = 0
    for position, (token_id, row) in enumerate(zip(output.token_ids, logits, strict=True), begin):
        row = processed(row, ask.prompt_ids, known[begin:position], ask.params)  # noqa: PLW2901
        chosen, clear = ask.sampling.choose(row, position, tolerance=TIE)
        if token_id != chosen:
            assert not clear, f"position {position} of {ask}: {token_id} instead of {chosen}, which is no tie"
            ties += 1
    return ties


@pytest.mark.deep
@pytest.mark.parametrize(("num_drafts", "slots"), [(0, 8), (2, 1), (3, 8), (5, 16)])
def test_demo_prompts_have_no_tie_in_the_default_mode(num_drafts: int, slots: int) -> None:
    asks, outputs = serve_demo("reference", num_drafts, 48, invariant=False, max_num_seqs=slots)
    ties = [count_ties("", ask, output) for ask, output in zip(asks, outputs, strict=True)]
    assert ties == [0] * len(asks)


def only_ties_differ(scene: Scene) -> None:
    _, outputs, kept = scene.run(invariant=False)
    for ask, output, before in zip(scene.asks, outputs, kept, strict=True):
        note(f"{count_ties(scene.model, ask, output, before)} ties in a request")


@few
@given(scenes())
def test_default_mode_differs_only_at_ties(scene: Scene) -> None:
    only_ties_differ(scene)


@pytest.mark.deep
@many
@given(scenes())
def test_default_mode_differs_only_at_ties_deep(scene: Scene) -> None:
    only_ties_differ(scene)
    progress("only ties differ").tick()


# -- these tests can fail --------------------------------------------------------------------------
def scene_of_everything(running: Running = "recompute") -> Scene:
    """Six requests that share a beginning, want processing and stops, do not fit together, and see other weights."""
    beginning = (3, 9, 4, 11, 5, 2)
    kinds = (
        {"presence_penalty": 1.5, "frequency_penalty": 0.8},
        {"min_tokens": 24, "stop_token_ids": (57, 42, 63, 47, 8, 19, 9, 1, 39, 28, 18, 3, 13, 49)},
        {"bad_words": ("w13", (18, 3), (57,)), "logit_bias": {5: 2.5}},
        {"repetition_penalty": 1.3, "stop": ("w56 w40 ", " w99")},
        {"temperature": 1.0, "seed": 7, "presence_penalty": 0.5},
        {"min_tokens": 6, "stop": ("w",)},
    )
    each = [SamplingParams(**{"max_new_tokens": 26, "ignore_eos": True, **kind}) for kind in kinds]  # type: ignore[arg-type]
    asks = tuple(Ask((*beginning, 20 + i // 2), given, i // 2, 12 if i == 2 else None) for i, given in enumerate(each))
    options = {"max_num_seqs": 4, "block_size": 2, "num_blocks": 34, "max_batched_tokens": 40}
    return Scene("narrow", "lazy-1", 2, options, asks, Update(14, running))


def no_least_length(admission: Admission) -> int:
    return 0 if admission.request.token_ids else admission.params.min_tokens


def one_block_less(self: BlockLedger, slot: int, genuine: Any = BlockLedger.release) -> None:
    held = self.num_granted[slot] > 0
    genuine(self, slot)
    self._num_free -= int(held)


def same_key_for_any_next_token(self: BlockLedger, before: bytes, tokens: Any, index: int) -> bytes:
    start = index * self.block_size
    return before + tokens[start : start + self.block_size].tobytes()


FAULTS: dict[str, tuple[Any, ...]] = {
    "a resumed request may stop at once": (
        ForbiddenTokens,
        "columns",
        tuple(replace(c, value=no_least_length) if c.name == "min_tokens" else c for c in ForbiddenTokens.columns),
    ),
    "a preempted request keeps no tokens": (SlotTable, "sync", lambda self, request: None),
    "a block is lost": (BlockLedger, "release", one_block_less),
    "a block is shared whatever comes behind it": (BlockLedger, "_key", same_key_for_any_next_token),
    "rows of the old weights are shared": (BlockLedger, "forget_all", lambda self: None),
    "a stop string lies within one token": ("polydraft.output.detokenizer.StopStrings.held_back", lambda self, text: 0),
}
"""Faults of the host, as attributes of its classes and modules: a random program must be able to bring them to light."""


@pytest.mark.parametrize("running", ["finish", "recompute"])
def test_the_scene_of_everything_has_everything(running: Running) -> None:
    scene = scene_of_everything(running)
    served_by, outputs, kept = scene.run()
    assert served_by.scheduler.num_preemptions > 0
    assert served_by.ledger.num_hits > 0
    assert {out.finish_reason for out in outputs} == {"stop", "length", "abort"}
    assert any(before is None for before in kept)
    assert any(before is not None and (before > 0) == (running == "recompute") for before in kept)
    is_lossless(scene)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_host_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_of_everything()
    is_lossless(scene)  # which also remembers what each request is alone
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        is_lossless(scene)


def test_a_wrong_token_that_is_no_tie_is_found() -> None:
    ask = Ask(demo_prompt(PROMPTS[0]), SamplingParams(max_new_tokens=6))
    right = solo("", 0, ask.prompt_ids, ask.params)
    wrong: Sequence[int] = (*right.token_ids[:3], right.token_ids[3] + 1, *right.token_ids[4:])
    with pytest.raises(AssertionError, match="no tie"):
        count_ties("", ask, replace(right, token_ids=tuple(wrong)))


@pytest.mark.deep  # `test_mtp_options.py` has every convention
def test_a_draft_head_with_another_convention_shows_in_the_rounds_alone() -> None:
    """The demo's head run with its halves swapped (as DeepSeek's are): every token stays, nearly every draft goes."""
    ask = Ask(demo_prompt(PROMPTS[0]), SamplingParams(max_new_tokens=20))
    right = solo("", 3, ask.prompt_ids, ask.params)
    swapped = engine(draft_tokens=3)
    weight = swapped.runner.memory.weights["mtp.0.proj"].array  # type: ignore[attr-defined]
    half = weight.shape[1] // 2
    weight[:] = weight[:, [*range(half, 2 * half), *range(half)]]
    wrong = drive(swapped, [ask])[0]
    assert wrong.token_ids == right.token_ids
    assert wrong.rounds != right.rounds
