"""Whether weights and KV blocks of an engine fit, and what is said where they do not."""

import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from polydraft import LLM, reference
from polydraft.conformance.target import wrap
from polydraft.errors import DeviceError
from polydraft.host.device_memory import LOGITS, RESERVE, SHARE, check_fits, check_weights
from polydraft.reference.device import ReferenceDevice
from polydraft.resolve import EVERY_SLOT
from tests.support import tiny

BLOCK = 1 << 20


def resolved(num_blocks: int, max_blocks: int = 8, block_size: int = 16) -> Any:
    limits = SimpleNamespace(num_blocks=num_blocks, max_blocks=max_blocks, block_size=block_size, max_len=max_blocks * block_size)
    return SimpleNamespace(limits=limits, describe=lambda: {"kv_cache_bytes": num_blocks * BLOCK})


def device(free: int) -> Any:
    return SimpleNamespace(spec="chip:0", free_memory=lambda: free)


def test_what_fits_is_silent():
    check_fits(device(100 * BLOCK + RESERVE), resolved(100))
    does_not_tell: Any = SimpleNamespace(spec="chip:0")
    check_fits(does_not_tell, resolved(1 << 40))


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (
            99 * BLOCK + RESERVE,
            "0.35 GiB free behind the weights, and 100 KV blocks take 100.0 MiB; 99 would fit: --num-blocks 99",
        ),
        (8 * BLOCK + RESERVE, "8 would fit: --num-blocks 8"),
        (3 * BLOCK + RESERVE, "3 would fit, too few for one request of 128 tokens: --max-model-len 48 --num-blocks 3"),
        (RESERVE, "not one would fit: choose a smaller model, or free the device of what else runs on it"),
        (5 * BLOCK, "not one would fit"),
    ],
)
def test_what_would_fit_is_said_in_one_sentence(free: int, said: str):
    with pytest.raises(DeviceError) as raised:
        check_fits(device(free), resolved(100))
    assert str(raised.value).startswith("device chip:0 has ")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_memory_in_which_ranks_meet_is_left_for_them():
    check_fits(device(100 * BLOCK + RESERVE), resolved(90), 10 * BLOCK)
    with pytest.raises(
        DeviceError, match=r"behind the weights and 10.0 MiB in which ranks meet, and 91 KV blocks .*: --num-blocks 90"
    ):
        check_fits(device(100 * BLOCK + RESERVE), resolved(91), 10 * BLOCK)


def test_an_engine_leaves_what_collectives_will_take(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ReferenceDevice, "free_memory", lambda _: 4 << 30, raising=False)
    for taken, said in (
        (1 << 30, ""),
        (4 << 30, "free behind the weights and 4.00 GiB in which ranks"),
    ):
        plugin = wrap(reference, polydraft_collectives=lambda answer, device, group, taken=taken: replace(answer, nbytes=taken))
        with pytest.raises(DeviceError, match=said) if said else nullcontext():
            LLM(model=str(tiny.checkpoint("narrow")), plugin=plugin, plugins=tiny.PLUGINS, tensor_parallel=2).engine.close()


