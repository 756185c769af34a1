"""Log probabilities in portable Paddle operations: of emitted tokens, of drafts, of prompts, and their packing into records.

`table.py` lists the kernels. The layout of a record depends on what was requested, so every word of it is computed from its own
position: no length reaches the host.
"""

from __future__ import annotations

from typing import Any

import paddle

from polydraft.contracts.base import Limits
from polydraft.contracts.layout import LOGPROB_VERSION, LogprobEntry, LogprobHeader, LogprobRow
from polydraft.sentinels import NO_ROW, NO_TOKEN, PAD_SLOT
from polydraft_paddle.kernels.sampling import FORBIDDEN, fixed, fixed_scale, log1p
from polydraft_paddle.kernels.state import sequences
from polydraft_paddle.ops import Tensor, at, choose, number, numbers, owners, pick, put, ranges_of, write_where
from polydraft_paddle.provider import Kernel, Run, plain

HEADER, ENTRY, ROW = len(LogprobHeader), len(LogprobEntry), len(LogprobRow)


def _wanting(a: Any, slots: Tensor) -> Tensor:
    return (slots >= 0) & (at(a.num_top, slots) >= 0)


def keep_logits(a: Any, n: int) -> None:
    """Copy the rows of those who want it."""
    logits = a.logits[:n]
    wanting = _wanting(a, a.row_slot[:n])
    put(a.kept[:n], choose(wanting.unsqueeze(1).expand_as(logits), logits, 0.0))


def forbid_filtered(a: Any, n: int) -> None:
    """Where the filters left nothing, in the rows of those who want it and have some."""
    slots, logits = a.row_slot[:n], a.logits[:n]
    filters = (at(a.top_k, slots) > 0) | (at(a.top_p, slots) < 1) | (at(a.min_p, slots) > 0)
    cuts = _wanting(a, slots) & (at(a.temperature, slots) != 0) & filters
    logits.copy_(choose(~(cuts.unsqueeze(1) & (a.probs[:n] == 0)), logits, FORBIDDEN), False)


def log_softmax(z: Tensor) -> Tensor:
    """Log probabilities of rows of logits; -inf stays -inf."""
    shifted = z - z.max(axis=1, keepdim=True)
    # Paddle's exp of -inf on the CPU is a denormal number, not 0.
    mass = fixed(choose(z > FORBIDDEN, paddle.exp(shifted), 0.0)).sum(axis=1, keepdim=True)
    one = fixed_scale(z.shape[1])  # the mass of the best
    return shifted - log1p((mass - number(int(one), mass)).astype("float32") * (1.0 / one))


def top_logprobs(a: Any, n: int) -> None:
    """All places of all windows; what was not emitted or not asked for is masked."""
    slots, tokens = a.slot_order[:n], a.out_tokens[:n]
    width, columns, vocab = tokens.shape[1], a.ids.shape[2], a.logits.shape[1]
    wanted = (_wanting(a, slots).unsqueeze(1) & (tokens != NO_TOKEN)).reshape([-1])
    place = (a.logit_start[:n].unsqueeze(1) + numbers(width, slots).unsqueeze(0)).reshape([-1])
    z = paddle.gather(a.logits, paddle.clip(place, 0, a.logits.shape[0] - 1))
    slot = slots.unsqueeze(1).expand([n, width]).reshape([-1])
    if a.temperature is not None:
        warm = at(a.temperature, slot)
        z = z / choose(warm > 0, warm, 1.0).unsqueeze(1)
    logprobs = log_softmax(z)
    token = tokens.reshape([-1])
    rows = numbers(n * width, slots)
    own = pick(z, rows, token).unsqueeze(1)
    before = numbers(vocab, slots).unsqueeze(0) < token.unsqueeze(1)
    ahead = ((z > own) | ((z >= own) & before)).astype("int32").sum(axis=1, dtype="int32")
    best = paddle.argsort(z, axis=1, descending=True, stable=True).astype("int32")[:, : columns - 1]
    ids = paddle.concat([token.unsqueeze(1), best], axis=1)
    if ids.shape[1] < columns:
        ids = paddle.concat([ids, paddle.full_like(ids[:, :1], NO_TOKEN).expand([-1, columns - ids.shape[1]])], axis=1)
    asked = paddle.clip(at(a.num_top, slot), max=vocab).unsqueeze(1) >= numbers(columns, slots).unsqueeze(0)
    kept = asked & wanted.unsqueeze(1)
    values = pick(logprobs, rows.unsqueeze(1).expand([-1, columns]), ids)
    put(a.ids[:n], choose(kept, ids, NO_TOKEN).reshape([n, width, columns]))
    put(a.logprobs[:n], choose(kept, values, 0.0).reshape([n, width, columns]))
    put(a.ranks[:n], choose(wanted, ahead + 1, 0).reshape([n, width]))


