"""Constraints of a contract: comparisons between sizes and parameters, parsed from the text that pages show.

The check of a record evaluates them. Only names, numbers, texts, integer arithmetic, lengths of tuples
and comparisons are allowed, and nothing is executed as code.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

Known = Mapping[str, Any]
"""Sizes by their symbols, parameters by their names."""
Value = Callable[[Known], Any]

_ARITHMETIC: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
LENGTH: Final = "len"
_COMPARISONS: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Eq: operator.eq, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
}  # fmt: skip


@dataclass(frozen=True)
class Constraint:
    """One of them: its text, the names in it in the order of their first places, and whether it holds."""

    text: str
    names: tuple[str, ...]
    _value: Value

    @classmethod
    def read(cls, text: str) -> Constraint:
        """Read `W == K + 1`, `2 * len(frequencies) <= head_dim`, `style in ("half", "interleaved")` and the like. Raises
        `SyntaxError` for anything else."""
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.Compare):
            raise SyntaxError(f"constraint {text!r} is no comparison")
        names = sorted((node.col_offset, node.id) for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id != LENGTH)
        return cls(text, tuple(dict.fromkeys(name for _, name in names)), _reader(tree))

    def holds(self, known: Known) -> bool:
        """Whether it does, where `known` has all its names. Values of a kind that it is not about break it."""
        try:
            return bool(self._value(known))
        except (TypeError, ArithmeticError):
            return False


def _reader(node: ast.expr) -> Value:
    """What works the expression out."""
    if isinstance(node, ast.Constant):
        constant = node.value
        return lambda known: constant
    if isinstance(node, ast.Name):
        return operator.itemgetter(node.id)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == LENGTH and len(node.args) == 1:
        counted = _reader(node.args[0])
        return lambda known: len(counted(known))
    if isinstance(node, ast.Tuple):
        items = [_reader(item) for item in node.elts]
        return lambda known: tuple(item(known) for item in items)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        do, left, right = _ARITHMETIC[type(node.op)], _reader(node.left), _reader(node.right)
        return lambda known: do(left(known), right(known))
    if isinstance(node, ast.Compare) and all(type(op) in _COMPARISONS for op in node.ops):
        ops = [_COMPARISONS[type(op)] for op in node.ops]
        sides = [_reader(side) for side in (node.left, *node.comparators)]
        return lambda known: _all_hold(ops, [side(known) for side in sides])
    raise SyntaxError(f"a constraint knows no {type(node).__name__}")


def _all_hold(ops: list[Callable[[Any, Any], bool]], values: list[Any]) -> bool:
    return all(op(left, right) for op, left, right in zip(ops, values, values[1:], strict=False))
