"""Checks of memory from outside (L6): what is in use does not grow with launches and steps, and launches allocate nothing.

What is in use is asked of somebody who sees what the kit itself allocates on the device: the driver or framework, where the
device passes the question on (`TellsMemory`), or the C library's heap, where device memory lies in it. Where nobody does, it is
unseen. Allocations are noticed as calls of the device's own functions. No counter of the backend is believed.
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from typing import Any, Final, NamedTuple

import numpy as np

from polydraft.backend import CacheSpec
from polydraft.conformance import refill
from polydraft.conformance.check import Check, Tally, Unseen
from polydraft.conformance.kernel_checks import opened_for
from polydraft.conformance.lossless_checks import K, working_dtype
from polydraft.conformance.modes import Mode, first_mode, further_modes
from polydraft.conformance.probe import prompts
from polydraft.conformance.serving import Ask, serve
from polydraft.conformance.target import Opened, Target, bare
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.base import ParamSpec
from polydraft.contracts.composite import Composite
from polydraft.contracts.inputs import Kernel, contract_of
from polydraft.device import Buffer, Device

SEEN: Final = 1 << 22
"""Bytes of the allocation that a witness has to see: more than the pages that drivers deal in."""
MOST_SMALL: Final = 8192
"""Small allocations of which a witness has to see one."""
LAUNCHES: Final = 128
"""Launches of a binding between two looks, at least."""
AHEAD: Final = 64
"""Launches that are enqueued before one waits."""
ROUNDS: Final = 16
"""Times that the same is done between looks, at most: what grows in each of them grows for ever, and once that it does not is
proof. A driver's pools grow until they have held as much as is ever under way: PoCL's took up to 8 rounds of 85 steps."""
SLACK: Final = 512
"""Bytes that the host's own bookkeeping may take in a round."""
OF_ALL: Final = re.compile(rb'type="(current|mmap|fast|rest)"[^>]* size="(\d+)"')
"""Of what `malloc_info` says of all arenas together: bytes that they have, that were mapped beside them, and that are free."""
LEAST_KEPT: Final = 16
"""Bytes a launch below which growth is bookkeeping, too: the smallest allocation of the C library takes 32."""


LEAST_REFILLS: Final = 2
"""Times that each weight is refilled between two looks, at least."""
SIDE: Final = 1024
"""Inputs and outputs of a weight, and blocks of a cache, of such a device."""
OF_A_DEVICE: Final = 1 << 16
"""Bytes that the host's bookkeeping may keep of a device that was closed: far less than its memory."""


def checks() -> Iterator[Check]:
    """Every check of this kind."""
    for kernel in (*REGISTRY, *COMPOSITES.values()):
        run, whole = partial(_launches, kernel), isinstance(kernel, Composite)
        yield Check(f"L6/memory-of-launches/{kernel.name}", run, kernel=kernel.name, optional=whole, features=kernel.features)
    yield Check("L6/memory-of-refills", _refills, ("update_weights",))
    yield Check("L6/memory-of-devices", _devices)
    yield Check("L6/memory-of-steps", partial(_steps, "off"))
    yield Check("L6/memory-of-replayed-steps", partial(_steps, "decode"), ("graph_capture",))


# -- who sees memory -------------------------------------------------------------------------------------
class Witness(NamedTuple):
    """Somebody who sees the memory of a device: bytes `taken`, from wherever they are counted; and after how many small
    allocations that grows."""

    taken: Callable[[], int]
    grain: int


def witness(device: Device) -> Witness:
    """The first who sees what is allocated on the device; raises `Unseen` where nobody does."""
    ask: Callable[[], int] | None = getattr(device, "memory_taken", None)
    for taken in filter(None, (ask, heap())):
        with _uncollected():
            before = taken()
            buffer = device.empty("conform.seen", (SEEN,), "u8")
            device.load(buffer, np.ones(SEEN, np.uint8))
            device.synchronize()
            grain = _grain(device, taken) if taken() - before >= SEEN // 2 else 0
        if grain:
            return Witness(taken, grain)
    raise Unseen("memory in use: no memory_taken() of the device and no heap of the host shows what is allocated there")


