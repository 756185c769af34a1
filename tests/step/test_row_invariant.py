"""`row_invariant`: the bits of a row depend on that row alone, swept along every way in which the rest of a launch can differ.

A probe is served alone, and then again with one axis moved at a time. Compared are the bits of its target logits and of
every row in every KV cache, the draft's included, never just tokens: equal tokens hide a last digit that differs.
The sweeps need nothing of a backend but what its seam has, so `BACKENDS` are those that declare the capability and run anywhere.
Single kernels are swept by the conformance kit (`row-alone`, `invariant-mode`), texts by `test_lossless.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from polydraft import Engine, SamplingParams
from polydraft.host.request import Status
from polydraft.reference import invariant_kernels
from tests.support.cpu import needs_kernels
from tests.support.emulator import emulated
from tests.support.kernel_doubles import backend_with
from tests.support.runs import engine
from tests.support.tiny import CONFIGS

MODEL, K = "deep", 3
PROBE = tuple((13 * i * i + 7 * i + 5) % CONFIGS[MODEL]["vocab_size"] for i in range(58))
LENGTH = 74
"""Rows that are compared: prompt, several windows, and on both sides of the 64 keys that attention takes at once."""
Bits = dict[str, NDArray[Any]]
BACKENDS: dict[str, tuple[Any, ...]] = {"reference": (), "emulator": (), "cpu": (needs_kernels,)}
"""Those that declare `row_invariant` and run anywhere, with what their tests are marked by."""


@dataclass(frozen=True)
class Serving:
    """One way to serve the probe: neighbours that arrive before it and behind it (lengths of their prompts), and the engine."""

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    order: str = ""
    """A device of `runs.ORDERS`, which packs rows in another order."""
    chunk: int = 1000
    """Most rows of a prompt in one step."""
    options: Mapping[str, Any] = field(default_factory=dict)
    first: tuple[int, ...] = ()
    """A prompt served to its end before anybody else."""
    proof: Callable[[Engine, Any], bool] = lambda running, request: True
    """Whether the axis was moved at all: (engine, the probe's request)."""

    def engine(self, backend: str = "reference", plugin: object | None = None) -> Engine:
        given: dict[str, Any] = {
            "draft_tokens": K,
            "max_num_seqs": 16,
            "max_batched_tokens": 400,
            "prefix_cache": False,
            "graph": "off",
        }
        given |= {"overlap": 0, **self.options, **({"plugin": plugin} if plugin else {})}
        if self.order:
            return engine(MODEL, device=self.order, **given)
        return (
            emulated("policy=lazy", MODEL, **given) if backend == "emulator" else engine(MODEL, **{"backend": backend, **given})
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
        "order of the seed": Serving(before=(9,) * 3, behind=(9,) * 3, order="lazy-seeded"),
        "prefill first": Serving(before=(9,) * 3, behind=(9, 30), order="lazy-prefill-first"),
    },
    "padded context": {
        **{f"beside {n} tokens": Serving(before=(n,), behind=(n,)) for n in (1, 57, 70)},
        **{f"blocks of {n}": Serving(options={"block_size": n}) for n in (1, 3, 64, 96)},
        **{f"room for {n}": Serving(options={"max_model_len": n}) for n in (78, 90)},
    },
    "bucket": {
        f"{size} sequences": Serving(
            options={"graph": "decode", "graph_sizes": (size,)},
            proof=replayed,
        )
        for size in (1, 2, 8, 16)
    }
    | {
        f"{size} rows": Serving(
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


def serve(serving: Serving, backend: str = "reference", plugin: object | None = None) -> Bits:
    """Serve the probe until `LENGTH` of its rows are committed; the bits of its logits by position and of its cache rows."""
    running = serving.engine(backend, plugin)
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
    """What is in a device buffer now, the way every device can tell."""
    device, event = running.device, running.device.event()
    staging = device.staging(f"copy of {buffer.name}", buffer.shape, buffer.dtype)
    device.download(device.stream, staging, buffer, buffer.shape[0])
    event.record(device.stream)
    event.synchronize()
    return np.array(staging.array)


def logits(running: Engine, slot: int, known: int) -> Bits:
    """Logits of the tokens that the last step committed, by their positions; nothing of a step that committed none."""
    buffers, now = running.runner.memory.buffers, int(running.slots.num_known[slot])
    slots, positions, values = (contents(running, buffers[name]) for name in ("logit_slot", "logit_position", "logits"))
    if now == known:
        return {}
    rows = np.flatnonzero((slots == slot) & (positions >= max(known, len(PROBE))) & (positions < min(now, LENGTH)))
    return {f"logits of token {positions[row]}": values[row].view(np.uint32) for row in rows}


def cache_rows(running: Engine, slot: int) -> Bits:
    """The probe's first `LENGTH` rows of every cache: [LENGTH, heads, dim] each."""
    positions, size = np.arange(LENGTH), running.ledger.block_size
    blocks = running.ledger.table[slot, positions // size]
    return {
        f"{kind} of {name}": array[blocks, positions % size].view(np.uint32)
        for name, cache in running.runner.memory.caches.items()
        for kind, array in zip(("keys", "values"), cache.read_logical(), strict=True)
    }


@functools.cache
def alone(backend: str) -> Bits:
    return serve(Serving(), backend)


def differing(some: Bits, others: Bits) -> list[str]:
    """Names of what is in both and differs."""
    return [name for name in some if name in others and not np.array_equal(some[name], others[name])]


def sweeps() -> Iterator[Any]:
    """Every point of every axis on every backend; row orders are the reference's alone, and buckets need graphs. The emulator
    computes like the reference, so it adds its graphs and nothing else. `make test` takes every fifth one."""
    rest = itertools.cycle(((), *4 * ((pytest.mark.deep,),)))
    for backend, marks in BACKENDS.items():
        for axis, servings in AXES.items():
            if backend == ("reference" if axis == "bucket" else "emulator"):
                continue
            for name, serving in servings.items():
                if not serving.order or backend == "reference":
                    yield pytest.param(backend, axis, name, marks=(*marks, *next(rest)), id=f"{backend}-{axis}-{name}")


@pytest.mark.parametrize(("backend", "axis", "name"), list(sweeps()))
def test_bits_do_not_depend_on(backend: str, axis: str, name: str) -> None:
    found, wanted = serve(AXES[axis][name], backend), alone(backend)
    layers = 2 * CONFIGS[MODEL]["num_hidden_layers"]
    assert len(found) >= layers + 10, "too little was compared"
    assert found.keys() <= wanted.keys()
    assert differing(found, wanted) == []


@pytest.mark.parametrize("backend", [pytest.param(name, marks=marks) for name, marks in BACKENDS.items()])
def test_everything_is_compared(backend: str) -> None:
    names = [*(f"{kind} of {layer}" for layer in ("layers.0", "layers.1", "mtp.0") for kind in ("keys", "values"))]
    assert set(alone(backend)) == {*names, *(f"logits of token {p}" for p in range(len(PROBE), LENGTH))}
    for bits in alone(backend).values():
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
    expected = serve(Serving(), plugin=LEAKS[axis]())
    servings = [serving for serving in AXES[axis].values() if not serving.order]
    assert any(differing(serve(serving, plugin=LEAKS[axis]()), expected) for serving in servings)
