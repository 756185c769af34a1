"""The text of one request as it grows out of its tokens, whole characters only, and the stop strings that may end it.

The engine keeps one for each request with stop strings, since its next step depends on them; `OutputProcessor` keeps one for
every other request, off the step's path.
"""

from __future__ import annotations

from polydraft.models.tokenizer import IncrementalDecoder, Tokenizer


class Detokenizer:
    """Tokens in, text out. `stops`: strings that end the text, which they do not belong to, after `min_tokens` tokens."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self._decoder, self._stops, self._min_tokens = IncrementalDecoder(tokenizer), stops, min_tokens
        self.text = ""
        self.decoded = 0
        """Tokens that it knows."""
        self.stopped = False
        self._held = ""
        """End of the text that may be the beginning of a stop string."""

    def push(self, token_ids: list[int]) -> bool:
        """Append tokens, one at a time where a stop string may cut; True when one did, and nothing after it counts."""
        if not self._stops:
            self.decoded += len(token_ids)
            self.text += self._decoder.push(token_ids)
            return False
        for token in token_ids if not self.stopped else ():
            self.decoded += 1
            self._append(self._decoder.push((token,)))
            if self.stopped:
                break
        return self.stopped

    def end(self) -> None:
        """No more tokens: what was held back is text, too."""
        if self.stopped:
            return
        self._append(self._decoder.flush())
        if not self.stopped:
            self.text, self._held = self.text + self._held, ""

    def _append(self, piece: str) -> None:
        text, stops = self._held + piece, self._stops
        # A match must end in the piece: what is held may contain one that came before the tokens that have to be generated.
        found = [(text.find(stop, max(len(self._held) - len(stop) + 1, 0)), stop) for stop in stops]
        hits = [hit for hit in found if hit[0] >= 0]
        if hits and self.decoded > self._min_tokens:
            self.text, self._held, self.stopped = self.text + text[: min(hits)[0]], "", True
            return
        keep = _held_back(text, stops)
        self.text, self._held = self.text + text[: len(text) - keep], text[len(text) - keep :]


def _held_back(text: str, stops: tuple[str, ...]) -> int:
    """Characters at the end of `text` that could still become a stop string."""
    longest = max((len(stop) for stop in stops), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
