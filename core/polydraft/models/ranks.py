"""The share of a model that one of several ranks keeps: its description, and its part of each weight.

The engine of a rank is built from a share as it would be from a model; blocks say themselves what a share of them is
(`Kind.of_ranks`). Every rank has the same description and other weights.

    rank r of N keeps, along the axis that a weight's `split` names, of each of its parts: piece r * P // N of the P pieces that a
    share's size makes of the whole. P is N, or a divisor of it where several ranks keep the same (key-value heads). Where pieces
    reach beyond the whole (the vocabulary), the last ones end in zeros.

Where texts have to be the same for every number of ranks, a sum over what ranks share out is made of `LEAVES` terms, the leaves
of one balanced binary tree, or of as many of them as divide evenly what is shared out (`Kind.in_leaves`). A rank has a run of
them and sums these, which is a subtree; the collective `all_reduce` goes on from there. One device has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.contracts.packing import MIDDLE, Matrix, PackedWeight, Packing, stacked
from polydraft.device import Array
from polydraft.errors import CapabilityError
from polydraft.models.block import Block, Role, Tensor
from polydraft.models.checkpoint import Weights
from polydraft.models.description import ModelDescription

LEAVES: Final = 4
"""Terms at most of a sum over what ranks share out. Numbers of ranks that divide it write the same texts."""


def in_leaves(model: ModelDescription, *, whole_experts: bool = False) -> ModelDescription:
    """The description whose sums have leaves, experts in runs or by their features as ranks would share them out. Halves of kinds
    that do not say how stay as they are."""
    return replace(_changed(model, lambda _, block: _in_leaves(block, whole_experts)), leaves=True)


def _in_leaves(block: Block, whole_experts: bool) -> Block:
    def change(half: Any) -> Any:
        way = getattr(half, "in_leaves", None)
        way = getattr(half, "experts_in_leaves", way) if whole_experts else way
        return half if way is None else way(LEAVES)

    return replace(block, mixer=change(block.mixer), feed_forward=change(block.feed_forward))


def without_leaves(model: ModelDescription) -> str:
    """The first half whose kind does not say how its sum is taken by leaf, with its layer, as a clause; "" if there is none."""
    for prefix, block in (model.layers | (model.mtp.layers if model.mtp else {})).items():
        for half in (block.mixer, block.feed_forward):
            if not hasattr(half, "in_leaves"):
                return f"{prefix} has {type(half).__name__}, which does not say how its sum is taken by leaf"
    return ""


def _changed(model: ModelDescription, change: Callable[[str, Block], Block]) -> ModelDescription:
    """The model with every block of it and its MTP head changed; equal blocks stay one."""
    changed: dict[Block, Block] = {}

    def each(prefix: str, block: Block) -> Block:
        if block not in changed:
            changed[block] = change(prefix, block)
        return changed[block]

    blocks = tuple(each(prefix, block) for prefix, block in model.layers.items())
    mtp = model.mtp
    if mtp is not None:
        mtp = replace(mtp, blocks=tuple(each(prefix, block) for prefix, block in mtp.layers.items()))
    return replace(model, blocks=blocks, mtp=mtp)


def of_ranks(model: ModelDescription, num_ranks: int, *, whole_experts: bool = False) -> ModelDescription:
    """The description of one rank's share of `model`, experts whole or split like other networks; the model itself where there
    is one rank. Raises `CapabilityError` with a clause for what cannot be shared out."""
    if num_ranks == 1:
        return model
    if model.vocab_size < num_ranks:
        raise CapabilityError(f"{model.vocab_size} tokens are fewer than ranks")
    if model.hidden_size % num_ranks:
        raise CapabilityError(f"{model.hidden_size} features of a hidden row cannot be shared out evenly")
    shares = _changed(model, lambda prefix, block: _block(prefix, block, num_ranks, whole_experts))
    return replace(shares, ranks=num_ranks)


def alike(model: ModelDescription, blocks: Mapping[str, Block]) -> dict[str, Block]:
    """Blocks of another model, by prefix, with sums by leaf and shared out as those of `model` are. Raises `CapabilityError` with
    a clause for what cannot be shared out."""
    found = {prefix: _in_leaves(block, False) if model.leaves else block for prefix, block in blocks.items()}
    if model.ranks == 1:
        return found
    return {prefix: _block(prefix, block, model.ranks, whole_experts=False) for prefix, block in found.items()}


def has_experts(model: ModelDescription) -> bool:
    """Whether some network of it has experts that a rank can keep whole."""
    blocks = (*model.blocks, *(model.mtp.blocks if model.mtp else ()))
    return any(hasattr(block.feed_forward, "experts_of_ranks") for block in blocks)


def _block(prefix: str, block: Block, num_ranks: int, whole_experts: bool) -> Block:
    halves = []
    for half in (block.mixer, block.feed_forward):
        split = getattr(half, "of_ranks", None)
        split = getattr(half, "experts_of_ranks", split) if whole_experts else split
        if split is None:
            raise CapabilityError(f"{prefix} has {type(half).__name__}, which does not say what a rank's share of it is")
        try:
            halves.append(split(num_ranks))
        except CapabilityError as error:
            raise CapabilityError(f"{error} ({prefix})") from None
    return replace(block, mixer=halves[0], feed_forward=halves[1])


def largest_message(share: ModelDescription, limits: Limits, draft_hidden: int = 0) -> int:
    """Bytes that a rank brings to one collective of a step at most, in float32. `draft_hidden`: elements of one row of a draft
    model's residual stream."""
    of_rows = limits.max_rows * max(share.hidden_size, draft_hidden)
    of_logits = max(limits.max_logit_rows, limits.max_seqs) * max(share.vocab_share, 2)
    return 4 * max(of_rows, of_logits)


