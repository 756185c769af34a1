"""Owns the integer state kernels of every decode step for the place whose memory the host sees: the same contracts through NumPy.

`table.py` lays them over the portable ones on the CPU place, where calling one Paddle operation takes longer than all that such a
kernel does to a few integers. Nothing here touches what a model computes with.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle

from polydraft.contracts.base import Limits
from polydraft.device import Array
from polydraft.sentinels import NO_ROW, NO_TOKEN, PAD_SLOT, Finish, Phase
from polydraft_paddle.ops import Tensor
from polydraft_paddle.provider import Kernel, Run

PREFILL, DECODE, PAUSED, FINISHED = (int(p) for p in (Phase.PREFILL, Phase.DECODE, Phase.PAUSED, Phase.FINISHED))


class _Memory:
    """The bytes of a tensor, to be written to: Paddle 3.2 lends them for reading alone."""

    def __init__(self, tensor: Tensor) -> None:
        self._lent: Array = np.from_dlpack(tensor)
        self.__array_interface__ = {**self._lent.__array_interface__, "data": (self._lent.ctypes.data, False)}


def _over_memory(function: Callable[[Any, int], None]) -> Kernel:
    """Turn `function(a, n)` over arrays into a kernel that is bound to tensors."""

    def bind(a: Any, limits: Limits) -> Run:
        del limits
        arrays = SimpleNamespace(
            **{name: np.asarray(_Memory(v)) if isinstance(v, paddle.Tensor) else v for name, v in vars(a).items()}
        )
        return lambda n: function(arrays, n)

    bind.__doc__ = function.__doc__
    return bind


def _slots_of(a: Any, n: int) -> tuple[Array, Array]:
    """Of the first `n` sequences: which have a slot, and that slot, 0 where there is none."""
    slots = a.slot_order[:n]
    return slots >= 0, np.maximum(slots, 0)


def _update(table: Array, updates: Array) -> None:
    there = updates[updates[:, 0] >= 0]
    table[there[:, 0], there[:, 1]] = there[:, 2]


def update_tokens(a: Any, n: int) -> None:
    """Tokens of prompts."""
    _update(a.tokens, a.updates[:n])


def update_blocks(a: Any, n: int) -> None:
    """Entries of block tables."""
    _update(a.block_table, a.updates[:n])


def reserve_blocks(a: Any, n: int) -> None:
    """A slot is covered when no entry that it needs is a hole."""
    there, slots = _slots_of(a, n)
    need = np.minimum(a.kv_len[slots] + a.draft_len[slots] + (1 + a.lookahead), a.max_total[slots])
    starts = np.arange(a.block_table.shape[1]) * a.block_size
    holes = ((a.block_table[slots] < 0) & (starts < need[:, None])).any(axis=1)
    phase = a.phase[slots]
    asked = there & ((phase == DECODE) | (phase == PAUSED))
    a.phase[slots[asked]] = np.where(holes, PAUSED, DECODE)[asked]


def _spread(lengths: Array, count: int) -> tuple[Array, Array, Array, Array]:
    """Of `count` packed rows: which carry something, the sequence of each, its offset there; and where each sequence starts."""
    ends = lengths.cumsum()
    start, rows = ends - lengths, np.arange(count)
    sequence = np.minimum(ends.searchsorted(rows, side="right"), len(lengths) - 1)
    return rows < ends[-1], sequence, rows - start[sequence], start


def pack_rows(a: Any, n: int) -> None:
    """Lengths and offsets by sequence, then everything else by row through the row's sequence."""
    there, slots = _slots_of(a, len(a.slot_order))
    phase, kv_len = a.phase[slots], a.kv_len[slots]
    decode, prefill = there & (phase == DECODE), there & (phase == PREFILL)
    wanted = decode * (a.draft_len[slots] + 1) + prefill * (a.prefill_len[slots] - kv_len)
    a.seq_len[...] = np.minimum(wanted, there * a.seq_rows)
    valid, sequence, offset, a.seq_start[...] = _spread(a.seq_len, n)
    slot, decoding, position = slots[sequence], decode[sequence], kv_len[sequence] + offset
    newest = a.prompt_len[slot] + a.num_generated[slot] - 1
    ids = a.tokens[slot, np.clip(np.where(decoding, newest, position), 0, a.tokens.shape[1] - 1)]
    drafted = (valid & decoding & (offset > 0)).nonzero()[0]
    ids[drafted] = a.drafts[slot[drafted], offset[drafted] - 1]
    a.ids[:n] = np.where(valid, ids, NO_TOKEN)
    a.row_slot[:n] = np.where(valid, a.slot_order[sequence], PAD_SLOT)
    a.positions[:n] = position * valid


