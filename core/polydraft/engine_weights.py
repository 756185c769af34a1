"""The weights of one rank of an engine: read as it keeps them, put onto its device, and replaced there.

When weights are replaced, and that all ranks do so together, is up to `Engine`. Values are read twice then: once to be checked
(`NewWeights.read`), while nothing has changed, and once to be put in place (`EngineWeights.put`).
"""

from __future__ import annotations

import logging
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polydraft.backend import BackendInfo, Weight
from polydraft.config import EngineConfig
from polydraft.contracts.packing import Matrix, unpacked
from polydraft.device import Array, Device
from polydraft.errors import CapabilityError, CheckpointError, PolydraftError
from polydraft.host.device_memory import check_weights
from polydraft.loading import Loading
from polydraft.models.block import PACKED_ROLES, Role
from polydraft.models.checkpoint import Checkpoint, Weights, load_weights
from polydraft.models.description import ModelDescription
from polydraft.models.digest import Digested, Unchanged
from polydraft.models.families import FamilyRegistry
from polydraft.models.memory_checkpoint import MemoryCheckpoint, WeightSource
from polydraft.models.ranks import OfRank, Share, shares_of, without_share
from polydraft.models.weights import (
    DRAFT_HEAD,
    AsStored,
    InLeaves,
    PackedAtLoad,
    Taken,
    Update,
    WithDraftHead,
    check_same_model,
    packed_at_load,
    prepare,
    read_all,
    refill,
    roles,
    sizes,
    wanted,
)
from polydraft.plugins.kernel_table import BoundTable
from polydraft.proposers.base import DraftWeights, ProposerRegistry
from polydraft.ranks import Group
from polydraft.resolve import Resolved, dequantised
from polydraft.sampling import draft_vocab


@dataclass(frozen=True)
class NewWeights:
    """Weights that are to take the place of others, open to be read."""

    updates: list[Update]
    draft: DraftWeights | None
    """What the proposer's own checkpoint then is."""
    source: WeightSource
    draft_source: WeightSource | None
    """Where they come from; None where those of the proposer's own checkpoint stay."""
    checkpoint: Checkpoint
    weights: Weights | None
    """Those of `checkpoint`, which is of `source`; None on a rank that was given arrays."""
    digested: Digested | None

    def read(self) -> None:
        """Read and check all of them."""
        read_all(self.updates)

    @property
    def places(self) -> tuple[str, str | None]:
        """The directories of both, "" of arrays, None where those of the proposer's own checkpoint stay."""
        return _place(self.source), None if self.draft_source is None else _place(self.draft_source)


