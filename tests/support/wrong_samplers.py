"""The classic wrong samplers of speculative decoding, as kernels that a backend might have.

Each has one or two faulty kernels, by name; all of them put out tokens that look right. The exact tests of the rejection
contracts and the test of the engine's distribution have to detect them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from polydraft.contracts.kernels import verify_rejection
from polydraft.reference import rejection
from polydraft.sentinels import Phase

Kernel = Callable[[Any, int], None]


def recovered_from_p(a: Any, n: int) -> None:
    """Behind a rejected draft, draw from p instead of from what p has more than q."""
    with mock.patch.object(verify_rejection, "leftover", lambda p, q: p):
        verify_rejection.golden(a, n)


def one_hot_on_soft_drafts(a: Any, n: int) -> None:
    """Accept with p(x), as if the draft were certain, and still take q off behind a rejected one."""
    uniforms = np.array(a.uniforms, np.float64)
    for i, slot in enumerate(a.slot_order[:n]):
        decodes = a.draft_probs is not None and slot >= 0 and a.phase[slot] == Phase.DECODE
        for j in range(a.logit_len[i] - 1 if decodes else 0):
            uniforms[a.logit_start[i] + j] /= max(a.draft_probs[slot, j, a.drafts[slot, j]], 1e-30)
    verify_rejection.golden(SimpleNamespace(**{**vars(a), "uniforms": uniforms}), n)


def always_accept(a: Any, n: int) -> None:
    """No draft is rejected."""
    verify_rejection.golden(SimpleNamespace(**{**vars(a), "uniforms": np.full_like(a.uniforms, -1.0)}), n)


VERIFIERS: Mapping[str, Kernel] = {
    "recovered token from p": recovered_from_p,
    "one-hot rule on soft drafts": one_hot_on_soft_drafts,
    "always accept": always_accept,
}
"""Wrong `verify_rejection`, by name."""


def q_before_filtering() -> dict[str, Kernel]:
    """Drafts are drawn through the filters, but what is filed of them is the distribution before."""
    last = np.empty((0, 0), np.float32)

    def filter_probs(a: Any, n: int) -> None:
        nonlocal last
        z = a.logits[:n] / np.maximum(a.temperature[np.maximum(a.row_slot[:n], 0)], 1e-9)[:, None]
        shares = np.exp(z - z.max(axis=1, keepdims=True))
        last = shares / shares.sum(axis=1, keepdims=True)
        rejection.filter_probs(a, n)

    def draw_draft(a: Any, n: int) -> None:
        rejection.draw_draft(a, n)
        rows = np.flatnonzero(a.row_slot[:n] >= 0)
        a.draft_probs[a.row_slot[rows], a.draft_len[a.row_slot[rows]]] = last[rows]

    return {"filter_probs": filter_probs, "draw_draft": draw_draft}


def wrong_kernels(name: str) -> dict[str, Kernel]:
    """What a backend with this fault offers, by contract."""
    return q_before_filtering() if name == "q before filtering" else {"verify_rejection": VERIFIERS[name]}


NAMES = (*VERIFIERS, "q before filtering")
"""All of them."""