def pack_logit_rows(a: Any, n: int) -> None:
    """Like `pack_rows`, over the rows that need logits: of a prefill's the last."""
    there, slots = _slots_of(a, len(a.slot_order))
    phase, kv_len, prefill_len = a.phase[slots], a.kv_len[slots], a.prefill_len[slots]
    last = (phase == PREFILL) & (a.seq_len > 0) & (kv_len + a.seq_len == prefill_len)
    last &= prefill_len == a.prompt_len[slots] + a.num_generated[slots]
    a.logit_len[...] = there * np.where(phase == DECODE, a.seq_len, last)
    valid, sequence, offset, a.logit_start[...] = _spread(a.logit_len, n)
    offset += (a.seq_len - a.logit_len)[sequence]
    a.logit_row[:n] = np.where(valid, a.seq_start[sequence] + offset, NO_ROW)
    a.logit_slot[:n] = np.where(valid, a.slot_order[sequence], PAD_SLOT)
    a.logit_position[:n] = (kv_len[sequence] + offset + 1) * valid


def verify_match(a: Any, n: int) -> None:
    """Compare whole windows; a running product finds the first mismatch."""
    there, slots = _slots_of(a, n)
    length = there * a.logit_len[:n]
    active = length > 0
    drafted = np.where(active & (a.phase[slots] == DECODE), length - 1, -1)
    columns = np.arange(a.window.shape[1])
    choices = a.choices[np.clip(a.logit_start[:n, None] + columns, 0, len(a.choices) - 1)]
    match = (choices[:, :-1] == a.drafts[slots]) & (columns[:-1] < drafted[:, None])
    accepted = match.cumprod(axis=1).sum(axis=1)
    size = active * (accepted + 1)
    a.window[:n] = np.where(columns < size[:, None], choices, NO_TOKEN)
    a.window_len[:n], a.accepted[:n], a.drafted[:n] = size, accepted, drafted


def commit_window(a: Any, n: int) -> None:
    """Find where each window ends, file the tokens before it, then move every length and phase by slot."""
    there, slots = _slots_of(a, n)
    window, running = a.window[:n], there & (a.seq_len[:n] > 0)
    phase, known = a.phase[slots], a.prompt_len[slots] + a.num_generated[slots]
    decode, prefill = running & (phase == DECODE), running & (phase == PREFILL)
    kv_len = a.kv_len[slots] + prefill * a.seq_len[:n]
    committed = decode | prefill & (kv_len == a.prefill_len[slots])
    size = committed * a.window_len[:n]
    emitted, reason = _cut(window, size, a.max_total[slots] - known, a.stop_tokens[slots])

    kept = np.arange(window.shape[1]) < emitted[:, None]
    sequence, column = kept.nonzero()
    a.tokens[slots[sequence], known[sequence] + column] = window[kept]
    a.out_tokens[:n] = np.where(kept, window, NO_TOKEN)
    a.out_len[:n], a.out_accepted[:n] = emitted, decode * np.minimum(a.accepted[:n], emitted)

    ended = committed & (reason != Finish.NONE)
    a.num_generated[slots[running]] += emitted[running]
    a.kv_len[slots[running]] = (kv_len + decode * emitted)[running]
    a.phase[slots[committed]] = np.where(ended, FINISHED, DECODE)[committed]
    a.finish[slots[ended]] = reason[ended]


