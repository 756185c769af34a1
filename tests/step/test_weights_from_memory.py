"""Weights that a trainer gives as arrays: those of a directory to the bit, all or nothing, and one policy a token."""

from __future__ import annotations

import gc
import re
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from polydraft import LLM, Engine, RequestOutput, SamplingParams
from polydraft.conformance.oracle.checkpoints import tensor_shapes
from polydraft.errors import CapabilityError, CheckpointError, DeviceError
from polydraft.instruments.record import CallRecorder
from polydraft.models.checkpoint import Checkpoint
from tests.step.test_packed_checkpoints import CONFIGS
from tests.support import runs, tiny
from tests.support.depth import deep
from tests.support.published_packings import PUBLISHED, packed
from tools import make_checkpoint

MODEL = "narrow"
MOVED = tiny.moved(MODEL)
PROMPTS = [(5, 9, 11, 3, 9, 2, 7), (5, 9, 11, 3, 9, 2, 8), (1, 2, 3)]
PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True, logprobs=0)
Arrays = dict[str, Any]


def arrays(name: str = MOVED) -> Arrays:
    with Checkpoint(tiny.checkpoint(name)) as opened:
        return {tensor: opened.tensor(tensor) for tensor in opened.names()}


def drain(engine: Engine) -> dict[str, RequestOutput]:
    done: dict[str, RequestOutput] = {}
    while engine.has_work:
        engine.step()
        done |= {o.id: o for o in engine.poll() if o.finished}
    return done | {o.id: o for o in engine.poll()}


def served(engine: Engine, prompts: Any = PROMPTS, params: SamplingParams = PARAMS) -> list[RequestOutput]:
    ids = [engine.add(prompt, params) for prompt in prompts]
    done = drain(engine)
    return [done[i] for i in ids]


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


class OnDevice:
    """What an array on a device looks like to a host."""

    dtype, shape = "torch.float32", (1,)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


class Only:
    """An array that speaks DLPack alone."""

    def __init__(self, array: Any) -> None:
        self._array, self.dtype, self.shape = array, array.dtype, array.shape
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


