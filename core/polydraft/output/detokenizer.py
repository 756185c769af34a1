"""The text of one request as it grows out of its tokens, whole characters only, and the stop strings that may end it.

The engine keeps one for each request with stop strings, since its next step depends on them; `OutputProcessor` keeps one for
every other request, off the step's path.
"""

from __future__ import annotations

from bisect import bisect_left

from ahocorasick_rs import AhoCorasick, Implementation

from polydraft.models.tokenizer import IncrementalDecoder, Tokenizer


class StopStrings:
    """The stop strings of one request, looked for all at once by an Aho-Corasick automaton, however many there are."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._automaton = AhoCorasick(stops, implementation=Implementation.NoncontiguousNFA)  # the one that is built at once
        self._sorted = sorted(stops)

    def first(self, text: str, begin: int) -> int | None:
        """Where in `text` the first of them begins that ends behind `begin`; None without one."""
        found = self._automaton.find_matches_as_indexes(text, overlapping=True)
        return min((start for _, start, end in found if end > begin), default=None)

    def held_back(self, text: str) -> int:
        """Characters at the end of `text` that could still become a stop string."""
        return next((size for size in range(len(text), 0, -1) if self._begins(text[-size:])), 0)

    def _begins(self, part: str) -> bool:
        place = bisect_left(self._sorted, part)  # what begins with a part comes right behind it
        return place < len(self._sorted) and self._sorted[place].startswith(part)


class Detokenizer:
    """Tokens in, text out. `stops`: strings that end the text, which they do not belong to, after `min_tokens` tokens.
    `skip_special_tokens`: leave out special tokens; else those alone that end a text."""

    def __init__(
        self, tokenizer: Tokenizer, stops: tuple[str, ...] = (), min_tokens: int = 0, *, skip_special_tokens: bool = True
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens, generated=True)
        self._min_tokens = min_tokens
        self._stops = StopStrings(stops) if stops else None
        self.text = ""
        self.decoded = 0
        """Tokens that it knows."""
        self.stopped = False
        self._held = ""
        """End of the text that may be the beginning of a stop string."""

    def push(self, token_ids: list[int]) -> bool:
        """Append tokens, one at a time where a stop string may cut; True when one did, and nothing after it counts."""
        if self._stops is None:
            self.decoded += len(token_ids)
            self.text += self._decoder.push(token_ids)
            return False
        for token in token_ids if not self.stopped else ():
            self.decoded += 1
            self._append(self._decoder.push((token,)), self._stops)
            if self.stopped:
                break
        return self.stopped

    def end(self) -> None:
        """No more tokens: what was held back is text, too."""
        if self.stopped:
            return
        rest = self._decoder.flush()
        if self._stops is None:
            self.text += rest
            return
        self._append(rest, self._stops)
        if not self.stopped:
            self.text, self._held = self.text + self._held, ""

    def _append(self, piece: str, stops: StopStrings) -> None:
        text = self._held + piece
        # A match must end in the piece: what is held may contain one that came before the tokens that have to be generated.
        first = stops.first(text, len(self._held)) if self.decoded > self._min_tokens else None
        if first is not None:
            self.text, self._held, self.stopped = self.text + text[:first], "", True
            return
        keep = stops.held_back(text)
        self.text, self._held = self.text + text[: len(text) - keep], text[len(text) - keep :]
