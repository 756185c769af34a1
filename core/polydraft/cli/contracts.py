"""The command `polydraft contracts`: lists what a backend has to compute, and prints the page of each contract.

It prints what the records in `polydraft.contracts` say, and runs no kernel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from polydraft.cli.options import common, names
from polydraft.contracts.features import FEATURES, with_base

if TYPE_CHECKING:
    from polydraft.cli.show import Screen
    from polydraft.contracts.base import Contract
    from polydraft.contracts.composite import Composite

SCHEMA = "polydraft.contracts/1"
PROFILES = ("basic", "graph", "async", "full")
EXAMPLES = """\b
Examples:
  polydraft contracts
  polydraft contracts paged_attention
  polydraft contracts linear embed
  polydraft contracts --feature dense,sampling
  polydraft contracts --profile basic
  polydraft contracts --profile async --feature dense,sampling
  polydraft contracts --plugin my_parameter.py my_contract
  polydraft contracts --json
"""


@click.command("contracts", epilog=EXAMPLES)
@click.argument("name", nargs=-1)
@click.option("--profile", type=click.Choice(PROFILES), default=None, help="Sort them by what this profile asks of a backend.")
@click.option(
    "--feature",
    "features",
    type=names,
    multiple=True,
    metavar="NAME,...",
    help=f"Print the pages of their contracts; with --profile, claimed for these: {', '.join(FEATURES)}; repeatable.",
)
@click.option(
    "--plugin",
    "plugins",
    multiple=True,
    metavar="NAME|FILE.py|MODULE",
    help="Load a plugin that brings some; may be repeated.",
)
@click.option("--no-color", is_flag=True, help="Plain text on a terminal too.")
@common
def command(
    name: tuple[str, ...],
    profile: str | None,
    features: tuple[tuple[str, ...], ...],
    plugins: tuple[str, ...],
    no_color: bool,
    as_json: bool,
) -> int:
    """List every contract and composite, or print the pages of those called NAME, or of all of a feature."""
    from polydraft.cli.show import Screen
    from polydraft.contracts import COMPOSITES, REGISTRY
    from polydraft.plugins.loading import Loaded

    asked = tuple(one for several in features for one in several)
    if name and (profile is not None or asked):
        raise click.UsageError("--profile and --feature choose contracts themselves; leave them or NAME out")
    claimed = with_base(asked)  # which refuses what is no feature
    for where in plugins:  # importing one registers what it brings
        Loaded.from_option(where)
    pages = bool(name or asked) and profile is None
    contracts, composites = list(REGISTRY), list(COMPOSITES.values())
    if pages:
        contracts, composites = (REGISTRY.of(asked), []) if asked else _named(name)
    if as_json:
        records = [_contract(contract, page=pages) for contract in contracts]
        answer = {"schema": SCHEMA, "contracts": records, "composites": [_composite(c) for c in composites]}
        click.echo(json.dumps(answer | ({"profile": _profile(profile, claimed)} if profile else {})))
        return 0
    screen = Screen(color=not no_color)
    if profile is not None:
        _list_needs(screen, profile, claimed)
    elif pages:
        from polydraft.contracts.docs import render_all

        screen.write("\n".join([render_all(contracts)] * bool(contracts) + [_composite_page(c) for c in composites]))
    else:
        _list(screen, contracts, composites)
    return 0


def _named(wanted: Sequence[str]) -> tuple[list[Contract], list[Composite]]:
    """The contracts (also by `name/version`) and composites of these names, each once. An unknown name is bad usage."""
    from difflib import get_close_matches

    from polydraft.contracts import COMPOSITES, REGISTRY

    known = [*REGISTRY.names(), *(contract.key for contract in REGISTRY), *COMPOSITES]
    for name in wanted:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise click.UsageError(f"no contract is called {name!r}; {hint}polydraft contracts lists them all")
    contracts = dict.fromkeys(name.partition("/")[0] for name in wanted if name not in COMPOSITES)
    return [REGISTRY[name] for name in contracts], [COMPOSITES[name] for name in dict.fromkeys(wanted) if name in COMPOSITES]


def _list(screen: Screen, contracts: list[Contract], composites: list[Composite]) -> None:
    from polydraft.contracts.docs import signature

    for contract in contracts:
        screen.line(signature(contract), "bold")
        screen.line(f"  {contract.doc.splitlines()[0]}")
        counts = f"counts {contract.unit}; {_tolerance(contract.tolerance)}; {contract.deterministic}"
        screen.line(f"  {counts}; {f'feature {contract.feature}' if contract.feature else 'of no feature'}")
    screen.line("\nComposites, which a backend may implement as one kernel:")
    for composite in composites:
        screen.line(composite.name, "bold")
        screen.line(f"  {composite.doc.splitlines()[0]}")


def _list_needs(screen: Screen, profile: str, features: tuple[str, ...]) -> None:
    from polydraft.conformance.needs import by_need, device_functions

    functions = device_functions(profile)
    where = " of a `BringUpDevice`, which is enough for basic" if profile == "basic" else " of the protocols in polydraft.device"
    screen.line(f"{profile} for {', '.join(features)}: {len(functions)} device functions{where}", "bold")
    screen.line(f"  {', '.join(functions)}")
    lists = by_need(profile, features)
    many = "one or more" if profile == "basic" else "all"
    _list_group(screen, f"{many} of these {{}} kernels have to be the backend's own:", lists["own"])
    _list_group(screen, "these {} have to be there and may be the reference's:", lists["offered"])
    screen.line("\nWhat is left may be left out: an engine then refuses what needs it, and a claim says that it is without it.")
    for feature, about in FEATURES.items():
        rests = ", ".join(one for one in with_base([feature]) if one not in (feature, *features))
        _list_group(screen, f"{feature}, {{}}: {about.doc}{f'; rests on {rests}' if rests else ''}", _of(feature, lists))
    _list_group(screen, "of no feature, {}:", _of("", lists))


def _list_group(screen: Screen, head: str, names: list[str]) -> None:
    """The contracts `names` under a head that says how many they are; nothing where there are none."""
    from polydraft.contracts import REGISTRY
    from polydraft.contracts.docs import signature

    if names:
        screen.line("\n" + head.format(len(names)), "bold")
    for name in names:
        screen.line(f"  {signature(REGISTRY[name])}")


def _of(feature: str, lists: Mapping[Any, list[str]]) -> list[str]:
    """The contracts of one feature that is not claimed."""
    from polydraft.contracts import REGISTRY

    return [name for name in lists["optional"] if REGISTRY[name].feature == feature]


def _profile(profile: str, features: tuple[str, ...]) -> dict[str, Any]:
    from polydraft.conformance.needs import by_need, device_functions

    return {
        "name": profile,
        "features": list(features),
        "how_many_own": "one or more" if profile == "basic" else "all",
        **{str(need): names for need, names in by_need(profile, features).items()},
        "device_functions": device_functions(profile),
    }


def _tolerance(tolerance: Mapping[str, float]) -> str:
    """How far results may be from the golden's."""
    bounds = (f"{name} within {c:g} eps" for name, c in tolerance.items())
    return ", ".join(bounds) if tolerance else "exact"


