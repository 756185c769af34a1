"""The EAGLE-3 draft model: no text depends on it, its drafts are those of a naive recomputation, and faults are seen."""

from __future__ import annotations

import functools
import json
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from polydraft import Engine, SamplingParams
from polydraft.cli import main
from polydraft.config import EngineConfig
from polydraft.conformance.lossless_checks import Listed
from polydraft.conformance.oracle.checkpoints import write_checkpoint
from polydraft.errors import CapabilityError, CheckpointError, ConfigError
from polydraft.host.draft_policy import ladder
from polydraft.instruments.record_file import read
from polydraft.models import Checkpoint
from polydraft_eagle3 import draft_model as module
from polydraft_eagle3.proposer import Eagle3Proposer
from polydraft_eagle3.testing import SUCCESSOR, Naive, draft_model_shapes, random_tensors, tables, write_draft_model, write_pair
from polydraft_emulator import Emulator
from tests.support.cpu import needs_kernels
from tests.support.depth import crossed
from tests.support.runs import Ask, drive, essence

SOMETIMES, ALWAYS = 0.02, 0.0
"""Noise of the pairs whose drafts are right about every other time, and always."""
PROMPTS = ((5, 9, 33), tuple(range(3, 24)), (1,), (*range(3, 24), 7, 7))
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "coupled": SAMPLED}


PART = [token for token in range(48) if token % 5]
"""A reduced draft vocabulary."""


@functools.cache
def pair(noise: float, seed: int = 0, *, part: bool = False) -> tuple[Path, Path]:
    return write_pair(Path(tempfile.mkdtemp(dir=_root())), noise, seed, PART if part else ())


@functools.cache
def _root() -> str:
    return tempfile.mkdtemp(prefix="polydraft-eagle3-")


@pytest.fixture(scope="module", autouse=True)
def cleared() -> Any:
    yield
    shutil.rmtree(_root())
    _root.cache_clear()
    pair.cache_clear()
    alone.cache_clear()


def engine(
    of: tuple[Path, Path], draft_tokens: int = 3, *, numbers: Sequence[int] = (), emulator: str = "", **options: Any
) -> Engine:
    """An engine on a target and its draft model; `numbers` of drafts in its steps, again and again, () for always the most."""
    target, draft_model = of
    options = {"model": str(target), "draft_tokens": draft_tokens, "max_num_seqs": 3, "block_size": 4, **options}
    if draft_tokens:
        options |= {"proposer": "eagle3", "plugins": ("polydraft_eagle3",), "draft_model": draft_model}
    config = {"backend": "reference", "invariant": True, "graph": "off", **options}
    policy = Listed(numbers, draft_tokens) if numbers else None
    backend = Emulator(f"emulator:0?{emulator}") if emulator else None
    return Engine(EngineConfig.from_mapping(config), backend=backend, draft_policy=policy)


def asks(max_new_tokens: int = 24, **sampling: Any) -> tuple[Ask, ...]:
    """Requests that arrive one after the other; the last has the beginning of the second's prompt."""
    params = [SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True, seed=i, **sampling) for i in range(len(PROMPTS))]
    return tuple(Ask(prompt, one, arrival=3 * i) for i, (prompt, one) in enumerate(zip(PROMPTS, params, strict=True)))


@functools.cache
def alone(of: tuple[Path, Path], draft_tokens: int, some: tuple[Ask, ...], **options: Any) -> list[Any]:
    """Each request by itself, on the synchronous device."""
    served_by = engine(of, draft_tokens, max_num_seqs=1, prefix_cache=False, **options)
    return [drive(served_by, [Ask(ask.prompt_ids, ask.params)])[0] for ask in some]


