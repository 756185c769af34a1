"""The command `polydraft doctor`: what is installed, what each backend can do, and what prevents it from working.

It asks for identities and for the devices that are visible, so it loads no framework in this process and opens no device unless
kernel packs or a probe are named. A broken plugin does not make it fail: showing that is its purpose.
"""

from __future__ import annotations

import functools
import json
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from polydraft.cli.options import common, names

if TYPE_CHECKING:
    from polydraft.backend import BackendInfo
    from polydraft.plugins.plugins import Found

SCHEMA = "polydraft.doctor/1"
EXAMPLES = """\b
Examples:
  polydraft doctor
  polydraft doctor --kernels my-pack    (show what that pack replaces)
  polydraft doctor --probe xpu=xpu:0    (try every operation: which leave the device?)
  polydraft doctor --json
"""


@click.command("doctor", epilog=EXAMPLES)
@click.option("--kernels", type=names, default=(), metavar="PACK,...", help="Show what these kernel packs replace, first wins.")
@click.option("--probe", default="", metavar="NAME[=DEVICE]", help="Try which operations of this backend leave its device.")
@click.option("--no-color", is_flag=True, help="Plain text on a terminal too.")
@common
def command(kernels: tuple[str, ...], probe: str, no_color: bool, as_json: bool) -> int:
    """Show every installed backend: what it is, whether it can run here, and which contracts it implements.

    The status is 0 also when a backend is broken or not available, and 1 when a probe was asked for that could not be made.
    """
    report = examine(kernels, probe)
    if as_json:
        click.echo(json.dumps(report))
    else:
        _show(report, color=not no_color)
    return 1 if report["probe"] and report["probe"]["problem"] else 0


def examine(packs: Sequence[str] = (), probe: str = "") -> dict[str, Any]:
    """The report, of schema polydraft.doctor/1. Raises `PluginError` where a pack or a backend to probe cannot be used."""
    from polydraft._version import __version__
    from polydraft.cli.clashes import clashes
    from polydraft.plugins.checks import EXTENSION, PACK
    from polydraft.plugins.default_backend import default_backend
    from polydraft.plugins.loading import load_entry
    from polydraft.plugins.plugins import find, survey

    for pack in packs:
        load_entry(PACK.group, pack)  # whether it can be loaded at all; whether it fits is a question for each backend
    default = default_backend()
    return {
        "schema": SCHEMA,
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "default": {"name": default.name, "passed_over": list(default.passed_over)},
        "backends": [_backend(found, packs) for found in survey()],
        "packs": list(find(PACK.group)),
        "extensions": list(find(EXTENSION.group)),
        "clashes": clashes(),
        "probe": _probe(probe) if probe else None,
    }


def _backend(found: Found, packs: Sequence[str]) -> dict[str, Any]:
    from polydraft.contracts import COMPOSITES, REGISTRY

    info, every = found.info, REGISTRY.names()
    have = set(info.contract_versions) if info else set()
    overrides, left_out, misfit = _overrides(found.name, packs) if info and info.available and packs else ([], [], "")
    devices, problem = _devices(info) if info else ([], "")
    return {
        "name": found.name,
        "version": info.version if info else None,
        "package": info.package if info else None,
        "origin": found.origin,
        "digest": found.digest,
        "summary": info.summary if info else None,
        "available": bool(info and info.available),
        "reason": info.reason if info else found.problem,
        "device_pattern": info.device_pattern if info else None,
        "devices": devices,
        "notes": [*(info.notes if info else ()), *([problem] if problem else [])],
        "capabilities": info.capabilities.describe() if info else None,
        "contracts": {
            "implemented": [name for name in every if name in have],
            "missing": [name for name in every if name not in have],
            "composites": [name for name in COMPOSITES if name in have],
        },
        "variants": _variants(found) if info else [],
        "overrides": overrides,
        "left_out": left_out,
        "misfit": misfit,
        "evidence": info.evidence if info else None,
        "evidence_on": info.evidence_on if info else None,
    }


def _devices(info: BackendInfo) -> tuple[list[str], str]:
    """The devices that a backend has in any case and those that it sees now, or why those are not known."""
    from polydraft.errors import PolydraftError
    from polydraft.plugins.plugins import visible_devices

    try:
        found = visible_devices(info.name) if info.available else ()
    except PolydraftError as error:
        return list(info.devices), str(error)
    return list(dict.fromkeys((*info.devices, *found))), ""


def _overrides(backend: str, packs: Sequence[str]) -> tuple[list[dict[str, str]], list[dict[str, str]], str]:
    """What the packs replace in this backend and what they leave to it, or why they do not fit it; this needs its device."""
    from polydraft.backend import DeviceOptions
    from polydraft.errors import DeviceError, PluginError
    from polydraft.plugins.plugins import Plugins

    plugins = Plugins.load(backend, packs=packs)
    try:
        device = plugins.open_device("", DeviceOptions())
    except DeviceError as error:  # one device that does not open must not hide the other backends
        return [], [], str(error)
    try:
        report = plugins.kernels(device).report()
        return report["overrides"], report["left_out"], ""
    except PluginError as error:
        return [], [], str(error)
    finally:
        device.close()


