"""The sizes that products have, and those of a few published models: what contracts are tried at beside small cases.

A contract names in `grows` which of its sizes can be large, each with one of the ladders below; `large.py` builds the cases. The
steps lie just behind the borders that kernels have (a warp, a tile, 1024 threads, 65,536) and at the sizes of real models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

Sizes = Mapping[str, int]
"""Sizes that are asked of a case, by shape symbol or parameter."""
SMALL: Final[Sizes] = {}
"""Nothing asked: every size is drawn."""


@dataclass(frozen=True)
class Model:
    """The sizes of a published model, and of a step that serves it; all are counts."""

    hidden: int
    feed_forward: int
    vocabulary: int
    heads: int
    head_dim: int
    rows: int = 64
    slots: int = 16
    drafts: int = 3
    context: int = 4099
    blocks: int = 129


MODELS: Final[Mapping[str, Model]] = {
    "qwen2.5-0.5b": Model(896, 4864, 151_936, 14, 64),
    "mimo-7b": Model(4096, 11_008, 151_680, 32, 128),
    "llama-3-70b": Model(8192, 28_672, 128_256, 64, 128),
}
"""As their published configurations have them."""


@dataclass(frozen=True)
class Ladder:
    """The sizes, ascending, at which one dimension is tried while the others stay small. `of`: what it is in a `Model`; "" for
    what models do not decide."""

    steps: tuple[int, ...]
    of: str = ""


ROWS: Final = Ladder((33, 65, 129, 257, 512), "rows")
PASS_ROWS: Final = Ladder((*ROWS.steps, 2049), "rows")
"""Of kernels that every row of a pass goes through, rows of prompts too, and in which no row looks at another."""
SLOTS: Final = Ladder((9, 17, 33, 65, 300), "slots")
DRAFTS: Final = Ladder((5, 8, 32), "drafts")
WINDOW: Final = Ladder((6, 9, 33))
HIDDEN: Final = Ladder((257, 1025, 2560, 5120, 8192), "hidden")
FEED_FORWARD: Final = Ladder((257, 1025, 4864, 11_008, 28_672), "feed_forward")
INPUTS: Final = Ladder(FEED_FORWARD.steps, "hidden")
"""Of a matrix; of the largest one that a model has, its head, they are the hidden size."""
VOCABULARY: Final = Ladder((1031, 32_000, 65_537, 152_064), "vocabulary")
HEADS: Final = Ladder((14, 28, 64), "heads")
KV_HEADS: Final = Ladder((4, 8, 16))
"""Models decide them too; beside all their other sizes they would make a case that is cut to a fraction of them."""
HEAD_DIM: Final = Ladder((64, 128, 256), "head_dim")
EXPERTS: Final = Ladder((64, 160, 256, 512))
CHOSEN: Final = Ladder((6, 8, 10))
"""Experts of a row."""
EXPERT_WIDTH: Final = Ladder((257, 768, 1408, 2048))
CONTEXT: Final = Ladder((1031, 4099, 8192, 131_101), "context")
"""Positions of a text."""
BLOCKS: Final = Ladder((65, 129, 513, 8209), "blocks")
"""Entries of a block table: contexts of up to 131,000 positions, in blocks of 16."""
BLOCK_SIZE: Final = Ladder((32, 64, 128))
"""Positions of a block."""
POOL: Final = Ladder((4200, 65_700))
"""Blocks of a cache, of which the last are granted: their ids have 13 and 17 bits."""
TABLE: Final = Ladder((17, 65, 300))
"""Entries of a table that a request brings: stop tokens, biases, words."""
TOP: Final = Ladder((6, 21, 129))
"""Columns of log probabilities."""
WORDS: Final = Ladder((1025, 65_537))
"""Words that a step stages."""
CACHED: Final[Mapping[str, Ladder]] = {
    "N": ROWS,
    "B": SLOTS,
    "MB": BLOCKS,
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "block_size": BLOCK_SIZE,
    "num_blocks": POOL,
}
"""What grows in contracts of heads and a cache."""

MANY_TOKENS: Final = 1024
"""Vocabularies beyond it are those of models: rows over them cost milliseconds each, and only few tokens of a row matter."""
SEVERAL, FEW = 12, 3
"""Rows of a large case: at least, and of one with many tokens."""


def several(sizes: Sizes, drawn: int) -> int:
    """The number of rows of a case: the one that was drawn, unless some size is asked for."""
    if sizes.get("V", 0) > MANY_TOKENS:
        return FEW
    return max(drawn, SEVERAL) if sizes else drawn


def launched(rng: np.random.Generator, sizes: Sizes, rows: int, *, least: int = 1) -> int:
    """A launch length for a case of so many rows: any, of a large case three quarters of them at least."""
    return int(rng.integers(max(least, -(-3 * rows // 4)) if sizes else least, rows + 1))


def fitted(sizes: Sizes, **drawn: int) -> tuple[int, ...]:
    """The sizes that were drawn, in order, save for those that are asked for."""
    return tuple(int(sizes.get(name, size)) for name, size in drawn.items())


def named(sizes: Sizes) -> str:
    """What a case of these sizes is called."""
    return "+".join(f"{symbol}-{size}" for symbol, size in sizes.items())
