"""Splits what a model writes into its reasoning and its reply, by the markers of the model's family.

`FORMS` has the families as data. A `ReasoningReader` follows one text, whole or in pieces of any size, and gives the same for
both. Where a text begins is known from the prompt, whose end may have opened or closed the reasoning already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from polydraft.serving.markers import cut

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class ReasoningForm:
    """One family. Line ends beside a marker belong to it, not to the text."""

    name: str
    signs: tuple[str, ...] = ()
    """Texts in a chat template that are certain signs of the family; none: it is taken where it is asked for."""
    opens: bool = False
    """Whether a text reasons from its beginning on even if neither it nor the prompt says so."""
    start: str = THINK
    end: str = END_THINK
    reply: tuple[str, str] | None = None
    """Markers that the reply may stand between."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All that a text may have of it."""
        return (self.start, self.end, *(self.reply or ()))


FORMS: Final[Mapping[str, ReasoningForm]] = {
    form.name: form
    for form in (
        # By the text that only its templates have; the last one is told by the markers alone.
        ReasoningForm("ernie45", (THINK, END_THINK, "<response>"), opens=True, reply=("<response>", "</response>")),
        ReasoningForm("glm45", (THINK, END_THINK, "[gMASK]")),
        ReasoningForm("deepseek_v3", (THINK, END_THINK, "<\uff5cAssistant\uff5c>")),
        ReasoningForm("deepseek_r1", opens=True),
        ReasoningForm("mimo"),
        ReasoningForm("qwen3", (THINK, END_THINK)),
    )
}
"""The names are vLLM's."""

State = Literal["begin", "reasoning", "between", "reply", "wrapped", "behind"]


def begun(form: ReasoningForm, prompt: str, *, continued: bool = False) -> bool:
    """Whether a text reasons from its first token on, which the end of its prompt says, else the family. A text that is
    `continued` is the prompt's last message, and says it itself."""
    if continued:
        return prompt.rfind(form.start) > prompt.rfind(form.end)
    end = prompt.rstrip()
    return end.endswith(form.start) or (form.opens and not end.endswith(form.end))


class ReasoningReader:
    """Follows one text. `begun`: whether it begins with reasoning even without the marker."""

    def __init__(self, form: ReasoningForm, *, begun: bool) -> None:
        self._form, self._begun = form, begun
        self._held = ""
        self._fresh = True
        """Whether the part that the text is in has had nothing but line ends."""
        self.state: State = "begin"
        self.reasons = False
        """Whether it has, or had, reasoning."""
        self.opening = 0
        """Characters up to the end of the marker that opened the reasoning; 0 where the prompt did."""
        self.closing = 0
        """Characters from the marker that closed the reasoning on, when it was found."""

    def feed(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """More of the text, `last` with its end; returns new reasoning and new reply."""
        self._held += text
        reasoning = reply = ""
        while True:
            before = self.state
            self.reasons |= before == "reasoning"
            part = self._go_on(last=last)
            if before == "reasoning":
                reasoning += part
            else:
                reply += part
            if self.state == before:
                return reasoning, reply

    def _go_on(self, *, last: bool) -> str:
        """The new text of the state, which the text may leave with it."""
        form = self._form
        if self.state == "begin":
            return self._begin(last=last)
        if self.state == "reasoning":
            return self._until(form.end, "between", last=last)
        if self.state == "wrapped" and form.reply is not None:
            return self._until(form.reply[1], "behind", last=last)
        if self.state in ("between", "behind"):
            self._held = self._held.lstrip("\n")
            if form.reply is not None and self.state == "between" and self._opens(form.reply[0], self._held, last=last):
                return ""
            if self._held:
                self.state = "reply"
        part, self._held = self._held, ""
        return part

    def _begin(self, *, last: bool) -> str:
        """Look whether the text opens its reasoning; what does not is reply, as it is, or reasoning where that has begun."""
        text, start = self._held.lstrip(), self._form.start
        if text.startswith(start):
            self.opening, self._held = len(self._held) - len(text) + len(start), text[len(start) :]
            self.state = "reasoning"
        elif last or not start.startswith(text):
            self.state = "reasoning" if self._begun else "reply"
        return ""

    def _opens(self, marker: str, text: str, *, last: bool) -> bool:
        """Whether a text begins with a marker, which is taken off, or still may."""
        if text.startswith(marker):
            self._held, self.state, self._fresh = text[len(marker) :], "wrapped", True
            return True
        return not last and marker.startswith(text)

    def _until(self, marker: str, behind: State, *, last: bool) -> str:
        """Text up to a marker, without line ends beside it; those at its end are kept until it is known what follows."""
        if self._fresh:
            self._held = self._held.lstrip("\n")
            self._fresh = not self._held
        before, found, rest = cut(self._held, (marker,))
        part = before.rstrip("\n")
        if found:
            self._held, self.state = rest, behind
            if behind == "between":
                self.closing = len(marker) + len(rest)
        elif last:
            part, self._held = self._held.rstrip("\n"), ""
        else:
            self._held = before[len(part) :] + rest
        return part
