"""Writes docs/commands.md, the page of every command with its options, and of the environment variables, from the code.

    python tools/make_commands.py            writes it
    python tools/make_commands.py --check    says whether it is out of date, and ends with status 1 where it is

The tests of tests/docs compare, so an option without its row fails them.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

import click

from polydraft.cli import COMMANDS
from polydraft.environment import VARIABLES

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
MADE = "<!-- Made by tools/make_commands.py from the code; changes belong there. -->\n\n"


def commands() -> str:
    """Every command with its arguments and options, and the environment variables."""
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
    text += "\n## Environment variables\n\n"
    text += "None of them changes a token; an unknown one that begins with `POLYDRAFT_` is an error.\n\n"
    return text + "| variable | effect |\n|---|---|\n" + "".join(f"| `{name}` | {said} |\n" for name, said in VARIABLES.items())


def _option(parameter: click.Parameter, context: click.Context) -> str:
    if not isinstance(parameter, click.Option):
        return f"| `{parameter.human_readable_name}` | argument{'' if parameter.required else ', may be left out'} |\n"
    record = parameter.get_help_record(context)
    assert record is not None, f"{parameter.name} has no help"
    flags, meaning = (" ".join(part.split()).replace("|", "\\|") for part in record)
    return f"| `{flags}` | {meaning} |\n"


def stale() -> bool:
    """Whether the page is missing or differs."""
    return not PAGE.exists() or PAGE.read_text(encoding="utf-8") != commands()


def main() -> int:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        print(f"{PAGE.name} is {'out of date' if stale() else 'up to date'}")
        return int(stale())
    PAGE.write_text(commands(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