def _variants(found: Found) -> list[dict[str, Any]]:
    """The backend's variants on its default device, and on every other one on which some were tried: in use, or why not."""
    from polydraft.errors import ConfigError
    from polydraft.plugins.checks import BACKEND
    from polydraft.plugins.plugins import Loaded, identify, variant_digests
    from polydraft.plugins.variants import filed, verdicts

    rows = []
    try:
        loaded = Loaded.from_entry(BACKEND, found.name)
        for spec in sorted({"", *(one.spec for one in filed() if one.backend == found.name)}):
            info = identify(loaded, spec)
            reasons = verdicts(info, functools.partial(variant_digests, loaded), spec)
            rows += [
                {"name": one.name, "device": spec, "contracts": list(one.contracts), "summary": one.summary,
                 "used": not reasons[one.name], "reason": reasons[one.name]}
                for one in info.variants
            ]  # fmt: skip
    except ConfigError as error:
        return [{"name": "", "device": "", "contracts": [], "summary": "", "used": False, "reason": str(error)}]
    return rows


def _probe(wanted: str) -> dict[str, Any]:
    """Which operations of a backend leave a device. Raises `PluginError` for one that cannot be loaded; a device that cannot be
    tried is what is shown."""
    from polydraft.plugins.plugins import Plugins

    name, _, device = wanted.partition("=")
    plugins = Plugins.load(name, device=device)
    found, info = plugins.off_device(device), plugins.info()
    return {
        "backend": name, "device": device or next(iter(info.devices), ""), **found, "problem": found["problem"] or info.reason,
    }  # fmt: skip


def _show(report: dict[str, Any], *, color: bool) -> None:
    from polydraft.cli.show import Screen

    screen = Screen(color=color)
    screen.line(f"polydraft {report['version']}, Python {report['python']}, {report['platform']}")
    screen.line(f"used where no backend is named: {'; '.join((report['default']['name'], *report['default']['passed_over']))}")
    for backend in report["backends"]:
        screen.line()
        _show_backend(screen, backend)
    for kind, installed in (("kernel packs", report["packs"]), ("extensions", report["extensions"])):
        if installed:
            screen.line(f"\n{kind} installed, used only where named: {', '.join(installed)}")
    for clash in report["clashes"]:
        screen.line(f"\nclash: {clash}", "red")
    if report["probe"]:
        _show_probe(screen, report["probe"])


def _show_probe(screen: Any, probe: dict[str, Any]) -> None:
    where = f"{probe['backend']} on {probe['device'] or 'its default device'}"
    if probe["problem"]:
        screen.line(f"\n{where} could not be tried: {probe['problem']}", "red")
    elif not probe["asked"]:
        screen.line(f"\n{where}: the backend uses no framework that could run an operation elsewhere")
    elif not probe["operations"]:
        screen.line(f"\n{where}: every operation of every kernel stays on the device", "green")
    else:
        screen.line(f"\n{where}: these operations leave the device for the CPU", "red")
        for contract, operations in probe["operations"].items():
            screen.line(f"  {contract or 'loading and copies':<24}{', '.join(operations)}")


def _show_backend(screen: Any, backend: dict[str, Any]) -> None:
    """One backend as a block of short lines, which fits any terminal."""
    title = f"{backend['name']} {backend['version'] or ''}".rstrip()
    screen.write(title, "bold")
    screen.write("  ")
    screen.line("available" if backend["available"] else "not available", "green" if backend["available"] else "red")
    contracts, pattern = backend["contracts"], backend["device_pattern"]
    total = len(contracts["implemented"]) + len(contracts["missing"])
    missing = f", lacks {', '.join(contracts['missing'])}" if contracts["implemented"] and contracts["missing"] else ""
    claim = f"{backend['evidence']} ({backend['evidence_on']})" if backend["evidence_on"] else backend["evidence"]
    rows = [
        ("reason", backend["reason"]),
        *(("note", note) for note in backend["notes"]),
        ("summary", backend["summary"]),
        ("plugin", f"{backend['package'] or 'unknown'}, {backend['origin']}, digest {backend['digest'] or 'unknown'}"),
        ("devices", ", ".join(backend["devices"]) or f"none found, wanted {pattern}"),
        ("capabilities", capabilities(backend["capabilities"] or {})),
        ("contracts", f"{len(contracts['implemented'])} of {total}{missing}; {len(contracts['composites'])} composites"),
        (
            "overrides",
            ", ".join(map(_override, backend["overrides"])) or backend["misfit"] or "none",
        ),
        *(("left out", f"{one['contract']} by {one['pack']}: {one['reason']}") for one in backend["left_out"]),
        *(("variant", _variant(one)) for one in backend["variants"]),
        ("evidence", claim),
    ]
    if backend["version"] is None:
        rows = [row for row in rows if row[0] in ("reason", "plugin")]
    for name, value in rows:
        if value:
            screen.line(f"  {name:<13}{value}")


def _override(row: dict[str, Any]) -> str:
    """A kernel of a pack in a phrase."""
    operator = f" with {row['computed_by']}" if row["computed_by"] else ""
    return f"{row['contract']} by {row['pack']}{operator} ({row['digest']})"


def _variant(row: dict[str, Any]) -> str:
    """A variant in one line: what it serves, and whether it is in use."""
    if not row["name"]:
        return str(row["reason"])
    where = f" on {row['device']}" if row["device"] else ""
    state = "in use" if row["used"] else f"off: {row['reason']}"
    return f"{row['name']} ({', '.join(row['contracts'])}){where}: {state}"


def capabilities(values: dict[str, Any]) -> str:
    """Capabilities in one line: what is there by name, the others with their value; what is absent or empty is left out."""
    shown = []
    for name, value in values.items():
        if value is True:
            shown.append(name)
        elif value is not False and value not in ((), []):
            shown.append(f"{name} {' '.join(value) if isinstance(value, (list, tuple)) else value}")
    return ", ".join(shown)
