"""The files that a run leaves behind: created before the run begins, and one sentence where one cannot be written.

Writers of timelines, records and pictures use it, and commands with an option that names such a file. It knows no file's form.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from polydraft.errors import ConfigError, PolydraftError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Around what writes `path`. Raises `ConfigError` where the system refuses, `PolydraftError` where it only has no room."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise PolydraftError(f"{path} cannot be written, got {error.strerror}; make room, or write elsewhere") from error
        raise ConfigError(f"{path} cannot be written, got {error.strerror or error}; name a file in a folder of yours") from error


def check_distinct(files: Mapping[str, str | None]) -> None:
    """Raise `ConfigError` where two of the options in `files` name one file; None: the option was not given."""
    options: dict[Path, str] = {}
    for option, file in files.items():
        if file is None:
            continue
        other = options.setdefault(Path(file).resolve(), option)
        if other != option:
            raise ConfigError(f"{other} and {option} both name {file}, wanted a file for each; change one of them")


def claim(files: Mapping[str, str | None]) -> None:
    """Create the files that a run will fill, by the options that name them, before anything is loaded. Raises `ConfigError` where
    two are one file, and where one cannot be created."""
    check_distinct(files)
    for file in filter(None, files.values()):
        with writing(file):
            Path(file).write_bytes(b"")
