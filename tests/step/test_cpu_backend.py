"""The lossless properties on the compiled kernels: text and rounds are bit-equal for every K, batch, chunking and arrival.

Programs and strategies are those of `test_lossless.py`; what a request has to be is what the same backend makes of it alone.
Free blocks hold NaN throughout.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polydraft import LLM, Engine, RequestOutput, SamplingParams
from polydraft.contracts.packing import MADE
from tests.oracle import CODE_PROMPTS, greedy_rounds
from tests.step.test_lossless import KS, Scene, mixed_asks, scenes
from tests.support import tiny
from tests.support.cpu import needs_kernels
from tests.support.depth import among, crossed, first
from tests.support.poison import poison_free_blocks
from tests.support.runs import Ask, demo_prompt, drive, essence, oracle

pytestmark = needs_kernels


def cpu_engine(model: str, num_drafts: int, spec: str = "", **options: Any) -> Engine:
    """An engine on the device `spec` of the backend."""
    given = {"model": str(tiny.checkpoint(model)), "plugins": tiny.PLUGINS, "backend": "cpu", "device": spec, "invariant": True}
    return LLM(**{**given, "draft_tokens": num_drafts, **options}).engine


@functools.cache
def lone_engine(model: str, num_drafts: int, weights: str) -> Engine:
    return cpu_engine(model, num_drafts, max_num_seqs=1, prefix_cache=False, invariant=False, weights=weights)


@functools.lru_cache(maxsize=1024)
def solo(model: str, num_drafts: int, prompt_ids: tuple[int, ...], params: SamplingParams, weights: str) -> RequestOutput:
    return drive(lone_engine(model, num_drafts, weights), [Ask(prompt_ids, params)])[0]


def served(scene: Scene, **options: Any) -> list[RequestOutput]:
    served_by = cpu_engine(scene.model, scene.num_drafts, **scene.options, **options)
    outputs = drive(served_by, scene.asks, each_step=poison_free_blocks)
    served_by.close()
    return outputs


def is_lossless(scene: Scene, **options: Any) -> None:
    weights = options.get("weights", "auto")
    for ask, got in zip(scene.asks, served(scene, **options), strict=True):
        alone, plain = (solo(scene.model, k, ask.prompt_ids, ask.params, weights) for k in (scene.num_drafts, 0))
        if got.finish_reason == "abort":
            assert got.token_ids == plain.token_ids[: len(got.token_ids)]
            assert got.rounds == alone.rounds[: len(got.rounds)]
            continue
        assert (got.token_ids, got.text, got.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason), ask
        assert essence(got) == essence(alone), ask


packings = st.sampled_from(("auto", *sorted(MADE)))


@pytest.mark.deep
@settings(max_examples=15)
@given(scenes(), packings)
def test_text_and_rounds_do_not_depend_on_how_a_request_is_served(scene: Scene, weights: str) -> None:
    """`invariant` is never asked for: these kernels know no other way."""
    is_lossless(replace(scene, update=None), invariant=False, weights=weights)


@pytest.mark.deep
@given(scenes(), packings)
def test_text_and_rounds_do_not_depend_on_how_a_request_is_served_deep(scene: Scene, weights: str) -> None:
    is_lossless(replace(scene, update=None), invariant=False, weights=weights)


MODES: tuple[dict[str, Any], ...] = (
    {}, {"graph": "off"}, {"overlap": 2}, {"spec": "cpu?queue=0"}, {"graph": "prefill"}, {"dtype": "bf16"},
)  # fmt: skip


@pytest.mark.parametrize(("num_drafts", "options"), crossed(6, KS, MODES), ids=str)
def test_every_k_in_every_mode(num_drafts: int, options: dict[str, Any]) -> None:
    model = sorted(tiny.CONFIGS)[num_drafts % len(tiny.CONFIGS)]
    scene = Scene(model, "reference", num_drafts, {"max_num_seqs": 5, "block_size": 4}, mixed_asks(model, 6))
    if options.get("dtype"):
        texts = [[o.token_ids for o in served(scene, **options)]]
        texts.append([o.token_ids for o in served(replace(scene, num_drafts=0), **options)])
        assert texts[0] == texts[1]
    else:
        is_lossless(scene, **options)


@pytest.mark.parametrize("spec", among(["cpu?isa=portable"], ["cpu?threads=1", "cpu?threads=3&pin=0", "cpu?isa=portable"]))
@pytest.mark.parametrize("num_drafts", among([3], [0, 3]))
@pytest.mark.parametrize(("num_prompts", "num_tokens"), first(1, [(2, 16), (3, 24)]))
def test_the_demo_model_writes_the_oracles_text(num_prompts: int, num_tokens: int, spec: str, num_drafts: int) -> None:
    """The checkpoint is in bfloat16 and stays in it without a change of any number: the oracle in float64 agrees."""
    served_by = LLM(backend="cpu", device=spec, draft_tokens=num_drafts).engine
    params, prompts = SamplingParams(max_new_tokens=num_tokens), CODE_PROMPTS[:num_prompts]
    asks = [Ask(demo_prompt(text), params, i) for i, text in enumerate(prompts)]
    for ask, output in zip(asks, drive(served_by, asks), strict=True):
        greedy = greedy_rounds(oracle(""), ask.prompt_ids, num_drafts, num_tokens, ask.stop_ids)
        assert (output.token_ids, output.rounds) == (tuple(greedy.token_ids), tuple(greedy.rounds))
    served_by.close()


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_weights_are_replaced_in_place(num_drafts: int) -> None:
    """Captured steps read the new weights, whatever form they take."""
    ask = Ask((3, 1, 4, 1, 5), SamplingParams(max_new_tokens=12, ignore_eos=True))
    served_by = cpu_engine("narrow", num_drafts, max_num_seqs=2)
    drive(served_by, [ask])
    served_by.update_weights(tiny.checkpoint(tiny.moved("narrow")))
    assert essence(drive(served_by, [ask])[0]) == essence(
        solo(tiny.moved("narrow"), num_drafts, ask.prompt_ids, ask.params, "auto")
    )
    served_by.close()