@dataclass(frozen=True)
class Share:
    """What one rank keeps of a canonical tensor."""

    shape: tuple[int, ...]
    """Of the share."""
    axis: int
    """Along which it is less than the whole, counted within one piece of a stack."""
    stretches: tuple[tuple[int, int, int], ...]
    """Where each lies in the whole, where in the share, and its size along the axis. What none of them fills is 0."""
    stacked: bool = False
    """Whether there is an axis of pieces before the others."""
    first: int = 0
    """Piece of the whole that is the first of the share."""

    @classmethod
    def of_rank(cls, whole: Tensor, share: Tensor, rank: int, num_ranks: int) -> Share | None:
        """What `rank` keeps of `whole`, of which a share is declared as `share`; None where it keeps all of it."""
        if whole.split is None or (whole.split == "first" and rank == 0):
            return None
        if whole.split == "first":
            return cls(share.shape, 0, ())
        if whole.stack != share.stack:
            return cls(share.shape, 0, ((0, 0, whole.joined[0]),), stacked=True, first=rank * share.stack)
        axis = whole.split - (1 if whole.stack else 0)
        stretches, begin, put = [], 0, 0
        for of_whole, of_share in zip(whole.parts, share.parts, strict=True):
            size, kept = of_whole[axis], of_share[axis]
            pieces = size // kept if size % kept == 0 and num_ranks % (size // kept) == 0 else num_ranks
            first = min(rank * pieces // num_ranks * kept, size)
            stretches.append((begin + first, put, min(kept, size - first)))
            if axis == 0:  # parts lie one after the other along axis 0
                begin, put = begin + size, put + kept
        return cls(share.shape, axis, tuple(stretches[: 1 if axis else None]), bool(whole.stack))

    @classmethod
    def of_rows(cls, shape: tuple[int, ...], rows: Array) -> Share:
        """Some rows of a matrix, as many as the share has room for; the others are 0."""
        begins = np.flatnonzero(np.diff(rows, prepend=-2) != 1).tolist()
        stretches = ((int(rows[at]), at, end - at) for at, end in zip(begins, [*begins[1:], len(rows)], strict=True))
        return cls(shape, 0, tuple(stretches))

    def of(self, whole: Array) -> Array:
        """The share of an array that is the whole; a view where it lies there in one stretch."""
        before = (slice(None),) * (self.axis + self.stacked)
        whole = whole[self.first : self.first + self.shape[0]] if self.stacked else whole
        if len(self.stretches) == 1 and self.stretches[0][2] == self.shape[len(before)]:
            begin, _, size = self.stretches[0]
            return whole[(*before, slice(begin, begin + size))]
        out = np.zeros(self.shape, np.float32)
        for begin, put, size in self.stretches:
            out[(*before, slice(put, put + size))] = whole[(*before, slice(begin, begin + size))]
        return out

    def of_packed(self, whole: PackedWeight) -> PackedWeight:
        """The share of a packed matrix, or of a stack of them, which `uncut` lets pass. What no stretch fills stands for 0."""
        if self.stacked and whole.ndim > 2:
            return stacked([self.of_packed(whole[self.first + place]) for place in range(self.shape[0])])
        packing, shape = whole.packing, self.shape[-2:]
        zero = MIDDLE << 4 | MIDDLE if packing.number == "int4" and not packing.zeros else 0
        together = 2 if packing.number == "int4" else 1  # inputs of which a byte has the numbers
        numbers = self._of_each(whole.numbers, (1, together), (shape[0], -(-shape[1] // together)), zero)
        of_scales, grain = packing.scales_of(shape), (packing.rows, packing.columns)
        places = [self._of_each(one, grain, of_scales, empty) for one, empty in zip(whole.arrays[1:], (1, 0), strict=False)]
        return PackedWeight(packing, shape, numbers, *places)

    def _of_each(self, whole: Array, grain: tuple[int, int], shape: tuple[int, ...], empty: int) -> Array:
        """The share of an array in which a number is of as many outputs and inputs as `grain` says, 0: of all of them."""
        each = grain[self.axis]
        if not each:
            return whole
        out, before = np.full(shape, empty, whole.dtype), (slice(None),) * self.axis
        for begin, put, size in self.stretches:
            count = -(-size // each)
            taken = whole[(*before, slice(begin // each, begin // each + count))]
            out[(*before, slice(put // each, put // each + count))] = taken
        return out

    def uncut(self, packing: Packing, size: int, *, taken: bool) -> str:
        """Why there is no such share of a matrix in a packing, as a clause; "" where there is one. `size`: of the whole along the
        axis; `taken`: kernels take it so, and round activations where the packing says so."""
        if self.axis and packing.activations and taken and not packing.columns:
            return f"{packing.name} rounds a row of activations by all of its features, of which a rank has a part"
        least = 2 if packing.number == "int4" else 1
        each, what = (packing.columns or least, "inputs") if self.axis else (packing.rows, "outputs")
        for begin, put, kept in self.stretches:
            cut = [place for place in (begin, put, begin + kept) if place % each and place < size]
            if cut:
                return f"{packing.name} packs {each} {what} together, and those of a rank begin or end at {cut[0]} of {size}"
        return ""

    def of_part(self, first: int, rows: int) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Of a part of a piece that has `rows` rows from row `first` on: which elements of it are kept, and where in the share of
        that piece they go."""
        for begin, put, size in self.stretches:
            if self.axis == 1:
                yield (slice(None), slice(begin, begin + size)), (slice(first, first + rows), slice(put, put + size))
                continue
            low, high = max(begin, first), min(begin + size, first + rows)
            if low < high:
                yield (slice(low - first, high - first),), (slice(put + low - begin, put + high - begin),)


Shares = Mapping[str, Share | None]
"""What a rank keeps of weights, by name; None: all of it."""


def shares_of(whole: ModelDescription, share: ModelDescription, rank: int) -> Shares:
    """What `rank` keeps of each weight of a model."""
    declared = share.weights()
    return {name: Share.of_rank(one, declared[name], rank, share.ranks) for name, one in whole.weights().items()}


def without_share(
    whole: ModelDescription, share: ModelDescription, packings: Mapping[str, Packing], taken: Callable[[Role], Collection[str]]
) -> str:
    """The first packed weight of which some rank cannot have its share as it is packed, with the reason, as a clause; "" where
    each can. `packings`: of those that are packed, by name; `taken`: in which kernels take a role."""
    declared = whole.weights()
    for rank in range(share.ranks):
        for name, kept in shares_of(whole, share, rank).items():
            if kept is not None and name in packings:
                one, packing = declared[name], packings[name]
                why = kept.uncut(packing, one.joined[kept.axis], taken=packing.name in taken(one.role))
                if why:
                    return f"{name}: {why}"
    return ""


class OfRank(Mapping[str, Matrix]):
    """The canonical tensors of one rank, each read when it is looked up and no further than the rank keeps it."""

    def __init__(self, weights: Weights, shares: Shares, uncut: Collection[str] = ()) -> None:
        """`uncut`: tensors that are given as a whole, and cut by who asks for them."""
        self._weights, self._uncut, self._shares = weights, uncut, shares

    def __getitem__(self, name: str) -> Matrix:
        kept = None if name in self._uncut else self._shares[name]
        if self._weights.packing(name) is not None:
            return self._weights.packed(name, kept)
        return self._weights[name] if kept is None else self._weights.kept(name, kept)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
