"""Puts weights onto the device: canonical tensors are prepared once by the backend, and refilled in place later.

The engine loads with it at start-up and for `update_weights`. It keeps no canonical array and does not look into a weight.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import as_strided

from polydraft.backend import Weight
from polydraft.contracts.packing import Matrix, PackedWeight, Packing, pack, unpacked
from polydraft.device import DTYPES, Array
from polydraft.errors import CheckpointError
from polydraft.loading import Loading, unheard
from polydraft.models.block import PACKED_ROLES, Role, Tensor, laid_out
from polydraft.models.checkpoint import Weights
from polydraft.models.description import ModelDescription, block_weights
from polydraft.models.ranks import Share
from polydraft.plugins.kernel_table import BoundTable

Taken = Mapping[Role, Collection[str]]
"""The packings, by name, in which kernels take weights of a role."""
DRAFT_HEAD = "mtp.0.draft_head"
"""The rows of `lm_head` that score a reduced draft vocabulary."""


READERS: Final = min(8, os.cpu_count() or 1)
"""Threads that read canonical tensors."""
AHEAD_BYTES: Final = 1 << 30
"""Bytes of canonical tensors that may be read, or be in reading, beside the one that is used."""


class AsStored(Mapping[str, Matrix]):
    """The canonical tensors of a checkpoint; those that it stores in few bits as they are, where that can be had."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> Matrix:
        return self._weights[name] if self._weights.packing(name) is None else self._weights.packed(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class WithDraftHead(Mapping[str, Matrix]):
    """Canonical tensors, and those rows of `lm_head` that drafts are chosen by as one more."""

    def __init__(self, canonical: Mapping[str, Matrix], rows: Array, size: int) -> None:
        """`size`: rows of the head, of which the last are 0 where there are fewer `rows`."""
        self._canonical, self._rows, self._size = canonical, rows, size

    def __getitem__(self, name: str) -> Matrix:
        if name != DRAFT_HEAD:
            return self._canonical[name]
        whole = unpacked(self._canonical["lm_head"])
        head = np.zeros((self._size, whole.shape[1]), whole.dtype)
        head[: len(self._rows)] = whole[self._rows]
        return head

    def __iter__(self) -> Iterator[str]:
        yield from self._canonical
        yield DRAFT_HEAD

    def __len__(self) -> int:
        return len(self._canonical) + 1


class PackedAtLoad(Mapping[str, Matrix]):
    """Canonical tensors of which the matrices are packed as they are read. `errors`: of each that was read so far, by name, the
    root mean square of what packing changed over that of the matrix. Where rows overlap in memory, numbers of 8 bits do, too."""

    def __init__(
        self,
        canonical: Mapping[str, Matrix],
        model: ModelDescription,
        packing: Packing,
        ignored: Collection[str],
        cut: Mapping[str, Share] = MappingProxyType({}),
    ) -> None:
        """`ignored`: parts of the model (`PARTS`) whose matrices stay as they are; `cut`: what is kept of a matrix once it is
        packed, by name, all of it by default."""
        self._canonical, self._packing, self._roles, self._ignored = canonical, packing, roles(model), ignored
        self._cut = cut
        self.errors: dict[str, float] = {}

    def __getitem__(self, name: str) -> Matrix:
        value = self._canonical[name]
        if self._roles.get(name) not in PACKED_ROLES or part_of(name) in self._ignored or isinstance(value, PackedWeight):
            return value
        pooled = self._packing.number != "int4" and not self._packing.columns and name not in self._cut
        pool = _pool(value) if pooled else None
        matrix = value if pool is None else pool[None]
        packed = pack(matrix, self._packing)
        changed = packed.read()
        changed -= matrix
        self.errors[name] = float(np.linalg.norm(changed) / max(float(np.linalg.norm(matrix)), float(np.finfo(np.float32).tiny)))
        if name in self._cut:
            return self._cut[name].of_packed(packed)
        return packed if pool is None else _spread(packed, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._canonical)

    def __len__(self) -> int:
        return len(self._canonical)


def _pool(value: Array) -> Array | None:
    """The memory that a matrix or a stack spans whose rows overlap (what `polydraft bench --shape` gives); None of another."""
    each = value.itemsize
    if value.strides[-1] != each or not 0 < value.strides[-2] < value.shape[-1] * each or min(value.strides) < 0:
        return None
    last = sum((size - 1) * step for size, step in zip(value.shape, value.strides, strict=True)) // each
    return as_strided(value, (last + 1,), (each,), writeable=False)


def _spread(packed: PackedWeight, value: Array) -> PackedWeight:
    """A packed pool as the matrix that lies in it: rows overlap as before, and all have the scale of the pool."""
    strides = tuple(step // value.itemsize for step in value.strides)
    numbers = as_strided(packed.numbers, value.shape, strides, writeable=False)
    scales = np.full(packed.packing.scales_of(value.shape), packed.scales[0, 0], np.float32)
    return PackedWeight(packed.packing, value.shape, numbers, scales)


class InLeaves(Mapping[str, Matrix]):
    """Canonical tensors, those that are `declared` as summed over by leaf as the backend is given them."""

    def __init__(self, canonical: Mapping[str, Matrix], declared: Mapping[str, Tensor]) -> None:
        self._canonical, self._leaves = canonical, {name: one.leaves for name, one in declared.items() if one.leaves}

    def __getitem__(self, name: str) -> Matrix:
        value = self._canonical[name]
        return laid_out(unpacked(value), self._leaves[name]) if name in self._leaves else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._canonical)

    def __len__(self) -> int:
        return len(self._canonical)


def part_of(name: str) -> str:
    """The part of a model (`PARTS`) that a canonical tensor belongs to, "" for none of them."""
    return "head" if name in ("lm_head", DRAFT_HEAD) else "mtp" if name.startswith("mtp.") else ""


def packed_at_load(model: ModelDescription, ignored: Collection[str]) -> list[str]:
    """The matrices that `PackedAtLoad` packs, by name."""
    return [name for name, one in model.weights().items() if one.role in PACKED_ROLES and part_of(name) not in ignored]


def roles(model: ModelDescription) -> dict[str, Role]:
    """Role of each canonical tensor of a model for `prepare_weight`, as its modules declare them."""
    return {name: one.role for name, one in model.weights().items()} | {DRAFT_HEAD: "linear"}


def wanted(
    canonical: Mapping[str, Matrix], model: ModelDescription, *, drafting: Collection[str], own: Collection[str] = ()
) -> list[str]:
    """The tensors an engine needs: of the MTP head those of the layers that its proposer drafts with (`drafting`), and none of
    the blocks in `own`, which compute themselves. Both are given by prefix."""
    layers = {**model.layers, **(model.mtp.layers if model.mtp else {})}
    left_out = block_weights({prefix: layers[prefix] for prefix in own if prefix in layers}, model.hidden_size)
    kept = tuple(f"{prefix}." for prefix in drafting)
    return [name for name in canonical if name not in left_out and (not name.startswith("mtp.") or name.startswith(kept))]


def sizes(
    model: ModelDescription,
    names: Iterable[str],
    *,
    dtype: str,
    packing: Packing | None = None,
    ignored: Collection[str] = (),
    stored: Mapping[str, Packing] = MappingProxyType({}),
    taken: Taken = MappingProxyType({}),
) -> dict[str, int]:
    """Bytes of each named tensor in the activation dtype `dtype`, of those `stored` packed in their packing, of other matrices
    outside the parts `ignored` in `packing`, where a kernel takes it; 0 for what is made from others."""
    declared, each = model.weights(), DTYPES[dtype].itemsize

    def size(name: str) -> int:
        if name not in declared:
            return 0
        one = declared[name]
        made = packing if one.role in PACKED_ROLES and part_of(name) not in ignored else None
        kept = stored.get(name, made)
        if kept is not None and kept.name in taken.get(one.role, ()):
            return kept.nbytes(one.shape)
        return math.prod(one.shape) * each

    return {name: size(name) for name in names}


def prepare(
    table: BoundTable,
    canonical: Mapping[str, Matrix],
    nbytes: Mapping[str, int],
    roles: Mapping[str, Role],
    *,
    dtype: str,
    taken: Taken = MappingProxyType({}),
    loading: Loading = unheard,
) -> dict[str, Weight]:
    """Prepare each tensor of `nbytes` once, dequantised where no kernel takes its packing. `loading` is told how far that is."""
    weights, done, total = {}, 0, sum(nbytes.values())
    for name, value in read_ahead(canonical, nbytes):
        weights[name] = table.prepare_weight(roles[name], _as_taken(value, taken.get(roles[name], ())), dtype)
        done += nbytes[name]
        loading("weights", done, total)
    return weights


def read_ahead(canonical: Mapping[str, Matrix], nbytes: Mapping[str, int]) -> Iterator[tuple[str, Matrix]]:
    """Each tensor of `nbytes`, in order, while others are read: `AHEAD_BYTES` of them, counted as twice what is kept of each,
    since a canonical tensor is float32. Raises what reading one raises, in that order too."""
    left, reading = deque(nbytes), deque[tuple[str, Future[Matrix], int]]()
    with ThreadPoolExecutor(READERS) as pool:
        try:
            while left or reading:
                ahead = sum(size for _, _, size in reading)
                while left and (not reading or (len(reading) < READERS and ahead + 2 * nbytes[left[0]] <= AHEAD_BYTES)):
                    name = left.popleft()
                    ahead += 2 * nbytes[name]
                    reading.append((name, pool.submit(canonical.__getitem__, name), 2 * nbytes[name]))
                name, future, _ = reading.popleft()
                yield name, future.result()
                del future
        finally:
            for _, future, _ in reading:
                future.cancel()


def _as_taken(value: Matrix, packings: Collection[str]) -> Matrix:
    """The value as a kernel takes it that takes these packings."""
    return value if isinstance(value, PackedWeight) and value.packing.name in packings else unpacked(value)


@dataclass(frozen=True)
class Update:
    """Prepared weights by name, and the values that are to take their place."""

    weights: dict[str, Weight]
    canonical: Mapping[str, Matrix]
    roles: Mapping[str, Role]
    taken: Taken = field(default_factory=dict)

    @property
    def nbytes(self) -> dict[str, int]:
        """Of each weight, as it is kept."""
        return {name: weight.nbytes for name, weight in self.weights.items()}


def read_all(updates: Iterable[Update]) -> None:
    """Read, and so check, every value, before anything is changed: a bad tensor leaves the old weights whole."""
    for update in updates:
        for _ in read_ahead(update.canonical, update.nbytes):
            pass


def refill(table: BoundTable, updates: Iterable[Update], *, dtype: str) -> bool:
    """Refill weights in place, one value at a time; True when some weight came to lie at another address."""
    moved = False
    for update in updates:
        for name, read in read_ahead(update.canonical, update.nbytes):
            previous, value = update.weights[name], _as_taken(read, update.taken.get(update.roles[name], ()))
            update.weights[name] = fresh = table.prepare_weight(update.roles[name], value, dtype, previous)
            moved |= fresh is not previous
    return moved


def check_same_model(old: ModelDescription, new: ModelDescription) -> None:
    """Weights can only be replaced by those of the same model: everything but its name, file dtype and notes must agree."""
    aside = {"name": "", "dtype": "", "mtp_note": "", "eos_token_ids": (), "bos_token_id": None, "pad_token_id": None}
    if replace(old, **aside) != replace(new, **aside):  # type: ignore[arg-type]
        raise CheckpointError(
            f"weights of {new.name} ({new.architecture}) do not fit the running {old.name} ({old.architecture}): their "
            "configurations differ; start another engine for another model"
        )
