"""The benchmark by regions walks a whole step and names each launch: on the reference, which has no graphs and no events."""

import argparse
import time
from types import SimpleNamespace
from typing import Any

import pytest

import polydraft_cuda
from bench import gpu_regions
from polydraft.config import EngineConfig
from polydraft.reference.device import ReferenceDevice
from polydraft.reference.table import NumpyCache


class Timer:
    """Stands for a timed event."""

    def record(self, stream: Any) -> None:
        del stream
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def since(self, other: "Timer") -> float:
        return 1e3 * (self.seconds - other.seconds)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference with the few things that the benchmark asks of the CUDA backend."""

    def capture(stream: Any, fn: Any) -> Any:
        del stream
        return SimpleNamespace(replay=lambda stream: fn())

    def configured(values: dict[str, Any]) -> EngineConfig:
        return EngineConfig.from_mapping({**values, "backend": "reference", "dtype": "f32"})

    monkeypatch.setattr(ReferenceDevice, "timer", lambda self: Timer(), raising=False)
    monkeypatch.setattr(ReferenceDevice, "fill_bytes", lambda self, buffer, byte: None, raising=False)
    monkeypatch.setattr(NumpyCache, "buffer", None, raising=False)
    monkeypatch.setattr(polydraft_cuda, "polydraft_graph_capture", lambda device: SimpleNamespace(capture=capture))
    monkeypatch.setattr(gpu_regions, "EngineConfig", SimpleNamespace(from_mapping=configured))
    monkeypatch.setattr(gpu_regions, "BATCHED_TOKENS", 64)


@pytest.mark.usefixtures("stand_in")
def test_every_region_of_every_batch_has_a_row():
    options = argparse.Namespace(shape="tiny", batches=(1, 2), context=60, prompt=32, repeats=1, sustain=0.001)
    rows = gpu_regions.measure(options, 4e12)
    found = gpu_regions.cells({"rows": rows})
    assert list(found) == [(drafts, batch) for drafts in (0, 3) for batch in (1, 2)]
    always = {*gpu_regions.SHOWN, *gpu_regions.PROJECTIONS, *gpu_regions.WHOLE}
    for (drafts, _), regions in found.items():
        assert set(regions) == always | ({f"draft pass {i}" for i in range(3)} if drafts else set())
        assert all(row["us"] > 0 for row in regions.values())
    assert found[3, 2]["attention"]["floor_bytes"] == 2 * found[3, 1]["attention"]["floor_bytes"]
    (prompts,) = [row for row in rows if row["region"] == "prefill"]
    assert (prompts["batch"], prompts["context"]) == (2, 32)
    assert 0 < prompts["operations_per_s"]
