"""Processing of one row of logits in a few naive lines: penalties, biases, bad words and early stops.

Owns the second opinion on what a request's logits become before a token is chosen.
Called by the tests of `tests/step`, on float64 logits of the oracle model.
Never looks at code under test: the rules are those of `SamplingParams`.
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
