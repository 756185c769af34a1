"""EAGLE-3: in every published layout drafts and rounds are those of a naive recomputation, and no text depends on them.

Planted faults in taps, in the keep part and in what is fed back are seen by the comparison of drafts."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from polydraft_emulator import Emulator

from polydraft import Engine, RequestOutput, SamplingParams
from polydraft.cli import main
from polydraft.config import EngineConfig
from polydraft.conformance.core_faults import taps_of_other_rows, taps_of_the_layer_before, taps_that_go_on
from polydraft.conformance.lossless_checks import Listed
from polydraft.conformance.oracle.checkpoints import write_checkpoint
from polydraft.errors import CapabilityError, CheckpointError, ConfigError, DeviceError
from polydraft.host.draft_policy import ladder
from polydraft.instruments.record_file import read
from polydraft.models import Checkpoint
from polydraft.proposers import eagle3_model
from polydraft.proposers.eagle3 import NEWEST, Eagle3Proposer
from polydraft.reference.device import ReferenceDevice
from tests.oracle.eagle3 import Eagle3Oracle
from tests.support.cpu import needs_kernels
from tests.support.depth import crossed, deep, first
from tests.support.eagle3 import pair
from tests.support.runs import Ask, drafts_at, drive, essence
from tools.make_eagle3 import (
    LAYOUTS,
    PART,
    SUCCESSOR,
    TARGETS,
    draft_config,
    draft_tensors,
    tables,
    target_tensors,
    write_draft,
)

SOMETIMES, ALWAYS, HARDLY = 0.02, 0.0, 0.5
"""Noise of pairs whose drafts are right about every other time, always, and hardly ever."""
PROMPTS = ((5, 9, 33), tuple(range(3, 24)), (1,), (*range(3, 24), 7, 7))
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "coupled": {"temperature": 1.0, "top_p": 0.95}}
QUEUED: dict[str, Any] = {"device": "queued"}
GRAPHS: dict[str, Any] = {"graph": "decode", "graph_sizes": (1, 3)}
WAYS: dict[str, dict[str, Any]] = {
    "chunks": {"max_batched_tokens": 13},
    "no shared blocks": {"prefix_cache": False},
    "preemption": {"num_blocks": 12},
    "overlap 1": {**QUEUED, "overlap": 1},
    "overlap 2": {**QUEUED, "overlap": 2, "max_batched_tokens": 13},
    "graphs": {**QUEUED, **GRAPHS, "overlap": 0},
    "graphs, overlap": {**QUEUED, **GRAPHS, "overlap": 1},
    "hazards": {**QUEUED, "overlap": 1, "sanitize": True},
    "emulator": {"emulator": "seed=3&policy=reversed", "overlap": 2},
    "emulator, graphs": {"emulator": "seed=5&policy=lazy", **GRAPHS, "overlap": 1, "num_blocks": 16},
}
SYNCHRONOUS = [way for way, options in WAYS.items() if options.keys().isdisjoint(("device", "emulator"))]


def engine(
    of: tuple[Path, Path], draft_tokens: int = 3, *, numbers: Sequence[int] = (), emulator: str = "", hybrid: bool = False,
    **options: Any,
) -> Engine:  # fmt: skip
    """An engine on a target and its draft model; `numbers` of drafts in its steps, again and again, () for always the most."""
    target, draft_model = of
    options = {"model": str(target), "draft_tokens": draft_tokens, "max_num_seqs": 3, "block_size": 4, **options}
    if draft_tokens:
        options |= {"proposer": "hybrid" if hybrid else "eagle3", "draft_model": str(draft_model)}
    config = {"backend": "reference", "invariant": True, "graph": "off", **options}
    policy = Listed(numbers, draft_tokens) if numbers else None
    backend = Emulator(f"emulator:0?{emulator}") if emulator else None
    return Engine(EngineConfig.from_mapping(config), backend=backend, draft_policy=policy)


def asks(max_new_tokens: int = 18, **sampling: Any) -> tuple[Ask, ...]:
    """Requests that arrive one after the other; the last has the beginning of the second's prompt."""
    params = [SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True, seed=i, **sampling) for i in range(len(PROMPTS))]
    return tuple(Ask(prompt, one, arrival=3 * i) for i, (prompt, one) in enumerate(zip(PROMPTS, params, strict=True)))


