"""What a proposer is given when the step program is built, what it must answer, and the registry of names.

The engine builds one `ProposerContext`, the factory registered under the chosen name returns a `Proposer`, and the runner
lets it append its launches. Nothing here runs during a step.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from polydraft.backend import Weight
from polydraft.contracts.base import Limits
from polydraft.contracts.packing import Matrix, unpacked
from polydraft.device import DTYPES, Array
from polydraft.errors import CheckpointError, ConfigError, PluginError
from polydraft.models.block import Block, Role, Tensor
from polydraft.models.checkpoint import Checkpoint, load_weights
from polydraft.models.description import ModelDescription
from polydraft.models.memory_checkpoint import MemoryCheckpoint
from polydraft.models.ranks import OfRank, Share, Shares
from polydraft.models.tensor_table import TensorTable, stored_parts
from polydraft.models.weights import InLeaves, prepare
from polydraft.plugins.checks import check_result, named
from polydraft.plugins.kernel_table import BoundTable
from polydraft.program.declare import Column, Pass, StepBuffer, wrong_declaration
from polydraft.program.host_inputs import Needs
from polydraft.program.program import ProgramBuilder
from polydraft.sampling.draft_vocab import own_rows

ChooseTokens = Callable[..., None]
"""`choose(program, logits=, row_slot=, positions=, ahead=, tokens=, noise=, unit=, stage=)`: append processing and choice of one
token a row, at most one row a slot, by the rules and parameters of the target's rows and, but for rejection verification,
with their noise. Buffers are given by name. `positions + ahead` is the position that the token stands for; drafts before it
in this round must be filed in `drafts` and `draft_len` by then. `logits` and `noise` are [N, V] float32 and are
overwritten."""


@dataclass(frozen=True)
class ProposerContext:
    """What a proposer or a host feature is built from. It allocates nothing: what it needs it declares."""

    limits: Limits
    model: ModelDescription
    choose: ChooseTokens
    stores_noise: bool
    """Whether noise is stored: what a proposer gives to `choose` as `noise` then has a row for each row of logits, else one."""
    dtype: str
    """Dtype of activations."""
    draft_ids: Array | None = None
    """[M] int32, ascending: the tokens that may be drafted, whose logits the weight `DRAFT_HEAD` gives; None: all, by
    `lm_head`."""
    draft_model: str = ""
    """The directory that `--draft-model` names; "" where none was named."""
    options: Mapping[str, float] = field(default_factory=dict)
    """The options of the proposer, each that its factory declares."""
    rank: int = 0
    """Which of several ranks it drafts on, where `model` is a share."""


@dataclass(frozen=True)
class DraftWeights:
    """Weights that a proposer reads from a checkpoint of its own, and binds under names that begin with a prefix of its own."""

    directory: Path
    """A model directory: config.json and safetensors files."""
    prefix: str
    """"eagle", say: tensor `fc` is the weight "eagle.fc"."""
    tensors: tuple[Tensor, ...]
    names: Mapping[str, tuple[str, ...]]
    """Tensor to the checkpoint's names of its parts."""
    unread: tuple[str, ...] = ()
    """Patterns of tensors of this checkpoint that nobody needs."""
    shared: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Tensors that are often copies of the target's, to the name of its weight: kept once where they are (`sharing`)."""
    same: frozenset[str] = frozenset()
    """Those of `shared` that are: they are not bound, and the proposer binds the target's."""
    tokens: Mapping[str, Array] = field(default_factory=lambda: MappingProxyType({}))
    """Tensors whose rows stand for some tokens, to these, [M]: of several ranks each keeps the rows of its own tokens
    (`polydraft.sampling.draft_vocab`), wherever they are."""
    hidden_size: int = 0
    """Width of the draft model's residual stream; 0: the target's."""
    whole: tuple[Tensor, ...] = ()
    """The tensors as the checkpoint has them, where `tensors` are what a rank keeps of them; () otherwise."""
    shares: Shares = field(default_factory=lambda: MappingProxyType({}))
    """What the rank keeps of each of them, by name."""

    def of_rank(self, whole: DraftWeights, model: ModelDescription, rank: int) -> DraftWeights:
        """What `rank` keeps of `whole`. These are the weights beside `model`, a share of the target."""

        def kept(one: Tensor, mine: Tensor) -> Share | None:
            if one.name in self.tokens:
                return Share.of_rows(mine.shape, own_rows(self.tokens[one.name], model.vocab_share, rank))
            return Share.of_rank(one, mine, rank, model.ranks)

        shares = {one.name: kept(one, mine) for one, mine in zip(whole.tensors, self.tensors, strict=True)}
        return replace(self, whole=whole.tensors, shares=shares)

    @contextmanager
    def canonical(self, model: ModelDescription, arrays: Mapping[str, Any] | None = None) -> Iterator[Mapping[str, Matrix]]:
        """The checkpoint, opened, or `arrays` in place of its tensors: float32 arrays by the names that they are bound under,
        each read when it is looked up, and no further than a rank keeps it. Raises `CheckpointError` for a tensor that is
        missing, misshapen or that nobody knows, and for a broken one when it is read."""
        tensors = [one for one in self.whole or self.tensors if one.name not in self.same]
        stored = stored_parts(tensors, self.names, "", whose=f"proposer {self.prefix}")
        parts = {f"{self.prefix}.{name}": found for name, found in stored.items()}
        stacks = {f"{self.prefix}.{one.name}": one.stack for one in tensors if one.stack}
        described = replace(model, name=self.directory.name, architecture=f"proposer {self.prefix}")
        unread = (*self.unread, *(stored for name in self.same for stored in self.names[name]))
        shares = {f"{self.prefix}.{name}": share for name, share in self.shares.items()}
        with Checkpoint(self.directory) as opened:
            checkpoint = opened if arrays is None else MemoryCheckpoint(arrays, opened)
            weights = load_weights(checkpoint, described, TensorTable(parts, stacks, unread=unread))
            yield InLeaves(OfRank(weights, shares) if self.whole else weights, self._bound)

    def sharing(
        self, model: ModelDescription, target: Mapping[str, Matrix], everywhere: Callable[[bool], bool] = bool
    ) -> DraftWeights:
        """The same without the tensors that are copies of those of `target`, by its names. `everywhere` says whether something is
        so on all ranks. Raises as `canonical` does."""
        stored = sorted({one.name for one in self.tensors} & self.shared.keys())
        with self.canonical(model) as own:
            same = [name for name in stored if everywhere(_equal(own[f"{self.prefix}.{name}"], target[self.shared[name]]))]
            return replace(self, same=frozenset(same))

    def check_shared(self, model: ModelDescription, target: Mapping[str, Matrix], arrays: Mapping[str, Any] | None) -> None:
        """Raise `CheckpointError` where a tensor of which one copy is kept is in the checkpoint, or in `arrays`, and another than
        the target's that it will be used with. Raises as `canonical` does besides."""
        if not self.same:
            return
        with Checkpoint(self.directory) as opened:
            names = opened.names() if arrays is None else arrays
        stored = frozenset(name for name in self.same if all(one in names for one in self.names[name]))
        with replace(self, same=self.same - stored).canonical(model, arrays) as own:
            for name in stored:
                if not _equal(own[f"{self.prefix}.{name}"], target[self.shared[name]]):
                    raise CheckpointError(
                        f"{self.directory}: {', '.join(self.names[name])} is another than {self.shared[name]} of the target, "
                        "wanted the same as where this engine started, which keeps one copy of them; start another engine"
                    )

    def nbytes(self, dtype: str) -> int:
        """Bytes of all in the activation dtype, but for those that may be copies of the target's."""
        return DTYPES[dtype].itemsize * sum(math.prod(one.shape) for one in self.tensors if one.name not in self.shared)

    @property
    def _bound(self) -> dict[str, Tensor]:
        """The tensors that are bound, by name."""
        return {f"{self.prefix}.{one.name}": one for one in self.tensors if one.name not in self.same}

    def prepare(self, table: BoundTable, model: ModelDescription, *, dtype: str) -> dict[str, Weight]:
        """Read and prepare them, one at a time. Raises as `canonical` does."""
        roles = self.roles
        with self.canonical(model) as arrays:
            return prepare(table, arrays, dict.fromkeys(roles, 0), roles, dtype=dtype)

    @property
    def roles(self) -> dict[str, Role]:
        """Of each weight, by the name that it is bound under."""
        return {name: one.role for name, one in self._bound.items()}


