"""The contract's cases are enough and the kernel does what they say; texts, rounds and states depend on nothing but the text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polydraft import LLM, SamplingParams
from polydraft.conformance.adequacy import audit
from polydraft.conformance.harness import check_kernel
from polydraft.conformance.oracle import greedy_rounds
from polydraft.contracts import REGISTRY
from polydraft.contracts.docs import render
from polydraft.contracts.inputs import default_cases
from polydraft.device import Array
from polydraft.errors import CapabilityError, DeviceError
from polydraft.reference.device import ReferenceDevice
from polydraft_emulator import Emulator
from polydraft_gated_delta import numpy_kernels
from polydraft_gated_delta.contract import CONTRACT, advanced
from polydraft_gated_delta.testing import DK, DV, HEADS, NaiveModel, write
from tests.support.cpu import needs_kernels
from tests.support.depth import among, crossed, first
from tests.support.poison import paged_buffers, poison_free_blocks
from tests.support.runs import Ask, drive

FAMILY, KERNELS = "polydraft_gated_delta", "polydraft_gated_delta.numpy_kernels"
COMMON = [5, 9, 11, 7, 3, 8, 21, 30, 4]
PROMPTS = [COMMON, [*COMMON[:8], 6, 2], [40, 41, 42], [*COMMON, 12], [*COMMON, 12], list(range(1, 38))]
NEW, BLOCK = 36, 4
MTP = {"attention": 3, "gated_delta": 4}
"""Layers of the target by the kind of the MTP layer, which is like the last of them."""
QUEUED: dict[str, Any] = {"backend": "reference", "device": "queued"}


# Contracts are registered for the whole process. These tests share theirs with those of polydraft, which look at the registry.
REGISTRY.remove(CONTRACT.name)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    REGISTRY.add(CONTRACT)
    yield
    REGISTRY.remove(CONTRACT.name)


# -- the contract ----------------------------------------------------------------------------------------
def test_every_mutant_of_the_golden_dies() -> None:
    report = audit(CONTRACT)
    assert report.ok, report.describe()


@pytest.mark.parametrize("case", list(default_cases(CONTRACT)), ids=lambda case: case.name)
def test_the_kernel_does_what_the_golden_does(case: Any) -> None:
    device = ReferenceDevice()
    compared = check_kernel(CONTRACT, case, device, numpy_kernels.polydraft_kernels(device))
    assert compared.ok, compared.describe()


def test_the_page_of_the_contract_has_every_argument() -> None:
    page = render(CONTRACT)
    assert all(f"`{name}`" in page for name in CONTRACT.args.specs())


def test_the_rule_by_hand() -> None:
    """One head, DK = 2, DV = 1, a key along the first axis; gates of 0 are alpha = beta = 1/2: 8/2 - 8/4 + 6/2 = 5, 4/2 = 2."""
    behind = advanced(np.array([[[8.0, 4.0]]]), np.array([3.0, 0.0, 6.0, 0.0, 0.0]))
    assert np.allclose(behind, [[[5.0, 2.0]]], atol=1e-5)


# -- the family ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {mtp: write(tmp_path_factory.mktemp(mtp), num_layers=layers) for mtp, layers in MTP.items()}


def load(model: Path, **options: Any) -> LLM:
    own: dict[str, Any] = {
        "backend": "reference",
        "block_size": BLOCK,
        "max_num_seqs": 3,
        "invariant": True,
        "plugins": (FAMILY, KERNELS),
    }
    return LLM(model=str(model), **(own | options))


def serve(llm: LLM, temperature: float = 0.0, **params: Any) -> list[tuple[list[int], list[int]]]:
    """Tokens and rounds of all prompts."""
    asked = SamplingParams(max_new_tokens=NEW, temperature=temperature, seed=11, ignore_eos=True, **params)
    return [(list(output.token_ids), list(output.rounds)) for output in llm.generate(PROMPTS, asked)]


@cache
def naive_model(model: Path) -> NaiveModel:
    """It remembers the texts that it has worked out."""
    return NaiveModel(model)


@cache
def alone(model: Path, drafts: int, temperature: float) -> list[tuple[list[int], list[int]]]:
    """One after the other, nothing shared, whole prompts."""
    return serve(load(model, draft_tokens=drafts, max_num_seqs=1, prefix_cache=False), temperature)


@pytest.mark.parametrize(("mtp", "drafts"), among([("gated_delta", 3)], itertools.product(MTP, [0, 1, 3])))
def test_texts_and_rounds_are_those_of_the_naive_model(models: dict[str, Path], mtp: str, drafts: int) -> None:
    naive = naive_model(models[mtp])
    wanted = [greedy_rounds(naive, prompt, drafts, NEW, ()) for prompt in PROMPTS]
    assert min(min(one.margins) for one in wanted) > 1e-3, "no choice is close"
    assert alone(models[mtp], drafts, 0.0) == [(one.token_ids, one.rounds) for one in wanted]
    accepted = {count for one in wanted for count in one.rounds}
    assert accepted == set(range(drafts + 1)), "every number of accepted drafts occurs"


WAYS: list[dict[str, Any]] = [
    {"draft_tokens": 3},
    {"draft_tokens": 0},
    {"draft_tokens": 3, "prefix_cache": False, "max_batched_tokens": 12},
    {"draft_tokens": 3, "max_batched_tokens": 17, "max_num_seqs": 4},
    {"draft_tokens": 3, "max_batched_tokens": 13, "block_size": 1},
    {"draft_tokens": 3, "block_size": 16, "max_num_seqs": 6, "prefix_cache": False},
    {"draft_tokens": 3, "num_blocks": 26},
    {"draft_tokens": 1, "num_blocks": 25, "prefix_cache": False},
    {"draft_tokens": 2, "sanitize": True},
    {**QUEUED, "draft_tokens": 3, "overlap": 0, "graph": "off"},
    {**QUEUED, "draft_tokens": 3, "overlap": 1, "graph": "off", "num_blocks": 28},
    {**QUEUED, "draft_tokens": 3, "overlap": 0, "graph": "decode"},
    {**QUEUED, "draft_tokens": 3, "overlap": 1, "graph": "decode", "num_blocks": 26},
    {**QUEUED, "draft_tokens": 1, "overlap": 2, "graph": "decode", "max_batched_tokens": 12},
]
DRAFTING = [("attention", 0.0), ("gated_delta", 0.0), ("gated_delta", 0.9)]


@pytest.mark.parametrize(("drafting", "options"), crossed(16, DRAFTING, WAYS), ids=str)
def test_texts_and_rounds_depend_on_nothing_else(
    models: dict[str, Path], drafting: tuple[str, float], options: dict[str, Any]
) -> None:
    mtp, temperature = drafting
    llm = load(models[mtp], **options)
    got = serve(llm, temperature)
    assert got == alone(models[mtp], options["draft_tokens"], temperature)
    assert [text for text, _ in got] == [text for text, _ in alone(models[mtp], 0, temperature)]
    engine = llm.engine
    assert bool(engine.ledger.num_hits) == options.get("prefix_cache", True)
    assert bool(engine.scheduler.num_preemptions) == ("num_blocks" in options)


@pytest.mark.deep
def test_graphs_of_prefills_too(models: dict[str, Path]) -> None:
    llm = load(models["gated_delta"], **QUEUED, draft_tokens=3, overlap=1, graph="prefill", graph_sizes=(4, 12, 24))
    assert serve(llm) == alone(models["gated_delta"], 3, 0.0)


@pytest.mark.parametrize(
    "query", first(1, ["seed=2&policy=reversed&rows=seeded", "seed=1&policy=lazy", "seed=3&rows=prefill-first"])
)
@pytest.mark.parametrize("overlap", among([1], [0, 1]))
def test_the_emulator(models: dict[str, Path], query: str, overlap: int) -> None:
    llm = LLM(
        model=str(models["gated_delta"]), plugin=Emulator(f"emulator:0?{query}"), plugins=(FAMILY, KERNELS), draft_tokens=3,
        overlap=overlap, graph="decode", num_blocks=28, block_size=BLOCK, max_num_seqs=3, invariant=True,
    )  # fmt: skip
    asks = [Ask(tuple(prompt), SamplingParams(max_new_tokens=NEW, seed=11, ignore_eos=True)) for prompt in PROMPTS]
    outputs = drive(llm.engine, asks, each_step=poison_free_blocks)
    assert [(list(output.token_ids), list(output.rounds)) for output in outputs] == alone(models["gated_delta"], 3, 0.0)
    assert set(paged_buffers(llm.engine)) == {f"{layer}.borders" for layer in ("layers.0", "layers.1", "layers.3", "mtp.0")}
    llm.close()


@needs_kernels
@pytest.mark.parametrize("mtp", MTP)
@pytest.mark.parametrize("options", [{}, {"num_blocks": 26}, {"graph": "off", "overlap": 2}, {"device": "cpu?queue=0"}], ids=str)
def test_the_cpu_backend(models: dict[str, Path], mtp: str, options: dict[str, Any]) -> None:
    """By default its steps are overlapped and replayed whole."""
    llm = load(models[mtp], backend="cpu", draft_tokens=3, **options)
    assert serve(llm) == alone(models[mtp], 3, 0.0)
    llm.close()


@pytest.mark.deep
def test_neighbours_that_never_draft(models: dict[str, Path]) -> None:
    """A pass of the draft is not launched where nobody wants one, and its state is then behind; it matters to nobody."""
    llm = load(models["gated_delta"], draft_tokens=3, max_num_seqs=6)
    asked = [SamplingParams(max_new_tokens=NEW, ignore_eos=True, max_drafts=0 if i % 2 else None) for i in range(len(PROMPTS))]
    for _ in range(2):
        got = [(list(output.token_ids), list(output.rounds)) for output in llm.generate(PROMPTS, asked)]
        for i, (text, rounds) in enumerate(alone(models["gated_delta"], 3, 0.0)):
            assert got[i] == (text, [0] * (NEW - 1) if i % 2 else rounds)
        plain = llm.generate(PROMPTS[0], SamplingParams(max_new_tokens=9, max_drafts=0, ignore_eos=True))
        assert list(plain[0].token_ids) == alone(models["gated_delta"], 3, 0.0)[0][0][:9]


def held(llm: LLM, layer: str, name: str) -> Array:
    return np.array(llm.engine.runner.memory.buffers[f"{layer}.{name}"].host_array)  # type: ignore[attr-defined]


def wrong_states(llm: LLM, naive: NaiveModel, texts: list[list[int]]) -> list[str]:
    """Where the states of slots, and those at the borders of their blocks, are not the naive model's. Text i was in slot i."""
    table = np.array(llm.engine.runner.memory.buffers["block_table"].host_array)  # type: ignore[attr-defined]
    wrong = []
    for slot, text in enumerate(texts):
        naive.target_states(text)
        for layer in (name for name in naive.states if name.startswith("layers")):
            length, states = int(held(llm, layer, "state_len")[slot]), naive.states[layer]
            assert len(text) - 1 - llm.engine.resolved.limits.window <= length < len(text)
            if not np.allclose(held(llm, layer, "state")[slot], states[length - 1], atol=1e-4):
                wrong.append(f"{layer}.state[{slot}]")
            ends = range(BLOCK - 1, len(text) - 1, BLOCK)
            borders = held(llm, layer, "borders")[table[slot, : len(ends)]]
            if not np.allclose(borders, states[list(ends)], atol=1e-4):
                wrong.append(f"{layer}.borders of slot {slot}")
    return wrong


