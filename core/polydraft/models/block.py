"""A decoder block of two halves, each of any kind, and the launches that every block has whatever its kinds are.

A kind is a frozen dataclass that says as data what it works in, caches, weighs and launches, and appends its launches by names:
`models/attention.py` and `models/feed_forward.py` are two. A family, also one of a plugin, builds its blocks of kinds of its
own. The runtime allocates, loads and budgets what they declare, and never asks which kind it is.

    h = x + finish(mix(N_input_norm(x)));   y = h + feed_forward(N_post_norm(h))
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast

import numpy as np

from polydraft.contracts.base import Unit
from polydraft.device import Array, Launch
from polydraft.errors import CapabilityError
from polydraft.program.caches import CacheKind
from polydraft.program.declare import Pass, StepBuffer

if TYPE_CHECKING:
    from polydraft.plugins.kernel_table import BoundTable
    from polydraft.program.program import ProgramBuilder

Role = Literal["linear", "embedding", "norm", "bias", "experts", "router"]
"""What `prepare_weight` is given besides a tensor. "experts": a stack of matrices, [experts, out, in]. "router": a matrix or a
vector that decides which experts a row is given to; it stays float32 whatever the dtype of activations."""
PACKED_ROLES: Final[tuple[Role, ...]] = ("linear", "experts")
"""Those whose matrices may be packed."""


@dataclass(frozen=True)
class Stretch:
    """Where a weight, or a part of one, lies in a longer tensor."""

    axis: int
    begin: int
    """Its first element along this axis."""
    size: int
    """Elements of the longer tensor along this axis."""


@dataclass(frozen=True)
class Tensor:
    """One weight that a module declares, by the last part of its canonical name."""

    name: str
    parts: tuple[tuple[int, ...], ...]
    """Shapes of what it consists of, which a checkpoint may keep apart; joined along axis 0 they are the weight."""
    role: Role = "linear"
    split: int | Literal["first"] | None = None
    """Axis of the weight along which ranks divide it (each part for itself); None: every rank has all of it; "first": rank 0 has
    it and the others zeros, since what is added to it is summed over the ranks."""
    stack: int = 0
    """The weight is this many of those one after the other, along an axis of its own before the others (experts, for instance),
    and a checkpoint names them with "{e}". 0: it has no such axis."""
    leaves: int = 0
    """The backend is given each matrix as this many, one after the other, of as many equal stretches of the inputs, over which
    ranks may share a sum out; 0: as it is."""
    stretch: Stretch | None = None
    """Where each part lies in a longer tensor of the checkpoint, which several weights may share; None: it has one of its own."""

    @property
    def joined(self) -> tuple[int, ...]:
        """Of all parts together; of one piece, where it is a stack."""
        return (sum(part[0] for part in self.parts), *self.parts[0][1:])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole weight."""
        return (self.stack, *self.joined) if self.stack else self.joined