@functools.cache
def oracle(of: tuple[Path, Path]) -> Eagle3Oracle:
    return Eagle3Oracle(*of)


@functools.cache
def alone(of: tuple[Path, Path], draft_tokens: int, some: tuple[Ask, ...], **options: Any) -> list[RequestOutput]:
    """Each request by itself, on the synchronous device."""
    served_by = engine(of, draft_tokens, max_num_seqs=1, prefix_cache=False, **options)
    return [drive(served_by, [Ask(ask.prompt_ids, ask.params)])[0] for ask in some]


# -- rounds ----------------------------------------------------------------------------------------------------------------
def are_those_of_the_oracle(of: tuple[Path, Path], outputs: Sequence[RequestOutput], num_drafts: int, **sampling: Any) -> int:
    """Texts and rounds; returns how many drafts were accepted."""
    some = asks(16, **sampling)
    for ask, output in zip(some, outputs, strict=True):
        wanted = oracle(of).rounds(ask.prompt_ids, ask.sampling, num_drafts, 16)
        if wanted.clear:  # else it is a matter of rounding
            assert (list(output.token_ids), list(output.rounds)) == (wanted.token_ids, wanted.rounds)
    return sum(output.accepted for output in outputs)


@pytest.mark.parametrize(("layout", "num_drafts", "sampling"), crossed(23, LAYOUTS, range(6), SAMPLINGS))
def test_rounds(layout: str, num_drafts: int, sampling: str) -> None:
    of = pair(layout, SOMETIMES)
    served_by = engine(of, num_drafts)
    outputs = drive(served_by, asks(16, **SAMPLINGS[sampling]))
    accepted = are_those_of_the_oracle(of, outputs, num_drafts, **SAMPLINGS[sampling])
    assert accepted > 5 or not num_drafts
    served_by.close()


@pytest.mark.parametrize(("family", "sampling"), crossed(7, TARGETS, SAMPLINGS))
def test_rounds_beside_targets_of_every_family(family: str, sampling: str) -> None:
    of = pair("sglang", SOMETIMES, family=family)
    outputs = drive(engine(of), asks(16, **SAMPLINGS[sampling]))
    assert are_those_of_the_oracle(of, outputs, 3, **SAMPLINGS[sampling]) > 5


@pytest.mark.parametrize(("way", "layout", "sampling"), crossed(29, WAYS, LAYOUTS, SAMPLINGS))
def test_rounds_however_they_are_served(way: str, layout: str, sampling: str) -> None:
    of = pair(layout, SOMETIMES)
    served_by = engine(of, **WAYS[way])
    outputs = drive(served_by, asks(16, **SAMPLINGS[sampling]))
    assert are_those_of_the_oracle(of, outputs, 3, **SAMPLINGS[sampling]) > 5
    assert served_by.hazards == ()
    happened(served_by, way)
    served_by.close()


def happened(served_by: Engine, way: str) -> None:
    """What the way is for has taken place."""
    graphs = served_by.runner.graphs
    assert bool(graphs and graphs.counters.replayed_steps) == ("graphs" in way)
    if way in {"chunks", "hazards"}:
        assert served_by.ledger.num_hits > 5
    if way == "preemption":
        assert served_by.scheduler.num_preemptions


@needs_kernels
@pytest.mark.parametrize(("layout", "sampling"), crossed(19, LAYOUTS, SAMPLINGS))
def test_rounds_of_compiled_kernels(layout: str, sampling: str) -> None:
    of = pair(layout, SOMETIMES)
    outputs = drive(engine(of, backend="cpu"), asks(16, **SAMPLINGS[sampling]))
    assert are_those_of_the_oracle(of, outputs, 3, **SAMPLINGS[sampling]) > 5