@pytest.mark.parametrize("mtp", MTP)
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_states_are_those_of_the_naive_model(models: dict[str, Path], mtp: str, drafts: int) -> None:
    llm = load(models[mtp], draft_tokens=drafts, max_num_seqs=len(PROMPTS))
    texts = [[*prompt, *text] for prompt, (text, _) in zip(PROMPTS, serve(llm), strict=True)]
    assert wrong_states(llm, naive_model(models[mtp]), texts) == []


def test_a_state_that_has_seen_rejected_rows_is_noticed(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, run = models["gated_delta"], numpy_kernels._run

    def hasty(a: Any, slot: int, rows: Array) -> None:
        """The state takes the rows of a window at once."""
        run(a, slot, rows)
        end = a.positions[rows[-1]] + 1
        for p in range(a.state_len[slot], end):
            numpy_kernels._advance(a.state[slot], a.ring[slot, p % a.ring.shape[1]])
        a.state_len[slot] = end

    right = {drafts: alone(model, drafts, 0.0) for drafts in (0, 3)}
    monkeypatch.setattr(numpy_kernels, "_run", hasty)
    assert serve(load(model, draft_tokens=0, block_size=16)) == right[0], "without drafts no row is rejected"
    llm = load(model, draft_tokens=3, block_size=16, max_num_seqs=len(PROMPTS))
    spoilt = serve(llm)
    assert [text for text, _ in spoilt] != [text for text, _ in right[0]]
    device = ReferenceDevice()
    table = numpy_kernels.polydraft_kernels(device)
    failed = {case.name for case in CONTRACT.cases() if not check_kernel(CONTRACT, case, device, table).ok}
    assert {"accepted_rows_reach_the_state", "drafted_rows_stay_out"} <= failed


def test_what_the_cache_costs_and_what_a_hit_is_worth(models: dict[str, Path]) -> None:
    engine = load(models["attention"], draft_tokens=2).engine
    decided = {decision.name: decision for decision in engine.resolved.decisions}
    state, ring = HEADS * DV * DK, 3 * HEADS * (DK + DV + 2)
    assert decided["slot_state_bytes"].chosen == 2 * 3 * 4 * (state + 1 + ring)
    attention = 2 * (2 * 2 * 8) * BLOCK  # of layer 3 and the MTP layer: keys and values of 2 heads of 8
    assert decided["kv_cache_bytes"].chosen == engine.resolved.limits.num_blocks * 4 * (attention + 2 * state)
    assert decided["prefix_cache"].chosen is True
    for layer, allocated in (("layers.0", True), ("layers.1", True), ("layers.2", False), ("mtp.0", False)):
        assert (f"{layer}.ring" in engine.runner.memory.buffers) == allocated


@pytest.mark.deep
def test_a_repeated_prompt_computes_its_last_block_alone(models: dict[str, Path]) -> None:
    llm = load(models["gated_delta"], draft_tokens=3)
    first, second = (serve(llm) for _ in range(2))
    assert first == second == alone(models["gated_delta"], 3, 0.0)
    hits = llm.engine.ledger.num_hits
    llm.generate(PROMPTS[-1], SamplingParams(max_new_tokens=1))
    assert llm.engine.ledger.num_hits - hits == 36, "of 37 tokens"


def test_without_the_kernel_it_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(CapabilityError, match=r"launch what backend reference does not own: gated_delta"):
        load(models["attention"], plugins=(FAMILY,))


def test_a_device_that_runs_no_kernel_in_numpy_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"^gated_delta has a kernel in NumPy, got the device gpu:0; give"):
        numpy_kernels.polydraft_kernels(SimpleNamespace(spec="gpu:0"))
