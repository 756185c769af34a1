"""What the documents show can be done: command lines parse, Python runs, make targets exist, extras are declared.

Nothing but the Python examples is executed: a command line is given to click's parser, which refuses unknown commands,
options and values of the wrong kind.
"""

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from tests.docs.pages import PAGES, code_spans, fences, name, prose, read, rows, section
from tests.support import tutorial
from tests.support.project import ROOT, pyproject

README = ROOT / "README.md"


def command_lines(text: str) -> list[str]:
    """Lines of console blocks, and code spans, that begin with `polydraft `; the shell's comment is cut off."""
    lines = [line.strip() for fence in fences(text, "console", "shell", "bash") for line in fence.text.splitlines()]
    spans = [span for span in code_spans(text) if not re.search(r"\b[A-Z]{3,}\b", span)]  # NAME stands for something
    return [line for line in [*lines, *spans] if line.startswith("polydraft ")]


def parse(line: str) -> dict[str, Any]:
    """Parse a command line without running it; returns the parameters. Raises `click.UsageError`."""
    from polydraft.cli import COMMANDS

    _, command_name, *arguments = shlex.split(line, comments=True)
    if command_name not in COMMANDS:
        raise click.UsageError(f"{line}: there is no command {command_name!r}")
    command: click.Command = importlib.import_module(f"polydraft.cli.{command_name.replace('-', '_')}").command
    return command.make_context(command_name, arguments).params


def all_command_lines() -> list[Any]:
    return [pytest.param(line, id=f"{name(page)}-{line}") for page in PAGES for line in dict.fromkeys(command_lines(read(page)))]


@pytest.mark.parametrize("line", all_command_lines())
def test_command_line_parses(line: str):
    assert parse(line)


def test_readme_shows_every_command():
    from polydraft.cli import COMMANDS

    shown = {line.split()[1] for line in command_lines(read(README))}
    assert set(COMMANDS) - shown == set()


def test_readme_table_has_the_options_of_generate():
    from polydraft.cli.generate import command

    options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    named = {option for span in code_spans(section(read(README), "Command line")) for option in re.findall(r"--[a-z-]+", span)}
    assert named - options - {"--help"} == set(), "the README names options that do not exist"
    assert options - named - {"--no-color"} == set(), "the README's table lacks options"


@pytest.mark.parametrize(
    "line", ["polydraft generate --draft-token 3 x", "polydraft search", "polydraft generate --seed one x", "polydraft doctor x"]
)
def test_parser_sees(line: str):
    with pytest.raises(click.UsageError):
        parse(line)


# -- Python --------------------------------------------------------------------------------------------------------
def examples() -> list[Any]:
    """Every Python block of the documents; plugins.md and the tutorial have tests of their own, contract pages show goldens."""
    return [
        pytest.param(fence.text, id=f"{name(page)}-line-{fence.line}")
        for page in PAGES
        if page not in (ROOT / "docs" / "plugins.md", tutorial.PAGE) and page.parent.name != "contracts"
        for fence in fences(read(page), "python")
    ]


@pytest.mark.parametrize("source", examples())
def test_python_runs(source: str, capsys: pytest.CaptureFixture[str]):
    exec(compile(source, "example", "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out
    assert bool(printed.strip()) == ("print(" in source), "an example that prints shows something"


# -- make and extras -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_exist(page: Path):
    text = read(page)
    shown = [*code_spans(text), *(line for fence in fences(text, "console", "shell") for line in fence.text.splitlines())]
    targets = {span.split()[1] for span in shown if re.match(r"make [a-z]+\b", span)}
    known = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert targets - known == set()


def test_readme_lists_every_extra():
    listed = {extra for row in rows(section(read(README), "Install")) for extra in re.findall(r"`([\w-]+)`", row[0])}
    assert listed == set(pyproject()["project"]["optional-dependencies"])


def installed(page: Path) -> list[str]:
    """What the page has pip install, with its options."""
    lines = re.findall(r"\bpip install ([^`\n]+)", read(page))
    return [part for line in lines for part in shlex.split(line, comments=True)]


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("plugins/**/README.md"))], ids=name)
def test_pages_install_what_there_is(page: Path):
    """Extras that are declared, and polydraft from where it is: it is on no index before the first release."""
    extras = {extra for part in installed(page) if (found := re.search(r"\[([\w,-]+)\]$", part)) for extra in found[1].split(",")}
    declared = set(pyproject()["project"]["optional-dependencies"])
    assert extras <= declared
    if "polydraft is not on PyPI yet" in read(README):
        assert not [part for part in installed(page) if re.fullmatch(r"polydraft(\[.*\])?", part)]


def test_readme_shows_how_to_install_an_extra():
    assert any("[" in part for part in installed(README))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_supports_is_said_only_where_it_is_explained(page: Path):
    said = [line for line in prose(read(page)).splitlines() if re.search(r"\bsupport(s|ed)\b", line, re.IGNORECASE)]
    allowed = {"CONTRIBUTING.md"}  # which says what the word means
    assert name(page) in allowed or said == []
