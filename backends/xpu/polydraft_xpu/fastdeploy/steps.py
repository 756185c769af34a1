"""The arithmetic around the call of an operator, a generator for each adaptor: it yields what the operator gets, is sent what
comes back, and files that where the contract wants it.

`__init__.py` runs them. Fields of contracts are tensors here, as in the portable kernels; the tensors that are yielded have one
entry a sequence, in launch order, where nothing else is said. A generator that yields nothing calls no operator.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import paddle
from polydraft_paddle.ops import (
    Column,
    Tensor,
    as_int,
    at,
    both,
    choose,
    clamp,
    file_by_slot,
    masked,
    numbers,
    pick,
    put,
    take,
)

from polydraft.contracts.base import Limits
from polydraft.sentinels import NO_ROW, NO_TOKEN, PAD_SLOT, Phase

Values = Mapping[str, Any]
Step = Generator[Values, Values, None]
"""Yields tensors and numbers by name once, and is sent results by name."""
PREFILL, DECODE = int(Phase.PREFILL), int(Phase.DECODE)


def beside(*columns: Tensor) -> Tensor:
    """Columns [n] or tables [n, K] side by side."""
    return paddle.concat([one if one.ndim == 2 else one.unsqueeze(1) for one in columns], axis=1)


def zeros(count: int, like: Tensor) -> Tensor:
    """`count` zeros, int32."""
    return paddle.zeros_like(numbers(count, like))


# -- rows ------------------------------------------------------------------------------------------
def pack_rows(a: Any, limits: Limits, n: int) -> Step:
    """Sequences with their prompts and windows at the left; the operator packs, and says where each sequence starts."""
    del limits
    slots = a.slot_order
    safe = clamp(slots)
    phase, kv_len = take(a.phase, safe), take(a.kv_len, safe)
    decode, prefill = both(phase == DECODE, slots >= 0), both(phase == PREFILL, slots >= 0)
    wanted = masked(take(a.draft_len, safe) + 1, decode) + masked(take(a.prefill_len, safe) - kv_len, prefill)
    put(a.seq_len, paddle.minimum(wanted, masked(a.seq_rows, slots >= 0)))
    if not n:
        put(a.seq_start, paddle.zeros_like(a.seq_start))
        return
    size, columns = slots.shape[0], min(n, a.tokens.shape[1])
    whose = safe.unsqueeze(1).expand([size, columns])
    places = kv_len.unsqueeze(1) + numbers(columns, slots).unsqueeze(0)
    newest = pick(a.tokens, safe, take(a.prompt_len, safe) + take(a.num_generated, safe) - 1)
    packed = yield {
        "rows": n, "prompts": pick(a.tokens, whose, places), "lengths": a.seq_len, "kv_len": kv_len, "prefill": as_int(prefill),
        "windows": beside(newest, take(a.drafts, safe)),
    }  # fmt: skip
    valid, sequence, start = _rows(packed, n)
    put(a.seq_start, start)
    position = take(kv_len, sequence) + numbers(n, slots) - take(start, sequence)
    put(a.ids[:n], choose(valid, packed["ids"].astype("int32"), NO_TOKEN))
    put(a.row_slot[:n], choose(valid, take(slots, sequence), PAD_SLOT))
    put(a.positions[:n], choose(valid, position, 0))


def pack_logit_rows(a: Any, limits: Limits, n: int) -> Step:
    """Windows of row numbers, as long as a sequence has logit rows."""
    del limits
    slots, seq_len = a.slot_order, a.seq_len
    safe = clamp(slots)
    phase, kv_len, prefill_len = take(a.phase, safe), take(a.kv_len, safe), take(a.prefill_len, safe)
    known = take(a.prompt_len, safe) + take(a.num_generated, safe)
    last = both(both(phase == PREFILL, seq_len > 0), both(kv_len + seq_len == prefill_len, prefill_len == known))
    put(a.logit_len, masked(paddle.where(phase == DECODE, seq_len, as_int(last)), slots >= 0))
    if not n:
        put(a.logit_start, paddle.zeros_like(a.logit_start))
        return
    first = a.seq_start + seq_len - a.logit_len  # of a prefill it is the last row
    nothing = zeros(slots.shape[0], slots)
    packed = yield {
        "rows": n, "prompts": nothing.unsqueeze(1), "lengths": a.logit_len, "kv_len": kv_len, "prefill": nothing,
        "windows": first.unsqueeze(1) + numbers(n, slots).unsqueeze(0),
    }  # fmt: skip
    valid, sequence, start = _rows(packed, n)
    put(a.logit_start, start)
    row = choose(valid, packed["ids"].astype("int32"), 0)
    put(a.logit_row[:n], choose(valid, row, NO_ROW))
    put(a.logit_slot[:n], choose(valid, take(slots, sequence), PAD_SLOT))
    put(a.logit_position[:n], choose(valid, take(kv_len, sequence) + row - take(a.seq_start, sequence) + 1, 0))


def _rows(packed: Values, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of `n` packed rows: which carry something, the sequence of each, any for the others; and where each sequence starts."""
    starts = packed["starts"]
    valid = numbers(n, starts) < starts[-1:]
    return valid, paddle.clip(packed["sequence"], 0, starts.shape[0] - 2), starts[:-1]


