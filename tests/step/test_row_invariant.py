"""`row_invariant`: the bits of a row depend on that row alone, swept along every way in which the rest of a launch can differ.

A probe is served alone, and then again with one axis moved at a time. Compared are the bits of its target logits and of
every row in every KV cache, the draft's included, never just tokens: equal tokens hide a last digit that differs.
Single kernels are swept by the conformance kit (`row-alone`, `invariant-mode`), texts by `test_lossless.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from polydraft import Engine, SamplingParams
from polydraft.reference import invariant_kernels
from polydraft.runtime.request import Status
from tests.support.emulator import EmulatorDevice, emulated
from tests.support.kernel_doubles import backend_with
from tests.support.runs import engine
from tests.support.tiny import CONFIGS

MODEL, K = "deep", 3
PROBE = tuple((13 * i * i + 7 * i + 5) % CONFIGS[MODEL]["vocab_size"] for i in range(58))
LENGTH = 74
"""Rows that are compared: prompt, several windows, and on both sides of the 64 keys that attention takes at once."""
Bits = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Serving:
    """One way to serve the probe: neighbours that arrive before it and behind it (lengths of their prompts), and the engine."""

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    device: str = "reference"
    chunk: int = 1000
    """Most rows of a prompt in one step."""
    options: Mapping[str, Any] = field(default_factory=dict)
    first: tuple[int, ...] = ()
    """A prompt served to its end before anybody else."""
    proof: Callable[[Engine, Any], bool] = lambda running, request: True
    """Whether the axis was moved at all: (engine, the probe's request)."""

    def engine(self, plugin: object | None = None) -> Engine:
        given = {"draft_tokens": K, "max_num_seqs": 16, "max_batched_tokens": 400, "prefix_cache": False, **self.options}
        given |= {"plugin": plugin} if plugin else {}
        return (
            emulated("policy=lazy", MODEL, overlap=0, **given)
            if self.device == "emulator"
            else engine(MODEL, device=self.device, **given)
        )


def neighbour(length: int, number: int) -> tuple[int, ...]:
    return tuple((number + 3 * i * i) % 90 + 1 for i in range(length))


def shared(num_tokens: int) -> Callable[[Engine, Any], bool]:
    return lambda running, request: running.ledger.num_hits == num_tokens


def replayed(running: Engine, request: Any) -> bool:
    return running.device.counters.graph_replays > 0


AXES: dict[str, dict[str, Serving]] = {
    "width": {
        **{f"K = {k}": Serving(options={"draft_tokens": k}) for k in (0, 1, 2, 5)},
        **{f"{n + 1} requests": Serving(behind=(9,) * n) for n in (1, 2, 3, 7, 15)},
    },
    "position in the batch": {
        **{f"place {n} of 16": Serving(before=(9,) * n, behind=(9,) * (15 - n)) for n in (0, 1, 7, 8, 15)},
        "order of the seed": Serving(before=(9,) * 3, behind=(9,) * 3, device="lazy-seeded", options={"overlap": 0}),
        "prefill first": Serving(before=(9,) * 3, behind=(9, 30), device="lazy-prefill-first", options={"overlap": 0}),
    },
    "padded context": {
        **{f"beside {n} tokens": Serving(before=(n,), behind=(n,)) for n in (1, 57, 70)},
        **{f"blocks of {n}": Serving(options={"block_size": n}) for n in (1, 3, 64, 96)},
        **{f"room for {n}": Serving(options={"max_model_len": n}) for n in (78, 90)},
    },
    "bucket": {
        f"{size} sequences": Serving(
            device="emulator",
            options={"graph": "decode", "graph_sizes": (size,)},
            proof=replayed,
        )
        for size in (1, 2, 8, 16)
    }
    | {
        f"{size} rows": Serving(
            device="emulator",
            options={"graph": "prefill", "graph_sizes": (size,)},
            proof=replayed,
        )
        for size in (58, 64, 100)
    },
    "chunk": {f"of {n}": Serving(chunk=n) for n in (1, 2, 7, 8, 9, 57)}
    | {"of 5, beside windows": Serving(before=(3, 4), chunk=5)},
    "prefix hit": {
        f"of {n}": Serving(
            first=PROBE[:n],
            options={"prefix_cache": True, "block_size": 4},
            proof=shared((n - 1) // 4 * 4),
        )
        for n in (5, 30, 58)
    },
    "preemption": {
        "once or more": Serving(
            before=(20,),
            options={"block_size": 2, "num_blocks": 54},
            proof=lambda running, request: request.num_preemptions > 0,
        )
    },
}
"""What the rest of a launch can differ in, and how each is moved."""


def take_small_chunks(running: Engine, largest: int) -> None:
    take = running.scheduler._take_chunk

    def small(slot: int, budget: int, chunks: list[tuple[int, int]]) -> int:
        return take(slot, min(budget, largest), chunks)

    running.scheduler._take_chunk = small  # type: ignore[method-assign]


def serve(serving: Serving, plugin: object | None = None) -> Bits:
    """Serve the probe until `LENGTH` of its rows are committed; the bits of its logits by position and of its cache rows."""
    running = serving.engine(plugin)
    take_small_chunks(running, serving.chunk)
    if serving.first:
        running.add(serving.first, SamplingParams(max_new_tokens=5, ignore_eos=True))
        while running.has_work:
            running.step()
    long = SamplingParams(max_new_tokens=90, ignore_eos=True)
    for number, length in enumerate(serving.before):
        running.add(neighbour(length, number), long)
    name = running.add(PROBE, long, id="probe")
    for number, length in enumerate(serving.behind, 50):
        running.add(neighbour(length, number), long)
    request, t = running.requests[name], running.slots
    found: Bits = {}
    known = 0
    while not (request.status is Status.RUNNING and t.kv_len[request.slot] >= LENGTH):
        assert running.step(), "the probe did not come so far"
        running.device.synchronize()
        if request.status is Status.RUNNING:
            found |= logits(running, request.slot, known)
            known = int(t.num_known[request.slot])
    assert serving.proof(running, request), "this axis was not moved"
    found |= cache_rows(running, request.slot)
    running.close()
    return found


def contents(running: Engine, buffer: Any) -> NDArray[Any]:
    """What is in a device buffer now."""
    device: Any = running.device
    return device.read(buffer) if isinstance(device, EmulatorDevice) else np.array(buffer.host_array)


def logits(running: Engine, slot: int, known: int) -> Bits:
    """Logits of the tokens that the last step committed, by their positions; nothing of a step that committed none."""
    step, now = running.runner.step, int(running.slots.num_known[slot])
    slots, positions, values = (contents(running, b) for b in (step.logit_slot, step.logit_position, step.logits))
    if now == known:
        return {}
    rows = np.flatnonzero((slots == slot) & (positions >= max(known, len(PROBE))) & (positions < min(now, LENGTH)))
    return {f"logits of token {positions[row]}": values[row].view(np.uint32) for row in rows}


def cache_rows(running: Engine, slot: int) -> Bits:
    """The probe's first `LENGTH` rows of every cache: [LENGTH, heads, dim] each."""
    drafts = [cache for cache in [getattr(running.runner.proposer, "_cache", None)] if cache is not None]
    caches = {f"layer {i}": c for i, c in enumerate(running.runner.caches)} | dict.fromkeys(
        ("draft layer",)[: len(drafts)], *drafts
    )
    positions, size = np.arange(LENGTH), running.ledger.block_size
    blocks = running.ledger.table[slot, positions // size]
    return {
        f"{kind} of {name}": array[blocks, positions % size].view(np.uint32)
        for name, cache in caches.items()
        for kind, array in zip(("keys", "values"), cache.read_logical(), strict=True)
    }


@functools.cache
def alone() -> Bits:
    return serve(Serving())


def differing(some: Bits, others: Bits) -> list[str]:
    """Names of what is in both and differs."""
    return [name for name in some if name in others and not np.array_equal(some[name], others[name])]


@pytest.mark.parametrize(("axis", "name"), [(axis, name) for axis, servings in AXES.items() for name in servings])
def test_bits_do_not_depend_on(axis: str, name: str) -> None:
    found = serve(AXES[axis][name])
    layers = 2 * CONFIGS[MODEL]["num_hidden_layers"]
    assert len(found) >= layers + 10, "too little was compared"
    assert found.keys() <= alone().keys()
    assert differing(found, alone()) == []


def test_everything_is_compared() -> None:
    names = [*(f"{kind} of {layer}" for layer in ("layer 0", "layer 1", "draft layer") for kind in ("keys", "values"))]
    assert set(alone()) == {*names, *(f"logits of token {p}" for p in range(len(PROBE), LENGTH))}
    for bits in alone().values():
        assert np.isfinite(bits.view(np.float32)).all()


# -- the sweeps can fail ---------------------------------------------------------------------------
def leaking(of_row: Callable[[Any, int], Any], contract: str = "linear") -> object:
    """A backend whose `contract` lets the rest of a launch into a row's last digits: scaled by 1 + `of_row` / 2**18."""
    genuine = invariant_kernels.KERNELS[contract]

    def kernel(a: Any, n: int) -> None:
        genuine(a, LIMITS)(n)
        a.out[:n] *= np.float32(1) + np.asarray(of_row(a, n), np.float32).reshape(-1, 1) / 2**18

    return backend_with(**{contract: kernel})


LIMITS = engine(MODEL, draft_tokens=K, max_num_seqs=16, max_batched_tokens=400, prefix_cache=False).resolved.limits
LEAKS: dict[str, Callable[[], object]] = {
    "width": lambda: leaking(lambda a, n: n % 16),
    "position in the batch": lambda: leaking(lambda a, n: np.arange(n) // 4),
    "padded context": lambda: leaking(lambda a, n: a.positions[:n].max(initial=0) // 8, "paged_attention"),
    "chunk": lambda: leaking(lambda a, n: n // 8),
    "preemption": lambda: leaking(lambda a, n: n // 32),
}
"""By axis, a backend that it must find out."""


@pytest.mark.parametrize("axis", LEAKS)
def test_a_sweep_sees_a_row_that_depends_on_others(axis: str) -> None:
    expected = serve(Serving(), LEAKS[axis]())
    assert any(
        differing(serve(serving, LEAKS[axis]()), expected) for serving in AXES[axis].values() if serving.device == "reference"
    )