# -- texts -----------------------------------------------------------------------------------------------------------------
QUEUED: dict[str, Any] = {"device": "queued"}
GRAPHS: dict[str, Any] = {"graph": "decode", "graph_sizes": (1, 3)}
WAYS: dict[str, dict[str, Any]] = {
    **{f"K={k}": {"draft_tokens": k} for k in range(1, 6)},
    "chunks": {"max_batched_tokens": 13},
    "no shared blocks": {"prefix_cache": False},
    "preemption": {"num_blocks": 16},
    "overlap 1": {**QUEUED, "overlap": 1},
    "overlap 2": {**QUEUED, "overlap": 2, "max_batched_tokens": 13},
    "graphs": {**QUEUED, **GRAPHS, "overlap": 0},
    "graphs, overlap": {**QUEUED, **GRAPHS, "overlap": 1},
    "hazards": {**QUEUED, "overlap": 1, "sanitize": True},
    "emulator": {"emulator": "seed=3&policy=reversed", "overlap": 2},
    "emulator, graphs": {"emulator": "seed=5&policy=lazy", **GRAPHS, "overlap": 1, "num_blocks": 16},
}


@pytest.mark.parametrize(("way", "sampling", "draws"), crossed(2, WAYS, SAMPLINGS, [False, True]))
def test_texts_are_those_of_plain_decoding(way: str, sampling: str, draws: bool) -> None:
    """Bit for bit; and with a fixed number of drafts also the rounds, hence the drafts, are those of a request alone."""
    of, some = pair(SOMETIMES), asks(**SAMPLINGS[sampling])
    options = {"draft_tokens": 3, **WAYS[way]}
    numbers = random.Random(3).choices(ladder(options["draft_tokens"]), k=200) if draws else ()
    served_by = engine(of, numbers=numbers, **options)
    outputs = drive(served_by, some)
    plain = alone(of, 0, some)
    assert [output.token_ids for output in outputs] == [one.token_ids for one in plain]
    if not draws:
        same = alone(of, served_by.resolved.limits.num_drafts, some)
        assert [essence(output) for output in outputs] == [essence(one) for one in same]
    assert sum(output.accepted for output in outputs) > 5
    assert served_by.hazards == ()
    happened(served_by, way)
    served_by.close()


def happened(served_by: Engine, way: str) -> None:
    """What the way is for has taken place."""
    graphs = served_by.runner.graphs
    assert bool(graphs and graphs.counters.replayed_steps) == ("graphs" in way)
    if way in {"chunks", "K=3"}:
        assert served_by.ledger.num_hits > 10
    if way == "preemption":
        assert served_by.scheduler.num_preemptions


@pytest.mark.parametrize("options", [{}, {**QUEUED, **GRAPHS, "overlap": 1}, {"emulator": "seed=2", "overlap": 1}], ids=str)
def test_rejection(options: dict[str, Any]) -> None:
    """Greedy texts are those of plain decoding, sampled ones those of the request alone."""
    of = pair(SOMETIMES)
    greedy = drive(engine(of, verify="rejection", **options), asks())
    assert [output.token_ids for output in greedy] == [one.token_ids for one in alone(of, 0, asks())]
    sampled = drive(engine(of, verify="rejection", **options), asks(**SAMPLED))
    assert [essence(output) for output in sampled] == [essence(one) for one in alone(of, 3, asks(**SAMPLED), verify="rejection")]
    assert sum(output.accepted for output in sampled) > 20


@needs_kernels
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_compiled_kernels(sampling: str) -> None:
    of, some = pair(SOMETIMES), asks(**SAMPLINGS[sampling])
    outputs = drive(engine(of, backend="cpu"), some)
    assert [output.token_ids for output in outputs] == [one.token_ids for one in alone(of, 0, some, backend="cpu")]
    assert sum(output.accepted for output in outputs) > 5