def _cut(window: Array, size: Array, room: Array, stop_tokens: Array) -> tuple[Array, Array]:
    """How many tokens of each window count, and why a request ends with them (`Finish`)."""
    limit = np.minimum(size, room)
    ends = (window[:, :, None] == stop_tokens[:, None]).any(axis=2) | (window == NO_TOKEN)
    ends &= np.arange(window.shape[1]) < limit[:, None]
    ended, first = ends.any(axis=1), ends.argmax(axis=1)
    error = ended & (window[np.arange(len(window)), first] == NO_TOKEN)
    reason = np.where((limit == room) & (size > 0), int(Finish.LENGTH), int(Finish.NONE))
    reason[ended], reason[error] = Finish.STOP, Finish.ERROR
    return np.where(ended, first + ~error, limit), reason


def snapshot_output(a: Any, n: int) -> None:
    """Column by column; records past the end become the empty one."""
    there, slots = _slots_of(a, n)
    columns = (
        np.where(there, slots, PAD_SLOT), there * a.epoch[slots], there * a.out_len[:n], there * a.out_accepted[:n],
        np.where(there, a.drafted[:n], -1), there * a.finish[slots], there * a.phase[slots], there * a.kv_len[slots],
    )  # fmt: skip
    for column, values in enumerate(columns):
        a.record[:n, column] = values
    a.record[:n, len(columns) :] = np.where(there[:, None], a.out_tokens[:n], NO_TOKEN)


def pack_draft_rows(a: Any, n: int) -> None:
    """Shift the rows by one token; what is not known by then drops out."""
    row_slot, following = a.row_slot[:n], a.positions[:n] + 1
    slots = np.maximum(row_slot, 0)
    phase = a.phase[slots]
    keep = (row_slot >= 0) & ((phase == PREFILL) | (phase == DECODE))
    keep &= following < a.prompt_len[slots] + a.num_generated[slots]
    a.draft_ids[:n] = np.where(keep, a.tokens[slots, np.minimum(following, a.tokens.shape[1] - 1)], NO_TOKEN)
    a.draft_row_slot[:n] = np.where(keep, row_slot, PAD_SLOT)


def begin_draft(a: Any, n: int) -> None:
    """Empty the drafts of slots that had rows; say who drafts, from where and how far."""
    there, slots = _slots_of(a, n)
    ran = there & (a.seq_len[:n] > 0)
    a.draft_len[slots[ran]], a.drafts[slots[ran]] = 0, NO_TOKEN
    room = a.max_total[slots] - a.prompt_len[slots] - a.num_generated[slots] - 1
    budget = np.minimum(room, a.drafts.shape[1])
    active = ran & (a.phase[slots] == DECODE) & (budget > 0)
    a.draft_slot[:n] = np.where(active, slots, PAD_SLOT)
    a.draft_position[:n], a.draft_budget[:n] = active * (a.kv_len[slots] - 1), active * budget


def advance_draft(a: Any, n: int) -> None:
    """File what was chosen, then retire what is done."""
    slots, chosen, drawn = a.draft_slot[:n], a.chosen[:n], a.pass_index + 1
    filed = (slots >= 0) & (chosen >= 0)
    a.drafts[slots[filed], a.pass_index] = chosen[filed]
    a.draft_len[slots[filed]] = drawn
    goes_on = filed & (a.draft_budget[:n] > drawn)
    a.draft_position[:n] += goes_on
    a.next_ids[:n] = np.where(goes_on, chosen, NO_TOKEN)
    slots[~goes_on] = PAD_SLOT


KERNELS: dict[str, Kernel] = {
    function.__name__: _over_memory(function) for function in (
        update_tokens, update_blocks, reserve_blocks, pack_rows, pack_logit_rows, verify_match, commit_window, snapshot_output,
        pack_draft_rows, begin_draft, advance_draft,
    )
}  # fmt: skip
"""Contract name to kernel."""
