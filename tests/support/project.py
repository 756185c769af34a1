"""The project as data: the path of the checkout, the parsed pyproject.toml, the parsed modules of core.

Tests that compare files of the project with each other use it. It does not import polydraft.
"""

import ast
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # a dependency of pytest there

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core"


def pyproject() -> dict[str, Any]:
    """Return pyproject.toml as nested dictionaries, parsed anew at each call."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@functools.cache
def modules_of_core() -> Mapping[Path, ast.Module]:
    """Every module of core by its path, in the order of paths; for reading, since all tests of a process share them."""
    return {path: ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in sorted(CORE.rglob("*.py"))}


@functools.cache
def walked(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a module, breadth first: a dozen rules look at each of core."""
    return tuple(ast.walk(tree))


def module_of(package: str) -> str:
    """The module that a dependency of core is imported as."""
    return package.replace("-", "_")
