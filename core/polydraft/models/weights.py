"""Puts weights onto the device: canonical tensors are prepared once by the backend, and refilled in place later.

The engine loads with it at start-up and for `update_weights`. It keeps no canonical array and does not look into a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from polydraft.backend import Weight
from polydraft.device import DTYPES, Array
from polydraft.errors import CheckpointError
from polydraft.models.block import Role
from polydraft.models.description import ModelDescription, block_weights
from polydraft.plugins.kernel_table import BoundTable

Loading = Callable[[int, int], None]
"""Called while weights are loaded, with the bytes that are on the device and those of all, in the dtype that is kept."""
DRAFT_HEAD = "mtp.0.draft_head"
"""The rows of `lm_head` that score a reduced draft vocabulary."""


class WithDraftHead(Mapping[str, Array]):
    """Canonical tensors, and those rows of `lm_head` that drafts are chosen by as one more."""

    def __init__(self, canonical: Mapping[str, Array], ids: Array) -> None:
        self._canonical, self._ids = canonical, ids

    def __getitem__(self, name: str) -> Array:
        if name != DRAFT_HEAD:
            return self._canonical[name]
        rows: Array = np.ascontiguousarray(self._canonical["lm_head"][self._ids])
        return rows

    def __iter__(self) -> Iterator[str]:
        yield from self._canonical
        yield DRAFT_HEAD

    def __len__(self) -> int:
        return len(self._canonical) + 1


def roles(model: ModelDescription) -> dict[str, Role]:
    """Role of each canonical tensor of a model for `prepare_weight`, as its modules declare them."""
    return {name: one.role for name, one in model.weights().items()} | {DRAFT_HEAD: "linear"}


def wanted(
    canonical: Mapping[str, Array], model: ModelDescription, *, drafting: Collection[str], own: Collection[str] = ()
) -> list[str]:
    """The tensors an engine needs: of the MTP head those of the layers that its proposer drafts with (`drafting`), and none of
    the blocks in `own`, which compute themselves. Both are given by prefix."""
    layers = {**model.layers, **(model.mtp.layers if model.mtp else {})}
    left_out = block_weights({prefix: layers[prefix] for prefix in own if prefix in layers}, model.hidden_size)
    kept = tuple(f"{prefix}." for prefix in drafting)
    return [name for name in canonical if name not in left_out and (not name.startswith("mtp.") or name.startswith(kept))]


def sizes(model: ModelDescription, names: Iterable[str], *, dtype: str) -> dict[str, int]:
    """Bytes of each named tensor in the activation dtype `dtype`; 0 for what is made from others."""
    declared, each = model.weights(), DTYPES[dtype].itemsize
    return {name: math.prod(declared[name].shape) * each if name in declared else 0 for name in names}


def prepare(
    table: BoundTable,
    canonical: Mapping[str, Array],
    nbytes: Mapping[str, int],
    roles: Mapping[str, Role],
    *,
    dtype: str,
    loading: Loading = lambda done, total: None,
) -> dict[str, Weight]:
    """Prepare each tensor of `nbytes` once; one canonical array is alive at a time. `loading` is told how far that is."""
    weights, done, total = {}, 0, sum(nbytes.values())
    for name, size in nbytes.items():
        weights[name] = table.prepare_weight(roles[name], canonical[name], dtype)
        done += size
        loading(done, total)
    return weights


def refill(
    table: BoundTable, canonical: Mapping[str, Array], weights: dict[str, Weight], roles: Mapping[str, Role], *, dtype: str
) -> bool:
    """Refill `weights` in place from other values; True when some weight came to lie at another address.

    Every value is read (and so checked) before the first is written: a bad tensor leaves the old weights whole."""
    for name in weights:
        canonical[name]
    moved = False
    for name, previous in weights.items():
        fresh = table.prepare_weight(roles[name], canonical[name], dtype, previous)
        moved |= fresh is not previous
        weights[name] = fresh
    return moved


def check_same_model(old: ModelDescription, new: ModelDescription) -> None:
    """Weights can only be replaced by those of the same model: everything but its name, file dtype and notes must agree."""
    aside = {"name": "", "dtype": "", "mtp_note": "", "eos_token_ids": (), "bos_token_id": None, "pad_token_id": None}
    if replace(old, **aside) != replace(new, **aside):  # type: ignore[arg-type]
        raise CheckpointError(
            f"weights of {new.name} ({new.architecture}) do not fit the running {old.name} ({old.architecture}): their "
            "configurations differ; start another engine for another model"
        )
