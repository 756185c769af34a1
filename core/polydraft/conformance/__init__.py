"""The conformance kit: what a backend has to show, level by level, and what the kit shows of itself.

`polydraft conform` and vendors' own tests call `conform` and `verify`. It never judges speed, never changes a tolerance, and
a report is its author's evidence: self-certified, with the command to run it again.

| level | proves | module |
|---|---|---|
| L0 | it is really you | `load_checks.py` |
| L1 | time and memory | `device_checks.py` |
| L2 | each kernel against its golden | `kernel_checks.py`, `binding_checks.py` |
| L3 | captured graphs replay what eager runs do | `graph_checks.py` |
| L4 | overlap is safe | `overlap_checks.py` |
| L5 | the product promise: the same tokens, and the same rounds as a recomputing oracle | `lossless_checks.py` and two more |
| L6 | speculation is on and not silly | `sanity_checks.py` |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polydraft.conformance.report import Report, conform, verify
    from polydraft.conformance.single import KernelMismatch, check_kernel

__all__ = ["KernelMismatch", "Report", "check_kernel", "conform", "verify"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    room = "single" if name in ("KernelMismatch", "check_kernel") else "report"
    return getattr(import_module(f"polydraft.conformance.{room}"), name)
