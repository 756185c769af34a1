"""Whether the KV blocks of an engine fit, and what is said where they do not."""

from types import SimpleNamespace
from typing import Any

import pytest

from polydraft import LLM
from polydraft.errors import DeviceError
from polydraft.host.kv_memory import RESERVE, check_fits
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


def test_what_would_fit_does_fit():
    for free in (3 * BLOCK + RESERVE, 60 * BLOCK + RESERVE + 17):
        check_fits(device(free), resolved((free - RESERVE) // BLOCK))


def test_an_engine_asks_behind_its_weights(monkeypatch: pytest.MonkeyPatch):
    from polydraft.reference.device import ReferenceDevice

    asked: list[int] = []

    def free_memory(self: ReferenceDevice) -> int:
        asked.append(self.memory())
        return 0

    monkeypatch.setattr(ReferenceDevice, "free_memory", free_memory, raising=False)
    with pytest.raises(DeviceError, match="not one would fit"):
        LLM(model=str(tiny.checkpoint("narrow")), backend="reference", plugins=tiny.PLUGINS)
    assert len(asked) == 1
