"""Checks for `polydraft doctor` whether two installed packages of polydraft's extras own the same import package.

Such packages overwrite each other's files when both are installed. It reads installed metadata and imports nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from importlib.metadata import Distribution, PackageNotFoundError, distributions, requires


def clashes() -> list[str]:
    """One sentence for each import package that several installed packages own: which ones, and what to uninstall."""
    owners: dict[str, set[str]] = defaultdict(set)
    wanted = _required()
    for distribution in distributions():
        if (name := _normal(distribution.metadata["Name"] or "")) in wanted:
            for package in _import_packages(distribution):
                owners[package].add(name)
    return [
        f"{', '.join(sorted(names))} all install the import package {package!r} and overwrite each other; uninstall all of them "
        "and install the one extra that this machine needs"
        for package, names in sorted(owners.items())
        if len(names) > 1
    ]


def _required() -> set[str]:
    """Names of all packages that polydraft and its extras require."""
    try:
        lines = requires("polydraft") or []
    except PackageNotFoundError:
        return set()
    return {_normal(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines}


def _import_packages(distribution: Distribution) -> set[str]:
    """Top-level packages with an `__init__.py` of their own; namespace packages are meant to be shared. `Distribution.files`
    would make a path of every line, of which large packages have ten thousands."""
    record = distribution.read_text("RECORD") or ""
    return set(re.findall(r'^"?([^/",]+)/__init__\.py"?,', record, re.MULTILINE))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