@cache
def heap() -> Callable[[], int] | None:
    """Bytes of the C library's heap that are in use, whichever thread took them; None where it does not say, as glibc does.
    (`mallinfo2` would tell of the main thread's arena alone.)"""
    library: Any = ctypes.CDLL(None) if hasattr(ctypes, "CDLL") else None
    if not all(hasattr(library, name) for name in ("malloc_info", "open_memstream", "fclose", "free")):
        return None
    library.open_memstream.restype = ctypes.c_void_p
    library.malloc_info.argtypes = (ctypes.c_int, ctypes.c_void_p)
    library.fclose.argtypes = library.free.argtypes = (ctypes.c_void_p,)

    def taken() -> int:
        text, size = ctypes.c_void_p(), ctypes.c_size_t()
        stream = library.open_memstream(ctypes.byref(text), ctypes.byref(size))
        library.malloc_info(0, stream)
        library.fclose(stream)
        *_, totals = ctypes.string_at(text, size.value).rpartition(b"</heap>")
        library.free(text)
        found = dict(OF_ALL.findall(totals))
        return int(found[b"current"]) + int(found[b"mmap"]) - int(found[b"fast"]) - int(found[b"rest"])

    return taken


def _grain(device: Device, taken: Callable[[], int]) -> int:
    """Small allocations until it shows; 0 where it does not. The list that keeps them is as long before, or it would be seen in
    their place."""
    kept: list[Buffer | None] = [None] * MOST_SMALL
    before = taken()
    for number in range(MOST_SMALL):
        kept[number] = device.empty("conform.small", (4,), "i32")
        if number % 64 == 63 and taken() - before > SLACK:
            return number + 1
    return 0


@contextmanager
def _uncollected() -> Iterator[None]:
    """Nothing that was garbage before is freed within the block."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def allocations(device: Any) -> Iterator[list[str]]:
    """Names of what is allocated through the device within the block, whoever calls it. Where its functions cannot be replaced,
    nothing is noticed."""
    seen: list[str] = []

    def noticed(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(name: str, *arguments: Any, **named: Any) -> Any:
            seen.append(name)
            return real(name, *arguments, **named)

        return call

    with ExitStack() as undo:
        for function in ("empty", "staging"):
            with suppress(AttributeError, TypeError):
                own = vars(device).get(function)
                setattr(device, function, noticed(getattr(device, function)))
                undo.callback(*((delattr, device, function) if own is None else (setattr, device, function, own)))
        yield seen


# -- launches --------------------------------------------------------------------------------------------
def _launches(kernel: Kernel, target: Target, tally: Tally) -> None:
    """Hundreds of launches of one binding in every mode, on contents that are put back where launches change them."""
    for mode in (first_mode(target), *further_modes(kernel, target.info.capabilities)):
        _launched(kernel, mode, target, tally)


def _launched(kernel: Kernel, mode: Mode, target: Target, tally: Tally) -> None:
    opened, _ = opened_for(target, kernel, mode.act, row_invariant=mode.row_invariant)
    (case, _), device, specs = mode.cases(kernel, target), opened.device, contract_of(kernel).args.specs().values()
    bound, what = mode.bound(kernel, case, opened, opened.init_meta), f"{kernel.name} ({mode.name})"
    kept = all(spec.access != "inout" for spec in specs if not isinstance(spec, ParamSpec))

    def once(number: int = 0) -> None:
        if not kept or not number % AHEAD:
            bound.load(case)
        bound.launch(device.stream, case.n)

    once()  # whatever settles at a first launch
    with allocations(bare(device)) as names:
        once()
    tally.equal(f"what a launch of {what} allocates on the device", names, [])
    if names:
        return
    sees = _kept_witness(opened)
    count = max(LAUNCHES, sees.grain + sees.grain // 4)
    slack = max(SLACK, LEAST_KEPT * count)
    grown = _rounds(sees, device, once, count, slack)
    tally.true(f"memory in use is the same behind launches of {what}, grows by {grown} bytes a round", abs(grown[-1]) <= slack)


def _kept_witness(opened: Opened) -> Witness:
    """The witness of a device that checks share, sought once."""
    if "witness" not in opened.aside:
        opened.aside["witness"] = witness(opened.device)
    found: Witness = opened.aside["witness"]
    return found


def _rounds(sees: Witness, device: Device, once: Callable[[int], object], count: int, slack: int) -> list[int]:
    """What rounds of `count` calls leave in use, up to the first that changes it by no more than `slack`: one that gives back
    what was there before proves nothing. Garbage of Python's is none of it."""
    grown: list[int] = []
    before: int | None = None
    with _uncollected():  # and collecting looks at what is new alone
        while len(grown) < ROUNDS and not (grown and abs(grown[-1]) <= slack):
            for number in range(count):
                once(number)
            device.synchronize()
            gc.collect()
            now = sees.taken()
            if before is not None:
                grown.append(now - before)
            before = now
    return grown


