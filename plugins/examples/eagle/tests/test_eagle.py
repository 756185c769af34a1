"""The EAGLE draft model: no text depends on it, its drafts are those of a naive recomputation, and faults are seen."""

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
from polydraft.config import EngineConfig
from polydraft.conformance.lossless_checks import Listed
from polydraft.conformance.oracle.checkpoints import write_checkpoint
from polydraft.errors import CapabilityError, CheckpointError, ConfigError
from polydraft.host.draft_policy import ladder
from polydraft_eagle.proposer import NEWEST, EagleProposer
from polydraft_eagle.testing import SUCCESSOR, Naive, draft_model_shapes, random_tensors, write_draft_model, write_pair
from polydraft_emulator import Emulator
from tests.support.cpu import needs_kernels
from tests.support.depth import crossed
from tests.support.runs import Ask, drafts_at, drive, essence

SOMETIMES, ALWAYS = 0.02, 0.0
"""Noise of the pairs whose drafts are right about every other time, and always."""
PROMPTS = ((5, 9, 33), tuple(range(3, 24)), (1,), (*range(3, 24), 7, 7))
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "coupled": SAMPLED}


@functools.cache
def pair(noise: float, seed: int = 0) -> tuple[Path, Path]:
    return write_pair(Path(tempfile.mkdtemp(dir=_root())), noise, seed)


@functools.cache
def _root() -> str:
    return tempfile.mkdtemp(prefix="polydraft-eagle-")


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
        options |= {"proposer": "eagle", "plugins": ("polydraft_eagle",), "draft_model": draft_model}
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
    **{f"K={k}": {"draft_tokens": k} for k in (1, 3, 5)},
    "chunks": {"max_batched_tokens": 13},
    "preemption": {"num_blocks": 16},
    "overlap": {**QUEUED, "overlap": 2, "max_batched_tokens": 13},
    "hazards": {**QUEUED, "overlap": 1, "sanitize": True},
    "emulator": {"emulator": "seed=3&policy=reversed", "overlap": 2},
    "emulator, graphs": {"emulator": "seed=5&policy=lazy", **GRAPHS, "overlap": 1, "num_blocks": 16},
}


@pytest.mark.parametrize(("way", "sampling", "draws"), crossed(6, WAYS, SAMPLINGS, [False, True]))
def test_texts_are_those_of_plain_decoding(way: str, sampling: str, draws: bool) -> None:
    """Bit for bit; and with a fixed number of drafts also the rounds, hence the drafts, are those of a request alone."""
    of, some = pair(SOMETIMES), asks(**SAMPLINGS[sampling])
    options = {"draft_tokens": 3, **WAYS[way]}
    numbers = random.Random(3).choices(ladder(options["draft_tokens"]), k=200) if draws else ()
    served_by = engine(of, numbers=numbers, **options)
    outputs = drive(served_by, some)
    assert [output.token_ids for output in outputs] == [one.token_ids for one in alone(of, 0, some)]
    if not draws:
        same = alone(of, served_by.resolved.limits.num_drafts, some)
        assert [essence(output) for output in outputs] == [essence(one) for one in same]
    assert sum(output.accepted for output in outputs) > 5
    assert served_by.hazards == ()
    served_by.close()


def test_rejection() -> None:
    """Greedy texts are those of plain decoding, sampled ones those of the request alone."""
    of = pair(SOMETIMES)
    greedy = drive(engine(of, verify="rejection"), asks())
    assert [output.token_ids for output in greedy] == [one.token_ids for one in alone(of, 0, asks())]
    sampled = drive(engine(of, verify="rejection"), asks(**SAMPLED))
    assert [essence(output) for output in sampled] == [essence(one) for one in alone(of, 3, asks(**SAMPLED), verify="rejection")]
    assert sum(output.accepted for output in sampled) > 20


@needs_kernels
def test_compiled_kernels() -> None:
    of, some = pair(SOMETIMES), asks(**SAMPLED)
    outputs = drive(engine(of, backend="cpu"), some)
    assert [output.token_ids for output in outputs] == [one.token_ids for one in alone(of, 0, some, backend="cpu")]
    assert sum(output.accepted for output in outputs) > 5


@pytest.mark.parametrize("draft_tokens", [1, 3, 5])
def test_a_draft_model_that_is_always_right(draft_tokens: int) -> None:
    num_tokens = 1 + 4 * (draft_tokens + 1)
    for ask, output in zip(some := asks(num_tokens), drive(engine(pair(ALWAYS), draft_tokens), some), strict=True):
        text = [*ask.prompt_ids[-1:], *output.token_ids]
        assert text[1:] == [SUCCESSOR[token] for token in text[:-1]]
        assert output.rounds == (draft_tokens,) * 4


