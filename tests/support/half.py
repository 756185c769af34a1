"""Texts of Paddle's places in 16 bits, beside those of the oracle: how far apart the choices are where the two part.

Tests of `tests/paddle` and `tests/device` call it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from polydraft.conformance import probe
from polydraft.conformance.oracle import OracleModel
from tests.support.near_ties import Divergence, divergences
from tests.support.paddle import script
from tools import make_checkpoint

TEXTS = """
import json, sys
from polydraft import LLM, SamplingParams
options, prompts = json.loads(sys.argv[1])
llm = LLM(draft_tokens=3, max_num_seqs=4, max_model_len=64, overlap=1, **options)
out = llm.generate(prompts, SamplingParams(max_new_tokens=24, ignore_eos=True))
print(json.dumps([[list(one.token_ids), list(one.rounds)] for one in out]))
llm.engine.close()
"""
PROMPTS = [[3, 1, 4], [2, 7, 1, 8, 2, 8], [5], list(range(1, 20)), [9, 9, 2], [31, 41, 59], [26, 5, 35], [8, 9, 7, 9]]
CLOSE = {"bf16": 0.2, "f16": 0.03}
"""Logits between choices that rounding to a dtype may decide; the best two are about one apart."""


def parted(model: Path, backend: str, device: str, dtype: str, **options: object) -> list[Divergence]:
    """Where the texts of `PROMPTS` part from the oracle's."""
    options = {"backend": backend, "device": device, "model": str(model), "dtype": dtype, **options}
    run = script(TEXTS, json.dumps([options, PROMPTS]))
    assert run.returncode == 0, run.stderr[-2000:]
    oracle, texts = OracleModel.from_dir(model), json.loads(run.stdout)
    pairs = zip(PROMPTS, texts, strict=True)
    return [one for prompt, (tokens, rounds) in pairs for one in divergences(oracle, prompt, tokens, rounds, 3)]


def with_close_selection_biases(folder: Path) -> Path:
    """A model with experts whose selection biases differ by less than bfloat16 tells apart there: rounded, they choose other
    experts, and each text of `PROMPTS` becomes another."""
    tensors = probe.weights(model="experts")
    far = {name: value + np.float32(64) for name, value in tensors.items() if name.endswith("correction_bias")}
    return make_checkpoint.write(folder, probe.CONFIGS["experts"], tensors | far)
