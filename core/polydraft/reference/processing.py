"""The reference backend's processing of logits: penalties, biases and forbidden tokens, as a request specifies them.

The kernel table lists them; target rows and draft rows use the same code. No counts are kept between steps: what a row's text
contains is read from the slot's history and drafts each time, and slots that request nothing are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polydraft.device import Array
from polydraft.reference.provider import Kernel, plain
from polydraft.sentinels import NO_TOKEN


def penalise_logits(a: Any, n: int) -> None:
    """Count once a slot, then add the drafts that lie before each of its rows."""
    vocab = a.logits.shape[1]
    asked = (a.repetition_penalty != 1) | (a.presence_penalty != 0) | (a.frequency_penalty != 0)
    for slot, rows in _rows_by_slot(a, n, asked):
        prompt_len, known = a.prompt_len[slot], a.prompt_len[slot] + a.num_generated[slot]
        counts = np.empty((len(rows), vocab), np.float32)
        counts[:] = np.bincount(a.tokens[slot, prompt_len:known], minlength=vocab)
        behind = a.positions[rows] + a.ahead - known
        for j in range(int(behind.max())):
            counts[behind > j, a.drafts[slot, j]] += 1
        generated = counts > 0
        seen = generated.copy()
        seen[:, a.tokens[slot, :prompt_len]] = True
        x, factor = a.logits[rows], a.repetition_penalty[slot]
        x = np.where(seen, np.where(x > 0, x / factor, x * factor), x)
        counts *= a.frequency_penalty[slot]
        counts += generated * a.presence_penalty[slot]
        a.logits[rows] = x - counts


def bias_logits(a: Any, n: int) -> None:
    """Scatter-add a slot's table into its rows."""
    for slot, rows in _rows_by_slot(a, n, a.num_biases > 0):
        size = a.num_biases[slot]
        a.logits[rows[:, None], a.bias_ids[slot, :size]] += a.biases[slot, :size]


def forbid_tokens(a: Any, n: int) -> None:
    """Row by row: the end of the text decides."""
    for slot, rows in _rows_by_slot(a, n, (a.min_tokens > 0) | (a.bad_len > 0)):
        prompt_len, known = a.prompt_len[slot], a.prompt_len[slot] + a.num_generated[slot]
        words = list(_words(a.bad_words[slot, : a.bad_len[slot]]))
        stops = a.stop_tokens[slot]
        text = [*a.tokens[slot, prompt_len:known].tolist(), *a.drafts[slot].tolist()]
        for row in rows:
            size = int(a.positions[row] + a.ahead - prompt_len)
            if size < a.min_tokens[slot]:
                a.logits[row, stops[stops >= 0]] = -np.inf
            for word in words:
                first = size - len(word) + 1
                if first >= 0 and text[first:size] == word[:-1]:
                    a.logits[row, word[-1]] = -np.inf


def _rows_by_slot(a: Any, n: int, asked: Array) -> Iterator[tuple[int, Array]]:
    """The slots that ask for something, each with its rows."""
    slots = a.row_slot[:n]
    rows = ((slots >= 0) & asked[np.maximum(slots, 0)]).nonzero()[0]
    for slot in np.unique(slots[rows]).tolist():
        yield slot, rows[slots[rows] == slot]


def _words(places: Array) -> Iterator[list[int]]:
    ends = (places == NO_TOKEN).nonzero()[0].tolist()
    for first, end in zip([0, *(end + 1 for end in ends)], ends, strict=False):
        yield places[first:end].tolist()


KERNELS: dict[str, Kernel] = {
    "penalise_logits": plain(penalise_logits),
    "bias_logits": plain(bias_logits),
    "forbid_tokens": plain(forbid_tokens),
}
"""Contract name to kernel."""