# -- drafts ----------------------------------------------------------------------------------------------------------------
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
    crossed(4, [way for way, options in WAYS.items() if options.keys().isdisjoint(("device", "emulator"))], [SOMETIMES, 0.5]),
)
def test_drafts_are_those_of_a_recomputation(way: str, noise: float) -> None:
    is_as_recomputed(pair(noise), engine(pair(noise), **WAYS[way]))


PAUSES = (0, 0, 0, 2, 5)


def behind_pauses() -> None:
    is_as_recomputed(pair(0.5), engine(pair(0.5), 5, numbers=PAUSES, max_batched_tokens=20))


def test_drafts_behind_steps_without_drafts() -> None:
    behind_pauses()


def test_draft_state() -> None:
    served_by = engine(pair(SOMETIMES), check_draft_state=1.0)
    drive(served_by, asks(40))
    assert served_by.draft_state is not None
    assert served_by.draft_state.compared.checked > 3
    assert served_by.draft_state.compared.differed == 0


def test_drafts_of_other_weights() -> None:
    """The draft model's come with the target's, or stay as they are."""
    (target, draft_model), (other, other_draft) = pair(0.5), pair(0.5, seed=1)
    served_by = engine((target, draft_model))
    served_by.update_weights(other)
    is_as_recomputed((other, draft_model), served_by)
    served_by.update_weights(other, draft=other_draft)
    is_as_recomputed((other, other_draft), served_by)


# -- planted faults ----------------------------------------------------------------------------------------------------------
def test_a_tap_of_another_point_would_be_seen() -> None:
    made = EagleProposer.__init__

    def wrong(self: EagleProposer, *args: Any) -> None:
        made(self, *args)
        self.taps = {"eagle.tap": "layer 1"}  # in front of the final norm

    with mock.patch.object(EagleProposer, "__init__", wrong), pytest.raises(AssertionError, match="behind"):
        is_as_recomputed(pair(0.5), engine(pair(0.5)))


def test_a_missing_keep_part_would_be_seen() -> None:
    append = EagleProposer.append

    def silent(self: EagleProposer, program: Any, num_drafts: int) -> None:
        if num_drafts:
            append(self, program, num_drafts)
        else:
            program.add("begin_draft", "seqs", "begin_draft", num_drafts=0)

    with mock.patch.object(EagleProposer, "append", silent), pytest.raises(AssertionError, match="behind"):
        behind_pauses()


def test_taps_fed_to_later_passes_would_be_seen() -> None:
    """The draft model's own output, not the row that it began with, is what a later pass goes on from."""
    enter = EagleProposer._enter

    def stale(self: EagleProposer, program: Any, index: int) -> Any:
        if index:
            program.add("select_last_rows", "seqs", "fault", hidden="eagle.rows", out=NEWEST)
        return enter(self, program, index)

    with mock.patch.object(EagleProposer, "_enter", stale), pytest.raises(AssertionError, match="behind"):
        is_as_recomputed(pair(0.5), engine(pair(0.5)))


# -- what is refused -----------------------------------------------------------------------------------------------------------
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "missing tensor": (
        {}, {"fc.bias": None}, CheckpointError, r"holds no tensor fc.bias, wanted it with shape \[48\] as eagle.fc.bias"
    ),
    "wrong shape": (
        {}, {"fc.weight": np.ones((48, 48))}, CheckpointError, r"fc.weight has shape \[48, 48\], wanted \[48, 96\].*; use"
    ),
    "unknown tensor": ({}, {"extra": np.ones(48)}, CheckpointError, "tensor extra .* does not belong"),
    "another hidden size": ({"hidden_size": 32}, {}, CheckpointError, "hidden_size is 32, wanted 48 as the target .*; use"),
    "another vocabulary": ({"vocab_size": 47}, {}, CheckpointError, "vocab_size is 47, wanted 48 as the .*; use"),
    "another model": ({"architectures": ["Llama"]}, {}, CheckpointError, r"architectures is \['Llama'\], wanted .*; name"),
    "another activation": ({"hidden_act": "gelu"}, {}, CapabilityError, "hidden_act is 'gelu', wanted 'silu'; use"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str, tmp_path: Path) -> None:
    config, tensors, error, match = REFUSED[what]
    target = pair(ALWAYS)[0]
    directory = write_draft_model(tmp_path / "draft-model", target)
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
    with pytest.raises(ConfigError, match=r"eagle has no draft model, wanted one of target; give its directory by --draft-model"):
        engine((pair(ALWAYS)[0], ""))  # type: ignore[arg-type]
