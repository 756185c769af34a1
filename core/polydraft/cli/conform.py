"""The command `polydraft conform`: the conformance kit on the command line.

It selects what runs, shows progress on standard error and the page on standard output, and returns the kit's exit status.
`polydraft.conformance` makes the judgement.
"""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polydraft import environment, json_text
from polydraft.cli.options import common, names
from polydraft.contracts.features import FEATURES
from polydraft.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from polydraft.conformance.outcomes import Result

PROFILES = ("basic", "graph", "async", "full")
LEVELS = ("L0", "L1", "L2", "L3", "L4", "L5", "L6")
LIMIT_S, DEEP_LIMIT_S = 120.0, 1800.0
"""Seconds that one check may take."""
MOST_SEED = 1_000_000_000
"""Beyond the seeds that a claim draws for itself: few enough digits to be typed again."""
EXAMPLES = """\b
Examples:
  polydraft conform reference
  polydraft conform mychip --profile graph --out report
  polydraft conform mychip --profile async --feature dense,sampling
  polydraft conform mychip --contract verify_match --case seed-7
  polydraft conform mychip --profile full --seed 1307
  polydraft conform --plugin mychip.py mychip --level L1
  polydraft conform mychip --prove
  polydraft conform mychip --enable-variants
  polydraft conform verify report/report.json
  polydraft conform --matrix reference,emulator=emulator:0@full --out table

\b
Exit statuses: 0 the claim holds, 1 it fails, 2 bad usage, 3 the kit failed,
4 nothing was proved.
"""


