"""The command `polydraft new-backend`: writes an installable package with the smallest working backend, under a given name.

It copies `polydraft/template`, which lies beside the code, and fills in the name. It does not install or overwrite anything.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import click

from polydraft.cli.options import common
from polydraft.errors import ConfigError

SCHEMA = "polydraft.new_backend/1"
TEMPLATE = Path(__file__).parents[1] / "template"
KINDS = (".md", ".py", ".toml")
"""Suffixes of the template's own files; what Python or pip leave behind beside them has others."""
PLACEHOLDER = "mychip"
"""The name that the template is written with; a valid one, so that the template itself is a package that runs."""
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
EXAMPLES = """\b
Examples:
  polydraft new-backend mychip
  polydraft new-backend mychip --into ~/src
"""


@click.command("new-backend", epilog=EXAMPLES)
@click.argument("name")
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    default=Path(),
    metavar="DIR",
    help="Where its folder goes; here otherwise.",
)
@common
def command(name: str, into: Path, as_json: bool) -> int:
    """Write polydraft-NAME, a package whose backend NAME runs at once and proves nothing yet."""
    _check_name(name)
    folder = into / f"polydraft-{name.replace('_', '-')}"
    if folder.exists():
        raise ConfigError(f"{folder} exists already, wanted a folder that is not there; remove it or choose another --into")
    files = write(name, folder)
    if as_json:
        answer = {"schema": SCHEMA, "name": name, "package": f"polydraft_{name}", "folder": str(folder), "files": files}
        click.echo(json.dumps(answer))
        return 0
    click.echo(f"wrote {len(files)} files into {folder}; next:")
    click.echo(f"  pip install -e {folder}\n  polydraft conform {name}        # status 4: nothing is its own yet")
    return 0


def _check_name(name: str) -> None:
    """A name is a Python identifier in lower case that no installed backend has."""
    from polydraft.plugins.checks import BACKEND
    from polydraft.plugins.plugins import find

    if not NAME.fullmatch(name):
        raise click.UsageError(f"name is {name!r}, wanted lower-case letters, digits and single underscores, such as mychip")
    if name in find(BACKEND.group):
        raise ConfigError(f"a backend called {name!r} is installed already; choose another name")


def write(name: str, folder: Path) -> list[str]:
    """Write the package into `folder`; return its files, relative to it. Raises `ConfigError` where it cannot be written."""
    written = []
    try:
        for source in sorted(path for path in TEMPLATE.rglob("*") if path.is_file() and path.suffix in KINDS):
            path = _named(source.relative_to(TEMPLATE).as_posix(), name)
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(_named(source.read_text(encoding="utf-8"), name), encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}; choose another --into") from error
    return written


def _named(text: str, name: str) -> str:
    """The name in place of the template's: as a word, in names of classes, and in the name of the distribution."""
    camel = "".join(part.capitalize() for part in name.split("_"))
    text = text.replace(f"polydraft-{PLACEHOLDER}", f"polydraft-{name.replace('_', '-')}")
    return text.replace(PLACEHOLDER.capitalize(), camel).replace(PLACEHOLDER, name)
