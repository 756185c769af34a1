"""The reference backend's limits of thinking and reply.

The kernel table lists them. Both look for the end of thinking in the few tokens that the state does not know of yet, whatever the
length of the text.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polydraft.device import Array
from polydraft.reference.provider import Kernel, plain
from polydraft.sentinels import NO_LIMIT, THINKING


def _begins(tokens: Array, first: int, last: int, limit: int, end: Array, num_forced: int) -> int:
    """Where the reply begins, at the places from `first` to `last` of a text whose last tokens up to there are `tokens`; -1 where
    it does not."""
    before = last - len(tokens)
    """Generated tokens that `tokens` leaves out."""
    most = last if limit == NO_LIMIT else min(last, limit)
    for place in range(max(first, len(end)), most + 1):
        if np.array_equal(tokens[place - len(end) - before : place - before], end):
            return place
    behind = limit + num_forced
    return behind if limit != NO_LIMIT and first <= behind <= last else THINKING


def limit_thinking(a: Any, n: int) -> None:
    """Row by row, for the slots that have limits."""
    slots, end, forced = a.row_slot[:n], a.think_end, a.think_forced
    asked = (a.think_limit != NO_LIMIT) | (a.reply_limit != NO_LIMIT) | (a.num_reply_starts > 0)
    for row in ((slots >= 0) & asked[np.maximum(slots, 0)]).nonzero()[0]:
        slot = slots[row]
        prompt_len, known = int(a.prompt_len[slot]), int(a.num_generated[slot])
        place = int(a.positions[row]) + a.ahead - prompt_len
        limit, reply = int(a.think_limit[slot]), int(a.reply_from[slot])
        if reply == THINKING and place > known:
            back = min(known, len(end) - 1)
            tail = np.concatenate(
                (a.tokens[slot, prompt_len + known - back : prompt_len + known], a.drafts[slot, : place - known])
            )
            reply = _begins(tail, known + 1, place, limit, end, len(forced))
        logits, most = a.logits[row], int(a.reply_limit[slot])
        if reply == THINKING:
            if limit != NO_LIMIT and place >= limit:
                _force(logits, forced[place - limit])
        elif most != NO_LIMIT and place >= reply + most:
            _force(logits, a.stop_tokens[slot, 0])
        elif place == reply and a.num_reply_starts[slot]:
            starts = a.reply_starts[slot, : a.num_reply_starts[slot]]
            kept = logits[starts]
            logits[:] = -np.inf
            logits[starts] = kept


def _force(logits: Array, token: int) -> None:
    own = logits[token]
    logits[:] = -np.inf
    logits[token] = 0 if own == -np.inf else own


def commit_thinking(a: Any, n: int) -> None:
    """Sequence by sequence, where some think."""
    slots = a.slot_order[:n]
    new = (slots >= 0) & (a.out_len[:n] > 0)
    for i in (new & (a.reply_from[np.maximum(slots, 0)] == THINKING)).nonzero()[0]:
        slot, count = slots[i], int(a.out_len[i])
        begin, known = int(a.prompt_len[slot]), int(a.num_generated[slot]) - count
        back = min(known, len(a.think_end) - 1)
        tail = np.concatenate((a.tokens[slot, begin + known - back : begin + known], a.out_tokens[i, :count]))
        limit = int(a.think_limit[slot])
        a.reply_from[slot] = _begins(tail, known + 1, known + count, limit, a.think_end, a.num_forced)


KERNELS: dict[str, Kernel] = {"limit_thinking": plain(limit_thinking), "commit_thinking": plain(commit_thinking)}
"""Contract to kernel."""
