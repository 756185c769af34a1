"""Record and replay: what a step launched comes back call by call, and a wrong kernel is found by call and element."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from safetensors import safe_open

from polydraft import LLM, SamplingParams, reference
from polydraft.cli import main
from polydraft.cli.replay import text
from polydraft.conformance.faulty_backends import MUTANTS
from polydraft.conformance.oracle.checkpoints import write_checkpoint
from polydraft.conformance.probe import checkpoint, prompts
from polydraft.conformance.replay import replay
from polydraft.conformance.target import TableProxy, Target, wrap
from polydraft.demo import demo_model_path
from polydraft.errors import ConfigError, DeviceError
from polydraft.instruments.record import CallRecorder, steps_of, text_of
from polydraft.instruments.record_file import Record, Tensors, digest_of, read, write
from polydraft.instruments.trace_file import read as read_recording
from polydraft.models import Checkpoint, FamilyRegistry, Tensor, load_weights
from polydraft.models.weights import DRAFT_HEAD
from polydraft.program.declare import StepBuffer
from polydraft.program.program import ProgramBuilder
from polydraft.proposers.base import DraftWeights
from polydraft.proposers.ngram import NgramProposer
from tests.conformance.doubles import BACKENDS, raising
from tests.support import tiny
from tests.support.plugin_doubles import backend
from tests.support.schemas import published

PARAMS = (
    SamplingParams(max_new_tokens=14, ignore_eos=True),
    SamplingParams(max_new_tokens=14, ignore_eos=True, temperature=0.9, top_p=0.9, repetition_penalty=1.2, logit_bias={3: 1.5}),
)
STEPS = range(1, 7)


def serve(plugin: Any, steps: Any = STEPS, **options: Any) -> tuple[Record | None, list[Any]]:
    """Two requests, the second sampled and processed, prefilled in chunks; and the record of some steps."""
    given = {"max_num_seqs": 2, "max_batched_tokens": 12, "block_size": 4, "draft_tokens": 3, "graph": "off", **options}
    recorder = CallRecorder(steps, include_weights=True) if steps else None
    llm = LLM(plugin=plugin, model=str(checkpoint()), instruments=(recorder,) if recorder else (), **given)
    texts = [out.token_ids for out in llm.generate([list(p) for p in prompts(10)[-2:]], list(PARAMS))]
    record = recorder.finish() if recorder is not None else None
    llm.close()
    return record, texts


@pytest.fixture(scope="module")
def record() -> Record:
    """Steps of the reference, with weights."""
    found, _ = serve(reference)
    assert found is not None
    return found


# -- recording ---------------------------------------------------------------------------------------
def test_every_launch_of_the_chosen_steps_is_recorded_and_nothing_changes(record: Record):
    recorder = CallRecorder([2])
    llm = LLM(plugin=reference, model=str(checkpoint()), instruments=(recorder,), max_num_seqs=2, draft_tokens=3, block_size=4)
    engine = llm.engine
    engine.add(list(prompts(1)[0]), PARAMS[0])
    for _ in range(3):
        engine.step()
    found = recorder.finish()
    parts = engine.runner.programs["greedy"]
    engine.close()
    wanted = [e.contract for part in ("target", "draft") for e in parts[part].entries if e.contract != "forward_meta"]
    assert [call.contract for call in found.calls] == wanted
    assert found.steps == (2,)
    assert record.steps == tuple(STEPS)
    assert (found.widths, record.widths) == ({2: (4, 3)}, dict.fromkeys(STEPS, (4, 3)))


@pytest.mark.parametrize("more", [{"graph": "off"}, {"graph": "decode"}, {"constraints": True}], ids=str)
def test_a_recorded_run_has_the_same_text(more: dict[str, Any]):
    """Eager, with graphs, and in two halves that meet host inputs in the middle."""
    options = {"overlap": 1, "invariant": True, **more}
    record, texts = serve(BACKENDS["emulator"], range(3, 6), **options)
    assert record is not None
    assert record.about["backend"]["evidence"] == "emulator"
    assert texts == serve(BACKENDS["emulator"], (), **options)[1]
    assert replay(record, Target(BACKENDS["emulator"])).status == 0


def test_quantised_rows_are_replayed_as_such():
    """Also on another backend; one that does not declare them leaves those calls out."""
    record, _ = serve(reference, range(2, 4), kv_dtype="int8")
    assert record is not None
    assert replay(record, Target(BACKENDS["emulator"])).status == 0
    bare = wrap(reference, polydraft_backend_info=lambda info: dataclasses.replace(
        info, name="bare", capabilities=dataclasses.replace(info.capabilities, kv_dtypes=())))  # fmt: skip
    left_out = replay(record, Target(bare)).skipped
    assert {call.contract for call, _ in left_out} == {"rope_kv_write", "paged_attention"}
    assert {why for _, why in left_out} == {"bare does not declare KV rows in int8"}


class Projecting(NgramProposer):
    """Drafts from the text, and launches a weight of its own."""

    buffers = (*NgramProposer.buffers, StepBuffer("own.out", "R 3", "act"))
    taps: ClassVar[dict[str, str]] = {"own.seen": "final"}

    def append(self, program: ProgramBuilder, num_drafts: int) -> None:
        super().append(program, num_drafts)
        program.add("linear", "rows", "draft 0", x="own.seen", weight="own.fc", bias=None, out="own.out")


def test_weights_that_the_model_lacks_are_in_the_record(tmp_path: Path):
    """Those of a proposer's own checkpoint, which a vendor does not have, and the head of a reduced draft vocabulary."""
    hidden = json.loads((checkpoint() / "config.json").read_text())["hidden_size"]
    stored = np.random.default_rng(0).normal(size=(3, hidden)).astype(np.float32)
    write_checkpoint(tmp_path / "own", {}, {"fc.weight": stored})
    own = DraftWeights(tmp_path / "own", "own", (Tensor("fc", ((3, hidden),)),), {"fc": ("fc.weight",)})
    factory = type("Factory", (Projecting,), {"weights": staticmethod(lambda model, draft_model: own)})
    counts = tmp_path / "counts.json"
    counts.write_text('{"3": 2, "5": 1, "9": 1}')
    projecting: dict[str, Any] = {
        "proposer": "projecting",
        "plugin": backend(polydraft_proposers=lambda: (("projecting", factory),)),
    }
    for name, options in {"own.fc": projecting, DRAFT_HEAD: {"draft_vocab": str(counts)}}.items():
        recorder = CallRecorder([2])
        given: dict[str, Any] = {"plugin": reference, **options}
        llm = LLM(model=str(checkpoint()), instruments=(recorder,), max_num_seqs=2, draft_tokens=3, block_size=4, **given)
        llm.generate([list(prompts(1)[0])], PARAMS[0])
        record = recorder.finish()
        canonical = llm.engine.weights.canonical()
        write(tmp_path / "run", record)
        record = read(tmp_path / "run")
        assert name not in canonical
        assert [one for one, weight in record.weights.items() if weight.key] == [name]
        assert any(name in call.weights.values() for call in record.calls)
        answer = replay(record, Target("reference"), weights=canonical.__getitem__)
        assert (answer.status, answer.skipped) == (0, ())
        llm.close()