@click.command("conform", epilog=EXAMPLES)
@click.argument("backend", required=False)
@click.argument("report", required=False)
@click.option(
    "--device", default="", metavar="SPEC", help="Device; otherwise the default one, or the first that can show what is claimed."
)
@click.option("--profile", type=click.Choice(PROFILES), default="basic", show_default=True, help="What is claimed.")
@click.option(
    "--feature",
    "features",
    type=names,
    multiple=True,
    metavar="NAME,...",
    help=f"For which features: {', '.join(FEATURES)}; repeatable.  [default: all that BACKEND has whole]",
)
@click.option("--level", type=click.Choice(LEVELS), default=None, help="Run this level alone; no profile is claimed.")
@click.option("--contract", default="", metavar="NAME", help="Run this contract or composite alone.")
@click.option("--case", default="", metavar="NAME", help="Of that contract, this case alone: a named one, seed-7, V-32000.")
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=None,
    metavar="N",
    help="Draw the surprises, cases of kernels that are on no list, from this number.  [default: another one in each run]",
)
@click.option("--check", default="", metavar="ID", help="Run this one check alone, as a failure names it.")
@click.option("--deep", is_flag=True, help="Hundreds of drawn cases a contract, and the sizes of whole models; minutes.")
@click.option("--prove", is_flag=True, help="Run the faulty backends around BACKEND: the kit has to kill each.")
@click.option("--enable-variants", is_flag=True, help="Try BACKEND's variants on this device; those that pass are in use then.")
@click.option(
    "--matrix",
    type=names,
    default=(),
    metavar="NAME=DEVICE@PROFILE,...",
    help="Run on each of these; one table, no BACKEND. Device and profile may be left out.",
)
@click.option("--plugin", "plugins", multiple=True, metavar="FILE", help="Load a plugin from a file or module; repeatable.")
@click.option("--kernels", type=names, default=(), metavar="PACK,...", help="Kernel packs laid over BACKEND, first wins.")
@click.option(
    "--allow-cpu-fallback", is_flag=True, help="What the device has no kernel for may run on the CPU; the claim says what did."
)
@click.option("--waivers", type=click.Path(path_type=Path), default=None, metavar="FILE", help="Known failures, as JSON.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=None,
    metavar="S",
    help=f"Seconds that one check may take.  [default: {LIMIT_S:g}, {DEEP_LIMIT_S:g} with --deep]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    metavar="DIR",
    help="Write report.json, junit.xml, report.txt; of a table, matrix.json and matrix.md.",
)
@common
def command(
    backend: str | None,
    report: str | None,
    device: str,
    profile: str,
    features: tuple[tuple[str, ...], ...],
    level: str | None,
    contract: str,
    case: str,
    seed: int | None,
    check: str,
    deep: bool,
    prove: bool,
    enable_variants: bool,
    matrix: tuple[str, ...],
    plugins: tuple[str, ...],
    kernels: tuple[str, ...],
    allow_cpu_fallback: bool,
    waivers: Path | None,
    timeout: float | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """Show that BACKEND keeps its contracts, level by level; or, as `conform verify REPORT`, judge a report again."""
    if backend == "verify":
        if report is None:
            raise click.UsageError("conform verify needs the path of a report.json")
        return _verify(Path(report), as_json=as_json)
    if report is not None:
        raise click.UsageError(f"{report!r} is one argument too many; `conform verify {report}` judges a report")
    from polydraft.conformance.report import Selection

    wanted = tuple(dict.fromkeys(name for several in features for name in several))
    drawn = secrets.randbelow(MOST_SEED) if seed is None else seed
    selection = Selection(profile, level or "", contract, case, drawn, deep, check, wanted, allow_cpu_fallback)
    limit = timeout or (DEEP_LIMIT_S if deep else LIMIT_S)
    if matrix:
        if backend or device or prove or waivers or enable_variants:
            raise click.UsageError(
                "--matrix names the backends; leave BACKEND, --device, --prove, --enable-variants and --waivers out"
            )
        return _matrix(matrix, selection, plugins=plugins, kernels=kernels, limit_s=limit, out=out, as_json=as_json)
    if backend is None:
        raise click.UsageError("there is no BACKEND, wanted a name (polydraft doctor lists them) or --matrix NAME,NAME")
    if allow_cpu_fallback and (prove or enable_variants):
        raise click.UsageError("--prove and --enable-variants hold the device's own kernels; leave --allow-cpu-fallback out")
    if enable_variants and (prove or kernels or plugins or waivers or not selection.complete):
        raise click.UsageError("--enable-variants runs what each variant needs; name BACKEND and --device alone beside it")
    _check_backend(backend, plugins, kernels, limit)
    _check_contract(contract)
    if prove:
        _refuse_beside_prove(selection, kernels, others=bool(wanted or deep or out or waivers))
    if enable_variants:
        return _enable(backend, device=device, limit_s=limit, out=out, as_json=as_json)
    if prove:
        return _prove(backend, device=device, plugins=plugins, seed=drawn, limit_s=limit, as_json=as_json)
    return _run(
        backend, device=device, selection=selection, plugins=plugins, kernels=kernels, waivers=waivers, limit_s=limit, out=out,
        as_json=as_json,
    )  # fmt: skip


def _refuse_beside_prove(selection: Any, kernels: tuple[str, ...], *, others: bool) -> None:
    """A proof runs all that it has, around one backend."""
    if kernels:
        raise click.UsageError("the faulty backends are made of one backend alone; leave --kernels or --prove out")
    if others or not selection.complete:
        raise click.UsageError(
            "--prove runs each faulty backend by the check that must fail; leave out all but BACKEND, --device, --plugin, --seed"
        )


def _check_contract(contract: str) -> None:
    """An unknown contract is bad usage. Asked when plugins are loaded, which may bring some."""
    from difflib import get_close_matches

    from polydraft.contracts import COMPOSITES, REGISTRY

    known = [*REGISTRY.names(), *COMPOSITES]
    if contract and contract not in known:
        near = get_close_matches(contract, known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise click.UsageError(f"no contract is called {contract!r}; {hint}polydraft contracts lists them all")


def _check_backend(backend: str, plugins: tuple[str, ...], kernels: tuple[str, ...], limit_s: float) -> None:
    """A backend or pack that cannot be loaded is bad usage: there is nothing to judge. One that kills who loads it fails."""
    from polydraft.conformance.isolation import refuse_deadly
    from polydraft.plugins.plugins import Plugins

    refuse_deadly(backend, files=plugins, packs=kernels, limit_s=limit_s)
    try:
        Plugins.load(backend, files=plugins, packs=kernels)
    except PluginError as error:
        raise ConfigError(str(error)) from error


def _run(
    backend: str,
    *,
    device: str,
    selection: Any,
    plugins: tuple[str, ...],
    kernels: tuple[str, ...],
    waivers: Path | None,
    limit_s: float,
    out: Path | None,
    as_json: bool,
) -> int:
    from polydraft.conformance.pages import page
    from polydraft.conformance.report import command_line, conform, make_folder
    from polydraft.conformance.waivers import load

    if out is not None:
        make_folder(out)
    try:
        report = conform(
            backend, device=device, selection=selection, files=plugins, packs=kernels,
            waivers=load(waivers) if waivers else (), command=command_line(selection), listen=_progress(), limit_s=limit_s,
        )  # fmt: skip
    except PluginError as error:  # a pack that has nothing for this device: there is nothing to judge
        raise ConfigError(str(error)) from error
    if out is not None:
        report.write(out)
    click.echo(json.dumps(report.content) if as_json else page(report), nl=as_json)
    return report.status


def _matrix(
    backends: tuple[str, ...],
    selection: Any,
    *,
    plugins: tuple[str, ...],
    kernels: tuple[str, ...],
    limit_s: float,
    out: Path | None,
    as_json: bool,
) -> int:
    from polydraft.conformance.matrix import plain, run, wanted
    from polydraft.conformance.report import command_line, conform
    from polydraft.plugins.checks import BACKEND
    from polydraft.plugins.plugins import Loaded, identify

    brought = {file: Loaded.from_option(file) for file in plugins}

    def files(name: str) -> tuple[str, ...]:
        """A file with a backend matters to that backend alone."""
        return tuple(file for file, one in brought.items() if one.role is not BACKEND or identify(one).name == name)

    if any(wanted(one).profile for one in backends) and not selection.complete:
        raise click.UsageError("a profile in --matrix claims all of it; leave --level, --contract and --case out")
    for one in backends:
        name = wanted(one).name
        _check_backend(name, files(name), kernels, limit_s)
    _check_contract(selection.contract)
    content = run(
        backends,
        lambda name, device, profile: conform(
            name, device=device, selection=replace(selection, profile=profile or selection.profile), files=files(name),
            packs=kernels, command=command_line(selection), listen=_progress(), limit_s=limit_s,
        ),
        out,
    )  # fmt: skip
    click.echo(json.dumps(content) if as_json else plain(content), nl=as_json)
    return int(content["status"])


def _progress() -> Any:
    """On a terminal, the check that has just ended; nothing elsewhere."""
    if not sys.stderr.isatty() or environment.is_ci():
        return None

    def show(result: Result) -> None:
        click.echo(f"\r\033[K{result.outcome:<12}{result.id[:90]}", err=True, nl=False)

    return show


def _verify(path: Path, *, as_json: bool) -> int:
    from polydraft.conformance.report import verify

    content = json_text.read(path, dict, "name a report that polydraft conform --out wrote", what=f"the report {path}")
    wrong = verify(content)
    if as_json:
        click.echo(json.dumps({"schema": "polydraft.verify/1", "report": str(path), "consistent": not wrong, "problems": wrong}))
    elif wrong:
        click.echo("\n".join(wrong))
    else:
        click.echo(f"consistent; it says: {content['verdict']['sentence']}")
    return 1 if wrong else int(content["verdict"]["status"])


def _prove(backend: str, *, device: str, plugins: tuple[str, ...], seed: int, limit_s: float, as_json: bool) -> int:
    from polydraft.conformance.proof import matrix, prove

    proof = prove(backend, device=device, files=plugins, seed=seed, limit_s=limit_s, listen=_progress())
    click.echo(json.dumps(proof.content) if as_json else matrix(proof), nl=as_json)
    return proof.status


def _enable(backend: str, *, device: str, limit_s: float, out: Path | None, as_json: bool) -> int:
    from polydraft.conformance.enabling import enable
    from polydraft.conformance.report import make_folder

    if out is not None:
        make_folder(out)
    trials = enable(backend, device=device, limit_s=limit_s, listen=_progress())
    if out is not None:
        (out / "variants.json").write_text(json.dumps(trials.content, indent=1) + "\n", encoding="utf-8")
    click.echo(json.dumps(trials.content) if as_json else trials.page(), nl=as_json)
    return trials.status