# -- texts -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("way", "sampling", "layout"), crossed(13, WAYS, SAMPLINGS, ["sglang", "3.1, speculators"]))
def test_texts_where_every_step_draws_its_number_of_drafts(way: str, sampling: str, layout: str) -> None:
    """Bit for bit those of plain decoding."""
    of, some = pair(layout, SOMETIMES), asks(**SAMPLINGS[sampling])
    served_by = engine(of, numbers=random.Random(3).choices(ladder(3), k=200), **WAYS[way])
    outputs = drive(served_by, some)
    assert [output.token_ids for output in outputs] == [one.token_ids for one in alone(of, 0, some)]
    assert sum(output.accepted for output in outputs) > 5
    assert served_by.hazards == ()


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("sglang, all tokens", {}),
        ("sglang", {**QUEUED, **GRAPHS, "overlap": 1}),
        ("3.1", {"emulator": "seed=2", "overlap": 1}),
    ],
)
def test_rejection(layout: str, options: dict[str, Any]) -> None:
    """Greedy texts are those of plain decoding, sampled ones those of the request alone."""
    of, sampled = pair(layout, SOMETIMES), asks(**SAMPLINGS["coupled"])
    greedy = drive(engine(of, verify="rejection", **options), asks())
    assert [output.token_ids for output in greedy] == [one.token_ids for one in alone(of, 0, asks())]
    outputs = drive(engine(of, verify="rejection", **options), sampled)
    assert [essence(output) for output in outputs] == [essence(one) for one in alone(of, 3, sampled, verify="rejection")]
    assert sum(output.accepted for output in outputs) > 20


@pytest.mark.parametrize(("layout", "draft_tokens"), crossed(17, LAYOUTS, range(1, 6)))
def test_a_draft_model_that_is_always_right(layout: str, draft_tokens: int) -> None:
    """Every round has all drafts, unless the token is not one of those that are drafted."""
    num_tokens = 1 + 3 * (draft_tokens + 1)
    served_by = engine(pair(layout, ALWAYS), draft_tokens)
    for ask, output in zip(some := asks(num_tokens), drive(served_by, some), strict=True):
        text = [*ask.prompt_ids[-1:], *output.token_ids]
        assert text[1:] == [SUCCESSOR[token] for token in text[:-1]]
        if not LAYOUTS[layout].part:
            assert output.rounds == (draft_tokens,) * 3


# -- drafts ----------------------------------------------------------------------------------------------------------------
def are_as_recomputed(of: tuple[Path, Path], served_by: Engine, num_tokens: int = 12) -> set[int]:
    """Every draft, the wrong ones too; returns the tokens that were drafted."""
    found, compared = drafts_at(served_by, asks(num_tokens)), 0
    for known, drafts in found.items():
        wanted, clear = oracle(of).drafts(known, len(drafts))
        if clear:
            assert drafts == wanted, f"behind {len(known)} tokens"
            compared += len(drafts)
    assert compared > 40
    return {token for drafts in found.values() for token in drafts}


@pytest.mark.parametrize(("layout", "way"), crossed(7, LAYOUTS, SYNCHRONOUS))
def test_drafts(layout: str, way: str) -> None:
    of = pair(layout, HARDLY)
    drafted = are_as_recomputed(of, engine(of, **WAYS[way]))
    assert len(drafted) > 5
    assert drafted <= set(PART) or not LAYOUTS[layout].part


PAUSES = [(0, 5), (0, 0, 0, 2, 5), (5, 0, 0, 0, 0, 1, 3)]


def behind_pauses(layout: str, numbers: tuple[int, ...]) -> None:
    of = pair(layout, HARDLY)
    are_as_recomputed(of, engine(of, 5, numbers=numbers, max_batched_tokens=20), 20)


@pytest.mark.parametrize(
    ("layout", "numbers"), list(zip(["speculators, two layers", "3.1, speculators", "sglang"], PAUSES, strict=True))
)
def test_drafts_behind_steps_without_drafts(layout: str, numbers: tuple[int, ...]) -> None:
    behind_pauses(layout, numbers)


def test_passes_that_nobody_wants_are_not_launched() -> None:
    programs = engine(pair("sglang", SOMETIMES), 5, numbers=ladder(5)).runner.drafts["greedy"]
    for number, made in programs.items():
        names = "+".join(made.describe()).split("+")
        assert names.count("advance_draft") == names.count("argmax") == names.count("paged_attention") == number
        assert names.count("rope_kv_write") == max(number, 1), "the keep part writes rows of the cache"