def test_a_record_after_an_update_has_the_weights_in_use(tmp_path: Path):
    """What was recorded before is of other weights, and is forgotten."""
    old, new = (tiny.checkpoint(name) for name in ("narrow", tiny.moved("narrow")))
    recorder = CallRecorder(range(1, 40), include_weights=True)
    llm = LLM(model=str(old), plugin=reference, instruments=(recorder,), draft_tokens=3)
    llm.generate([[1, 2, 3]], PARAMS[0])
    before = recorder.finish()
    llm.update_weights(new)
    steps = llm.engine.totals.steps
    llm.generate([[1, 2, 3]], PARAMS[0])
    after = recorder.finish()
    write(tmp_path / "run", after)
    after = read(tmp_path / "run")
    assert (before.steps[0], after.steps[0]) == (1, steps + 1)
    for record, directory in ((before, old), (after, new)):
        with Checkpoint(directory) as opened:
            canonical = load_weights(opened, *FamilyRegistry().describe(opened))
            assert {name: one.digest for name, one in record.weights.items()} == {
                name: digest_of(canonical[name]) for name in record.weights
            }
        answer = replay(record, Target("reference"))
        assert (answer.status, answer.skipped, answer.compared) == (0, (), len(record.calls))
    llm.close()


def test_a_record_of_other_weights_than_the_demo_models_does_not_send_to_it(tmp_path: Path):
    directory = shutil.copytree(demo_model_path(), tmp_path / "fine-tuned")
    recorder = CallRecorder()
    llm = LLM(plugin=reference, instruments=(recorder,), draft_tokens=1, max_model_len=64)
    assert recorder.finish().about["demo"]
    llm.update_weights(directory)
    assert not recorder.finish().about["demo"]
    llm.close()


