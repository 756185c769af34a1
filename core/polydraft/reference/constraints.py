"""The reference backend's masking of logits by constraints.

The kernel table lists it. It does not look at what a token means.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polydraft.reference.provider import Kernel, plain


def mask_logits(a: Any, n: int) -> None:
    """Unpack the masks of all rows that have one, and forbid at once."""
    places = np.minimum(a.masked[:n], a.logit_len[:n]) * (a.slot_order[:n] >= 0)
    sequence, place = (np.arange(a.masks.shape[1]) < places[:, None]).nonzero()
    if not sequence.size:
        return
    rows = a.logit_start[sequence] + place
    masks = np.ascontiguousarray(a.masks[sequence, place]).astype("<u4").view(np.uint8)
    allowed = np.unpackbits(masks, axis=1, count=a.logits.shape[1], bitorder="little")
    a.logits[rows] = np.where(allowed, a.logits[rows], -np.inf)


KERNELS: dict[str, Kernel] = {"mask_logits": plain(mask_logits)}
"""Contract to kernel."""
