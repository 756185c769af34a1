"""Texts and rounds of the Paddle backends on random checkpoints, against the recomputing oracle: equal but for near-ties."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest

from tests.support import tiny
from tests.support.near_ties import divergences
from tests.support.paddle import HAS_GRAPHS, needs_device, needs_paddle, script

MODELS = (
    "narrow", "deep", "mirrored", "shared", "sparse-ernie", "sparse-glm",
    "stretched-dynamic", "stretched-llama3", "stretched-yarn", "with-biases", "with-windows",
)  # fmt: skip
PROMPTS = ((3, 1, 4), (2, 7, 1, 8, 2, 8), (5,), tuple(range(1, 20)))
DRAFTS, TOKENS = 3, 24
NEAR = 1e-3
"""Logits by which a choice may be close in float32; the best two are about one apart."""
RUN = """
import json, sys
from polydraft import LLM, SamplingParams
backend, device, models, plugins, prompts, drafts, tokens, settings = json.loads(sys.argv[1])
found = []
for name, model in models.items():
    for setting in settings:
        options = dict(model=model, plugins=plugins, draft_tokens=drafts, max_num_seqs=4, block_size=8, **setting)
        llm = LLM(backend=backend, device=device, **options)
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        for prompt, one in zip(prompts, llm.generate(prompts, params)):
            found.append([name, prompt, list(one.token_ids), list(one.rounds)])
        llm.engine.close()
print(json.dumps(found))
"""
OFF = {"graph": "off"}
SYNCHRONOUS = [{**OFF, "overlap": 0}, {**OFF, "overlap": 1}]
QUEUED = [*SYNCHRONOUS, *([{"graph": "decode", "overlap": 0}, {"graph": "decode", "overlap": 1}] if HAS_GRAPHS else [])]


EVERYWHERE: list[tuple[str, str, list[dict[str, object]]]] = [
    ("paddle", "cpu", SYNCHRONOUS), ("paddle", "polyemu:0", QUEUED), ("xpu", "polyemu:0", QUEUED),
]  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "device", "settings", "models"),
    [
        pytest.param(
            *place,
            MODELS,
            marks=[pytest.mark.deep, pytest.mark.timeout(900), needs_paddle if place[1] == "cpu" else needs_device],
        )
        for place in EVERYWHERE
    ],
)
def test_texts_and_rounds(
    backend: str,
    device: str,
    settings: list[dict[str, object]],
    models: tuple[str, ...],
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
):
    stored = {name: str(tiny.checkpoint(name)) for name in models}
    given = [backend, device, stored, tiny.PLUGINS, PROMPTS, DRAFTS, TOKENS, settings]
    run = script(RUN, json.dumps(given), timeout=800)
    assert run.returncode == 0, run.stderr[-2000:]
    texts = json.loads(run.stdout.strip().splitlines()[-1])
    assert len(texts) == len(models) * len(PROMPTS) * len(settings)
    parted = [
        (name, one)
        for name, prompt, tokens, rounds in texts
        for one in divergences(tiny.oracle(name), prompt, tokens, rounds, DRAFTS)
    ]
    record_property("near_ties", len(parted))
    with capsys.disabled():
        sys.stdout.write(f"\n{backend} on {device}: {len(texts)} texts, {len(parted)} parted at a near-tie\n")
    assert all(divergence.gap < NEAR for _, divergence in parted), parted