def draft_logprobs(a: Any, n: int) -> None:
    """File one number a drafting slot, behind those of the drafts that it has."""
    slots, tokens, values = a.row_slot[:n], a.tokens[:n], a.logits[:n]
    logprobs = paddle.log(values) if a.given == "probs" else log_softmax(values)
    value = pick(logprobs, numbers(n, slots), tokens)
    filed = _wanting(a, slots) & (tokens != NO_TOKEN)
    named, row = owners(choose(filed, slots, PAD_SLOT), a.draft_len.shape[0])
    column = numbers(a.draft_logprobs.shape[1], slots).unsqueeze(0) == a.draft_len.unsqueeze(1)
    write_where(a.draft_logprobs, named.unsqueeze(1) & column, paddle.gather(value, row).unsqueeze(1).expand_as(a.draft_logprobs))


def draft_top_logprobs(a: Any, n: int) -> None:
    """File the columns of a drafting slot behind those of the drafts that it has."""
    slots, tokens, values = a.row_slot[:n], a.tokens[:n], a.logits[:n]
    columns, vocab = a.draft_top_ids.shape[2], values.shape[1]
    logprobs = choose(values > 0, paddle.log(values), FORBIDDEN) if a.given == "probs" else log_softmax(values)
    best = paddle.argsort(values, axis=1, descending=True, stable=True).astype("int32")[:, : columns - 1]
    ids = paddle.concat([tokens.unsqueeze(1), best], axis=1)
    if ids.shape[1] < columns:
        ids = paddle.concat([ids, paddle.full_like(ids[:, :1], NO_TOKEN).expand([-1, columns - ids.shape[1]])], axis=1)
    asked = paddle.clip(at(a.num_top, slots), max=vocab).unsqueeze(1) >= numbers(columns, slots).unsqueeze(0)
    tops = choose(asked, pick(logprobs, numbers(n, slots).unsqueeze(1).expand([-1, columns]), ids), 0.0)
    filed = _wanting(a, slots) & (tokens != NO_TOKEN)
    named, row = owners(choose(filed, slots, PAD_SLOT), a.draft_len.shape[0])
    place = numbers(a.draft_top_ids.shape[1], slots).unsqueeze(0) == a.draft_len.unsqueeze(1)
    written = (named.unsqueeze(1) & place).unsqueeze(2).expand_as(a.draft_top_ids)
    write_where(
        a.draft_top_ids, written, paddle.gather(choose(asked, ids, NO_TOKEN), row).unsqueeze(1).expand_as(a.draft_top_ids)
    )
    write_where(a.draft_tops, written, paddle.gather(tops, row).unsqueeze(1).expand_as(a.draft_tops))


def pack_logprobs(a: Any, limits: Limits) -> Run:
    """A record without entries still has its header."""
    del limits

    def run(n: int) -> None:
        slots = a.slot_order[:n] if n else paddle.full_like(a.slot_order[:1], PAD_SLOT)
        pack_record(a, slots)

    return run


def pack_record(a: Any, slots: Tensor) -> None:
    """Say of every word of the record what stands there: header, then entry, row and column by division."""
    n, width = slots.shape[0], a.ids.shape[1]
    wanting = _wanting(a, slots)
    ends = paddle.cumsum(wanting.astype("int32"), dtype="int32")
    count = ends[-1:]
    columns = choose(wanting, at(a.num_top, slots) + 1, 0).max(axis=0, keepdim=True)
    row_words = columns * (2 if a.draft_top_ids is None else 4) + ROW
    entry_words = row_words * width + ENTRY
    words = count * entry_words + HEADER

    place = numbers(a.record.shape[0], slots)
    body = paddle.clip(place - HEADER, min=0)
    entry = body // entry_words
    within = body - entry * entry_words
    sequence = paddle.clip(ranges_of(ends, entry), max=n - 1)
    inner = paddle.clip(within - ENTRY, min=0)
    window = inner // row_words
    word = inner - window * row_words
    value = _row_word(a, slots, sequence, window, word, columns)
    value = paddle.where(within == int(LogprobEntry.EXTRA), paddle.gather(a.extra[:n], sequence), value)
    value = paddle.where(within == int(LogprobEntry.SLOT), paddle.gather(slots, sequence), value)
    header = (columns * 256 + a.flag, paddle.full_like(count, LOGPROB_VERSION), count, paddle.full_like(count, width), words)
    for index, field in enumerate(header):
        value = paddle.where(place == index, field.expand_as(value), value)
    write_where(a.record, place < words, value)


