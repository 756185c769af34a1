"""Every dependency has its reason in CONTRIBUTING.md, and none is there without a need."""

import ast
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.project import ROOT, module_of, modules_of_core, pyproject

HEADING = "## Dependencies"
ROW = re.compile(r"^\| `([\w.-]+)` \| ([\w, -]+) \| (.+) \|$", flags=re.MULTILINE)
NAME = re.compile(r"[\w.-]+")


def declared() -> set[tuple[str, str]]:
    """Return (package, group) of pyproject.toml; the group is `build`, `core` or an extra."""
    data = pyproject()
    groups = {"build": data["build-system"]["requires"], "core": data["project"]["dependencies"]}
    groups |= data["project"]["optional-dependencies"]
    pairs = {(package_of(line), group) for group, lines in groups.items() for line in lines}
    return {(package, group) for package, group in pairs if package != "polydraft"}


def package_of(requirement: str) -> str:
    match = NAME.match(requirement)
    assert match, requirement
    return match[0]


def rows() -> list[tuple[str, list[str], str]]:
    """Return (package, groups, reason) of each row of the table."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition(f"\n{HEADING}\n")[2].partition("\n## ")[0]
    return [(package, groups.split(", "), reason) for package, groups, reason in ROW.findall(section)]


def test_the_table_lists_exactly_the_declared_dependencies():
    assert {(package, group) for package, groups, _ in rows() for group in groups} == declared()


def test_a_package_has_one_row():
    assert not [package for package, count in Counter(package for package, _, _ in rows()).items() if count > 1]


@pytest.mark.parametrize(("package", "reason"), [(package, reason) for package, _, reason in rows()])
def test_a_reason_is_a_sentence(package: str, reason: str):
    assert len(reason.split()) >= 5, f"{package}: {reason}"
    assert reason.endswith("."), f"{package}: {reason}"


def imports_of_core() -> Iterator[str]:
    for tree in modules_of_core().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield node.module.partition(".")[0]


def test_core_imports_each_of_its_dependencies():
    core = {module_of(package) for package, group in declared() if group == "core"}
    assert core <= set(imports_of_core())


def test_an_exclusive_framework_is_in_its_own_extras_only():
    paddle = {group for package, group in declared() if package.startswith("paddlepaddle")}
    assert paddle == {"paddle", "paddle-gpu", "xpu", "custom-device"}


def test_all_is_the_sum_of_the_extras_that_fit_together():
    assert pyproject()["project"]["optional-dependencies"]["all"] == ["polydraft[cuda,serve,conform,test,dev]"]
