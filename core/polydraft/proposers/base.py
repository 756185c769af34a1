"""Owns what a proposer is told when the step program is built, what it must answer, and the registry of names.

The engine builds one `ProposerContext`, the factory registered under the chosen name returns a `Proposer`, and the runner
lets it append its launches. Nothing here runs during a step.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from polydraft.backend import Cache, CacheSpec, ForwardMeta, PassBuffers, Weight
from polydraft.contracts.base import Limits, Unit
from polydraft.contracts.kv_quant import Kv
from polydraft.device import Array, Buffer, Device
from polydraft.errors import ConfigError
from polydraft.models.description import ModelDescription
from polydraft.runtime.buffers import Scratch, SlotState, StepBuffers
from polydraft.runtime.host_inputs import Needs
from polydraft.runtime.program import ProgramBuilder

ChooseTokens = Callable[..., None]
"""`choose(program, logits=, row_slot=, positions=, ahead=, tokens=, noise=, unit=, room=)`: append processing and choice of one
token a row, at most one row a slot, by the rules and parameters of the target's rows and, but for rejection verification,
with their noise. `positions + ahead` is the position that the token stands for; drafts before it in this round must be filed
in `state.drafts` and `state.draft_len` by then. `logits` and `noise` are [N, V] float32 and are overwritten."""


@dataclass(frozen=True)
class ProposerContext:
    """Everything a proposer may bind to. Buffers belong to the engine; `device.empty` gives a proposer its own, at build
    time only."""

    device: Device
    limits: Limits
    model: ModelDescription
    weights: Mapping[str, Weight]
    state: SlotState
    step: StepBuffers
    target_hidden: Buffer
    """[R, H] the target's residual stream of every packed row, before its final norm."""
    scratch: Scratch
    """Layer scratch of the target, free once its pass is done."""
    allocate_cache: Callable[[CacheSpec], Cache]
    init_forward_meta: Callable[[PassBuffers], ForwardMeta]
    choose: ChooseTokens
    sampling: bool
    """Whether noise is stored: what a proposer gives to `choose` as `noise` then has a row for each row of logits, else one."""
    dtype: str
    draft_ids: Array | None = None
    """[M] int32, ascending: the tokens that may be drafted, whose logits `weights[DRAFT_HEAD]` gives; None: all, by `lm_head`."""
    kv: Kv = ""
    """How KV rows are kept, for a `CacheSpec`."""


@dataclass(frozen=True)
class ProposerShape:
    """What graph policy and `--explain` need to know of a proposer's launches."""

    max_width: int
    """Most drafts it makes for one slot."""
    fixed: bool
    """Whether it always makes as many as the budget allows."""
    one_call: bool
    """All drafts in one launch, or one pass a draft."""


class Proposer(Protocol):
    """Drafts for every scheduled slot, in place on the device.

    One whose every draft comes from `choose` may set `soft = True`: under rejection verification a draft is then held against
    the distribution it was drawn from. Any other draft counts as certain, which is as lossless but accepts less.

    One that drafts on the host has `features`, a tuple of `HostFeature`s (`polydraft.runtime.host_inputs`), and its factory an
    attribute `needs`, the most demanding of theirs."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> ProposerShape: ...

    def append(self, program: ProgramBuilder, *, sampling: bool) -> None:
        """Append launches that run after the step's commit: they must leave `state.drafts` [B, K] and `state.draft_len` [B]
        defined for every scheduled slot (draft_len 0 and NO_TOKEN where there is nothing to draft). Called once per program
        kind; buffers and caches are allocated in the factory, never here."""


Factory = Callable[[ProposerContext], Proposer]


class ProposerRegistry:
    """Proposer factories by name; a name registered twice is an error naming both."""

    def __init__(self) -> None:
        self._factories: dict[str, tuple[Factory, str]] = {}

    def register(self, name: str, factory: Factory, *, plugin: str = "an unnamed plugin") -> None:
        """Add a proposer. `plugin` says whose it is, for errors."""
        if name in self._factories:
            raise ConfigError(f"proposer {name!r} is registered by {self._factories[name][1]} and by {plugin}; rename one")
        self._factories[name] = (factory, plugin)

    def needs(self) -> dict[str, Needs]:
        """Registered names, in order of registration, and what each needs to know before it can draft: its factory's `needs`,
        "none" where there is no such attribute."""
        return {name: getattr(factory, "needs", "none") for name, (factory, _) in self._factories.items()}

    def names(self) -> list[str]:
        """Registered names, in order of registration."""
        return list(self._factories)

    def create(self, name: str, context: ProposerContext) -> Proposer:
        """Build the proposer called `name`."""
        return self.factory(name)(context)

    def factory(self, name: str) -> Factory:
        """The factory of `name`, or an error that lists what there is."""
        if name not in self._factories:
            near = difflib.get_close_matches(name, self._factories, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"unknown proposer {name!r}; {hint}known: {', '.join(self._factories)}")
        return self._factories[name][0]


def built_in() -> ProposerRegistry:
    """A registry with the proposers of core."""
    from polydraft.proposers.mtp import MtpProposer
    from polydraft.proposers.ngram import NgramProposer
    from polydraft.proposers.none import NoProposer

    registry = ProposerRegistry()
    registry.register("mtp", MtpProposer, plugin="polydraft")
    registry.register("ngram", NgramProposer, plugin="polydraft")
    registry.register("none", NoProposer, plugin="polydraft")
    return registry


PASS_UNIT: Unit = "seqs"
"""Draft passes after the first run one row a sequence."""
