"""Collects the source by which a golden is defined: everything that it calls or names, from whichever module that comes.

The page of a contract prints it, so that a kernel can be written without opening a source file. Nothing is executed: names are
followed through the syntax of the modules, and what comes from other packages is imported as they do.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

PACKAGE: Final = "polydraft."
COMMON: Final = ("polydraft.sentinels", "polydraft.contracts.layout")
"""Modules whose names descriptions use without importing them."""
_TYPES: Final = re.compile(r"(typing|numpy\.typing|collections\.abc|__future__)$")
"""What is imported for annotations alone."""


@dataclass
class Definition:
    """Import lines, and source in an order in which it can be executed."""

    imports: dict[str, None] = field(default_factory=dict)
    source: dict[tuple[str, str], str] = field(default_factory=dict)
    """Module and name to the text of the definition."""

    @property
    def text(self) -> str:
        """All of it as one module."""
        imports = "\n".join(sorted(self.imports, key=lambda line: (line.startswith("from"), line)))
        return "\n\n\n".join(filter(None, (imports, *_grouped(self.source.values()))))

    @property
    def numbers(self) -> dict[str, list[str]]:
        """Sentinels and enumerations, by the module that has them."""
        found: dict[str, list[str]] = {}
        for (module, name), text in self.source.items():
            if module == "polydraft.sentinels" or text.startswith("class "):
                found.setdefault(module, []).append(name)
        return found


def _grouped(parts: Iterable[str]) -> Iterator[str]:
    """Constants that follow each other as one paragraph, functions and classes alone."""
    lines: list[str] = []
    for part in parts:
        if part.startswith(("def ", "class ", "@")):
            if lines:
                yield "\n".join(lines)
            lines = []
            yield part
        else:
            lines.append(part)
    if lines:
        yield "\n".join(lines)


def names_in(source: str) -> list[str]:
    """The names that a piece of source reads, in order, annotations left out."""
    return list(dict.fromkeys(_names(ast.parse(source))))


def definition_of(module: str, names: Iterable[str]) -> Definition:
    """What `names` in `module` are, with all that they rest on; a name that is unknown there and in `COMMON` is passed over."""
    found = Definition()
    for name in names:
        for where in (module, *COMMON):
            if name in _syntax(where).names:
                _follow(found, where, name)
                break
    return found


@dataclass(frozen=True)
class _Syntax:
    """One module: its text, and the node that each top-level name comes from."""

    text: str
    names: dict[str, ast.stmt]
    documented: dict[str, ast.Expr]
    """The text behind an assignment that explains it."""


@cache
def _syntax(module: str) -> _Syntax:
    spec = importlib.util.find_spec(module)
    assert spec is not None, "a module that a contract imports"
    assert spec.origin is not None, "and that is a file"
    text = Path(spec.origin).read_text(encoding="utf-8")
    body, names, documented = ast.parse(text).body, dict[str, ast.stmt](), dict[str, ast.Expr]()
    for node, after in zip(body, [*body[1:], None], strict=True):
        for name in _bound(node):
            names[name] = node
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(after, ast.Expr):
                documented[name] = after
    return _Syntax(text, names, documented)


def _bound(node: ast.stmt) -> list[str]:
    """The names that a statement of a module binds."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]


def _follow(found: Definition, module: str, name: str) -> None:
    """File what `name` is, behind all that it rests on."""
    syntax = _syntax(module)
    node = syntax.names.get(name)
    if node is None or (module, name) in found.source:  # a builtin, or known
        return
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
        alias = next(one for one in node.names if name in (one.asname, one.name))
        _follow(found, str(node.module), alias.name)
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        if isinstance(node, ast.Import) or not _TYPES.match(node.module or ""):
            alias = next(one for one in node.names if name in (one.asname, one.name))
            line = ast.Import([alias]) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, [alias], 0)
            found.imports[ast.unparse(line)] = None
    else:
        for other in _names(node):
            if other != name:
                _follow(found, module, other)
        explained = syntax.documented.get(name)
        parts = [_segment(syntax.text, one) for one in (node, explained) if one is not None]
        found.source[module, name] = "\n".join(parts)


def _segment(text: str, node: ast.stmt) -> str:
    """The source of a statement, its decorators included."""
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def _names(node: ast.AST) -> Iterator[str]:
    """Names that are read, annotations left out, in order."""
    for part, value in ast.iter_fields(node):
        if part in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load):
                yield child.id
            elif isinstance(child, ast.AST):
                yield from _names(child)
