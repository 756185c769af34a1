"""The number of drafts is a value of the step: whatever it is, texts are those of a run that always makes as many.

The policy is drawn for every step, with stretches without drafts; requests arrive, stop, are aborted and preempted, share
prefixes, sample and report log probabilities, on every kind of device, at every depth, with and without graphs. What a proposer
with a cache drafts behind such a stretch is, bit for bit, what it drafts where it never paused.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest

from polydraft import Engine, RequestOutput, SamplingParams
from polydraft import engine as engine_module
from polydraft.config import EngineConfig
from polydraft.conformance.core_faults import no_keep_part
from polydraft.conformance.lossless_checks import Listed
from polydraft.errors import ConfigError
from polydraft.host.adaptive_drafts import AdaptiveDrafts
from polydraft.host.draft_policy import Always, DraftView, Windows, check_policy, ladder
from polydraft.host.rehearsal import Rehearsal
from polydraft.step.graphs import GraphPolicy
from tests.step.test_host_inputs import asks as host_asks
from tests.step.test_host_inputs import masked_plainly, served
from tests.support import host_features, tiny
from tests.support.cpu import needs_kernels
from tests.support.depth import among, crossed
from tests.support.drafting import Drawn, deciding, drawing
from tests.support.programs import WAYS, Program, bits, program
from tests.support.runs import DEVICES, Ask, drive, engine, essence, solo

MODEL = "narrow"
PARAMS = SamplingParams(max_new_tokens=40, ignore_eos=True)
PROMPTS = ((5, 9, 33), (7, 7, 12, 40, 2, 61), (1,), tuple(range(3, 24)))
ASKS = [
    Ask(prompt, replace(PARAMS, temperature=0.8 * (i % 2), seed=i, max_drafts=(None, 2, None, 0)[i]), arrival=2 * i)
    for i, prompt in enumerate(PROMPTS)
]


def same_text(output: RequestOutput, wanted: RequestOutput) -> bool:
    """Whether two results agree in all that does not depend on how many drafts were verified."""
    if output.finish_reason == "abort":
        return output.token_ids == wanted.token_ids[: len(output.token_ids)]
    names = ("token_ids", "text", "finish_reason", "error")
    return all(getattr(output, name) == getattr(wanted, name) for name in names) and bits(output) == bits(wanted)


def is_consistent(served_by: Engine, outputs: list[RequestOutput]) -> None:
    """Totals are those of the requests and of the steps."""
    totals = served_by.totals
    assert sum(totals.drafts_per_step) == totals.steps
    assert totals.accepted == sum(output.accepted for output in outputs)
    assert totals.drafted >= totals.accepted
    assert totals.drafted == sum(totals.drafted_at)


# -- on the emulator -------------------------------------------------------------------------------------------------------
HAPPENED: Counter[str] = Counter()
SEEDS = range(500, 572)
PREEMPTING = (513, 520, 529, 543, 545, 547, 553, 568)
"""In these some request is preempted, which happens in few."""
SHALLOW = {500, 503, 504, *PREEMPTING[3:]}
"""What `make test` takes: one and two programs for each way, most of them of those that are rare."""


def is_lossless(of: Program, depth: int, graph: str) -> None:
    with drawing(of.seed):
        served_by = of.build(depth, graph)
    outputs = of.serve(served_by)
    free = of.options["verify"] != "rejection"  # else a sampled text depends on how many drafts are verified
    for i, (ask, output) in enumerate(zip(of.asks, outputs, strict=True)):
        if free or ask.params.temperature == 0:
            assert same_text(output, of._alone(ask)), f"seed {of.seed}, request {i}, overlap {depth}, graphs {graph}"
        assert output.finish_reason != "error"
    is_consistent(served_by, outputs)
    assert served_by.hazards == ()
    graphs = served_by.runner.graphs
    HAPPENED.update(
        programs=1, preempted=served_by.scheduler.num_preemptions, shared=served_by.ledger.num_hits,
        replayed=graphs.counters.replayed_steps if graphs else 0, accepted=sum(output.accepted for output in outputs),
        numbers=sum(map(bool, served_by.totals.drafts_per_step)), aborted=sum(o.finish_reason == "abort" for o in outputs),
    )  # fmt: skip
    served_by.close()


@pytest.mark.parametrize("seed", among(SHALLOW, SEEDS))
def test_a_program(seed: int) -> None:
    is_lossless(program(seed), *WAYS[seed % len(WAYS)])


def test_the_programs_do_what_they_are_for() -> None:
    """Behind all of the ones above, in the same process."""
    if HAPPENED["programs"] < len(SHALLOW):
        pytest.skip("not all programs ran in this process")
    for name in ("preempted", "shared", "replayed", "accepted", "aborted"):
        assert HAPPENED[name] > 5, name
    assert HAPPENED["numbers"] > 2 * len(SHALLOW)


@pytest.mark.parametrize("seed", among((602,), range(600, 608)))
def test_the_hazard_checker_finds_nothing(seed: int) -> None:
    of = program(seed)
    is_lossless(replace(of, options={**of.options, "sanitize": True}), *WAYS[seed % len(WAYS)])


# -- on other devices ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("proposer", ["auto", "ngram"])
@pytest.mark.parametrize("by", list(DEVICES))
def test_texts_on_a_device(by: str, proposer: str) -> None:
    with drawing(7):
        served_by = engine(MODEL, device=by, draft_tokens=5, max_num_seqs=3, block_size=4, proposer=proposer)
    outputs = drive(served_by, ASKS)
    for ask, output in zip(ASKS, outputs, strict=True):
        assert same_text(output, solo(MODEL, 3, ask.prompt_ids, replace(ask.params, max_drafts=None)))
        assert max(output.round_drafts, default=0) <= (5 if ask.params.max_drafts is None else ask.params.max_drafts)
    is_consistent(served_by, outputs)
    served_by.close()


class Limiting(Always):
    """Each slot verifies so many rows, others in the second half of the run; the step makes all drafts."""

    windows: Windows | None = None

    def choose(self, view: DraftView) -> int:
        if self.windows is None or (view.slots.epoch > self.windows.epochs).any() or view.slots.num_rounds.max() == 9:
            swapped = view.slots.num_rounds.max() >= 9
            self.windows = Windows(np.array([6, 1, 3] if swapped else [1, 3, 6], np.int32), view.slots.epoch.copy())
        return super().choose(view)


@pytest.mark.parametrize("options", [{}, {"graph": "decode", "graph_sizes": (1, 3)}], ids=["eager", "graphs"])
@pytest.mark.parametrize("by", list(DEVICES))
def test_requests_verify_as_many_drafts_as_the_policy_lets_them(by: str, options: dict[str, Any]) -> None:
    options = options if by != "reference" else {}
    with deciding(lambda limits: Limiting(limits.num_drafts)):
        served_by = engine(MODEL, device=by, draft_tokens=5, max_num_seqs=3, block_size=4, **options)
    asks = [Ask(prompt, PARAMS) for prompt in PROMPTS[:3]]
    outputs = drive(served_by, asks)
    for ask, output in zip(asks, outputs, strict=True):
        assert same_text(output, solo(MODEL, 3, ask.prompt_ids, PARAMS))
    early, late = ({max(output.round_drafts[part]) for output in outputs} for part in (slice(1, 5), slice(14, -4)))
    assert early == late == {0, 2, 5}
    assert [max(outputs[0].round_drafts[part]) for part in (slice(1, 5), slice(14, -4))] == [0, 5]
    is_consistent(served_by, outputs)
    served_by.close()


@pytest.mark.parametrize("verify", among(["coupled"], ["greedy", "coupled"]))
@pytest.mark.parametrize("by", among(["lazy-1"], DEVICES))
def test_texts_where_the_policy_adapts(by: str, verify: str) -> None:
    """To times that are drawn, so that it changes its mind often."""
    times = np.random.default_rng(11).lognormal(0.0, 1.5, 10_000).cumsum().tolist()
    asks = [ask for ask in ASKS if verify == "coupled" or ask.params.temperature == 0]
    with deciding(lambda limits: AdaptiveDrafts(limits, clock=iter(times).__next__)):
        served_by = engine(MODEL, device=by, draft_tokens=5, max_num_seqs=3, block_size=4, verify=verify)
    assert isinstance(served_by.draft_policy, AdaptiveDrafts)
    asks = [replace(ask, params=replace(ask.params, max_new_tokens=60)) for ask in asks]
    for ask, output in zip(asks, drive(served_by, asks), strict=True):
        assert same_text(output, solo(MODEL, 3, ask.prompt_ids, replace(ask.params, max_drafts=None)))
    assert sum(map(bool, served_by.totals.drafts_per_step)) > 2
    assert served_by.draft_policy.report()["step_ms"]
    served_by.close()


REHEARSED: dict[str, dict[str, Any]] = {
    "eager": {},
    "graphs": {"graph": "decode", "graph_sizes": (1, 3)},
    "few blocks": {"num_blocks": 5},
}


@pytest.mark.parametrize("how", among(["graphs"], REHEARSED))
@pytest.mark.parametrize("by", among(["lazy-1"], DEVICES))
def test_an_engine_keeps_nothing_of_its_rehearsal_but_times(by: str, how: str) -> None:
    options = {} if by == "reference" and how == "graphs" else REHEARSED[how]
    with mock.patch.object(engine_module, "Rehearsal", partial(Rehearsal, most_s=60.0)):  # however busy this machine is
        served_by = engine(MODEL, device=by, draft_tokens="auto:5", max_num_seqs=3, block_size=4, sanitize=True, **options)
    policy, graphs = served_by.draft_policy, served_by.runner.graphs
    assert isinstance(policy, AdaptiveDrafts)
    assert policy.times.steps[-1].all() or how == "few blocks"
    assert policy.times.limited_steps.any() or how == "few blocks"
    assert served_by.totals.steps == 0
    assert graphs is None or graphs.counters.replayed_steps == graphs.counters.eager_steps == 0
    asks = [replace(ask, prompt_ids=ask.prompt_ids[:6], params=replace(ask.params, max_new_tokens=12)) for ask in ASKS]
    outputs = drive(served_by, asks)
    for ask, output in zip(asks, outputs, strict=True):
        assert same_text(output, solo(MODEL, 3, ask.prompt_ids, replace(ask.params, max_drafts=None)))
    is_consistent(served_by, outputs)
    assert served_by.hazards == ()
    served_by.close()


def test_an_engine_whose_host_fills_inputs_does_not_rehearse() -> None:
    """Its features would take these requests for some that are served."""
    served_by = served("seed=1", proposer="host-suffix", draft_tokens="auto:3")
    assert isinstance(served_by.draft_policy, AdaptiveDrafts)
    assert not served_by.draft_policy.times.known.any()
    served_by.close()


@needs_kernels
@pytest.mark.parametrize("proposer", ["auto", "ngram"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_texts_on_compiled_kernels(overlap: int, proposer: str) -> None:
    from tests.step.test_cpu_backend import cpu_engine

    options: dict[str, Any] = {"max_num_seqs": 3, "block_size": 4, "overlap": overlap, "proposer": proposer}
    found = []
    for seed in (None, 3):
        with drawing(seed) if seed else deciding(lambda limits: Always(limits.num_drafts)):
            served_by = cpu_engine(MODEL, 5, **options)
        found.append(drive(served_by, ASKS))
        served_by.close()
    assert all(same_text(drawn, fixed) for fixed, drawn in zip(*found, strict=True))


@pytest.mark.parametrize("graph", ["off", "decode"])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("proposer", ["host-suffix", "host-fixed"])
def test_texts_where_the_host_drafts(proposer: str, depth: int, graph: str) -> None:
    if proposer == "host-fixed" and depth:
        depth = 0  # it waits for every step
    sizes: dict[str, Any] = {"graph": graph, "graph_sizes": (1, 2, 3)} if graph != "off" else {}
    with drawing(depth):
        served_by = served(f"seed={depth}", proposer=proposer, overlap=depth, **sizes)
    some = host_asks()
    for ask, output in zip(some, drive(served_by, some), strict=True):
        assert same_text(output, solo(MODEL, 0, ask.prompt_ids, ask.params))
    served_by.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_texts_where_masks_follow_the_drafts(depth: int) -> None:
    some = host_asks()
    with drawing(4):
        served_by = served(f"seed={depth}", (host_features.NoRepeats,), overlap=depth)
    outputs = [output for output, ask in zip(drive(served_by, some), some, strict=True) if ask.abort is None]
    assert [output.token_ids for output in outputs] == [one["token_ids"] for one in masked_plainly()]
    served_by.close()


# -- what is drafted behind a stretch without drafts -----------------------------------------------------------------------
def drafts_at(served_by: Engine, asks: list[Ask], who: str) -> dict[int, list[int]]:
    """Drafts of a request on a synchronous device, by how many tokens were known when they were made."""
    found: dict[int, list[int]] = {}
    buffers = served_by.runner.memory.buffers

    def look(_: Engine) -> None:
        request = served_by.requests.get(who)
        if request is not None and request.slot >= 0 and served_by.slots.kv_len[request.slot]:
            slot = request.slot
            drafts = buffers["drafts"].host_array[slot]  # type: ignore[attr-defined]
            known, count = int(served_by.slots.num_known[slot]), int(buffers["draft_len"].host_array[slot])  # type: ignore[attr-defined]
            found[known] = drafts[:count].tolist()

    drive(served_by, asks, each_step=look)
    served_by.close()
    return found


def never_paused(model: str, prompt: tuple[int, ...]) -> dict[int, list[int]]:
    """The drafts behind every single token of a text: made in each step, for a request that lets none be verified, beside one
    that does."""
    beside = Ask((3, 4), replace(PARAMS, max_new_tokens=120))
    quiet = Ask(prompt, replace(PARAMS, max_drafts=0))
    return drafts_at(engine(model, draft_tokens=5, max_num_seqs=2, prefix_cache=False), [quiet, beside], "ask-0")


def with_pauses(model: str, prompt: tuple[int, ...], numbers: tuple[int, ...], **options: Any) -> dict[int, list[int]]:
    with deciding(lambda limits: Listed(numbers, limits.num_drafts)):
        served_by = engine(model, draft_tokens=5, max_num_seqs=2, block_size=4, **options)
    return drafts_at(served_by, [Ask(prompt, PARAMS)], "ask-0")


PAUSES = [(0, 5), (0, 0, 0, 2, 5), (5, 0, 0, 0, 0, 1, 3), (3, 0, 2, 0, 0, 0, 5)]


@pytest.mark.parametrize(("model", "numbers"), crossed(4, ["narrow", "deep", "mirrored", "shared"], PAUSES))
def test_drafts_behind_pauses_are_those_of_a_run_that_never_paused(model: str, numbers: tuple[int, ...]) -> None:
    wanted, found = never_paused(model, PROMPTS[3]), with_pauses(model, PROMPTS[3], numbers, max_batched_tokens=13)
    assert {len(drafts) for drafts in found.values()} >= set(numbers)
    for known, drafts in found.items():
        assert not drafts or drafts == wanted[known][: len(drafts)], f"behind {known} tokens"


def test_blocks_that_were_written_without_drafts_serve_others() -> None:
    """A prompt computed in steps without drafts, and text behind it: another request shares the blocks and drafts from them."""
    prompt = PROMPTS[3]
    with deciding(lambda limits: Listed([0] * 30 + [5] * 1000, limits.num_drafts)):
        served_by = engine(MODEL, draft_tokens=5, max_num_seqs=2, block_size=4)
    asks = [Ask(prompt, replace(PARAMS, max_new_tokens=20)), Ask((), PARAMS)]
    (first,) = drive(served_by, asks[:1])
    longer = (*prompt, *first.token_ids[:18])
    asks = [Ask(longer, replace(PARAMS, max_new_tokens=20))]
    found = drafts_at(served_by, asks, "ask-0")
    assert served_by.ledger.num_hits > len(prompt)
    wanted = never_paused(MODEL, longer)
    assert all(not drafts or drafts == wanted[known][: len(drafts)] for known, drafts in found.items())
    assert sum(map(len, found.values())) > 10


def test_without_the_keep_part_it_would_be_seen() -> None:
    with no_keep_part(), pytest.raises(AssertionError):  # rows that nobody wrote are NaN
        test_drafts_behind_pauses_are_those_of_a_run_that_never_paused("narrow", PAUSES[1])


def test_passes_that_nobody_wants_are_not_launched() -> None:
    with drawing(1):
        programs = engine(MODEL, draft_tokens=5, graph="off").runner.drafts["greedy"]
    assert list(programs) == [0, 1, 2, 3, 5]
    for number, made in programs.items():
        names = "+".join(made.describe()).split("+")
        assert names.count("advance_draft") == names.count("argmax") == number
        assert names.count("rope_kv_write") == max(number, 1), "the keep part writes rows of the cache"
        assert ("paged_attention" in names) == (number > 0)


# -- plans -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("depth", [0, 2])
def test_a_step_verifies_what_the_step_before_has_drafted(depth: int) -> None:
    numbers = (5, 0, 2, 2, 3, 0, 0, 1)
    with deciding(lambda limits: Listed(numbers, limits.num_drafts)):
        served_by = engine(MODEL, device=f"lazy-{depth}", draft_tokens=5, max_num_seqs=2)
    plans: list[Any] = []
    launch = served_by.runner.launch
    served_by.runner.launch = lambda plan: (plans.append(plan), launch(plan))[1]  # type: ignore[method-assign, func-returns-value]
    outputs = drive(served_by, [Ask((1, 2, 3), PARAMS), Ask((4, 5), replace(PARAMS, max_drafts=1))])
    assert [plan.num_drafts for plan in plans] == [numbers[i % len(numbers)] for i in range(len(plans))]
    for before, plan in pairwise(plans):
        assert plan.window == before.num_drafts + 1
        for slot, rows in zip(plan.slots[plan.decode], plan.rows[plan.decode], strict=True):
            assert rows == min(plan.window, (6, 2)[slot])
        if not plan.has_prefill:
            assert plan.num_rows == plan.num_logit_rows == plan.rows.sum()
    assert any(a.slots is b.slots for a, b in pairwise(plans)), "the same windows need no new launch order"
    made = Counter(plan.num_drafts for plan in plans)
    assert served_by.totals.drafts_per_step == [made[number] for number in range(6)]
    assert max(max(output.round_drafts) for output in outputs) > 1


def test_an_engine_that_is_told_nothing_drafts_as_much_as_pays_or_as_its_policy_may() -> None:
    def built(policy: Any = None, **options: Any) -> Engine:
        config = EngineConfig(model=str(tiny.checkpoint(MODEL)), plugins=tiny.PLUGINS, backend="reference", **options)
        return Engine(config, draft_policy=policy)

    usual, fixed, own = built(), built(verify="rejection"), built(Always(2))
    assert (type(usual.draft_policy), usual.draft_policy.rungs) == (AdaptiveDrafts, ladder(5))
    assert (fixed.draft_policy.rungs, own.draft_policy.rungs) == ((3,), (2,))
    assert [one.resolved.limits.num_drafts for one in (usual, fixed, own)] == [5, 3, 2]
    with pytest.raises(ConfigError, match="the draft policy is 7"):
        built(7)
    text, rounds = [], []
    for one in (usual, fixed, own):
        one.add([5, 9, 33], SamplingParams(max_new_tokens=12, ignore_eos=True))
        while one.has_work:
            one.step()
        (output,) = one.poll()
        text.append(output.token_ids)
        rounds.append(max(output.round_drafts))
        one.close()
    assert text[0] == text[1] == text[2]
    assert rounds[1:] == [3, 2]


def test_a_policy_is_held_to_what_the_engine_drafts() -> None:
    limits = engine(MODEL, draft_tokens=3, graph="off").resolved.limits
    assert check_policy(None, limits).rungs == (3,)
    assert check_policy(Drawn(limits, 1), limits).rungs == (0, 1, 2, 3) == ladder(3)
    assert (ladder(0), ladder(1), ladder(7)) == ((0,), (0, 1), (0, 1, 2, 3, 5, 7))
    for wrong in ((), (0, 1), (3, 0), (0, 3, 5), (-1, 3), (0, 0, 3), (0.0, 3), ("a", 3)):
        policy = Always(3)
        policy.rungs = wrong  # type: ignore[assignment]
        with pytest.raises(ConfigError, match="wanted ascending numbers of drafts, the last of them 3"):
            check_policy(policy, limits)
    for nothing in (3, object(), Always):
        with pytest.raises(ConfigError, match="wanted one with `rungs` and `choose`"):
            check_policy(nothing, limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("graph", ["off", "decode"])
@pytest.mark.parametrize("answer", [None, 4, 7, -1, 3.0, "3"])
def test_an_answer_that_is_no_rung_is_refused(answer: Any, graph: str) -> None:
    """In one sentence, with its requests ended; the engine serves others."""
    policy = Listed([3], 5)
    with deciding(lambda limits: policy):
        served_by = engine(MODEL, device="lazy-1", draft_tokens=5, max_num_seqs=1, graph=graph, block_size=4)
    policy._numbers = [3, 3, 3, answer]
    with pytest.raises(ConfigError, match=r"the draft policy chose .*, wanted one of its rungs \(3, 5\); correct its `choose`"):
        drive(served_by, ASKS[:1])
    (output,) = served_by.poll()
    assert output.error.startswith("a step failed: ConfigError: the draft policy chose")
    policy._numbers = [np.int64(5), 3]  # type: ignore[list-item]
    (output,) = drive(served_by, ASKS[:1])
    assert same_text(output, solo(MODEL, 3, ASKS[0].prompt_ids, ASKS[0].params))


# -- graphs ----------------------------------------------------------------------------------------------------------------
def test_every_number_of_drafts_is_replayed_and_the_most_alone_is_captured_where_it_is_fixed() -> None:
    options: dict[str, Any] = {"draft_tokens": 3, "max_num_seqs": 2, "device": "lazy-1", "graph": "decode", "graph_sizes": (1, 2)}
    fixed = engine(MODEL, **options).runner
    assert fixed.graphs is not None
    assert fixed.graphs.counters.captured == 2 * len(fixed.programs)
    assert list(fixed.graphs.held) == [3]
    with drawing(2):
        served_by = engine(MODEL, **options)
    graphs, seen = served_by.runner.graphs, Counter[tuple[int, int]]()
    assert graphs is not None
    assert graphs.counters.captured == 4 * fixed.graphs.counters.captured
    replay = graphs.replay
    graphs.replay = lambda kind, piece, shape: (seen.update([shape]), replay(kind, piece, shape))[1]  # type: ignore[method-assign, func-returns-value]
    outputs = drive(served_by, [Ask((i, 2, 3), replace(PARAMS, max_new_tokens=30 + 10 * i)) for i in range(4)])
    assert {number for _, number in seen} == {0, 1, 2, 3}
    assert [essence(o)["token_ids"] for o in outputs] == [
        solo(MODEL, 3, (i, 2, 3), replace(PARAMS, max_new_tokens=30 + 10 * i)).token_ids for i in range(4)
    ]


def test_what_the_budget_leaves_out_is_replayed_with_more_drafts() -> None:
    options: dict[str, Any] = {"draft_tokens": 3, "max_num_seqs": 2, "device": "lazy-1", "graph": "decode", "graph_sizes": (1, 2)}
    with drawing(2):
        served_by = engine(MODEL, **options)
    graphs = served_by.runner.graphs
    assert graphs is not None
    served_by.runner.capture(GraphPolicy("decode", (1, 2), most_captures=0), graphs.capture, graphs.uncapturable)
    small = served_by.runner.graphs
    assert small is not None
    assert small.held[0].left_out == (1, 2)
    outputs = drive(served_by, ASKS)
    assert small.counters.replayed_steps > 10
    for ask, output in zip(ASKS, outputs, strict=True):
        assert same_text(output, solo(MODEL, 3, ask.prompt_ids, replace(ask.params, max_drafts=None)))
