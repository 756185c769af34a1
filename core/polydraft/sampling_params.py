"""Owns what a caller may ask of one request: length, sampling, stops and seed, validated when it is made.

`LLM.generate`, the command line and the server build it; the engine reads it once at admission. It never changes.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polydraft.errors import RequestError

MAX_STOP_TOKENS = 16
"""Stop token ids of one request, those of the model included."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request is generated. A bad value raises `RequestError` naming it."""

    max_new_tokens: int = 128
    """Most tokens to generate."""
    temperature: float = 0.0
    """0 is greedy; above it, logits are divided by it."""
    top_p: float = 1.0
    """Keep the most likely tokens up to this probability mass."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely one."""
    seed: int | None = None
    """Key of the request's randomness, 64 bits; by default the engine's seed plus the request's number."""
    stop: tuple[str, ...] = ()
    """Texts that end the request; the stop text itself is not part of the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the request, besides the model's own."""
    ignore_eos: bool = False
    """Do not end at the model's own end-of-text tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, ok, wanted in self._rules():
            if not ok:
                raise RequestError(f"{name} is {getattr(self, name)!r}, wanted {wanted}; correct the request")

    def _rules(self) -> Sequence[tuple[str, bool, str]]:
        def number(value: Any) -> bool:
            return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

        def whole(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        return (
            ("max_new_tokens", whole(self.max_new_tokens) and self.max_new_tokens >= 1, "a whole number of at least 1"),
            ("temperature", number(self.temperature) and self.temperature >= 0, "a number of at least 0"),
            ("top_p", number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            ("top_k", whole(self.top_k) and self.top_k >= 0, "a whole number of at least 0 (0: all tokens)"),
            ("min_p", number(self.min_p) and 0 <= self.min_p <= 1, "a number from 0 to 1"),
            ("seed", self.seed is None or (whole(self.seed) and 0 <= self.seed < 2**64), "a whole number of 64 bits"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "texts that are not empty"),
            ("stop_token_ids", all(whole(t) and t >= 0 for t in self.stop_token_ids), "token ids of at least 0"),
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping; an unknown key is an error that names the nearest known one."""
        known = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise RequestError(f"unknown sampling parameter {key!r}; {hint}known: {', '.join(known)}")
        return cls(**values)
