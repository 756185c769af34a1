"""Writes the pages that say what the code says: every contract, and every command with its options.

    python tools/make_reference.py            writes docs/backends/reference.md, docs/backends/contracts/, docs/commands.md
    python tools/make_reference.py --check    names the pages that are out of date and ends with status 1

The tests of tests/docs compare, so a contract or option without its page fails them.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib import import_module
from pathlib import Path

import click

from polydraft.cli import COMMANDS
from polydraft.conformance.needs import need
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.base import Contract
from polydraft.contracts.composite import Composite, as_contract
from polydraft.contracts.docs import render, signature

ROOT = Path(__file__).parents[1]
NEEDS = {
    "own": "counts as own work",
    "offered": "has to be there",
    "optional": "may be left out",
}
MADE = "<!-- Made by tools/make_reference.py from the code; changes belong there. -->\n\n"


def upstream() -> dict[str, list[str]]:
    """Contract to what FastDeploy calls it, read from the table of docs/names.md."""
    text = (ROOT / "docs" / "names.md").read_text(encoding="utf-8")
    table = re.search(r"^## FastDeploy: op by op\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert table is not None, "docs/names.md has lost its table of ops"
    found: dict[str, list[str]] = {}
    for row in re.findall(r"^\|(.+)\|$", table[1], re.MULTILINE)[2:]:
        op, here, _ = (cell.strip() for cell in row.split("|", 2))
        for name in re.findall(r"`(\w+)`", here):
            found.setdefault(name, []).append(op)
    return found


def contract_page(contract: Contract, names: dict[str, list[str]]) -> str:
    """The page of one contract."""
    title, rest = render(contract).split("\n", 1)
    above = "has to be own" if need(contract.name, "graph") == "own" else NEEDS[need(contract.name, "graph")]
    facts = [f"In the profile `basic` it {NEEDS[need(contract.name, 'basic')]}, above it {above}."]
    if contract.name in names:
        facts.append(f"FastDeploy: {'; '.join(names[contract.name])}.")
    one = f'`check_kernel("{contract.name}", fn, to_device, to_host)`'
    facts.append(f"Try one function: {one}; a backend: `polydraft conform NAME --contract {contract.name}`.")
    return f"{title}\n\n{MADE}{rest.strip()}\n\n## In a backend\n\n" + "\n\n".join(facts) + "\n"


def reference(names: dict[str, list[str]]) -> str:
    """The table of all contracts and composites."""
    head = "# Reference of contracts\n\n" + MADE
    head += (
        "Every kernel that core can ask of a backend, in the order of a step. `polydraft contracts` prints this list,\n"
        "`polydraft contracts linear` one page. In the profile `basic`, a contract counts as own work, has to be there (and may\n"
        "be the reference's), or may be left out.\n\n"
    )
    rows = ["| contract | computes | in `basic` | FastDeploy |", "|---|---|---|---|"]
    for name in REGISTRY.names():
        contract = REGISTRY[name]
        first = contract.doc.splitlines()[0].replace("|", "\\|")
        link, theirs = f"[`{contract.key}`](contracts/{name}.md)", "; ".join(names.get(name, []))
        rows.append(f"| {link} | {first} | {NEEDS[need(name, 'basic')]} | {theirs} |")
    older = [c for c in REGISTRY if c.version < REGISTRY[c.name].version]
    if older:
        rows += ["", f"Served as well, for backends that have not moved on: {', '.join(f'`{c.key}`' for c in older)}."]
    return head + "\n".join(rows) + "\n\n" + composites()


def composites() -> str:
    """What may be fused."""
    lines = [
        "## Composites",
        "",
        "Runs of contracts that a backend may offer as one kernel, under this name. It computes its parts one after the other;",
        "an output called dead need not be written.",
        "",
        "| composite | computes | dead |",
        "|---|---|---|",
    ]
    lines += [_composite(composite) for composite in COMPOSITES.values()]
    return "\n".join(lines) + "\n"


def _composite(composite: Composite) -> str:
    dead = ", ".join(f"`{name}`" for name in composite.dead)
    assert signature(as_contract(composite)), "a composite is a contract"
    return f"| `{composite.name}` | {composite.doc.splitlines()[0]} | {dead} |"


def commands() -> str:
    """Every command with its arguments and options."""
    text = "# Commands\n\n" + MADE
    text += (
        "Every command takes `--json` (one object on standard output, of the schema that it names), `--debug` (tracebacks) and\n"
        "`--help`. Exit statuses: 0 done, 1 the thing asked for failed, 2 bad usage, 130 interrupted; `conform` has more.\n"
    )
    for name, line in COMMANDS.items():
        command: click.Command = import_module(f"polydraft.cli.{name.replace('-', '_')}").command
        context = click.Context(command, info_name=f"polydraft {name}")
        text += f"\n## polydraft {name}\n\n{line}\n\n```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n\n"
        text += "| option | meaning |\n|---|---|\n" + "".join(_option(p, context) for p in command.params)
    return text


def _option(parameter: click.Parameter, context: click.Context) -> str:
    if not isinstance(parameter, click.Option):
        return f"| `{parameter.human_readable_name}` | argument{'' if parameter.required else ', may be left out'} |\n"
    record = parameter.get_help_record(context)
    assert record is not None, f"{parameter.name} has no help"
    flags, meaning = (" ".join(part.split()).replace("|", "\\|") for part in record)
    return f"| `{flags}` | {meaning} |\n"


def pages() -> dict[Path, str]:
    """Every made page and its text."""
    names = upstream()
    made = {ROOT / "docs/commands.md": commands(), ROOT / "docs/backends/reference.md": reference(names)}
    for name in REGISTRY.names():
        made[ROOT / f"docs/backends/contracts/{name}.md"] = contract_page(REGISTRY[name], names)
    return made


def stale() -> list[str]:
    """Made pages that are missing, differ, or are of contracts that no longer exist."""
    made = pages()
    old = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    gone = set((ROOT / "docs/backends/contracts").glob("*.md")) - set(made)
    return sorted(path.relative_to(ROOT).as_posix() for path in {*old, *gone})


def main() -> int:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        found = stale()
        print("\n".join(found) if found else "every page is up to date")
        return bool(found)
    made = pages()
    for path in set((ROOT / "docs/backends/contracts").glob("*.md")) - set(made):
        path.unlink()
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"wrote {len(made)} pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
