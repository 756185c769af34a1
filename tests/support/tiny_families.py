"""Three model families that only tests have, so that every switch of an MTP head is exercised by some tiny checkpoint.

It has the families and the hook that returns them; engines load this file with `plugins=(tiny_families.__file__,)`, and `tiny.py`
uses it for the oracle's registry. The families only describe: weights come from `tiny.py`.
"""

from __future__ import annotations

from typing import Any

from polydraft import hookimpl
from polydraft.models.family import Family, MtpLayout

_NAMES: dict[str, Any] = {
    "prefix": "model.mtp_layers.{i}.",
    "emb_norm": "token_layernorm.weight",
    "hid_norm": "hidden_layernorm.weight",
    "proj": "input_proj.weight",
    "final_norm_name": "final_layernorm.weight",
}

MIRRORED = Family(
    architecture="TinyMirrored",
    qkv_bias=True,
    norm_plus_one=True,
    mtp=MtpLayout(**_NAMES, order="embedding_first", feed="post", final_norm="own", recycle="post"),
)
"""Order, feed and recycling of MiMo's head the other way round, and norms that multiply by 1 + weight."""

SHARED = Family(
    architecture="TinyShared",
    qk_norm=True,
    rope_style="interleaved",
    mtp=MtpLayout(**_NAMES, order="hidden_first", feed="pre", final_norm="target", recycle="post", mask_first_position=True),
)
"""The target's final norm for the head, a masked first position, and a body unlike Qwen2's."""

PARTIAL = Family(
    architecture="TinyPartial",
    qkv_bias=True,
    partial_rotary_factor=1.0,
    mtp=MtpLayout(**_NAMES, order="hidden_first", feed="pre", final_norm="own", recycle="pre"),
)
"""Heads of which a share rotates, where the configuration says so; MiMo in all else."""


@hookimpl
def polydraft_models() -> tuple[Family, ...]:
    return MIRRORED, SHARED, PARTIAL