def _equal(own: Matrix, target: Matrix) -> bool:
    return np.array_equal(unpacked(own), unpacked(target))


class Drafting:
    """What `begin_draft` writes and the launches after it read, for proposers that draft by sequence."""

    buffers = tuple(StepBuffer(name, "B") for name in ("draft_slot", "draft_position", "draft_budget"))


class Proposer(Protocol):
    """Drafts for every scheduled slot, in place on the device.

    What it works in it declares, and the runtime allocates it: `buffers` (`StepBuffer`s) and `columns` (`Column`s); one with
    a model besides `blocks` (prefix to `Block`: their scratch and caches) and `passes` (`Pass`es). `taps` names points of the
    target whose rows it wants to see (buffer to point, as `Target` says), and they are in these buffers when it drafts.
    What it does not have it leaves out.

    The factory of one with blocks has a function `layers(model, draft_model)` that tells them from the target's description and
    the directory that `--draft-model` names ("" where none was named): what their caches cost, and what a prefix hit is worth to
    them, is settled before there is a proposer. A function `weights(model, draft_model)` beside it returns `DraftWeights` where
    it has a checkpoint of its own; without such a function `--draft-model` is refused. `update_weights` leaves these as they
    are unless it is given others. A function `note(model, draft_model)` may return a phrase about the draft model that
    `--explain` shows. Where its residual stream has another width than the target's, the proposer says it by `hidden_size`.

    One that can be adjusted declares its options by the factory's attribute `options`: names to numbers that hold where
    `--proposer-option NAME=VALUE` says nothing else, whole ones where these are. It finds them in `ProposerContext.options`.

    One whose every draft comes from `choose` may set `soft = True`: under rejection verification a draft is then held against
    the distribution it was drawn from. Any other draft counts as certain, which is as lossless but accepts less.

    One whose drafts are partly looked up names by `lookups_from` a column [B] that says for the drafts of a slot from which place
    on they are; results tell them from the others (`polydraft.output.provenance`). It takes host inputs in the middle of a step.

    One that feeds a state back from pass to pass names by `state` the buffer that has it behind the last pass, by sequence;
    `--check-draft-state` compares it.

    One whose launches are the same over a share of the model (`polydraft.models.ranks`), and whose features append none, says
    so by the factory's attribute `ranks = True`; others are refused where a model is split over ranks. Its `layers` and `weights`
    are asked beside the share: tensors then have the sizes that a rank keeps (`Tensor.split`), blocks are shared out as the
    target's are (`polydraft.models.ranks.alike`).

    One that drafts on the host has `features`, a tuple of `HostFeature`s (`polydraft.program.host_inputs`), and its factory an
    attribute `needs`, the most demanding of theirs."""

    @property
    def name(self) -> str: ...

    def append(self, program: ProgramBuilder, num_drafts: int) -> None:
        """Append launches that run after the step's commit: they must leave the columns `drafts` [B, K] and `draft_len` [B]
        defined for every slot that had rows (draft_len 0 and NO_TOKEN where there is nothing to draft), with at most
        `num_drafts` drafts. Called once per kind of step (`program.kind`) and number of drafts that a step may make.

        With 0, which is asked for where steps may go by without drafts, the drafts that were verified have to be emptied, and a
        proposer with a cache appends its *keep part*: what writes its rows over the target's, without head and choice. The
        drafts after such steps are then those of a run that drafted in every step."""


