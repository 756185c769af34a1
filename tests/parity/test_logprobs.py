"""Log probabilities of the demo model equal those of Hugging Face transformers, on every backend that is here.

`logprobs.json` was written by `tools/logprob_baseline.py`; a backend that computes in 16 bits has their tolerance. Ranks and the
order of the most likely tokens are asked exactly wherever the baseline's numbers stand further apart than the tolerance.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from polydraft import LLM, SamplingParams
from polydraft.plugins.plugins import Plugins
from polydraft.sampling.logprobs import CONTRACTS
from tests.support.depth import among
from tests.support.emulator import Emulator

BASELINE = json.loads(Path(__file__).with_name("logprobs.json").read_text(encoding="utf-8"))
TOLERANCE = {"f32": 2e-4, "f16": 5e-2, "bf16": 4e-1}
TOP = 5
BACKENDS: dict[str, Any] = {
    "reference": "reference",
    "emulator": Emulator("emulator:0?seed=3"),
    "cpu": "cpu",
    "paddle": "paddle",
    "xpu": "xpu",
    "cuda": "cuda",
}
ELSEWHERE = {"xpu": "cpu"}
"""Where a backend is opened whose own chip is not at hand."""


def llm(backend: str, **options: Any) -> LLM:
    """An engine on a backend that is installed, available and reports log probabilities; skips the test elsewhere."""
    given, info, problem = BACKENDS[backend], None, ""
    device = ELSEWHERE.get(backend, "")
    try:
        info = Plugins.load(given, device=device).info()
    except Exception as error:  # noqa: BLE001  whatever keeps a backend from being here
        problem = str(error)
    if info is None:
        pytest.skip(f"{backend} cannot be loaded: {problem}")
    assert info is not None  # a skip does not return
    lacking = [name for name in CONTRACTS if name not in info.contract_versions]
    if not info.available or lacking:
        pytest.skip(f"{backend}: {info.reason or f'it has no {lacking[0]}'}")
    where = {"backend": given, "device": device} if isinstance(given, str) else {"plugin": given}
    return LLM(**where, logprobs=TOP, draft_tokens=3, **options)


QUICK = [name for name in BACKENDS if name not in ("emulator", "xpu")]
"""Without those whose kernels are the reference's and Paddle's."""


@pytest.mark.parametrize("backend", among(QUICK, BACKENDS))
def test_log_probabilities_are_those_of_transformers(backend: str) -> None:
    hold(backend)


def hold(backend: str) -> None:
    """Hold a backend's numbers against the baseline."""
    engine = llm(backend)
    allowed = TOLERANCE[engine.engine.resolved.dtype]
    params = SamplingParams(
        max_new_tokens=len(BASELINE["texts"][0]["token_ids"]), ignore_eos=True, logprobs=TOP, prompt_logprobs=TOP
    )
    outputs = engine.generate([text["prompt_ids"] for text in BASELINE["texts"]], params)
    compared = 0
    for text, output in zip(BASELINE["texts"], outputs, strict=True):
        assert output.prompt_logprobs is not None
        found = [*output.prompt_logprobs[1:], *output.tokens]
        for wanted, got in zip(text["rows"], found, strict=True):
            assert got is not None
            if got.token_id != wanted["token_id"]:
                assert allowed > TOLERANCE["f32"], "another text in float32"
                break  # 16 bits may choose the other one of two near ones; what follows is another text
            check(wanted, got, allowed)
            compared += 1
    assert compared > 150
    engine.close()


def check(wanted: dict[str, Any], got: Any, allowed: float) -> None:
    assert got.logprob == pytest.approx(wanted["logprob"], abs=allowed)
    logprobs = [value for _, value in wanted["top"]]
    gaps = [first - second for first, second in itertools.pairwise(logprobs)]
    for place, (token, logprob) in enumerate(wanted["top"]):
        assert got.top[place][1] == pytest.approx(logprob, abs=allowed)
        apart = min([*gaps[max(place - 1, 0) : place + 1], 1.0])
        if apart > 2 * allowed and place < TOP - 1:
            assert got.top[place][0] == token
    if wanted["token_id"] == wanted["top"][0][0] and gaps[0] > 2 * allowed:
        assert got.rank == 1
