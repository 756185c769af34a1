"""Processing of one row of logits in a few naive lines: penalties, biases, bad words and early stops; and stop strings.

It is a second opinion on what a request's logits become before a token is chosen, and on where a text ends. The tests of
`tests/step` call it, on float64 logits of the oracle model and on texts of the tiny models. It shares no code with what it tests:
the rules are those of `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft import SamplingParams


def processed(logits: NDArray[Any], prompt: Sequence[int], out: Sequence[int], params: SamplingParams) -> NDArray[Any]:
    """Logits [V] of the token behind `prompt` and `out`. Texts among the bad words are those of the tiny tokenizers: "w7"."""
    z, generated = np.array(logits, np.float64), list(out)
    for v in {*prompt, *generated}:
        z[v] = z[v] / params.repetition_penalty if z[v] > 0 else z[v] * params.repetition_penalty
    for v in set(generated):
        z[v] -= params.presence_penalty + params.frequency_penalty * generated.count(v)
    for v, bias in params.biases:
        z[v] += bias
    for given in params.bad_words:
        word = [int(part[1:]) for part in given.split()] if isinstance(given, str) else list(given)
        before = word[:-1]
        if generated[len(generated) - len(before) :] == before:
            z[word[-1]] = -np.inf
    if len(generated) < params.min_tokens:
        z[[*params.stop_token_ids, *([] if params.ignore_eos else [0])]] = -np.inf  # 0 ends the text of every tiny model
    return z


def text_of(out: Sequence[int]) -> str:
    """What the tiny tokenizers make of tokens: a word each, nothing of the end of text."""
    return " ".join(f"w{token}" for token in out if token)


def ended_by_text(out: Sequence[int], params: SamplingParams) -> tuple[int, str] | None:
    """How many tokens of `out` there are once a stop string has ended it, and the text before that; None where none does.

    A stop string counts with the token that completes it, if that is not one of the first `min_tokens`."""
    for count in range(params.min_tokens + 1, len(out) + 1):
        before, text = len(text_of(out[: count - 1])), text_of(out[:count])
        begins = [i for stop in params.stop for i in range(len(text)) if text.startswith(stop, i) and i + len(stop) > before]
        if begins:
            return count, text[: min(begins)]
    return None
