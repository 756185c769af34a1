"""Defines `embed`: look up the embedding row of every packed token.

Target and draft passes launch it first. It never scales an embedding and never checks an id beyond its sign.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, opaque, tensor
from polydraft.contracts.sizes import HIDDEN, PASS_ROWS, SMALL, VOCABULARY, Sizes, fitted, launched
from polydraft.device import Buffer


class EmbedV1(Args):
    """Arguments of `embed`. Precondition: every id is below V."""

    ids: Buffer = tensor("N", "i32", "Token id of each row; NO_TOKEN (any negative id) for a row that carries nothing.")
    weight: Any = opaque("weight", "Embedding table.", shape="V H")
    out: Buffer = tensor("N H", "act", "The id's row of the table, moved bit for bit.", access="out", pad=0.0)


def golden(a: Any, n: int) -> None:
    """Copy one table row a token; a negative id gives a zero row."""
    for r in range(n):
        a.out[r] = a.weight[a.ids[r]] if a.ids[r] >= 0 else 0.0


def _case(name: str, ids: Sequence[int], table: Array, n: int) -> Case:
    out = ((len(ids), table.shape[1]), "act")
    return Case(name, {"ids": np.array(ids, np.int32), "weight": table}, {}, n, {"out": out})


def cases() -> Iterator[Case]:
    """Named cases of `embed`."""
    table = np.random.default_rng(0).standard_normal((11, 5), np.float32)
    yield _case("both_ends_of_the_vocabulary", [0, 10, 10, 0, 3], table, 4)
    yield _case("pad_rows_between_valid_rows", [-1, 7, -1, -9, 2, -1, 4], table, 6)
    yield _case("nothing_to_do", [3, 4], table, 0)
    yield _case("every_row_used", [9, 8, 7], table, 3)
    broken = table.copy()
    broken[6] = np.nan
    yield _case("nan_row_of_the_table_is_moved", [5, 6, 7, 1], broken, 3)
    yield _case("all_padding", [-1, -1, -1, 2], table, 3)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """A random table and random ids, a quarter of them negative."""
    vocab, hidden, rows = (int(v) for v in rng.integers((2, 1, 1), (40, 20, 12)))
    vocab, hidden, rows = fitted(sizes, V=vocab, H=hidden, N=rows)
    ids = np.where(rng.random(rows) < 0.25, -rng.integers(1, 5, rows), rng.integers(0, vocab, rows))
    ids[0] = vocab - 1 if sizes else ids[0]
    table = rng.standard_normal((vocab, hidden), np.float32)
    return _case("random", [int(v) for v in ids], table, launched(rng, sizes, rows))


CONTRACT = REGISTRY.add(
    Contract(
        name="embed",
        version=1,
        unit="any",
        args=EmbedV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Embedding lookup of packed token ids; negative ids give zero rows.",
        source="Table lookup.",
        feature="dense",
        compute=True,
        grows={"N": PASS_ROWS, "H": HIDDEN, "V": VOCABULARY},
        independent=("N", "H"),
    )
)