class EngineWeights:
    """What one rank keeps of a model's weights, and of a proposer's own checkpoint."""

    def __init__(
        self, config: EngineConfig, resolved: Resolved, *, info: BackendInfo, table: BoundTable, checkpoint: Checkpoint,
        model: ModelDescription, share: ModelDescription, families: FamilyRegistry, proposers: ProposerRegistry,
        group: Group | None, rank: int, everywhere: Callable[[bool], bool], draft_ids: Array | None,
    ) -> None:  # fmt: skip
        """Nothing is read yet. `share`: what this `rank`, of `group`, computes with of `model`. `everywhere`: whether something
        is so on all ranks. Raises `CapabilityError` for a checkpoint whose blocks or matrices cannot be shared out so."""
        self.checkpoint = checkpoint
        """Where they come from, open."""
        self.digest = ""
        """Of the checkpoint's weights (`models/digest.py`); "" where it was not asked for."""
        self.packing_errors: Mapping[str, float] = {}
        """Of each matrix that was packed when it was loaded, by name, what that changed: root mean square over that of all. Of
        several ranks each knows that of what it packed."""
        self.draft: DraftWeights | None = None
        """The proposer's own checkpoint."""
        self.torn = ""
        """Why they are not whole, so that nothing is served until others are given; "" while they are."""
        self._torn_draft = False
        """Whether those of the proposer's own checkpoint are not, either."""
        self._in_memory = {"weights": False, "draft": False}
        """Whether they were replaced by arrays, which are not read anew."""
        self._config, self._resolved, self._info, self._table = config, resolved, info, table
        self._model, self._share, self._families, self._proposers = model, share, families, proposers
        self._group, self._own_rank, self._everywhere, self._draft_ids = group, rank, everywhere, draft_ids
        _, names = families.describe(checkpoint, config.mtp_conventions)
        self._weights = load_weights(checkpoint, model, names)
        self._stored = self._weights.packings
        self.custom_blocks = checkpoint.custom_blocks()
        """Blocks that compute themselves and keep their own weights, by prefix."""
        if self.custom_blocks and group is not None:
            raise CapabilityError(
                f"--tensor-parallel {group.size}: {', '.join(self.custom_blocks)} of this model compute themselves, and are not "
                "shared out; use one rank"
            )
        self._taken = self._taken_packings()
        if group is not None and (why := without_share(model, share, self._stored, self._taken.__getitem__)):
            raise CapabilityError(f"--tensor-parallel {group.size}: model {model.name}: {why}; use another number")
        self.bound: dict[str, Weight] = {}
        """The model's, on the device, by name."""
        self._draft_bound: dict[str, Weight] = {}
        self._given: dict[str, Matrix] = {}
        """What rank 0 has given to this one, by name."""
        self.offered: NewWeights | None = None
        """What rank 0 wants in place of these."""
        self._offered_files = ExitStack()
        self._offered_checkpoint: Checkpoint | None = None

    # -- put onto the device -----------------------------------------------------------------------
    def load(self, device: Device, drafting: Collection[str], loading: Loading) -> Mapping[str, Weight]:
        """Read all and put them onto the device. Returns them by name, a view, so that updated ones are found. `drafting`:
        prefixes of the proposer's blocks. Raises where they do not fit, before any is read."""
        resolved, dtype = self._resolved, self._resolved.dtype
        canonical, digested = self._canonical(self._weights)
        names = wanted(canonical, self._model, drafting=drafting, own=self.custom_blocks)
        if self._own_rank == 0:
            self._warn_of_dequantised()
        nbytes = sizes(
            self._share, names, dtype=dtype, packing=resolved.packing, ignored=self._config.weights_ignore, stored=self._stored,
            taken=self._taken,
        )  # fmt: skip
        draft = self._brought()
        check_weights(device, resolved, nbytes, draft.nbytes(dtype) if draft else 0)
        self.bound = prepare(
            self._table, canonical, nbytes, roles(self._model), dtype=dtype, taken=self._taken, loading=loading
        )  # fmt: skip
        self.digest = self._told(digested)
        if draft is not None:
            draft = draft.sharing(self._model, self._of_rank(self._weights), self._everywhere)
            self._draft_bound = draft.prepare(self._table, self._model, dtype=dtype)
        self.draft = draft
        whole: dict[str, Weight] = {**self.custom_blocks}
        return ChainMap(self.bound, whole, self._draft_bound)

    def _canonical(
        self, weights: Weights, *, rank: int | None = None, twice: bool = False
    ) -> tuple[Mapping[str, Matrix], Digested | None]:
        """The tensors to put onto the device: those of a checkpoint, and the head of a reduced draft vocabulary, packed where
        they are stored so or that was asked for; and what digests them meanwhile, where that was asked for. Where there are
        ranks, what `rank` keeps of each, None for this one. `twice`: they are read again, and have to be the same then."""
        packing, ignored, cut = self._resolved.packing, self._config.weights_ignore, dict[str, Share]()
        own = self._own_rank if rank is None else rank
        if self._group is not None and packing is not None and not packing.columns:
            # a scale is of all inputs of an output, also where a rank has some
            shares, packed_ones = shares_of(self._model, self._share, own), packed_at_load(self._model, ignored)
            cut = {name: kept for name in packed_ones if (kept := shares[name]) is not None and kept.axis == 1}
        tensors = self._of_rank(weights, own, cut)
        if twice:
            tensors = Unchanged(tensors)
        digested: Digested | None = None
        if self._config.weights_digest:
            tensors = digested = Digested(tensors)
        if self._draft_ids is not None:
            ids, share = self._draft_ids, self._share.vocab_share
            rows = ids[draft_vocab.own_rows(ids, share, own)] - own * share
            tensors = WithDraftHead(tensors, rows, draft_vocab.num_rows(ids, share))
        if self._resolved.leaves:
            tensors = InLeaves(tensors, self._share.weights())
        if packing is None:
            return tensors, digested
        packed = PackedAtLoad(tensors, self._model, packing, ignored, cut)
        if rank is None:
            self.packing_errors = packed.errors
        return packed, digested

    def _of_rank(self, weights: Weights, rank: int | None = None, cut: Collection[str] = ()) -> Mapping[str, Matrix]:
        """What `rank` keeps of the tensors of a checkpoint, None for this one; all of it where there is one rank. `cut`: those
        that are given as a whole."""
        if self._group is None:
            return AsStored(weights)
        own = self._own_rank if rank is None else rank
        return OfRank(weights, shares_of(self._model, self._share, own), cut)

    def _brought(self, rank: int | None = None) -> DraftWeights | None:
        """What the proposer reads from a checkpoint of its own, and `rank` keeps, None for this one."""
        name, draft_model = self._resolved.proposer, self._config.draft_model
        brought = self._proposers.weights(name, self._share, draft_model)
        if brought is None or self._group is None:
            return brought
        whole = self._proposers.weights(name, self._model, draft_model)
        assert whole is not None, "there is a checkpoint whatever the share"
        return brought.of_rank(whole, self._share, self._own_rank if rank is None else rank)

    def _told(self, digested: Digested | None) -> str:
        """The digest of weights that have been read, which is logged."""
        if digested is None:
            return ""
        digest = digested.digest()
        logging.getLogger(__name__).info("weights of %s: sha256 %s", self._model.name, digest)
        return digest

    def _warn_of_dequantised(self) -> None:
        """Say which matrices that are in few bits are kept in more."""
        made, known = self._resolved.packing, roles(self._model)
        kept = [(known[name], one.name) for name, one in self._stored.items()]
        kept += [(one.role, made.name) for one in self._model.weights().values() if made and one.role in PACKED_ROLES]
        short = dict.fromkeys((role, name) for role, name in kept if name not in self._taken[role])
        for role, name in short:
            if role == "linear" or ("linear", name) not in short:
                logging.getLogger(__name__).warning(dequantised(self._info, name, self._resolved.dtype, role))
        others = [name for name in self._weights.stored_packed if name not in self._stored]
        if others:
            logging.getLogger(__name__).warning(
                "%d tensors that are stored in few bits, such as %s, are dequantised to %s: parts in several packings, or groups "
                "of inputs in another order", len(others), others[0], self._resolved.dtype,
            )  # fmt: skip

    def _taken_packings(self) -> Taken:
        """The packings that are taken on this device: what the backend declares, unless a kernel pack serves the contract."""
        replaced = {override.contract for override in self._table.overrides}
        served: dict[Role, str] = {"linear": "linear", "experts": "expert_mlp"}
        packings = self._info.capabilities.packings
        return {role: () if contract in replaced else packings(role) for role, contract in served.items()}

    # -- replaced ----------------------------------------------------------------------------------
    @contextmanager
    def opened(self, source: WeightSource, draft: WeightSource | None) -> Iterator[NewWeights]:
        """New weights, as `Engine.update_weights` has them. A checkpoint stays open behind this unless something is raised.
        Raises `CheckpointError` where they are of another model, or packed otherwise."""
        if draft is None and self._torn_draft and self.draft is not None:
            draft = self.draft_again()
        with ExitStack() as kept, ExitStack() as files:
            if isinstance(source, Mapping):
                checkpoint: Checkpoint = MemoryCheckpoint(source, self.checkpoint)
            else:
                checkpoint = kept.enter_context(Checkpoint(source))
            weights = self._weights_of(checkpoint)
            canonical, digested = self._canonical(weights, twice=True)
            updates, brought = [self._update(canonical)], self.draft
            if brought is not None and draft is not None:
                brought, arrays = _from(brought, draft)
                updates.append(self._draft_update(brought, arrays, canonical, files))
            yield NewWeights(updates, brought, source, draft, checkpoint, weights, digested)
            kept.pop_all()

    def _weights_of(self, checkpoint: Checkpoint) -> Weights:
        """The weights of `checkpoint`. Raises `CheckpointError` where they are of another model, or packed otherwise."""
        model, table = self._families.describe(checkpoint, self._config.mtp_conventions)
        check_same_model(self._model, model)
        weights = load_weights(checkpoint, model, table)
        if weights.packings != self._stored:
            raise CheckpointError(
                f"weights of {model.name} are not packed as those of the running {self._model.name}, wanted the same matrices in "
                "the same packings; start another engine"
            )
        return weights

    def _update(self, canonical: Mapping[str, Matrix]) -> Update:
        """What puts these in place of the model's weights."""
        return Update(self.bound, canonical, roles(self._model), self._taken)

    def _draft_update(
        self, brought: DraftWeights, arrays: Mapping[str, Any] | None, canonical: Mapping[str, Matrix], files: ExitStack
    ) -> Update:  # fmt: skip
        """What puts `brought`, from `arrays` or its directory, in place of the proposer's weights, beside `canonical` ones of the
        model, while `files` are open."""
        assert self.draft is not None, "there are some to replace"
        if arrays is not None or brought.directory != self.draft.directory:  # what is read anew follows as it did
            brought.check_shared(self._model, canonical, arrays)
        own = files.enter_context(brought.canonical(self._model, arrays))
        return Update(self._draft_bound, Unchanged(own), brought.roles)

    def given_to(self, rank: int, new: NewWeights, files: ExitStack) -> Iterator[Update]:
        """What another rank is given of new weights: its share of those that are arrays."""
        assert new.weights is not None, "rank 0 has all of them"
        canonical, _ = self._canonical(new.weights, rank=rank)
        if isinstance(new.source, Mapping):
            yield self._update(canonical)
        if isinstance(new.draft_source, Mapping) and self.draft is not None:
            brought = self._brought(rank)
            assert brought is not None, "the proposer of every rank has a checkpoint"
            brought = replace(brought, directory=self.draft.directory, same=self.draft.same)
            yield self._draft_update(brought, new.draft_source, canonical, files)

    def put(self, new: NewWeights) -> bool:
        """Put them in place; whether some weight has moved. What fails leaves some new and others old."""
        return refill(self._table, new.updates, dtype=self._resolved.dtype) or bool(self.torn)  # then some may have moved

    def tear(self, new: NewWeights, error: BaseException) -> None:
        """Putting these in place has failed, here or on another rank."""
        why = str(error) if isinstance(error, PolydraftError) else type(error).__name__
        self.torn = f"an update of this engine's weights has failed half-way ({why}), wanted whole ones; give weights"
        self._torn_draft |= len(new.updates) > 1
        self.digest = ""

    def adopt(self, new: NewWeights) -> None:
        """They are in place, on all ranks."""
        self.torn, self._torn_draft, self.draft = "", False, new.draft
        self.digest = self._told(new.digested)
        self._in_memory["weights"] = isinstance(new.source, Mapping)
        if new.draft_source is not None:
            self._in_memory["draft"] = isinstance(new.draft_source, Mapping)
        if not isinstance(new.source, Mapping):
            self.checkpoint.close()
            self.checkpoint = new.checkpoint

    def again(self) -> Path:
        """Where they can be read anew. Raises `CheckpointError` where they came from memory."""
        return self._place_again("weights", "source", self.checkpoint.path)

    def draft_again(self) -> Path | None:
        """The same of the proposer's own checkpoint; None where it has none."""
        return None if self.draft is None else self._place_again("draft", "draft", self.draft.directory)

    def _place_again(self, what: str, name: str, place: Path) -> Path:
        if self._in_memory[what]:
            raise CheckpointError(f"{what} in use came from memory, and {name} is missing; give it, arrays or a directory")
        return place

    # -- on a rank beside rank 0, which says when (`host.followers.Rank`) --------------------------
    def keep_share(self, name: str, value: Matrix) -> None:
        """A tensor of this rank's share of weights that rank 0 has in memory."""
        self._given[name] = value

    def offer(self, directory: str, draft: str | None) -> NewWeights:
        """What this rank keeps of the weights in `directory`, "": what it was given; of the proposer's own checkpoint in `draft`
        the same, None: those stay. It is open until `drop`."""
        canonical: Mapping[str, Matrix] = self._given
        source: WeightSource = self._given
        checkpoint, weights = self.checkpoint, None
        if directory:
            self._offered_checkpoint = checkpoint = Checkpoint(directory)
            weights, source = self._weights_of(checkpoint), directory
            canonical, _ = self._canonical(weights, twice=True)
        updates, brought = [self._update(canonical)], self.draft
        if brought is not None and draft == "":
            updates.append(Update(self._draft_bound, self._given, brought.roles))
        elif brought is not None and draft is not None:
            brought, _ = _from(brought, draft)
            updates.append(self._draft_update(brought, None, canonical, self._offered_files))
        self.offered = NewWeights(updates, brought, source, self._given if draft == "" else draft, checkpoint, weights, None)
        return self.offered

    def drop(self) -> None:
        """Forget what was given or offered, unless it was adopted."""
        if self._offered_checkpoint is not None and self._offered_checkpoint is not self.checkpoint:
            self._offered_checkpoint.close()
        self._offered_files.close()
        self._given, self.offered, self._offered_checkpoint = {}, None, None

    # -- looked at ---------------------------------------------------------------------------------
    def canonical(self) -> Mapping[str, Array]:
        """The weights of the checkpoint by canonical name, float32, each read when it is accessed, as they are there."""
        model, table = self._families.describe(self.checkpoint, self._config.mtp_conventions)
        return load_weights(self.checkpoint, model, table)

    def added(self, names: Collection[str]) -> dict[str, Array]:
        """Bound weights in `names` that the checkpoint lacks, float32: those of the proposer's own checkpoint, and the head of
        a reduced draft vocabulary. Raises `CheckpointError` where the proposer's checkpoint has changed or is gone."""
        found: dict[str, Array] = {}
        if self._draft_ids is not None and DRAFT_HEAD in names:
            ids = self._draft_ids
            found[DRAFT_HEAD] = unpacked(WithDraftHead(self.canonical(), ids, len(ids))[DRAFT_HEAD])
        if self.draft is not None:
            with self.draft.canonical(self._model) as own:
                found |= {name: unpacked(own[name]) for name in names if name in own}
        return found


def _place(source: WeightSource) -> str:
    """The directory of weights, "" of arrays."""
    return "" if isinstance(source, Mapping) else str(Path(source).absolute())


def _from(brought: DraftWeights, draft: WeightSource) -> tuple[DraftWeights, Mapping[str, Any] | None]:
    """A proposer's weights, read from a directory or from arrays; and these."""
    if isinstance(draft, Mapping):
        return brought, draft
    return replace(brought, directory=Path(draft)), None
