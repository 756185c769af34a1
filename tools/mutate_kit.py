"""Breaks the kit's own comparison and report code, one small change at a time, and sees whether its tests notice.

    python tools/mutate_kit.py                 every change of every module; survivors are compared with the explained ones
    python tools/mutate_kit.py compare         one module
    python tools/mutate_kit.py report --part 2/4   every fourth change of it, from the second on
    python tools/mutate_kit.py compare --id 'compare::_worst::...'   one change, with what the tests say

A change that no test notices is a survivor. `tests/conformance/survivors.json` explains each that cannot be told apart; any other
one, and an explanation of a change that is noticed after all, makes the status 1. `make deep` runs it.

Changes are made in memory: a process forks, puts the broken module in the place of the right one, and runs the module's tests.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib
import importlib.abc
import importlib.util
import io
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXPLAINED = ROOT / "tests" / "conformance" / "survivors.json"
LIMIT_S = 60
"""Seconds that the tests of one change may take; a change that makes them hang is noticed."""


@dataclass(frozen=True)
class Subject:
    """A module under test: where it lies, the tests that have to notice, and the functions that count (all where empty)."""

    module: str
    tests: tuple[str, ...]
    only: tuple[str, ...] = ()


SUBJECTS = {
    "compare": Subject("polydraft.contracts.compare", ("tests/contracts/test_compare.py",)),
    "outcomes": Subject("polydraft.conformance.outcomes", ("tests/conformance/test_judgement.py",)),
    "verdict": Subject("polydraft.conformance.verdict", ("tests/conformance/test_judgement.py",)),
    "report": Subject("polydraft.conformance.report", ("tests/conformance/test_judgement.py",)),
    "waivers": Subject("polydraft.conformance.waivers", ("tests/conformance/test_judgement.py",)),
    "serving": Subject("polydraft.conformance.serving", ("tests/conformance/test_texts.py",), ("as_expected", "_rounds_within")),
}


# -- changes -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Change:
    """One change: what it is called, and what makes the broken module's source."""

    id: str
    source: Callable[[], str]


COMPARE = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
BINARY = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.RShift: ast.LShift, ast.LShift: ast.RShift,
}  # fmt: skip


def changes(subject: Subject) -> Iterator[Change]:
    """Every change of a module, in the order of its text."""
    source = Path(importlib.import_module(subject.module).__file__ or "").read_text(encoding="utf-8")
    tree = ast.parse(source)
    seen: Counter[str] = Counter()
    for place, name in _places(tree, subject.only):
        node = _at(tree, place)
        for what, broken in _broken(node):
            shown = " ".join(ast.unparse(node).split())[:90]
            id_ = f"{subject.module.rpartition('.')[2]}::{name}::{shown}::{what}"
            seen[id_] += 1
            number = f"#{seen[id_]}" if seen[id_] > 1 else ""
            yield Change(id_ + number, partial(_changed, tree, place, broken))


Place = tuple[tuple[str, int | None], ...]


def _changed(tree: ast.Module, place: Place, broken: ast.AST) -> str:
    """The source with `broken` at one place."""
    after = copy.deepcopy(tree)
    parent, (field, index) = _at(after, place[:-1]), place[-1]
    if index is None:
        setattr(parent, field, broken)
    else:
        getattr(parent, field)[index] = broken
    return ast.unparse(ast.fix_missing_locations(after))


def _places(tree: ast.Module, only: tuple[str, ...]) -> Iterator[tuple[Place, str]]:
    """Where something can be changed, and the function it stands in. Annotations, docstrings and imports are left alone."""

    def walk(node: ast.AST, place: Place, name: str) -> Iterator[tuple[Place, str]]:
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_ignores") or isinstance(
                node, (ast.Import, ast.ImportFrom)
            ):
                continue
            for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
                if not isinstance(child, ast.AST) or _is_docstring(child):
                    continue
                here = (*place, (field, index))
                inner = name
                if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                    inner = f"{name}.{child.name}" if name else child.name
                if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                    continue
                if inner and (not only or inner.split(".")[0] in only):
                    yield here, inner
                yield from walk(child, here, inner)

    yield from walk(tree, (), "")


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _at(tree: ast.AST, place: Place) -> Any:
    for field, index in place:
        value = getattr(tree, field)
        tree = value if index is None else value[index]
    return tree


def _broken(node: Any) -> Iterator[tuple[str, ast.AST]]:
    """What can stand in the place of a node, with a name for it."""
    if isinstance(node, ast.Constant):
        yield from _constants(node)
    elif isinstance(node, ast.expr):
        yield from _expressions(node)
    elif isinstance(node, ast.If):
        yield "always", ast.If(ast.Constant(True), node.body, node.orelse)
        yield "never", ast.If(ast.Constant(False), node.body, node.orelse)
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "return None", ast.Return(ast.Constant(None))
    elif isinstance(node, (ast.AugAssign, ast.Raise)) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield "left out", ast.Pass()


def _expressions(node: ast.expr) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            if type(op) in COMPARE:
                other = COMPARE[type(op)]
                ops = [other() if j == i else one for j, one in enumerate(node.ops)]
                yield other.__name__, ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BoolOp):
        other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield type(other_op).__name__, ast.BoolOp(other_op, node.values)
        for i in range(len(node.values)):
            rest = [value for j, value in enumerate(node.values) if j != i]
            yield f"without {i}", rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert, ast.USub)):
        yield f"no {type(node.op).__name__}", node.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        yield BINARY[type(node.op)].__name__, ast.BinOp(node.left, BINARY[type(node.op)](), node.right)
    elif isinstance(node, ast.IfExp):
        yield "other branch", ast.IfExp(node.test, node.orelse, node.body)


