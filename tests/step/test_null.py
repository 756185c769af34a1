"""The null backend: every draft accepted, every request ends by length, and nothing of the host's work is spared."""

from __future__ import annotations

from typing import Any

import pytest

from polydraft import LLM, SamplingParams
from polydraft.contracts import REGISTRY
from polydraft.errors import DeviceError
from tests.support.runs import come_to_rest

LOADS: dict[str, dict[str, Any]] = {
    "plain": {"max_num_seqs": 4},
    "chunks": {"max_num_seqs": 4, "max_batched_tokens": 20},
    "pressure": {"max_num_seqs": 6, "max_batched_tokens": 40, "num_blocks": 20},
    "no drafts": {"max_num_seqs": 3, "draft_tokens": 0},
    "overlap": {"max_num_seqs": 3, "overlap": 1},
}


@pytest.mark.parametrize("load", LOADS)
def test_every_window_is_full(load: str) -> None:
    llm = LLM(backend="null", **{"draft_tokens": 3, **LOADS[load]})
    outputs = llm.generate([[i + 1] * (30 + i) for i in range(8)], SamplingParams(max_new_tokens=51, ignore_eos=True))
    drafts = llm.engine.resolved.limits.num_drafts
    full = [drafts] * (50 // (drafts + 1))
    rest = 50 % (drafts + 1)
    for output in outputs:
        assert output.finish_reason == "length"
        assert len(output.token_ids) == 51
        assert list(output.rounds) == full + ([rest - 1] if rest else [])
    assert (llm.engine.scheduler.num_preemptions > 0) == (load == "pressure")
    come_to_rest(llm.engine)


def test_other_devices_are_refused() -> None:
    with pytest.raises(DeviceError, match="the null backend runs on 'null', got 'null:0,1'"):
        LLM(backend="null", device="null:0,1")


def test_what_its_kernels_take_is_counted() -> None:
    llm = LLM(backend="null", draft_tokens=3)
    extra = llm.engine.device.counters.extra
    assert extra == {"kernel_ns": 0}
    llm.generate([1, 2, 3], SamplingParams(max_new_tokens=9))
    assert extra["kernel_ns"] > 0


def test_its_records_are_those_of_whoever_is_scheduled() -> None:
    """They are packed anew only where others want them, and programs of several kinds share one record."""
    llm = LLM(backend="null", draft_tokens=3, max_num_seqs=3, logprobs=5)
    asked = [(0, 9, 0.0), (None, 40, 0.0), (5, 21, 1.0), (2, 33, 0.0), (None, 17, 0.0), (1, 26, 1.0)]  # both kinds, in turns
    wishes = [SamplingParams(max_new_tokens=n, ignore_eos=True, logprobs=top, temperature=warm) for top, n, warm in asked]
    outputs = llm.generate([[1, 2 + i] for i in range(len(wishes))], wishes)
    for output, (top, count, _) in zip(outputs, asked, strict=True):
        assert sum(record.logprob is not None for record in output.tokens) == (0 if top is None else count)
        assert {rows["ids"].shape[1] - 1 for rows in output.logprobs} == (set() if top is None else {top})
        assert len(output.token_ids) == count


def test_it_keeps_neither_weights_nor_caches() -> None:
    llm = LLM(backend="null", draft_tokens=3)
    assert all(weight.nbytes == 0 for weight in llm.engine.runner.memory.weights.values())
    assert all(cache.nbytes == 0 for cache in llm.engine.runner.memory.caches.values())


def test_it_says_what_it_is() -> None:
    info = LLM(backend="null").engine.info
    assert info.evidence == "double only"
    assert "its text means nothing" in info.summary
    assert not info.capabilities.synthetic_acceptance
    assert set(info.contract_versions) == set(REGISTRY.names())