Factory = Callable[[ProposerContext], Proposer]


@dataclass(frozen=True)
class ProposerFactory:
    """A factory with the name of its proposer and of the plugin that brings it. What it raises, but for errors of polydraft, is a
    `PluginError`, and so is anything else than what it has to return."""

    name: str
    factory: Factory
    plugin: str

    def make(self, context: ProposerContext) -> Proposer:
        """The proposer."""
        what = self._what("factory")
        with self.named("factory"):
            proposer = self.factory(context)
            check_result(self.plugin, what, proposer, Proposer)
            wrong = wrong_declaration(proposer, {"columns": Column, "buffers": StepBuffer, "passes": Pass})
        if wrong:
            raise PluginError(f"plugin {self.plugin!r}: {what} returned one with {wrong}; correct it")
        return proposer

    def layers(self, model: ModelDescription, draft_model: str) -> Mapping[str, Block]:
        """Its `layers`; none where there is no such attribute."""
        tell = getattr(self.factory, "layers", None)
        if tell is None:
            return {}
        with self.named("layers"):
            found: Mapping[str, Block] = dict(tell(model, draft_model))
        return found

    def weights(self, model: ModelDescription, draft_model: str) -> DraftWeights | None:
        """Its `weights`; None where there is no such attribute."""
        tell = getattr(self.factory, "weights", None)
        if tell is None:
            return None
        with self.named("weights"):
            found: DraftWeights | None = tell(model, draft_model)
        return found

    def note(self, model: ModelDescription, draft_model: str) -> str:
        """Its `note`; "" where there is no such attribute."""
        tell = getattr(self.factory, "note", None)
        if tell is None:
            return ""
        with self.named("note"):
            return str(tell(model, draft_model))

    def options(self) -> Mapping[str, float]:
        """Its `options`; none where there is no such attribute."""
        found: Mapping[str, float] = getattr(self.factory, "options", {})
        return found

    def named(self, part: str) -> AbstractContextManager[None]:
        """Around a call of code of the plugin, which is `part` of the proposer."""
        return named(self.plugin, self._what(part))

    def _what(self, part: str) -> str:
        return f"{part} of the proposer {self.name!r}"