# -- weights and devices -----------------------------------------------------------------------------------
def _refills(target: Target, tally: Tally) -> None:
    """Weights of every role and kind of numbers, filled anew again and again."""
    opened = target.opened()
    sees = _kept_witness(opened)
    each = [(refill.bound(kernel, other, target, opened, None), case) for kernel, case, other in refill.cases(target, opened)]

    def once(number: int) -> None:
        bound, case = each[number % len(each)]
        bound.refill(case)

    count = max(sees.grain + sees.grain // 4, LEAST_REFILLS * len(each))
    slack = max(SLACK, LEAST_KEPT * count)
    grown = _rounds(sees, opened.device, once, count, slack)
    tally.true(f"memory in use is the same behind {count} refills, grows by {grown} bytes a round", abs(grown[-1]) <= slack)


def _devices(target: Target, tally: Tally) -> None:
    """Devices that are opened, used and closed beside one that stays, with buffers, a weight and a cache."""
    opened = target.opened()
    sees, act = _kept_witness(opened), target.info.capabilities.dtypes[0]
    rows = np.ones((SIDE, 16, 1, 16), np.float32)

    def once(number: int) -> None:
        del number
        another = target.open()
        device = another.device
        buffer = device.empty("conform.closed", (SEEN,), "u8")
        device.load(buffer, np.ones(SEEN, np.uint8))
        another.table.prepare_weight("linear", np.ones((SIDE, SIDE), np.float32), act)
        another.table.allocate_cache(CacheSpec(SIDE, 16, 1, 16, act)).write_logical(rows, rows)
        device.synchronize()
        device.close()

    grown = _rounds(sees, opened.device, once, 1, OF_A_DEVICE)
    tally.true(
        f"memory in use is the same behind devices that were closed, grows by {grown} bytes each", abs(grown[-1]) <= OF_A_DEVICE
    )


# -- steps -----------------------------------------------------------------------------------------------
def _steps(graph: str, target: Target, tally: Tally) -> None:
    """Hundreds of steps of one engine, with rest in between: the same requests again and again."""
    asks = [Ask(prompt) for prompt in prompts(10)]
    options: dict[str, Any] = {"graph": graph, "invariant": False, **({"graph_sizes": (1, 2)} if graph != "off" else {})}
    with target.engine(draft_tokens=K, dtype=working_dtype(target), max_num_seqs=2, **options) as engine:
        device: Device = bare(engine.device)
        serve(engine, asks, tally)  # whatever settles in first steps
        before = engine.totals.steps
        with allocations(device) as names:
            serve(engine, asks, tally)
        tally.equal("what steps allocate on the device", names, [])
        if not names:
            sees, steps = witness(device), engine.totals.steps - before
            grown = _rounds(sees, device, lambda _: serve(engine, asks, tally), -(-2 * sees.grain // steps), SLACK)
            tally.true(
                f"memory in use is the same behind hundreds of steps, grows by {grown} bytes a round", abs(grown[-1]) <= SLACK
            )
