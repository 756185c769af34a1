"""Reads JSON: the one place of core that parses it, so that what is none, or nests without end, is refused everywhere alike.

Who reads a file or text of a user's calls `read` or `checked` with what to do about a wrong one; `parsed` is for those who go
on without it, and for messages of polydraft's own processes. What the server is sent and what a model writes has to be JSON in
the narrower sense of answers, without NaN, and msgspec reads it (`polydraft.serving`). What a value holds, the caller checks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from polydraft.errors import ConfigError

__all__ = ["as_json", "checked", "parsed", "read"]

T = TypeVar("T")

_KINDS: dict[type[Any], str] = {dict: "a JSON object", list: "a JSON list", object: "JSON"}
"""What a value may have to be, as `read` and `checked` take it, and its name in a sentence."""


def parsed(data: str | bytes, *, strict: bool = True) -> Any:
    """The value of a text; bytes are UTF-8, with or without a byte order mark. Raises `ValueError` for what is no JSON, to which
    control characters in strings belong if `strict`."""
    try:
        return json.loads(data if isinstance(data, str) else data.decode("utf-8-sig"), strict=strict)
    except RecursionError:
        raise ValueError("values that nest too deep") from None


def checked(
    data: str | bytes, kind: type[T], what: str, fix: str, *, error: Callable[[str], Exception] = ConfigError
) -> T:  # fmt: skip
    """The value of a text, a `kind`: `dict`, `list`, or `object` for any. `what` the text is, and `fix`, what to do about a
    wrong one, are parts of the sentence that `error` is raised with."""
    try:
        value = parsed(data)
    except ValueError as wrong:
        raise error(f"{what} is no valid JSON, got {wrong}, wanted {_KINDS[kind]}; {fix}") from wrong
    if not isinstance(value, kind):
        raise error(f"{what} holds a JSON {type(value).__name__}, wanted {_KINDS[kind]}; {fix}")
    return value


def read(
    path: Path, kind: type[T], fix: str, *, what: str = "", missing: str = "", error: Callable[[str], Exception] = ConfigError
) -> T:
    """The value of a file, as `checked` has it. `what`: the file, by default its path; `missing`: what to do where it is not
    there, by default `fix`."""
    what = what or str(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise error(f"{what} is missing, wanted a JSON file; {missing or fix}") from None
    except (OSError, ValueError) as wrong:  # a path with a zero byte
        got = getattr(wrong, "strerror", None) or wrong
        raise error(f"{what} cannot be read, got {got}, wanted a readable file; name another, or let it be read") from wrong
    return checked(data, kind, what, fix, error=error)


def as_json(value: object) -> Any:
    """What a value is once it has been in a file. Raises `ValueError` for what JSON does not know."""
    try:
        return parsed(json.dumps(value))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
