"""The project as data: the path of the checkout and the parsed pyproject.toml.

Tests that compare files of the project with each other use it. It does not import polydraft.
"""

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # a dependency of pytest there

ROOT = Path(__file__).parents[2]


def pyproject() -> dict[str, Any]:
    """Return pyproject.toml as nested dictionaries, parsed anew at each call."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def module_of(package: str) -> str:
    """The module that a dependency of core is imported as."""
    return package.replace("-", "_")
