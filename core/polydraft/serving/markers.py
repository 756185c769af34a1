"""Finds markers in a text that comes in pieces: what stands before the first of them, and what may still become one.

Readers of reasoning and of tool calls cut texts with it, and are chosen by the markers that a chat template writes. It keeps
nothing: whoever calls it keeps the rest of the text for the next piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from polydraft.errors import ConfigError

NONE: Final = "none"
AUTO: Final = "auto"


class Form(Protocol):
    """How a family of models marks something: its name as an option has it, and texts that all stand in its chat templates."""

    @property
    def name(self) -> str: ...

    @property
    def signs(self) -> Sequence[str]: ...


F = TypeVar("F", bound=Form)


def check_name(option: str, asked: str, forms: Mapping[str, Form]) -> None:
    """Raise `ConfigError` for the name of no form."""
    known = (AUTO, NONE, *forms)
    if asked not in known:
        raise ConfigError(f"{option} is {asked!r}, wanted one of {', '.join(known)}; correct it")


def choose(asked: str, forms: Mapping[str, F], template: str) -> tuple[F | None, str]:
    """The form that was asked for by its name, and why it is this one; with `auto` the first whose signs the template has."""
    if asked in forms:
        return forms[asked], f"{asked} (asked for)"
    if asked == NONE:
        return None, f"{NONE} (asked for)"
    found = next((form for form in forms.values() if form.signs and all(sign in template for sign in form.signs)), None)
    if found is None:
        return None, f"{NONE} (the chat template has no markers that are known)"
    return found, f"{found.name} (the chat template has {' and '.join(found.signs)})"


def cut(text: str, markers: Iterable[str]) -> tuple[str, str, str]:
    """What stands before the first of `markers`, that marker, and what is behind it. Without one: what certainly belongs to no
    marker, "", and the end of the text, which may be the beginning of one."""
    found = min(((place, mark) for mark in markers if (place := text.find(mark)) >= 0), default=None)
    if found is not None:
        place, mark = found
        return text[:place], mark, text[place + len(mark) :]
    keep = max((size for mark in markers for size in range(1, len(mark)) if text.endswith(mark[:size])), default=0)
    return text[: len(text) - keep], "", text[len(text) - keep :]