# -- beside a lookup ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        deep(("sglang", {})),
        ("wide", {"proposer_options": ("model_drafts=2", "min_token_prob=0"), "check_draft_state": 0.5}),
        ("3.1, speculators", {**QUEUED, **GRAPHS, "overlap": 1}),
        deep(("3.1", {"emulator": "seed=2", "overlap": 1})),
    ],
)
@pytest.mark.parametrize("sampling", first(1, SAMPLINGS))
def test_texts_with_a_lookup(layout: str, options: dict[str, Any], sampling: str) -> None:
    """Every request comes twice, so that what was written before is found."""
    of, some = pair(layout, SOMETIMES), asks(**SAMPLINGS[sampling])
    again = tuple(Ask(ask.prompt_ids, ask.params, arrival=40 + ask.arrival) for ask in some)
    served_by = engine(of, 5, hybrid=True, **{"proposer_options": ("min_token_prob=0",), **options})
    outputs = drive(served_by, [*some, *again])
    assert [output.token_ids for output in outputs] == 2 * [one.token_ids for one in alone(of, 0, some)]
    sources = [record.source for output in outputs for record in output.tokens]
    assert min(sources.count("draft"), sources.count("lookup")) > 5
    assert served_by.hazards == ()
    served_by.close()


# -- weights ---------------------------------------------------------------------------------------------------------------
def test_drafts_of_a_target_with_other_weights() -> None:
    (target, draft_model), (other, _) = pair("3.1", HARDLY), pair("3.1", HARDLY, seed=1)
    served_by = engine((target, draft_model))
    served_by.update_weights(other)
    are_as_recomputed((other, draft_model), served_by)


def named(directory: Path) -> dict[str, Any]:
    """The tensors of a draft model, in memory."""
    with Checkpoint(directory) as opened:
        return {name: opened.integers(name) if name in eagle3_model.TABLES else opened.tensor(name) for name in opened.names()}


@pytest.mark.parametrize("kind", ["directory", "arrays"])
def test_drafts_of_another_draft_model(kind: str) -> None:
    """It comes with the target's weights, and is checked before either is written."""
    of, (other, other_draft) = pair("speculators", HARDLY), pair("speculators", HARDLY, seed=1)
    served_by = engine(of)
    arrays = named(other_draft)
    with pytest.raises(CheckpointError, match="fc"):
        served_by.update_weights(other, draft={name: value for name, value in arrays.items() if "fc" not in name})
    are_as_recomputed(of, served_by)
    served_by.update_weights(other, draft=other_draft if kind == "directory" else arrays)
    are_as_recomputed((other, other_draft), served_by)


@pytest.mark.parametrize(("layout", "own"), [("speculators", False), ("tied", True), ("sglang", False)])
def test_an_embedding_that_is_the_targets_is_kept_once(layout: str, own: bool) -> None:
    served_by = engine(pair(layout, SOMETIMES))
    assert ("eagle3.embed" in served_by.runner.memory.weights) == own


def test_an_embedding_that_is_kept_once_cannot_become_two() -> None:
    of, (other, _), (_, foreign) = (pair("speculators", HARDLY, seed=seed) for seed in range(3))
    served_by = engine(of)
    for draft in (foreign, named(of[1])):
        with pytest.raises(CheckpointError, match=r"embed_tokens.weight is another than embed of the target, .* engine$"):
            served_by.update_weights(other, draft=draft)
    without = {name: value for name, value in named(of[1]).items() if name != "embed_tokens.weight"}
    served_by.update_weights(of[0], draft=without)
    are_as_recomputed(of, served_by)


def test_drafts_behind_sleep() -> None:
    """Weights are dropped, and read anew: both models' own, and what they share."""
    of = pair("speculators", HARDLY)
    served_by = engine(of, enable_sleep_mode=True)
    drive(served_by, asks(4))
    served_by.sleep(2)
    served_by.wake_up()
    are_as_recomputed(of, served_by)


