"""A model whose layers differ is served like any other: drafts, prefix cache, preemption; caches are of their kinds."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from polydraft import LLM, Engine
from polydraft.conformance.oracle.checkpoints import write_safetensors
from polydraft.errors import CapabilityError, CheckpointError, ConfigError, PluginError
from polydraft.models import Tensor
from polydraft.program.caches import SlotState
from polydraft.proposers import ProposerContext
from polydraft.proposers.base import DraftWeights
from polydraft.proposers.ngram import NgramProposer
from polydraft.sampling_params import SamplingParams
from tests.support import mixed_layers, tiny
from tests.support.poison import poison_free_blocks
from tests.support.runs import Ask, drive

PROMPTS = [[5, 9, 11, 7, 3, 8, 21, 30, 4], [5, 9, 11, 7, 3, 8, 21, 30, 6, 2], [40, 41, 42], [5, 9, 11, 7, 3, 8, 21, 30, 4, 12]]


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with mixed_layers.registered():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(mixed_layers.write(tmp_path_factory.mktemp("mixed")))


def texts(model: str, temperature: float = 0.0, *, owns: bool = True, family: Any = None, **options: Any) -> list[list[int]]:
    llm = LLM(
        model=model, plugin=mixed_layers.plugin(owns=owns, **(family or {})), block_size=4, invariant=True, max_num_seqs=3,
        **options,
    )  # fmt: skip
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=11, ignore_eos=True)
    return [list(output.token_ids) for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "options",
    [
        {"draft_tokens": 3},
        {"draft_tokens": 3, "proposer": "ngram"},
        {"draft_tokens": 1, "num_blocks": 17},
        {"draft_tokens": 3, "prefix_cache": False, "max_batched_tokens": 12},
        {"draft_tokens": 2, "sanitize": True},
        {"draft_tokens": 3, "device": "queued", "overlap": 2, "num_blocks": 24},
    ],
    ids=str,
)
def test_texts_do_not_depend_on_drafts_blocks_or_chunks(model: str, temperature: float, options: dict[str, Any]):
    alone = texts(model, temperature, draft_tokens=0, prefix_cache=False)
    assert len({tuple(text) for text in alone}) == len(PROMPTS)
    assert texts(model, temperature, **options) == alone


def test_an_mtp_layer_of_another_kind_drafts(tmp_path: Path):
    """Only the newest rows go on behind it, too: what it carries is declared."""
    directory = str(mixed_layers.write(tmp_path, drafts_by_mean=True))
    family = {"drafts_by_mean": True}
    assert texts(directory, family=family, draft_tokens=3) == texts(directory, family=family, draft_tokens=0)


PLACES: dict[str, dict[str, Any]] = {
    "reference": {},
    "queued": {"device": "queued", "overlap": 1},
    "tight": {"num_blocks": 24, "prefix_cache": False},
}


@pytest.mark.parametrize("place", PLACES)
def test_no_layer_reads_what_is_in_free_blocks(tmp_path: Path, place: str):
    """Of the target and of the MTP layer, in rows of keys and values and in rows of their own."""
    directory = str(mixed_layers.write(tmp_path, drafts_by_mean=True))
    family = mixed_layers.plugin(drafts_by_mean=True)
    given: dict[str, Any] = {"block_size": 4, "invariant": True, "max_num_seqs": 3, "draft_tokens": 3}
    engine = LLM(model=directory, plugin=family, **given, **PLACES[place]).engine
    asks = [Ask(tuple(prompt), SamplingParams(max_new_tokens=24, ignore_eos=True)) for prompt in PROMPTS]
    memory, ledger, seen = engine.runner.memory, engine.ledger, Counter[str]()

    def poisoned(running: Engine) -> None:
        poison_free_blocks(running)
        running.device.synchronize()
        free = ledger._free[: ledger._num_free]
        for name in ("layers.1.rows", "mtp.0.rows"):
            held: Any = memory.buffers[name]
            rows = held.host_array.reshape(ledger.num_blocks, -1)
            assert np.isnan(rows[free]).all()
            seen[name] += int(np.isfinite(rows).all(axis=1).sum())
        assert np.isnan(memory.caches["layers.0"].read_logical()[0][free]).all()

    outputs = drive(engine, asks, each_step=poisoned)
    assert [list(output.token_ids) for output in outputs] == texts(directory, family={"drafts_by_mean": True}, draft_tokens=0)
    assert min(seen["layers.1.rows"], seen["mtp.0.rows"]) > 0, "blocks in use are left alone"


def test_a_layer_that_reads_a_free_block_is_noticed(model: str, monkeypatch: pytest.MonkeyPatch):
    """Of a block that it was granted, the row behind those that it has written."""
    right = mixed_layers.causal_mean

    def hasty(a: Any, n: int) -> None:
        right(a, n)
        slot, ahead = a.row_slot[0], a.positions[0] + 1
        if slot >= 0 and ahead % a.block_size:
            a.out[0] += 0 * a.rows[a.block_table[slot, ahead // a.block_size] * a.block_size + ahead % a.block_size]

    monkeypatch.setattr(mixed_layers, "causal_mean", hasty)
    engine = LLM(model=model, plugin=mixed_layers.plugin(), block_size=4, max_num_seqs=3, draft_tokens=0).engine
    asks = [Ask(tuple(PROMPTS[2]), SamplingParams(max_new_tokens=24, ignore_eos=True))]
    (output,) = drive(engine, asks, each_step=poison_free_blocks)
    assert output.finish_reason == "error"
    assert "NaN" in output.error


def test_what_layers_declare_is_allocated(model: str):
    engine = LLM(model=model, plugin=mixed_layers.plugin(), draft_tokens=2, max_num_seqs=2).engine
    memory, limits = engine.runner.memory, engine.resolved.limits
    assert set(memory.caches) == {"layers.0", "mtp.0"}
    assert memory.buffers["layers.1.rows"].shape == (limits.num_blocks * limits.block_size, mixed_layers.RANK)
    token = 2 * (2 * 16 * 4) + mixed_layers.RANK * 4
    assert engine.resolved.describe()["kv_cache_bytes"] == limits.num_blocks * limits.block_size * token
    assert "slot_state_bytes" not in engine.resolved.describe()
    names = engine.runner.programs["greedy"]["target"].describe()
    assert names.count("paged_attention") == names.count("causal_mean") == 1
    assert engine.ledger.num_blocks == limits.num_blocks


@pytest.mark.parametrize("hit", ["never", "border"])
def test_a_state_says_what_a_prefix_hit_is_worth(model: str, hit: Any):
    family: dict[str, Any] = {"state": SlotState("state", "W 5", hit=hit)}
    engine = LLM(model=model, plugin=mixed_layers.plugin(**family), draft_tokens=2, max_num_seqs=3).engine
    assert engine.runner.memory.buffers["layers.1.state"].shape == (3, 3, 5)
    decided = {d.name: d for d in engine.resolved.decisions}
    assert decided["slot_state_bytes"].chosen == 3 * 3 * 5 * 4
    assert decided["prefix_cache"].chosen == engine.ledger.shares == (hit == "border")
    if hit == "never":
        assert decided["prefix_cache"].reason == "off: layers.1 cannot go on from the blocks of a common beginning"
    assert texts(model, family=family, draft_tokens=2) == texts(model, draft_tokens=0)


def test_a_contract_that_nobody_owns_is_refused_before_weights_are_read(model: str):
    with pytest.raises(CapabilityError, match=r"launch what backend double does not own: causal_mean \(in layers.1\)"):
        texts(model, owns=False)


# -- taps and checkpoints of proposers ----------------------------------------------------------------
class Tapping(NgramProposer):
    """Drafts from the text, and looks at the target on the way."""

    buffers = NgramProposer.buffers
    taps: ClassVar[dict[str, str]] = {
        "seen.embedding": "embedding",
        "seen.first": "layer 0",
        "seen.last": "layer 1",
        "seen.normed": "final",
    }


def _tapping(model: str, proposer: Any) -> Any:
    plugin = mixed_layers.plugin(proposers=(("tapping", proposer),))
    return LLM(model=model, plugin=plugin, proposer="tapping", draft_tokens=2, max_num_seqs=2)


def test_taps_hold_the_rows_of_their_points(model: str):
    llm = _tapping(model, Tapping)
    prompt = PROMPTS[0]
    llm.generate([prompt], SamplingParams(max_new_tokens=1))
    memory, n = llm.engine.runner.memory, len(prompt)
    rows = {name: np.array(memory.buffers[name].host_array[:n]) for name in (*Tapping.taps, "target.hidden")}  # type: ignore[attr-defined]
    weights = llm.engine.weights.canonical()
    assert np.array_equal(rows["seen.embedding"], weights["embed"][prompt])
    assert np.array_equal(rows["seen.last"], rows["target.hidden"])
    assert not np.allclose(rows["seen.first"], rows["seen.last"])
    last = rows["target.hidden"]
    normed = last / np.sqrt((last * last).mean(axis=1, keepdims=True) + 1e-5) * weights["norm"]
    assert np.allclose(rows["seen.normed"], normed, atol=1e-5)


def test_taps_change_no_token_and_cost_a_launch_each(model: str):
    params = SamplingParams(max_new_tokens=12)
    llm = _tapping(model, Tapping)
    plain = LLM(model=model, plugin=mixed_layers.plugin(), proposer="ngram", draft_tokens=2, max_num_seqs=2)
    assert [o.token_ids for o in llm.generate(PROMPTS, params)] == [o.token_ids for o in plain.generate(PROMPTS, params)]
    tapped, free = (Counter(one.engine.runner.programs["greedy"]["target"].describe()) for one in (llm, plain))
    assert tapped - free == {"gather_rows": 3, "rms_norm": 2, "residual_add": 1}
    assert free - tapped == {"residual_add+rms_norm": 1}, "the sum of layer 0 is looked at before it is normalised"
    assert "target.every_row" not in plain.engine.runner.memory.buffers


def test_a_point_that_the_target_does_not_have(model: str):
    class Beyond(Tapping):
        taps: ClassVar[dict[str, str]] = {"seen": "layer 2"}

    with pytest.raises(ConfigError, match=r"'seen' taps the target at 'layer 2', wanted .* 'layer 0' to 'layer 1'"):
        _tapping(model, Beyond)


def _proposer(directory: Path, *, spoil: str = "") -> type[NgramProposer]:
    tensors = {"fc.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "midlayer.norm.weight": np.ones(4, np.float32)}
    tensors.pop(spoil, None)
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    write_safetensors(directory / "model.safetensors", tensors)
    own = DraftWeights(
        directory, "own", (Tensor("fc", ((3, 4),)), Tensor("norm", ((4,),), "norm")),
        {"fc": ("fc.weight",), "norm": ("midlayer.norm.weight",)},
    )  # fmt: skip

    class WithWeights(Tapping):
        weights = staticmethod(lambda model, draft_model: own)

    return WithWeights


def test_a_proposer_brings_a_checkpoint_of_its_own(tmp_path: Path):
    proposer = _proposer(tmp_path / "heads")
    plugin = mixed_layers.plugin(proposers=(("tapping", type("Narrow", (proposer,), {"taps": {}})),))
    llm = LLM(model=str(tiny.checkpoint("narrow")), plugin=plugin, proposer="tapping", draft_tokens=2)
    weights = llm.engine.runner.memory.weights
    assert np.array_equal(weights["own.fc"].array, np.arange(12, dtype=np.float32).reshape(3, 4))  # type: ignore[attr-defined]
    before = weights["own.fc"], np.array(weights["embed"].array)  # type: ignore[attr-defined]
    llm.engine.update_weights(tiny.checkpoint(tiny.moved("narrow")))
    after = llm.engine.runner.memory.weights
    assert after["own.fc"] is before[0]
    assert not np.array_equal(after["embed"].array, before[1])  # type: ignore[attr-defined]


def test_a_proposer_whose_checkpoint_lacks_a_tensor(tmp_path: Path, model: str):
    with pytest.raises(CheckpointError, match=r"heads holds no tensor fc.weight, wanted it with shape \[3, 4\] as own.fc"):
        _tapping(model, _proposer(tmp_path / "heads", spoil="fc.weight"))


def test_the_draft_model_is_handed_to_who_reads_it(tmp_path: Path, model: str):
    """To `layers`, `weights` and the context; a proposer without `weights` has none."""
    own = _proposer(tmp_path / "heads")
    seen: dict[str, set[str]] = {}

    class Told(own):  # type: ignore[misc, valid-type]
        taps: ClassVar[dict[str, str]] = {}

        def __init__(self, context: ProposerContext) -> None:
            super().__init__(context)
            seen.setdefault("context", set()).add(context.draft_model)

        @staticmethod
        def layers(model: Any, draft_model: str) -> dict[str, Any]:
            del model
            seen.setdefault("layers", set()).add(draft_model)
            return {}

        @staticmethod
        def weights(model: Any, draft_model: str) -> DraftWeights:
            seen.setdefault("weights", set()).add(draft_model)
            return own.weights(model, draft_model)  # type: ignore[attr-defined, no-any-return]

    plugin = mixed_layers.plugin(proposers=(("told", Told),))
    options: dict[str, Any] = {"model": model, "plugin": plugin, "draft_tokens": 2, "draft_model": tmp_path / "heads"}
    llm = LLM(proposer="told", **options)
    directory = str(tmp_path / "heads")
    assert seen == {name: {directory} for name in ("layers", "weights", "context")}
    assert llm.engine.resolved.describe()["draft_model"] == directory
    with pytest.raises(CapabilityError, match=r"takes no draft model; .* name another --proposer, .* or told"):
        LLM(proposer="ngram", **options)


def test_a_draft_model_is_not_called_a_model_of_the_target_s_layers(tmp_path: Path, model: str):
    """What is said of its checkpoint and of its table of names counts and names nothing of the target."""
    own = _proposer(tmp_path / "heads").weights(None, "")  # type: ignore[attr-defined]
    write_safetensors(tmp_path / "heads" / "model.safetensors", {
        "fc.weight": np.ones((3, 4), np.float32), "midlayer.norm.weight": np.ones(4, np.float32), "extra": np.ones(2, np.float32),
    })  # fmt: skip
    stranger = type("Stranger", (Tapping,), {"weights": staticmethod(lambda model, draft_model: own)})
    with pytest.raises(CheckpointError, match=r"tensor extra .* to the proposer own that .*, wanted only its 2 tensors; use"):
        _tapping(model, stranger)
    nameless = dataclasses.replace(own, names={"fc": ("fc.weight",)})
    lacking = type("Lacking", (Tapping,), {"weights": staticmethod(lambda model, draft_model: nameless)})
    with pytest.raises(PluginError, match=r"the tensor names of proposer own lack norm, got fc, .*; complete its table"):
        _tapping(model, lacking)