@pytest.mark.parametrize("text", ["1-4,9", "7", "1,3-4,90-95", "2-3"])
def test_steps_are_said_as_they_are_asked_for(text: str):
    assert text_of(steps_of(text)) == text


def test_steps():
    assert steps_of("3") == {3}
    assert steps_of("1-3, 7") == {1, 2, 3, 7}
    for wrong in ("", "0", "3-1", "a", "1-", "-2", "1;2"):
        with pytest.raises(ConfigError, match="steps to record"):
            steps_of(wrong)


# -- the file ----------------------------------------------------------------------------------------
def test_the_file_is_plain_safetensors(record: Record, tmp_path: Path):
    file = tmp_path / "run.safetensors"
    write(file, record)
    again = read(file)
    assert (again.calls, dict(again.weights), again.about) == (record.calls, dict(record.weights), dict(record.about))
    assert again.widths == record.widths
    with safe_open(file, framework="np") as opened:
        assert opened.metadata()["schema"] == "polydraft.record/1"
        for key, one in record.tensors.items():
            np.testing.assert_array_equal(opened.get_tensor(key), one.array)
            assert again.tensors[key].dtype == one.dtype


def test_equal_tensors_are_stored_once_and_forms_are_told_apart():
    tensors = Tensors()
    ones = np.ones((2, 3), np.float32)
    assert tensors.add(ones, "f32") == tensors.add(ones.copy(), "f32")
    assert tensors.add(ones.reshape(3, 2), "f32") != tensors.add(ones, "f32")
    assert tensors.add(np.zeros(2, np.uint16), "bf16") != tensors.add(np.zeros(2, np.float16), "f16")
    assert len(tensors.items()) == 4


def test_sixteen_bits_and_nothing_come_back(tmp_path: Path):
    tensors = Tensors()
    for dtype, kind in (("bf16", np.uint16), ("f16", np.float16), ("i32", np.int32), ("u8", np.uint8), ("u32", np.uint32)):
        tensors.add(np.arange(6).astype(kind), dtype)
    tensors.add(np.empty((0, 4), np.int32), "i32")
    about = {"dtype": "bf16", "backend": {"name": "x"}}
    write(tmp_path / "f", Record(about, (), {}, tensors))
    for (_, one), (_, other) in zip(tensors.items(), read(tmp_path / "f").tensors.items(), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.array, other.array)


def test_what_is_no_record(record: Record, tmp_path: Path):
    file = tmp_path / "f"
    for content in (b"", b"hello", b"\x02\0\0\0\0\0\0\0{}"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="is no record of kernel calls"):
            read(file)
    for wrong in (
        dataclasses.replace(record, calls=record.calls[1:]),
        dataclasses.replace(record, calls=(dataclasses.replace(record.calls[0], inputs={"x": "t999999"}),)),
        dataclasses.replace(record, weights={}),
        dataclasses.replace(record, about={"backend": {}}),
        dataclasses.replace(record, calls=(dataclasses.replace(record.calls[0], contract={}),)),  # type: ignore[arg-type]
        dataclasses.replace(record, calls=(dataclasses.replace(record.calls[0], n="1"),)),  # type: ignore[arg-type]
        dataclasses.replace(record, calls=(dataclasses.replace(record.calls[0], params=3),)),  # type: ignore[arg-type]
    ):
        write(file, wrong)
        with pytest.raises(ConfigError, match="is no record of kernel calls"):
            read(file)
    with pytest.raises(ConfigError, match="cannot be written"):
        write(tmp_path / "none" / "f", record)


