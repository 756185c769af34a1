"""Defines `argmax_pair`: the greedy choice of a token from a vocabulary that ranks have shared out.

The greedy verifier and the proposer launch it in the place of `argmax`. A rank sends one pair a row, its highest logit and the id
of that, in the place of its logits. Equal logits go to the lowest id, and broken rows choose NO_TOKEN, as with `argmax`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import COLLECTIVES, Args, Array, Case, Contract, param, tensor
from polydraft.contracts.collectives._step import STEP_MUTANTS, step_number
from polydraft.contracts.kernels.argmax import highest, spaced
from polydraft.contracts.sizes import SMALL, Sizes
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN


class ArgmaxPairV1(Args):
    """Arguments of `argmax_pair`, of one rank."""

    logits: Buffer = tensor("N V", "f32", "Logits of this rank's tokens: column c of rank g is of the token g * V + c.")
    row_slot: Buffer = tensor("N", "i32", "Slot of each row, the same on all ranks; negative: a row that carries nothing.")
    num_valid: int = param("Tokens of the whole vocabulary; columns of tokens at and beyond it are padding, whatever they hold.")
    tokens: Buffer = tensor(
        "N", "i32", "Highest logit's id, the lowest of equals; NO_TOKEN for a row with NaN, +inf or nothing but -inf.",
        access="out", pad=NO_TOKEN,
    )  # fmt: skip
    step: Buffer = step_number()


def golden(a: Any, n: int) -> None:
    """Join the ranks' columns and scan row by row."""
    for rank in range(len(a.logits)):
        for r in range(n):
            row = np.concatenate([share[r] for share in a.logits])[: a.num_valid]
            a.tokens[rank, r] = highest(row) if a.row_slot[rank, r] >= 0 else NO_TOKEN


def _case(name: str, logits: Array, n: int, *, ranks: int, slots: Sequence[int] | None = None, padding: float = 0.0) -> Case:
    """`logits` [rows, tokens] of all ranks, the last of which are filled up with `padding`."""
    rows, tokens = logits.shape
    share = -(-tokens // ranks)
    whole = np.full((rows, share * ranks), padding, np.float32)
    whole[:, :tokens] = logits
    row_slot = np.array(range(rows) if slots is None else slots, np.int32)
    arrays = {
        "logits": np.ascontiguousarray(whole.reshape(rows, ranks, share).transpose(1, 0, 2)),
        "row_slot": np.tile(row_slot, (ranks, 1)), "step": np.full((ranks, 1), 7, np.int32),
    }  # fmt: skip
    return Case(name, arrays, {"num_valid": tokens}, n, {"tokens": ((ranks, rows), "i32")})


def cases() -> Iterator[Case]:
    """Named cases of `argmax_pair`."""
    rng = np.random.default_rng(33)
    logits = spaced(rng, 7, 12)
    for ranks in (1, 2, 3, 4):
        yield _case(f"ranks_{ranks}", logits, 6, ranks=ranks)
    yield _case("several_rows_a_slot", logits, 6, ranks=4, slots=[2, 2, 0, 0, 0, 1, 1])
    yield _case("pad_rows_between_valid_rows", logits, 6, ranks=2, slots=[-1, 0, -4, 1, -1, 2, 3])
    ties = np.zeros((5, 12), np.float32)
    ties[1, [3, 11]], ties[2, [0, 11]], ties[3, 5:9], ties[4] = 2.5, 1.0, 0.5, -7.0
    yield _case("lowest_id_of_equals_within_and_across_ranks", ties, 5, ranks=4)
    yield _case("padding_never_wins", logits - np.float32(60), 7, ranks=5, padding=9.0)
    yield _case("broken_padding_breaks_nothing", logits, 7, ranks=5, padding=np.nan)
    yield _case("a_rank_of_padding_alone", logits[:, :5], 7, ranks=4, padding=np.inf)
    close = -np.abs(logits[:4])
    for row, value in zip(close, np.array([1.0, 1e-9, 1e-20, 1e9], np.float32), strict=True):
        row[[3, 8]] = value, np.nextafter(value, np.float32(np.inf))
    yield _case("the_last_digit_decides", close, 4, ranks=4)
    broken = logits.copy()
    broken[0, 4], broken[1, 0], broken[2, 11], broken[4] = np.nan, np.nan, np.nan, np.nan
    yield _case("nan_at_any_rank_chooses_nothing", broken, 6, ranks=4)
    forbidden = np.full((5, 12), -np.inf, np.float32)
    forbidden[1, 7], forbidden[2, [2, 9]], forbidden[4, 3] = -3e38, [-5, -4], np.inf
    yield _case("forbidden_tokens_and_overflow", forbidden, 5, ranks=3)
    yield _case("as_many_tokens_as_models_have", spaced(rng, 3, 152_064), 2, ranks=2)
    yield _case("as_many_rows_as_a_step_has", spaced(rng, 257, 9), 256, ranks=3)
    yield _case("all_values_below_minus_one", logits - np.float32(50), 6, ranks=2)
    yield _case("nothing_to_do", logits, 0, ranks=2)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random rows of two to five ranks, a few without a slot, with NaN or with an exact tie of the best."""
    del sizes
    ranks, rows, vocab = (int(v) for v in rng.integers((2, 1, 2), (6, 9, 70)))
    logits = spaced(rng, rows, vocab)
    for row in logits:
        kind, at = rng.integers(6), rng.integers(vocab)
        row[at] = np.nan if kind == 0 else row.max() if kind == 1 else row[at]
    slots = np.where(rng.random(rows) < 0.2, -1, rng.integers(0, 6, rows))
    return _case("random", logits, int(rng.integers(1, rows + 1)), ranks=ranks, slots=[int(s) for s in slots])


CONTRACT = COLLECTIVES.add(
    Contract(
        name="argmax_pair",
        version=1,
        unit="any",
        args=ArgmaxPairV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Id of the highest logit of all ranks; a row that cannot choose gives NO_TOKEN.",
        source="Greedy decoding; pairs in the place of logits as in vLLM, pull requests 34049 and 39419.",
        equivalent_mutants={
            **STEP_MUTANTS,
            "plus(row_slot)": "only the sign of a slot is read, and this leaves every sign as it is",
            "reverse(row_slot)": "slots are the same on all ranks, so their order is none",
        },
        constraints=("1 <= num_valid",),
    )
)