@pytest.mark.parametrize("draft_tokens", range(1, 6))
@pytest.mark.parametrize("options", [{}, {"emulator": "seed=1", "overlap": 1}], ids=["reference", "emulator"])
def test_a_draft_model_that_is_always_right(draft_tokens: int, options: dict[str, Any]) -> None:
    num_tokens = 1 + 4 * (draft_tokens + 1)
    for ask, output in zip(some := asks(num_tokens), drive(engine(pair(ALWAYS), draft_tokens, **options), some), strict=True):
        text = [*ask.prompt_ids[-1:], *output.token_ids]
        assert text[1:] == [SUCCESSOR[token] for token in text[:-1]]
        assert output.rounds == (draft_tokens,) * 4
    served_by = engine(pair(ALWAYS), draft_tokens, verify="rejection")
    sampled = drive(served_by, asks(num_tokens, temperature=1.0))
    assert sum(output.accepted for output in sampled) > 0.7 * sum(output.drafted for output in sampled)


# -- drafts ----------------------------------------------------------------------------------------------------------------
def drafts_at(served_by: Engine, some: tuple[Ask, ...]) -> dict[tuple[int, ...], list[int]]:
    """Drafts of all requests on a synchronous device, by the tokens that were known when they were made."""
    found: dict[tuple[int, int], list[int]] = {}
    columns: Any = served_by.runner.memory.buffers

    def look(_: Engine) -> None:
        for name, request in served_by.requests.items():
            if request.slot >= 0 and (count := int(columns["draft_len"].host_array[request.slot])):
                known = int(served_by.slots.num_known[request.slot])
                found[int(name.removeprefix("ask-")), known] = columns["drafts"].host_array[request.slot][:count].tolist()

    outputs = drive(served_by, some, each_step=look)
    texts = [(*ask.prompt_ids, *output.token_ids) for ask, output in zip(some, outputs, strict=True)]
    return {texts[i][:known]: drafts for (i, known), drafts in found.items()}


def is_as_recomputed(of: tuple[Path, Path], served_by: Engine) -> None:
    naive = Naive(*of)
    found = drafts_at(served_by, asks())
    assert sum(map(len, found.values())) > 40
    for known, drafts in found.items():
        wanted, apart = naive.drafts(known, len(drafts))
        assert drafts == wanted, f"behind {len(known)} tokens"
        assert apart > 1e-5, "a tie would make this a matter of rounding"


@pytest.mark.parametrize(
    ("way", "noise"),
    crossed(2, [way for way, options in WAYS.items() if options.keys().isdisjoint(("device", "emulator"))], [SOMETIMES, 0.5]),
)
def test_drafts_are_those_of_a_recomputation(way: str, noise: float) -> None:
    is_as_recomputed(pair(noise), engine(pair(noise), **WAYS[way]))


PAUSES = [(0, 5), (0, 0, 0, 2, 5), (5, 0, 0, 0, 0, 1, 3)]


def behind_pauses(numbers: tuple[int, ...]) -> None:
    is_as_recomputed(pair(0.5), engine(pair(0.5), 5, numbers=numbers, max_batched_tokens=20))


@pytest.mark.parametrize("numbers", PAUSES)
def test_drafts_behind_steps_without_drafts(numbers: tuple[int, ...]) -> None:
    behind_pauses(numbers)


def test_drafts_of_a_target_with_other_weights() -> None:
    (target, draft_model), (other, _) = pair(0.5), pair(0.5, seed=1)
    served_by = engine((target, draft_model))
    served_by.update_weights(other)
    is_as_recomputed((other, draft_model), served_by)


@pytest.mark.parametrize("kind", ["directory", "arrays"])
def test_drafts_of_another_draft_model(kind: str) -> None:
    """It comes with the target's weights, and is checked before either is written."""
    (target, draft_model), (other, other_draft) = pair(0.5), pair(0.5, seed=1)
    served_by = engine((target, draft_model))
    with Checkpoint(other_draft) as opened:
        named = {name: opened.integers(name) if name in ("d2t", "t2d") else opened.tensor(name) for name in opened.names()}
    with pytest.raises(CheckpointError, match="fc"):
        served_by.update_weights(other, draft={name: value for name, value in named.items() if "fc" not in name})
    is_as_recomputed((target, draft_model), served_by)
    served_by.update_weights(other, draft=other_draft if kind == "directory" else named)
    is_as_recomputed((other, other_draft), served_by)


