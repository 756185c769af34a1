"""Describes what a variant's result is valid for, without opening a device: chip, driver, library.

The identity hook calls it (`BackendInfo.runs_with`). It reads files and metadata, and loads nothing.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from polydraft_paddle.device_name import take_apart
from polydraft_paddle.installation import installed
from polydraft_paddle.runtimes import libraries, serves

VENDORS = {"gpu": (("0x10de",), "nvidia"), "xpu": (("0x1d22", "0x2057"), "kunlun")}
"""Of a kind of place that Paddle knows by itself: PCI vendors of its chips, kernel module of its driver."""


def runs_with(spec: str, system: Path = Path("/sys")) -> dict[str, str]:
    """Device, driver and library of the place `spec`; what cannot be told is empty. A custom device's driver is its runtime
    library, by digest."""
    kind, _, options, _ = take_apart(spec)
    library = " and ".join(f"{name} {version}" for name, version in sorted(installed().items()))
    if kind in VENDORS:
        vendors, module = VENDORS[kind]
        return {
            "device": _chips(kind, vendors, system),
            "driver": _read(system / "module" / module / "version"),
            "library": library,
        }
    return {
        "device": f"{kind}?{options}" if options else kind,
        "driver": "" if kind == "cpu" else _runtime(kind),
        "library": library,
    }


def _chips(kind: str, vendors: tuple[str, ...], system: Path) -> str:
    """The kind with the PCI ids of the chips of those vendors, each once."""
    devices = (system / "bus" / "pci" / "devices").glob("*")
    ids = {(_read(device / "vendor"), _read(device / "device")) for device in devices}
    return " ".join([kind, *(f"{vendor[2:]}:{one[2:]}" for vendor, one in sorted(ids) if vendor in vendors)])


def _runtime(kind: str) -> str:
    mine = (library for library in libraries() if serves(library, kind))
    return " and ".join(f"{library.name} {hashlib.sha256(library.read_bytes()).hexdigest()[:16]}" for library in mine)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