def test_what_would_fit_does_fit():
    for free in (3 * BLOCK + RESERVE, 60 * BLOCK + RESERVE + 17):
        check_fits(device(free), resolved((free - RESERVE) // BLOCK))


def test_an_engine_asks_behind_its_weights(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    def free_memory(self: ReferenceDevice) -> int:
        asked.append(self.memory())
        return 0

    monkeypatch.setattr(ReferenceDevice, "free_memory", free_memory, raising=False)
    with pytest.raises(
        DeviceError, match=r"the weights take [0-9.]+ MiB in f32, and device cpu has 0.0 MiB free; choose a smaller"
    ):
        LLM(model=str(tiny.checkpoint("narrow")), backend="reference", plugins=tiny.PLUGINS)
    assert asked == [0]
    monkeypatch.setattr(ReferenceDevice, "free_memory", lambda self: free_memory(self) + (1 << 19), raising=False)
    with pytest.raises(DeviceError, match="not one would fit"):
        LLM(model=str(tiny.checkpoint("narrow")), backend="reference", plugins=tiny.PLUGINS, num_blocks=1 << 20)
    assert len(asked) == 3


WEIGHTS = {"embed": 6 * BLOCK, "layers.0.qkv": 10 * BLOCK, "mtp.0.proj": 4 * BLOCK}


@pytest.mark.parametrize(
    ("free", "dtype", "said"),
    [
        (16, "bf16", "without the 4.0 MiB of the MTP head they fit: --proposer none"),
        (16, "f32", "--proposer none, or in 16 bits they fit: --dtype bf16, where the backend has it"),
        (10, "f32", "has 10.0 MiB free; in 16 bits they fit: --dtype bf16, where the backend has it"),
        (15, "bf16", "has 15.0 MiB free; choose a smaller model, or a device with more memory"),
    ],
)
def test_what_of_the_weights_would_fit_is_said_before_they_are_read(free: int, dtype: str, said: str):
    asked: Any = SimpleNamespace(dtype=dtype)
    check_weights(device(20 * BLOCK), asked, WEIGHTS)
    with pytest.raises(DeviceError) as raised:
        check_weights(device(free * BLOCK), asked, WEIGHTS)
    assert str(raised.value).startswith(f"the weights take 20.0 MiB in {dtype}, and device chip:0 has ")
    assert str(raised.value).endswith(said)


def test_loading_is_told_byte_by_byte():
    told: list[tuple[int, int]] = []

    def loading(stage: str, done: int, total: int) -> None:
        assert stage == "weights"  # this device has no graphs
        told.append((done, total))

    llm = LLM(model=str(tiny.checkpoint("narrow")), backend="reference", loading=loading)
    sizes = [4 * value.size for value in llm.engine.weights.canonical().values()]
    llm.engine.close()
    assert told == sorted(told)
    assert told[-1] == (sum(sizes), sum(sizes))
    assert len(told) == len(sizes)


def opened(**wishes: Any) -> Any:
    """An engine of eight requests of 64 tokens on the reference, closed."""
    wishes = {"max_num_seqs": 8, "max_model_len": 64, "draft_tokens": 0, **wishes}
    engine = LLM(model=str(tiny.checkpoint("narrow")), plugin=reference, plugins=tiny.PLUGINS, **wishes).engine
    engine.close()
    return engine


def reason(engine: Any, name: str) -> str:
    return next(one.reason for one in engine.resolved.decisions if one.name == name)


def free_for(resolved: Any, blocks: int) -> int:
    """Bytes of which so many blocks are the share."""
    limits, block = resolved.limits, resolved.describe()["kv_cache_bytes"] // resolved.limits.num_blocks
    return int((blocks * block + LOGITS * 4 * limits.max_logit_rows * limits.vocab_size) / SHARE) + RESERVE + 1


def test_blocks_take_their_share_of_what_a_device_says_is_free(monkeypatch: pytest.MonkeyPatch):
    every = opened().resolved
    block = every.describe()["kv_cache_bytes"] // every.limits.num_blocks
    monkeypatch.setattr("polydraft.resolve.CACHE_BUDGET", block)
    assert opened().resolved.limits.num_blocks == every.limits.max_blocks, "of a device that does not tell"
    for fit in (20, every.limits.num_blocks + 1):
        free = free_for(every, fit)
        monkeypatch.setattr(ReferenceDevice, "free_memory", lambda _, free=free: free, raising=False)
        engine, wanted = opened(), min(fit, every.limits.num_blocks)
        assert engine.resolved.limits.num_blocks == wanted
        assert engine.resolved.describe()["kv_cache_bytes"] == wanted * block
        assert sum(cache.nbytes for cache in engine.runner.memory.caches.values()) == wanted * block
        assert reason(engine, "num_blocks") == (
            "what 90% of the memory hold that weights have left" if fit == wanted else EVERY_SLOT
        )
        assert opened(num_blocks=17).resolved.limits.num_blocks == 17, "what is asked for is kept to"


def test_what_devices_that_do_not_tell_are_given_is_given_where_it_fits(monkeypatch: pytest.MonkeyPatch):
    every = opened().resolved
    block = every.describe()["kv_cache_bytes"] // every.limits.num_blocks
    for fit in (7, every.limits.num_blocks):
        monkeypatch.setattr(ReferenceDevice, "free_memory", lambda _, fit=fit: fit * block + RESERVE, raising=False)
        assert opened().resolved.limits.num_blocks == fit


def test_ranks_have_as_many_blocks_as_the_one_with_least_memory(monkeypatch: pytest.MonkeyPatch):
    whole = opened(tensor_parallel=2).resolved
    monkeypatch.setattr("polydraft.resolve.CACHE_BUDGET", 1)
    frees = {"rank 1": free_for(whole, 20)}
    monkeypatch.setattr(
        ReferenceDevice, "free_memory", lambda _: frees.get(threading.current_thread().name, free_for(whole, 24)), raising=False
    )
    assert opened(tensor_parallel=2).resolved.limits.num_blocks == 20
    frees["rank 1"] = free_for(whole, 28)
    assert opened(tensor_parallel=2).resolved.limits.num_blocks == 24