# -- replaying ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("against", ["recorded", "golden"])
def test_right_kernels_differ_nowhere(record: Record, backend: str, against: str):
    answer = replay(record, Target(BACKENDS[backend]), against=against)
    assert [difference.sentence for difference in answer.differences] == []
    assert (answer.status, answer.compared, answer.skipped) == (0, len(record.calls), ())
    assert answer.elements > 100_000


def test_the_whole_step_is_covered(record: Record):
    """Staged writes, sampling, processing, caches, metadata of target and draft passes."""
    contracts = {part for call in record.calls for part in call.contract.split("+")}
    assert {"scatter", "bias_logits", "penalise_logits", "gumbel_noise", "sample", "paged_attention"} <= contracts
    assert {meta["pass_index"] for call in record.calls for meta in call.metas.values()} >= {0, 1}
    assert any(len(record.tensors[cache.blocks].array) > 4 for call in record.calls for cache in call.caches.values())


@pytest.mark.parametrize(("mutant", "contract"), [("M01", "select_last_rows"), ("M36", "commit_window")])
def test_a_wrong_kernel_is_named_with_its_element(record: Record, mutant: str, contract: str):
    broken = next(m for m in MUTANTS if m.id == mutant).broken(reference)
    answer = replay(record, Target(broken))
    assert answer.status == 1
    first = answer.differences[0]
    assert contract in first.call.contract.split("+")
    assert first.mismatch.index is not None
    assert mutant in first.sentence
    assert {d.call.contract for d in answer.differences} == {first.call.contract}
    alone = replay(record, Target(broken), calls=[first.call.number])
    assert [d.sentence for d in alone.differences] == [first.sentence]


def test_another_backend_is_the_measure(record: Record):
    """Inputs that the recording backend never saw: only another backend, or the golden, says what is right."""
    broken = next(m for m in MUTANTS if m.id == "M17").broken(reference)
    changed, number = spoilt(record, "argmax")
    assert replay(changed, Target(broken), calls=[number], against=Target(BACKENDS["emulator"])).status == 1
    assert replay(changed, Target(broken), calls=[number], against="golden").status == 1
    assert replay(changed, Target("reference"), calls=[number], against=Target(BACKENDS["emulator"])).status == 0


def spoilt(record: Record, contract: str) -> tuple[Record, int]:
    """The record with a tie in the logits of a call of `contract`, and the number of that call."""
    calls = [call for call in record.calls if call.contract == contract and call.n]
    call = next(call for call in calls if record.tensors[call.inputs["row_slot"]].array[0] >= 0)
    logits = record.tensors[call.inputs["logits"]].array.copy()
    logits[0] = 1.0
    tensors = Tensors(dict(record.tensors.items()))
    changed = dataclasses.replace(call, inputs={**call.inputs, "logits": tensors.add(logits, "f32")})
    everything = tuple(changed if one is call else one for one in record.calls)
    return dataclasses.replace(record, calls=everything, tensors=tensors), call.number


def test_a_wrong_recording_shows_on_a_right_backend():
    broken = next(m for m in MUTANTS if m.id == "M01").broken(reference)
    record, _ = serve(broken)
    assert record is not None
    first = replay(record, Target("reference")).differences[0]
    assert (first.call.contract, first.mismatch.kind) == ("select_last_rows", "value")
    assert replay(record, Target(broken)).status == 0


def test_a_kernel_that_raises_differs(record: Record):
    answer = replay(record, Target(raising("swiglu", ZeroDivisionError)))
    assert {difference.call.contract for difference in answer.differences} == {"swiglu"}
    assert "an error: ZeroDivisionError: swiglu is not ready" in answer.differences[0].sentence