def _constants(node: ast.Constant) -> Iterator[tuple[str, ast.AST]]:
    value = node.value
    if isinstance(value, bool):
        yield str(not value), ast.Constant(not value)
    elif isinstance(value, (int, float)):
        yield f"{value} + 1", ast.Constant(value + 1)
    elif isinstance(value, str) and value and " " not in value and len(value) <= 20 and value != "utf-8":  # has many names
        yield "another word", ast.Constant(value + "_")


# -- trials --------------------------------------------------------------------------------------------
TRIAL = ("-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:randomly", "--durations=0", "-m", "deep or not deep")
QUICKLY = ("--assert=plain", "--tb=no")
"""Nobody reads why a test failed; to be able to say so takes as long as many of the tests."""


class _Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the broken source in the place of one module."""

    def __init__(self, name: str, source: str, file: str) -> None:
        self.name, self.source, self.file = name, source, file

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        del path, target
        return importlib.util.spec_from_loader(name, self, origin=self.file) if name == self.name else None

    def exec_module(self, module: Any) -> None:
        module.__file__ = self.file
        exec(compile(self.source, self.file, "exec"), module.__dict__)


def noticed(subject: Subject, change: Change, *, show: bool = False) -> bool:
    """Whether the tests fail, crash or hang with this change."""
    child = os.fork()
    if child == 0:
        os._exit(_tested(subject, change, show=show))
    begun = time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status != 0
        if time.monotonic() - begun > LIMIT_S:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return True
        time.sleep(0.01)


def _tested(subject: Subject, change: Change, *, show: bool) -> int:
    import pytest

    gc.freeze()  # pytest collects garbage at its end, and all that came by the fork would be looked at, and so be copied
    file = str(importlib.util.find_spec(subject.module).origin)  # type: ignore[union-attr]
    again = "polydraft.conformance" if subject.module.startswith("polydraft.conformance") else "polydraft"
    for name in list(sys.modules):  # whatever may have taken something from the right module
        if name.split(".")[0] == "tests" or name in (again, subject.module) or name.startswith(again + "."):
            del sys.modules[name]
    sys.meta_path.insert(0, _Instead(subject.module, change.source(), file))
    quiet: Callable[[], Any] = io.StringIO
    out = sys.stdout if show else quiet()
    with redirect_stdout(out), redirect_stderr(out):
        status = pytest.main([*TRIAL, *(() if show else QUICKLY), *subject.tests])
    return int(status != 0)


def _warm(subject: Subject) -> None:
    """Import here what every trial would import for itself: pytest, its plugins, NumPy."""
    import pytest

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        pytest.main(["--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider", *subject.tests])


Part = tuple[int, int]
"""Which of how many: (1, 1) is all of it."""


def survivors(name: str, told: Callable[[str], None], part: Part = (1, 1)) -> tuple[list[str], list[str]]:
    """Ids of the changes that the tests of a module do not notice, and of all that were tried."""
    subject, found = SUBJECTS[name], []
    _warm(subject)
    source = Path(importlib.import_module(subject.module).__file__ or "").read_text(encoding="utf-8")
    right = Change("unchanged", lambda: source)
    assert not noticed(subject, right), f"the tests of {name} fail without any change"
    chosen = list(changes(subject))[part[0] - 1 :: part[1]]
    for change in chosen:
        if not noticed(subject, change):
            found.append(change.id)
            told(f"lives: {change.id}")
    return found, [change.id for change in chosen]


def judged(names: list[str], told: Callable[[str], None] = print, part: Part = (1, 1)) -> list[str]:
    """What is wrong: survivors without an explanation, explanations without a survivor (or, in a part, of what was tried)."""
    explained: dict[str, str] = json.loads(EXPLAINED.read_text(encoding="utf-8"))
    wrong: list[str] = []
    for name in names:
        found, tried = survivors(name, told, part)
        mine = {id_ for id_ in explained if id_.partition("::")[0] == name and (part == (1, 1) or id_ in tried)}
        told(f"{name}: {len(tried)} changes, {len(tried) - len(found)} noticed, {len(set(found) & mine)} explained")
        wrong += [f"no test notices {id_}" for id_ in found if id_ not in mine]
        wrong += [f"explained, and noticed or gone: {id_}" for id_ in sorted(mine - set(found))]
    return wrong


def _part(text: str) -> Part:
    index, _, count = text.partition("/")
    if not 1 <= int(index) <= int(count):
        raise argparse.ArgumentTypeError(f"{text!r} is no part; wanted I/N with I from 1 to N")
    return int(index), int(count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", choices=[*SUBJECTS, []], default=[])
    parser.add_argument("--id", default="", help="only the change of this name")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="only each N-th change, from the I-th on")
    given = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    names = given.modules or list(SUBJECTS)
    if given.id:
        subject = SUBJECTS[names[0]]
        change = next(change for change in changes(subject) if change.id == given.id)
        print("noticed" if noticed(subject, change, show=True) else "lives")
        return 0
    wrong = judged(names, part=given.part)
    print("\n".join(wrong) or "every change is noticed or explained")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