# -- verification ----------------------------------------------------------------------------------
def verify_match(a: Any, limits: Limits, n: int) -> Step:
    """Windows with the drafts from the second column on; all sequences at once, whatever the launch length."""
    del limits
    if not n:
        return
    slots = a.slot_order
    safe = clamp(slots)
    idle = (slots < 0) | (a.logit_len == 0)
    prefill = take(a.phase, safe) != DECODE
    came = yield {
        "window": beside(zeros(slots.shape[0], slots), take(a.drafts, safe)), "choices": a.choices, "idle": idle,
        "prefill": as_int(prefill), "logit_len": a.logit_len, "logit_start": a.logit_start, "one": slots[:1],
    }  # fmt: skip
    length = came["step_output_len"]
    decodes = both(~idle, ~prefill)
    put(a.window[:n], came["step_output_ids"][:n].astype("int32"))
    put(a.window_len[:n], length[:n])
    put(a.accepted[:n], masked(length - 1, decodes)[:n])
    put(a.drafted[:n], choose(decodes, a.logit_len - 1, -1)[:n])


# -- hidden rows -----------------------------------------------------------------------------------
def select_before(a: Any, limits: Limits, n: int) -> Step:
    """Two sequences for each: the rows before the wanted one, which nobody keeps, and those from it on, of which the first is
    accepted."""
    if not n:
        return
    drafts, start, row = _wanted(a, n)
    behind = paddle.concat([start[1:], paddle.full_like(start[:1], a.hidden.shape[0])])
    before = choose(drafts, row, behind) - start
    before = paddle.concat([before[:1] + start[:1], before[1:]])
    kept = masked(behind - row, drafts)
    came = yield {
        "hidden": a.hidden, "rows": beside(before, kept).reshape([-1]), "num_drafts": max(limits.num_drafts, 1),
        "drafts": beside(zeros(n, start), as_int(drafts)).reshape([-1]),
    }  # fmt: skip
    _place(a.out[:n], came["picked"], drafts)


def select_behind(a: Any, limits: Limits, n: int) -> Step:
    """Sequences that end with the wanted row."""
    del limits
    if not n:
        return
    drafts, start, row = _wanted(a, n)
    end = choose(drafts, row + 1, start)
    came = yield {"hidden": a.hidden, "rows": end - paddle.concat([zeros(1, end), end[:-1]]), "drafts": as_int(drafts)}
    _place(a.out[:n], came["picked"], drafts)


def _wanted(a: Any, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which of the first `n` sequences draft, the first row of each and the one that is wanted."""
    drafts, start = a.draft_slot[:n] >= 0, a.seq_start[:n]
    return drafts, start, start + a.draft_position[:n] - at(a.positions, choose(drafts, start, 0))


def _place(out: Tensor, picked: Tensor, drafts: Tensor) -> None:
    """Rows of the sequences that draft to their places in `out`, zero rows to the others."""
    count = picked.shape[0]
    if not count:
        out.zero_()
        return
    place = paddle.cumsum(as_int(drafts), dtype="int32") - 1
    rows = paddle.concat([picked, paddle.zeros_like(picked[:1])])
    put(out, take(rows, paddle.clip(choose(drafts, place, count), 0, count)))


# -- drafts ----------------------------------------------------------------------------------------
def advance_draft(a: Any, limits: Limits, n: int) -> Step:
    """Windows of the sequences that draft; the operator files the token, counts it and moves on by a row."""
    del limits
    if not n:
        return
    slots, chosen, position = a.draft_slot[:n], a.chosen[:n], a.draft_position[:n]
    active = both(slots >= 0, chosen >= 0)
    came = yield {
        "chosen": chosen, "active": as_int(active), "done": ~active, "rows_before": position + 1, "one": slots[:1],
        "drafted": paddle.full_like(slots, a.pass_index), "pass_index": a.pass_index,
        "window": beside(zeros(n, slots), at(a.drafts, slots)), "history": beside(*[zeros(n, slots)] * (a.pass_index + 2)),
    }  # fmt: skip
    filed = came["base_model_draft_tokens"].astype("int32")[:, a.pass_index + 1]
    drafted, rows = came["step_idx"].astype("int32"), came["seq_lens_decoder"]
    file_by_slot(slots, active, (Column(a.drafts, a.pass_index), filed, None), (a.draft_len, drafted, None))
    goes_on = both(active, drafted < a.draft_budget[:n])
    put(a.draft_position[:n], choose(goes_on, rows - 1, position))
    put(a.next_ids[:n], choose(goes_on, came["draft_tokens"].astype("int32")[:, 0], NO_TOKEN))
    put(a.draft_slot[:n], choose(goes_on, slots, PAD_SLOT))


# -- arithmetic ------------------------------------------------------------------------------------
def rms_norm(a: Any, limits: Limits, n: int) -> Step:
    """The gain, and a copy of what comes back."""
    del limits
    if n:
        came = yield {"x": a.x[:n], "gain": _gain(a), "eps": a.eps}
        put(a.out[:n], came["normalised"])


def add_and_norm(a: Any, limits: Limits, n: int) -> Step:
    """Composite `residual_add+rms_norm`."""
    del limits
    add, norm = a.parts
    if n:
        came = yield {"x": add.y[:n], "residual": add.x[:n], "gain": _gain(norm), "eps": norm.eps}
        put(add.x[:n], came["summed"])
        put(norm.out[:n], came["normalised"])


def _gain(a: Any) -> Tensor:
    return a.weight + 1 if a.plus_one else a.weight


def swiglu(a: Any, limits: Limits, n: int) -> Step:
    """Rows as they are."""
    del limits
    if n:
        came = yield {"gate_up": a.gate_up[:n]}
        put(a.out[:n], came["gated"])