def test_a_device_that_cannot_be_opened_is_no_difference(record: Record):
    nowhere, somewhere = Target("reference", device="foo"), Target("reference")
    for target, against in ((nowhere, "recorded"), (somewhere, nowhere)):
        with pytest.raises(DeviceError, match="runs on 'cpu' or 'queued', got 'foo'"):
            replay(record, target, against=against)


def thin(*kept: str) -> Any:
    """The reference with some kernels only."""

    def table(answer: Any, device: Any) -> Any:
        changed = TableProxy(answer, {})
        changed.providers = {name: answer.providers[name] for name in kept}
        changed.versions = {name: answer.versions[name] for name in kept}
        return changed

    def info(answer: Any) -> Any:
        return dataclasses.replace(answer, contract_versions={name: answer.contract_versions[name] for name in kept})

    return wrap(reference, polydraft_kernels=table, polydraft_backend_info=info)


def test_what_a_backend_lacks_is_left_out_and_said(record: Record):
    answer = replay(record, Target(thin("swiglu", "residual_add", "rms_norm")))
    assert answer.status == 0
    assert all(call.contract.split("+")[0] not in {"swiglu", "residual_add"} for call, _ in answer.skipped)
    assert answer.compared + len(answer.skipped) == len(record.calls)
    assert "reference does not offer" in answer.skipped[0][1]
    assert f"left out {len(answer.skipped)} calls" not in text(record, answer), "each reason has a line of its own"
    assert "calls: reference does not offer scatter" in text(record, answer)
    nothing = replay(record, Target(thin("draft_ngram")))
    assert (nothing.compared, nothing.status) == (0, 1)
    assert "nothing was compared: 0 calls, 0 elements, on reference against recorded" in text(record, nothing)


def test_weights_have_to_be_the_recorded_ones(record: Record):
    bare = {name: dataclasses.replace(weight, key="") for name, weight in record.weights.items()}
    without = dataclasses.replace(record, weights=bare)
    with pytest.raises(ConfigError, match="give its model with --model"):
        replay(without, Target("reference"))
    with pytest.raises(ConfigError, match="is not the recorded one"):
        replay(without, Target("reference"), weights=lambda name: np.zeros(bare[name].shape, np.float32))
    values = {name: record.tensors[weight.key].array for name, weight in record.weights.items()}
    assert replay(without, Target("reference"), weights=values.__getitem__, calls=[5, 9]).status == 0
    with pytest.raises(ConfigError, match="has no call 99999"):
        replay(record, Target("reference"), calls=[99999])


@pytest.mark.parametrize(
    ("contract", "change"),
    [
        ("swiglu", {"inputs": {}}),
        ("swiglu", {"outputs": {}}),
        ("swiglu", {"n": 10**6}),
        ("linear", {"weights": {}}),
        ("rms_norm", {"params": {}}),
        ("rms_norm", {"params": {"eps": {}, "plus_one": False}}),
        ("scatter", {"inputs": {"runs": "t0", "payload": "t0"}}),
        ("paged_attention", {"caches": {}}),
    ],
    ids=str,
)
def test_an_altered_call_is_refused(record: Record, contract: str, change: dict[str, Any]):
    """Before any backend has it: that a golden cannot run it is no difference, and no bug."""
    number = next(call.number for call in record.calls if call.contract == contract)
    other = [dataclasses.replace(call, **change) if call.number == number else call for call in record.calls]
    changed = dataclasses.replace(record, calls=tuple(other))
    with pytest.raises(
        ConfigError, match=rf"^call {number} \(.*\) is no call of {contract} as its contract declares it \(.*; record"
    ):
        replay(changed, Target("reference"), calls=[number])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"version": 7},
            "is one of swiglu/7, core serves swiglu/1; replay it with the release that recorded it, or record it anew",
        ),
        ({"contract": "swirl"}, "is one of swirl/1, core serves no contract of that name; replay it with the release that"),
    ],
    ids=["version", "name"],
)
def test_a_record_of_another_version_is_refused(record: Record, change: dict[str, Any], said: str):
    number = next(call.number for call in record.calls if call.contract == "swiglu")
    other = [dataclasses.replace(call, **change) if call.number == number else call for call in record.calls]
    changed = dataclasses.replace(record, calls=tuple(other))
    with pytest.raises(ConfigError, match=rf"^call {number} \(step \d+, target, stage \w+\) {re.escape(said)}"):
        replay(changed, Target("reference"))
    assert replay(changed, Target("reference"), calls=[number + 1]).status == 0


