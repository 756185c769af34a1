"""The kit's comparison and report code broken bit by bit: the tool sees what lives, and (deep) nothing does without a reason."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.project import ROOT


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = ROOT / "tools" / "mutate_kit.py"
    spec = importlib.util.spec_from_file_location("mutate_kit", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate_kit"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("a == b", {"a != b"}),
        ("a < b <= c", {"a <= b <= c", "a < b < c"}),
        ("a and b", {"a or b", "a", "b"}),
        ("not a", {"a"}),
        ("-a", {"a"}),
        ("a + b", {"a - b"}),
        ("a if b else c", {"c if b else a"}),
        ("7", {"8"}),
        ("True", {"False"}),
        ("'word'", {"'word_'"}),
        ("'several words'", set()),
        ("''", set()),
    ],
)
def test_expressions_that_are_broken(tool: ModuleType, source: str, wanted: set[str]):
    node = ast.parse(source, mode="eval").body
    assert {ast.unparse(broken) for _, broken in tool._broken(node)} == wanted


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("if a:\n    b()", {"if True:\n    b()", "if False:\n    b()"}),
        ("a += 1", {"pass"}),
        ("raise a", {"pass"}),
        ("a(b)", {"pass"}),
        ("a = b", set()),
    ],
)
def test_statements_that_are_broken(tool: ModuleType, source: str, wanted: set[str]):
    assert {ast.unparse(broken) for _, broken in tool._broken(ast.parse(source).body[0])} == wanted


MODULE = '''
"""A module."""
from __future__ import annotations


def double(x: int = 1) -> int:
    """Twice x, but never above ten."""
    result = x + x
    return result if result < 10 else 10


def never_called() -> int:
    return 3
'''
TESTS = """
from broken_module import double

def test_double():
    assert [double(2), double(7)] == [4, 10]
"""


@pytest.mark.deep
def test_a_fault_that_no_test_sees_lives(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On a module of its own: what the tests look at dies, a default that they never use and the edge lives."""
    (tmp_path / "broken_module.py").write_text(MODULE)
    (tmp_path / "test_it.py").write_text(TESTS)
    monkeypatch.syspath_prepend(tmp_path)
    subject = tool.Subject("broken_module", (str(tmp_path / "test_it.py"),))
    changes = {change.id: change for change in tool.changes(subject)}
    lives = {id_ for id_, change in changes.items() if not tool.noticed(subject, change)}
    assert lives == {
        "broken_module::double::1::1 + 1", "broken_module::double::result < 10::LtE", "broken_module::double::10::10 + 1",
        "broken_module::never_called::3::3 + 1",
    }  # fmt: skip
    assert "broken_module::double::x + x::Sub" in set(changes) - lives
    only = tool.Subject("broken_module", subject.tests, ("double",))
    assert {change.id.split("::")[1] for change in tool.changes(only)} == {"double"}


def test_survivors_are_judged(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found, tried = {"compare": ["compare::a", "compare::b"], "report": []}, [f"compare::{c}" for c in "abdefghij"]
    monkeypatch.setattr(tool, "survivors", lambda name, told, part: (found[name], tried))
    monkeypatch.setattr(tool, "EXPLAINED", tmp_path / "e.json")
    (tmp_path / "e.json").write_text(json.dumps({"compare::a": "why", "report::c": "why"}))
    said: list[str] = []
    assert tool.judged(["compare", "report"], said.append) == [
        "no test notices compare::b", "explained, and noticed or gone: report::c"
    ]  # fmt: skip
    assert said[0] == "compare: 9 changes, 7 noticed, 1 explained"
    assert tool.judged(["report"], said.append, (1, 2)) == [], "what a part has not tried is not missed"
    assert tool._part("2/4") == (2, 4)
    with pytest.raises(argparse.ArgumentTypeError, match="wanted I/N"):
        tool._part("5/4")


def test_explanations_are_of_changes_that_there_are(tool: ModuleType):
    explained: dict[str, Any] = json.loads(tool.EXPLAINED.read_text())
    there = {change.id for subject in tool.SUBJECTS.values() for change in tool.changes(subject)}
    assert set(explained) <= there
    assert all(len(reason) > 20 for reason in explained.values())


@pytest.mark.deep
@pytest.mark.parametrize("name", ["compare", "outcomes", "verdict", "report", "waivers", "serving"])
def test_every_survivor_is_explained(tool: ModuleType, name: str):
    assert set(tool.SUBJECTS) == {"compare", "outcomes", "verdict", "report", "waivers", "serving"}
    assert tool.judged([name]) == []
