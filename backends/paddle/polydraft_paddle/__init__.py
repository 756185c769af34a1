"""The Paddle backend: the contracts in portable Paddle operations, for the CPU and every place that Paddle knows.

A new chip with a Paddle runtime runs MTP with it on day one, and gets fast kernel by kernel through kernel packs. Paddle is
imported when a device is opened, not before.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from polydraft._version import __version__
from polydraft.backend import BackendInfo, Capabilities
from polydraft.hooks import hookimpl
from polydraft_paddle.device_name import of_rank, take_apart

if TYPE_CHECKING:
    from polydraft.backend import Collectives, DeviceOptions, ForwardMeta, KernelTable, PassBuffers
    from polydraft.contracts.base import Limits
    from polydraft.device import GraphCapture
    from polydraft.ranks import Group
    from polydraft_paddle.device import PaddleDevice

HOST = Capabilities(dtypes=("f32",), pool_temporaries=True)
"""What the CPU place can do: everything has happened when a call returns."""
QUEUED = Capabilities(dtypes=("f32", "bf16", "f16"), asynchronous=True, graph_capture=True, pool_temporaries=True)
"""What a place with streams can do, graphs where the installed Paddle has them. Whether its runtime offers them as well is seen
when it is opened: `--graph off` does without."""
DTYPES = {"cpu": ("f32",), "polycuda": ("f32", "bf16")}
"""Activation dtypes of kinds of place that lack some: Paddle's CPU multiplies no matrices of 16 bits."""
KV_DTYPES = {"cpu": ("int8",), "polyemu": ("int8",)}
"""Quantised forms of KV rows, of kinds of place where they were tried; their kernels are portable."""
OWN_RANKS = ("cpu", "polyemu")
"""Kinds of place of which every process has its own; of others each rank wants another one."""
NO_RANKS = ("polycuda",)
"""Kinds of place whose runtime has no collectives."""
KERNEL = re.compile(r"^def ([a-z]\w*)\(", re.MULTILINE)
"""A function of a module of kernels. One that is called like a contract is its kernel."""
COMPOSITES = ("residual_add+rms_norm", "verify_match+commit_window")
QUEUED_COMPOSITES = ("pack_rows+pack_logit_rows",)
"""What it serves besides: everywhere, and off the CPU."""
Evidence = Literal["silicon", "custom device", "double only"]
EVIDENCE: dict[str, tuple[Evidence, str]] = {
    "cpu": ("silicon", "AMD EPYC CPU, 2026-11-21"),
    "polyemu": ("custom device", "plugins/paddle-emu-device, 2026-11-21"),
    "polycuda": ("silicon", "NVIDIA H200, 2026-11-21"),
}
"""What each kind of place was seen on, and when; the others were never run by us."""


@hookimpl
def polydraft_backend_info(spec: str) -> BackendInfo:
    """Identity, and whether a usable Paddle is installed, without importing it."""
    return describe("paddle", "portable Paddle operations: the CPU, and any place that Paddle knows", spec or "cpu")


@functools.cache
def contracts() -> tuple[str, ...]:
    """What `table.py` serves, read from the sources of the kernels, because identity may not import Paddle."""
    from polydraft.contracts import REGISTRY

    sources = sorted((Path(__file__).parent / "kernels").glob("*.py"))
    functions = {name for path in sources for name in KERNEL.findall(path.read_text(encoding="utf-8"))}
    return tuple(name for name in REGISTRY.names() if name in functions)


