"""Owns what commands share: exit statuses, common options, and small types of values.

The command modules decorate themselves with it. It never imports anything heavy and never prints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

FAILED, USAGE, INTERRUPTED = 1, 2, 130
"""Exit statuses besides 0: the thing asked for failed; bad usage; Ctrl-C."""

Command = TypeVar("Command", bound=Callable[..., Any])


def common(command: Command) -> Command:
    """Give a command `--json` (as the argument `as_json`) and `--debug` (read where errors are told)."""
    command = click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")(command)
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object on standard output and nothing else there."
    )(command)


def whole_or_auto(value: str) -> int | str:
    """A whole number, or the word auto; the configuration checks the range."""
    if value == "auto":
        return value
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a whole number nor 'auto'") from None


def token_bias(value: str) -> tuple[int, float]:
    """A token id and what is added to its logit, as ID=X; the sampling parameters check the ranges."""
    token_id, _, bias = value.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise click.BadParameter(f"{value!r} is no ID=X, wanted a token id and a number, such as 17=-2.5") from None


def names(value: str | tuple[str, ...]) -> tuple[str, ...]:
    """Names between commas."""
    if isinstance(value, tuple):  # a default, which click converts too
        return value
    each = tuple(part.strip() for part in value.split(","))
    if not all(each):
        raise click.BadParameter(f"{value!r} has an empty name")
    return each


def token_ids(value: str | tuple[int, ...]) -> tuple[int, ...]:
    """Token ids between commas."""
    if isinstance(value, tuple):
        return value
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of token ids, such as 17,4") from None
