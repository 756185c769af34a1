"""Owns what the processing a request asks for becomes on its way to the device: checked token ids, and rows of staged writes.

The engine calls `check` when a request arrives, the scheduler `bias_updates` and `bad_word_updates` when it is admitted. It
never looks at a logit: that is what the contracts behind these tables do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.device import Array
from polydraft.errors import RequestError
from polydraft.models.tokenizer import Tokenizer
from polydraft.runtime.request import Request
from polydraft.sampling_params import SamplingParams
from polydraft.sentinels import NO_TOKEN


def check(params: SamplingParams, tokenizer: Tokenizer, limits: Limits, lacking: Sequence[str]) -> tuple[int, ...]:
    """Return the table of bad words of a request. Raises `RequestError` where the request asks for more than a slot holds, for
    token ids that the model does not have, or for processing at all on a backend `lacking` contracts for it."""
    if params.processed and lacking:
        raise RequestError(
            f"the request has its logits processed, but this backend has no {', '.join(lacking)}; leave penalties, logit_bias, "
            "bad_words and min_tokens at their defaults, or use another backend"
        )
    _fits("logit_bias has {} token ids", len(params.biases), limits.max_biases)
    _known("logit_bias", (token for token, _ in params.biases), limits.vocab_size)
    table = tuple(token for word in _words(params, tokenizer) for token in (*word, NO_TOKEN))
    _fits("bad_words take {} places (one a token and one a word)", len(table), limits.max_bad_words)
    _known("bad_words", table, limits.vocab_size)
    return table


def _words(params: SamplingParams, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Each word once; a text as its tokens alone and as its tokens behind a space, which most vocabularies write differently."""
    words: list[tuple[int, ...]] = []
    for word in params.bad_words:
        forms = [tokenizer.encode(word), tokenizer.encode(f" {word.lstrip()}")] if isinstance(word, str) else [word]
        words += [tuple(form) for form in forms]
    return [word for word in dict.fromkeys(words) if word]


def _fits(what: str, count: int, most: int) -> None:
    if count > most:
        raise RequestError(f"{what.format(count)}, wanted at most {most}; name fewer")


def _known(name: str, ids: Iterable[int], vocab_size: int) -> None:
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise RequestError(f"{name} names token id {largest}, wanted at most {vocab_size - 1}; use this model's tokenizer")


def bias_updates(requests: Sequence[Request | None], admitted: Sequence[int]) -> Array:
    """Rows [J, 4] int32 of `update_biases` for admitted slots: slot, entry, token id, bits of the float32 bias. `requests` is
    by slot."""
    rows = [(slot, entry, token) for slot, entry, token, _ in _biases(requests, admitted)]
    bits = np.array([bias for *_, bias in _biases(requests, admitted)], np.float32).view(np.int32)
    return np.concatenate((np.array(rows, np.int32).reshape(-1, 3), bits[:, None]), axis=1)


def _biases(requests: Sequence[Request | None], admitted: Sequence[int]) -> Iterator[tuple[int, int, int, float]]:
    for slot in admitted:
        request = requests[slot]
        for entry, (token, bias) in enumerate(request.params.biases if request else ()):
            yield slot, entry, token, bias


def bad_word_updates(requests: Sequence[Request | None], admitted: Sequence[int]) -> Array:
    """Rows [Y, 3] int32 of `update_bad_words` for admitted slots: slot, place, token. `requests` is by slot."""
    tables = [(slot, request.bad_words) for slot in admitted if (request := requests[slot]) is not None]
    rows = [(slot, place, token) for slot, table in tables for place, token in enumerate(table)]
    return np.array(rows, np.int32).reshape(-1, 3)
