"""Logits processing in portable Paddle operations: penalties, biases, forbidden tokens, masks, limits of thinking.

`table.py` lists the kernels. No counts are kept between steps: what a row's text contains is read from history and drafts each
time, as a histogram of fixed size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from polydraft.contracts.base import Limits
from polydraft.sentinels import NO_ROW, NO_TOKEN
from polydraft_paddle.kernels.sampling import FORBIDDEN
from polydraft_paddle.ops import (
    Tensor,
    at,
    choose,
    constant,
    file_by_slot,
    first_where,
    numbers,
    owners,
    part,
    pick,
    put,
    take,
    within,
)
from polydraft_paddle.provider import Kernel, Run, plain


def _marks(ids: Tensor, counted: Tensor, vocab: int) -> Tensor:
    """How often each token occurs among the counted entries of `ids` [rows, m]; float32 [rows, vocab]."""
    zeros = paddle.zeros([ids.shape[0], vocab], "float32").to(ids.place)
    index = paddle.clip(ids, 0, vocab - 1).astype("int64")
    return paddle.put_along_axis(zeros, index, counted.astype("float32"), 1, reduce="add")


def _rows_where(logits: Tensor, condition: Tensor, value: Tensor) -> None:
    logits.copy_(paddle.where(condition.unsqueeze(1).expand_as(value), value, logits), False)


def penalise_logits(a: Any, n: int) -> None:
    """Count a row's prompt, its generated tokens and the drafts before it."""
    slots, logits = a.row_slot[:n], a.logits[:n]
    vocab = logits.shape[1]
    prompt_len, generated_len = at(a.prompt_len, slots).unsqueeze(1), at(a.num_generated, slots).unsqueeze(1)
    known = prompt_len + generated_len
    text, drafts = at(a.tokens, slots), at(a.drafts, slots)
    places = numbers(text.shape[1], slots).unsqueeze(0)
    behind = (a.positions[:n] + a.ahead).unsqueeze(1) - known
    counts = _marks(text, (places >= prompt_len) & (places < known), vocab)
    counts = counts + _marks(drafts, numbers(drafts.shape[1], slots).unsqueeze(0) < behind, vocab)
    seen = (counts > 0) | (_marks(text, places < prompt_len, vocab) > 0)
    factor = at(a.repetition_penalty, slots).unsqueeze(1)
    presence, frequency = at(a.presence_penalty, slots).unsqueeze(1), at(a.frequency_penalty, slots).unsqueeze(1)
    value = paddle.where(seen, paddle.where(logits > 0, logits / factor, logits * factor), logits)
    value = paddle.where(counts > 0, value - (presence + counts * frequency), value)
    asked = (factor != 1) | (presence != 0) | (frequency != 0)
    _rows_where(logits, (slots >= 0) & asked.squeeze(1), value)


def bias_logits(a: Any, n: int) -> None:
    """Add a slot's table to its rows."""
    slots, logits = a.row_slot[:n], a.logits[:n]
    ids, biases, count = at(a.bias_ids, slots), at(a.biases, slots), at(a.num_biases, slots)
    valid = numbers(ids.shape[1], slots).unsqueeze(0) < count.unsqueeze(1)
    index = paddle.clip(ids, 0, logits.shape[1] - 1).astype("int64")
    zeros = paddle.zeros_like(logits)
    added = paddle.put_along_axis(zeros, index, choose(valid, biases, 0.0), 1, reduce="add")
    _rows_where(logits, (slots >= 0) & (count > 0), logits + added)


def forbid_tokens(a: Any, n: int) -> None:
    """Early stop tokens, and the last token of every bad word whose beginning ends the row's text."""
    slots, logits = a.row_slot[:n], a.logits[:n]
    vocab = logits.shape[1]
    prompt_len = at(a.prompt_len, slots)
    size = a.positions[:n] + a.ahead - prompt_len
    stops = at(a.stop_tokens, slots)
    early = (size < at(a.min_tokens, slots)).unsqueeze(1) & (stops != NO_TOKEN)
    words = at(a.bad_words, slots)
    ends = _completed(a, slots, size, words, at(a.bad_len, slots))
    marks = _marks(stops, early, vocab) + _marks(words, ends, vocab)
    live = (slots >= 0).unsqueeze(1)
    logits.copy_(choose(~((marks > 0) & live), logits, FORBIDDEN), False)


