"""Bad input, on every kind of device: it is refused in one sentence, and whatever else runs is not touched by it.

"Not touched" means equal, to the bit where logits are compared, to a run in which the bad input never happened.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft import LLM, Engine, EngineConfig, RequestOutput, SamplingParams
from polydraft.conformance.probe import tokenizer_json
from polydraft.device import Array
from polydraft.errors import CapabilityError, ConfigError, RequestError
from tests.support import runs, tiny
from tests.support.depth import crossed
from tests.support.meddling import Meddle, MeddlingPlugin
from tests.support.plugin_doubles import backend_without
from tests.support.runs import Ask, drive, essence, solo
from tools import make_checkpoint

MODEL, K = "shared", 3
VOCAB, MODEL_LEN = tiny.CONFIGS[MODEL]["vocab_size"], 96
PROMPTS = tuple(tuple(range(1 + i, 4 + 2 * i)) for i in range(4))
FREE = SamplingParams(max_new_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=0.7, top_p=0.9, seed=5)


@pytest.fixture(params=runs.DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(device: str = "reference", **options: Any) -> Engine:
    return runs.engine(MODEL, device=device, **{"max_num_seqs": 4, "draft_tokens": K, **options})


def alone(prompt: tuple[int, ...], own: SamplingParams = FREE, num_drafts: int = K) -> RequestOutput:
    return solo(MODEL, num_drafts, prompt, own)


# -- prompts -------------------------------------------------------------------------------------------
BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty text": ("", "the prompt is empty, wanted at least one token"),
    "no ids": ([], "the prompt is empty"),
    "as long as the model": ([1] * MODEL_LEN, f"the prompt has {MODEL_LEN} tokens, wanted fewer than {MODEL_LEN}"),
    "longer than the model": ([1] * 5000, f"the prompt has 5000 tokens, wanted fewer than {MODEL_LEN}"),
    "id beyond the vocabulary": ([1, 2, VOCAB], f"prompt token 2 is {VOCAB}, wanted an id from 0 to {VOCAB - 1}"),
    "negative id": ([1, -1], "prompt token 1 is -1"),
    "id of 40 bits": ([2**40], f"prompt token 0 is {2**40}"),
    "id of 70 bits": ([2**70], "wanted a list of token ids"),
    "fractions": ([1.5, 2.0], "wanted a list of token ids"),
    "truth values": ([True, False], "wanted a list of token ids"),
    "texts": (["a", "b"], "wanted a list of token ids"),
    "a list in a list": ([[1, 2]], "wanted a list of token ids"),
    "lists of different lengths": ([[1], [1, 2]], "wanted a list of token ids"),
    "a number": (7, "wanted a list of token ids"),
    "nothing": (None, "wanted a list of token ids"),
    "a lone surrogate": ("a \ud800", "no valid Unicode text"),
}


@pytest.mark.parametrize(("name", "device"), crossed(4, BAD_PROMPTS, runs.DEVICES), indirect=["device"])
def test_bad_prompt(device: str, name: str):
    """Refused while two requests run, one in the middle of its text: both end as if nothing had happened."""
    prompt, message = BAD_PROMPTS[name]
    engine = make(device)
    ids = [engine.add(PROMPTS[0], FREE), engine.add(PROMPTS[1], FREE)]
    for _ in range(3):
        engine.step()
    with pytest.raises(RequestError, match=message) as caught:
        engine.add(prompt, FREE)
    assert "\n" not in str(caught.value)
    assert sorted(engine.requests) == ids
    done = finish(engine)
    assert [essence(done[i]) for i in ids] == [essence(alone(p)) for p in PROMPTS[:2]]


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path: Path):
    """A text may then become an id that no row of the embedding stands for: it is refused as the id itself is."""
    config = {**make_checkpoint.FAMILIES["qwen2"], "vocab_size": 24}
    directory = make_checkpoint.make(tmp_path / "model", config)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer_json(26)), encoding="utf-8")
    with LLM(model=str(directory), backend="reference") as llm:
        with pytest.raises(RequestError, match="prompt token 1 is 24, wanted an id from 0 to 23; use this model's tokenizer"):
            llm.generate("w23 w24", FREE)
        (output,) = llm.generate("w23 w22", SamplingParams(max_new_tokens=2, ignore_eos=True))
        assert (output.prompt_ids, len(output.token_ids)) == ((23, 22), 2)


def finish(engine: Engine) -> dict[str, RequestOutput]:
    done: dict[str, RequestOutput] = {}
    for _ in range(500):
        engine.step()
        done |= {output.id: output for output in engine.poll() if output.finished}
        if not engine.requests:
            runs.come_to_rest(engine)
            return done
    raise AssertionError("the engine does not come to rest")


def test_the_longest_prompt_leaves_room_for_one_token(device: str):
    prompt = tuple(1 + i % (VOCAB - 1) for i in range(MODEL_LEN - 1))
    (output,) = drive(make(device, max_batched_tokens=32), [Ask(prompt, FREE)])
    assert (len(output.token_ids), output.rounds, output.finish_reason) == (1, (), "length")


def test_a_text_that_reaches_the_models_length_ends_there(device: str):
    """More tokens are wanted than fit: what fits comes, and the reason says so."""
    prompt = tuple(1 + i % (VOCAB - 1) for i in range(MODEL_LEN - 9))
    (output,) = drive(make(device), [Ask(prompt, FREE)])
    assert (len(output.token_ids), output.finish_reason) == (9, "length")
    assert output.token_ids == alone(prompt, num_drafts=0).token_ids


# -- ids of requests -----------------------------------------------------------------------------------
def test_duplicate_id(device: str):
    engine = make(device)
    engine.add(PROMPTS[0], FREE, id="mine")
    with pytest.raises(RequestError, match="request id 'mine' is in use; choose another"):
        engine.add(PROMPTS[1], FREE, id="mine")
    assert essence(finish(engine)["mine"]) == essence(alone(PROMPTS[0]))


@pytest.mark.parametrize("wrong", ["", 5, True, b"x", ["x"]], ids=repr)
def test_an_id_that_is_no_text(wrong: Any):
    engine = make()
    with pytest.raises(
        RequestError, match=r"^the request id is .*, wanted a text that is not empty; correct it or leave it out$"
    ):
        engine.add(PROMPTS[0], FREE, id=wrong)
    with pytest.raises(RequestError, match=r"^no request .* is in this engine"):
        engine.abort(wrong)
    assert not engine.has_work


WRONG_PARTS: dict[str, Any] = {
    "config": {"draft_tokens": 1}, "checkpoint": "no/such/model", "features": [5], "instruments": 5, "loading": 5,
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_an_engine_of_something_else(name: str):
    config = EngineConfig(backend="reference")
    with pytest.raises(ConfigError, match=f"^{name} is .*, wanted .*; correct the call$"):
        Engine(**{"config": config, name: WRONG_PARTS[name]})
    if name == "config":
        empty: Any
        for empty in ("", {}, 0):
            with pytest.raises(ConfigError, match=r"^config is .*, wanted an EngineConfig"):
                Engine(empty)


def test_options_and_parameters_that_are_no_mapping():
    with pytest.raises(ConfigError, match=r"^engine options are 5, wanted a mapping"):
        EngineConfig.from_mapping(5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^sampling parameters are \[5\], wanted a mapping"):
        SamplingParams.from_mapping([5])  # type: ignore[arg-type]


def test_progress_that_nobody_can_call():
    with LLM(backend="reference") as llm, pytest.raises(RequestError, match=r"^progress is 5, wanted a function"):
        llm.generate("a", progress=5)  # type: ignore[arg-type]


def test_an_id_is_free_again_once_its_end_was_polled():
    engine = make()
    engine.add(PROMPTS[0], SamplingParams(max_new_tokens=1), id="mine")
    engine.step()
    with pytest.raises(RequestError, match="'mine' is in use"):
        engine.add(PROMPTS[1], FREE, id="mine")
    engine.poll()
    engine.add(PROMPTS[1], FREE, id="mine")
    assert essence(finish(engine)["mine"]) == essence(alone(PROMPTS[1]))


# -- sampling parameters -------------------------------------------------------------------------------
BAD_PARAMS: dict[str, Sequence[Any]] = {
    "max_new_tokens": (0, -1, 2.5, "8", True, None),
    "temperature": (-0.1, 1e-10, 1e10, 10**400, float("nan"), float("inf"), "hot", None),
    "top_p": (0, 1.1, float("nan"), "1"),
    "top_k": (-1, 2**31, 0.5, "1"),
    "min_p": (-0.1, 1.5, None),
    "seed": (-1, 2**64, 1.0, "1"),
    "stop": ("", ["a", ""], [1], 5, None),
    "stop_token_ids": ([-1], [1.5], ["a"], 7, None),
    "ignore_eos": (1, "yes", None),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_PARAMS.items() for value in values])
def test_bad_sampling_parameter(name: str, value: Any):
    with pytest.raises(RequestError, match=rf"^{name} is .*, wanted .*; correct the request$"):
        SamplingParams(**{name: value})


def test_unknown_sampling_parameter():
    with pytest.raises(RequestError, match=r"unknown sampling parameter 'temprature'; did you mean 'temperature'\?"):
        SamplingParams.from_mapping({"temprature": 1.0})


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"stop_token_ids": (VOCAB,)}, f"stop token id {VOCAB} is none of this model, wanted at most {VOCAB - 1}"),
        ({"stop_token_ids": (2**40,)}, "is none of this model"),
        ({"stop_token_ids": tuple(range(20))}, "20 stop token ids, wanted at most 16"),
    ],
)
def test_parameters_that_do_not_fit_the_model(own: dict[str, Any], message: str):
    engine = make()
    with pytest.raises(RequestError, match=message):
        engine.add(PROMPTS[0], SamplingParams(**own))
    assert not engine.has_work


@pytest.mark.parametrize("temperature", [1e-9, 1e9])
def test_extreme_temperatures_give_text(device: str, temperature: float):
    own = SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=temperature, seed=1)
    engine = make(device)
    hot, other = drive(engine, [Ask(PROMPTS[0], own), Ask(PROMPTS[1], SAMPLED)])
    assert (len(hot.token_ids), hot.finish_reason) == (8, "length")
    assert essence(other) == essence(alone(PROMPTS[1], SAMPLED))
    if temperature < 1:
        assert hot.token_ids == alone(PROMPTS[0]).token_ids[:8]


def test_greedy_verification_takes_no_sampling():
    engine = make(verify="greedy")
    with pytest.raises(RequestError, match=r"temperature is 0.7, wanted 0 under --verify greedy; use --verify coupled"):
        engine.add(PROMPTS[0], SAMPLED)
    assert essence(drive(engine, [Ask(PROMPTS[0], FREE)])[0]) == essence(alone(PROMPTS[0]))
    assert set(engine.runner.programs) == set(make().runner.programs) - {"sampling", "sampling.processed"}


def test_a_backend_without_the_kernels_to_sample_is_greedy():
    plugin = backend_without("gumbel_noise", "sample", "gumbel_noise+sample")
    engine = make(plugin=plugin)
    with pytest.raises(RequestError, match=r"temperature is 0.7, wanted 0 under --verify greedy"):
        engine.add(PROMPTS[0], SAMPLED)
    assert essence(drive(engine, [Ask(PROMPTS[0], FREE)])[0]) == essence(alone(PROMPTS[0]))
    with pytest.raises(CapabilityError, match=r"does not own: gumbel_noise \(in .*\), sample \(in .*\); implement them"):
        make(plugin=plugin, verify="coupled")


# -- numbers of drafts ---------------------------------------------------------------------------------
def test_no_drafts(device: str):
    outputs = drive(make(device, draft_tokens=0), [Ask(prompt, own) for prompt in PROMPTS for own in (FREE, SAMPLED)])
    wanted = [alone(prompt, own).token_ids for prompt in PROMPTS for own in (FREE, SAMPLED)]
    assert [output.token_ids for output in outputs] == wanted
    assert {output.rounds for output in outputs} == {(0,) * 23}
    assert {output.drafted for output in outputs} == {0}


@pytest.mark.parametrize(("num_drafts", "device"), crossed(4, [23, 63], runs.DEVICES), indirect=["device"])
def test_as_many_drafts_as_the_text_has_tokens_and_more(device: str, num_drafts: int):
    engine = make(device, draft_tokens=num_drafts)
    outputs = drive(engine, [Ask(prompt, FREE) for prompt in PROMPTS])
    assert [output.token_ids for output in outputs] == [alone(prompt).token_ids for prompt in PROMPTS]
    assert all(len(output.rounds) + output.accepted == 23 for output in outputs)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"draft_tokens": 64}, CapabilityError, "--draft-tokens 64: "),
        ({"draft_tokens": -1}, ConfigError, "draft_tokens is -1, wanted a whole number of at least 0"),
        ({"draft_tokens": 2.5}, ConfigError, "draft_tokens is 2.5, wanted a whole number"),
        ({"draft_tokens": "many"}, ConfigError, "draft_tokens is 'many', wanted a whole number"),
        ({"draft_tokens": True}, ConfigError, "draft_tokens is True, wanted a whole number"),
        ({"draft_tokens": 2, "proposer": "none"}, CapabilityError, "--draft-tokens 2: "),
        ({"draft_tokens": 0, "proposer": "mtp"}, CapabilityError, "--proposer mtp"),
        ({"proposer": "sufix"}, CapabilityError, "--proposer sufix is unknown; known: mtp, eagle3, ngram, suffix, hybrid, none"),
        ({"proposer": "prophet"}, CapabilityError, "--proposer prophet"),
        ({"verify": "blind"}, ConfigError, "verify is 'blind', wanted one of auto, greedy, coupled, rejection"),
        ({"graph": "decode"}, CapabilityError, "--graph decode"),
        ({"dtype": "bf16"}, CapabilityError, "--dtype bf16"),
        ({"overlap": 3}, ConfigError, "overlap is 3, wanted a whole number of at least 0 and at most 2"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs is 0, wanted a whole number of at least 1"),
        ({"max_model_len": 97}, CapabilityError, "--max-model-len 97"),
        ({"max_batched_tokens": 15}, CapabilityError, "--max-batched-tokens 15"),
        ({"draft_tokns": 2}, ConfigError, "unknown engine option 'draft_tokns'; did you mean 'draft_tokens'?"),
    ],
)
def test_bad_engine_option(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error) as caught:
        LLM(
            **{
                "model": str(tiny.checkpoint(MODEL)),
                "backend": "reference",
                "plugins": tiny.PLUGINS,
                "max_num_seqs": 4,
                **options,
            }
        )
    assert message in str(caught.value)


def test_a_refusal_gives_every_reason():
    config = EngineConfig(
        model=str(tiny.checkpoint(MODEL)), backend="reference", plugins=tiny.PLUGINS, draft_tokens=99, dtype="f16", graph="decode"
    )
    with pytest.raises(CapabilityError) as caught:
        Engine(config)
    assert all(part in str(caught.value) for part in ("--draft-tokens 99", "--dtype f16", "--graph decode"))


# -- blocks --------------------------------------------------------------------------------------------
def test_a_request_that_could_never_get_its_blocks(device: str):
    engine = make(device, num_blocks=5, block_size=4)
    kept = engine.add(PROMPTS[0], SamplingParams(max_new_tokens=17, ignore_eos=True))  # 3 + 17 tokens: just the pool
    with pytest.raises(RequestError, match=r"may grow to 21 tokens = 6 KV blocks, the pool has 5; raise --num-blocks or"):
        engine.add(PROMPTS[0], SamplingParams(max_new_tokens=18, ignore_eos=True))
    output = finish(engine)[kept]
    assert (output.finish_reason, output.token_ids) == ("length", alone(PROMPTS[0]).token_ids[:17])


def test_requests_that_share_too_few_blocks_all_end(device: str):
    engine = make(device, num_blocks=9, block_size=4)
    outputs = drive(engine, [Ask(prompt, own) for prompt in PROMPTS for own in (FREE, SAMPLED)])
    wanted = [alone(prompt, own) for prompt in PROMPTS for own in (FREE, SAMPLED)]
    assert [essence(output) for output in outputs] == [essence(output) for output in wanted]


# -- NaN logits ----------------------------------------------------------------------------------------
VICTIM = 1
"""The slot that is spoilt: requests of one run take the slots in their order."""


def poison_from(run: int, *, role: str = "target", row: int = 0) -> Meddle:
    """NaN in one logit of the victim's `row`-th row, from the `run`-th launch on."""

    def meddle(kind: str, num_runs: int, logits: Array, slots: Array) -> None:
        rows = np.flatnonzero(slots == VICTIM)
        if kind == role and num_runs >= run and len(rows) > row:
            logits[rows[row], 3] = np.nan

    return meddle