def laid_out(value: Array, leaves: int) -> Array:
    """A matrix, or a stack of them, as the backend is given it: [matrices, outputs, inputs of a leaf]; as it is where it has no
    `leaves` (`Tensor.leaves`)."""
    if not leaves:
        return value
    *stack, outputs, inputs = value.shape
    apart = value.reshape(*stack, outputs, leaves, inputs // leaves)
    return np.ascontiguousarray(np.moveaxis(apart, -2, -3)).reshape(-1, outputs, inputs // leaves)


@dataclass(frozen=True)
class Work:
    """Scratch by row, [R, width]: it dies with its block. Equal ones of all blocks are one buffer, for blocks run one after the
    other on one stream."""

    name: str
    width: int
    dtype: str = "act"
    across: bool = False
    """It is there only where several ranks add up what is rounded behind the last of them."""

    @property
    def buffer(self) -> str:
        """The name of the buffer, which says its shape."""
        return f"scratch.{self.name}{self.width}" + ("" if self.dtype == "act" else f".{self.dtype}")


def leaves_of(leaves: int, hidden: int) -> tuple[Work, ...]:
    """The scratch that as many leaves of a half's sum lie in, where there are any, and what they add up to before rounding."""
    return (Work(leaves_name(leaves), leaves * hidden, "f32"), Work("total", hidden, "f32", across=True)) if leaves else ()


def leaves_name(leaves: int) -> str:
    """The name of that scratch: halves of one block may differ in how many leaves they have."""
    return f"{leaves}leaves"


@dataclass(frozen=True)
class Norm:
    """How this model normalises."""

    eps: float
    plus_one: bool

    def emit(self, program: ProgramBuilder, weight: str, *, x: str, out: str, unit: Unit, stage: str) -> None:
        """Normalise rows."""
        program.add("rms_norm", unit, stage, x=x, weight=weight, eps=self.eps, plus_one=self.plus_one, out=out)


@dataclass(frozen=True)
class At:
    """Where half a block appends its launches: the program, the layer, and the rows it works on."""

    program: ProgramBuilder
    norm: Norm
    prefix: str
    """Of the layer: what the names of its weights and caches begin with."""
    rows: Pass
    unit: Unit
    """What launches count. After `narrow` it is not that of `rows` any more."""
    stage: str
    x: str
    """The residual stream."""
    row_slot: str | None
    """Slot of each row, negative for rows that carry nothing; None: nobody has said it, so every row counts."""
    scratch: Mapping[str, str]
    """Buffers by the names of declared `Work`; "normed" goes in, "branch" comes out, both [R, H]."""

    def add(self, contract: str, **fields: Any) -> None:
        """Append a launch over the rows."""
        self.program.add(contract, self.unit, self.stage, **fields)

    def own(self, name: str) -> str:
        """Full name of a weight or a cache of this layer."""
        return f"{self.prefix}.{name}"

    def optional(self, name: str) -> str | None:
        """The same of a weight that the layer may lack; None where it does."""
        return self.own(name) if self.own(name) in self.program.memory.weights else None

    def linear_leaves(self, name: str, *, x: str, out: str, leaves: int) -> None:
        """Project scratch as `linear` does, leaf by leaf."""
        bias = self.optional(f"{name}_bias")
        self.add("linear_leaves", x=self.scratch[x], weight=self.own(name), bias=bias, leaves=leaves, out=self.scratch[out])

    def project(self, name: str, *, x: str, leaves: int) -> None:
        """Project scratch into "branch", over `leaves` where there are any."""
        if not leaves:
            self.linear(name, x=x, out="branch")
            return
        self.linear_leaves(name, x=x, out=leaves_name(leaves), leaves=leaves)
        self.sum_leaves(leaves)

    def sum_leaves(self, leaves: int) -> None:
        """Sum as many leaves, which lie in their scratch (`leaves_of`), into "branch"; into "total" where other ranks have more
        of them, which are to be added before the sum is rounded."""
        out = self.scratch["total" if self._goes_on else "branch"]
        self.add("sum_leaves", x=self.scratch[leaves_name(leaves)], leaves=leaves, out=out)

    def join(self) -> None:
        """Sum what the halves of all ranks have left in "branch" or "total", where there are several ranks."""
        if self.program.memory.ranks == 1:
            return
        self.add("all_reduce", x=self.scratch["total" if self._goes_on else "branch"])
        if self._goes_on:
            self.add("sum_leaves", x=self.scratch["total"], leaves=1, out=self.scratch["branch"])

    @property
    def _goes_on(self) -> bool:
        """Whether a sum by leaf goes on over the ranks in float32, and "branch" would round it before its end."""
        return self.scratch.get("total") in self.program.memory.buffers

    def linear(self, name: str, *, x: str, out: str) -> None:
        """Project scratch by the weight `name`, and by the bias `name`_bias where there is one."""
        bias = self.optional(f"{name}_bias")
        self.add("linear", x=self.scratch[x], weight=self.own(name), bias=bias, out=self.scratch[out])


class Kind(Protocol):
    """What half a block declares, whichever half it is. Kinds are frozen and hashable: equal ones are one kind.

    One that can be split over ranks has a method `of_ranks(num_ranks)`, which returns the kind of one rank's share (the same for
    each of them) or raises `CapabilityError` with a clause that says why there is none. The weights of a share are declared as
    those of the whole, smaller along the axes that their `split` names; what a share leaves in "branch" is one term of a sum. One
    with experts may have `experts_of_ranks(num_ranks)` beside it, for shares in which stacks of them have fewer pieces.

    One whose sums can be the same for every number of ranks has a method `in_leaves(most)` as well (and `experts_in_leaves(most)`
    for such shares): the kind whose sum over what ranks share out is made of as many terms as divide that evenly, a power of two
    and `most` at most. Each term is computed like a share's, and `sum_leaves` adds those that a rank has, a subtree of the tree
    that goes on over the ranks. `of_ranks` of that kind divides them among the ranks."""

    def scratch(self, hidden: int) -> tuple[Work, ...]:
        """What it works in besides "normed" and "branch". `hidden`: width of the residual stream."""

    def weights(self, hidden: int) -> tuple[Tensor, ...]:
        """Its weights in canonical form, in the order in which they are loaded."""

    @property
    def contracts(self) -> tuple[str, ...]:
        """What it launches."""


class Mixer(Kind, Protocol):
    """The half in which rows look at other rows: attention, or a recurrence."""

    @property
    def caches(self) -> tuple[CacheKind, ...]:
        """What it keeps between steps."""

    @property
    def carried(self) -> tuple[str, ...]:
        """Scratch that `finish` reads: rows of it are picked where only some rows go on."""

    def keep(self, at: At) -> None:
        """Append as much of `mix` as leaves in the caches what `mix` would, for rows of which nothing else is wanted."""

    def mix(self, at: At) -> None:
        """Append everything that needs all rows: from "normed" to the scratch in `carried`."""

    def finish(self, at: At) -> None:
        """Append the rest, row by row: from the scratch in `carried` to "branch"."""


class FeedForward(Kind, Protocol):
    """The half that takes each row by itself."""

    def emit(self, at: At) -> None:
        """Append the launches from "normed" to "branch"."""


@dataclass(frozen=True)
class Block:
    """One pre-norm decoder block: a mixer, then feed-forward, each added to the residual stream."""

    mixer: Mixer
    feed_forward: FeedForward
    input_norm: bool = True
    """Whether the block normalises the residual stream into "normed" for its mixer. False for a mixer that reads the residual
    stream itself (`At.x`) and normalises it; the block then has no weight "input_norm"."""

    @property
    def caches(self) -> tuple[CacheKind, ...]:
        """What its layer keeps between steps."""
        return self.mixer.caches

    @property
    def contracts(self) -> tuple[str, ...]:
        """What it launches."""
        return ("rms_norm", *self.mixer.contracts, "residual_add", *self.feed_forward.contracts)

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Capabilities of a backend without which it is not computed: those that its halves name, where they name any."""
        return tuple(name for half in (self.mixer, self.feed_forward) for name in getattr(half, "capabilities", ()))

    def weights(self, hidden: int) -> tuple[Tensor, ...]:
        """Norms of [hidden] before each half, and what the halves declare."""
        first, second = (Tensor(name, ((hidden,),), "norm") for name in ("input_norm", "post_norm"))
        before = (first,) if self.input_norm else ()
        return (*before, *self.mixer.weights(hidden), second, *self.feed_forward.weights(hidden))

    def work(self, hidden: int) -> tuple[Work, ...]:
        """Scratch of the whole block."""
        mixer, feed_forward = self.mixer.scratch(hidden), self.feed_forward.scratch(hidden)
        return (Work("normed", hidden), *mixer, Work("branch", hidden), *feed_forward)

    def scratch(self, hidden: int) -> dict[str, str]:
        """Its scratch as names of buffers."""
        return {one.name: one.buffer for one in self.work(hidden)}


def lacking(blocks: Mapping[str, Block], providers: Collection[str]) -> dict[str, str]:
    """Contracts that these blocks launch and that none of the providers has a part in, with a layer that does."""
    owned = {part for name in providers for part in name.split("+")}
    return {contract: prefix for prefix, block in blocks.items() for contract in block.contracts if contract not in owned}


def scratch_buffers(blocks: Iterable[Block], hidden: int, *, across: bool = False) -> list[StepBuffer]:
    """The scratch of all these blocks, each buffer once. `across`: several ranks add up what is rounded behind the last of
    them."""
    work = {one.buffer: one for block in dict.fromkeys(blocks) for one in block.work(hidden) if across or not one.across}
    return [StepBuffer(name, f"R {one.width}", one.dtype) for name, one in work.items()]


@dataclass(frozen=True)
class BlockCall:
    """What a block that computes itself is bound to: it overwrites the rows of `x` and may use the buffers of `scratch`. The
    rows, their cache and the attention over it stay core's and the backend's."""

    program: ProgramBuilder
    block: Block
    norm: Norm
    prefix: str
    x: Any
    rows: Pass
    scratch: Any
    """Buffers by the names of the block's `Work`; like `x` they are a backend's own."""

    @property
    def table(self) -> BoundTable:
        """The kernels of the engine, with its device."""
        return self.program.table

    @property
    def positions(self) -> Any:
        """[N] int32: absolute position of each row."""
        return self.program.memory.buffers[self.rows.positions]

    def attention(self) -> tuple[Launch, Launch]:
        """Bound launches of the backend: rotate what is in `scratch.qkv` and store keys and values; attend into
        `scratch.attended`. Raises `CapabilityError` for a block whose mixer is not attention."""
        bind = getattr(self.block.mixer, "bind", None)
        if bind is None:
            raise CapabilityError(
                f"block {self.prefix} computes itself around attention, got the mixer {type(self.block.mixer).__name__}, wanted "
                "one that binds its attention alone; leave this block to core"
            )
        return cast("tuple[Launch, Launch]", bind(self))


class CustomBlock(Protocol):
    """A decoder block that computes itself as a whole. It is one of the weights, under the block's prefix."""

    @property
    def nbytes(self) -> int: ...
    def bind(self, call: BlockCall) -> Launch:
        """Return the launch that overwrites the rows of `call.x` with what the block makes of them."""


def emit_block(
    program: ProgramBuilder,
    block: Block,
    norm: Norm,
    prefix: str,
    *,
    x: str,
    rows: Pass,
    scratch: Mapping[str, str],
    stage: str,
    narrow: Callable[[At], At] | None = None,
) -> None:
    """One decoder block over `x` in place.

    Each add stands directly before the norm that follows it, so that `residual_add+rms_norm` can take both. A block that lies
    among the weights under its prefix computes itself, all of it. `narrow` is called after `mix`, the last part that needs all
    rows: it picks those that go on, and says where they and what is carried lie, and their unit.
    """
    at = At(program, norm, prefix, rows, rows.unit, stage, x, rows.row_slot, scratch)
    if _custom_block(at, block):
        return
    if block.input_norm:
        _normalise(at, "input_norm")
    block.mixer.mix(at)
    if narrow is not None:
        at = narrow(at)
    block.mixer.finish(at)
    at.join()
    at.add("residual_add", x=at.x, y=at.scratch["branch"])
    _normalise(at, "post_norm")
    block.feed_forward.emit(at)
    at.join()
    at.add("residual_add", x=at.x, y=at.scratch["branch"])


def emit_block_rows(
    program: ProgramBuilder, block: Block, norm: Norm, prefix: str, *, x: str, rows: Pass, scratch: Mapping[str, str], stage: str
) -> None:  # fmt: skip
    """A decoder block over `x` up to its caches, if nothing else of it is needed. One that computes itself computes all
    of it."""
    at = At(program, norm, prefix, rows, rows.unit, stage, x, rows.row_slot, scratch)
    if _custom_block(at, block):
        return
    if block.input_norm:
        _normalise(at, "input_norm")
    block.mixer.keep(at)


def _custom_block(at: At, block: Block) -> bool:
    """Append the block that computes itself, where one lies among the weights under the prefix; whether there is one."""
    program, own = at.program, at.program.memory.weights.get(at.prefix)
    if own is None:
        return False
    held = program.memory.buffers
    buffers = SimpleNamespace(**{name: held[buffer] for name, buffer in at.scratch.items() if buffer in held})
    call = BlockCall(program, block, at.norm, at.prefix, held[at.x], at.rows, buffers)
    program.call("custom_block", cast("CustomBlock", own).bind(call), at.unit, at.stage)
    return True


def _normalise(at: At, weight: str) -> None:
    at.norm.emit(at.program, at.own(weight), x=at.x, out=at.scratch["normed"], unit=at.unit, stage=at.stage)


def narrowed(at: At, *, x: str, unit: Unit, row_slot: str | None = None, **carried: str) -> At:
    """The same place over fewer rows, which lie in `x` and belong to the slots in `row_slot` (see `At`); what is carried lies in
    the buffers given by scratch name."""
    return replace(at, x=x, unit=unit, row_slot=row_slot, scratch={**at.scratch, **carried})