def _completed(a: Any, slots: Tensor, size: Tensor, words: Tensor, length: Tensor) -> Tensor:
    """Which places of each row's bad words [rows, X] are the last token of a word whose other tokens end the text."""
    count, width = words.shape
    places = numbers(width, slots).unsqueeze(0).expand([count, width])
    inside = places < length.unsqueeze(1)
    closes = inside & (words == NO_TOKEN)
    last = paddle.concat([closes[:, 1:], paddle.zeros_like(closes[:, :1])], axis=1) & ~closes
    # Place of the last token of the word that each place belongs to: the nearest such place from there on.
    end = width - _greatest_from(choose(last, width - places, 0))
    back = end - places
    index = size.unsqueeze(1) - back  # where in the generated text the token at this place would have to stand
    known = at(a.num_generated, slots).unsqueeze(1)
    prompt_len = at(a.prompt_len, slots).unsqueeze(1)
    rows = paddle.clip(slots, min=0).unsqueeze(1).expand([count, width])
    text = paddle.where(index < known, pick(a.tokens, rows, prompt_len + index), pick(a.drafts, rows, index - known))
    differs = inside & ~closes & ~last & ((index < 0) | (text != words))
    total = paddle.cumsum(differs.astype("int32"), axis=1)
    # Differences before this word: the running total at the NO_TOKEN that closed the word before it.
    before = _greatest_until(choose(closes, total, 0))
    return last & (total == before)


def _greatest_until(x: Tensor) -> Tensor:
    """Greatest element of each row of `x` [n, w], none of which is negative, up to and with each place, in as many steps as w has
    binary digits: few places have an operation for it."""
    width, reach = x.shape[1], 1
    while reach < width:
        x = paddle.maximum(x, paddle.concat([paddle.zeros_like(x[:, :reach]), x[:, :-reach]], axis=1))
        reach *= 2
    return x


def _greatest_from(x: Tensor) -> Tensor:
    """The same from each place on."""
    width, reach = x.shape[1], 1
    while reach < width:
        x = paddle.maximum(x, paddle.concat([x[:, reach:], paddle.zeros_like(x[:, :reach])], axis=1))
        reach *= 2
    return x


def mask_logits(a: Any, limits: Limits) -> Run:
    """Each logit row looks for the window place that it is, and takes that place's mask apart: a table says which bits a byte
    has, since few places shift."""
    del limits
    rows, vocab = a.logits.shape
    width, words = a.masks.shape[1:]
    place = a.logits.place
    bits = paddle.to_tensor((np.arange(256)[:, None] >> np.arange(8) & 1).astype(np.bool_), place=place)

    def run(n: int) -> None:
        if not n:
            return
        slots, start = a.slot_order[:n], a.logit_start[:n]
        places = numbers(width, slots).unsqueeze(0)
        masked = choose(slots >= 0, paddle.minimum(a.masked[:n], a.logit_len[:n]), 0)
        named = choose(places < masked.unsqueeze(1), start.unsqueeze(1) + places, NO_ROW).reshape([-1])
        bound, which = owners(named, rows)
        mask = paddle.gather(a.masks[:n].reshape([n * width, words]), which)
        allowed = take(bits, mask.view("uint8").astype("int32").reshape([-1])).reshape([rows, -1])[:, :vocab]
        a.logits.copy_(choose(allowed | ~bound.unsqueeze(1), a.logits, FORBIDDEN), False)

    return run


