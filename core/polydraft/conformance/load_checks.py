"""Level L0: the backend is the one it claims to be, has everything it declares, and computes itself what it claims.

It runs first, and finds out whose code each kernel runs in. Numbers are compared in L2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from polydraft.conformance import refill
from polydraft.conformance.check import Check, Tally
from polydraft.conformance.harness import held, run_golden, run_kernel
from polydraft.conformance.host_checks import OtherRemainder
from polydraft.conformance.kernel_checks import all_cases
from polydraft.conformance.outcomes import Ownership
from polydraft.conformance.probe import VOCAB
from polydraft.conformance.target import Opened, Target, Witness, belongs_to_reference, threads_watched
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.inputs import Kernel, kernel_of
from polydraft.contracts.kv_quant import KV_DTYPES
from polydraft.device import GraphCapture
from polydraft.errors import CapabilityError, PolydraftError
from polydraft.plugins.checks import ACTIVATION_DTYPES, answered, lacks

ON_A_DEVICE: Final = ("silicon", "custom device")
"""Evidence classes that rest on a device, which has a name, and a day."""


def checks() -> Iterator[Check]:
    """Every check of L0."""
    yield Check("L0/identity", _identity)
    yield Check("L0/contracts", _contracts)
    yield Check("L0/dtypes", _dtypes)
    yield Check("L0/capture-facility", _capture_facility, needs=("graph_capture",))
    yield Check("L0/row-invariant-device", _row_invariant, needs=("row_invariant",))
    yield Check("L0/weights-refill-in-place", _refill, needs=("update_weights",))
    yield Check("L0/undeclared-is-refused", _undeclared)
    yield Check("L0/engine", _engine)
    yield Check("L0/ownership", ownership)


def _identity(target: Target, tally: Tally) -> None:
    """Name, version, digest and evidence are there; the backend is available."""
    info, loaded = target.info, target.plugins.backend
    for field in ("name", "version", "package", "device_pattern", "summary"):
        tally.true(f"a text as {field} in BackendInfo", bool(getattr(info, field)))
    tally.true("an evidence class", bool(info.evidence))
    if info.evidence in ON_A_DEVICE:
        said = re.fullmatch(r".+, \d{4}-\d{2}-\d{2}", info.evidence_on) is not None
        tally.true(f"evidence_on has a device and a day (DEVICE, YYYY-MM-DD), got {info.evidence_on!r}", said)
    tally.equal("available (reason: " + (info.reason or "none") + ")", info.available, True)
    again = target.plugins.info_on(target.device_spec).without(info.withdrawn)
    tally.true(f"backend_info is the same when asked again, got another one from {loaded.origin}", again == info)


def _contracts(target: Target, tally: Tally) -> None:
    """What identity declares is what the table offers, in the versions that core serves."""
    opened = target.opened()
    offered = opened.table.backend
    tally.equal("contracts of the table", sorted(offered.providers), sorted(target.info.contract_versions))
    for name in offered.providers:
        served = 1 if name in COMPOSITES else REGISTRY[name].version
        tally.equal(f"version of {name}", offered.versions[name], served)


def _dtypes(target: Target, tally: Tally) -> None:
    """Every declared activation dtype opens a device, and that device prepares a weight and allocates a buffer."""
    for dtype in target.info.capabilities.dtypes:
        opened = target.opened(dtype=dtype)
        weight = opened.table.prepare_weight("linear", np.eye(4, dtype=np.float32), dtype)
        tally.true(f"a weight in {dtype} takes memory or none, got {weight.nbytes} bytes", weight.nbytes >= 0)
        tally.equal(f"dtype of a buffer in {dtype}", opened.device.empty("conform.dtype", (2, 3), dtype).dtype, dtype)


def _capture_facility(target: Target, tally: Tally) -> None:
    """`graph_capture` is declared: the hook is there and answers."""
    tally.true("the hook polydraft_graph_capture", "polydraft_graph_capture" in answered(target.plugin))
    capture = target.plugins.graph_capture(target.opened().device)
    tally.equal("what the capture facility lacks", lacks(capture, GraphCapture), "")
    tally.true(f"memory() of the facility is a count of bytes, got {capture.memory()}", capture.memory() >= 0)


def _row_invariant(target: Target, tally: Tally) -> None:
    """`row_invariant` is declared: a device opens when it is asked for."""
    opened = target.opened(row_invariant=True)
    tally.true("kernels of a row-invariant device", bool(opened.table.backend.providers))


def _refill(target: Target, tally: Tally) -> None:
    """`update_weights` is declared: refilling keeps the object, and kernels bound to it compute with the new values, in whatever
    role and packing they are, and however often that is done."""
    opened, act = target.opened(), target.info.capabilities.dtypes[0]
    for kernel, case, other in refill.cases(target, opened):
        bound = refill.bound(kernel, other, target, opened, opened.init_meta)
        bound.launch(bound.stream, case.n)
        opened.device.synchronize()  # weights are refilled at rest
        for which, one in (("a", case), ("a second", other)):
            bound.refill(one)
            bound.load(one)
            bound.launch(bound.stream, one.n)
            want = run_golden(kernel, one, act, products=opened.products)
            tally.compared(held(kernel, one, bound.read(), want, act=act), f", behind {which} refill of its weights")


def _undeclared(target: Target, tally: Tally) -> None:
    """What the backend does not declare is refused by name before anything runs."""
    caps = target.info.capabilities
    unsupported: list[tuple[str, dict[str, Any]]] = [
        ("more slots than max_seqs", {"max_num_seqs": caps.max_seqs + 1}),
        ("a window beyond max_window", {"draft_tokens": caps.max_window}),
    ]
    unsupported += [(f"dtype {d}", {"dtype": d}) for d in ACTIVATION_DTYPES if d not in caps.dtypes]
    unsupported += [] if caps.graph_capture else [("graphs", {"graph": "decode"})]
    unsupported += [] if caps.row_invariant else [("invariant mode", {"invariant": True})]
    unsupported += [(f"KV rows in {kv}", {"kv_dtype": kv}) for kv in KV_DTYPES if kv not in caps.kv_dtypes]
    unsupported += [] if caps.host_inputs else [("host inputs in the middle of a step", {"features": (OtherRemainder,)})]

    for what, options in unsupported:

        def build(options: dict[str, Any] = options) -> None:
            with target.engine(within=False, **options):
                pass

        tally.raises(CapabilityError, f"an engine with {what}", build)


def _engine(target: Target, tally: Tally) -> None:
    """An engine on this backend runs this backend: its identity, its digest, its providers."""
    with target.engine(draft_tokens=1, max_num_seqs=2) as engine:
        tally.equal("name of the engine's backend", engine.info.name, target.info.name)
        tally.equal("digest of the engine's backend", engine.plugins.backend.digest, target.plugins.backend.digest)
        replaced = [(override.contract, override.pack) for override in target.opened().table.overrides]
        got = [(override.contract, override.pack) for override in engine.table.overrides]
        tally.true(f"packs serve {replaced or 'nothing'} in an engine, they serve {got or 'nothing'}", got == replaced)
        tally.equal("vocabulary of the probe model", engine.model.vocab_size, VOCAB)


def ownership(target: Target, tally: Tally) -> None:
    """Run a case of every kernel with a watch on the reference's code and the goldens. Openly passed-on kernels are delegated;
    a kernel that calls them behind a provider of its own fails, save in a backend that calls its evidence "emulator"."""
    with threads_watched():
        opened = target.open()
        try:
            _find_owners(target, tally, opened)
        finally:
            opened.device.close()


def _find_owners(target: Target, tally: Tally, opened: Opened) -> None:
    silent = []
    for name, provider in sorted(opened.table.providers.items()):
        seen = _seen(target, kernel_of(name), opened)
        if seen is None:
            target.owners[name] = "unknown"
            tally.true(f"a case of {name} runs to its end", False)
            continue
        open_ = belongs_to_reference(provider)
        owner: Ownership = "delegated" if (seen or open_) and not target.is_reference else "own"
        if owner == "delegated" and not open_:
            owner = "emulated" if target.info.evidence == "emulator" else owner
            silent += [] if owner == "emulated" else [f"{name} calls {min(seen)}"]
        target.owners[name] = owner
        tally.comparisons += 1
    tally.equal("kernels that silently run the reference's code", silent, [])


def _seen(target: Target, kernel: Kernel, opened: Opened) -> set[str] | None:
    """What a case called of the reference, None where it did not run."""
    case = next(case for case in all_cases(kernel, target, 5) if case.n)
    try:
        with Witness(kernel) as seen:
            run_kernel(
                kernel,
                case,
                opened.device,
                opened.table,
                act=target.info.capabilities.dtypes[0],
                init_meta=opened.init_meta,
            )
    except PolydraftError:
        return None
    return seen
