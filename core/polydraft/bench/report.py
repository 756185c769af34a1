"""The committed form of benchmark results: schema polydraft.bench/1, with machine, versions and method.

`polydraft bench` and the scripts in `bench/` write it, and update the tables of pages with it. Every figure comes with what is
needed to read it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from polydraft._version import __version__
from polydraft.errors import ConfigError

SCHEMA = "polydraft.bench/1"
METHOD = (
    "requests of equal length, greedy, end of text ignored; contenders of one batch size take turns in one process after one "
    "warm-up run each; a round's figures are medians over the steps in which every request has a round; how long the device was "
    "idle in those is of the same run where the device itself says when it worked, host time by stage of a second one in each "
    "turn; of each figure the median over the repeats, as spread the smallest and the largest"
)


def document(
    rows: Sequence[Mapping[str, Any]], *, device: str = "", driver: str = "", method: str = METHOD, **more: Any
) -> dict[str, Any]:
    """A whole result. `device` defaults to this machine's processor."""
    return {
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit(),
        "device": device or processor(),
        "driver": driver,
        "versions": {"polydraft": __version__, "numpy": np.__version__, "python": platform.python_version()},
        "method": method,
        **more,
        "rows": list(rows),
    }


def write(path: str | Path, result: Mapping[str, Any]) -> None:
    """The file of a result."""
    Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def renewed(page: str, name: str, *paragraphs: str) -> str:
    """The text of a page with these paragraphs behind its line `<!-- figures: NAME -->`, in place of as many that stand there.
    A page without that line is a ConfigError."""
    marker = f"<!-- figures: {name} -->\n\n"
    before, found, behind = page.partition(marker)
    if not found:
        said = f"the page has no line {marker.strip()} with an empty one behind it"
        raise ConfigError(f"{said}; put both where the table shall stand")
    kept = behind.split("\n\n", len(paragraphs))[len(paragraphs) :]
    return before + marker + "\n\n".join([*(paragraph.strip("\n") for paragraph in paragraphs), *kept]) + ("" if kept else "\n")


def renew(path: Path, name: str, *paragraphs: str) -> None:
    """`renewed` for the page in a file."""
    path.write_text(renewed(path.read_text(encoding="utf-8"), name, *paragraphs), encoding="utf-8")


def processor() -> str:
    """The processor by its name where the system tells it, and how many cores of it there are."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{platform.machine()} CPU, {name}, {os.cpu_count()} cores"


def commit() -> str:
    """The commit of the checkout that this package lies in, with + behind it where files differ; "" outside of a checkout."""
    folder = Path(__file__).parent
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return f"{head}+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603  fixed words, no shell
