"""Environment variables: the only module of polydraft that reads them.

It has the table `VARIABLES` and one typed accessor per variable. The command line, its terminal output and everything that keeps
files between runs call these each time a value is needed; nothing is cached. No variable influences numerics: what decides tokens
is configuration, which is frozen, explained and recorded.

| variable          | effect                                                                               |
|-------------------|--------------------------------------------------------------------------------------|
| `POLYDRAFT_DEBUG` | true: a failing command prints its traceback, like `--debug` on every command        |
| `POLYDRAFT_CACHE_DIR` | folder for what is kept between runs; default: `polydraft` in the user's cache folder  |
| `XDG_CACHE_HOME`  | the user's cache folder (the XDG convention); default: `~/.cache`                    |
| `NO_COLOR`        | not empty: no colour on the terminal (the no-color.org convention)                   |
| `CI`              | true: no progress display and no prompt for input, since nobody watches              |
"""

import difflib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from polydraft.errors import ConfigError

__all__ = [
    "VARIABLES", "cache_folder", "check_environment", "dictate", "dictating", "given", "is_ci", "no_color", "suggest",
    "wants_debug",
]  # fmt: skip

VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "POLYDRAFT_DEBUG": "true: a failing command prints its traceback, like `--debug` on every command",
        "POLYDRAFT_CACHE_DIR": "folder for what is kept between runs; default: `polydraft` in the user's cache folder",
        "XDG_CACHE_HOME": "the user's cache folder (the XDG convention); default: `~/.cache`",
        "NO_COLOR": "not empty: no colour on the terminal (the no-color.org convention)",
        "CI": "true: no progress display and no prompt for input, since nobody watches",
    }
)
"""Every variable that is read, with its effect."""

_PREFIX = "POLYDRAFT_"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


def wants_debug() -> bool:
    """Return whether `POLYDRAFT_DEBUG` asks for tracebacks.

    Errors: `ConfigError` for a value that is neither true (1, true, yes, on) nor false (0, false, no, off, empty).
    """
    value = os.environ.get("POLYDRAFT_DEBUG", "").strip().lower()
    if value not in _TRUE | _FALSE:
        raise ConfigError(
            f"POLYDRAFT_DEBUG cannot be understood, got {value!r}, wanted one of 1, true, yes, on, 0, false, no, off; "
            f"change or unset it"
        )
    return value in _TRUE


def no_color() -> bool:
    """Return whether `NO_COLOR` asks for plain text: set to anything but the empty string, "0" included."""
    return os.environ.get("NO_COLOR", "") != ""


def is_ci() -> bool:
    """Return whether `CI` says that no person watches: set to anything that does not mean false.

    CI systems write "true", "1" or their own name, so an unknown value is no error here.
    """
    return os.environ.get("CI", "").strip().lower() not in _FALSE


def cache_folder() -> Path:
    """Return the folder for files that are kept between runs and may be deleted at any time; it need not exist yet."""
    chosen = os.environ.get("POLYDRAFT_CACHE_DIR", "")
    if chosen:
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "polydraft"


def suggest(name: str, value: str) -> None:
    """Set a variable that a library reads when it is imported, unless the user has set it."""
    os.environ.setdefault(name, value)


def dictate(name: str, value: str) -> None:
    """Set a variable that a library reads when it is imported, whatever the user has set; for processes of their own."""
    os.environ[name] = value


@contextmanager
def dictating(name: str, value: str) -> Iterator[None]:
    """Set a variable that a library reads in a call, for as long as this lasts; then what the user has set holds again."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def given(name: str) -> str:
    """Return a variable that a library reads, "" where it is not set: to refuse what it would do in secret, or to count the
    threads that the user gave it; never to decide what is computed."""
    return os.environ.get(name, "")


def check_environment() -> None:
    """Refuse variables that begin with `POLYDRAFT_` and that polydraft does not know, so that a typo is not ignored.

    Errors: `ConfigError` naming the variable and the nearest known one.
    """
    unknown = sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in VARIABLES)
    if not unknown:
        return
    known = [name for name in VARIABLES if name.startswith(_PREFIX)]
    nearest = difflib.get_close_matches(unknown[0], known, n=1)
    advice = f"did you mean {nearest[0]}" if nearest else "unset it"
    raise ConfigError(f"environment variable {unknown[0]} is unknown, wanted one of {', '.join(known)}; {advice}")
