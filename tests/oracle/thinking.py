"""Limits of thinking and reply on one row of logits, in a few naive lines: a second opinion on what may come next in a text.

The tests of `tests/step` call it on logits of the oracle model. It reads the whole text anew for every token and shares no
code with what it tests: the rules are those of `SamplingParams` and `EngineConfig`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft import SamplingParams


def allowed(
    prompt: Sequence[int],
    out: Sequence[int],
    params: SamplingParams,
    *,
    start: Sequence[int],
    end: Sequence[int],
    spelt: Sequence[int],
    stop: int,
) -> set[int] | None:
    """The tokens that may come behind `out`, None for all. `spelt`: what comes at the limit; `stop`: what ends a text."""
    thinks, place, limit = not start, 0, params.thinking_limit
    for i in range(len(prompt)):
        thinks |= tuple(prompt[i : i + len(start)]) == tuple(start)
        thinks &= tuple(prompt[i : i + len(end)]) != tuple(end)
    while thinks:
        if place == limit:
            if len(out) < limit + len(spelt):
                return {spelt[len(out) - limit]}
            thinks, place = False, limit + len(spelt)
        elif place == len(out):
            return None
        else:
            place += 1
            thinks = tuple(out[max(place - len(end), 0) : place]) != tuple(end)
    if params.reply_budget is not None and len(out) - place >= params.reply_budget:
        return {stop}
    return set(params.reply_start_token_ids) if len(out) == place and params.reply_start_token_ids else None


def limited(logits: NDArray[Any], may: set[int] | None) -> NDArray[Any]:
    """Logits [V] with all others at -inf; what is left alone may come, whatever its logit was."""
    if may is None:
        return logits
    z = np.full(len(logits), -np.inf)
    for token in may:
        z[token] = 0.0 if len(may) == 1 and logits[token] == -np.inf else logits[token]
    return z