def meddled(meddle: Meddle, device: str, own: SamplingParams) -> list[RequestOutput]:
    """All prompts at once on a backend whose logits are meddled with."""
    options = dict(runs.DEVICES[device])
    plugin = MeddlingPlugin(meddle)
    options |= {"model": str(tiny.checkpoint(MODEL)), "plugins": tiny.PLUGINS}
    engine = LLM(plugin=plugin, **options, invariant=True, max_num_seqs=4, draft_tokens=K).engine
    return drive(engine, [Ask(prompt, own) for prompt in PROMPTS])


def untouched(outputs: Sequence[RequestOutput], own: SamplingParams) -> bool:
    """Whether all but the victim are as if served alone."""
    others = [(o, p) for slot, (o, p) in enumerate(zip(outputs, PROMPTS, strict=True)) if slot != VICTIM]
    return [essence(o) for o, _ in others] == [essence(alone(p, own)) for _, p in others]


@pytest.mark.parametrize(
    ("run", "own", "device"),
    crossed(4, [0, 1, 4], [FREE, SAMPLED], runs.DEVICES),
    indirect=["device"],
    ids=lambda value: str(value) if isinstance(value, (int, str)) else "sampled" if value.temperature else "greedy",
)
def test_nan_logits_end_that_request_alone(device: str, own: SamplingParams, run: int):
    outputs = meddled(poison_from(run), device, own)
    victim, clean = outputs[VICTIM], alone(PROMPTS[VICTIM], own)
    num_tokens = (1 + sum(accepted + 1 for accepted in clean.rounds[: run - 1])) if run else 0
    assert victim.finish_reason == "error"
    assert "NaN logits" in victim.error
    assert victim.token_ids == clean.token_ids[:num_tokens]
    assert victim.text == runs.engine(MODEL).tokenizer.decode(victim.token_ids)
    assert sum(victim.rounds) == sum(clean.rounds[: max(run - 1, 0)])
    assert untouched(outputs, own)


