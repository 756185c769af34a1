"""Defines `combine_draft_inputs`: normalise embedding and hidden state and lay them side by side.

The MTP block launches it at the start of every draft pass, before its projection. It never projects and never looks at
slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, opaque, param, tensor
from polydraft.contracts.kernels.rms_norm import normalize
from polydraft.contracts.sizes import HIDDEN, PASS_ROWS, SMALL, Sizes, fitted, launched, several
from polydraft.device import Buffer


class CombineDraftInputsV1(Args):
    """Arguments of `combine_draft_inputs`."""

    embedding: Buffer = tensor("N H", "act", "Embedding of the token after each row's position.")
    hidden: Buffer = tensor("N H", "act", "Target or recycled hidden state of each row.")
    emb_norm: Any = opaque("weight", "RMSNorm gain of the embedding half.", shape="H")
    hid_norm: Any = opaque("weight", "RMSNorm gain of the hidden half.", shape="H")
    positions: Buffer = tensor("N", "i32", "Absolute position of each row; read only with mask_first_position.")
    out: Buffer = tensor("N D", "act", "Both normalised halves side by side, D = 2 * H.", access="out")
    eps: float = param("RMSNorm epsilon of both norms.")
    plus_one: bool = param("The gains are 1 + weight instead of weight.")
    order: Literal["hidden_first", "embedding_first"] = param(
        "Which half is the left one: hidden_first is MiMo's, embedding_first that of DeepSeek, GLM, ERNIE and Qwen."
    )
    mask_first_position: bool = param("Replace the embedding of rows at position 0 by zeros before its norm.")


def combine(a: Any, r: int, emb_norm: Array, hid_norm: Array) -> Array:
    """Return row `r`: mask, two norms, concatenate."""
    masked = a.mask_first_position and a.positions[r] == 0
    embedding = np.zeros_like(a.embedding[r]) if masked else a.embedding[r]
    left = normalize(embedding, emb_norm, eps=a.eps, plus_one=a.plus_one)
    right = normalize(a.hidden[r], hid_norm, eps=a.eps, plus_one=a.plus_one)
    if a.order == "hidden_first":
        left, right = right, left
    return np.concatenate([left, right])


def golden(a: Any, n: int) -> None:
    """Combine row by row."""
    for r in range(n):
        a.out[r] = combine(a, r, a.emb_norm, a.hid_norm)


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """Magnitude of each product, with 1 + weight counted as 1 + |weight|: that sum may cancel."""
    magnitude = np.zeros((len(a.hidden), 2 * a.hidden.shape[1]))
    for r in range(n):
        magnitude[r] = np.abs(combine(a, r, np.abs(a.emb_norm), np.abs(a.hid_norm)))
    return {"out": magnitude}


def _case(
    name: str, n: int, *, seed: int = 7, rows: int = 6, width: int = 5, factor: float = 1.0,
    order: str = "hidden_first", plus_one: bool = False, mask: bool = False, eps: float = 1e-5,
) -> Case:  # fmt: skip
    """Random rows at positions 0, 1, 0, 1, 2, ...: a chunk that starts a text beside rows further on."""
    rng = np.random.default_rng(seed)
    embedding, hidden = rng.standard_normal((2, rows, width), np.float32) * np.float32(factor)
    emb_norm, hid_norm = rng.standard_normal((2, width), np.float32)
    positions = np.array([0, 1, *range(rows)][:rows], np.int32)
    arrays = {"embedding": embedding, "hidden": hidden, "emb_norm": emb_norm, "hid_norm": hid_norm}
    params = {"eps": eps, "plus_one": plus_one, "order": order, "mask_first_position": mask}
    return Case(name, {**arrays, "positions": positions}, params, n, {"out": ((rows, 2 * width), "act")})


def cases() -> Iterator[Case]:
    """Named cases of `combine_draft_inputs`."""
    yield _case("hidden_half_first", 5)
    yield _case("embedding_half_first", 5, order="embedding_first")
    yield _case("first_position_hides_its_embedding", 5, mask=True)
    yield _case("first_position_masked_on_the_left", 5, mask=True, order="embedding_first")
    yield _case("gains_are_one_plus_weight", 5, plus_one=True, mask=True)
    yield _case("epsilon_outweighs_the_squares", 5, factor=1e-3)
    yield _case("one_column", 4, width=1, mask=True)
    yield _case("every_row_used", 6, order="embedding_first")
    yield _case("nothing_to_do", 0)
    broken = _case("nan_stays_in_its_half", 5, mask=True)
    # Row 2 is at position 0: what the mask hides must not come through, not even as 0 * NaN.
    broken.arrays["embedding"][2], broken.arrays["hidden"][3] = np.nan, np.nan
    yield broken


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random rows and switches."""
    rows, width = (int(v) for v in rng.integers((1, 1), (8, 12)))
    rows, width = fitted(sizes, N=several(sizes, rows), H=width)
    return _case(
        "random", launched(rng, sizes, rows), seed=int(rng.integers(1 << 30)), rows=rows, width=width,
        order=str(rng.choice(["hidden_first", "embedding_first"])), plus_one=bool(rng.integers(2)),
        mask=bool(rng.integers(2)), factor=float(10.0 ** rng.uniform(-2, 2)),
    )  # fmt: skip


CONTRACT = REGISTRY.add(
    Contract(
        name="combine_draft_inputs",
        version=1,
        unit="any",
        args=CombineDraftInputsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="RMSNorm of embedding and hidden state, concatenated in the family's order.",
        source="DeepSeek-V3 technical report 2024, section 2.2 (multi-token prediction); MiMo for the reverse order.",
        tolerance={"out": 4.0},
        scale=scale,
        sums={"out": "H"},
        deterministic="run-to-run",
        constraints=("D == 2 * H", 'order in ("hidden_first", "embedding_first")', "eps > 0"),
        feature="dense",
        grows={"N": PASS_ROWS, "H": HIDDEN},
        independent=("N",),
    )
)
