"""Owns the launches of a decoder block and of the MTP head: a model description turned into nodes of a step program.

The runner writes the target's forward with it and the MTP proposer writes draft passes; both go through one block
function. It never holds activations of its own: every buffer is handed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polydraft.backend import Cache, ForwardMeta, Weight
from polydraft.contracts.base import Unit
from polydraft.contracts.embed import EmbedV1
from polydraft.contracts.linear import LinearV1
from polydraft.contracts.paged_attention import PagedAttentionV1
from polydraft.contracts.residual_add import ResidualAddV1
from polydraft.contracts.rms_norm import RmsNormV1
from polydraft.contracts.rope_kv_write import RopeKvWriteV1
from polydraft.contracts.swiglu import SwigluV1
from polydraft.device import Buffer
from polydraft.models.description import Block
from polydraft.runtime.buffers import Scratch
from polydraft.runtime.program import ProgramBuilder

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
) -> None:
    """One decoder block over `x` in place: x += attention(norm(x)); x += feed_forward(norm(x)).

    Each add stands directly before the norm that follows it, so that `residual_add+rms_norm` can take both.
    """
    unit, attention = rows.unit, block.attention
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
        q_norm=weights.get(f"{prefix}.q_norm"),
        k_norm=weights.get(f"{prefix}.k_norm"),
        rope_dims=attention.rope.dims,
        theta=attention.rope.theta,
        style=attention.rope.style,
        eps=norm.eps,
        **shared,
    )
    program.add("rope_kv_write", rope, unit, room)
    attend = PagedAttentionV1(q=scratch.q, out=scratch.attended, softmax_scale=attention.head_dim**-0.5, **shared)
    program.add("paged_attention", attend, unit, room)
    emit_linear(program, weights[f"{prefix}.o"], x=scratch.attended, out=scratch.branch, unit=unit, room=room)
    program.add("residual_add", ResidualAddV1(x=x, y=scratch.branch), unit, room)
    emit_norm(program, norm, weights[f"{prefix}.post_norm"], x=x, out=scratch.normed, unit=unit, room=room)
    emit_linear(program, weights[f"{prefix}.gate_up"], x=scratch.normed, out=scratch.gate_up, unit=unit, room=room)
    program.add("swiglu", SwigluV1(gate_up=scratch.gate_up, out=scratch.gated), unit, room)
    emit_linear(program, weights[f"{prefix}.down"], x=scratch.gated, out=scratch.branch, unit=unit, room=room)
    program.add("residual_add", ResidualAddV1(x=x, y=scratch.branch), unit, room)
