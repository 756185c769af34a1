"""Owns the launches of a decoder block and of the MTP head: a model description turned into nodes of a step program.

The runner writes the target's forward with it and the MTP proposer writes draft passes; both go through one block
function. It never holds activations of its own: every buffer is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from polydraft.backend import Cache, ForwardMeta, Weight
from polydraft.contracts.base import Limits, Unit
from polydraft.contracts.embed import EmbedV1
from polydraft.contracts.linear import LinearV1
from polydraft.contracts.paged_attention import PagedAttentionV1
from polydraft.contracts.residual_add import ResidualAddV1
from polydraft.contracts.rms_norm import RmsNormV1
from polydraft.contracts.rope_kv_write import RopeKvWriteV1
from polydraft.contracts.swiglu import SwigluV1
from polydraft.device import Buffer, Launch
from polydraft.kernel_table import BoundTable
from polydraft.models.description import Block
from polydraft.runtime.buffers import Scratch
from polydraft.runtime.program import ProgramBuilder, as_version

Weights = Mapping[str, Weight]


@dataclass(frozen=True)
class PassRows:
    """The rows of one pass as the layers see them: what their launch length counts, and the buffers that describe them."""

    unit: Unit
    row_slot: Buffer
    positions: Buffer
    block_table: Buffer
    meta: ForwardMeta
    block_size: int


@dataclass(frozen=True)
class Norm:
    """How this model normalises."""

    eps: float
    plus_one: bool


def emit_embed(program: ProgramBuilder, weights: Weights, *, ids: Buffer, out: Buffer, unit: Unit, room: str) -> None:
    """Embed token ids."""
    program.add("embed", EmbedV1(ids=ids, weight=weights["embed"], out=out), unit, room)


def emit_norm(program: ProgramBuilder, norm: Norm, weight: Weight, *, x: Buffer, out: Buffer, unit: Unit, room: str) -> None:
    """Normalise rows."""
    program.add("rms_norm", RmsNormV1(x=x, weight=weight, eps=norm.eps, plus_one=norm.plus_one, out=out), unit, room)


def emit_linear(
    program: ProgramBuilder,
    weight: Weight,
    *,
    x: Buffer,
    out: Buffer,
    unit: Unit,
    room: str,
    bias: Weight | None = None,
) -> None:
    """Project rows."""
    program.add("linear", LinearV1(x=x, weight=weight, bias=bias, out=out), unit, room)


def attention_args(
    block: Block, norm: Norm, rows: PassRows, cache: Cache, scratch: Scratch, *, q_norm: Weight | None, k_norm: Weight | None
) -> tuple[RopeKvWriteV1, PagedAttentionV1]:
    """The records of a block's attention: from `scratch.qkv`, through `scratch.q`, to `scratch.attended`."""
    attention = block.attention
    shared: dict[str, Any] = {
        "row_slot": rows.row_slot,
        "positions": rows.positions,
        "block_table": rows.block_table,
        "cache": cache,
        "meta": rows.meta,
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "block_size": rows.block_size,
    }
    rope = RopeKvWriteV1(
        qkv=scratch.qkv,
        q_out=scratch.q,
        q_norm=q_norm,
        k_norm=k_norm,
        rope_dims=attention.rope.dims,
        theta=attention.rope.theta,
        style=attention.rope.style,
        eps=norm.eps,
        **shared,
    )
    return rope, PagedAttentionV1(q=scratch.q, out=scratch.attended, softmax_scale=attention.head_dim**-0.5, **shared)


@dataclass(frozen=True)
class BlockCall:
    """What a block that computes itself is bound to: it overwrites the rows of `x` and may use `scratch`. The rows, their cache
    and the attention over it stay core's and the backend's."""

    table: BoundTable
    limits: Limits
    block: Block
    norm: Norm
    x: Buffer
    rows: PassRows
    cache: Cache
    scratch: Scratch

    def attention(self) -> tuple[Launch, Launch]:
        """Bound launches of the backend: rotate what is in `scratch.qkv` and store keys and values; attend into
        `scratch.attended`."""
        records = attention_args(self.block, self.norm, self.rows, self.cache, self.scratch, q_norm=None, k_norm=None)
        launches = []
        for name, args in zip(("rope_kv_write", "paged_attention"), records, strict=True):
            provider, version = self.table.providers[name], self.table.versions[name]
            record = as_version(name, args, version)
            workspace = self.table.workspace(provider.workspace_bytes(record, self.limits))
            launches.append(provider.bind(record, self.limits, workspace))
        return launches[0], launches[1]


class OwnBlock(Protocol):
    """A decoder block that somebody computes as a whole. It lies among the weights, under the block's prefix."""

    @property
    def nbytes(self) -> int: ...
    def bind(self, call: BlockCall) -> Launch:
        """Return the launch that overwrites the rows of `call.x` with what the block makes of them."""


def emit_block(
    program: ProgramBuilder,
    block: Block,
    norm: Norm,
    weights: Weights,
    prefix: str,
    *,
    x: Buffer,
    rows: PassRows,
    cache: Cache,
    scratch: Scratch,
    room: str,
    narrow: Callable[[], tuple[Buffer, Scratch, Unit]] | None = None,
) -> None:
    """One decoder block over `x` in place: x += attention(norm(x)); x += feed_forward(norm(x)).

    Each add stands directly before the norm that follows it, so that `residual_add+rms_norm` can take both. A block that lies
    among the weights under its prefix computes itself, all of it. `narrow` is called behind attention, the last part that needs
    all rows: it picks those that go on, and says where they and what they attended to lie, and their unit.
    """
    own = weights.get(prefix)
    if own is not None:
        call = BlockCall(program.table, program.limits, block, norm, x, rows, cache, scratch)
        program.call("own_block", cast("OwnBlock", own).bind(call), rows.unit, room)
        return
    unit = rows.unit
    emit_norm(program, norm, weights[f"{prefix}.input_norm"], x=x, out=scratch.normed, unit=unit, room=room)
    emit_linear(
        program,
        weights[f"{prefix}.qkv"],
        bias=weights.get(f"{prefix}.qkv_bias"),
        x=scratch.normed,
        out=scratch.qkv,
        unit=unit,
        room=room,
    )
    q_norm, k_norm = weights.get(f"{prefix}.q_norm"), weights.get(f"{prefix}.k_norm")
    rope, attend = attention_args(block, norm, rows, cache, scratch, q_norm=q_norm, k_norm=k_norm)
    program.add("rope_kv_write", rope, unit, room)
    program.add("paged_attention", attend, unit, room)
    if narrow is not None:
        x, scratch, unit = narrow()
    emit_linear(program, weights[f"{prefix}.o"], x=scratch.attended, out=scratch.branch, unit=unit, room=room)
    program.add("residual_add", ResidualAddV1(x=x, y=scratch.branch), unit, room)
    emit_norm(program, norm, weights[f"{prefix}.post_norm"], x=x, out=scratch.normed, unit=unit, room=room)
    emit_linear(program, weights[f"{prefix}.gate_up"], x=scratch.normed, out=scratch.gate_up, unit=unit, room=room)
    program.add("swiglu", SwigluV1(gate_up=scratch.gate_up, out=scratch.gated), unit, room)
    emit_linear(program, weights[f"{prefix}.down"], x=scratch.gated, out=scratch.branch, unit=unit, room=room)
    program.add("residual_add", ResidualAddV1(x=x, y=scratch.branch), unit, room)
