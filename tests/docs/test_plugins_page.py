"""docs/plugins.md against the code: every hook with its exact signature and a test of its own, and an example that runs."""

import inspect
import re
from pathlib import Path

import pytest

from polydraft import hooks
from polydraft.backend import DeviceOptions
from polydraft.plugins.checks import EXTENSION, ROLES
from polydraft.plugins.plugins import Plugins
from tests.support.project import ROOT

PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
PROPOSERS = [*ROOT.glob("plugins/examples/eagle/polydraft_eagle/*.py"), ROOT / "plugins" / "lookup_proposer.py"]
EXAMPLE = ROOT / "tests" / "support" / "minimal_backend.py"


def signature(hook: str) -> str:
    """The hook as it is written in hooks.py, without quotes around its annotations."""
    declared = inspect.signature(getattr(hooks, hook))
    arguments = ", ".join(f"{p.name}: {p.annotation}" for p in declared.parameters.values())
    return f"{hook}({arguments}) -> {declared.return_annotation}"


def sections() -> dict[str, str]:
    """Heading of each third-level section to its text."""
    pieces = re.split(r"^#{2,3} (.*)$", PAGE, flags=re.MULTILINE)[1:]
    return dict(zip(pieces[::2], pieces[1::2], strict=True))


@pytest.mark.parametrize("hook", hooks.HOOKS)
def test_every_hook_has_a_section_that_says_when_and_what(hook: str):
    section = sections().get(f"`{signature(hook)}`")
    assert section is not None, f"docs/plugins.md has no heading `{signature(hook)}`"
    assert "**Called**" in section or "**called**" in section
    assert "**Returns**" in section or signature(hook).endswith("-> None")


def test_no_section_describes_a_hook_that_does_not_exist():
    assert set(re.findall(r"polydraft_\w+(?=\()", "\n".join(sections()))) == set(hooks.HOOKS)


def test_every_hook_has_a_test():
    source = (ROOT / "tests" / "unit" / "test_hooks.py").read_text(encoding="utf-8")
    tests = set(re.findall(r"^def (test_\w+)\(", source, flags=re.MULTILINE))
    assert {f"test_{hook}" for hook in hooks.HOOKS} <= tests


def test_every_kind_of_plugin_is_in_the_table():
    for role in ROLES:
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {role.noun} |"))
        assert f"`{role.group}`" in row
        assert all(f"`{hook}`" in row for hook in (role.answers if role is EXTENSION else role.required))


def test_the_example_is_the_file_that_the_tests_run():
    assert BLOCKS[-1] == EXAMPLE.read_text(encoding="utf-8")
    assert len(BLOCKS[-1].splitlines()) <= 110


def test_the_example_of_a_wrapper_wraps(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (file := tmp_path / "log.py").write_text(BLOCKS[0], encoding="utf-8")
    Plugins.load("reference", files=(str(file),)).open_device("", DeviceOptions()).close()
    assert capsys.readouterr().out == "opened the default device: cpu\n"
    assert len(BLOCKS) == 2


def test_every_option_of_hookimpl_is_explained():
    options = list(inspect.signature(hooks.hookimpl.__call__).parameters)[2:]
    assert all(f"{option}=" in PAGE for option in options), options


def test_members_of_a_proposer_are_listed():
    """What core asks of a proposer and of its factory has a row, and what has a row is asked for."""
    source = "\n".join(file.read_text() for file in ROOT.glob("core/polydraft/**/*.py"))
    section = sections()["`polydraft_proposers() -> Iterable[tuple[str, Factory]]`"]
    tables = re.split(r"^\| member of the .*", section, flags=re.MULTILINE)[1:]
    cells = (re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE) for table in tables)
    factory, proposer = ({name for cell in column for name in re.findall(r"`(\w+)", cell)} for column in cells)
    assert factory == set(re.findall(r'(?:getattr|hasattr)\([^"]*[fF]actor[^"]*"(\w+)"', source))
    declared = {"buffers", "columns", "passes"} & set(re.findall(r'_declared\(modules, "(\w+)"\)', source))
    mapped = set(re.findall(r'_mapped\([^"]*"(\w+)"\)', source))
    asked = set(re.findall(r'getattr\(self\.proposer, "(\w+)"', source))
    assert proposer == declared | mapped | asked | {"name", "append"}


@pytest.mark.parametrize("file", PROPOSERS, ids=lambda file: file.name)
def test_proposers_import_from_the_packages_that_the_page_names(file: Path):
    inner = re.findall(r"^from (polydraft\.(?:models|proposers|program|sampling)\.\S+)", file.read_text(), flags=re.MULTILINE)
    assert inner == []