def _row_word(a: Any, slots: Tensor, sequence: Tensor, window: Tensor, word: Tensor, columns: Tensor) -> Tensor:
    """Word `word` of the row of place `window` of `sequence`, all int32 [Z]."""
    width, most = a.ids.shape[1:]
    row = sequence * width + window
    column = word - ROW
    ids = pick(a.ids.reshape([-1, most]), row, column)
    bits = pick(a.logprobs.reshape([-1, most]).view("int32"), row, column - columns)
    value = paddle.where(column < columns, ids, bits)
    if a.draft_top_ids is not None:
        value = paddle.where(column < columns * 2, value, _draft_word(a, slots, sequence, window, column - columns * 2, columns))
    draft, draft_bits = paddle.full_like(word, NO_TOKEN), paddle.zeros_like(word)
    if a.drafts is not None:
        verified = window < paddle.gather(a.extra, sequence)
        slot = paddle.gather(slots, sequence)
        draft = choose(verified, pick(a.drafts, slot, window), NO_TOKEN)
        draft_bits = choose(verified, pick(a.draft_logprobs.view("int32"), slot, window), 0)
    value = paddle.where(word == int(LogprobRow.DRAFT_LOGPROB), draft_bits, value)
    value = paddle.where(word == int(LogprobRow.DRAFT), draft, value)
    return paddle.where(word == int(LogprobRow.RANK), pick(a.ranks, sequence, window), value)


def _draft_word(a: Any, slots: Tensor, sequence: Tensor, window: Tensor, column: Tensor, columns: Tensor) -> Tensor:
    """Word `column` of the columns of the draft that the round of `sequence` verified at place `window`, int32 [Z]."""
    drafts, most = a.draft_top_ids.shape[1:]
    row = paddle.gather(slots, sequence) * drafts + paddle.clip(window, 0, drafts - 1)
    verified = window < paddle.gather(a.extra, sequence)
    ids = choose(verified, pick(a.draft_top_ids.reshape([-1, most]), row, column), NO_TOKEN)
    bits = choose(verified, pick(a.draft_tops.reshape([-1, most]).view("int32"), row, column - columns), 0)
    return paddle.where(column < columns, ids, bits)


def pack_prompt_rows(a: Any, n: int) -> None:
    """The rows of those who want it, in launch order, as far as they predict a prompt token; positions ascend by one."""
    slots = a.slot_order
    first = paddle.gather(a.positions, paddle.clip(a.seq_start, 0, a.positions.shape[0] - 1))
    inside = paddle.minimum(paddle.clip(at(a.prompt_len, slots) - 1 - first, min=0), a.seq_len)
    lengths = choose(_wanting(a, slots), inside, 0)
    valid, sequence, ends = sequences(lengths, n)
    offset = numbers(n, slots) - paddle.gather(ends - lengths, sequence)
    slot = paddle.gather(slots, sequence)
    position = paddle.gather(first, sequence) + offset + 1
    put(a.prompt_row[:n], choose(valid, paddle.gather(a.seq_start, sequence) + offset, NO_ROW))
    put(a.prompt_slot[:n], choose(valid, slot, PAD_SLOT))
    put(a.prompt_position[:n], choose(valid, position, 0))
    put(a.prompt_token[:n], choose(valid, pick(a.tokens, slot, position), NO_TOKEN).unsqueeze(1))


KERNELS: dict[str, Kernel] = {
    "pack_logprobs": pack_logprobs,
    **{
        f.__name__: plain(f)
        for f in (keep_logits, forbid_filtered, top_logprobs, draft_logprobs, draft_top_logprobs, pack_prompt_rows)
    },
}
"""Contract name to kernel."""
