"""The files that a run leaves behind: created before the run begins, and one sentence where one cannot be written.

Writers of timelines, records and pictures use it, and commands with an option that names such a file. It knows no file's form.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polydraft.errors import ConfigError


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Around what writes `path`. Raises `ConfigError` where the system refuses."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written, got {error.strerror or error}; name a file in a folder of yours") from error


def claim(path: str | Path) -> None:
    """Create the file that a run will fill, before anything is loaded. Raises `ConfigError` where that cannot be."""
    with writing(path):
        Path(path).write_bytes(b"")