@pytest.mark.parametrize("device", ["reference", "lazy-1"])
def test_arrays_are_what_a_directory_of_them_is(device: str):
    wanted = tokens(served(runs.engine(MOVED, device=device, draft_tokens=3, logprobs=0)))
    engine = runs.engine(MODEL, device=device, draft_tokens=3, logprobs=0)
    before = tokens(served(engine))
    given = arrays()
    engine.update_weights(given)
    given["model.norm.weight"][:] = 0  # a trainer goes on with its arrays
    assert tokens(served(engine)) == wanted != before
    engine.update_weights(tiny.checkpoint(MODEL))
    assert tokens(served(engine)) == before


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(lambda a: torch.from_numpy(a).requires_grad_(), id="torch"),
        pytest.param(lambda a: torch.from_numpy(a).bfloat16(), id="torch.bfloat16"),
        pytest.param(lambda a: a.astype(np.float16), id="float16"),
        pytest.param(lambda a: Only(torch.from_numpy(a)), id="dlpack"),
        pytest.param(np.asfortranarray, id="another order"),
    ],
)
def test_arrays_of_every_kind_are_read_exactly(kind: Callable[[Any], Any]):
    """Of numbers that all of them have."""
    short = {
        name: (value.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float16).astype(np.float32)
        for name, value in arrays().items()
    }
    short = {name: torch.from_numpy(value).bfloat16().float().numpy() for name, value in short.items()}
    engine, other = (runs.engine(MODEL, draft_tokens=3, logprobs=0) for _ in range(2))
    engine.update_weights({name: kind(value) for name, value in short.items()})
    other.update_weights(short)
    assert tokens(served(engine)) == tokens(served(other))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a.pop("model.layers.0.mlp.down_proj.weight"), "holds no tensor model.layers.0.mlp.down_proj.weight"),
        (lambda a: [a.pop(n) for n in list(a) if "mtp" in n], "add the shard with the MTP tensors"),
        (lambda a: a.update(other=np.zeros(3, np.float32)), "weights in memory: tensor other (one of 1) does not belong"),
        (lambda a: a.update({"model.norm.weight": np.zeros(3, np.float32)}), "tensor model.norm.weight has shape [3], wanted ["),
        (lambda a: a["model.norm.weight"].fill(np.nan), "tensor model.norm.weight holds nan at [0], wanted finite numbers"),
        (lambda a: a.update({"model.norm.weight": [1.0]}), "tensor model.norm.weight is list, wanted an array with shape"),
        (lambda a: a.update({"model.norm.weight": a["model.norm.weight"].astype(np.float64)}), "is float64, wanted float32"),
        (lambda a: a.update({"model.norm.weight": OnDevice()}), "has shape [1], wanted ["),
    ],
)  # fmt: skip
@pytest.mark.parametrize("running", ["finish", "recompute"])
def test_what_is_wrong_leaves_everything_as_it_was(change: Callable[[Arrays], Any], said: str, running: Any):
    """Requests in the middle of their texts do not hear of it."""
    engine = runs.engine(MODEL, draft_tokens=3, logprobs=0)
    ids = [engine.add(prompt, PARAMS) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()
    steps, given = engine.totals.steps, arrays()
    change(given)
    with pytest.raises(CheckpointError) as error:
        engine.update_weights(given, running=running)
    assert said in str(error.value)
    assert (engine.totals.steps, engine.scheduler.num_preemptions) == (steps, 0)
    done = drain(engine)
    assert [done[i].token_ids for i in ids] == tokens(served(runs.engine(MODEL, draft_tokens=3, logprobs=0)))


class Restless:
    """An array that a trainer changes once it was read so often."""

    def __init__(self, array: Any, reads: int, change: Callable[[Any], Any]) -> None:
        self._array, self._reads, self._change = array, reads, change
        self.dtype, self.shape = array.dtype, array.shape

    def __array__(self, *_: Any, **__: Any) -> Any:
        self._reads -= 1
        if self._reads < 0:
            self._change(self._array)
        return self._array


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: np.negative(a, out=a), "weights that were given have changed since they were checked, first seen of norm, "),
        (lambda a: a.fill(np.nan), "tensor model.norm.weight holds nan"),
    ],
)
@pytest.mark.parametrize("running", ["finish", "recompute"])
def test_what_was_checked_is_what_is_written_or_nothing_is_served(change: Callable[[Any], Any], said: str, running: Any):
    """Requests that have begun wait, go on with the weights that are given next, and never with mixed ones."""
    other = runs.engine(MOVED, draft_tokens=3, logprobs=0, weights_digest=True)
    engine = runs.engine(MODEL, draft_tokens=3, logprobs=0, weights_digest=True, enable_sleep_mode=True)
    begun = engine.add(PROMPTS[0], PARAMS)
    for _ in range(3):
        engine.step()
    kept = list(engine.requests[begun].token_ids)
    given = arrays()
    given["model.norm.weight"] = Restless(given["model.norm.weight"], 1, change)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        engine.update_weights(given, running=running)
    assert (engine.weights.digest, engine.has_work, engine.step()) == ("", False, False)
    with pytest.raises(
        DeviceError, match=r"a request was given, and an update of this engine's weights has failed half-way \(.*"
    ):
        engine.add(PROMPTS[1], PARAMS)
    engine.sleep()
    engine.wake_up()
    assert engine.weights.torn, "whatever sleep keeps is no better"
    engine.update_weights(arrays(), running="finish")
    assert engine.weights.digest == other.weights.digest
    done = drain(engine)
    if running == "recompute":
        assert len(done) == 1
        rest = SamplingParams(max_new_tokens=PARAMS.max_new_tokens - len(kept), ignore_eos=True)
        (wanted,) = served(other, [(*PROMPTS[0], *kept)], rest)
        assert done[begun].token_ids == (*kept, *wanted.token_ids)
    assert tokens(served(engine)) == tokens(served(other))


def test_what_lies_on_a_device_is_named():
    engine, given = runs.engine(MODEL), arrays()
    OnDevice.shape = given["model.norm.weight"].shape
    with pytest.raises(CheckpointError, match=r"norm\.weight cannot be read as an array on the host \(can't convert cuda:0"):
        engine.update_weights({**given, "model.norm.weight": OnDevice()})