@pytest.mark.parametrize("row", [1, 2, 3])
def test_nan_logits_inside_a_window_keep_the_tokens_before_them(device: str, row: int):
    """In decode rounds the victim's window is spoilt from its `row`-th row on; what was accepted before stays."""
    outputs = meddled(poison_from(1, row=row), device, FREE)
    victim, clean = outputs[VICTIM], alone(PROMPTS[VICTIM])
    fatal = next(index for index, accepted in enumerate(clean.rounds) if accepted >= row)
    num_tokens = 1 + sum(accepted + 1 for accepted in clean.rounds[:fatal]) + row
    assert victim.finish_reason == "error"
    assert victim.token_ids == clean.token_ids[:num_tokens]
    assert untouched(outputs, FREE)


@pytest.mark.parametrize("own", [FREE, SAMPLED], ids=["greedy", "sampled"])
def test_nan_logits_of_a_draft_cost_speed_only(device: str, own: SamplingParams):
    outputs = meddled(poison_from(0, role="draft"), device, own)
    victim, clean = outputs[VICTIM], alone(PROMPTS[VICTIM], own)
    assert (victim.token_ids, victim.text, victim.finish_reason) == (clean.token_ids, clean.text, "length")
    assert victim.accepted == 0 < clean.accepted
    assert untouched(outputs, own)


def test_the_double_alone_changes_nothing(device: str):
    outputs = meddled(lambda kind, num_runs, logits, slots: None, device, FREE)
    assert [essence(output) for output in outputs] == [essence(alone(prompt)) for prompt in PROMPTS]