# -- the command -------------------------------------------------------------------------------------
@pytest.fixture
def polydraft(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["polydraft", *args])
        with pytest.raises(SystemExit) as exit_:
            main.main(list(args))
        return int(exit_.value.code or 0), *capsys.readouterr()

    return call


def test_the_commands(polydraft: Callable[..., tuple[int, str, str]], tmp_path: Path):
    file, model = str(tmp_path / "run.safetensors"), str(checkpoint())
    ask = ("generate", "w5 w6 w7", "--model", model, "--max-new-tokens", "8", "--record", file)
    status, _, err = polydraft(*ask, "--record-steps", "1-2")
    assert (status, f"calls of 2 steps in {file}" in err) == (0, True)
    status, out, _ = polydraft("replay", file, "--backend", "reference", "--model", model)
    assert (status, "no difference: " in out) == (0, True)
    status, out, err = polydraft(*ask, "--record-steps", "2,90,92-99", "--json")
    assert (status, len(json.loads(out)["requests"])) == (1, 1)
    assert "calls of 1 steps" in err
    assert "polydraft: steps 90,92-99 never came, the run had " in err
    polydraft(*ask)
    status, out, _ = polydraft("replay", file, "--backend", "reference", "--against", "reference", "--model", model, "--json")
    published("polydraft.replay/1").validate(json.loads(out))
    assert polydraft("replay", file, "--backend", "reference")[0] == 2, "the weights are only referred to"
    assert polydraft("replay", file, "--backend", "nonesuch")[0] == 2
    assert polydraft(*ask, "--record-steps", "none")[0] == 2
    together = polydraft(*ask, "--trace", str(tmp_path / "steps.json"), "--sanitize")
    assert (together[0], "hazard" in together[2]) == (0, False)
    assert read_recording(tmp_path / "steps.json").spans
    assert polydraft("replay", file, "--backend", "reference", "--model", model)[0] == 0
    assert polydraft("generate", "w5", "--record-weights")[0] == 2


def test_a_difference_is_told_in_words_and_json(polydraft: Callable[..., tuple[int, str, str]], record: Record, tmp_path: Path):
    file, plugin = tmp_path / "run.safetensors", tmp_path / "broken.py"
    write(file, record)
    plugin.write_text(
        "import dataclasses\nfrom polydraft import hookimpl, reference\n"
        "from polydraft.conformance.faulty_backends import MUTANTS\n"
        "module = next(m for m in MUTANTS if m.id == 'M01').broken(reference)\n"
        "globals().update({k: v for k, v in vars(module).items() if k.startswith('polydraft_')})\n"
        "info = polydraft_backend_info(spec='')\n"
        "@hookimpl\ndef polydraft_backend_info():\n    return dataclasses.replace(info, name='broken')\n"
    )
    given = ("replay", str(file), "--backend", "broken", "--plugin", str(plugin))
    status, out, _ = polydraft(*given)
    assert status == 1
    assert "first difference: call " in out
    assert "select_last_rows/1, case 'call-" in out
    assert "looks like M01" in out
    status, out, _ = polydraft(*given, "--json")
    answer = json.loads(out)
    published("polydraft.replay/1").validate(answer)
    assert answer["recorded"]["widths"] == [{"step": step, "window": 4, "num_drafts": 3} for step in STEPS]
    assert answer["differences"][0]["contract"] == "select_last_rows"
    assert len(answer["differences"][0]["index"]) == 2