def _page(contract: Contract) -> str:
    from polydraft.contracts.docs import render

    return render(contract)


def _composite_page(composite: Composite) -> str:
    from polydraft.contracts.composite import as_contract
    from polydraft.contracts.docs import signature

    dead = ", ".join(f"`{name}`" for name in composite.dead) or "none"
    return (
        f"# {composite.name}\n\n{composite.doc}\n\n```text\n{signature(as_contract(composite))}\n```\n\n"
        f"It computes {', then '.join(f'`{part}`' for part in composite.parts)}; each has a page of its own.\n\n"
        f"Outputs that need not be written: {dead}.\n"
    )


def _contract(contract: Contract, *, page: bool) -> dict[str, Any]:
    from polydraft.contracts.docs import signature

    record = {
        "name": contract.name,
        "version": contract.version,
        "feature": contract.feature,
        "unit": contract.unit,
        "signature": signature(contract),
        "tolerance": dict(contract.tolerance),
        "deterministic": contract.deterministic,
        "pool_temporaries": contract.pool_temporaries,
        "doc": contract.doc,
    }
    return {**record, "page": _page(contract)} if page else record


def _composite(composite: Composite) -> dict[str, Any]:
    return {"name": composite.name, "parts": list(composite.parts), "dead": list(composite.dead), "doc": composite.doc}