def test_a_draft_model_that_does_not_fit_is_refused_before_it_is_read() -> None:
    of = pair("3.1", ALWAYS)
    own = eagle3_model.Eagle3Model.read(str(of[1]), engine(of).model).weights().nbytes("f32")
    with Checkpoint(of[0]) as opened:
        target = 4 * sum(opened.tensor(name).size for name in opened.names())
    for free, refused in ((target + own, False), (target + own - 1, True)):
        with mock.patch.object(ReferenceDevice, "free_memory", lambda _, free=free: free, create=True):
            if refused:
                with pytest.raises(DeviceError, match=r"without the .* of the draft model they fit: --proposer none"):
                    engine(of)
            else:
                with pytest.raises(DeviceError, match="KV blocks take"):
                    engine(of)


def test_a_record_is_replayed_without_the_draft_model(tmp_path: Path) -> None:
    """Its weights lie in the record; those of the target come from the target."""
    target, draft_model = pair("sglang", SOMETIMES)
    run = tmp_path / "run.safetensors"
    options = ["--backend", "reference", "--model", str(target)]
    drafting = ["--proposer", "eagle3", "--draft-model", str(draft_model), "--draft-tokens", "3"]
    assert status("generate", "w5 w6 w7", *options, *drafting, "--max-new-tokens", "8", "--record", str(run)) == 0
    assert {name for name, weight in read(run).weights.items() if weight.key} >= {"eagle3.fc.0", "eagle3.layers.0.qkv"}
    assert status("replay", str(run), *options) == 0


def status(*command: str) -> Any:
    """The exit status of `polydraft` with these arguments."""
    with pytest.raises(SystemExit) as exit_:
        main.main(list(command))
    return exit_.value.code or 0


# -- draft state -----------------------------------------------------------------------------------------------------------
ON_AND_OFF = random.Random(1).choices((0, 3, 3), k=300)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("sglang", {}),
        ("3.1, speculators", {"max_batched_tokens": 13, "prefix_cache": False}),
        ("speculators, two layers", {**QUEUED, **GRAPHS, "overlap": 1}),
        ("3.1", {"emulator": "seed=5&policy=lazy", "overlap": 1}),
    ],
)
def test_draft_state_is_that_of_the_text(layout: str, options: dict[str, Any]) -> None:
    served_by = engine(of := pair(layout, SOMETIMES), numbers=ON_AND_OFF, check_draft_state=1.0, **options)
    outputs = drive(served_by, some := asks(48))
    assert [output.token_ids for output in outputs] == [one.token_ids for one in alone(of, 0, some)]
    assert served_by.draft_state is not None
    assert served_by.draft_state.compared.checked > 3
    assert served_by.draft_state.compared.differed == 0
    served_by.close()


def test_draft_state_shows_a_missing_keep_part() -> None:
    with no_keep_part():
        served_by = engine(pair("sglang", SOMETIMES), numbers=ON_AND_OFF, check_draft_state=1.0)
        drive(served_by, asks(48))
    assert served_by.draft_state is not None
    assert served_by.draft_state.compared.differed > 0


# -- planted faults ----------------------------------------------------------------------------------------------------------
@contextmanager
def no_keep_part() -> Iterator[None]:
    append = Eagle3Proposer.append

    def silent(self: Eagle3Proposer, program: Any, num_drafts: int) -> None:
        if num_drafts:
            append(self, program, num_drafts)
        else:
            program.add("begin_draft", "seqs", "begin_draft", num_drafts=0)

    with mock.patch.object(Eagle3Proposer, "append", silent):
        yield


def points_are(**changed: str) -> AbstractContextManager[Any]:
    """Some points, by those that they take the places of."""
    right = eagle3_model._points
    names = {name.replace("_", " "): to for name, to in changed.items()}
    return mock.patch.object(
        eagle3_model, "_points", lambda *args: tuple(names.get(point, point) for point in right(*args))
    )  # fmt: skip


@contextmanager
def state_is_stale() -> Iterator[None]:
    """What a later pass goes on from is the row that it began with, not its own output."""
    pass_ = Eagle3Proposer._pass

    def stale(self: Eagle3Proposer, program: Any, index: int, stage: str, **keep: Any) -> None:
        if index:
            program.add("select_last_rows", "seqs", "fault", hidden="eagle3.rows", out=NEWEST)
        pass_(self, program, index, stage, **keep)

    with mock.patch.object(Eagle3Proposer, "_pass", stale):
        yield


