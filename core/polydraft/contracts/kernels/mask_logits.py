"""Defines `mask_logits`: forbids, in each row of a window, the tokens that a constraint does not allow there.

The runner launches it behind the processing of the target's logits in engines that bind output to constraints; the masks come
from the host in the middle of the step. It never touches a sequence without masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, tensor
from polydraft.contracts.sizes import SLOTS, SMALL, VOCABULARY, WINDOW, Sizes, fitted, launched
from polydraft.device import Buffer
from polydraft.sentinels import PAD_SLOT


class MaskLogitsV1(Args):
    """Arguments of `mask_logits`. Launch length: sequences.

    Logit row `logit_start + j` of a sequence has the mask of place j; a sequence has at most W rows. A set bit allows its token;
    word w holds tokens 32 w to 32 w + 31, the lowest bit first. Bits beyond the vocabulary mean nothing.
    """

    slot_order: Buffer = tensor("B", "i32", "Slot of each sequence; PAD_SLOT where the launch order has ended.")
    logit_start: Buffer = tensor("B", "i32", "First logit row of each sequence.")
    logit_len: Buffer = tensor("B", "i32", "Logit rows of each sequence.")
    masked: Buffer = tensor("B", "i32", "Places of each sequence that have a mask, from the first on; 0: none.")
    masks: Buffer = tensor("B W WM", "u32", "Tokens allowed at each place, a bit each.")
    logits: Buffer = tensor("NL V", "f32", "Logits; those of tokens that are not allowed become -inf.", access="inout")


def golden(a: Any, n: int) -> None:
    """Bit by bit."""
    for i, slot in enumerate(a.slot_order[:n]):
        for j in range(min(a.masked[i], a.logit_len[i]) if slot >= 0 else 0):
            for v in range(a.logits.shape[1]):
                if not int(a.masks[i, j, v // 32]) >> (v % 32) & 1:
                    a.logits[a.logit_start[i] + j, v] = -np.inf


Rows = tuple[int, int, int]
"""Slot of a sequence, its logit rows, and its places with a mask."""


def _case(name: str, seqs: Sequence[Rows], *, n: int | None = None, width: int = 3, vocab: int = 40, seed: int = 1) -> Case:
    rng = np.random.default_rng(seed)
    count, lens = len(seqs), [rows for _, rows, _ in seqs]
    words = -(-vocab // 32)
    arrays: dict[str, Any] = {
        "slot_order": np.array([slot for slot, *_ in seqs], np.int32),
        "logit_len": np.array(lens, np.int32),
        "logit_start": (np.cumsum(lens) - lens).astype(np.int32),
        "masked": np.array([masked for *_, masked in seqs], np.int32),
        "masks": rng.integers(0, 2**32, (count, width, words), dtype=np.uint32),
        "logits": rng.normal(0, 3, (sum(lens) + 2, vocab)).astype(np.float32),
    }
    arrays["masks"][0, 0] |= np.uint32(0x80000001)
    return Case(name, arrays, {}, count if n is None else n)


def cases() -> Iterator[Case]:
    """Named cases of `mask_logits`."""
    yield _case("windows_of_several_lengths", [(2, 3, 3), (0, 1, 1), (1, 2, 2)])
    yield _case("sequences_without_masks_between_others", [(0, 2, 2), (1, 3, 0), (3, 2, 2), (2, 1, 1)])
    yield _case("fewer_masks_than_rows", [(0, 3, 1), (1, 3, 2)])
    yield _case("more_masks_than_rows", [(1, 1, 3), (0, 2, 3)])
    yield _case("order_shorter_than_the_launch", [(1, 2, 2), (PAD_SLOT, 0, 3), (PAD_SLOT, 2, 2)])
    yield _case("beyond_the_launch_length", [(1, 2, 2), (0, 2, 2), (2, 1, 1)], n=2)
    yield _case("sequence_without_rows", [(1, 0, 2), (0, 2, 2)])
    yield _case("whole_words", [(0, 2, 2), (1, 1, 1)], vocab=64)
    yield _case("one_token", [(0, 1, 1), (1, 1, 1)], vocab=1)
    yield _case("more_columns_than_a_tile", [(0, 1, 1), (1, 2, 2)], vocab=1030)
    yield _case("window_of_one", [(1, 1, 1), (0, 1, 0), (2, 1, 1)], width=1)
    yield _case("nothing_to_do", [(0, 1, 1), (1, 2, 2)], n=0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random windows and masks."""
    size, width, vocab = (int(v) for v in rng.integers((1, 1, 1), (6, 5, 80)))
    size, width, vocab = fitted(sizes, B=size, W=width, V=vocab)
    seqs = [
        (int(slot) if rng.random() < 0.9 else PAD_SLOT, int(rng.integers(0, width + 1)), int(rng.integers(0, width + 1)))
        for slot in rng.permutation(size)
    ]
    seqs[0] = (0, width, width) if sizes else seqs[0]
    n, seed = launched(rng, sizes, size), int(rng.integers(2**31))
    return _case("random", seqs, n=n, width=width, vocab=vocab, seed=seed)


CONTRACT = REGISTRY.add(
    Contract(
        name="mask_logits",
        version=1,
        unit="seqs",
        args=MaskLogitsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Forbid the tokens that a constraint does not allow at each place of a window.",
        source="Token bitmasks of grammar-guided decoding, as xgrammar and llguidance make them, one a window row.",
        equivalent_mutants={
            "plus(slot_order)": "only the sign of a slot is read, and this leaves every sign as it is",
            "swap(logit_len,masked)": "only the smaller of the two is used",
            "reverse-all(B)": "a sequence names its own rows, so the order of sequences is free",
        },
        constraints=("32 * WM >= V",),
        feature="grammar",
        grows={"B": SLOTS, "W": WINDOW, "V": VOCABULARY},
    )
)