def _reply_begins(a: Any, slots: Tensor, drafts: Tensor, row: Tensor, known: Tensor, last: Tensor, num_forced: int) -> Tensor:
    """Where the reply of each slot begins behind more than `known` and at most `last` generated tokens, -1 where it does not;
    int32 [rows]. The tokens behind the `known` ones are those of `drafts` at `row`."""
    limit, prompt_len, ends, width = at(a.think_limit, slots), at(a.prompt_len, slots), a.think_end.shape[0], drafts.shape[1]
    if not width:
        return constant(-1, limit)
    first = known + 1
    shape = [slots.shape[0], width]
    places = first.unsqueeze(1) + numbers(width, slots).unsqueeze(0)
    free = (limit < 0).unsqueeze(1) | (places <= limit.unsqueeze(1))
    same = free & (places >= ends) & (places <= last.unsqueeze(1))
    rows, row = paddle.clip(slots, min=0).unsqueeze(1).expand(shape), row.unsqueeze(1).expand(shape)
    before, prompt = known.unsqueeze(1), prompt_len.unsqueeze(1)
    for e in range(ends):
        index = places - (ends - e)
        token = paddle.where(index < before, pick(a.tokens, rows, prompt + index), pick(drafts, row, index - before))
        same = same & (token == part(a.think_end, e, e + 1))
    place = first_where(same)
    behind = limit + num_forced
    spelt = (limit >= 0) & (behind >= first) & (behind <= last)
    return choose(place < width, first + place, choose(spelt, behind, -1))


def limit_thinking(a: Any, n: int) -> None:
    """Find out where each row stands, then which tokens it keeps."""
    slots, logits = a.row_slot[:n], a.logits[:n]
    vocab, num_forced = logits.shape[1], a.think_forced.shape[0]
    prompt_len, known = at(a.prompt_len, slots), at(a.num_generated, slots)
    place = a.positions[:n] + a.ahead - prompt_len
    told, limit, most = at(a.reply_from, slots), at(a.think_limit, slots), at(a.reply_limit, slots)
    reply = choose(told < 0, _reply_begins(a, slots, a.drafts, paddle.clip(slots, min=0), known, place, num_forced), told)
    live, thinks, count = slots >= 0, reply < 0, at(a.num_reply_starts, slots)
    spelt = live & thinks & (limit >= 0) & (place >= limit)
    over = live & ~thinks & (most >= 0) & (place >= reply + most)
    begins = (live & ~thinks & ~over & (place == reply) & (count > 0)).unsqueeze(1)
    token = choose(over, at(a.stop_tokens, slots)[:, 0], take(a.think_forced, within(place - limit, num_forced)))
    forced = (spelt | over).unsqueeze(1)
    mine = forced & (numbers(vocab, slots).unsqueeze(0) == token.unsqueeze(1))
    starts = at(a.reply_starts, slots)
    allowed = _marks(starts, numbers(starts.shape[1], slots).unsqueeze(0) < count.unsqueeze(1), vocab) > 0
    kept = mine | ~(forced | (begins & ~allowed))
    raised = choose(mine & (logits == FORBIDDEN), constant(0.0, logits), logits)
    logits.copy_(choose(kept, raised, FORBIDDEN), False)


def commit_thinking(a: Any, n: int) -> None:
    """Look behind each token that a sequence has committed."""
    slots, new = a.slot_order[:n], a.out_len[:n]
    known = at(a.num_generated, slots) - new
    told = at(a.reply_from, slots)
    begins = _reply_begins(a, slots, a.out_tokens, numbers(n, slots), known, known + new, int(a.num_forced))
    file_by_slot(slots, (slots >= 0) & (new > 0) & (told < 0), (a.reply_from, begins, None))


def spread_logits(a: Any, n: int) -> None:
    """Every token's column, and -inf where it has none."""
    if not n:
        return
    spread = paddle.index_select(a.x[:n], paddle.clip(a.places, 0, a.x.shape[1] - 1), axis=1)
    put(a.out[:n], choose((a.places >= 0).unsqueeze(0).expand_as(spread), spread, FORBIDDEN))


KERNELS: dict[str, Kernel] = {
    "mask_logits": mask_logits,
    **{
        f.__name__: plain(f)
        for f in (penalise_logits, bias_logits, forbid_tokens, limit_thinking, commit_thinking, spread_logits)
    },
}
"""Contract name to kernel."""