FAULTS: dict[str, tuple[Any, str]] = {
    "tap of the layer before": (taps_of_the_layer_before, "vllm"),
    "tap of the layer after": (lambda: points_are(layer_2="layer 3"), "vllm"),
    "taps in another order": (lambda: points_are(layer_1="layer 4", layer_4="layer 1"), "3.1"),
    "tap behind the norm": (lambda: points_are(layer_5="final"), "vllm"),
    "taps of other rows": (taps_of_other_rows, "sglang"),
    "taps that are no copies": (taps_that_go_on, "sglang"),
    "state that is fed back": (state_is_stale, "sglang"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_would_be_seen(fault: str) -> None:
    """By a comparison of drafts; no text shows it."""
    broken, layout = FAULTS[fault]
    of = pair(layout, HARDLY)
    with broken():
        served_by = engine(of)
    with pytest.raises(AssertionError, match="behind"):
        are_as_recomputed(of, served_by)


def test_a_missing_keep_part_would_be_seen() -> None:
    with no_keep_part(), pytest.raises(AssertionError, match="behind"):
        behind_pauses("sglang", PAUSES[1])


# -- what is said and refused --------------------------------------------------------------------------------------------------
def test_what_is_tapped_is_told() -> None:
    served_by = engine(pair("sglang", ALWAYS))
    (told,) = (one.reason for one in served_by.resolved.decisions if one.name == "draft_model")
    assert told.endswith("drafts with; it taps the target at layer 1, layer 2, layer 4, drafts 38 of 48 tokens")


AUX = "eagle_aux_hidden_state_layer_ids"
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "missing tensor": (
        "sglang", {}, {"midlayer.mlp.up_proj.weight": None}, CheckpointError,
        r"holds no tensor midlayer.mlp.up_proj.weight, wanted it with shape \[48, 48\] as eagle3.layers.0.gate_up of proposer",
    ),
    "missing norm of a tap": ("3.1", {}, {"fc_norm.2.weight": None}, CheckpointError, "holds no tensor fc_norm.2.weight, wanted"),
    "missing head": ("sglang", {}, {"lm_head.weight": None}, CheckpointError, r"holds no tensor lm_head.weight, .* \[38, 48\]"),
    "missing embedding": ("wide", {}, {"embed_tokens.weight": None}, CheckpointError, "holds no tensor embed_tokens.weight"),
    "a language model": (
        "eagle", {}, {"fc.weight": None}, CheckpointError, "no tensor fc.weight, which joins taps of the target, .*; name"
    ),
    "wrong shape": (
        "vllm", {}, {"fc.weight": np.ones((48, 96))}, CheckpointError, r"fc.weight has shape \[48, 96\], wanted \[48, 144\]"
    ),
    "unknown tensor": ("vllm", {}, {"extra": np.ones(48)}, CheckpointError, "tensor extra .* does not belong"),
    "table of another kind": ("sglang", {}, {"d2t": np.ones(38)}, CheckpointError, "d2t is stored as F32, wanted whole .*; conv"),
    "broken weight": ("sglang", {}, {"norm.weight": np.full(48, np.nan)}, CheckpointError, "norm.weight holds nan .*; download"),
    "another hidden size": (
        "sglang", {"hidden_size": 32}, {}, CheckpointError, "hidden_size is 32, wanted 48 as the target .*; use"
    ),
    "another hidden size of the target": (
        "wide", {"target_hidden_size": 32}, {}, CheckpointError, "target_hidden_size is 32, wanted 48 as the target .*; use"
    ),
    "another vocabulary": ("sglang", {"vocab_size": 47}, {}, CheckpointError, "vocab_size is 47, wanted 48 as the .*; use"),
    "a part without its table": ("sglang", {}, {"d2t": None}, CheckpointError, "holds no tensor d2t"),
    "a part of another size": (
        "sglang", {"draft_vocab_size": 37}, {}, CheckpointError, r"d2t has shape \[38\], wanted \[37\] as draft_vocab.*; use"
    ),
    "a token twice": (
        "sglang", {}, {"d2t": tables((2, *PART[1:]))["d2t"]}, CheckpointError, r"names 37 tokens, wanted 38 .*, each once; use"
    ),
    "a token too far": (
        "sglang", {}, {"d2t": np.arange(38)}, CheckpointError, "maps row 24 of the head to token 48, wanted .* 0 to 47 .*; use"
    ),
    "a token below all": (
        "sglang", {}, {"d2t": tables((-1, *PART[1:]))["d2t"]}, CheckpointError, "maps row 0 of the head to token -1, wanted"
    ),
    "tables that disagree": (
        "sglang", {}, {"t2d": np.arange(48) < 38}, CheckpointError, "names other tokens than t2d does, wanted the same; use"
    ),
    "another model": (
        "sglang", {"architectures": ["Llama"]}, {}, CheckpointError, r"architectures is \['Llama'\], wanted one of Llama.*; name"
    ),
    "another speculator": (
        "speculators", {"speculators_model_type": "dflash"}, {}, CheckpointError, "type is 'dflash', wanted 'eagle3'; name"
    ),
    "a residual that nobody tells": (
        "speculators", {"norm_before_residual": None}, {}, CheckpointError, "has no norm_before_residual, wanted true or .*; add"
    ),
    "another activation": ("sglang", {"hidden_act": "gelu"}, {}, CapabilityError, "hidden_act is 'gelu', wanted 'silu'; use"),
    "states of the last layer alone": (
        "vllm", {"use_aux_hidden_state": False}, {}, CapabilityError, "use_aux_hidden_state is false, wanted taps of .*; use"
    ),
    "a norm over all taps": ("vllm", {"norm_before_fc": True}, {}, CapabilityError, "norm_before_fc is true, wanted no .*; use"),
    "scaled logits": ("vllm", {"logit_scale": 0.5}, {}, CapabilityError, "logit_scale is 0.5, wanted 1; use"),
    "a layer too many": (
        "vllm", {AUX: [0, 1, 7]}, {}, CheckpointError,
        r"layer_ids is \[0, 1, 7\], wanted layers that the target target with its 6 layers has; use",
    ),
    "no layers": ("vllm", {AUX: []}, {}, CheckpointError, r"layer_ids is \[\], wanted layers"),
    "layers that are none": ("vllm", {AUX: [2, "3", 4]}, {}, CheckpointError, r"layer_ids is \[2, '3', 4\], wanted layers"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str, tmp_path: Path) -> None:
    layout, config, tensors, error, match = REFUSED[what]
    target = pair(layout, ALWAYS)[0]
    own = draft_config(LAYOUTS[layout])
    embedding = target_tensors(json.loads((target / "config.json").read_text()), ALWAYS, 0)["model.embed_tokens.weight"]
    changed = {**draft_tensors(LAYOUTS[layout], ALWAYS, 0, embedding), **tensors}
    directory = tmp_path / "draft-model"
    write_checkpoint(
        directory, {**own, **config}, {name: value for name, value in changed.items() if value is not None}
    )  # fmt: skip
    with pytest.raises(error, match=match) as refusal:
        engine((target, directory))
    assert "\n" not in str(refusal.value)


def test_a_target_without_those_layers(tmp_path: Path) -> None:
    """No layers are named, and the usual ones are not there."""
    target = pair("sglang, all tokens", ALWAYS)[0]
    config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 2}
    shallow = write_checkpoint(tmp_path / "shallow", config, target_tensors(config, ALWAYS, 0))
    (shallow / "tokenizer.json").write_bytes((target / "tokenizer.json").read_bytes())
    draft_model = write_draft(tmp_path / "draft-model", "sglang, all tokens", ALWAYS, target=target)
    with pytest.raises(
        CheckpointError, match=rf"no {AUX} is given, which means \[2, 1, -1\], wanted layers that .* 2 layers has"
    ):
        engine((shallow, draft_model))


def test_a_draft_model_that_nobody_named() -> None:
    with pytest.raises(
        ConfigError, match=r"eagle3 has no draft model, wanted one of target; give its directory by --draft-model"
    ):
        engine((pair("sglang", ALWAYS)[0], ""))  # type: ignore[arg-type]


def test_a_draft_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no directory, got nothing there"):
        engine((pair("sglang", ALWAYS)[0], tmp_path / "nowhere"))