class ProposerRegistry:
    """Proposer factories by name; a name registered twice is an error naming both."""

    def __init__(self) -> None:
        self._factories: dict[str, ProposerFactory] = {}

    def register(self, name: str, factory: Factory, *, plugin: str = "an unnamed plugin") -> None:
        """Add a proposer. `plugin` says whose it is, for errors."""
        if name in self._factories:
            raise ConfigError(f"proposer {name!r} is registered by {self._factories[name].plugin} and by {plugin}; rename one")
        self._factories[name] = ProposerFactory(name, factory, plugin)

    def needs(self) -> dict[str, Needs]:
        """Registered names, in order of registration, and what each needs to know before it can draft: its factory's `needs`,
        "none" where there is no such attribute."""
        return {name: getattr(one.factory, "needs", "none") for name, one in self._factories.items()}

    def options(self, name: str) -> Mapping[str, float]:
        """The options of a proposer and what they are where nobody says otherwise; none where there is no such name."""
        return self._factories[name].options() if name in self._factories else {}

    def layers(self, name: str, model: ModelDescription, draft_model: str = "") -> Mapping[str, Block]:
        """The decoder blocks of a proposer, by prefix: its factory's `layers`, none where there is no such attribute or no such
        name."""
        return self._factories[name].layers(model, draft_model) if name in self._factories else {}

    def of_ranks(self) -> list[str]:
        """The names of the proposers that draft over a share of a model, too: those whose factory has `ranks`."""
        return [name for name, one in self._factories.items() if getattr(one.factory, "ranks", False)]

    def draft_models(self) -> list[str]:
        """The names of the proposers that take a draft model: those whose factory has `weights`."""
        return [name for name, one in self._factories.items() if hasattr(one.factory, "weights")]

    def weights(self, name: str, model: ModelDescription, draft_model: str = "") -> DraftWeights | None:
        """What a proposer reads from a checkpoint of its own: its factory's `weights`, None where there is no such attribute."""
        return self.factory(name).weights(model, draft_model)

    def note(self, name: str, model: ModelDescription, draft_model: str) -> str:
        """A phrase about a draft model: its factory's `note`, "" where there is no such attribute."""
        return self.factory(name).note(model, draft_model)

    def names(self) -> list[str]:
        """Registered names, in order of registration."""
        return list(self._factories)

    def factory(self, name: str) -> ProposerFactory:
        """The factory of `name`, or an error that lists what there is."""
        if name not in self._factories:
            near = difflib.get_close_matches(name, self._factories, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"unknown proposer {name!r}; {hint}known: {', '.join(self._factories)}")
        return self._factories[name]


def built_in() -> ProposerRegistry:
    """A registry with the proposers of core."""
    from polydraft.proposers.eagle3 import Eagle3Proposer
    from polydraft.proposers.hybrid import HybridProposer
    from polydraft.proposers.mtp import MtpProposer
    from polydraft.proposers.ngram import NgramProposer
    from polydraft.proposers.none import NoProposer
    from polydraft.proposers.suffix import SuffixProposer

    registry = ProposerRegistry()
    registry.register("mtp", MtpProposer, plugin="polydraft")
    registry.register("eagle3", Eagle3Proposer, plugin="polydraft")
    registry.register("ngram", NgramProposer, plugin="polydraft")
    registry.register("suffix", SuffixProposer, plugin="polydraft")
    registry.register("hybrid", HybridProposer, plugin="polydraft")
    registry.register("none", NoProposer, plugin="polydraft")
    return registry
