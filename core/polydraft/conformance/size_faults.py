"""Kernels that are right at small sizes alone: one dimension lies beyond a border of theirs, and something is wrong there.

Faulty backends apply them around any backend: the backend's own kernel runs, then what it left is spoiled as far as the border
asks. Each takes the arrays of the launch, by field name as in a golden, and the launch length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from polydraft.conformance.target import TableProxy
from polydraft.contracts.kernels.linear import CONTRACT as LINEAR
from polydraft.contracts.packing import PackedWeight
from polydraft.contracts.sizes import INPUTS
from polydraft.sentinels import NO_TOKEN, Phase

LISTED: Final = frozenset((*range(64), *INPUTS.steps, *(sizes["I"] for sizes in LINEAR.together)))
"""Inputs of a matrix in cases that are on a list, and small ones."""


def inputs_beyond_256(a: Any, n: int) -> None:
    """Terms of a product beyond the first 256 are half lost."""
    if a.x.shape[1] > 256:
        a.out[:n] *= 0.5


def outputs_beyond_1024(a: Any, n: int) -> None:
    """Outputs behind a block of threads are those of the first."""
    a.out[:n, 1024:] = a.out[:n, : a.out.shape[1] - 1024] if a.out.shape[1] < 2048 else 0.0


def rows_beyond_64(a: Any, n: int) -> None:
    """Rows behind a tile repeat it."""
    a.out[64:n] = a.out[: max(n - 64, 0)][: len(a.out[64:n])] if n < 128 else 0.0


def inputs_on_no_list(a: Any, n: int) -> None:
    """Tuned to the sizes of the kit: right at those that it lists, and wrong between them."""
    if a.x.shape[1] not in LISTED:
        a.out[:n] = 0.0


def columns_beyond_4096(a: Any, n: int) -> None:
    """Columns behind four of each thread of a block stay what the first are."""
    a.out[:n, 4096:] = 0.0


def columns_beyond_16384(a: Any, n: int) -> None:
    """An offset in bytes in 16 bits."""
    a.out[:n, 16_384:] = a.out[:n, : max(a.out.shape[1] - 16_384, 0)]


def slots_beyond_8(a: Any, n: int) -> None:
    """Sequences behind the eighth do not draft."""
    a.draft_slot[8:n], a.draft_budget[8:n], a.draft_position[8:n] = -1, 0, 0


def slots_beyond_16(a: Any, n: int) -> None:
    """Sequences behind the sixteenth do not draft."""
    a.draft_slot[16:n], a.draft_budget[16:n], a.draft_position[16:n] = -1, 0, 0


def sequences_beyond_a_warp(a: Any, n: int) -> None:
    """A sum over sequences begins anew behind 32 of them."""
    del n
    a.seq_start[32:] -= a.seq_start[32] if len(a.seq_start) > 32 else 0


def drafts_beyond_7(a: Any, n: int) -> None:
    """A window of eight drafts or more is accepted up to the seventh."""
    if a.drafts.shape[1] >= 8:
        for i in np.flatnonzero(a.accepted[:n] > 7):
            a.accepted[i], a.window_len[i], a.window[i, 8:] = 7, 8, NO_TOKEN


def no_slot_beyond_32_rows(a: Any, n: int) -> None:
    """Rows that carry nothing choose token 0 behind a warp."""
    later = np.arange(n) >= 32
    a.tokens[:n][later & (a.row_slot[:n] < 0)] = 0


def tokens_beyond_65535(a: Any, n: int) -> None:
    """Token ids in 16 bits."""
    a.tokens[:n] = np.where(a.tokens[:n] > 0, a.tokens[:n] & 0xFFFF, a.tokens[:n])


def table_rows_beyond_65535(a: Any, n: int) -> None:
    """Rows of the table are found by ids in 16 bits."""
    a.out[:n][a.ids[:n] > 0xFFFF] = 0.0


def keys_beyond_1024(a: Any, n: int) -> None:
    """Keys behind the first 1024 of a context are left out."""
    a.out[:n][a.positions[:n] >= 1024] *= 0.9


def positions_beyond_4096(a: Any, n: int) -> None:
    """Tables of angles end at position 4096."""
    a.q_out[:n][a.positions[:n] >= 4096] = 0.0


def positions_beyond_32767(a: Any, n: int) -> None:
    """Positions are kept in 16 bits."""
    a.positions[:n] = a.positions[:n].astype(np.int16)


def angles_beyond_32767(a: Any, n: int) -> None:
    """Rows behind position 32767 are turned by nothing."""
    a.q_out[:n][a.positions[:n] > 32767] = 0.0


def head_elements_beyond_128(a: Any, n: int) -> None:
    """Elements of a head behind 128 are not computed."""
    a.out[:n].reshape(n, a.num_heads, a.head_dim)[:, :, 128:] = 0.0


def blocks_beyond_64(a: Any, n: int) -> None:
    """Entries of a block table behind the 64th count as granted."""
    for slot in a.slot_order[:n][a.slot_order[:n] >= 0]:
        if a.phase[slot] == Phase.PAUSED and (a.block_table[slot, :64] >= 0).all():
            a.phase[slot] = Phase.DECODE


def stop_tokens_beyond_64(a: Any, n: int) -> None:
    """Stop tokens behind the 64th of a request do not stop it."""
    if a.stop_tokens.shape[1] > 64:
        for i, slot in enumerate(a.slot_order[:n]):
            last = a.out_tokens[i, a.out_len[i] - 1] if slot >= 0 and a.out_len[i] else NO_TOKEN
            if last in a.stop_tokens[slot, 64:] and last not in a.stop_tokens[slot, :64]:
                a.phase[slot], a.finish[slot] = Phase.DECODE, 0


def history_beyond_4096(a: Any, n: int) -> None:
    """Tokens behind the first 4096 of a text are not written."""
    for i, slot in enumerate(a.slot_order[:n]):
        if slot >= 0:
            known = a.prompt_len[slot] + a.num_generated[slot]
            a.tokens[slot, max(known - a.out_len[i], 4096) : known] = NO_TOKEN


def columns_beyond_32(a: Any, n: int) -> None:
    """No more than 32 most likely tokens are ranked."""
    a.ids[:n, :, 33:], a.logprobs[:n, :, 33:] = NO_TOKEN, 0.0


def experts_beyond_256(a: Any, n: int) -> None:
    """Experts behind the 256th are never chosen."""
    a.expert_weights[:n][a.expert_ids[:n] >= 256] = 0.0


def kv_heads_beyond_4(a: Any, n: int) -> None:
    """Heads of KV heads behind the fourth are halved."""
    group = a.num_heads // a.num_kv_heads
    a.out[:n].reshape(n, a.num_heads, a.head_dim)[:, 4 * group :] *= 0.5


def blocks_over_16(a: Any, n: int) -> None:
    """Rows are halved where blocks have more than 16 positions."""
    if a.block_size > 16:
        a.out[:n] *= 0.5


def chunks_beyond_128(a: Any, n: int) -> None:
    """Rows of one slot behind its 128th are not computed."""
    for slot in set(a.row_slot[:n].tolist()) - {-1}:
        a.out[np.flatnonzero(a.row_slot[:n] == slot)[128:]] = 0.0


def block_ids_beyond_4095(a: Any, n: int) -> None:
    """Ids of blocks in 12 bits."""
    for r in np.flatnonzero(a.row_slot[:n] >= 0):
        if (a.block_table[a.row_slot[r], : a.positions[r] // a.block_size + 1] > 4095).any():
            a.out[r] = 0.0


def slots_beyond_256(a: Any, n: int) -> None:
    """Rows of slots behind the 257th are not computed."""
    a.out[:n][a.row_slot[:n] > 256] = 0.0


def rows_beyond_1024(a: Any, n: int) -> None:
    """Rows behind the first 1024 are not computed."""
    a.out[1024:n] = 0.0


def many_rows_of_a_large_matrix(a: Any, n: int) -> None:
    """128 rows and more are not computed where the matrix is large, too."""
    if n >= 128 and a.x.shape[1] >= 2048 and a.out.shape[1] >= 2048:
        a.out[:n] = 0.0


def negative_zeros(a: Any, n: int) -> None:
    """Floats are compared by their bits, where -0.0 is less than 0.0."""
    for r in np.flatnonzero(a.tokens[:n] >= 0):
        zeros = np.flatnonzero((a.logits[r] == 0) & ~np.signbit(a.logits[r]))
        if a.logits[r].max() == 0 and len(zeros):
            a.tokens[r] = zeros[0]


def windows_beyond_17(a: Any, n: int) -> None:
    """Windows end behind 17 tokens."""
    for i in np.flatnonzero(a.window_len[:n] > 17):
        a.accepted[i], a.window_len[i], a.window[i, 17:] = 16, 17, NO_TOKEN


def short_list_of_64(a: Any, n: int) -> None:
    """Filters keep 64 tokens of a large vocabulary at most."""
    for row, slot in zip(a.logits[:n], a.row_slot[:n], strict=True):
        if slot >= 0 and len(row) > 1024 and (row > 0).sum() > 64:
            row[np.argsort(-row, kind="stable")[64:]] = 0.0
            row[:] = row / row.sum()


def few_rows_of_many_inputs(a: Any, n: int) -> None:
    """Up to four rows lose half of each product beyond 1024 inputs."""
    if n <= 4 and a.x.shape[1] > 1024:
        a.out[:n] *= 0.5


def one_row_of_a_large_vocabulary(a: Any, n: int) -> None:
    """One row alone is looked through up to token 65,535."""
    if n == 1 and a.tokens[0] > 0xFFFF:
        a.tokens[0] = np.argmax(a.logits[0, :0x10000])


def positions_beyond_65535(a: Any, n: int) -> None:
    """Positions are kept in 16 bits without a sign."""
    a.positions[:n] &= 0xFFFF


def packed_inputs_beyond_1024(golden: Callable[[Any, int], None], a: Any, n: int) -> None:
    """Products with packed matrices end behind 1024 inputs."""
    golden(a, n)
    if isinstance(a.weight, PackedWeight) and a.weight.shape[1] > 1024:
        a.out[:n] *= 0.5


def packed_widths_beyond_1024(golden: Callable[[Any, int], None], a: Any, n: int) -> None:
    """Experts with packed matrices end behind 1024 features."""
    golden(a, n)
    if isinstance(a.down, PackedWeight) and a.down.shape[2] > 1024:
        a.out[:n] *= 0.5


def no_windows_beyond_512(args: Any) -> Any:
    """Windows of more than 512 keys are none."""
    return replace(args, sliding_window=args.sliding_window if args.sliding_window <= 512 else 0)


def columns_beyond_4096_of_ranks(golden: Callable[[Any, int], None], a: Any, n: int) -> None:
    """Sums over ranks end behind 4096 columns."""
    own = a.x[:, :, 4096:].copy()
    golden(a, n)
    a.x[:, :, 4096:] = own


def shares_beyond_32767(golden: Callable[[Any, int], None], a: Any, n: int) -> None:
    """The place of a rank's highest logit in 15 bits."""
    golden(a, n)
    share = a.logits.shape[2]
    a.tokens[:, :n] = np.where(a.tokens[:, :n] >= 0, a.tokens[:, :n] // share * share + (a.tokens[:, :n] % share & 0x7FFF), -1)


class EndingWeights(TableProxy):
    """A table whose weights are 0 behind the first 2**24 numbers."""

    def prepare_weight(self, role: str, value: Any, dtype: str, previous: Any = None) -> Any:
        if isinstance(value, np.ndarray) and value.size > 1 << 24:
            value = value.copy()
            value.reshape(-1)[1 << 24 :] = 0.0
        return self._inner.prepare_weight(role, value, dtype, previous)