def describe(name: str, summary: str, spec: str) -> BackendInfo:
    """The identity of a backend of this family called `name` on the place `spec`."""
    from polydraft.contracts import REGISTRY
    from polydraft_paddle.companions import f32_matmul
    from polydraft_paddle.installation import has_graphs, installed, unusable
    from polydraft_paddle.machine import runs_with
    from polydraft_paddle.runtimes import misfits, serves
    from polydraft_paddle.variants import variants_of

    misfit, kind = misfits(next(iter(installed().values()), "")), take_apart(spec).kind
    reason = unusable() or next((said for library, said in misfit.items() if serves(library, kind)), "")
    nothing: tuple[Evidence, str] = "double only", ""
    evidence, evidence_on = EVIDENCE.get(kind, nothing)
    composites = COMPOSITES if kind == "cpu" else (*COMPOSITES, *QUEUED_COMPOSITES)
    served = {name: REGISTRY[name].version for name in contracts()} | dict.fromkeys(composites, 1)
    return BackendInfo(
        name=name,
        version=__version__,
        package="polydraft",
        device_pattern="cpu, gpu:<index>, xpu:<index> or <custom device>:<index>; <kind>:<index>,<index> for ranks",
        summary=summary,
        available=not reason,
        reason=reason,
        devices=() if reason else ("cpu",),
        capabilities=replace(
            HOST if spec == "cpu" else QUEUED,
            dtypes=dtypes_of(spec),
            graph_capture=spec != "cpu" and has_graphs(kind),
            kv_dtypes=KV_DTYPES.get(kind, ()),
            f32_matmul=f32_matmul(spec),
            sliding_window=True,
            ranks="" if kind in NO_RANKS else "processes",
            rank_devices=kind not in (*OWN_RANKS, *NO_RANKS),
            single_rank=kind not in ("cpu", *NO_RANKS),
        ),
        evidence=evidence,
        evidence_on=evidence_on,
        contract_versions=MappingProxyType(served),
        notes=tuple(misfit.values()) if not reason else (),
        variants=variants_of(spec),
        runs_with=MappingProxyType(runs_with(spec)),
    )


def dtypes_of(spec: str) -> tuple[str, ...]:
    """Activation dtypes of the place `spec`."""
    from polydraft_paddle.companions import activations

    return activations(spec, DTYPES.get(take_apart(spec).kind, QUEUED.dtypes))


@hookimpl
def polydraft_open_device(spec: str, options: DeviceOptions) -> PaddleDevice:
    """Import Paddle and open the place, with Paddle's fallback to CPU kernels off unless it is allowed."""
    return open_place(spec or "cpu", options)


def open_place(spec: str, options: DeviceOptions) -> PaddleDevice:
    """Open the place `spec` for a backend of this family; of several ranks each the one that many behind it, where they do not
    have a place of that name each."""
    from polydraft_paddle.companions import configure
    from polydraft_paddle.installation import (
        import_paddle,
        refuse_black_list,
        refuse_unknown_place,
        set_fallback,
        standard_output_kept,
    )

    import_paddle()
    if "," in spec or (options.rank and take_apart(spec).kind not in OWN_RANKS):
        spec = of_rank(spec, options.rank)
    refuse_unknown_place(spec)
    configure(spec, refuse_waits=not options.allow_cpu_fallback)
    if not options.allow_cpu_fallback:
        refuse_black_list(spec)
    set_fallback(allowed=options.allow_cpu_fallback)
    from polydraft_paddle.device import PaddleDevice

    with standard_output_kept():
        return PaddleDevice(spec, dtype=options.dtype)


@hookimpl
def polydraft_visible_devices() -> tuple[str, ...]:
    """The places that Paddle offers, asked in a process of its own where a runtime or a build of Paddle may bring some."""
    from polydraft_paddle.visible import visible

    return visible()


@hookimpl
def polydraft_off_device(spec: str) -> dict[str, tuple[str, ...]]:
    """What Paddle runs on the CPU instead of on the place, found by trying every kernel in a process of its own."""
    from polydraft_paddle.probe import leaving

    return leaving(spec or "cpu")


@hookimpl
def polydraft_kernels(device: PaddleDevice) -> KernelTable:
    """Every contract."""
    from polydraft_paddle.table import PaddleTable

    return PaddleTable(device)


@hookimpl
def polydraft_collectives(device: PaddleDevice, group: Group) -> Collectives:
    """Those of the place's own library, through `paddle.distributed`; of the CPU, through the host's memory."""
    from polydraft_paddle.ranks import collectives

    return collectives(device, group)


@hookimpl
def polydraft_graph_capture(device: PaddleDevice) -> GraphCapture:
    """Paddle's own graphs; `DeviceError` where the place has none."""
    from polydraft_paddle.graph import open_capture

    return open_capture(device)


@hookimpl
def polydraft_init_forward_meta(device: PaddleDevice, buffers: PassBuffers, limits: Limits) -> ForwardMeta:
    """Groups of rows where the host can see them; a kernel pack's own metadata where one serves attention."""
    from polydraft_paddle.forward_meta import PaddleForwardMeta

    if device.guest is not None:
        meta: ForwardMeta = device.guest.init_forward_meta(buffers, limits)
        return meta
    return PaddleForwardMeta(device, buffers, limits)