def mix_no_policies(make: Callable[..., Engine], running: Any) -> None:
    """64 requests run and 16 wait when weights are replaced on an engine that `make(model, **options)` builds; each token has the
    log probability that one policy alone gives it."""
    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(1, 40, rng.integers(2, 9)).tolist()) for _ in range(80)]
    options: Any = {"max_num_seqs": 64, "draft_tokens": 3, "logprobs": 0, "num_blocks": 2000}
    engine = make(MODEL, **options)
    ids = [engine.add(prompt, PARAMS) for prompt in prompts]
    for _ in range(4):
        engine.step()
    engine.update_weights(arrays(), running=running)
    kept = {i: len(engine.requests[i].token_ids) if i in engine.requests else PARAMS.max_new_tokens for i in ids}
    done = drain(engine)
    for number, i in enumerate(ids):
        if running == "finish":
            assert kept[i] in (0, PARAMS.max_new_tokens)
        assert kept[i] < PARAMS.max_new_tokens or running == "finish" or number >= 64
    for policy in (MODEL, MOVED):
        alone = runs.engine(policy, max_num_seqs=64, draft_tokens=0, logprobs=0, num_blocks=2000)
        asked = {}
        for prompt, i in zip(prompts, ids, strict=True):
            begin, end = (0, kept[i]) if policy == MODEL else (kept[i], PARAMS.max_new_tokens)
            if begin < end:
                params = SamplingParams(max_new_tokens=end - begin, ignore_eos=True, logprobs=0)
                asked[i] = slice(begin, end), alone.add((*prompt, *done[i].token_ids[:begin]), params)
        said = drain(alone)
        for i, (mine, asked_as) in asked.items():
            assert said[asked_as].token_ids == done[i].token_ids[mine], (i, policy)
            got, wanted = ([one.logprob or 0.0 for one in tokens] for tokens in (done[i].tokens[mine], said[asked_as].tokens))
            assert np.allclose(got, wanted, atol=1e-4), (i, policy)


@pytest.mark.parametrize(
    ("device", "running"),
    [
        (device, running) if (device, running) == ("lazy-2", "recompute") else deep((device, running))
        for device in ("reference", "lazy-1", "lazy-2")
        for running in ("finish", "recompute")
    ],
)
def test_no_text_mixes_policies_unasked(device: str, running: Any):
    mix_no_policies(partial(runs.engine, device=device), running)


@pytest.mark.parametrize("running", ["finish", "recompute"])
def test_no_text_mixes_policies_on_the_cpu_backend(running: Any):
    def make(model: str, **options: Any) -> Engine:
        return LLM(**{"model": str(tiny.checkpoint(model)), "plugins": tiny.PLUGINS, "backend": "cpu", **options}).engine

    mix_no_policies(make, running)


@pytest.mark.parametrize("count", [6, deep(1000)])
def test_updates_take_no_memory(count: int):
    engine = runs.engine(MODEL, draft_tokens=3, logprobs=0)
    both = [arrays(), arrays(MODEL)]
    for given in both:
        engine.update_weights(given)
    gc.collect()
    allocations = engine.device.counters.allocations
    tracemalloc.start()
    engine.update_weights(both[0])
    first, _ = tracemalloc.get_traced_memory()
    for number in range(count):
        engine.update_weights(both[number % 2])
    gc.collect()
    last, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert engine.device.counters.allocations == allocations
    assert last - first < 10_000


def test_packed_arrays_are_those_of_a_packed_checkpoint(tmp_path: Any):
    config = CONFIGS["mimo"]
    shapes = tensor_shapes(config)
    first, second = (make_checkpoint.draw(shapes, config, np.random.default_rng(seed), embedding_first=False) for seed in (0, 1))
    for name in ("awq", "ct-fp8-channel", "ct-int8-w8a8"):
        tensors, packed_config, _ = packed(first, config, PUBLISHED[name])
        others, _, _ = packed(second, config, PUBLISHED[name])
        model, other = (
            make_checkpoint.write(tmp_path / name / part, packed_config, t) for part, t in (("a", tensors), ("b", others))
        )
        with closing(LLM(model=str(model), backend="reference", draft_tokens=3)) as llm:
            llm.update_weights(others)
            found = llm.generate([[5, 9, 11]], SamplingParams(max_new_tokens=8, ignore_eos=True))[0].token_ids
        with closing(LLM(model=str(other), backend="reference", draft_tokens=3)) as llm:
            assert llm.generate([[5, 9, 11]], SamplingParams(max_new_tokens=8, ignore_eos=True))[0].token_ids == found


def test_what_cannot_be_updated_is_refused():
    engine = runs.engine(MODEL)
    with pytest.raises(CapabilityError, match="draft weights were given, but proposer mtp has no checkpoint of its own"):
        engine.update_weights(arrays(), draft={})
    engine = runs.engine(MODEL, instruments=(CallRecorder(),))
    with pytest.raises(CapabilityError, match="instrument record reads weights where they were loaded from; write them to a dir"):
        engine.update_weights(arrays())
