"""The parameters of one request: length, sampling, stops and seed, validated when the record is made.

`LLM.generate`, the command line and the server build it; the engine reads it once at admission. It does not change.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from polydraft.errors import RequestError

MAX_SEED = 2**64 - 1
"""Seeds have 64 bits."""
MOST_WHOLE = 2**31 - 1
"""Of whole numbers that have no limit of their own: what counts on devices holds."""
MAX_STOP_TOKENS = 16
"""Stop token ids of one request, besides those of the model, of which there may be any number."""
MAX_STOPS = 1000
"""Stop strings of one request."""
MAX_STOP_CHARACTERS = 16384
"""Characters of all of them: the automaton that looks for them is built in a step, in 2 ms at this size."""
MAX_BIASES = 300
"""Token ids with a logit bias in one request (the limit of OpenAI's interface)."""
MAX_BAD_WORDS = 512
"""Places for the bad words of one request: each takes one for each of its tokens and one more."""
MAX_BAD_CHARACTERS = 16384
"""Characters of all of those that are texts: they become tokens in a step, in 10 ms at this size."""
MAX_REPLY_STARTS = 32
"""Token ids that the reply of one request may begin with."""
MAX_SHOWN = 200
"""Characters of a bad value in an error."""


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
    """Texts that end the request; the stop text itself is not part of the output. At most 1000, of 16384 characters together."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the request, besides the model's own."""
    ignore_eos: bool = False
    """Do not end at the model's own end-of-text tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text; without it, those alone that end a text are left out."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies other logits of tokens that occur in prompt or output; 1 is off."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that occur in the output."""
    frequency_penalty: float = 0.0
    """Taken off the logits of tokens for each time they occur in the output."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    """Added to the logits of the named token ids, after the penalties; kept as sorted pairs."""
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    """Texts, or runs of token ids, that the output may not contain. A text stands for its tokens, alone and after a space;
    the last token of a run is forbidden where the output ends with the others."""
    min_tokens: int = 0
    """No stop, neither token nor text, takes effect before this many tokens are generated."""
    logprobs: int | None = None
    """Report the log probability of each token and of this many most likely ones beside it; None: report nothing."""
    prompt_logprobs: int | None = None
    """Likewise of the tokens of the prompt, each given those before it."""
    max_drafts: int | None = None
    """Drafts that a round of this request verifies at most: 0 is plain decoding; None: as many as the engine makes. The text does
    not depend on it, unless the engine verifies by rejection."""
    constraint: Mapping[str, Any] | tuple[str, str] | None = None
    """What the output must be: {"json_schema": SCHEMA}, {"json_object": true}, {"regex": TEXT}, {"lark": GRAMMAR}, {"ebnf":
    GRAMMAR} as llama.cpp and xgrammar write it, from its rule `root` on, or {"grammar": GRAMMAR} in either notation; kept as its
    kind and a text. The engine must have been built for constraints."""
    thinking_limit: int | None = None
    """Tokens of thinking at most; then the end of thinking is spelt out, whatever else forbids it. This and the next two are for
    engines that know what ends thinking."""
    reply_budget: int | None = None
    """Tokens after the end of thinking at most; then the text ends, with the first of its stop tokens."""
    reply_start_token_ids: tuple[int, ...] = ()
    """Token ids that the reply may begin with, right behind the end of thinking; () is any. At most 32."""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Parameters that plugins bring, by name; each is checked by the engine, which knows its plugins."""

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        for name, wanted in _LISTS.items():
            if not isinstance(getattr(self, name), (list, tuple)):
                raise RequestError(f"{name} is {_shown(getattr(self, name))}, wanted {wanted}; correct the request", name)
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_sizes()
        lists: tuple[Any, ...] = self.bad_words
        object.__setattr__(self, "bad_words", tuple(tuple(word) if isinstance(word, list) else word for word in lists))
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        object.__setattr__(self, "constraint", _constraint(self.constraint))
        for name, ok, wanted in self._rules():
            if not ok:
                raise RequestError(f"{name} is {_shown(getattr(self, name))}, wanted {wanted}; correct the request", name)

    def _check_sizes(self) -> None:
        """Refuse what is too long before any of it is looked at."""
        stop_length, bad_length = _characters(self.stop), _characters(self.bad_words)
        for name, what, count, most in (
            ("stop", f"stop has {len(self.stop)} texts", len(self.stop), MAX_STOPS),
            ("stop", f"stop has {stop_length} characters", stop_length, MAX_STOP_CHARACTERS),
            ("logit_bias", f"logit_bias has {_size(self.logit_bias)} token ids", _size(self.logit_bias), MAX_BIASES),
            (
                "reply_start_token_ids",
                f"reply_start_token_ids has {len(self.reply_start_token_ids)} token ids",
                len(self.reply_start_token_ids),
                MAX_REPLY_STARTS,
            ),
            ("stop_token_ids", f"{len(self.stop_token_ids)} stop token ids", len(self.stop_token_ids), MAX_STOP_TOKENS),
            ("bad_words", f"bad_words has {len(self.bad_words)} entries", len(self.bad_words), MAX_BAD_WORDS),
            ("bad_words", f"bad_words have {bad_length} characters", bad_length, MAX_BAD_CHARACTERS),
        ):
            if count > most:
                raise RequestError(f"{what}, wanted at most {most}; name fewer", name)

    def _rules(self) -> Sequence[tuple[str, bool, str]]:
        def number(value: Any) -> bool:
            return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf

        def whole(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        def count(value: Any) -> bool:
            return whole(value) and 0 <= value <= MOST_WHOLE

        def text(value: Any) -> bool:
            return isinstance(value, str) and bool(value)

        def word(value: Any) -> bool:
            ids = isinstance(value, tuple) and all(whole(token) and token >= 0 for token in value)
            return bool(value) and (isinstance(value, str) or ids)

        return (
            ("max_new_tokens", whole(self.max_new_tokens) and self.max_new_tokens >= 1, "a whole number of at least 1"),
            (
                "temperature",
                number(self.temperature) and (self.temperature == 0 or 1e-9 <= self.temperature <= 1e9),
                "0 or a number from 1e-9 to 1e9",  # beyond them a logit divided by it leaves the range of float32
            ),
            ("top_p", number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            ("top_k", count(self.top_k), "a whole number from 0 (all tokens) to 2**31 - 1"),
            ("min_p", number(self.min_p) and 0 <= self.min_p <= 1, "a number from 0 to 1"),
            ("seed", self.seed is None or (whole(self.seed) and 0 <= self.seed <= MAX_SEED), "a whole number of 64 bits"),
            ("stop", all(map(text, self.stop)), "texts that are not empty"),
            ("extra", _is_mapping(self.extra), "a mapping of names to values"),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "true or false"),
            ("skip_special_tokens", isinstance(self.skip_special_tokens, bool), "true or false"),
            ("stop_token_ids", all(whole(t) and t >= 0 for t in self.stop_token_ids), "token ids of at least 0"),
            ("reply_start_token_ids", all(whole(t) and t >= 0 for t in self.reply_start_token_ids), "token ids of at least 0"),
            (
                "repetition_penalty",
                number(self.repetition_penalty) and 1e-3 <= self.repetition_penalty <= 1e3,
                "a number from 0.001 to 1000 (1: off)",
            ),
            ("presence_penalty", number(self.presence_penalty) and -2 <= self.presence_penalty <= 2, "a number from -2 to 2"),
            ("frequency_penalty", number(self.frequency_penalty) and -2 <= self.frequency_penalty <= 2, "a number from -2 to 2"),
            (
                "logit_bias",
                all(whole(t) and t >= 0 and number(b) and -100 <= b <= 100 for t, b in self.biases),
                "token ids of at least 0, each with a number from -100 to 100",
            ),
            ("bad_words", all(map(word, self.bad_words)), "texts that are not empty, or lists of token ids of at least 0"),
            (
                "min_tokens",
                count(self.min_tokens) and whole(self.max_new_tokens) and self.min_tokens <= self.max_new_tokens,
                f"a whole number from 0 to max_new_tokens, here {self.max_new_tokens}, and at most 2**31 - 1",
            ),
            *(
                (name, given is None or count(given), "a whole number from 0 to 2**31 - 1, or nothing")
                for name, given in (
                    ("logprobs", self.logprobs),
                    ("prompt_logprobs", self.prompt_logprobs),
                    ("max_drafts", self.max_drafts),
                    ("thinking_limit", self.thinking_limit),
                    ("reply_budget", self.reply_budget),
                )
            ),
        )

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The logit bias as pairs of token id and bias, ascending."""
        return tuple(self.logit_bias.items()) if isinstance(self.logit_bias, Mapping) else self.logit_bias

    @property
    def reported(self) -> bool:
        """Whether log probabilities were asked for, of the text or of the prompt."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def constrained(self) -> bool:
        """Whether a grammar binds the output."""
        return self.constraint is not None

    @property
    def limits_thinking(self) -> bool:
        """Whether thinking or the reply behind it is limited."""
        return self.thinking_limit is not None or self.reply_budget is not None or bool(self.reply_start_token_ids)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping; an unknown key is an error that names the nearest known one."""
        if not isinstance(values, Mapping):
            raise RequestError(f"sampling parameters are {values!r}, wanted a mapping of names and values; correct the call")
        known = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise RequestError(f"unknown sampling parameter {key!r}; {hint}known: {', '.join(known)}", key)
        return cls(**values)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) and name for name in value)


CONSTRAINTS = ("json_schema", "json_object", "regex", "lark", "ebnf", "grammar")
"""Kinds of constraints."""


def _constraint(given: Any) -> tuple[str, str] | None:
    """A constraint as its kind and a text."""
    if given is None:
        return None
    pairs = list(given.items()) if isinstance(given, Mapping) else [given]
    if len(pairs) != 1 or not isinstance(pairs[0], (tuple, list)) or len(pairs[0]) != 2 or pairs[0][0] not in CONSTRAINTS:
        raise RequestError(
            f"constraint is {_shown(given)}, wanted an object with one of {', '.join(CONSTRAINTS)}; correct the request",
            "constraint",
        )
    kind, value = pairs[0]
    if isinstance(value, str):
        return kind, value
    if (kind == "json_schema" and isinstance(value, Mapping)) or (kind == "json_object" and value is True):
        return kind, json.dumps(value if kind == "json_schema" else {"type": "object"})  # properties are written in this order
    raise RequestError(
        f"the {kind} of constraint is {_shown(value)}, wanted a text, or a schema; correct the request", "constraint"
    )


_LISTS = {
    "stop": "a text or a list of texts",
    "stop_token_ids": "a list of token ids",
    "reply_start_token_ids": "a list of token ids",
    "bad_words": "a text, or a list of texts and lists of token ids",
}


def _characters(given: Iterable[object]) -> int:
    """Of the texts in a list, whose entries may be of any types before they are checked."""
    return sum(len(one) for one in given if isinstance(one, str))


def _size(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 0


def _shown(value: Any) -> str:
    """A value as an error names it: not more of it than anybody reads."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    """A logit bias as sorted pairs; keys may be the texts that JSON makes of numbers."""
    pairs = bias.items() if isinstance(bias, Mapping) else bias
    try:
        merged = {_token_id(key): value for key, value in pairs}
        return tuple(sorted(merged.items()))
    except (TypeError, ValueError):
        shown = _shown(bias)
        wanted = "a mapping of token ids to numbers"
        raise RequestError(f"logit_bias is {shown}, wanted {wanted}; correct the request", "logit_bias") from None


def _token_id(key: Any) -> Any:
    """The token id that is written so in JSON; raises `ValueError` for what `int` takes besides: `1_0`, ` 1`, `\u0661`."""
    if not isinstance(key, str):
        return key
    if not re.fullmatch("0|-?[1-9][0-9]{0,9}", key):
        raise ValueError(key)
    return int(key)