def test_a_record_is_replayed_without_the_draft_model(tmp_path: Path) -> None:
    """Its weights lie in the record; those of the target come from the target."""
    target, draft_model = pair(SOMETIMES)
    run = tmp_path / "run.safetensors"
    options = ["--backend", "reference", "--model", str(target)]
    drafting = ["--plugin", "polydraft_eagle3", "--proposer", "eagle3", "--draft-model", str(draft_model), "--draft-tokens", "3"]
    assert status("generate", "w5 w6 w7", *options, *drafting, "--max-new-tokens", "8", "--record", str(run)) == 0
    assert {name for name, weight in read(run).weights.items() if weight.key} >= {"eagle3.fc.low", "eagle3.midlayer.qkv"}
    assert status("replay", str(run), *options) == 0


def status(*command: str) -> Any:
    """The exit status of `polydraft` with these arguments."""
    with pytest.raises(SystemExit) as exit_:
        main.main(list(command))
    return exit_.value.code or 0


def test_passes_that_nobody_wants_are_not_launched() -> None:
    programs = engine(pair(SOMETIMES), 5, numbers=ladder(5)).runner.drafts["greedy"]
    for number, made in programs.items():
        names = "+".join(made.describe()).split("+")
        assert names.count("advance_draft") == names.count("argmax") == names.count("paged_attention") == number
        assert names.count("rope_kv_write") == max(number, 1), "the keep part writes rows of the cache"


# -- a reduced vocabulary ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", ["K=1", "K=5", "chunks", "overlap 1", "graphs, overlap", "hazards", "emulator, graphs"])
def test_texts_with_a_reduced_vocabulary(way: str) -> None:
    of, some = pair(SOMETIMES, part=True), asks()
    served_by = engine(of, **{"draft_tokens": 3, **WAYS[way]})
    outputs = drive(served_by, some)
    assert [output.token_ids for output in outputs] == [one.token_ids for one in alone(of, 0, some)]
    assert sum(output.accepted for output in outputs) > 5
    assert served_by.hazards == ()


@pytest.mark.parametrize("noise", [SOMETIMES, 0.5])
def test_drafts_of_a_reduced_vocabulary(noise: float) -> None:
    of = pair(noise, part=True)
    is_as_recomputed(of, engine(of))
    drafted = {token for drafts in drafts_at(engine(of), asks()).values() for token in drafts}
    assert len(drafted) > 5
    assert drafted <= set(PART)


def test_rejection_with_a_reduced_vocabulary() -> None:
    of = pair(SOMETIMES, part=True)
    sampled = drive(engine(of, verify="rejection"), asks(**SAMPLED))
    assert [essence(output) for output in sampled] == [essence(one) for one in alone(of, 3, asks(**SAMPLED), verify="rejection")]
    assert sum(output.accepted for output in sampled) > 20


# -- planted faults ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tap", range(3))
def test_a_tap_of_another_layer_would_be_seen(tap: int) -> None:
    points = module._points

    def wrong(*args: Any) -> tuple[str, ...]:
        right = list(points(*args))
        right[tap] = "layer 2"
        return tuple(right)

    with mock.patch.object(module, "_points", wrong), pytest.raises(AssertionError, match="behind"):
        is_as_recomputed(pair(0.5), engine(pair(0.5)))


def test_a_missing_keep_part_would_be_seen() -> None:
    append = Eagle3Proposer.append

    def silent(self: Eagle3Proposer, program: Any, num_drafts: int) -> None:
        if num_drafts:
            append(self, program, num_drafts)
        else:
            program.add("begin_draft", "seqs", "begin_draft", num_drafts=0)

    with mock.patch.object(Eagle3Proposer, "append", silent), pytest.raises(AssertionError, match="behind"):
        behind_pauses(PAUSES[1])


