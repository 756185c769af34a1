"""Layers with sliding windows: blocks are shared as without, and kernels that nobody says have windows are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polydraft import LLM, SamplingParams
from polydraft.errors import CapabilityError
from tests.oracle import greedy_rounds
from tests.step.test_kv_quant import PACK
from tests.support import tiny
from tests.support.runs import Ask, drive, oracle

MODEL = "with-windows"
COMMON = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3)
OPTIONS: dict[str, Any] = {"model": str(tiny.checkpoint(MODEL)), "plugins": tiny.PLUGINS, "block_size": 4, "draft_tokens": 3}


@pytest.mark.parametrize("backend", ["reference", "cpu", "emulator"])
def test_blocks_behind_a_window_are_shared(backend: str) -> None:
    """A request that begins with another's text goes on from its blocks: all their rows are there, seen or not."""
    llm = LLM(**OPTIONS, backend=backend, max_num_seqs=2)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    asks = [Ask((*COMMON, *rest), params, 6 * place) for place, rest in enumerate([(2,), (7, 1), (2, 8, 1), (2,)])]
    for ask, output in zip(asks, drive(llm.engine, asks), strict=True):
        wanted = greedy_rounds(oracle(MODEL), ask.prompt_ids, 3, 12, ask.stop_ids)
        assert (output.token_ids, output.rounds) == (tuple(wanted.token_ids), tuple(wanted.rounds))
    assert llm.engine.ledger.num_hits >= 8
    llm.engine.close()


def test_a_pack_that_serves_attention_is_refused(tmp_path: Path) -> None:
    """What a backend declares says nothing about other kernels."""
    file = tmp_path / "strange.py"
    file.write_text(PACK.replace("NAME", repr("paged_attention")))
    given = {**OPTIONS, "plugins": (*tiny.PLUGINS, str(file)), "backend": "reference"}
    with pytest.raises(CapabilityError, match=r"^sliding windows of model with-windows: kernel pack '.*' serves paged"):
        LLM(**given)
    LLM(**{**given, "model": str(tiny.checkpoint("narrow"))}).close()
