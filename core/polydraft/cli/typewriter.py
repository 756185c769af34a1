"""Prints generated text as it arrives: accepted drafts in colour, requests in order, and one line of figures at the end.

`polydraft generate` feeds it the engine's records. It does not delay text that may already be written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polydraft.cli.show import Progress, Screen
from polydraft.models.tokenizer import IncrementalDecoder, Tokenizer

if TYPE_CHECKING:
    from polydraft.output.request_output import RequestOutput

ACCEPTED, PROMPT, TITLE = "bold green", "dim", "bold"
"""Styles: an accepted draft, the prompt before its text, a header. The target's own tokens have none."""


class Typewriter:
    """Writes the text of one request as its records come, each accepted draft in its colour.

    The text is the engine's, character by character; only the colours come from decoding token by token, so the text is
    right whatever a tokenizer does. A character that spans tokens has the colour of the token that completes it.
    """

    def __init__(self, screen: Screen, tokenizer: Tokenizer) -> None:
        self._screen = screen
        self._decoder = IncrementalDecoder(tokenizer)
        self._runs: deque[tuple[int, str]] = deque()
        """(characters, style) of text that has been decoded here and not been written yet; what is written beyond it (the end
        of an unfinished character) has no style."""
        self._last = ""

    def feed(self, output: RequestOutput) -> None:
        """Write what is new in `output`; a finished text ends its line."""
        for token in output.new_tokens:
            self._add(self._decoder.push((token.token_id,)), ACCEPTED if token.draft_position else "")
        self._write(output.text_delta)
        if output.finished and self._last != "\n":
            self._screen.line()

    def _add(self, piece: str, style: str) -> None:
        if piece:
            self._runs.append((len(piece), style))

    def _write(self, text: str) -> None:
        self._last = text[-1:] or self._last
        while text:
            size, style = self._runs.popleft() if self._runs else (len(text), "")
            self._screen.write(text[:size], style)
            if size > len(text):
                self._runs.appendleft((size - len(text), style))
            text = text[size:]


class OneText:
    """Shows the one request of a run as it is generated, behind its prompt where colours tell the two apart."""

    def __init__(self, screen: Screen, tokenizer: Tokenizer, prompt: str) -> None:
        self._writer = Typewriter(screen, tokenizer)
        if screen.has_color:
            legend(screen)
            screen.write(prompt, PROMPT)

    def __call__(self, output: RequestOutput) -> None:
        """Write what is new."""
        self._writer.feed(output)


class TextsInOrder:
    """Shows finished requests under a header each, in the order in which they were given."""

    def __init__(self, screen: Screen, tokenizer: Tokenizer, titles: Mapping[str, str], progress: Progress) -> None:
        """`titles` has the title of each request by id, in the order of the output."""
        self._screen, self._tokenizer, self._progress = screen, tokenizer, progress
        self._titles, self._num_titles = dict(titles), len(titles)
        self._finished: dict[str, RequestOutput] = {}
        legend(screen)

    def __call__(self, output: RequestOutput) -> None:
        """Keep a finished request until those before it are written."""
        if not output.finished:
            return
        self._finished[output.id] = output
        self._progress.advance()
        while self._titles and (first := next(iter(self._titles))) in self._finished:
            with self._progress.aside():
                self._write(self._titles.pop(first), self._finished.pop(first))

    def _write(self, title: str, output: RequestOutput) -> None:
        place = f"{self._num_titles - len(self._titles)}/{self._num_titles}"
        count = counted(len(output.token_ids))
        self._screen.line(f"== {place} {output.id}: {title} ({count}, {output.finish_reason})", TITLE)
        Typewriter(self._screen, self._tokenizer).feed(output)


def title(prompt: str | Sequence[int]) -> str:
    """A prompt as part of one line."""
    line = " ".join(prompt.split()) if isinstance(prompt, str) else str(list(prompt))
    return line if len(line) <= 50 else f"{line[:47]}..."


def counted(num_tokens: int) -> str:
    """A number of tokens in words."""
    return "1 token" if num_tokens == 1 else f"{num_tokens:,} tokens"


def legend(screen: Screen) -> None:
    """Say what the colours mean, where there are any."""
    if screen.has_color:
        screen.write("accepted draft", ACCEPTED)
        screen.line(" | target token", "")


def figures(answer: Mapping[str, Any]) -> str:
    """The one line under a run, from the same record that --json prints."""
    totals, config = answer["totals"], answer["config"]
    parts = [counted(totals["new_tokens"])]
    if totals["tokens_per_round"] is not None:
        parts.append(f"{totals['tokens_per_round']:.2f} tokens per round")
    shares = totals["acceptance_per_position"]
    if any(share is not None for share in shares):
        shown = ("-" if share is None else f"{share:.0%}" for share in shares)
        parts.append(f"accepted by position {' '.join(shown)}")
    if totals["tokens_per_s"] is not None:
        parts.append(f"{totals['tokens_per_s']:,.0f} tokens/s")
    return " | ".join([*parts, f"backend {answer['backend']}", f"K = {config['draft_tokens']}"])