def test_taps_fed_to_later_passes_would_be_seen() -> None:
    """The draft model's own output, not the row that it began with, is what a later pass goes on from."""
    enter = Eagle3Proposer._enter

    def stale(self: Eagle3Proposer, program: Any, index: int) -> Any:
        if index:
            program.add("select_last_rows", "seqs", "fault", hidden="eagle3.rows", out="eagle3.newest")
        return enter(self, program, index)

    with mock.patch.object(Eagle3Proposer, "_enter", stale), pytest.raises(AssertionError, match="behind"):
        is_as_recomputed(pair(0.5), engine(pair(0.5)))


# -- what is refused -----------------------------------------------------------------------------------------------------------
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "missing tensor": (
        {}, {"fc.weight": None}, CheckpointError, r"holds no tensor fc.weight, wanted it with shape \[48, 144\] as eagle3.fc"
    ),
    "wrong shape": (
        {}, {"fc.weight": np.ones((48, 96))}, CheckpointError, r"fc.weight has shape \[48, 96\], wanted \[48, 144\].*; use"
    ),
    "unknown tensor": ({}, {"extra": np.ones(48)}, CheckpointError, "tensor extra .* does not belong"),
    "table of another kind": ({}, {"d2t": np.ones(48)}, CheckpointError, "d2t is stored as F32, wanted whole .*; convert"),
    "broken weight": ({}, {"norm.weight": np.full(48, np.nan)}, CheckpointError, "norm.weight holds nan .*; download"),
    "another hidden size": ({"hidden_size": 32}, {}, CheckpointError, "hidden_size is 32, wanted 48 as the target .*; use"),
    "another vocabulary": ({"vocab_size": 47}, {}, CheckpointError, "vocab_size is 47, wanted 48 as the .*; use"),
    "a part without its table": ({"draft_vocab_size": 38}, {}, CheckpointError, "holds no tensor d2t"),
    "a part of another size": ({"draft_vocab_size": 37}, tables(PART, 48), CheckpointError, r"not name 37 .* of 48 .*; use"),
    "a token twice": (
        {"draft_vocab_size": 38}, {"d2t": tables([*PART[1:], 2], 48)["d2t"]}, CheckpointError, "does not name 38 .*; use"
    ),
    "a token too far": ({"draft_vocab_size": 38}, {"d2t": np.arange(38)}, CheckpointError, "does not name 38 .*; use"),
    "tables that disagree": (
        {"draft_vocab_size": 38}, {**tables(PART, 48), "t2d": np.arange(48) < 38}, CheckpointError, "as t2d has them, .*; use"
    ),
    "another model": ({"architectures": ["Llama"]}, {}, CheckpointError, r"architectures is \['Llama'\], wanted .*; name"),
    "another activation": ({"hidden_act": "gelu"}, {}, CapabilityError, "hidden_act is 'gelu', wanted 'silu'; use"),
    "a layer too many": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 5]}}, {}, CheckpointError,
        r"layer_ids is \[0, 1, 5\], wanted three layers from 0 to 4 of the target .*; use",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str, tmp_path: Path) -> None:
    config, tensors, error, match = REFUSED[what]
    target = pair(ALWAYS)[0]
    directory = write_draft_model(tmp_path / "draft-model", target, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 4]})
    engine((target, directory)).close()  # as written it is taken
    write_draft_model(directory, target, **config)
    if tensors:
        own = json.loads((directory / "config.json").read_text())
        changed = {**random_tensors(draft_model_shapes(own), 1.0, 0), **tensors}
        write_checkpoint(directory, own, {name: value for name, value in changed.items() if value is not None})
    with pytest.raises(error, match=match) as refusal:
        engine((target, directory))
    assert "\n" not in str(refusal.value)


def test_a_draft_model_that_nobody_named() -> None:
    with pytest.raises(
        ConfigError, match=r"eagle3 has no draft model, wanted one of target; give its directory by --draft-model"
    ):
        engine((pair(ALWAYS)[0], ""))  # type: ignore[arg-type]


def test_a_draft_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no directory, got nothing there"):
        engine((pair(ALWAYS)[0], tmp_path / "nowhere"))
