"""Rules of the architecture that the source can be asked for: no backend by name, frozen records, documented public names.

The checks parse every module of core and run none. Each is also shown source that breaks its rule, so that a check which
has gone blind fails here.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.project import ROOT, modules_of_core, pyproject, walked

CORE = ROOT / "core" / "polydraft"
BACKENDS = pyproject()["project"]["entry-points"]["polydraft.backends"]
OWN_ROOMS = [ROOT / "core" / Path(*module.split(".")) for module in BACKENDS.values()]
"""A backend may know its own name."""

NAMES = frozenset({*BACKENDS, "cuda", "paddle", "xpu", "emulator"})
"""Backends that exist or are planned; a comparison with one of them is a question that core must not ask."""

ALLOWED = {
    ("plugins/default_backend.py", "'cpu'"): "what `auto` means",
    ("plugins/default_backend.py", "'cuda'"): "likewise",
    ("plugins/default_backend.py", "'reference'"): "likewise",
    ("backend.py", "'emulator'"): "a word for evidence",
    ("plugins/manager.py", "info.name != backend.entry"): "an entry point must carry the name that its backend gives itself",
    ("plugins/variants.py", "one.backend == info.name"): "which records of a file are the backend's own",
}
"""(module, literal or comparison) that is no question about the backend, with the reason."""

RECORDS = (
    "backend.py", "config.py", "resolve.py", "sampling_params.py", "plugins/kernel_table.py", "plugins/checks.py",
    "plugins/loading.py", "plugins/plugins.py", "contracts/base.py", "contracts/composite.py", "models/description.py",
    "models/families.py", "proposers/base.py", "program/plan.py",
)  # fmt: skip
"""Modules whose dataclasses are configuration, or cross a seam: all of them are frozen."""

DERIVED = frozenset({"dataclass", "dataclasses.dataclass"})


def backend_names(tree: ast.AST, path: Path) -> list[str]:
    """Return string literals that are the name of a backend (and no word for evidence), and comparisons of the name of one."""
    if any(room in path.parents or path == room.with_suffix(".py") for room in OWN_ROOMS):
        return []
    found = []
    evidence: set[ast.AST] = set()
    for node in walked(tree):  # breadth first: a comparison comes before what it compares
        if isinstance(node, ast.Constant) and node.value in NAMES and node not in evidence:
            found.append((node.lineno, repr(node.value)))
        elif isinstance(node, ast.Compare):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            if any(side.endswith(".evidence") for side in sides):
                evidence |= {node.left, *node.comparators}
            if any(re.search(r"\b(backend|info|identity)(\(\))?\.name$|\bbackend_name$", side) for side in sides):
                found.append((node.lineno, ast.unparse(node)))
    module = path.relative_to(CORE).as_posix()
    return [f"{line}: {what}" for line, what in found if (module, what) not in ALLOWED]


def mutable_records(tree: ast.AST, path: Path) -> list[str]:
    """Return dataclasses of modules of records that are not frozen."""
    found = []
    if path.relative_to(CORE).as_posix() in RECORDS:
        for node in (n for n in walked(tree) if isinstance(n, ast.ClassDef)):
            for decorator in node.decorator_list:
                call = decorator.func if isinstance(decorator, ast.Call) else decorator
                if ast.unparse(call) in DERIVED and "frozen=True" not in ast.unparse(decorator):
                    found.append(f"{node.lineno}: {node.name}")
    return found


def unfreezing(tree: ast.AST, path: Path) -> list[str]:
    """Return places that write into a frozen record from outside of its own `__post_init__`."""
    if path.name in {"faulty_backends.py", "fault_injection.py"}:  # they break what they are given, whatever it is made of
        return []
    own = {
        inner
        for node in walked(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "__post_init__"
        for inner in ast.walk(node)
    }
    return [
        f"{node.lineno}: object.__setattr__"
        for node in walked(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "__setattr__"
        and ast.unparse(node) == "object.__setattr__"
        and node not in own
    ]


def undocumented(tree: ast.AST, path: Path) -> list[str]:
    """Return public modules, classes and functions (of modules) without a docstring."""
    del path
    assert isinstance(tree, ast.Module)
    found = [] if ast.get_docstring(tree) or not tree.body else ["1: the module"]
    return found + [f"{node.lineno}: {node.name}" for node in _public(tree) if not ast.get_docstring(node)]


def _public(node: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not child.name.startswith("_"):
            if isinstance(node, ast.Module) or isinstance(child, ast.ClassDef):
                yield child
            if isinstance(child, ast.ClassDef):
                yield from _public(child)


def pluggy_in_the_step(tree: ast.AST, path: Path) -> list[str]:
    """Return imports of pluggy outside of the two modules that have to: whoever has no manager makes no hook call."""
    if path.relative_to(CORE).as_posix() in {"hooks.py", "plugins/manager.py"}:
        return []
    return [f"{node.lineno}: pluggy" for node in walked(tree) if isinstance(node, ast.Import) and node.names[0].name == "pluggy"]


Check = Callable[[ast.AST, Path], list[str]]
CHECKS: list[Check] = [backend_names, mutable_records, unfreezing, undocumented, pluggy_in_the_step]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_core_has_none(check: Check):
    trees = modules_of_core()
    assert trees, f"no modules below {CORE}"
    found = {str(path.relative_to(ROOT)): places for path, tree in trees.items() if (places := check(tree, path))}
    assert not found


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (backend_names, "def f(info):\n    return info.name == chosen"),
        (backend_names, "if plugins.backend_name != x: pass"),
        (backend_names, "if self.plugins.info().name in names: pass"),
        (backend_names, "fast = device in ('cuda', 'cpu')"),
        (backend_names, "table = {'reference': 1}"),
        (backend_names, "match kind:\n    case 'xpu': pass"),
        (mutable_records, "@dataclass\nclass Plan: ..."),
        (mutable_records, "@dataclasses.dataclass(eq=False)\nclass Plan: ..."),
        (mutable_records, "@dataclass(frozen=False)\nclass Plan: ..."),
        (unfreezing, "def f(config):\n    object.__setattr__(config, 'seed', 3)"),
        (undocumented, "x = 1"),
        (undocumented, "'''Module.'''\nclass Public: ..."),
        (undocumented, "'''Module.'''\ndef public(): ..."),
        (undocumented, "'''Module.'''\nclass Public:\n    '''Doc.'''\n    class Inner: ..."),
        (pluggy_in_the_step, "import pluggy"),
    ],
)
def test_check_sees(check: Check, source: str):
    assert check(ast.parse(source), CORE / "config.py")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check_lets_pass(check: Check):
    source = (
        "'''Module.'''\n@dataclass(frozen=True)\nclass Plan:\n    '''Doc.'''\n    def __post_init__(self):\n"
        "        object.__setattr__(self, 'x', 1)\n    def method(self): ...\nclass _Private: ...\n"
        "def ask(capabilities, info):\n    '''Doc: never ask for cuda by name.'''\n"
        "    return info.evidence == 'emulator' or f'{info.name}' if capabilities.asynchronous else ''\n"
    )
    assert not check(ast.parse(source), CORE / "config.py")


def test_lists_have_no_dead_entries():
    assert all((CORE / module).is_file() for module in RECORDS)
    for module, what in ALLOWED:
        source = (CORE / module).read_text(encoding="utf-8")
        assert what in source or what.replace("'", '"') in source, f"{what} is not in {module} any more"
